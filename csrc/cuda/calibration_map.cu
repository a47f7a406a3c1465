// The focal calibration map of [rows, classes] inputs, forward and backward, and its binary form, elementwise.
//
// A group of threads shares a row: lanes of a warp for few classes, a warp, or the block. Passes over a row, with t its
// largest class:
//   1. t, and the largest of the others      2. sum of exp over the others
//   3. p_k / p_t or its logarithm, and sums  4. normalise and write
// Memory: the inputs are read once and the outputs written once as long as each thread's part of a row fits registers;
// longer rows are read again by each pass. 16 bytes at a time, where every row begins on such a boundary.

#include <initializer_list>

#include "cuda/common.cuh"
#include "kernels.h"
#include "math/calibration_map.h"

namespace focalkern::cuda {
namespace {

template <typename Scalar>
constexpr int kForwardSmall = sizeof(Scalar) == sizeof(double) ? 8 : 16;
template <typename Scalar>
constexpr int kBackwardSmall = sizeof(Scalar) == sizeof(double)  ? 4
                               : sizeof(Scalar) == sizeof(float) ? 12
                                                                 : 8;
template <typename Scalar>
constexpr int kLarge = sizeof(Scalar) == sizeof(double) ? 16 : 32;

// Registers for large parts, of the backward kernel and in double, leave room for one block on a multiprocessor.
template <typename Scalar>
constexpr int kBlocksOfLarge = sizeof(Scalar) == sizeof(double) ? 1 : 2;

// Terms in double only where there may be many of them.
template <typename Real, bool few>
using SumOf = std::conditional_t<few, Real, double>;

// The threads that share a row. Every thread of the block calls the reductions, and all of a group have the same
// result: either partner of an exchange combines the same two.
struct MapGroup {
  static constexpr int kMost = 6;  // numbers at once
  int lanes;
  double* scratch;  // [kWarpsPerBlock * kMost], shared

  // combine(mine, others), of `count` numbers each.
  template <int count, typename Number, typename Combine>
  __device__ __forceinline__ void reduce(Number (&mine)[count], Combine combine) const {
    static_assert(count <= kMost, "more than the scratch memory holds");
    const auto exchange = [&](int offset) {
      Number others[count];
#pragma unroll
      for (int i = 0; i < count; ++i) others[i] = __shfl_xor_sync(kFullWarp, mine[i], offset);
      combine(mine, others);
    };
    if (lanes < kWarp) {
      for (int offset = lanes / 2; offset > 0; offset /= 2) exchange(offset);
      return;
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) exchange(offset);
    if (lanes == kWarp) return;
    const int thread = static_cast<int>(threadIdx.x);
    auto* shared = reinterpret_cast<Number*>(scratch);  // [kWarpsPerBlock, count]
    __syncthreads();
    if (thread % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < count; ++i) shared[thread / kWarp * count + i] = mine[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < count; ++i) mine[i] = shared[i];
    for (int warp = 1; warp < kWarpsPerBlock; ++warp) {
      Number others[count];
#pragma unroll
      for (int i = 0; i < count; ++i) others[i] = shared[warp * count + i];
      combine(mine, others);
    }
  }
  template <int count, typename Number>
  __device__ __forceinline__ void add(Number (&mine)[count]) const {
    reduce(mine, [](Number(&a)[count], const Number(&b)[count]) {
#pragma unroll
      for (int i = 0; i < count; ++i) a[i] += b[i];
    });
  }
  template <typename Number>
  __device__ __forceinline__ Number sum(Number value) const {
    Number values[1] = {value};
    add(values);
    return values[0];
  }
  __device__ __forceinline__ int min(int value) const {
    int values[1] = {value};
    reduce(values, [](int (&a)[1], const int (&b)[1]) { a[0] = a[0] < b[0] ? a[0] : b[0]; });
    return values[0];
  }
};

// The compiler would work out the address of a row again for each of its vectors.
template <typename T>
__device__ __forceinline__ T* worked_out(T* address) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

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

// A thread's part of a row, in vectors: the thread's n-th, then `lanes` threads further. Where rows do not begin on a
// boundary, a vector is gathered of classes `lanes` apart, so that neighbours still read neighbours. With `capacity` 0
// nothing is kept, and each pass loads it again. Slots beyond the row hold -inf, a class that cannot occur.
template <typename Scalar, int capacity>
struct RowPart {
  using Real = compute_t<Scalar>;
  static constexpr int kVector = kVectorSize<Scalar>;
  static constexpr bool kKept = capacity > 0;
  static constexpr int kSlots = kKept ? capacity : kVector;
  using Sum = SumOf<Real, kKept>;

  const Scalar* input;  // of the thread's first class
  int64_t offset;       // of that class, in every operand
  int first;            // that class
  int classes;
  int lanes;
  int vectors;  // whether every row begins on a boundary
  bool probs;
  int top_slot;  // of the largest class; -1 in a thread that does not have it
  Real at[kSlots];

  __device__ __forceinline__ int class_of(int n, int i) const {
    return first + n * lanes * kVector + (vectors ? i : i * lanes);
  }

  // f(n, k): the n-th vector, which is kept from slot k on.
  template <typename Function>
  __device__ __forceinline__ void each(Function f) const {
    if constexpr (kKept) {
#pragma unroll
      for (int n = 0; n < capacity / kVector; ++n) {
        if (n * lanes * kVector < classes) f(n, n * kVector);
      }
    } else {
      for (int n = 0; n * lanes * kVector < classes; ++n) f(n, 0);
    }
  }

  // `from` and `to` are those of the thread's first class, in this row.
  template <typename From>
  __device__ __forceinline__ void load(const From* from, int n, Real missing, Real* values) const {
    const int skipped = n * lanes * kVector;
    const int left = classes - first;
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = missing;
    if (vectors) {
      constexpr int kWide = kVectorSize<From>;
      if (skipped >= left) return;
#pragma unroll
      for (int i0 = 0; i0 < kVector; i0 += kWide) {
        const auto elements = bit_cast<Elements<From>>(load_vector(from + skipped + i0));
#pragma unroll
        for (int i = 0; i < kWide; ++i) values[i0 + i] = load_as_compute(elements.at[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (skipped + i * lanes < left) values[i] = load_as_compute(from[skipped + i * lanes]);
      }
    }
  }
  template <typename To>
  __device__ __forceinline__ void store(To* to, int n, const Real* values) const {
    const int skipped = n * lanes * kVector;
    const int left = classes - first;
    if (vectors) {
      constexpr int kWide = kVectorSize<To>;
      if (skipped >= left) return;
#pragma unroll
      for (int i0 = 0; i0 < kVector; i0 += kWide) {
        Elements<To> elements;
#pragma unroll
        for (int i = 0; i < kWide; ++i) elements.at[i] = Store<To>::from_compute(values[i0 + i]);
        store_vector(to + skipped + i0, bit_cast<uint4>(elements));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (skipped + i * lanes < left) to[skipped + i * lanes] = Store<To>::from_compute(values[i]);
      }
    }
  }

  __device__ __forceinline__ void load_logits(int n, Real* x) const {
    load(input, n, probs ? Real(0) : -kInfinity<Real>, x);
    if (!probs) return;
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = logit_of_probability(x[i]);
  }

  // f(n, k, x): the logits of the n-th vector.
  template <typename Function>
  __device__ __forceinline__ void each_logit(Function f) {
    each([&](int n, int k) {
      if constexpr (kKept) {
        f(n, k, at + k);
      } else {
        Real x[kVector];
        load_logits(n, x);
        f(n, k, x);
      }
    });
  }
  // f(n, k, y) with y = (x - shift) / T, and -inf for the largest class, which then adds nothing to any sum. Pass 2
  // leaves them in the slots.
  template <typename Function>
  __device__ __forceinline__ void each_exponent(const RowStart<Real>& start, Function f) {
    each([&](int n, int k) {
      if constexpr (kKept) {
        f(n, k, at + k);
      } else {
        Real y[kVector];
        load_logits(n, y);
        take_out_top(start, n, y);
        f(n, k, y);
      }
    });
  }
  __device__ __forceinline__ void take_out_top(const RowStart<Real>& start, int n, Real* x) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const Real others = top_slot - n * kVector == i ? -kInfinity<Real> : x[i];
      x[i] = (others - start.shift) * start.beta;
    }
  }
};

template <typename Scalar, int capacity>
__device__ __forceinline__ RowPart<Scalar, capacity> row_part(const CalibrationMapArgs<Scalar>& args, int64_t row,
                                                              int lanes, int vectors) {
  RowPart<Scalar, capacity> x;
  x.lanes = lanes;
  x.vectors = vectors;
  x.first = (static_cast<int>(threadIdx.x) & (lanes - 1)) * (vectors ? RowPart<Scalar, capacity>::kVector : 1);
  x.offset = row * args.classes + x.first;
  x.input = worked_out(args.input + x.offset);
  x.classes = static_cast<int>(args.classes);
  x.probs = args.input_is_probs;
  x.top_slot = -1;
  return x;
}

// Passes 1 and 2. Every thread of the block calls it.
template <typename Scalar, int capacity>
__device__ __forceinline__ RowStart<compute_t<Scalar>> start_row(const CalibrationMapArgs<Scalar>& args, int64_t row,
                                                                 RowPart<Scalar, capacity>& x, const MapGroup& group) {
  using Part = RowPart<Scalar, capacity>;
  using Real = typename Part::Real;
  using Sum = typename Part::Sum;
  constexpr int kVector = Part::kVector;
  if constexpr (Part::kKept) {
#pragma unroll
    for (int n = 0; n < capacity / kVector; ++n) {
      x.load(x.input, n, x.probs ? Real(0) : -kInfinity<Real>, x.at + n * kVector);
    }
  }
  RowStart<Real> start = {};
  const double gamma = args.gamma_of(row);
  const double temperature = args.temperature_of(row);
  start.valid = map_parameters_valid(gamma, temperature);
  start.beta = inverse_temperature<Real>(temperature);

  if (x.probs) {
    double sum = 0;
    x.each([&](int n, int k) {
      Real loaded[kVector];
      Real* p = loaded;
      if constexpr (Part::kKept) {
        p = x.at + k;
      } else {
        x.load(x.input, n, Real(0), p);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sum += static_cast<double>(p[i]);
        p[i] = logit_of_probability(p[i]);
      }
    });
    sum = group.sum(sum);
    const double tolerance = probability_sum_tolerance<Scalar>();
    start.valid = start.valid && sum >= 1 - tolerance && sum <= 1 + tolerance;
  }

  // The two largest, and the vector that has the largest.
  Real two[2] = {-kInfinity<Real>, -kInfinity<Real>};
  int top_vector = 0;
  x.each_logit([&](int n, int, const Real* values) {
    const Real before = two[0];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      two[1] = fmax(two[1], fmin(two[0], values[i]));
      two[0] = fmax(two[0], values[i]);
    }
    if (two[0] > before) top_vector = n;
  });
  const Real own_top = two[0];
  group.reduce(two, [](Real(&a)[2], const Real(&b)[2]) {
    a[1] = fmax(fmax(a[1], b[1]), fmin(a[0], b[0]));
    a[0] = fmax(a[0], b[0]);
  });
  const Real row_top = two[0];
  // Of several equals the first is taken out, and the others are among the others.
  int own_class = INT32_MAX;
  if (own_top == row_top) {
    Real values[kVector];
    x.load_logits(top_vector, values);
#pragma unroll
    for (int i = kVector - 1; i >= 0; --i) {
      if (values[i] != row_top) continue;
      own_class = x.class_of(top_vector, i);
      x.top_slot = top_vector * kVector + i;
    }
  }
  start.top = group.min(own_class);
  if (own_class != start.top) x.top_slot = -1;
  // Also false for a row of NaN; a NaN beside numbers shows in the sum of exponentials.
  start.valid = start.valid && row_top > -kInfinity<Real> && row_top < kInfinity<Real>;
  // No other class can occur: any number serves as the shift.
  start.shift = two[1] > -kInfinity<Real> ? two[1] : row_top;
  const Real lowest_gap = -largest_finite<Real>() / Real(16);
  start.gap = fmax((start.shift - row_top) * start.beta, lowest_gap);

  Sum sum = 0;
  x.each_logit([&](int n, int, Real* values) {
    x.take_out_top(start, n, values);
    Real part = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) part += quick_exponential(values[i]);
    sum += part;
  });
  const auto others = static_cast<Real>(group.sum(sum));
  start.valid = start.valid && others == others;
  start.map = map_row(start.gap, others > Real(0) ? others : Real(1), gamma);
  return start;
}

template <typename Scalar, int capacity>
__global__ __launch_bounds__(
    kBlock, capacity == kLarge<Scalar>
                ? kBlocksOfLarge<Scalar>
                : 2) void calibration_map_forward_kernel(const __grid_constant__ CalibrationMapForward<Scalar> args,
                                                         int lane_bits, int vectors) {
  using Part = RowPart<Scalar, capacity>;
  using Real = typename Part::Real;
  constexpr int kVector = Part::kVector;
  __shared__ double scratch[kWarpsPerBlock * MapGroup::kMost];
  const int lanes = 1 << lane_bits;
  const MapGroup group = {lanes, scratch};
  const int rows_at_once = kBlock >> lane_bits;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < args.rows;
       first += static_cast<int64_t>(gridDim.x) * rows_at_once) {
    // The last row stands in for those beyond it, for which nothing is written.
    const int64_t wanted = first + (static_cast<int>(threadIdx.x) >> lane_bits);
    const bool exists = wanted < args.rows;
    const int64_t row = exists ? wanted : args.rows - 1;
    auto x = row_part<Scalar, capacity>(args, row, lanes, vectors);
    const RowStart<Real> start = start_row(args, row, x, group);
    const MapRow<Real>& map = start.map;

    const auto finish = [&](auto log_output) {
      constexpr bool kLog = decltype(log_output)::value;
      const auto map_of = [&](Real y) {
        const Real e = quick_exponential(y);
        if constexpr (kLog) return map_log_ratio(y, e, map.gamma, map.q_scale, map.log_q_offset, map.ratio_offset);
        return map_ratio(y, e, map.gamma, map.q_scale, map.log_q_offset, map.ratio_offset);
      };
      typename Part::Sum sum = 0;
      x.each_exponent(start, [&](int, int, Real* y) {
        Real part = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          y[i] = map_of(y[i]);
          part += kLog ? quick_exponential(y[i]) : y[i];
        }
        sum += part;
      });
      const auto ratio_sum = static_cast<Real>(group.sum(sum));
      Real top = kLog ? Real(0) - log_one_plus(ratio_sum) : Real(1) / (Real(1) + ratio_sum);  // 0, not -0
      if (!start.valid) top = kNaN<Real>;
      if (!exists) return;
      Scalar* const output = worked_out(args.output + x.offset);
      Real* const output_wide = worked_out(args.output_wide + x.offset);
      x.each_exponent(start, [&](int n, int, Real* y) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const Real own = Part::kKept ? y[i] : map_of(y[i]);
          y[i] = kLog ? own + top : own * top;
        }
        if (args.output != nullptr) {
          x.store(output, n, y);
        } else {
          x.store(output_wide, n, y);
        }
      });
      // Over what the same thread has just written for it.
      if (x.top_slot < 0) return;
      if (args.output != nullptr) {
        output[start.top - x.first] = Store<Scalar>::from_compute(top);
      } else {
        output_wide[start.top - x.first] = top;
      }
    };
    if (args.log_output) {
      finish(std::true_type());
    } else {
      finish(std::false_type());
    }
  }
}

template <typename Scalar, int capacity>
__global__ __launch_bounds__(kBlock, capacity == kLarge<Scalar> ? 1 : 2) void calibration_map_backward_kernel(
    const __grid_constant__ CalibrationMapBackward<Scalar> args, int lane_bits, int vectors) {
  using Part = RowPart<Scalar, capacity>;
  using Real = typename Part::Real;
  using Sum = typename Part::Sum;
  constexpr int kVector = Part::kVector;
  __shared__ double scratch[kWarpsPerBlock * MapGroup::kMost];
  const int lanes = 1 << lane_bits;
  const MapGroup group = {lanes, scratch};
  const int rows_at_once = kBlock >> lane_bits;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < args.rows;
       first += static_cast<int64_t>(gridDim.x) * rows_at_once) {
    const int64_t wanted = first + (static_cast<int>(threadIdx.x) >> lane_bits);
    const bool exists = wanted < args.rows;
    const int64_t row = exists ? wanted : args.rows - 1;
    auto x = row_part<Scalar, capacity>(args, row, lanes, vectors);
    const Scalar* const grad_output = worked_out(args.grad_output + x.offset);
    const Real* const grad_output_wide = worked_out(args.grad_output_wide + x.offset);
    const auto load_grad = [&](int n, Real* grad) {
      if (args.grad_output != nullptr) {
        x.load(grad_output, n, Real(0), grad);
      } else {
        x.load(grad_output_wide, n, Real(0), grad);
      }
    };
    // Where few warps fit a multiprocessor, the upstream gradient is asked for at once; pass 3 puts h_k m_k in its
    // place.
    constexpr bool kEarly = capacity == kLarge<Scalar>;
    Real kept_hm[Part::kSlots];
    Real kept_hr[Part::kSlots];
    if constexpr (kEarly) {
#pragma unroll
      for (int n = 0; n < capacity / kVector; ++n) load_grad(n, kept_hm + n * kVector);
    }
    const RowStart<Real> start = start_row(args, row, x, group);
    const MapRow<Real>& map = start.map;
    Real grad_top = 0;
    if (start.top < x.classes) {
      const int step = start.top - x.first;
      grad_top = args.grad_output != nullptr ? load_as_compute(grad_output[step]) : grad_output_wide[step];
    }

    const auto finish = [&](auto log_output) {
      constexpr bool kLog = decltype(log_output)::value;
      // One class other than the largest: h_k r_k, h_k m_k and what else its sums need.
      struct Slopes {
        Real r, m, hr, hm, grad_gamma;
      };
      const auto slopes_of = [&](Real y, Real grad) {
        const MapClass<Real> c =
            map_class(y, quick_exponential(y), map.gamma, map.q_scale, map.log_q_offset, map.ratio_offset);
        Slopes s;
        s.r = c.ratio;
        const Real m = kLog ? grad : s.r * (grad - grad_top);
        s.m = y == -kInfinity<Real> ? Real(0) : m;  // a class that cannot occur takes no part
        s.hr = c.slope * s.r;
        s.hm = c.slope * s.m;
        s.grad_gamma = c.grad_gamma;
        return s;
      };
      Sum totals[6] = {};
      x.each_exponent(start, [&](int n, int k, const Real* y) {
        Real loaded[kVector];
        if constexpr (!kEarly) load_grad(n, loaded);
        Real part[6] = {};
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const Slopes s = slopes_of(y[i], kEarly ? kept_hm[k + i] : loaded[i]);
          kept_hr[k + i] = s.hr;
          kept_hm[k + i] = s.hm;
          part[0] += s.r;
          part[1] += s.m;
          part[2] += s.hr;
          part[3] += s.hm;
          part[4] += s.grad_gamma * s.r;
          part[5] += s.grad_gamma * s.m;
        }
#pragma unroll
        for (int i = 0; i < 6; ++i) totals[i] += part[i];
      });
      group.add(totals);
      const MapGradSums<Real> sums = {static_cast<Real>(totals[0]), static_cast<Real>(totals[1]),
                                      static_cast<Real>(totals[2]), static_cast<Real>(totals[3]),
                                      static_cast<Real>(totals[4]), static_cast<Real>(totals[5])};
      MapRowGrad<Real> grad = map_row_grad(map, sums, grad_top, kLog);
      if (!start.valid) grad.keep = grad.top = kNaN<Real>;

      Scalar* const grad_input = worked_out(args.grad_input + x.offset);
      Sum beta_sum = 0;
      x.each_exponent(start, [&](int n, int k, const Real* y) {
        Real result[kVector];
        if constexpr (!Part::kKept) load_grad(n, result);
        Real part = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          Real of_hr = kept_hr[k + i], of_hm = kept_hm[k + i];
          if constexpr (!Part::kKept) {
            const Slopes s = slopes_of(y[i], result[i]);
            of_hr = s.hr;
            of_hm = s.hm;
          }
          result[i] = grad.keep * of_hm - (grad.spread * of_hr + grad.shared * quick_exponential(y[i]));
          part += y[i] == -kInfinity<Real> ? Real(0) : result[i] * (y[i] + start.gap);
          result[i] *= start.beta;
        }
        beta_sum += part;
        if (args.grad_input == nullptr || !exists) return;
        if (x.probs) {
          // The gradient at p = 0 is not defined; as the class is left out of the map, it is given as 0.
          Real p[kVector];
          x.load(x.input, n, Real(0), p);
#pragma unroll
          for (int i = 0; i < kVector; ++i) result[i] = p[i] == Real(0) ? Real(0) * grad.keep : result[i] / p[i];
        }
        x.store(grad_input, n, result);
      });
      // Over what the same thread has just written for it.
      if (args.grad_input != nullptr && exists && x.top_slot >= 0) {
        Real result = grad.top * start.beta;
        if (x.probs) result /= load_as_compute(x.input[start.top - x.first]);
        grad_input[start.top - x.first] = Store<Scalar>::from_compute(result);
      }
      const auto grad_beta = static_cast<double>(group.sum(beta_sum));
      if (exists && x.first == 0) {
        if (args.grad_gamma != nullptr) {
          args.grad_gamma[row] = start.valid ? static_cast<double>(grad.gamma) : kNaN<double>;
        }
        if (args.grad_temperature != nullptr) {
          args.grad_temperature[row] = start.valid ? -grad_beta / args.temperature_of(row) : kNaN<double>;
        }
      }
    };
    if (args.log_output) {
      finish(std::true_type());
    } else {
      finish(std::false_type());
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

// Whether every row of every operand begins on a 16-byte boundary.
template <typename Scalar>
bool rows_are_vectors(const CalibrationMapArgs<Scalar>& args, std::initializer_list<const void*> others) {
  auto addresses = reinterpret_cast<uintptr_t>(args.input);
  for (const void* other : others) addresses |= reinterpret_cast<uintptr_t>(other);
  return args.classes % kVectorSize<Scalar> == 0 && addresses % kVectorBytes == 0;
}

int lane_bits(int lanes) {
  int bits = 0;
  while (1 << bits < lanes) ++bits;
  return bits;
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
  void (*kernel)(CalibrationMapForward<Scalar>, int, int) =
      plan.capacity == 0                ? calibration_map_forward_kernel<Scalar, 0>
      : plan.capacity == kLarge<Scalar> ? calibration_map_forward_kernel<Scalar, kLarge<Scalar>>
                                        : calibration_map_forward_kernel<Scalar, kForwardSmall<Scalar>>;
  const int vectors = rows_are_vectors(args, {args.output, args.output_wide});
  return launch(kernel, plan.grid, kBlock, stream, args, lane_bits(plan.lanes), vectors);
}

template <typename Scalar>
int calibration_map_backward(const CalibrationMapBackward<Scalar>& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
  const MapPlan plan = plan_map(args.rows, args.classes, kBackwardSmall<Scalar>, kLarge<Scalar>);
  void (*kernel)(CalibrationMapBackward<Scalar>, int, int) =
      plan.capacity == 0                ? calibration_map_backward_kernel<Scalar, 0>
      : plan.capacity == kLarge<Scalar> ? calibration_map_backward_kernel<Scalar, kLarge<Scalar>>
                                        : calibration_map_backward_kernel<Scalar, kBackwardSmall<Scalar>>;
  const int vectors = rows_are_vectors(args, {args.grad_output, args.grad_output_wide, args.grad_input});
  return launch(kernel, plan.grid, kBlock, stream, args, lane_bits(plan.lanes), vectors);
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
