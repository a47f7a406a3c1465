// Loops over the classes of one row for the dual focal loss with label smoothing (ordered_rows.h).
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/row_loss/tile.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/vector.h"
#include "math/dual_focal.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kOrderedPart = 128;     // terms per partial sum in the type of the computation
constexpr int64_t kMostPairedLanes = 32;  // lanes of CountLower, with any instructions

// Counts the lower classes of every class. Reads and writes whole blocks of kMostPairedLanes.
struct CountLower {
  template <int64_t bytes, typename Real>
  static FK_HOST_DEVICE void run(const Real* z, int64_t classes, label_int<Real>* n_lower) {
    constexpr int64_t n = kLanesOf<bytes, Real>;
    using Reals = simd_t<Real, n>;
    using Ints = simd_t<label_int<Real>, n>;
    const Ints one = Ints{} + label_int<Real>(1);
    for (int64_t i = 0; i < classes; i += 2 * n) {
      const Reals first = load_simd<Reals>(z + i), second = load_simd<Reals>(z + i + n);
      Ints first_count{}, second_count{};
#pragma GCC unroll 4
      for (int64_t j = 0; j < classes; ++j) {
        const Reals other = spread<Reals>(z[j]);
        if constexpr (bytes == 64) {  // AVX-512 adds where a mask says so
          first_count = other < first ? first_count + one : first_count;
          second_count = other < second ? second_count + one : second_count;
        } else {
          first_count -= other < first;
          second_count -= other < second;
        }
      }
      store_simd(first_count, n_lower + i);
      store_simd(second_count, n_lower + i + n);
    }
  }
};

// Copies the classes of a row. Returns whether each is a number below infinity.
template <typename Scalar, typename Real>
FK_VECTOR_CLONES bool copy_classes(const Scalar* from, int64_t stride, int64_t n, Real* to) {
  label_int<Real> wrong = 0;
  if (stride == 1) {
#pragma omp simd reduction(| : wrong)
    for (int64_t c = 0; c < n; ++c) {
      to[c] = load_as_compute(from[c]);
      wrong |= to[c] <= std::numeric_limits<Real>::max() ? 0 : 1;
    }
  } else {
    for (int64_t c = 0; c < n; ++c) {
      to[c] = load_as_compute(from[c * stride]);
      wrong |= to[c] <= std::numeric_limits<Real>::max() ? 0 : 1;
    }
  }
  return wrong == 0;
}

// The classes of a row in ascending order of their logits, without the largest. Whole vectors follow: classes of
// probability 0 with a share of 0 fill them up.
template <typename Real>
struct OrderedClasses {
  int64_t whole;
  Real* z;
  Real* p;
  Real* p_rival;
  Real* share;  // of the target, times the class weight
  Real* gamma;
  // share times m^gamma and times s; then q in place of the first, and the gradient in place of the second
  Real* factor;
  Real* slope;
  Real* taken;  // [whole + 1]: at j + 1 the sum of a_i s_i over the classes i whose rival is j
};

// Calls add(k) for each class and returns the sum of its results.
template <typename Real, typename Add>
FK_HOST_DEVICE double sum_in_parts(int64_t whole, Add add) {
  double sum = 0;
  for (int64_t begin = 0; begin < whole; begin += kOrderedPart) {
    const int64_t end = std::min(begin + kOrderedPart, whole);
    Real part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t k = begin; k < end; ++k) part += add(k);
    sum += static_cast<double>(part);
  }
  return sum;
}

// Writes e^(z - max). Returns their sum.
template <typename Real>
FK_VECTOR_CLONES Real exponentials_of(const OrderedClasses<Real>& row, Real max) {
  const Real* const z = row.z;
  Real* const p = row.p;
  return static_cast<Real>(sum_in_parts<Real>(row.whole, [=](int64_t k) __attribute__((always_inline)) {
    const Real e = exponential(z[k] - max);
    p[k] = e;
    return e;
  }));
}

template <typename Real>
FK_VECTOR_CLONES void multiply(Real* x, int64_t whole, Real factor) {
#pragma omp simd
  for (int64_t k = 0; k < whole; ++k) x[k] *= factor;
}

// Returns the place of a class.
FK_VECTOR_CLONES inline int32_t place_of(const int32_t* order, int64_t n, int32_t label) {
  int32_t place = 0;
#pragma omp simd reduction(+ : place)
  for (int64_t k = 0; k < n; ++k) place += order[k] == label ? static_cast<int32_t>(k) : 0;
  return place;
}

// A share of 0 adds 0, even where the loss of the class is infinite.
template <typename Real>
FK_HOST_DEVICE Real share_of_loss(Real share, Real loss) {
  return share == Real(0) ? Real(0) : share * loss;
}

template <typename Real>
FK_VECTOR_CLONES double sum_losses(const OrderedClasses<Real>& row, Real max, Real log_s) {
  const Real *const z = row.z, *const p = row.p, *const p_rival = row.p_rival, *const gamma = row.gamma;
  const Real* const share = row.share;
  return sum_in_parts<Real>(row.whole, [=](int64_t k) __attribute__((always_inline)) {
    return share_of_loss(share[k], unlikely_dual_terms(p[k], p_rival[k], (max - z[k]) + log_s, gamma[k]).loss);
  });
}

// Writes factor and slope; `kept` is 0 for a detached factor, else 1. Returns the sum of the derivatives in gamma.
template <typename Real>
FK_VECTOR_CLONES double write_slopes(const OrderedClasses<Real>& row, Real max, Real log_s, Real kept) {
  const Real *const z = row.z, *const p = row.p, *const p_rival = row.p_rival, *const gamma = row.gamma;
  const Real* const share = row.share;
  Real *const factor = row.factor, *const slope = row.slope;
  return sum_in_parts<Real>(row.whole, [=](int64_t k) __attribute__((always_inline)) {
    const DualTerms<Real> terms = unlikely_dual_terms(p[k], p_rival[k], (max - z[k]) + log_s, gamma[k]);
    factor[k] = share[k] * terms.factor;
    slope[k] = kept * (share[k] * terms.slope);
    return share[k] * terms.grad_gamma;
  });
}

// Writes q over factor. Returns the sum of q.
template <typename Real>
FK_VECTOR_CLONES Real write_q(const OrderedClasses<Real>& row) {
  const Real *const p = row.p, *const slope = row.slope, *const taken = row.taken;
  Real* const factor = row.factor;
  return static_cast<Real>(sum_in_parts<Real>(row.whole, [=](int64_t k) __attribute__((always_inline)) {
    const Real q = factor[k] + p[k] * (slope[k] - taken[k + 1]);
    factor[k] = q;
    return q;
  }));
}

// Writes the gradient over slope; `all` is the sum of q over all classes.
template <typename Real>
FK_VECTOR_CLONES void write_gradient(const OrderedClasses<Real>& row, Real all, Real scale) {
  const Real *const p = row.p, *const q = row.factor;
  Real* const gradient = row.slope;
#pragma omp simd
  for (int64_t k = 0; k < row.whole; ++k) gradient[k] = scale * (p[k] * all - q[k]);
}

}  // namespace
}  // namespace focalkern::cpu
