// The focal calibration map of [rows, classes] inputs, forward and backward, and its binary form, elementwise.
//
// A group of threads shares a row: lanes of a warp for few classes, a warp, or the block. Passes over a row, with t its
// largest class:
//   1. t, and the largest of the others      2. sum of exp over the others
//   3. log(p_k / p_t), and sums              4. normalise and write
// Memory: the inputs are read once and the outputs written once as long as each thread's part of a row fits registers
// (4096 classes forward, 2048 backward, half of that in double); longer rows are read again by each pass. Backward, a
// warp that has a row of many classes keeps its inputs, and computes twice what passes 3 and 4 have in common.

#include "cuda/common.cuh"
#include "kernels.h"
#include "math/calibration_map.h"

namespace focalkern::cuda {
namespace {

// A thread's part of a row: values for the classes index, index + lanes, ... With `capacity` 0 nothing is kept, and
// whatever a pass leaves behind is lost to the next.
template <typename Real, int capacity>
struct RowPart {
  static constexpr bool kKept = capacity > 0;
  int classes;
  int index;
  int lanes;
  Real at[kKept ? capacity : 1];

  // f(j, k, value) for every class j, the k-th of this thread; values are loaded by load(j).
  template <typename Load, typename Function>
  __device__ __forceinline__ void each(Load load, Function f) {
    if constexpr (kKept) {
#pragma unroll
      for (int k = 0; k < capacity; ++k) {
        const int j = index + k * lanes;
        if (j < classes) f(j, k, at[k]);
      }
    } else {
      for (int j = index; j < classes; j += lanes) {
        Real value = load(j);
        f(j, 0, value);
      }
    }
  }
  template <typename Load>
  __device__ __forceinline__ void load_all(Load load) {
    if constexpr (kKept) {
#pragma unroll
      for (int k = 0; k < capacity; ++k) {
        const int j = index + k * lanes;
        if (j < classes) at[k] = load(j);
      }
    }
  }
};

template <typename Scalar>
constexpr int kForwardSmall = sizeof(Scalar) == sizeof(double) ? 8 : 16;
template <typename Scalar>
constexpr int kBackwardSmall = sizeof(Scalar) == sizeof(double) ? 4 : 8;
template <typename Scalar>
constexpr int kLarge = sizeof(Scalar) == sizeof(double) ? 16 : 32;

// Terms in double only where there may be many of them.
template <typename Real, bool few>
using SumOf = std::conditional_t<few, Real, double>;

// What passes 1 and 2 find out.
template <typename Real>
struct RowStart {
  bool valid;
  int top;
  Real shift;  // largest of the other inputs
  Real beta;
  Real gap;
  MapRow<Real> map;
};

template <typename Scalar>
__device__ __forceinline__ compute_t<Scalar> logit_at(const CalibrationMapArgs<Scalar>& args, const Scalar* input,
                                                      int j) {
  const compute_t<Scalar> value = load_as_compute(input[j]);
  return args.input_is_probs ? logit_of_probability(value) : value;
}

// Every thread of the block calls it, with `exists` false where its group has no row. Afterwards the part holds the
// row as logits.
template <typename Scalar, int capacity>
__device__ __forceinline__ RowStart<compute_t<Scalar>> start_row(const CalibrationMapArgs<Scalar>& args, int64_t row,
                                                                 bool exists, RowPart<compute_t<Scalar>, capacity>& x,
                                                                 const RowGroup& group) {
  using Real = compute_t<Scalar>;
  using Sum = SumOf<Real, capacity != 0>;
  const Scalar* input = args.input + row * args.classes;
  const auto load = [&](int j) { return logit_at(args, input, j); };
  RowStart<Real> start = {};
  const double gamma = exists ? args.gamma_of(row) : 0.0;
  const double temperature = exists ? args.temperature_of(row) : 1.0;
  start.valid = exists && map_parameters_valid(gamma, temperature);
  start.beta = inverse_temperature<Real>(temperature);
  if (!exists) x.classes = 0;  // no class, and every pass is empty

  if (args.input_is_probs) {
    double sum = 0;
    for (int j = x.index; j < x.classes; j += x.lanes) sum += static_cast<double>(load_as_compute(input[j]));
    sum = group.sum(sum);
    const double tolerance = probability_sum_tolerance<Scalar>();
    start.valid = start.valid && sum >= 1 - tolerance && sum <= 1 + tolerance;
  }

  x.load_all(load);
  // The largest and its first class, then the largest of the others.
  Real top_x = -kInfinity<Real>;
  int top = INT32_MAX;
  x.each(load, [&](int j, int, Real& value) {
    if (value > top_x) {
      top_x = value;
      top = j;
    }
  });
  const Real row_top = group.max(top_x);
  start.top = group.min(top_x == row_top ? top : INT32_MAX);
  Real next = -kInfinity<Real>;
  x.each(load, [&](int j, int, Real& value) {
    if (j != start.top) next = fmax(next, value);
  });
  next = group.max(next);
  // Also false for a row of NaN; a NaN beside numbers shows in the sum of exponentials.
  start.valid = start.valid && row_top > -kInfinity<Real> && row_top < kInfinity<Real>;
  // No other class can occur: any number serves as the shift.
  start.shift = next > -kInfinity<Real> ? next : row_top;
  const Real lowest_gap = -largest_finite<Real>() / Real(16);
  start.gap = fmax((start.shift - row_top) * start.beta, lowest_gap);

  Sum sum = 0;
  x.each(load, [&](int j, int, Real& value) {
    const Real e = exponential((value - start.shift) * start.beta);
    if (j != start.top) sum += e;
  });
  const auto others = static_cast<Real>(group.sum(sum));
  start.valid = start.valid && others == others;
  start.map = map_row(start.gap, others > Real(0) ? others : Real(1), gamma);
  return start;
}

template <typename Scalar, int capacity>
__global__ __launch_bounds__(kBlock, 2) void calibration_map_forward_kernel(
    const __grid_constant__ CalibrationMapForward<Scalar> args, int lanes) {
  using Real = compute_t<Scalar>;
  using Sum = SumOf<Real, capacity != 0>;
  __shared__ double scratch[kWarpsPerBlock];
  const RowGroup group = {lanes, scratch};
  const int thread = static_cast<int>(threadIdx.x);
  const int rows_at_once = kBlock / lanes;
  const bool log_output = args.log_output;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < args.rows;
       first += static_cast<int64_t>(gridDim.x) * rows_at_once) {
    const int64_t row = first + thread / lanes;
    const bool exists = row < args.rows;
    RowPart<Real, capacity> x;
    x.classes = static_cast<int>(args.classes);
    x.index = thread % lanes;
    x.lanes = lanes;
    const RowStart<Real> start = start_row(args, row, exists, x, group);
    const Scalar* input = args.input + row * args.classes;
    const auto load = [&](int j) { return logit_at(args, input, j); };
    const auto log_ratio_of = [&](Real logit) {
      const Real y = (logit - start.shift) * start.beta;
      return map_log_ratio(y, exponential(y), start.map.gamma, start.map.q_scale, start.map.log_q_offset,
                           start.map.ratio_offset);
    };

    // Without the logarithm, where the logarithm itself is not wanted.
    const auto ratio_of = [&](Real logit) {
      const Real y = (logit - start.shift) * start.beta;
      return map_ratio(y, exponential(y), start.map.gamma, start.map.q_scale, start.map.log_q_offset,
                       start.map.ratio_offset);
    };

    // What is written, before it is normalised.
    Sum sum = 0;
    x.each(load, [&](int j, int, Real& value) {
      Real ratio;
      if (log_output) {
        value = log_ratio_of(value);
        ratio = exponential(value);
      } else {
        value = ratio = ratio_of(value);
      }
      if (j != start.top) sum += ratio;
    });
    const auto ratio_sum = static_cast<Real>(group.sum(sum));
    const Real offset = Real(0) - log_one_plus(ratio_sum);  // log p_t; 0, not -0
    const Real scale = Real(1) / (Real(1) + ratio_sum);     // p_t
    x.each(load, [&](int j, int, Real& value) {
      Real result = value;
      if constexpr (capacity == 0) {
        result = log_output ? log_ratio_of(value) : ratio_of(value);
      }
      result = log_output ? result + offset : result * scale;
      if (j == start.top) result = log_output ? offset : scale;
      if (!start.valid) result = kNaN<Real>;
      const int64_t at = row * args.classes + j;
      if (args.output != nullptr) {
        args.output[at] = Store<Scalar>::from_compute(result);
      } else {
        args.output_wide[at] = result;
      }
    });
  }
}

template <typename Scalar, int capacity>
__global__ __launch_bounds__(kBlock, capacity == kLarge<Scalar> ? 1 : 2) void calibration_map_backward_kernel(
    const __grid_constant__ CalibrationMapBackward<Scalar> args, int lanes) {
  using Real = compute_t<Scalar>;
  using Sum = SumOf<Real, capacity != 0>;
  __shared__ double scratch[kWarpsPerBlock];
  const RowGroup group = {lanes, scratch};
  const int thread = static_cast<int>(threadIdx.x);
  const int rows_at_once = kBlock / lanes;
  const bool log_output = args.log_output;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < args.rows;
       first += static_cast<int64_t>(gridDim.x) * rows_at_once) {
    const int64_t row = first + thread / lanes;
    const bool exists = row < args.rows;
    RowPart<Real, capacity> x;
    x.classes = static_cast<int>(args.classes);
    x.index = thread % lanes;
    x.lanes = lanes;
    const RowStart<Real> start = start_row(args, row, exists, x, group);
    const MapRow<Real>& map = start.map;
    const int64_t row_offset = row * args.classes;
    const Scalar* input = args.input + row_offset;
    const auto load = [&](int j) { return logit_at(args, input, j); };
    const auto grad_output = [&](int j) {
      return args.grad_output != nullptr ? load_as_compute(args.grad_output[row_offset + j])
                                         : args.grad_output_wide[row_offset + j];
    };
    const bool has_top = exists && start.top < x.classes;
    const Real grad_top = has_top ? grad_output(start.top) : Real(0);

    // One class other than the largest: h_k r_k, h_k m_k and what else its sums need.
    struct Slopes {
      Real e, r, m, hr, hm, grad_gamma;
    };
    const auto slopes_of = [&](int j, Real logit) {
      const Real y = (logit - start.shift) * start.beta;
      Slopes s;
      s.e = exponential(y);
      const MapClass<Real> c = map_class(y, s.e, map.gamma, map.q_scale, map.log_q_offset, map.ratio_offset);
      // A class that cannot occur takes no part.
      const Real grad = logit == -kInfinity<Real> ? Real(0) : grad_output(j);
      s.r = c.ratio;
      s.m = log_output ? grad : (logit == -kInfinity<Real> ? Real(0) : s.r * (grad - grad_top));
      s.hr = c.slope * s.r;
      s.hm = c.slope * s.m;
      s.grad_gamma = c.grad_gamma;
      return s;
    };

    constexpr bool kKept = capacity == kBackwardSmall<Scalar>;
    Real kept_hr[kKept ? capacity : 1];
    Real kept_hm[kKept ? capacity : 1];
    Sum r = 0, m = 0, hr = 0, hm = 0, cr = 0, cm = 0;
    x.each(load, [&](int j, int k, Real& value) {
      const Slopes s = slopes_of(j, value);
      if constexpr (kKept) {
        kept_hr[k] = s.hr;
        kept_hm[k] = s.hm;
      }
      if (j == start.top) return;
      r += s.r;
      m += s.m;
      hr += s.hr;
      hm += s.hm;
      cr += s.grad_gamma * s.r;
      cm += s.grad_gamma * s.m;
    });
    const MapGradSums<Real> sums = {static_cast<Real>(group.sum(r)),  static_cast<Real>(group.sum(m)),
                                    static_cast<Real>(group.sum(hr)), static_cast<Real>(group.sum(hm)),
                                    static_cast<Real>(group.sum(cr)), static_cast<Real>(group.sum(cm))};
    const MapRowGrad<Real> grad = map_row_grad(map, sums, grad_top, log_output);

    Sum beta_sum = 0;
    x.each(load, [&](int j, int k, Real& value) {
      Real of_hr, of_hm;
      if constexpr (kKept) {
        of_hr = kept_hr[k];
        of_hm = kept_hm[k];
      } else {
        const Slopes s = slopes_of(j, value);
        of_hr = s.hr;
        of_hm = s.hm;
      }
      const Real y = (value - start.shift) * start.beta;
      Real result = grad.keep * of_hm - (grad.spread * of_hr + grad.shared * exponential(y));
      if (j == start.top) {
        result = grad.top;
      } else if (value != -kInfinity<Real>) {
        beta_sum += result * (y + start.gap);
      }
      if (args.grad_input == nullptr) return;
      result *= start.beta;
      if (args.input_is_probs) {
        // The gradient at p = 0 is not defined; as the class is left out of the map, it is given as 0.
        const Real p = load_as_compute(input[j]);
        result = p == Real(0) ? Real(0) : result / p;
      }
      args.grad_input[row_offset + j] = Store<Scalar>::from_compute(start.valid ? result : kNaN<Real>);
    });
    const auto grad_beta = static_cast<double>(group.sum(beta_sum));
    if (exists && x.index == 0) {
      if (args.grad_gamma != nullptr) {
        args.grad_gamma[row] = start.valid ? static_cast<double>(grad.gamma) : kNaN<double>;
      }
      if (args.grad_temperature != nullptr) {
        args.grad_temperature[row] = start.valid ? -grad_beta / args.temperature_of(row) : kNaN<double>;
      }
    }
  }
}

// ---- the binary map ------------------------------------------------------------------------------------------------

template <typename Scalar>
__device__ __forceinline__ bool binary_is_valid(const BinaryCalibrationMapArgs<Scalar>& args, int64_t i,
                                                compute_t<Scalar> logit) {
  return map_parameters_valid(args.gamma_of(i), args.temperature_of(i)) && logit < kInfinity<compute_t<Scalar>>;
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock) void binary_calibration_map_forward_kernel(
    const __grid_constant__ BinaryCalibrationMapForward<Scalar> args) {
  using Real = compute_t<Scalar>;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < args.size;
       i += static_cast<int64_t>(gridDim.x) * kBlock) {
    const Real logit = load_as_compute(args.logits[i]);
    const Real x = logit * inverse_temperature<Real>(args.temperature_of(i));
    const Real log_odds = binary_map(x, args.gamma_of(i)).log_odds;
    Real result = args.log_odds_output ? log_odds : sigmoid(log_odds);
    if (!binary_is_valid(args, i, logit)) result = kNaN<Real>;
    if (args.output != nullptr) {
      args.output[i] = Store<Scalar>::from_compute(result);
    } else {
      args.output_wide[i] = result;
    }
  }
}

template <typename Scalar>
__global__ __launch_bounds__(kBlock) void binary_calibration_map_backward_kernel(
    const __grid_constant__ BinaryCalibrationMapBackward<Scalar> args) {
  using Real = compute_t<Scalar>;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; i < args.size;
       i += static_cast<int64_t>(gridDim.x) * kBlock) {
    const Real logit = load_as_compute(args.logits[i]);
    const Real beta = inverse_temperature<Real>(args.temperature_of(i));
    const Real w = args.grad_output != nullptr ? load_as_compute(args.grad_output[i]) : args.grad_output_wide[i];
    const BinaryMapGrad<Real> grad = binary_map_grad(logit * beta, args.gamma_of(i), w, args.log_odds_output);
    const bool valid = binary_is_valid(args, i, logit);
    if (args.grad_logits != nullptr) {
      args.grad_logits[i] = Store<Scalar>::from_compute(valid ? grad.x * beta : kNaN<Real>);
    }
    if (args.grad_gamma != nullptr) args.grad_gamma[i] = valid ? static_cast<double>(grad.gamma) : kNaN<double>;
    if (args.grad_temperature != nullptr) {
      args.grad_temperature[i] = valid ? -static_cast<double>(grad.beta) / args.temperature_of(i) : kNaN<double>;
    }
  }
}

// ---- launchers -----------------------------------------------------------------------------------------------------

template <typename Scalar>
bool sizes_are_valid(const CalibrationMapArgs<Scalar>& args) {
  return args.rows >= 0 && args.classes >= 1 && args.classes <= INT32_MAX - 64 * kBlock;
}

int64_t elementwise_grid(int64_t size) {
  const int64_t blocks = divide_up(size, kBlock);
  return blocks < 8 * kMaxGrid ? blocks : 8 * kMaxGrid;
}

}  // namespace

template <typename Scalar>
int calibration_map_forward(const CalibrationMapForward<Scalar>& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
  const MapPlan plan = plan_map(args.rows, args.classes, kForwardSmall<Scalar>, kLarge<Scalar>);
  void (*kernel)(CalibrationMapForward<Scalar>, int) =
      plan.capacity == 0                ? calibration_map_forward_kernel<Scalar, 0>
      : plan.capacity == kLarge<Scalar> ? calibration_map_forward_kernel<Scalar, kLarge<Scalar>>
                                        : calibration_map_forward_kernel<Scalar, kForwardSmall<Scalar>>;
  return launch(kernel, plan.grid, kBlock, stream, args, plan.lanes);
}

template <typename Scalar>
int calibration_map_backward(const CalibrationMapBackward<Scalar>& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
  const MapPlan plan = plan_map(args.rows, args.classes, kBackwardSmall<Scalar>, kLarge<Scalar>);
  void (*kernel)(CalibrationMapBackward<Scalar>, int) =
      plan.capacity == 0                ? calibration_map_backward_kernel<Scalar, 0>
      : plan.capacity == kLarge<Scalar> ? calibration_map_backward_kernel<Scalar, kLarge<Scalar>>
                                        : calibration_map_backward_kernel<Scalar, kBackwardSmall<Scalar>>;
  return launch(kernel, plan.grid, kBlock, stream, args, plan.lanes);
}

template <typename Scalar>
int binary_calibration_map_forward(const BinaryCalibrationMapForward<Scalar>& args, void* stream) {
  if (args.size <= 0) return args.size == 0 ? cudaSuccess : cudaErrorInvalidValue;
  return launch(binary_calibration_map_forward_kernel<Scalar>, elementwise_grid(args.size), kBlock, stream, args);
}

template <typename Scalar>
int binary_calibration_map_backward(const BinaryCalibrationMapBackward<Scalar>& args, void* stream) {
  if (args.size <= 0) return args.size == 0 ? cudaSuccess : cudaErrorInvalidValue;
  return launch(binary_calibration_map_backward_kernel<Scalar>, elementwise_grid(args.size), kBlock, stream, args);
}

#define FK_INSTANTIATE(Scalar)                                                                            \
  template int calibration_map_forward<Scalar>(const CalibrationMapForward<Scalar>&, void*);              \
  template int calibration_map_backward<Scalar>(const CalibrationMapBackward<Scalar>&, void*);            \
  template int binary_calibration_map_forward<Scalar>(const BinaryCalibrationMapForward<Scalar>&, void*); \
  template int binary_calibration_map_backward<Scalar>(const BinaryCalibrationMapBackward<Scalar>&, void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
