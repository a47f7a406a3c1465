// Vectors (gnu::vector_size): loads and stores that convert, shuffles, sums over lanes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "math/portable.h"

// clang has only __builtin_shufflevector; g++ before 12 only __builtin_shuffle.
#if defined(__clang__) || __GNUC__ >= 12
#define FK_HAS_SHUFFLEVECTOR
#endif

// g++ warns that returning such vectors changes the ABI; all callers are inlined.
#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace focalkern::cpu {
namespace {

// n numbers as one vector. Compilers keep a vector in registers, but may keep an array in memory. A vector wider than a
// register stays in memory.
template <typename Number, int64_t n>
struct VectorOf {
  using type [[gnu::vector_size(n * sizeof(Number))]] = Number;
};
template <typename Number, int64_t n>
using simd_t = typename VectorOf<Number, n>::type;

// The number of lanes of compute_t<Scalar> in a vector of this many bytes.
template <int64_t bytes, typename Scalar>
constexpr int64_t kLanesOf = bytes / static_cast<int64_t>(sizeof(compute_t<Scalar>));

// lanes_cast, and loads and stores that convert as load_as_compute and Store do. They compare floats: gcc splits a !=
// of integers into one comparison per lane.
template <typename To, typename From>
FK_HOST_DEVICE To lanes_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Transposes 4 x 4 blocks. Applying it twice restores the input.
template <typename Four>
FK_HOST_DEVICE void transpose_4x4(Four (&v)[4]) {
#ifdef FK_HAS_SHUFFLEVECTOR
  const Four low01 = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5);
  const Four high01 = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
  const Four low23 = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
  const Four high23 = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
  v[0] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
  v[1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
  v[2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
  v[3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
#else
  using Pick = decltype(v[0] < v[0]);
  const Four low01 = __builtin_shuffle(v[0], v[1], Pick{0, 4, 1, 5});
  const Four high01 = __builtin_shuffle(v[0], v[1], Pick{2, 6, 3, 7});
  const Four low23 = __builtin_shuffle(v[2], v[3], Pick{0, 4, 1, 5});
  const Four high23 = __builtin_shuffle(v[2], v[3], Pick{2, 6, 3, 7});
  v[0] = __builtin_shuffle(low01, low23, Pick{0, 1, 4, 5});
  v[1] = __builtin_shuffle(low01, low23, Pick{2, 3, 6, 7});
  v[2] = __builtin_shuffle(high01, high23, Pick{0, 1, 4, 5});
  v[3] = __builtin_shuffle(high01, high23, Pick{2, 3, 6, 7});
#endif
}

// Each 16-bit number as the upper half of a word. Widening and shifting would take several shuffles.
template <typename Words, typename Halves, size_t... index>
FK_HOST_DEVICE Words upper_halves(const Halves& halves, std::index_sequence<index...>) {
#ifdef FK_HAS_SHUFFLEVECTOR
  return lanes_cast<Words>(__builtin_shufflevector(halves, halves, (index / 2)...)) & 0xffff0000u;
#else
  return __builtin_convertvector(halves, Words) << 16;
#endif
}

template <typename Vector, typename Number>
FK_HOST_DEVICE Vector load_simd(const Number* from) {
  using Lane = std::remove_reference_t<decltype(std::declval<Vector&>()[0])>;
  constexpr int64_t n = sizeof(Vector) / sizeof(Lane);
  if constexpr (std::is_same_v<Number, Lane>) {
    Vector lanes;
    std::memcpy(&lanes, from, sizeof(Vector));
    return lanes;
  } else {
    simd_t<uint16_t, n> halves;
    std::memcpy(&halves, from, sizeof(halves));
    using Words = simd_t<uint32_t, n>;
    if constexpr (std::is_same_v<Number, BFloat16>) {
      return lanes_cast<Vector>(upper_halves<Words>(halves, std::make_index_sequence<2 * n>()));
    } else {
      const Words bits = __builtin_convertvector(halves, Words);
      const Words magnitude = (bits & 0x7fffu) << 13;
      const Vector small = lanes_cast<Vector>(magnitude), special = lanes_cast<Vector>(magnitude | 0x7f800000u);
      const Vector least_special = bit_cast<float>(0x0f800000u) - Vector{};
      const Vector positive = small < least_special ? small * 0x1p112f : special;
      return lanes_cast<Vector>(lanes_cast<Words>(positive) | ((bits & 0x8000u) << 16));
    }
  }
}

template <typename Vector, typename Number>
FK_HOST_DEVICE void store_simd(const Vector& lanes, Number* to) {
  using Lane = std::remove_cvref_t<decltype(lanes[0])>;
  constexpr int64_t n = sizeof(Vector) / sizeof(Lane);
  if constexpr (std::is_same_v<Number, Lane>) {
    std::memcpy(to, &lanes, sizeof(Vector));
  } else {
    using Words = simd_t<uint32_t, n>;
    Words bits = lanes_cast<Words>(lanes);
    if constexpr (std::is_same_v<Number, BFloat16>) {
      bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      bits = lanes == lanes ? bits : Words{} + 0x7fc0u;
    } else {
      const Words sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
      const Vector size = lanes_cast<Vector>(magnitude);
      const Vector least_normal = 0x1p-14f - Vector{}, least_infinite = 65520.0f - Vector{};
      const Words rounded = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
      const Words normal = size < least_infinite ? rounded : Words{} + 0x7c00u;
      const Words finite = size < least_normal ? lanes_cast<Words>(size + 0.5f) - 0x3f000000u : normal;
      bits = (lanes == lanes ? finite : Words{} + 0x7e00u) | sign;
    }
    const auto halves = __builtin_convertvector(bits, simd_t<uint16_t, n>);
    std::memcpy(to, &halves, sizeof(halves));
  }
}

template <typename Int>
constexpr Int kFirst[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                            16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

// Copies the first lane to every lane. Adding to a vector of zeros instead may make gcc store each lane after a
// selection.
template <typename Vector, size_t... index>
FK_HOST_DEVICE Vector spread_first(const Vector& v, std::index_sequence<index...>) {
#ifdef FK_HAS_SHUFFLEVECTOR
  return __builtin_shufflevector(v, v, (index * 0)...);
#else
  return __builtin_shuffle(v, decltype(v < v){});
#endif
}
template <typename Vector, typename Number>
FK_HOST_DEVICE Vector spread(Number number) {
  Vector v{};
  v[0] = number;
  return spread_first(v, std::make_index_sequence<sizeof(Vector) / sizeof(Number)>());
}

// A group of adjacent classes, in vectors of n numbers of the compute type. bfloat16 has two vectors, of the even and
// of the odd classes: one instruction converts either half of a word to float.
template <typename Scalar, int64_t n>
struct ClassGroup {
  static constexpr bool kIsPairs = std::is_same_v<Scalar, BFloat16> && std::endian::native == std::endian::little;
  static constexpr int64_t kVectors = kIsPairs ? 2 : 1;
  static constexpr int64_t kClasses = n * kVectors;
  using Reals = simd_t<compute_t<Scalar>, n>;
  using Ints = simd_t<typename detail::Format<compute_t<Scalar>>::Int, n>;

  // Class indices of the first vector; those of the second are one more.
  static FK_HOST_DEVICE Ints first_classes() {
    using Int = typename detail::Format<compute_t<Scalar>>::Int;
    return load_simd<Ints>(kFirst<Int>) * static_cast<Int>(kVectors);
  }

  static FK_HOST_DEVICE void load(const Scalar* from, Reals (&v)[kVectors]) {
    if constexpr (kVectors == 1) {
      v[0] = load_simd<Reals>(from);
    } else {
      using Words = simd_t<uint32_t, n>;
      Words words;
      std::memcpy(&words, from, sizeof(words));
      v[0] = lanes_cast<Reals>(Words(words << 16));
      v[1] = lanes_cast<Reals>(Words(words & 0xffff0000u));
    }
  }

  // Every NaN must be the quiet one: rounding could turn another NaN into a number.
  static FK_HOST_DEVICE void store(const Reals (&v)[kVectors], Scalar* to) {
    if constexpr (kVectors == 1) {
      store_simd(v[0], to);
    } else {
      const auto words = (rounded(v[0]) >> 16) | (rounded(v[1]) & 0xffff0000u);
      std::memcpy(to, &words, sizeof(words));
    }
  }
  static FK_HOST_DEVICE compute_t<Scalar> with_plain_nan(compute_t<Scalar> x) {
    return kVectors == 1 || x == x ? x : std::numeric_limits<compute_t<Scalar>>::quiet_NaN();
  }

 private:
  // Rounds as Store<BFloat16> does, to the upper half.
  static FK_HOST_DEVICE simd_t<uint32_t, n> rounded(const Reals& v) {
    const auto bits = lanes_cast<simd_t<uint32_t, n>>(v);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

// Reduces the lanes by halving. A lane-by-lane reduction takes longer than a short row.
template <typename Vector, typename Combine>
FK_HOST_DEVICE auto fold_lanes(const Vector& lanes, Combine combine);

template <typename Vector, typename Combine, size_t... index>
FK_HOST_DEVICE auto fold_halves(const Vector& lanes, Combine combine, std::index_sequence<index...>) {
#ifdef FK_HAS_SHUFFLEVECTOR  // with memcpy gcc would keep `lanes` in memory
  const auto low = __builtin_shufflevector(lanes, lanes, index...);
  const auto high = __builtin_shufflevector(lanes, lanes, (index + sizeof...(index))...);
#else
  simd_t<std::remove_cvref_t<decltype(lanes[0])>, sizeof...(index)> low, high;
  std::memcpy(&low, &lanes, sizeof(low));
  std::memcpy(&high, reinterpret_cast<const char*>(&lanes) + sizeof(low), sizeof(high));
#endif
  return fold_lanes(combine(low, high), combine);
}

template <typename Vector, typename Combine>
FK_HOST_DEVICE auto fold_lanes(const Vector& lanes, Combine combine) {
  using Lane = std::remove_cvref_t<decltype(lanes[0])>;
  constexpr size_t n = sizeof(Vector) / sizeof(Lane);
  if constexpr (n == 2) {
    return combine(Lane(lanes[0]), Lane(lanes[1]));
  } else {
    return fold_halves(lanes, combine, std::make_index_sequence<n / 2>());
  }
}
struct Larger {
  template <typename Vector>
  FK_HOST_DEVICE Vector operator()(const Vector& a, const Vector& b) const {
    return a > b ? a : b;
  }
};
struct Sum {
  template <typename Vector>
  FK_HOST_DEVICE Vector operator()(const Vector& a, const Vector& b) const {
    return a + b;
  }
};

// The sums over the lanes of two vectors, in the order of fold_lanes with Sum, in fewer instructions.
template <typename Lane>
struct TwoSums {
  Lane first, second;
};
#ifdef FK_HAS_SHUFFLEVECTOR
template <size_t distance, typename Vector, size_t... index>
FK_HOST_DEVICE Vector add_lanes_apart(const Vector& v, std::index_sequence<index...> all) {
  if constexpr (distance == 0) {
    return v;
  } else {
    const Vector sums = v + __builtin_shufflevector(v, v, (index ^ distance)...);
    return add_lanes_apart<distance / 2>(sums, all);
  }
}
template <typename Vector, size_t... index>
FK_HOST_DEVICE auto fold_two(const Vector& a, const Vector& b, std::index_sequence<index...> all) {
  constexpr size_t n = sizeof...(index), half = n / 2;
  // [low half of a, low half of b] + [high half of a, high half of b]
  const Vector low = __builtin_shufflevector(a, b, (index < half ? index : index + half)...);
  const Vector high = __builtin_shufflevector(a, b, (index < half ? index + half : index + n)...);
  const Vector sums = add_lanes_apart<half / 2>(Vector(low + high), all);
  return TwoSums<std::remove_cvref_t<decltype(a[0])>>{sums[0], sums[half]};
}
#endif
template <typename Vector>
FK_HOST_DEVICE auto fold_two(const Vector& a, const Vector& b) {
  using Lane = std::remove_cvref_t<decltype(a[0])>;
#ifdef FK_HAS_SHUFFLEVECTOR
  return fold_two(a, b, std::make_index_sequence<sizeof(Vector) / sizeof(Lane)>());
#else
  return TwoSums<Lane>{fold_lanes(a, Sum{}), fold_lanes(b, Sum{})};
#endif
}

#ifdef FK_HAS_SHUFFLEVECTOR
// Combines lanes that are `distance` apart, those of `a` into lanes without this bit, those of `b` into lanes with it.
template <size_t distance, typename Vector, typename Combine, size_t... index>
FK_HOST_DEVICE Vector fold_apart(const Vector& a, const Vector& b, Combine combine, std::index_sequence<index...>) {
  constexpr size_t n = sizeof...(index);
  const Vector own = __builtin_shufflevector(a, b, (index & distance ? n + index : index)...);
  const Vector other = __builtin_shufflevector(a, b, (index & distance ? n + index - distance : index + distance)...);
  return combine(own, other);
}
template <typename Vector, typename Combine, size_t n, typename Indices>
FK_HOST_DEVICE Vector fold_each(const Vector (&vectors)[n], Combine combine, Indices all) {
  if constexpr (n == 1) {
    return vectors[0];
  } else {
    constexpr size_t half = n / 2;
    Vector folded[half];
    for (size_t i = 0; i < half; ++i) folded[i] = fold_apart<half>(vectors[i], vectors[i + half], combine, all);
    return fold_each(folded, combine, all);
  }
}
#endif
// fold_lanes for as many vectors as they have lanes, in fewer instructions: lane i is the result for vectors[i].
template <typename Vector, typename Combine, size_t n>
FK_HOST_DEVICE Vector fold_each(const Vector (&vectors)[n], Combine combine) {
  static_assert(n == sizeof(Vector) / sizeof(vectors[0][0]));
#ifdef FK_HAS_SHUFFLEVECTOR
  return fold_each(vectors, combine, std::make_index_sequence<n>());
#else
  Vector folded;
  for (size_t i = 0; i < n; ++i) folded[i] = fold_lanes(vectors[i], combine);
  return folded;
#endif
}

}  // namespace
}  // namespace focalkern::cpu
