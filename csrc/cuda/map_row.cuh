// A thread's part of a row of the calibration map, and passes 1 and 2 over it (calibration_map.cu).
#pragma once

#include "cuda/common.cuh"
#include "cuda/map_group.cuh"
#include "kernels/calibration_map.h"
#include "math/calibration_map.h"

namespace focalkern::cuda {
namespace {

// A thread's part of a row, in vectors that are `lanes` threads apart. If rows do not begin on a 16-byte boundary, a
// vector gathers classes that are `lanes` apart, so that adjacent threads still read adjacent classes. With `capacity`
// 0 no values stay in registers, and each pass loads the vectors again. Slots beyond the row hold -inf, an impossible
// class. `on_grid`: as in map_exponent.
template <typename Scalar, int capacity, bool on_grid>
struct RowPart {
  using Real = compute_t<Scalar>;
  // If a thread has a whole row, eight classes per vector would leave too many slots empty.
  static constexpr bool kWhole = sizeof(Scalar) >= sizeof(Real) || capacity != kSmall<Scalar>;
  static constexpr int kVector = kWhole ? kVectorSize<Scalar> : 4;
  static constexpr bool kKept = capacity > 0;
  static constexpr int kSlots = kKept ? capacity : kVector;
  static constexpr int kVectorsOfSum = 8;  // vectors per partial sum in Real; partial sums are added in double
  static constexpr bool kPowers = kKept && sizeof(Scalar) < sizeof(Real);  // whether pass 2 keeps its exponentials
  using Sum = SumOf<Real, kKept>;

  const Scalar* input;  // address of the thread's first class
  int64_t offset;       // offset of that class, in every operand
  int first;            // index of that class
  int classes;
  int lanes;
  int vectors;  // whether every row begins on a boundary
  bool probs;
  int top_vector;  // start of the vector with the largest class; -1 in threads that do not have it
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
  // Loads all values that stay in registers.
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

  // f(begin, k, x): the logits of a vector. f may change the values that stay in registers.
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
  // so that it adds 0 to every sum. Pass 2 stores y in the slots.
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

// Removes the largest class from the row: the first one if several are equal; the others stay. If the maximum is NaN,
// no class is removed.
template <typename Scalar, int capacity, bool on_grid>
__device__ __forceinline__ void find_top_two(RowPart<Scalar, capacity, on_grid>& x, const MapGroup& group, int* top,
                                             compute_t<Scalar>* largest, compute_t<Scalar>* next) {
  using Part = RowPart<Scalar, capacity, on_grid>;
  using Real = typename Part::Real;
  constexpr int kVector = Part::kVector;
  const auto pause = [] {};
  int own_class = INT32_MAX;
  // Records the first position in `values`, a vector of the thread's part, that has the largest logit.
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
  // false for a row of only NaN, too. In a row with other numbers, a NaN makes the sum of exponentials NaN.
  start.valid = start.valid && largest > -kInfinity<Real> && largest < kInfinity<Real>;
  // If no other class is possible, any shift serves.
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

}  // namespace
}  // namespace focalkern::cuda
