// Blocks and running sums of the calibration grid, for torch's interface and its stable one: from checked tensors to
// kernel calls. `Torch` is the interface: bindings/common.h, stable/common.h.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <utility>

#include "kernels/calibration_grid.h"
#include "math/grid_plan.h"

namespace focalkern::bindings {

// Criteria in the order of their tables, as bits of `criteria`.
enum Criterion : int64_t { kEce = 1, kMce = 2, kNll = 4, kBrier = 8 };
constexpr std::array<int64_t, 4> kCriteria{kEce, kMce, kNll, kBrier};

inline int64_t count_criteria(int64_t criteria) {
  return std::count_if(kCriteria.begin(), kCriteria.end(), [=](int64_t bit) { return (criteria & bit) != 0; });
}

// The samples that count, with the numbers that every block needs.
template <typename Torch>
struct GridSamples {
  using Tensor = typename Torch::Tensor;
  Tensor input;                // [N, C], classes adjacent
  Tensor target;               // [N]
  std::optional<Tensor> kept;  // [rows] int64, or undefined if all N rows count
  Tensor top;                  // [rows] int32
  Tensor correct;              // [rows] uint8
  bool input_is_probs;

  int64_t rows() const { return top.numel(); }

  template <typename Scalar>
  CalibrationGridSamples<Scalar> args() const {
    return {rows(),
            input.size(1),
            static_cast<const Scalar*>(input.const_data_ptr()),
            input.stride(0),
            input_is_probs,
            Torch::labels(target),
            kept.has_value() ? static_cast<const int64_t*>(kept->const_data_ptr()) : nullptr,
            static_cast<int32_t*>(top.mutable_data_ptr()),
            static_cast<uint8_t*>(correct.mutable_data_ptr())};
  }

  // A range of them, without a copy.
  GridSamples slice(int64_t begin, int64_t end) const {
    GridSamples part = *this;
    if (kept.has_value()) {
      part.kept = Torch::slice(*kept, 0, begin, end);
    } else {
      part.input = Torch::slice(input, 0, begin, end);
      part.target = Torch::slice(target, 0, begin, end);
    }
    part.top = Torch::slice(top, 0, begin, end);
    part.correct = Torch::slice(correct, 0, begin, end);
    return part;
  }

  // Checks the rows and writes top and correct; returns the first problem.
  int64_t prepare() const {
    int64_t problem = kNoRowProblem;
    Torch::dispatch(input, [&](auto scalar) {
      const auto samples = args<decltype(scalar)>();
#ifdef FOCALKERN_WITH_CUDA
      if (input.is_cuda()) {
        const typename Torch::CudaScope device(input);
        const Tensor first = Torch::empty_bytes(input, sizeof(problem));
        device.check(
            "calibration_grid",
            cuda::calibration_grid_prepare(samples, static_cast<int64_t*>(first.mutable_data_ptr()), device.stream()));
        problem = *static_cast<const int64_t*>(Torch::on_host(first).const_data_ptr());
        return;
      }
#endif
      std::atomic<int64_t> least{kNoRowProblem};
      Torch::parallel_for(0, rows(), 256, [&](int64_t begin, int64_t end) {
        const int64_t found = cpu::calibration_grid_prepare(samples, begin, end);
        int64_t known = least.load();
        while (found < known && !least.compare_exchange_weak(known, found)) {
        }
      });
      problem = least.load();
    });
    return problem;
  }
};

template <typename Torch>
class GridRun {
 public:
  using Tensor = typename Torch::Tensor;
  using OptionalTensor = std::optional<Tensor>;

  // gammas lie on the host, temperatures on the device of the input.
  GridRun(GridSamples<Torch> samples, Tensor gammas, Tensor temperatures, int64_t n_bins, int64_t criteria,
          int64_t estimator)
      : n_bins_(n_bins),
        criteria_(criteria),
        estimator_(static_cast<BinEstimator>(estimator)),
        gammas_(std::move(gammas)),
        temperatures_(std::move(temperatures)),
        samples_(std::move(samples)) {}

  const GridSamples<Torch>& samples() const { return samples_; }
  int64_t n_gammas() const { return gammas_.numel(); }
  int64_t n_temperatures() const { return temperatures_.numel(); }
  int64_t criteria() const { return criteria_; }

  int64_t per_block() const {
    const Tensor& input = samples_.input;
    const int64_t real_size = input.element_size() == sizeof(double) ? sizeof(double) : sizeof(float);
    auto* most = &cpu::calibration_grid_block_temperatures;
#ifdef FOCALKERN_WITH_CUDA
    if (input.is_cuda()) most = &cuda::calibration_grid_block_temperatures;
#endif
    return std::min(n_temperatures(), most(samples_.rows(), input.size(1), n_gammas(), real_size));
  }

  const CalibrationGridPlan& plan() {
    if (!plan_.has_value()) {
      Torch::dispatch(samples_.input, [&](auto scalar) {
        double unused = 0;
        const auto block = block_of<decltype(scalar)>(0, 1, criteria_, &unused);
        plan_ = calibration_grid_plan(block.gammas, n_gammas(), samples_.input.size(1),
                                      calibration_grid_shares_sums(block));
      });
    }
    return *plan_;
  }

  // Of an earlier run with the same gammas, classes and criteria.
  void reuse(CalibrationGridPlan plan, Tensor scratch) {
    plan_ = std::move(plan);
    scratch_ = std::move(scratch);
  }

  // Bytes of scratch memory of the largest block.
  int64_t scratch_bytes() const {
    int64_t bytes = 0;
    Torch::dispatch(samples_.input, [&](auto scalar) {
      double unused = 0;
      bytes = scratch_of(block_of<decltype(scalar)>(0, per_block(), criteria_, &unused));
    });
    return bytes;
  }

  // The tables [n_criteria, n_gammas, end - begin] of some criteria. With keep_confidence, the scratch memory then
  // begins with the confidences.
  void run_block(int64_t begin, int64_t end, int64_t criteria, bool keep_confidence, double* tables) {
    const Tensor& input = samples_.input;
    Torch::dispatch(input, [&](auto scalar) {
      auto block = block_of<decltype(scalar)>(begin, end, criteria, tables);
      block.keep_confidence = keep_confidence;
      // Reused for the next block: page faults would cost as much as the binning.
      const int64_t bytes = scratch_of(block);
      if (!scratch_.has_value() || scratch_->numel() < bytes) {
        scratch_.reset();  // frees a buffer that is too small first
        scratch_ = Torch::empty_bytes(input, bytes);
      }
      void* const memory = scratch_->mutable_data_ptr();
#ifdef FOCALKERN_WITH_CUDA
      if (input.is_cuda()) {
        const typename Torch::CudaScope device(input);
        return device.check("calibration_grid", cuda::calibration_grid_block(block, plan(), memory, device.stream()));
      }
#endif
      run_on_cpu(block, memory);
    });
  }

  // Adds the contributions of the samples: to the tables nll and brier [n_gammas, n_temperatures], if they are among
  // the criteria, and to count, confidence and correct [n_gammas, n_temperatures, n_buckets], if ece or mce are. The
  // buckets are the sketch's, or else n_buckets equal bins.
  void add_to(const OptionalTensor& count, const OptionalTensor& confidence, const OptionalTensor& correct,
              const OptionalTensor& nll, const OptionalTensor& brier, bool sketch) {
    const bool binned = (criteria_ & (kEce | kMce)) != 0;
    const GridSamples<Torch> all = samples_;
    const int64_t means = criteria_ & (kNll | kBrier);
    // Rows whose confidences take about 32 MiB at the smallest number of temperatures per block. It depends on the
    // shape alone, so that sums do not depend on the number of threads.
    const int64_t row_step = std::clamp<int64_t>((int64_t{1} << 18) / n_gammas(), 256, kMaxCalibrationSumRows);
    for (int64_t row = 0; row < all.rows(); row += row_step) {
      samples_ = all.slice(row, std::min(row + row_step, all.rows()));
      const auto rows = static_cast<double>(samples_.rows());
      const int64_t step = per_block();
      for (int64_t begin = 0; begin < n_temperatures(); begin += step) {
        const int64_t end = std::min(begin + step, n_temperatures());
        const Tensor tables = Torch::empty_doubles(samples_.input, {count_criteria(means), n_gammas(), end - begin});
        run_block(begin, end, means, /*keep_confidence=*/binned, static_cast<double*>(tables.mutable_data_ptr()));
        if (binned) add_buckets(begin, end, *count, *confidence, *correct, sketch);
        int64_t table = 0;
        for (const auto* sum : {&nll, &brier}) {
          if (sum->has_value()) {
            Torch::add_to(Torch::slice(**sum, 1, begin, end), Torch::select(tables, table++), rows);
          }
        }
      }
    }
    samples_ = all;
  }

 private:
  template <typename Scalar>
  CalibrationGridBlock<Scalar> block_of(int64_t begin, int64_t end, int64_t criteria, double* tables) const {
    CalibrationGridBlock<Scalar> block{};
    block.samples = samples_.template args<Scalar>();
    block.n_gammas = n_gammas();
    block.n_temperatures = end - begin;
    block.gammas = static_cast<const double*>(gammas_.const_data_ptr());
    block.temperatures = static_cast<const double*>(temperatures_.const_data_ptr()) + begin;
    block.n_bins = n_bins_;
    block.estimator = estimator_;
    block.table_stride = block.n_temperatures;
    const std::array<double**, 4> slots{&block.ece, &block.mce, &block.nll, &block.brier};
    for (size_t i = 0; i < slots.size(); ++i) {
      if ((criteria & kCriteria[i]) == 0) continue;
      *slots[i] = tables;
      tables += block.n_gammas * block.n_temperatures;
    }
    return block;
  }

  template <typename Scalar>
  static int64_t chunks_of(const CalibrationGridBlock<Scalar>& block) {
    const int64_t rows = block.samples.rows, step = cpu::calibration_grid_chunk_rows(rows, block.samples.classes);
    return (rows + step - 1) / step;
  }

  // Elements of double that hold the confidences of a block.
  template <typename Scalar>
  static int64_t confidence_doubles(const CalibrationGridBlock<Scalar>& block) {
    const int64_t elements = block.n_temperatures * block.n_gammas * block.samples.rows;
    return (elements * static_cast<int64_t>(sizeof(compute_t<Scalar>)) + 7) / 8;
  }

  // Bytes of the scratch memory of a block.
  template <typename Scalar>
  int64_t scratch_of(const CalibrationGridBlock<Scalar>& block) const {
#ifdef FOCALKERN_WITH_CUDA
    if (samples_.input.is_cuda()) {
      return cuda::calibration_grid_workspace(block.samples.rows, block.samples.classes, block.n_gammas,
                                              block.n_temperatures, block.n_bins, sizeof(compute_t<Scalar>));
    }
#endif
    const int64_t sums = (block.nll != nullptr) + (block.brier != nullptr);
    return 8 * (confidence_doubles(block) + sums * chunks_of(block) * block.n_temperatures * block.n_gammas);
  }

  template <typename Scalar>
  void run_on_cpu(const CalibrationGridBlock<Scalar>& block, void* scratch) {
    const int64_t cells = block.n_temperatures * block.n_gammas, chunks = chunks_of(block);
    double* sums = static_cast<double*>(scratch) + confidence_doubles(block);
    const auto next = [&](const double* table) { return table ? std::exchange(sums, sums + chunks * cells) : nullptr; };
    cpu::CalibrationGridScratch<Scalar> memory{static_cast<compute_t<Scalar>*>(scratch), nullptr, nullptr};
    memory.nll = next(block.nll);
    memory.brier = next(block.brier);
    const CalibrationGridPlan& kinds = plan();
    Torch::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      cpu::calibration_grid_confidences(block, kinds, memory, begin, end);
    });
    Torch::parallel_for(0, cells, 1,
                        [&](int64_t begin, int64_t end) { cpu::calibration_grid_cells(block, memory, begin, end); });
  }

  void add_buckets(int64_t begin, int64_t end, const Tensor& count, const Tensor& confidence, const Tensor& correct,
                   bool sketch) {
    const Tensor& input = samples_.input;
    const int64_t n_buckets = count.size(2);
    Torch::dispatch(input, [&](auto scalar) {
      using Real = compute_t<decltype(scalar)>;
      const CalibrationSums<Real> sums{samples_.rows(),
                                       n_gammas(),
                                       end - begin,
                                       static_cast<const Real*>(scratch_->const_data_ptr()),
                                       static_cast<const uint8_t*>(samples_.correct.const_data_ptr()),
                                       n_buckets,
                                       sketch,
                                       static_cast<int64_t*>(count.mutable_data_ptr()) + begin * n_buckets,
                                       static_cast<double*>(confidence.mutable_data_ptr()) + begin * n_buckets,
                                       static_cast<int64_t*>(correct.mutable_data_ptr()) + begin * n_buckets,
                                       n_temperatures()};
#ifdef FOCALKERN_WITH_CUDA
      if (input.is_cuda()) {
        const typename Torch::CudaScope device(input);
        return device.check("calibration_grid", cuda::calibration_sums(sums, device.stream()));
      }
#endif
      Torch::parallel_for(0, sums.n_gammas * sums.n_temperatures, 1,
                          [&](int64_t first, int64_t last) { cpu::calibration_sums(sums, first, last); });
    });
  }

  int64_t n_bins_, criteria_;
  BinEstimator estimator_;
  Tensor gammas_, temperatures_;
  GridSamples<Torch> samples_;
  OptionalTensor scratch_;  // bytes
  std::optional<CalibrationGridPlan> plan_;
};

}  // namespace focalkern::bindings
