// Sums of the NLL of the focal calibration map and its derivatives, for the fits of many networks at once.
//
// Without autograd and argument checks: `fit` calls it with checked rows.

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "bindings/interface.h"
#include "bindings/map_nll_run.h"
#include "bindings/map_nll_sums.h"

namespace focalkern::bindings {
namespace {

// [B, 7]: the sums of kernels/map_nll_sums.h over the rows of each network; 0 for a network whose beta is NaN.
Tensor checked_map_nll_sums(const Tensor& given, const Tensor& given_target, const Tensor& given_share,
                            const OptionalTensor& gammas, const Tensor& betas, bool is_probs) {
  const char* op = "map_nll_sums";
  check_floating(op, "input", given);
  check_device(op, given);
  TORCH_CHECK_VALUE(given.is_cpu(), op, ": input must be on the CPU, got ", given.device());
  TORCH_CHECK_VALUE(given.dim() == 3 && given.size(2) >= 2, op, ": input must be [B, N, C] with C >= 2, got ",
                    given.sizes());
  const Tensor input = given.contiguous(), target = given_target.contiguous(), share = given_share.contiguous();
  const int64_t networks = input.size(0), n_rows = input.size(1), classes = input.size(2);
  const auto is_of_rows = [&](const Tensor& tensor, at::ScalarType dtype) {
    return tensor.is_cpu() && tensor.scalar_type() == dtype && tensor.sizes() == at::IntArrayRef({networks, n_rows});
  };
  TORCH_CHECK_VALUE(is_of_rows(target, at::kLong), op, ": target must be int64 [B, N] = [", networks, ", ", n_rows,
                    "], got ", dtype_name(target.scalar_type()), " ", target.sizes());
  TORCH_CHECK_VALUE(is_of_rows(share, at::kDouble), op, ": share must be float64 [B, N] = [", networks, ", ", n_rows,
                    "], got ", dtype_name(share.scalar_type()), " ", share.sizes());
  for (const Tensor* one : {&betas, gammas ? &*gammas : &betas}) {
    TORCH_CHECK_VALUE(one->is_cpu() && one->scalar_type() == at::kDouble && one->is_contiguous() &&
                          one->sizes() == at::IntArrayRef({networks}),
                      op, ": gammas and betas must be float64 [B] = [", networks, "], got ",
                      dtype_name(one->scalar_type()), " ", one->sizes());
  }
  const int64_t* labels = target.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < target.numel(); ++i) {
    TORCH_CHECK_INDEX(labels[i] >= 0 && labels[i] < classes, op, ": target must be from 0 to ", classes - 1, ", got ",
                      labels[i], " at row ", i % n_rows, " of network ", i / n_rows);
  }
  const Tensor total = at::empty({networks, kMapNllSums}, at::kDouble);
  map_nll_sums<Interface>(input, target, share, gammas, betas, is_probs, total);
  return total;
}

}  // namespace

void register_map_nll_sums(pybind11::module_& module) {
  module.def("map_nll_sums", &checked_map_nll_sums, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace focalkern::bindings
