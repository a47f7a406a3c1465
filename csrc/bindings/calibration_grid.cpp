// calibration_grid: argument checks, scratch memory, kernel calls and registration.
//
//   calibration_grid             the whole grid by the dispatcher -> tables [n_criteria, n_gammas, n_temperatures]
//   CalibrationGridRun.run       the same per block of temperatures, for the eager caller: it shows progress and can be
//                                interrupted between two blocks
//   CalibrationGridRun.add_to    adds the samples to running sums, for grids that are computed batch by batch
//
// The grid has no derivatives: a calibration error is a step function of the bins.

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/calibration_grid_samples.h"

namespace focalkern::bindings {
namespace {

class Grid {
 public:
  Grid(const Tensor& input, const Tensor& target, const Tensor& gammas, const Tensor& temperatures, int64_t n_bins,
       int64_t criteria, int64_t estimator, bool input_is_probs, int64_t ignore_index)
      : run_(checked_run(input, target, gammas, temperatures, n_bins, criteria, estimator, input_is_probs,
                         ignore_index)),
        per_block_(run_.per_block()) {}

  int64_t n_temperatures() const { return run_.n_temperatures(); }
  int64_t per_block() const { return per_block_; }

  // Adds the samples to the sums of GridRun::add_to, and their number to rows, one int64 on the CPU. This is one call,
  // so that an interrupt of Python never leaves half of the sums updated.
  void add_to(const Tensor& rows_seen, const std::optional<Tensor>& count, const std::optional<Tensor>& confidence,
              const std::optional<Tensor>& correct, const std::optional<Tensor>& nll,
              const std::optional<Tensor>& brier, bool sketch) {
    const bool binned = (run_.criteria() & (kEce | kMce)) != 0;
    const int64_t n_buckets = binned && count.has_value() ? count->size(-1) : 1;
    const auto check_sum = [&](const char* name, const std::optional<Tensor>& sum, at::ScalarType dtype, bool wanted,
                               bool buckets) {
      std::vector<int64_t> shape{run_.n_gammas(), n_temperatures()};
      if (buckets) shape.push_back(n_buckets);
      TORCH_CHECK_VALUE(sum.has_value() == wanted, kOp, ": ", name, " must be given where the criteria need it");
      TORCH_CHECK_VALUE(!wanted || (sum->scalar_type() == dtype && sum->sizes() == shape && sum->is_contiguous() &&
                                    sum->device() == run_.samples().input.device()),
                        kOp, ": ", name, " must be contiguous ", dtype_name(dtype), " ", at::IntArrayRef(shape),
                        " on the device of input");
      TORCH_CHECK_VALUE(!wanted || !buckets || n_buckets > 0, kOp, ": ", name, " must have a bucket, got ",
                        at::IntArrayRef(shape));
    };
    TORCH_CHECK_VALUE(rows_seen.is_cpu() && rows_seen.scalar_type() == at::kLong && rows_seen.numel() == 1, kOp,
                      ": rows must be one int64 on the CPU");
    check_sum("count", count, at::kLong, binned, true);
    check_sum("confidence", confidence, at::kDouble, binned, true);
    check_sum("correct", correct, at::kLong, binned, true);
    check_sum("nll", nll, at::kDouble, (run_.criteria() & kNll) != 0, false);
    check_sum("brier", brier, at::kDouble, (run_.criteria() & kBrier) != 0, false);
    run_.add_to(count, confidence, correct, nll, brier, sketch);
    *rows_seen.mutable_data_ptr<int64_t>() += run_.samples().rows();
  }

  // [n_criteria, n_gammas, end - begin], on the device of the input.
  Tensor run(int64_t begin, int64_t end) {
    TORCH_CHECK_VALUE(0 <= begin && begin < end && end <= n_temperatures() && end - begin <= per_block_, kOp,
                      ": no such block of temperatures: [", begin, ", ", end, ")");
    const Tensor tables =
        Interface::empty_doubles(run_.samples().input, {count_criteria(run_.criteria()), run_.n_gammas(), end - begin});
    run_.run_block(begin, end, run_.criteria(), /*keep_confidence=*/false, tables.mutable_data_ptr<double>());
    return tables;
  }

 private:
  static GridRun<Interface> checked_run(const Tensor& input, const Tensor& target, const Tensor& gammas,
                                        const Tensor& temperatures, int64_t n_bins, int64_t criteria, int64_t estimator,
                                        bool input_is_probs, int64_t ignore_index) {
    check_tensors(input, target, gammas, temperatures, n_bins, criteria, estimator);
    check_device(kOp, input);
    TORCH_CHECK_VALUE(!input.is_meta(), kOp, ": input must hold data, got a meta tensor");
    const c10::DeviceGuard guard(input.device());
    const Tensor axis = axis_on_host("gammas", gammas, /*above=*/-1);
    const Tensor other = axis_on_host("temperatures", temperatures, /*above=*/0).to(input.device());
    return {prepare(input, target, input_is_probs, ignore_index), axis, other, n_bins, criteria, estimator};
  }

  GridRun<Interface> run_;
  int64_t per_block_;
};

Tensor grid(const Tensor& input, const Tensor& target, const Tensor& gammas, const Tensor& temperatures, int64_t n_bins,
            int64_t criteria, int64_t estimator, bool input_is_probs, int64_t ignore_index) {
  Grid grid(input, target, gammas, temperatures, n_bins, criteria, estimator, input_is_probs, ignore_index);
  std::vector<Tensor> blocks;
  for (int64_t begin = 0; begin < grid.n_temperatures(); begin += grid.per_block()) {
    blocks.push_back(grid.run(begin, std::min(begin + grid.per_block(), grid.n_temperatures())));
  }
  return at::cat(blocks, /*dim=*/2);
}

Tensor grid_meta(const Tensor& input, const Tensor& target, const Tensor& gammas, const Tensor& temperatures,
                 int64_t n_bins, int64_t criteria, int64_t estimator, bool, int64_t) {
  check_tensors(input, target, gammas, temperatures, n_bins, criteria, estimator);
  return at::empty_symint({count_criteria(criteria), gammas.sym_size(0), temperatures.sym_size(0)},
                          input.options().dtype(at::kDouble));
}

}  // namespace

void register_calibration_grid(torch::Library& definitions, pybind11::module_& module) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  definitions.def(kCalibrationGridSchema, tags);
  definitions.impl("calibration_grid", torch::dispatch(c10::DispatchKey::CPU, &grid));
#ifdef FOCALKERN_WITH_CUDA
  definitions.impl("calibration_grid", torch::dispatch(c10::DispatchKey::CUDA, &grid));
#endif
  definitions.impl("calibration_grid", torch::dispatch(c10::DispatchKey::Meta, &grid_meta));

  using release = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<Grid>(module, "CalibrationGridRun")
      .def(pybind11::init<const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, int64_t, bool,
                          int64_t>(),
           release())
      .def_property_readonly("per_block", &Grid::per_block)
      .def("run", &Grid::run, release())
      .def("add_to", &Grid::add_to, release());
}

}  // namespace focalkern::bindings
