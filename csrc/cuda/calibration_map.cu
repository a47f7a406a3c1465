// The focal calibration map of [rows, classes] inputs, forward and backward, and its binary form, elementwise.
//
// One thread computes a row of few classes. A longer row is shared by a group: lanes of a warp, a warp, or the block.
// Passes over a row, with t its largest class:
//   1. t, and the largest of the others      2. sum of exp over the others
//   3. p_k / p_t or its logarithm, and sums  4. normalise and write
// Memory: if each thread's part of a row fits registers, inputs are read once and outputs written once. Longer rows are
// read again by each pass. If every row begins on a 16-byte boundary, a load or store has 16 bytes.

#include <initializer_list>

#include "cuda/common.cuh"
#include "kernels/calibration_map.h"
#include "math/calibration_map.h"

namespace focalkern::cuda {
namespace {

// Classes that one thread holds in registers.
template <typename Scalar>
constexpr int kSmall = sizeof(Scalar) == sizeof(double) ? 8 : 16;
template <typename Scalar>
constexpr int kLarge = sizeof(Scalar) == sizeof(double) ? 16 : 32;

// Blocks per multiprocessor for which the registers suffice.
template <typename Scalar, int capacity>
constexpr int kForwardBlocks = sizeof(Scalar) == sizeof(double) && capacity == kLarge<Scalar> ? 1 : 2;
template <typename Scalar, int capacity>
constexpr int kBackwardBlocks = sizeof(Scalar) == sizeof(double) || capacity == kLarge<Scalar> ? 1 : 2;

// Sums continue in double only where they may have many terms.
template <typename Real, bool few>
using SumOf = std::conditional_t<few, Real, double>;

// The threads that share a row. Every thread of the block calls the reductions. All threads of a group get the same
// result: both partners of an exchange combine the same two numbers.
struct MapGroup {
  static constexpr int kMost = 6;  // numbers at once
  int lanes;
  double* scratch;  // [kWarpsPerBlock * kMost], shared

  // combine(mine, others) for `count` numbers each.
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
  template <typename Number>
  __device__ __forceinline__ Number max(Number value) const {
    Number values[1] = {value};
    reduce(values, [](Number(&a)[1], const Number(&b)[1]) { a[0] = fmax(a[0], b[0]); });
    return values[0];
  }
  __device__ __forceinline__ int min(int value) const {
    int values[1] = {value};
    reduce(values, [](int (&a)[1], const int (&b)[1]) { a[0] = a[0] < b[0] ? a[0] : b[0]; });
    return values[0];
  }
};

// A row that a warp shares has more than half of the classes that a warp can hold (plan_map), so the first half of the
// vectors needs no bounds check.
template <typename Scalar, int constant_lanes>
__device__ __forceinline__ void assume_classes([[maybe_unused]] int classes) {
#if defined(__CUDA_ARCH__)
  if constexpr (constant_lanes == kWarp) __builtin_assume(classes > kLarge<Scalar> * kWarp / 2);
#endif
}

// Without this the compiler computes the row's address again for each of its vectors.
template <typename T>
__device__ __forceinline__ T* worked_out(T* address) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

// The numbers of a row that depend only on gamma and temperature.
template <typename Real>
struct MapNumbers {
  MapGamma<Real> gamma;
  Real beta;  // 1/T
  bool valid;
};
template <typename Real>
FK_HOST_DEVICE MapNumbers<Real> map_numbers(double gamma, double temperature) {
  // A gamma that is infinite in float is invalid.
  const bool valid = map_parameters_valid(gamma, temperature) && gamma <= static_cast<double>(largest_finite<Real>());
  return {map_gamma<Real>(gamma), inverse_temperature<Real>(temperature), valid};
}

// The results of passes 1 and 2.
template <typename Real>
struct RowStart {
  bool valid;
  int top;
  Real shift;  // largest of the other inputs
  Real beta;
  Real scale;  // beta for logarithms to the base of quick_power
  Real gap;
  MapRow<Real> map;
};

// A thread's part of a row, in vectors that are `lanes` threads apart. If rows do not begin on a boundary, a vector
// gathers classes that are `lanes` apart, so that neighbouring threads still read neighbouring classes. With `capacity`
// 0 nothing is kept, and each pass loads the vector again. Slots beyond the row hold -inf, an impossible class.
// `on_grid`: as in map_exponent.
template <typename Scalar, int capacity, bool on_grid>
struct RowPart {
  using Real = compute_t<Scalar>;
  // For a thread with a whole row, eight classes per vector would leave too many slots empty.
  static constexpr bool kWhole = sizeof(Scalar) >= sizeof(Real) || capacity != kSmall<Scalar>;
  static constexpr int kVector = kWhole ? kVectorSize<Scalar> : 4;
  static constexpr bool kKept = capacity > 0;
  static constexpr int kSlots = kKept ? capacity : kVector;
  static constexpr int kVectorsOfSum = 8;  // terms per partial sum in Real; the sum of these is in double
  static constexpr bool kPowers = kKept && sizeof(Scalar) < sizeof(Real);  // exponentials that pass 2 keeps
  using Sum = SumOf<Real, kKept>;

  const Scalar* input;  // of the thread's first class
  int64_t offset;       // of that class, in every operand
  int first;            // that class
  int classes;
  int lanes;
  int vectors;  // whether every row begins on a boundary
  bool probs;
  int top_vector;  // start of the vector with the largest class; -1 in a thread that does not have it
  int top_place;   // slot of the largest class in that vector
  Real at[kSlots];
  Real power_at[kPowers ? capacity : 1];

  __device__ __forceinline__ int left() const { return classes - first; }
  __device__ __forceinline__ int step() const { return lanes * kVector; }
  __device__ __forceinline__ int class_of(int begin, int i) const { return first + begin + (vectors ? i : i * lanes); }

  // f(begin, k): a vector that begins `begin` classes after the thread's first; its slots begin at k. pause() is called
  // at intervals and at the end.
  template <typename Function, typename Pause>
  __device__ __forceinline__ void each(Function f, Pause pause) const {
    if constexpr (kKept) {
#pragma unroll
      for (int n = 0; n < capacity / kVector; ++n) {
        if (n == 0 || n * step() < classes) f(n * step(), n * kVector);
      }
      pause();
    } else {
      for (int begin = 0; begin < left();) {
        const int64_t wanted = begin + int64_t{kVectorsOfSum} * step();
        const int end = wanted < left() ? static_cast<int>(wanted) : left();
        for (; begin < end; begin += step()) f(begin, 0);
        pause();
      }
    }
  }

  // `from` and `to` point to the thread's first class in this row.
  template <typename From>
  __device__ __forceinline__ void load(const From* from, int begin, Real missing, Real* values) const {
    vectors ? load_vectors(from, begin, missing, values) : gather(from, begin, missing, values);
  }
  template <typename From>
  __device__ __forceinline__ void load_vectors(const From* from, int begin, Real missing, Real* values) const {
    if constexpr (kWhole) {
      constexpr int kWide = kVectorSize<From>;
      Elements<From> nothing;
#pragma unroll
      for (int i = 0; i < kWide; ++i) nothing.at[i] = Store<From>::from_compute(missing);
#pragma unroll
      for (int i = 0; i < kVector; i += kWide) {
        auto vector = bit_cast<uint4>(nothing);
        if (!kKept || begin < left()) vector = load_vector(from + begin + i);
        unpack<From>(vector, values + i);
      }
    }
  }
  template <typename From>
  __device__ __forceinline__ void gather(const From* from, int begin, Real missing, Real* values) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[i] = begin + i * lanes < left() ? load_as_compute(from[begin + i * lanes]) : missing;
    }
  }
  // All that is kept.
  template <typename From>
  __device__ __forceinline__ void load_all(const From* from, Real missing, Real* values) const {
    const auto pause = [] {};
    if (vectors) {
      each([&](int begin, int k) { load_vectors(from, begin, missing, values + k); }, pause);
    } else {
      each([&](int begin, int k) { gather(from, begin, missing, values + k); }, pause);
    }
  }
  template <typename To>
  __device__ __forceinline__ void store(To* to, int begin, const Real* values) const {
    if constexpr (kWhole) {
      if (vectors) {
        if (kKept && begin >= left()) return;
        constexpr int kWide = kVectorSize<To>;
#pragma unroll
        for (int i0 = 0; i0 < kVector; i0 += kWide) {
          Elements<To> elements;
#pragma unroll
          for (int i = 0; i < kWide; ++i) elements.at[i] = Store<To>::from_compute(values[i0 + i]);
          store_vector(to + begin + i0, bit_cast<uint4>(elements));
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (begin + i * lanes < left()) to[begin + i * lanes] = Store<To>::from_compute(values[i]);
    }
  }

  __device__ __forceinline__ Real missing() const { return probs ? Real(0) : -kInfinity<Real>; }
  __device__ __forceinline__ void load_logits(int begin, Real* x) const {
    load(input, begin, missing(), x);
    if (!probs) return;
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = logit_of_probability(x[i]);
  }

  // f(begin, k, x): the logits of a vector. f may change those that are kept in registers.
  template <typename Function, typename Pause>
  __device__ __forceinline__ void each_logit(Function f, Pause pause) {
    each(
        [&](int begin, int k) {
          if constexpr (kKept) {
            f(begin, k, at + k);
          } else {
            Real x[kVector];
            load_logits(begin, x);
            f(begin, k, x);
          }
        },
        pause);
  }
  // f(begin, k, y) with y = (x - shift) / T as a logarithm to the base of quick_power. y is -inf for the largest class,
  // which then adds 0 to every sum. Pass 2 keeps y in the slots.
  template <typename Function, typename Pause>
  __device__ __forceinline__ void each_exponent(const RowStart<Real>& start, Function f, Pause pause) {
    each(
        [&](int begin, int k) {
          if constexpr (kKept) {
            f(begin, k, at + k);
          } else {
            Real y[kVector];
            load_logits(begin, y);
            take_out_top(begin, y);
            make_exponents(start, y);
            f(begin, k, y);
          }
        },
        pause);
  }
  __device__ __forceinline__ void take_out_top(int begin, Real* x) const {
    if (begin != top_vector) return;
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = i == top_place ? -kInfinity<Real> : x[i];
  }
  // base^y of a slot.
  __device__ __forceinline__ Real power(int slot, Real y) const {
    if constexpr (kPowers) return power_at[slot];
    return quick_power(y);
  }
  static __device__ __forceinline__ void make_exponents(const RowStart<Real>& start, Real* x) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = map_exponent<on_grid>(x[i], start.shift, start.scale);
  }
};

template <typename Scalar, int capacity, bool on_grid>
__device__ __forceinline__ RowPart<Scalar, capacity, on_grid> row_part(const CalibrationMapArgs<Scalar>& args,
                                                                       int64_t row, int lanes, int vectors) {
  RowPart<Scalar, capacity, on_grid> x;
  x.lanes = lanes;
  x.vectors = x.kWhole ? vectors : 0;
  x.first = (static_cast<int>(threadIdx.x) & (lanes - 1)) * (x.vectors ? x.kVector : 1);
  x.offset = row * args.classes + x.first;
  x.input = worked_out(args.input + x.offset);
  x.classes = static_cast<int>(args.classes);
  x.probs = args.input_is_probs;
  x.top_vector = -1;
  x.top_place = 0;
  return x;
}

// Removes the largest class from the row: the first one of equals, the others stay. A row whose maximum is NaN stays as
// it is.
template <typename Scalar, int capacity, bool on_grid>
__device__ __forceinline__ void find_top_two(RowPart<Scalar, capacity, on_grid>& x, const MapGroup& group, int* top,
                                             compute_t<Scalar>* largest, compute_t<Scalar>* next) {
  using Part = RowPart<Scalar, capacity, on_grid>;
  using Real = typename Part::Real;
  constexpr int kVector = Part::kVector;
  const auto pause = [] {};
  int own_class = INT32_MAX;
  // Records the first position at which `values`, a vector of the thread's part, has the largest logit.
  const auto find = [&](int begin, const Real* values) {
#pragma unroll
    for (int i = kVector - 1; i >= 0; --i) {
      if (values[i] != *largest) continue;
      x.top_vector = begin;
      x.top_place = i;
    }
  };
  if constexpr (Part::kKept) {
    Real own_top = -kInfinity<Real>;
    int top_vector = 0;
    x.each_logit(
        [&](int begin, int, const Real* values) {
          const Real before = own_top;
#pragma unroll
          for (int i = 0; i < kVector; ++i) own_top = fmax(own_top, values[i]);
          if (own_top > before) top_vector = begin;
        },
        pause);
    *largest = group.max(own_top);
    if (own_top == *largest && own_top > -kInfinity<Real>) {
      x.each_logit(
          [&](int begin, int, const Real* values) {
            if (begin == top_vector) find(begin, values);
          },
          pause);
      own_class = x.class_of(x.top_vector, x.top_place);
    }
  } else {
    Real two[2] = {-kInfinity<Real>, -kInfinity<Real>};
    int top_vector = 0;
    x.each_logit(
        [&](int begin, int, const Real* values) {
          const Real before = two[0];
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            two[1] = fmax(two[1], fmin(two[0], values[i]));
            two[0] = fmax(two[0], values[i]);
          }
          if (two[0] > before) top_vector = begin;
        },
        pause);
    const Real own_top = two[0];
    group.reduce(two, [](Real(&a)[2], const Real(&b)[2]) {
      a[1] = fmax(fmax(a[1], b[1]), fmin(a[0], b[0]));
      a[0] = fmax(a[0], b[0]);
    });
    *largest = two[0];
    *next = two[1];
    if (own_top == *largest && own_top > -kInfinity<Real>) {
      Real values[kVector];
      x.load_logits(top_vector, values);
      find(top_vector, values);
      own_class = x.class_of(x.top_vector, x.top_place);
    }
  }
  *top = group.min(own_class);
  if (own_class != *top) x.top_vector = -1;
  if constexpr (Part::kKept) {
    Real others = -kInfinity<Real>;
    x.each_logit(
        [&](int begin, int, Real* values) {
          x.take_out_top(begin, values);
#pragma unroll
          for (int i = 0; i < kVector; ++i) others = fmax(others, values[i]);
        },
        pause);
    *next = group.max(others);
  }
}

// Passes 1 and 2. Every thread of the block calls it.
template <typename Scalar, int capacity, bool on_grid>
__device__ __forceinline__ RowStart<compute_t<Scalar>> start_row(const CalibrationMapArgs<Scalar>& args,
                                                                 const MapNumbers<compute_t<Scalar>>& numbers,
                                                                 int64_t row, RowPart<Scalar, capacity, on_grid>& x,
                                                                 const MapGroup& group) {
  using Part = RowPart<Scalar, capacity, on_grid>;
  using Real = typename Part::Real;
  using Sum = typename Part::Sum;
  constexpr int kVector = Part::kVector;
  if constexpr (Part::kKept) x.load_all(x.input, x.missing(), x.at);
  MapNumbers<Real> of_row = numbers;
  if (args.gamma != nullptr || args.temperature != nullptr) {
    of_row = map_numbers<Real>(args.gamma_of(row), args.temperature_of(row));
  }
  RowStart<Real> start = {};
  start.valid = of_row.valid;
  start.beta = of_row.beta;
  start.scale = fmin(of_row.beta * quick_unit<Real>(), largest_finite<Real>());

  if (x.probs) {
    double sum = 0;
    x.each(
        [&](int begin, int k) {
          Real loaded[kVector];
          Real* p = loaded;
          if constexpr (Part::kKept) {
            p = x.at + k;
          } else {
            x.load(x.input, begin, Real(0), p);
          }
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            sum += static_cast<double>(p[i]);
            p[i] = logit_of_probability(p[i]);
          }
        },
        [] {});
    sum = group.sum(sum);
    const double tolerance = probability_sum_tolerance<Scalar>();
    start.valid = start.valid && sum >= 1 - tolerance && sum <= 1 + tolerance;
  }

  Real largest, next;
  find_top_two(x, group, &start.top, &largest, &next);
  // Also false for a row of NaN only; a NaN beside numbers shows in the sum of exponentials.
  start.valid = start.valid && largest > -kInfinity<Real> && largest < kInfinity<Real>;
  // No other class is possible: any number serves as the shift.
  start.shift = next > -kInfinity<Real> ? next : largest;
  const Real lowest_gap = -largest_finite<Real>() / Real(16);
  start.gap = fmax((start.shift - largest) * start.beta, lowest_gap);

  Sum sum = 0;
  Real part = 0;
  x.each_logit(
      [&](int begin, int k, Real* values) {
        if constexpr (!Part::kKept) x.take_out_top(begin, values);
        x.make_exponents(start, values);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const Real e = quick_power(values[i]);
          if constexpr (Part::kPowers) x.power_at[k + i] = e;
          part += e;
        }
      },
      [&] {
        sum = Part::kKept ? Sum(part) : sum + part;
        part = 0;
      });
  const auto others = static_cast<Real>(group.sum(sum));
  start.valid = start.valid && others == others;
  start.map = map_row(start.gap, others > Real(0) ? others : Real(1), of_row.gamma);
  return start;
}

// constant_lanes: the threads of a row if that is one, a warp or the block. Otherwise it is 0, and the row has 1 <<
// lane_bits threads.
template <typename Scalar, int capacity, int constant_lanes>
__global__ __launch_bounds__(kBlock, kForwardBlocks<Scalar, capacity>) void calibration_map_forward_kernel(
    const __grid_constant__ CalibrationMapForward<Scalar> args,
    const __grid_constant__ MapNumbers<compute_t<Scalar>> numbers, int lane_bits, int vectors) {
  using Part = RowPart<Scalar, capacity, true>;
  using Real = typename Part::Real;
  constexpr int kVector = Part::kVector;
  constexpr bool kNarrow = sizeof(Scalar) < sizeof(Real);
  __shared__ double scratch[kWarpsPerBlock * MapGroup::kMost];
  const int lanes = constant_lanes > 0 ? constant_lanes : 1 << lane_bits;
  const MapGroup group = {lanes, scratch};
  const int rows_at_once = constant_lanes > 0 ? kBlock / constant_lanes : kBlock >> lane_bits;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < args.rows;
       first += static_cast<int64_t>(gridDim.x) * rows_at_once) {
    // Threads beyond the last row compute that row again, and write nothing.
    const int64_t wanted = first + (constant_lanes > 0 ? static_cast<int>(threadIdx.x) / constant_lanes
                                                       : static_cast<int>(threadIdx.x) >> lane_bits);
    const bool exists = wanted < args.rows;
    const int64_t row = exists ? wanted : args.rows - 1;
    auto x = row_part<Scalar, capacity, true>(args, row, lanes, vectors);
    assume_classes<Scalar, constant_lanes>(x.classes);
    const RowStart<Real> start = start_row(args, numbers, row, x, group);

    const auto finish = [&](auto log_output) {
      constexpr bool kLog = decltype(log_output)::value;
      const auto map_of = [&](int slot, Real y) {
        const Real e = x.power(slot, y);
        if constexpr (kLog) return map_log_ratio(y, e, start.map.terms);
        return map_ratio(y, e, start.map.terms);
      };
      typename Part::Sum sum = 0;
      Real part = 0;
      x.each_exponent(
          start,
          [&](int, int k, Real* y) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              y[i] = map_of(k + i, y[i]);
              part += kLog ? quick_power(y[i]) : y[i];
            }
          },
          [&] {
            sum = Part::kKept ? typename Part::Sum(part) : sum + part;
            part = 0;
          });
      const auto ratio_sum = static_cast<Real>(group.sum(sum));
      // 0, not -0
      Real top = kLog ? Real(0) - log_one_plus(ratio_sum) : quick_quotient(Real(1), Real(1) + ratio_sum);
      if (!start.valid) top = kNaN<Real>;
      if (!exists) return;
      const auto write = [&](auto* output) {
        output = worked_out(output + x.offset);
        x.each_exponent(
            start,
            [&](int begin, int k, Real* y) {
#pragma unroll
              for (int i = 0; i < kVector; ++i) {
                const Real ratio = Part::kKept ? y[i] : map_of(k + i, y[i]);
                y[i] = kLog ? ratio * (Real(1) / quick_unit<Real>()) + top : ratio * top;
              }
              x.store(output, begin, y);
            },
            [] {});
        // Overwrites a value that the same thread has just written.
        using To = std::remove_reference_t<decltype(*output)>;
        if (x.top_vector >= 0) output[start.top - x.first] = Store<To>::from_compute(top);
      };
      if constexpr (kNarrow) {
        if (args.output != nullptr) return write(args.output);
        write(args.output_wide);
      } else {
        write(args.output != nullptr ? args.output : args.output_wide);
      }
    };
    if (args.log_output) {
      finish(std::true_type());
    } else {
      finish(std::false_type());
    }
  }
}

template <typename Scalar, int capacity, int constant_lanes>
__global__ __launch_bounds__(kBlock, kBackwardBlocks<Scalar, capacity>) void calibration_map_backward_kernel(
    const __grid_constant__ CalibrationMapBackward<Scalar> args,
    const __grid_constant__ MapNumbers<compute_t<Scalar>> numbers, int lane_bits, int vectors) {
  using Part = RowPart<Scalar, capacity, false>;
  using Real = typename Part::Real;
  using Sum = typename Part::Sum;
  constexpr int kVector = Part::kVector;
  constexpr bool kNarrow = sizeof(Scalar) < sizeof(Real);
  // A finite substitute for the exponent -inf of an impossible class: its product with 0 is 0.
  const Real kImpossible = -largest_finite<Real>() * Real(0.75);
  __shared__ double scratch[kWarpsPerBlock * MapGroup::kMost];
  const int lanes = constant_lanes > 0 ? constant_lanes : 1 << lane_bits;
  const MapGroup group = {lanes, scratch};
  const int rows_at_once = constant_lanes > 0 ? kBlock / constant_lanes : kBlock >> lane_bits;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < args.rows;
       first += static_cast<int64_t>(gridDim.x) * rows_at_once) {
    const int64_t wanted = first + (constant_lanes > 0 ? static_cast<int>(threadIdx.x) / constant_lanes
                                                       : static_cast<int>(threadIdx.x) >> lane_bits);
    const bool exists = wanted < args.rows;
    const int64_t row = exists ? wanted : args.rows - 1;
    auto x = row_part<Scalar, capacity, false>(args, row, lanes, vectors);
    assume_classes<Scalar, constant_lanes>(x.classes);
    const Scalar* const grad_output = worked_out(args.grad_output + x.offset);
    const Real* const grad_output_wide = worked_out(args.grad_output_wide + x.offset);
    const auto load_grad = [&](int begin, Real* grad) {
      if (args.grad_output != nullptr) {
        x.load(grad_output, begin, Real(0), grad);
      } else {
        x.load(grad_output_wide, begin, Real(0), grad);
      }
    };
    // If few warps fit a multiprocessor, the upstream gradient is loaded early; pass 3 overwrites it with its result.
    constexpr bool kEarly = capacity == kLarge<Scalar>;
    Real kept_w[Part::kSlots];
    Real kept_hr[Part::kSlots];
    if constexpr (kEarly) {
      if (args.grad_output != nullptr) {
        x.load_all(grad_output, Real(0), kept_w);
      } else {
        x.load_all(grad_output_wide, Real(0), kept_w);
      }
    }
    const RowStart<Real> start = start_row(args, numbers, row, x, group);
    Real grad_top = 0;
    if (start.top < x.classes) {
      const int step = start.top - x.first;
      grad_top = args.grad_output != nullptr ? load_as_compute(grad_output[step]) : grad_output_wide[step];
    }

    const auto finish = [&](auto log_output) {
      constexpr bool kLog = decltype(log_output)::value;
      // The upstream gradient of a class other than the largest: w_k, or v_k if the output is probabilities. It is 0
      // for a class of probability zero.
      const auto weight_of = [&](Real y, Real grad) {
        return y == -kInfinity<Real> ? Real(0) : kLog ? grad : grad - grad_top;
      };
      const auto class_of = [&](int slot, Real y) {
        return map_class<kNarrow, true>(y, x.power(slot, y), start.map.terms);
      };
      Sum totals[6] = {};
      Real part[6] = {};
      x.each_exponent(
          start,
          [&](int begin, int k, Real* y) {
            Real loaded[kVector];
            if constexpr (!kEarly) load_grad(begin, loaded);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              const Real w = weight_of(y[i], kEarly ? kept_w[k + i] : loaded[i]);
              y[i] = fmax(y[i], kImpossible);
              const MapClass<Real> c = class_of(k + i, y[i]);
              const Real hr = c.slope * c.ratio, cr = c.grad_gamma * c.ratio;
              part[0] += c.ratio;
              part[1] += kLog ? w : c.ratio * w;
              part[2] += hr;
              part[3] += (kLog ? c.slope : hr) * w;
              part[4] += cr;
              part[5] += (kLog ? c.grad_gamma : cr) * w;
              kept_hr[k + i] = hr;
              kept_w[k + i] = kLog ? c.slope * w : w;
            }
          },
          [&] {
#pragma unroll
            for (int i = 0; i < 6; ++i) {
              totals[i] = Part::kKept ? Sum(part[i]) : totals[i] + part[i];
              part[i] = 0;
            }
          });
      group.add(totals);
      const MapGradSums<Real> sums = {static_cast<Real>(totals[0]), static_cast<Real>(totals[1]),
                                      static_cast<Real>(totals[2]), static_cast<Real>(totals[3]),
                                      static_cast<Real>(totals[4]), static_cast<Real>(totals[5])};
      MapRowGrad<Real> grad = map_row_grad(start.map, sums, grad_top, kLog);
      if (!start.valid) grad.keep = grad.top = kNaN<Real>;
      // From dL/d(z / T) to dL/dz. A 1/T that is far from 1 is multiplied last, after the sums, so that 0 never meets
      // infinity.
      const bool extreme = start.beta > Real(1e9) || start.beta < Real(1e-9);
      const Real inner = extreme ? Real(1) : start.beta, outer = extreme ? start.beta : Real(1);
      grad.keep *= inner;
      grad.spread *= inner;
      grad.shared *= inner;
      grad.top *= inner;

      // dL/dT is minus the sum of dL/dz_k (x_k - x_t), because the dL/dz_k add up to 0.
      Scalar* const grad_input = worked_out(args.grad_input + x.offset);
      const bool writes = args.grad_input != nullptr && exists;
      Sum temperature_sum = 0;
      Real temperature_part = 0;
      x.each_exponent(
          start,
          [&](int begin, int k, Real* y) {
            Real result[kVector];
            if constexpr (!Part::kKept) load_grad(begin, result);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              Real hr = kept_hr[k + i], w = kept_w[k + i];
              if constexpr (!Part::kKept) {
                w = weight_of(y[i], result[i]);
                y[i] = fmax(y[i], kImpossible);
                const MapClass<Real> c = class_of(k + i, y[i]);
                hr = c.slope * c.ratio;
                if (kLog) w *= c.slope;
              }
              // keep h_k m_k - spread h_k r_k
              const Real own = kLog ? grad.keep * w - grad.spread * hr : hr * (grad.keep * w - grad.spread);
              result[i] = own - grad.shared * x.power(k + i, y[i]);
            }
#pragma unroll
            for (int i = 0; i < kVector; ++i) temperature_part += result[i] * y[i];
            if (!writes) return;
            if (extreme) {
#pragma unroll
              for (int i = 0; i < kVector; ++i) result[i] *= outer;
            }
            if (x.probs) {
              // At p = 0 the map leaves the class out, so its gradient is undefined; 0 is returned.
              Real p[kVector];
              x.load(x.input, begin, Real(0), p);
#pragma unroll
              for (int i = 0; i < kVector; ++i) p[i] = p[i] == Real(0) ? Real(0) * grad.keep : result[i] / p[i];
              return x.store(grad_input, begin, p);
            }
            x.store(grad_input, begin, result);
          },
          [&] {
            temperature_sum = Part::kKept ? Sum(temperature_part) : temperature_sum + temperature_part;
            temperature_part = 0;
          });
      // Overwrites a value that the same thread has just written.
      if (writes && x.top_vector >= 0) {
        Real result = grad.top * outer;
        if (x.probs) result /= load_as_compute(x.input[start.top - x.first]);
        grad_input[start.top - x.first] = Store<Scalar>::from_compute(result);
      }
      const double grad_temperature = (static_cast<double>(group.sum(temperature_sum)) * (-1.0 / quick_unit<Real>()) +
                                       static_cast<double>(grad.top) * static_cast<double>(start.gap)) *
                                      static_cast<double>(outer);
      if (exists && x.first == 0) {
        if (args.grad_gamma != nullptr) {
          args.grad_gamma[row] = start.valid ? static_cast<double>(grad.gamma) : kNaN<double>;
        }
        if (args.grad_temperature != nullptr) {
          args.grad_temperature[row] = start.valid ? grad_temperature : kNaN<double>;
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
  const MapPlan plan = plan_map(args.rows, args.classes, kSmall<Scalar>, kLarge<Scalar>);
  const auto numbers = map_numbers<compute_t<Scalar>>(args.gamma_value, args.temperature_value);
  void (*kernel)(CalibrationMapForward<Scalar>, MapNumbers<compute_t<Scalar>>, int, int) =
      plan.capacity == 0                ? calibration_map_forward_kernel<Scalar, 0, kBlock>
      : plan.capacity == kSmall<Scalar> ? calibration_map_forward_kernel<Scalar, kSmall<Scalar>, 1>
      : plan.lanes == kBlock            ? calibration_map_forward_kernel<Scalar, kLarge<Scalar>, kBlock>
      : plan.lanes == kWarp             ? calibration_map_forward_kernel<Scalar, kLarge<Scalar>, kWarp>
                                        : calibration_map_forward_kernel<Scalar, kLarge<Scalar>, 0>;
  const int vectors = rows_are_vectors(args, {args.output, args.output_wide});
  return launch(kernel, plan.grid, kBlock, stream, args, numbers, lane_bits(plan.lanes), vectors);
}

template <typename Scalar>
int calibration_map_backward(const CalibrationMapBackward<Scalar>& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
  const MapPlan plan = plan_map(args.rows, args.classes, kSmall<Scalar>, kLarge<Scalar>);
  const auto numbers = map_numbers<compute_t<Scalar>>(args.gamma_value, args.temperature_value);
  void (*kernel)(CalibrationMapBackward<Scalar>, MapNumbers<compute_t<Scalar>>, int, int) =
      plan.capacity == 0                ? calibration_map_backward_kernel<Scalar, 0, kBlock>
      : plan.capacity == kSmall<Scalar> ? calibration_map_backward_kernel<Scalar, kSmall<Scalar>, 1>
      : plan.lanes == kBlock            ? calibration_map_backward_kernel<Scalar, kLarge<Scalar>, kBlock>
      : plan.lanes == kWarp             ? calibration_map_backward_kernel<Scalar, kLarge<Scalar>, kWarp>
                                        : calibration_map_backward_kernel<Scalar, kLarge<Scalar>, 0>;
  const int vectors = rows_are_vectors(args, {args.grad_output, args.grad_output_wide, args.grad_input});
  return launch(kernel, plan.grid, kBlock, stream, args, numbers, lane_bits(plan.lanes), vectors);
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
