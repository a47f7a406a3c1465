// The elementary functions and conversions of math/portable.h at every magnitude, either sign, infinity and NaN.

#include <cmath>
#include <initializer_list>
#include <limits>

#include "math/portable.h"

using namespace focalkern;

namespace {

volatile double kept;

template <typename Real>
void all_of(Real x) {
  kept = exponential(x);
  kept = bounded_exponential(x);
  kept = exponential_minus_one(x);
  kept = logarithm(x);
  kept = log_one_plus(x);
}

template <typename Real>
void at_every_magnitude() {
  using Limits = std::numeric_limits<Real>;
  for (int e = Limits::min_exponent - Limits::digits; e <= Limits::max_exponent; ++e) {
    for (const Real sign : {Real(1), Real(-1)}) {
      for (const Real m : {Real(0.5), Real(0.7), Real(1) - Limits::epsilon()}) all_of(sign * std::ldexp(m, e));
    }
  }
  for (const Real x : {Real(0), Limits::infinity(), Limits::quiet_NaN()}) {
    all_of(x);
    all_of(-x);
  }
}

}  // namespace

int main() {
  at_every_magnitude<float>();
  at_every_magnitude<double>();
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Half half = {static_cast<uint16_t>(bits)};
    const BFloat16 brain = {static_cast<uint16_t>(bits)};
    kept = Store<Half>::from_compute(load_as_compute(half)).bits;
    kept = Store<BFloat16>::from_compute(load_as_compute(brain)).bits;
    kept = Store<Half>::from_compute(bit_cast<float>(bits << 16 | bits)).bits;
    kept = Store<BFloat16>::from_compute(bit_cast<float>(bits << 16 | bits)).bits;
  }
}
