// calibration_grid: argument checks, scratch memory, kernel calls and registration.
//
//   calibration_grid             the whole grid by the dispatcher -> tables [n_criteria, n_gammas, n_temperatures]
//   CalibrationGridRun.run       the same per block of temperatures, for the eager caller: it shows progress and can be
//                                interrupted between two blocks
//   CalibrationGridRun.add_to    adds the samples to running sums, for grids that are computed batch by batch
//
// The grid has no derivatives: a calibration error is a step function of the bins.

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "bindings/calibration_grid_samples.h"
#include "math/grid_plan.h"

#ifdef FOCALKERN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace focalkern::bindings {
namespace {

class Grid {
 public:
  Grid(const Tensor& input, const Tensor& target, const Tensor& gammas, const Tensor& temperatures, int64_t n_bins,
       int64_t criteria, int64_t estimator, bool input_is_probs, int64_t ignore_index)
      : n_bins_(n_bins), criteria_(criteria), estimator_(static_cast<BinEstimator>(estimator)) {
    check_tensors(input, target, gammas, temperatures, n_bins, criteria, estimator);
    check_device(kOp, input);
    TORCH_CHECK_VALUE(!input.is_meta(), kOp, ": input must hold data, got a meta tensor");
    const c10::DeviceGuard guard(input.device());
    gammas_ = axis_on_host("gammas", gammas, /*above=*/-1);
    temperatures_ = axis_on_host("temperatures", temperatures, /*above=*/0).to(input.device());
    samples_ = prepare(input, target, input_is_probs, ignore_index);
    per_block_ = std::min(temperatures_.numel(), block_temperatures());
  }

  int64_t n_temperatures() const { return temperatures_.numel(); }
  int64_t per_block() const { return per_block_; }

  // Adds the contributions of the samples: to the tables nll and brier [n_gammas, n_temperatures], if they are among
  // the criteria, and to count, confidence and correct [n_gammas, n_temperatures, n_buckets], if ece or mce are. The
  // buckets are the sketch's, or else n_buckets equal bins. The number of samples goes to rows, one int64 on the
  // CPU. This is one call, so that an interrupt of Python never leaves half of the sums updated.
  void add_to(const Tensor& rows_seen, const std::optional<Tensor>& count, const std::optional<Tensor>& confidence,
              const std::optional<Tensor>& correct, const std::optional<Tensor>& nll,
              const std::optional<Tensor>& brier, bool sketch) {
    const bool binned = (criteria_ & (kEce | kMce)) != 0;
    const int64_t n_buckets = binned && count.has_value() ? count->size(-1) : 1;
    const auto check_sum = [&](const char* name, const std::optional<Tensor>& sum, at::ScalarType dtype, bool wanted,
                               bool buckets) {
      std::vector<int64_t> shape{gammas_.numel(), n_temperatures()};
      if (buckets) shape.push_back(n_buckets);
      TORCH_CHECK_VALUE(sum.has_value() == wanted, kOp, ": ", name, " must be given where the criteria need it");
      TORCH_CHECK_VALUE(!wanted || (sum->scalar_type() == dtype && sum->sizes() == shape && sum->is_contiguous() &&
                                    sum->device() == samples_.input.device()),
                        kOp, ": ", name, " must be contiguous ", dtype, " ", shape, " on the device of input");
    };
    TORCH_CHECK_VALUE(rows_seen.is_cpu() && rows_seen.scalar_type() == at::kLong && rows_seen.numel() == 1, kOp,
                      ": rows must be one int64 on the CPU");
    check_sum("count", count, at::kLong, binned, true);
    check_sum("confidence", confidence, at::kDouble, binned, true);
    check_sum("correct", correct, at::kLong, binned, true);
    check_sum("nll", nll, at::kDouble, (criteria_ & kNll) != 0, false);
    check_sum("brier", brier, at::kDouble, (criteria_ & kBrier) != 0, false);

    const c10::DeviceGuard guard(samples_.input.device());
    const Samples all = samples_;
    const int64_t means = criteria_ & (kNll | kBrier);
    for (int64_t row = 0, row_step = rows_at_once(); row < all.rows(); row += row_step) {
      samples_ = all.slice(row, std::min(row + row_step, all.rows()));
      per_block_ = std::min(n_temperatures(), block_temperatures());
      const auto rows = static_cast<double>(samples_.rows());
      for (int64_t begin = 0; begin < n_temperatures(); begin += per_block_) {
        const int64_t end = std::min(begin + per_block_, n_temperatures());
        const Tensor tables = run_block(begin, end, means, /*keep_confidence=*/binned);
        if (binned) add_buckets(begin, end, *count, *confidence, *correct, sketch);
        int64_t table = 0;
        for (const auto* sum : {&nll, &brier}) {
          if (sum->has_value()) (*sum)->slice(1, begin, end).add_(tables.select(0, table++), rows);
        }
      }
    }
    samples_ = all;
    per_block_ = std::min(n_temperatures(), block_temperatures());
    *rows_seen.mutable_data_ptr<int64_t>() += all.rows();
  }

  // [n_criteria, n_gammas, end - begin], on the device of the input.
  Tensor run(int64_t begin, int64_t end) {
    TORCH_CHECK_VALUE(0 <= begin && begin < end && end <= n_temperatures() && end - begin <= per_block_, kOp,
                      ": no such block of temperatures: [", begin, ", ", end, ")");
    const c10::DeviceGuard guard(samples_.input.device());
    return run_block(begin, end, criteria_, /*keep_confidence=*/false);
  }

 private:
  // The tables of some criteria. With keep_confidence, confidence_ then begins with the confidences.
  Tensor run_block(int64_t begin, int64_t end, int64_t criteria, bool keep_confidence) {
    const Tensor& input = samples_.input;
    const int64_t n_gammas = gammas_.numel(), n_temperatures = end - begin;
    const Tensor tables =
        at::empty({count_criteria(criteria), n_gammas, n_temperatures}, input.options().dtype(at::kDouble));
    dispatch_scalar(input.scalar_type(), [&](auto scalar) {
      using Scalar = decltype(scalar);
      CalibrationGridBlock<Scalar> block{};
      block.samples = samples_.args<Scalar>();
      block.n_gammas = n_gammas;
      block.n_temperatures = n_temperatures;
      block.gammas = gammas_.const_data_ptr<double>();
      block.temperatures = temperatures_.const_data_ptr<double>() + begin;
      block.n_bins = n_bins_;
      block.estimator = estimator_;
      block.table_stride = n_temperatures;
      block.keep_confidence = keep_confidence;
      double* table = tables.mutable_data_ptr<double>();
      const std::array<double**, 4> slots{&block.ece, &block.mce, &block.nll, &block.brier};
      for (size_t i = 0; i < slots.size(); ++i) {
        if ((criteria & kCriteria[i]) == 0) continue;
        *slots[i] = table;
        table += n_gammas * n_temperatures;
      }
      if (!plan_.has_value()) {
        plan_ = calibration_grid_plan(block.gammas, n_gammas, input.size(1), calibration_grid_shares_sums(block));
      }
      if (input.is_cpu()) run_on_cpu(block);
#ifdef FOCALKERN_WITH_CUDA
      if (input.is_cuda()) run_on_cuda(block);
#endif
    });
    return tables;
  }

  void add_buckets(int64_t begin, int64_t end, const Tensor& count, const Tensor& confidence, const Tensor& correct,
                   bool sketch) {
    const Tensor& input = samples_.input;
    const int64_t n_buckets = count.size(-1);
    dispatch_scalar(input.scalar_type(), [&](auto scalar) {
      using Real = compute_t<decltype(scalar)>;
      const CalibrationSums<Real> sums{samples_.rows(),
                                       gammas_.numel(),
                                       end - begin,
                                       static_cast<const Real*>(confidence_.const_data_ptr()),
                                       samples_.correct.const_data_ptr<uint8_t>(),
                                       n_buckets,
                                       sketch,
                                       count.mutable_data_ptr<int64_t>() + begin * n_buckets,
                                       confidence.mutable_data_ptr<double>() + begin * n_buckets,
                                       correct.mutable_data_ptr<int64_t>() + begin * n_buckets,
                                       n_temperatures()};
      if (input.is_cpu()) {
        at::parallel_for(0, sums.n_gammas * sums.n_temperatures, 1,
                         [&](int64_t first, int64_t last) { cpu::calibration_sums(sums, first, last); });
      }
#ifdef FOCALKERN_WITH_CUDA
      if (input.is_cuda()) {
        C10_CUDA_CHECK(
            static_cast<cudaError_t>(cuda::calibration_sums(sums, c10::cuda::getCurrentCUDAStream().stream())));
      }
#endif
    });
  }

  // Rows whose confidences take about 32 MiB at the smallest number of temperatures per block. It depends on the shape
  // alone, so that sums do not depend on the number of threads.
  int64_t rows_at_once() const {
    const int64_t rows = (int64_t{1} << 18) / gammas_.numel();
    return std::clamp<int64_t>(rows, 256, kMaxCalibrationSumRows);
  }

  int64_t block_temperatures() const {
    const Tensor& input = samples_.input;
    const int64_t real_size = input.scalar_type() == at::kDouble ? 8 : 4;
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) {
      return cuda::calibration_grid_block_temperatures(samples_.rows(), input.size(1), gammas_.numel(), real_size);
    }
#endif
    return cpu::calibration_grid_block_temperatures(samples_.rows(), input.size(1), gammas_.numel(), real_size);
  }

  // Scratch memory is reused for the next block: page faults would cost as much as the binning.
  template <typename T>
  T* scratch(Tensor& tensor, int64_t elements) {
    const int64_t bytes = elements * static_cast<int64_t>(sizeof(T));
    if (!tensor.defined() || tensor.numel() < bytes) {
      tensor = Tensor();  // frees a buffer that is too small first
      tensor = at::empty({bytes}, samples_.input.options().dtype(at::kByte));
    }
    return static_cast<T*>(tensor.mutable_data_ptr());
  }

  template <typename Scalar>
  void run_on_cpu(const CalibrationGridBlock<Scalar>& block) {
    using Real = compute_t<Scalar>;
    const int64_t rows = block.samples.rows;
    const int64_t cells = block.n_temperatures * block.n_gammas;
    const int64_t chunk_rows = cpu::calibration_grid_chunk_rows(rows, block.samples.classes);
    const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
    const cpu::CalibrationGridScratch<Scalar> memory{
        scratch<Real>(confidence_, cells * rows),
        block.nll == nullptr ? nullptr : scratch<double>(nll_, chunks * cells),
        block.brier == nullptr ? nullptr : scratch<double>(brier_, chunks * cells)};
    at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      cpu::calibration_grid_confidences(block, *plan_, memory, begin, end);
    });
    at::parallel_for(0, cells, 1,
                     [&](int64_t begin, int64_t end) { cpu::calibration_grid_cells(block, memory, begin, end); });
  }

#ifdef FOCALKERN_WITH_CUDA
  template <typename Scalar>
  void run_on_cuda(const CalibrationGridBlock<Scalar>& block) {
    const int64_t bytes =
        cuda::calibration_grid_workspace(block.samples.rows, block.samples.classes, block.n_gammas,
                                         block.n_temperatures, block.n_bins, sizeof(compute_t<Scalar>));
    C10_CUDA_CHECK(static_cast<cudaError_t>(cuda::calibration_grid_block(
        block, *plan_, scratch<uint8_t>(confidence_, bytes), c10::cuda::getCurrentCUDAStream().stream())));
  }
#endif

  int64_t n_bins_, criteria_, per_block_ = 0;
  BinEstimator estimator_;
  Tensor gammas_, temperatures_;  // on the CPU, and on the device of the input
  Samples samples_;
  Tensor confidence_, nll_, brier_;
  std::optional<CalibrationGridPlan> plan_;
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
