// Sums over batches: from checked tensors to the kernels of csrc/cpu, and of csrc/cuda for row_statistics_out.
//
//   map_nll_sums_out  fills [B, 7]: the NLL of the focal calibration map of each network, with its derivatives
//   mmce_add_out      adds the calibration error of a batch to its cross-entropy, and fills a coefficient per row
//   row_sums_out, row_statistics_out   fill the results of bindings/row_sums_run.h
//
// All tensors are contiguous.

#include "bindings/map_nll_run.h"
#include "bindings/mmce_run.h"
#include "bindings/row_sums_run.h"
#include "stable/interface.h"

namespace focalkern::stable {
namespace {

FK_KERNELS_FRAGMENT(m) {
  m.def(
      "map_nll_sums_out(Tensor input, Tensor target, Tensor share, Tensor? gammas, Tensor betas, bool is_probs, "
      "Tensor(a!) total) -> ()");
  m.def(
      "mmce_add_out(Tensor saved, Tensor labels, Tensor(a!) gamma, Tensor(b!) loss, float coefficient, bool weighted, "
      "float bandwidth, bool mean, int ignore_index) -> ()");
  m.def("row_sums_out(Tensor input, Tensor(a!) sums, Tensor(b!) index) -> ()");
  m.def(
      "row_statistics_out(Tensor input, Tensor target, int ignore_index, Tensor(a!) log_p, Tensor(b!) entropy, "
      "Tensor(c!) lse, Tensor(d!) predicted, Tensor(e!) correct, Tensor(f!) counts) -> ()");
}

FK_KERNELS_IMPL(CPU, m) {
  m.impl("map_nll_sums_out", TORCH_BOX(&bindings::map_nll_sums<Interface>));
  m.impl("mmce_add_out", TORCH_BOX(&bindings::add_mmce<Interface>));
  m.impl("row_sums_out", TORCH_BOX(&bindings::row_sums<Interface>));
  m.impl("row_statistics_out", TORCH_BOX(&bindings::row_statistics<Interface>));
}

#ifdef FOCALKERN_WITH_CUDA
FK_KERNELS_IMPL(CUDA, m) { m.impl("row_statistics_out", TORCH_BOX(&bindings::row_statistics<Interface>)); }
#endif

}  // namespace
}  // namespace focalkern::stable
