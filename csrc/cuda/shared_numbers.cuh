// The sums of shared_row.cuh for a short row in shared memory, whose largest logit m is known before the first
// exponential. As in smoothed_numbers.cuh, with t = z c - b, b = m c rounded, c = log2 e, and e' = 2^t = e 2^d.
#pragma once

#include <type_traits>

#include "cuda/common.cuh"
#include "cuda/largest_logit.cuh"
#include "cuda/shared_row.cuh"
#include "cuda/short_row.cuh"
#include "cuda/smoothed_numbers.cuh"

namespace focalkern::cuda {

// Sums over all classes of a row but one of the largest.
struct SharedNumbers {
  float rest;   // of e'
  float share;  // of s, the shares
  float once;   // of s e'
  float twice;  // of s e'^2
  float depth;  // of s t / c
  float fall;   // of s e' t
  float fall2;  // of s e'^2 t
  float error;  // d
  float max;    // m
  int largest;  // the class that is apart

  __device__ __forceinline__ SharedSums<float> sums() const {
    const float factor = fmaf(-error, kLn2, 1.0f), factor2 = factor * factor;  // 2^-d for |d| < 1e-4
    const float of_once = factor * once, of_twice = factor2 * twice;
    return {factor * rest,
            share,
            of_once,
            of_twice,
            share * (error * kLn2) - depth,
            (error * of_once - factor * fall) * kLn2,
            (error * of_twice - factor2 * fall2) * kLn2,
            max,
            0,
            largest};
  }
};

template <int kGamma>
class SharedTerms {
 public:
  __device__ __forceinline__ explicit SharedTerms(float max)
      : max_(max), is_near_(fabsf(max) < kNear), base_(max * kLog2E) {}

  __device__ __forceinline__ float max() const { return max_; }
  // A logit of a class whose terms are 0 if its share is 0.
  template <typename Scalar>
  __device__ __forceinline__ Scalar nothing() const {
    return is_near_ ? Store<Scalar>::from_compute(-60000.0f) : Store<Scalar>::from_compute(-kInfinity<float>);
  }

  // each(take) calls take(logit, share) for the classes of the row but one of the largest, or some of them.
  template <typename Each>
  __device__ __forceinline__ SharedNumbers of(Each each) const {
    SharedNumbers sums;
    const float d = is_near_ ? fmaf(max_, kLog2E, -base_) : 0.0f;
    if (is_near_) {
      sums = {0, 0, 0, 0, 0, 0, 0, d, max_, 0};
      each([&](float z, float share) {
        const float t = fmaf(z, kLog2E, -base_);
        add(sums, t, t, share, share * t);
      });
      sums.depth *= kLn2;
      // Otherwise a logit or a share is not finite, or a product overflows.
      if (fabsf(sums.depth) < kInfinity<float>) return sums;
    }
    sums = {0, 0, 0, 0, 0, 0, 0, d, max_, 0};
    each([&](float z, float share) {
      const float x = max_ - z, t = is_near_ ? fmaf(z, kLog2E, -base_) : x * -kLog2E;
      // A class with a share of 0 adds 0, even at probability zero.
      add(sums, t, fmaxf(t, kLeast), share, share == 0.0f ? 0.0f : share * (d * kLn2 - x));
    });
    return sums;
  }

 private:
  static constexpr float kNear = 1024;    // below this magnitude of m, |d| < 1e-4; beyond, d is 0
  static constexpr float kLeast = -1e4f;  // 2^kLeast is 0, and its product with a finite number, too

  static __device__ __forceinline__ void add(SharedNumbers& sums, float t, float finite, float share, float deeper) {
    const float e = power_of_two(t), se = share * e;
    sums.rest += e;
    sums.share += share;
    sums.depth += deeper;
    if constexpr (kGamma >= 1) {
      sums.once += se;
      sums.fall += se * finite;
    }
    if constexpr (kGamma == 2) {
      const float se2 = se * e;
      sums.twice += se2;
      sums.fall2 += se2 * finite;
    }
  }

  float max_;
  bool is_near_;
  float base_;
};

// Where a > b: a bool, or for two numbers of 16 bits the bits of each.
__device__ __forceinline__ bool where_greater(float a, float b) { return a > b; }
template <typename Number>
__device__ __forceinline__ uint32_t where_greater(WordOf<Number> a, WordOf<Number> b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t result;
  if constexpr (std::is_same_v<Number, BFloat16>) {
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(bit_cast<uint32_t>(a)), "r"(bit_cast<uint32_t>(b)));
  } else {
    asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(result) : "r"(bit_cast<uint32_t>(a)), "r"(bit_cast<uint32_t>(b)));
  }
  return result;
#else
  const bool low = load_as_compute(a.at[0]) > load_as_compute(b.at[0]);
  const bool high = load_as_compute(a.at[1]) > load_as_compute(b.at[1]);
  return (low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u);
#endif
}
__device__ __forceinline__ uint32_t choose(uint32_t where, uint32_t a, uint32_t b) {
  return (a & where) | (b & ~where);
}
__device__ __forceinline__ uint32_t choose(bool first, uint32_t a, uint32_t b) { return first ? a : b; }

// A load of a lane: logits and shares of two classes of 16 bits, or of one class.
template <typename Scalar, typename Target>
struct SharesOfLoad {
  static constexpr int kCount = sizeof(Scalar) + sizeof(Target) == sizeof(uint32_t) ? 2 : 1;
  static constexpr int kBytes = sizeof(Scalar) + sizeof(Target);  // of a class in the tile
  static constexpr int kWidest = sizeof(Target) > sizeof(Scalar) ? sizeof(Target) : sizeof(Scalar);
  using Kept = std::conditional_t<kCount == 2, Scalar, float>;  // the types of the numbers in a word
  using KeptShare = std::conditional_t<kCount == 2, Target, float>;
  uint32_t word;
  uint32_t shares;

  struct From {
    const Scalar* logits;
    const Target* targets;

    __device__ __forceinline__ SharesOfLoad operator[](int load) const {
      if constexpr (kCount == 2) {
        return {reinterpret_cast<const uint32_t*>(logits)[load], reinterpret_cast<const uint32_t*>(targets)[load]};
      } else {
        return {bit_cast<uint32_t>(load_as_compute(logits[load])), bit_cast<uint32_t>(load_as_compute(targets[load]))};
      }
    }
    __device__ __forceinline__ void operator+=(int loads) {
      logits += loads * kCount;
      targets += loads * kCount;
    }
  };

  // The largest of several loads. The place of a class is kCount times the number of its load, plus its place there;
  // two places of 16 bits lie in a word as two logits do.
  struct Largest {
    uint32_t word;
    uint32_t shares;
    uint32_t places;

    Largest() = default;
    __device__ __forceinline__ explicit Largest(const SharesOfLoad& first)
        : word(first.word), shares(first.shares), places(places_of(0)) {}
    __device__ __forceinline__ SharesOfLoad add(const SharesOfLoad& other, int number) {
      using Compared = std::conditional_t<kCount == 2, WordOf<Kept>, float>;
      const auto above = where_greater(bit_cast<Compared>(other.word), bit_cast<Compared>(word));
      const SharesOfLoad smaller = {choose(above, word, other.word), choose(above, shares, other.shares)};
      word = choose(above, other.word, word);
      shares = choose(above, other.shares, shares);
      places = choose(above, places_of(number), places);
      return smaller;
    }
    static __device__ __forceinline__ uint32_t places_of(int number) {
      return kCount == 2 ? 2 * number | (2 * number + 1) << 16 : number;
    }
  };
  struct Pair {
    float largest = -kInfinity<float>;
    int place = 0;
    float beside = 0;
    float share_beside = 0;

    __device__ __forceinline__ void set(const Largest& of) {
      float values[kCount], shares[kCount];
      unpack_word<Kept>(of.word, values);
      unpack_word<KeptShare>(of.shares, shares);
      largest = values[0];
      place = static_cast<int>(of.places);
      if constexpr (kCount == 2) {
        const bool is_second = values[1] > values[0];
        largest = is_second ? values[1] : values[0];
        place = static_cast<int>(is_second ? of.places >> 16 : of.places & 0xffffu);
        beside = is_second ? values[0] : values[1];
        share_beside = is_second ? shares[0] : shares[1];
      }
    }
    template <typename Take>
    __device__ __forceinline__ void take_beside(Take take) const {
      if constexpr (kCount == 2) take(beside, share_beside);
    }
  };

  // Calls take(logit, share) for each class.
  template <typename Take>
  __device__ __forceinline__ void each(Take take) const {
    float values[kCount], of_values[kCount];
    unpack_word<Kept>(word, values);
    unpack_word<KeptShare>(shares, of_values);
#pragma unroll
    for (int k = 0; k < kCount; ++k) take(values[k], of_values[k]);
  }
};

// The word of a class that a load reads: a number, or two of 16 bits.
template <int kCount, typename Number>
using WordOfLoad = std::conditional_t<kCount == 2, uint32_t, Number>;
template <int kCount, typename Number>
__device__ __forceinline__ WordOfLoad<kCount, Number>& word_of_class(Number* row, int j) {
  return reinterpret_cast<WordOfLoad<kCount, Number>*>(row)[j / kCount];
}
// Writes the number of a class, and returns its word as it was.
template <int kCount, typename Number>
__device__ __forceinline__ WordOfLoad<kCount, Number> replace_number(Number* row, int j, Number value) {
  auto& word = word_of_class<kCount>(row, j);
  const auto before = word;
  if constexpr (kCount == 2) {
    const int shift = j % 2 * 16;
    word = (before & ~(0xffffu << shift)) | static_cast<uint32_t>(bit_cast<uint16_t>(value)) << shift;
  } else {
    word = value;
  }
  return before;
}

// The numbers of the row `row` of a tile, which a thread computes.
template <int kGamma, typename Scalar, typename Target>
__device__ __forceinline__ SharedNumbers shared_numbers(const Scalar* logits, const Target* targets, int row,
                                                        int classes, bool around) {
  using Load = SharesOfLoad<Scalar, Target>;
  const typename Load::From from = {logits + row * classes, targets + row * classes};
  const LoadsOfRow<Load, false> loads(from, classes / Load::kCount, 1, row, around);
  const ShortRowOfLane<Load, false> values(loads);
  auto sums = SharedTerms<kGamma>(values.pair().largest).of([&](auto take) { values.each_other(take); });
  const int place = values.pair().place;
  sums.largest = loads.load_of(place / Load::kCount) * Load::kCount + place % Load::kCount;
  return sums;
}

// The same for `lanes` adjacent threads, which read the row twice: first for its largest class. For the second time
// this class has no probability and no share. A row that does not exist is not read.
template <int kGamma, typename Scalar, typename Target>
__device__ __forceinline__ SharedNumbers shared_numbers(Scalar* logits, Target* targets, int row, int classes,
                                                        bool around, int lane, int lanes, bool exists) {
  using Load = SharesOfLoad<Scalar, Target>;
  constexpr int kCount = Load::kCount;
  const PlaceOfLane<Load> place(classes, lane, lanes, around);
  const int first = row * classes + place.first * kCount;
  const typename Load::From from = {logits + first, targets + first};
  const LoadsOfRow<Load, true> loads(from, exists ? place.count : 0, place.step, row, around);
  typename Load::Pair mine;
  int own = kNoClass;
  if (!loads.is_empty()) {
    typename Load::Largest largest;
    loads.each([&](const Load& load, int number) {
      if (number == 0) {
        largest = typename Load::Largest(load);
      } else {
        largest.add(load, number);
      }
    });
    mine.set(largest);
    own = (place.first + loads.load_of(mine.place / kCount) * place.step) * kCount + mine.place % kCount;
  }
  const SharedTerms<kGamma> terms(group_max(mine.largest, lanes));
  if (mine.largest != terms.max()) own = kNoClass;
  int largest = own;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    if (offset >= lanes) break;
    const int other = __shfl_xor_sync(kFullWarp, largest, offset);
    largest = other < largest ? other : largest;
  }
  const bool is_apart = own == largest && own != kNoClass;
  logits += row * classes;
  targets += row * classes;
  WordOfLoad<kCount, Target> before = {};
  if (is_apart) {
    replace_number<kCount>(logits, own, terms.template nothing<Scalar>());
    before = replace_number<kCount>(targets, own, Store<Target>::from_compute(0.0f));
  }
  auto sums = terms.of([&](auto take) { loads.each([&](const Load& load, int) { load.each(take); }); });
  if (is_apart) word_of_class<kCount>(targets, own) = before;
  sums.largest = largest;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    if (offset >= lanes) break;
    const auto add = [&](float& sum) { sum += __shfl_xor_sync(kFullWarp, sum, offset); };
    add(sums.rest);
    add(sums.share);
    add(sums.depth);
    if constexpr (kGamma >= 1) {
      add(sums.once);
      add(sums.fall);
    }
    if constexpr (kGamma == 2) {
      add(sums.twice);
      add(sums.fall2);
    }
  }
  return sums;
}

}  // namespace focalkern::cuda
