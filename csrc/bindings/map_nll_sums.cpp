// Sums of the NLL of the focal calibration map and its derivatives, for the fits of many networks at once.
//
// Without autograd and argument checks: `fit` calls it with checked rows.

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "bindings/common.h"
#include "bindings/map_nll_sums.h"
#include "kernels/map_nll_sums.h"

namespace focalkern::bindings {
namespace {

// Rows per partial sum; its bounds do not depend on the number of threads.
int64_t rows_at_once(int64_t classes) { return std::max<int64_t>(64, (int64_t{1} << 16) / classes / 16 * 16); }

// [B, 7]: the sums of kernels/map_nll_sums.h over the rows of each network; 0 for a network whose beta is NaN.
Tensor map_nll_sums(const Tensor& given, const Tensor& given_target, const Tensor& given_share,
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
                    "], got ", target.scalar_type(), " ", target.sizes());
  TORCH_CHECK_VALUE(is_of_rows(share, at::kDouble), op, ": share must be float64 [B, N] = [", networks, ", ", n_rows,
                    "], got ", share.scalar_type(), " ", share.sizes());
  for (const Tensor* one : {&betas, gammas ? &*gammas : &betas}) {
    TORCH_CHECK_VALUE(one->is_cpu() && one->scalar_type() == at::kDouble && one->is_contiguous() &&
                          one->sizes() == at::IntArrayRef({networks}),
                      op, ": gammas and betas must be float64 [B] = [", networks, "], got ", one->scalar_type(), " ",
                      one->sizes());
  }
  const int64_t* labels = target.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < target.numel(); ++i) {
    TORCH_CHECK_INDEX(labels[i] >= 0 && labels[i] < classes, op, ": target must be from 0 to ", classes - 1, ", got ",
                      labels[i], " at row ", i % n_rows, " of network ", i / n_rows);
  }
  const double* gamma = pointer_or_null<double>(gammas);
  const double* beta = betas.const_data_ptr<double>();
  const int64_t at_once = rows_at_once(classes), chunks = (n_rows + at_once - 1) / at_once;
  const Tensor sums = at::zeros({networks, chunks, kMapNllSums}, at::kDouble);
  double* const to = sums.mutable_data_ptr<double>();
  dispatch_scalar(input.scalar_type(), [&](auto scalar) {
    using Scalar = decltype(scalar);
    const Scalar* data = static_cast<const Scalar*>(input.const_data_ptr());
    at::parallel_for(0, networks * chunks, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t network = i / chunks, row = i % chunks * at_once;
        if (std::isnan(beta[network])) continue;
        const MapNllRows<Scalar> rows{data + network * n_rows * classes, labels + network * n_rows,
                                      share.const_data_ptr<double>() + network * n_rows, classes, is_probs};
        cpu::map_nll_sums(rows, gamma == nullptr ? nullptr : gamma + network, beta[network], row,
                          std::min(n_rows, row + at_once), to + i * kMapNllSums);
      }
    });
  });
  const Tensor total = at::zeros({networks, kMapNllSums}, at::kDouble);
  double* const sum = total.mutable_data_ptr<double>();
  for (int64_t i = 0; i < sums.numel(); ++i) {
    sum[i / (chunks * kMapNllSums) * kMapNllSums + i % kMapNllSums] += to[i];
  }
  return total;
}

}  // namespace

void register_map_nll_sums(pybind11::module_& module) {
  module.def("map_nll_sums", &map_nll_sums, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace focalkern::bindings
