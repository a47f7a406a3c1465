// Sigmoid focal, asymmetric and quality focal loss, forward and backward, on the CPU.
//
//   forward   input, target (and gamma, alpha, weight) -> loss per element, or its sum
//   backward  the same and grad_loss -> grad_input (and grad_target, grad_gamma)
//
// Memory: each direction reads the logits and the dense target once. Elements are taken a tile at a time. What is not
// there in the right type and order (a broadcast alpha, a bool target, logits with strides) is brought into a buffer of
// the tile; then one loop over the tile, with the formula of math/sigmoid_loss.h inside. It exists for soft and for
// hard targets, for labels along rows of classes (as if all were background; where they say 1, the logit's sign and the
// weight change beforehand, or the asymmetric loss is computed again), and for gammas that are small whole numbers (no
// logarithm, no second exponential) and any others. Labels of a few classes become shares.
//
// A bfloat16 has only 65536 values: where a large tensor of them has hard targets and one number for each parameter,
// all results there are come first, and the tiles look them up.

#include <algorithm>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/asymmetric_loss.h"
#include "cpu/simd/dispatch.h"
#include "kernels/sigmoid_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kTile = 1024;     // elements
constexpr int64_t kBlock = 64;      // elements between two requests for memory
constexpr int64_t kFewClasses = 8;  // in a row of labels, whose shares are written down
constexpr int64_t kRowGroup = 16;   // rows of few classes at once

enum class Targets { kSoft, kHard, kLabels };  // any share; 0 or 1; 0 everywhere but at TileLabels::one

// What the labels of a tile say, beside shares.
struct TileLabels {
  bool is_valid = true;
  int64_t invalid_label = 0;
  int64_t ones = 0;
  int64_t ignored_runs = 0;
  int64_t ignored = 0;  // elements
  int16_t one[kTile];
  struct Run {
    int16_t first, length;
  } ignored_run[kTile];
};

// What the loops read: a buffer of the tile, or the user's memory.
template <typename Real>
struct TileView {
  const Real* input;
  const Real* target;
  const Real* gamma;
  const Real* second;    // alpha, or gamma_positive
  const Real* negative;  // 1 - alpha
  const Real* scale;     // weight, and in the backward pass times the upstream gradient
  const Real* one;   // of hard focal losses: alpha times scale, negative in the backward pass, where -x is looked at
  const Real* zero;  // and (1 - alpha) times scale; of labels also where they say 1
  const Real* sign;  // of labels: -1 where they say 1, otherwise 1
  Targets targets;
  const char* target_source;  // the dense target's elements as they lie in the user's memory,
  int64_t target_size;        // and the bytes of one; 0 for what is not dense
};

// ---- reading -------------------------------------------------------------------------------------------------------

using focalkern::load_as_compute;
FK_HOST_DEVICE int32_t load_as_compute(uint8_t x) { return x; }
FK_HOST_DEVICE int32_t load_as_compute(int32_t x) { return x; }
FK_HOST_DEVICE int64_t load_as_compute(int64_t x) { return x; }

template <typename From, typename To>
FK_VECTOR_CLONES void read_run(const From* from, int64_t stride, int64_t n, To* to) {
  if (stride == 1) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(load_as_compute(from[i]));
  } else if (stride == 0) {
    std::fill_n(to, n, static_cast<To>(load_as_compute(*from)));
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(load_as_compute(from[i * stride]));
  }
}

// Logits keep their type.
template <typename Scalar>
void copy_run(const Scalar* from, int64_t stride, int64_t n, Scalar* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
}

// Calls f with a pointer of the type that the operand has.
template <typename Function>
void with_type(const Operand& operand, Function f) {
  switch (operand.type) {
    case ElementType::kFloat:
      return f(static_cast<const float*>(operand.data));
    case ElementType::kDouble:
      return f(static_cast<const double*>(operand.data));
    case ElementType::kHalf:
      return f(static_cast<const Half*>(operand.data));
    case ElementType::kBFloat16:
      return f(static_cast<const BFloat16*>(operand.data));
    case ElementType::kUInt8:
      return f(static_cast<const uint8_t*>(operand.data));
    case ElementType::kInt32:
      return f(static_cast<const int32_t*>(operand.data));
    case ElementType::kInt64:
      return f(static_cast<const int64_t*>(operand.data));
  }
}

// The runs along the innermost dim that make up the elements [begin, end).
class Runs {
 public:
  Runs(const ElementSpace& space, int64_t begin, int64_t end) : space_(space), left_(end - begin) {
    for (int d = space.dims - 1; d >= 0; --d) {
      position_[d] = begin % space.sizes[d];
      begin /= space.sizes[d];
    }
    start();
  }
  bool more() const { return length_ > 0; }
  int64_t length() const { return length_; }
  int64_t position(int dim) const { return position_[dim]; }
  int64_t offset(const Operand& operand) const {
    int64_t sum = 0;
    for (int d = 0; d < space_.dims; ++d) sum += position_[d] * operand.strides[d];
    return sum;
  }
  void next() {
    left_ -= length_;
    int d = space_.dims - 1;
    position_[d] += length_;
    for (; d > 0 && position_[d] == space_.sizes[d]; --d) {
      position_[d] = 0;
      ++position_[d - 1];
    }
    start();
  }

 private:
  void start() {
    const int last = space_.dims - 1;
    length_ = left_ > 0 ? std::min(left_, space_.sizes[last] - position_[last]) : 0;
  }
  const ElementSpace& space_;
  int64_t position_[kMaxDims];
  int64_t left_;
  int64_t length_;
};

template <typename Real>
constexpr ElementType kTypeOf = sizeof(Real) == sizeof(float) ? ElementType::kFloat : ElementType::kDouble;

// The operand's elements [begin, end): where they lie, or brought into `buffer`.
template <typename Real>
const Real* read(const Operand& operand, const ElementSpace& space, int64_t begin, int64_t end, Real* buffer) {
  if (operand.dense && operand.type == kTypeOf<Real>) return static_cast<const Real*>(operand.data) + begin;
  with_type(operand, [&](const auto* data) {
    if (operand.dense) return read_run(data + begin, 1, end - begin, buffer);
    Real* to = buffer;
    const int last = space.dims - 1;
    for (Runs runs(space, begin, end); runs.more(); to += runs.length(), runs.next()) {
      read_run(data + runs.offset(operand), operand.strides[last], runs.length(), to);
    }
  });
  return buffer;
}

template <typename Scalar>
const Scalar* read_input(const SigmoidLossArgs<Scalar>& args, int64_t begin, int64_t end, Scalar* buffer) {
  const auto* data = static_cast<const Scalar*>(args.input.data);
  if (args.input.dense) return data + begin;
  Scalar* to = buffer;
  for (Runs runs(args.space, begin, end); runs.more(); to += runs.length(), runs.next()) {
    copy_run(data + runs.offset(args.input), args.input.strides[args.space.dims - 1], runs.length(), to);
  }
  return buffer;
}

// 1 where the label is this class.
template <typename Label, typename Real>
FK_VECTOR_CLONES void compare_labels(const Label* labels, int64_t stride, int64_t this_class, int64_t n, Real* share) {
  const auto wanted = static_cast<Label>(this_class);
  if (static_cast<int64_t>(wanted) != this_class) {  // class 256 of uint8: no label can be it
    std::fill_n(share, n, Real(0));
  } else if (stride == 1) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) share[i] = labels[i] == wanted ? Real(1) : Real(0);
  } else {
    for (int64_t i = 0; i < n; ++i) share[i] = labels[i * stride] == wanted ? Real(1) : Real(0);
  }
}

// Whether all labels are in [0, classes] and none is to be ignored.
template <typename Label>
FK_VECTOR_CLONES bool all_count(const Label* labels, int64_t stride, int64_t n, int64_t classes, int64_t ignore_index) {
  using Wide = std::conditional_t<sizeof(Label) == 8, int64_t, int32_t>;
  using Bits = std::make_unsigned_t<Wide>;  // whose differences wrap
  const auto top = static_cast<Bits>(std::min<int64_t>(classes, std::numeric_limits<Wide>::max()));
  // Out of range: the label is negative, or what is left up to the top.
  Bits signs = 0;
  if (stride == 1) {
#pragma omp simd reduction(| : signs)
    for (int64_t i = 0; i < n; ++i) signs |= static_cast<Bits>(labels[i]) | (top - static_cast<Bits>(labels[i]));
  } else {
    for (int64_t i = 0; i < n; ++i) {
      signs |= static_cast<Bits>(labels[i * stride]) | (top - static_cast<Bits>(labels[i * stride]));
    }
  }
  int64_t ignored = 0;
  if (ignore_index >= 0 && ignore_index <= classes) {
    for (int64_t i = 0; i < n; ++i) ignored += static_cast<int64_t>(labels[i * stride]) == ignore_index;
  }
  return static_cast<Wide>(signs) >= 0 && ignored == 0;
}

// The shares of rows of few classes.
template <int kClasses, typename Real>
FK_VECTOR_CLONES void spread_loop(const int32_t* labels, int64_t rows, Real* share) {
#pragma omp simd
  for (int64_t row = 0; row < rows; ++row) {
    for (int c = 0; c < kClasses; ++c) share[row * kClasses + c] = labels[row] == c ? Real(1) : Real(0);
  }
}

#ifdef FK_HAS_AVX512_CODE
// Sixteen rows, and as many vectors of shares as there are classes.
template <int kClasses>
struct SpreadOrder {
  alignas(64) int32_t row[kClasses * kRowGroup];
  alignas(64) int32_t class_index[kClasses * kRowGroup];
  constexpr SpreadOrder() : row(), class_index() {
    for (int i = 0; i < kClasses * kRowGroup; ++i) {
      row[i] = i / kClasses;
      class_index[i] = i % kClasses;
    }
  }
};

FK_AVX512 FK_HOST_DEVICE void store_shares(__mmask16 is_one, float* to) {
  _mm512_storeu_ps(to, _mm512_maskz_mov_ps(is_one, _mm512_set1_ps(1)));
}
FK_AVX512 FK_HOST_DEVICE void store_shares(__mmask16 is_one, double* to) {
  _mm512_storeu_pd(to, _mm512_maskz_mov_pd(static_cast<__mmask8>(is_one), _mm512_set1_pd(1)));
  _mm512_storeu_pd(to + 8, _mm512_maskz_mov_pd(static_cast<__mmask8>(is_one >> 8), _mm512_set1_pd(1)));
}

// Reads and writes whole groups of rows.
template <int kClasses, typename Real>
FK_AVX512 void spread_groups(const int32_t* labels, int64_t rows, Real* share) {
  static constexpr SpreadOrder<kClasses> kOrder;
  for (int64_t row = 0; row < rows; row += kRowGroup, share += kRowGroup * kClasses) {
    const __m512i of_rows = _mm512_loadu_si512(labels + row);
    for (int v = 0; v < kClasses * kRowGroup; v += kRowGroup) {
      const __m512i label = _mm512_permutexvar_epi32(_mm512_load_si512(kOrder.row + v), of_rows);
      store_shares(_mm512_cmpeq_epi32_mask(label, _mm512_load_si512(kOrder.class_index + v)), share + v);
    }
  }
}
#endif

template <int kClasses, typename Real>
void spread(const int32_t* labels, int64_t rows, Real* share) {
#ifdef FK_HAS_AVX512_CODE
  if (has_avx512()) return spread_groups<kClasses>(labels, rows, share);
#endif
  spread_loop<kClasses>(labels, rows, share);
}

// Calls f<classes>, of 1 to kFewClasses of them.
template <typename Function>
void with_few_classes(int64_t classes, Function f) {
  [&]<int... k>(std::integer_sequence<int, k...>) {
    ((classes == k + 1 ? f(std::integral_constant<int, k + 1>{}) : void()), ...);
  }(std::make_integer_sequence<int, kFewClasses>{});
}

// The places of the ones of rows of classes, the first of which begins at `row`. Returns whether all labels count. It
// does not branch: half of a detector's rows are background, in no order.
template <typename Label>
bool find_ones(const Label* label, int64_t row_stride, int64_t row, int64_t n, int64_t classes, int64_t ignore_index,
               TileLabels* found) {
  const auto top = static_cast<uint64_t>(classes), ignored = static_cast<uint64_t>(ignore_index);
  int64_t ones = 0;
  uint64_t most = 0;
  bool none_ignored = true;
  const auto take_checked = [&] {
    const auto of_row = static_cast<uint64_t>(*label), at = static_cast<uint64_t>(row) + of_row;
    const bool counts = of_row != ignored;
    found->one[ones] = static_cast<int16_t>(at);
    ones += (of_row < top) & (at < static_cast<uint64_t>(n)) & counts;
    none_ignored &= counts;
    most = std::max(most, of_row);
    row += classes;
    label += row_stride;
  };
  if (row < 0) take_checked();
  if (ignored > top) {
    for (; row + classes <= n; row += classes, label += row_stride) {
      const auto of_row = static_cast<uint64_t>(*label);
      found->one[ones] = static_cast<int16_t>(row + of_row);
      ones += of_row < top;
      most = std::max(most, of_row);
    }
  }
  while (row < n) take_checked();
  found->ones = ones;
  return none_ignored && most <= top;
}

// The labels of the elements [begin, end): the places of the ones, or where rows have few classes or the labels do not
// lie along the classes, one-hot shares, which are returned. They are in `buffer`, of a tile and a group of rows.
template <typename Scalar, typename Label>
const compute_t<Scalar>* read_labels(const SigmoidLossArgs<Scalar>& args, const Label* labels, int64_t begin,
                                     int64_t end, compute_t<Scalar>* buffer, TileLabels* found) {
  const int last = args.space.dims - 1;
  const int64_t stride = args.target.strides[last];
  // Returns whether the run of elements is to be left out.
  const auto leave_out = [&](int64_t label, int64_t first, int64_t n) {
    if (label >= 0 && label <= args.classes && label != args.ignore_index) return false;
    if (label == args.ignore_index) {
      found->ignored += n;
      found->ignored_run[found->ignored_runs++] = {static_cast<int16_t>(first), static_cast<int16_t>(n)};
    } else {
      found->is_valid = false;
      found->invalid_label = label;
    }
    return true;
  };
  if (args.class_dim == last && args.space.dims <= 2) {
    // Rows of classes, by far the most frequent case.
    const int64_t classes = args.space.sizes[last], row_stride = last > 0 ? args.target.strides[0] : 0;
    const int64_t first_row = begin / classes, start = first_row * classes - begin, n = end - begin;
    const Label* label = labels + first_row * row_stride;
    const bool are_few = classes <= kFewClasses;
    bool all;
    if (are_few) {
      const int64_t rows = (end - 1) / classes - first_row + 1;
      int32_t narrow[kTile + kRowGroup];
      read_run(label, row_stride, rows, narrow);
      with_few_classes(classes, [&](auto known) { spread<decltype(known)::value>(narrow, rows, buffer); });
      all = all_count(label, row_stride, rows, classes, args.ignore_index);
    } else {
      all = find_ones(label, row_stride, start, n, classes, args.ignore_index, found);
    }
    for (int64_t row = start; row < n && !all; row += classes, label += row_stride) {
      const int64_t from = std::max<int64_t>(row, 0);
      leave_out(static_cast<int64_t>(*label), from, std::min(row + classes, n) - from);
    }
    return are_few ? buffer - start : nullptr;
  }
  int64_t first = 0;
  for (Runs runs(args.space, begin, end); runs.more(); first += runs.length(), runs.next()) {
    const Label* label = labels + runs.offset(args.target);
    const int64_t n = runs.length();
    if (args.class_dim == last) {
      // A run is a row of classes, or a part of one.
      if (leave_out(*label, first, n)) continue;
      const int64_t at = static_cast<int64_t>(*label) - runs.position(last);
      if (at >= 0 && at < n) found->one[found->ones++] = static_cast<int16_t>(first + at);
      continue;
    }
    if (!all_count(label, stride, n, args.classes, args.ignore_index)) {
      for (int64_t i = 0; i < n; ++i) leave_out(label[i * stride], first + i, 1);
    }
    compare_labels(label, stride, runs.position(args.class_dim), n, buffer + first);
  }
  return args.class_dim == last ? nullptr : buffer;
}

// Whether all targets are 0 or 1. t^2 - t is 0 there alone, rounded once or twice, and never -0.
template <typename Bits, typename Real>
FK_VECTOR_CLONES bool all_hard_of_real(const Real* target, int64_t n) {
  Bits found = 0;
  const int64_t half = n / 2;
#pragma omp simd reduction(| : found)
  for (int64_t i = 0; i < half; ++i) {
    const Real first = target[i], second = target[i + half];
    found |= bit_cast<Bits>(first * first - first) | bit_cast<Bits>(second * second - second);
  }
  for (int64_t i = 2 * half; i < n; ++i) found |= bit_cast<Bits>(target[i] * target[i] - target[i]);
  return found == 0;
}

// The same of 16 bits. Of positive numbers only 0 and 1 have their bits change, from one to the next, nowhere or at
// both ends of those that 1 has: two instructions per vector instead of conversions.
template <typename Stored, typename Bits, int kMantissaBits>
FK_VECTOR_CLONES bool all_hard_of_bits(const Stored* target, int64_t n) {
  Bits changes = 0, set = 0;
  const int64_t quarter = n / 4;
#pragma omp simd reduction(| : changes, set)
  for (int64_t i = 0; i < quarter; ++i) {
    const Bits first = bit_cast<Bits>(target[i]), second = bit_cast<Bits>(target[i + quarter]);
    const Bits third = bit_cast<Bits>(target[i + 2 * quarter]), fourth = bit_cast<Bits>(target[i + 3 * quarter]);
    changes |=
        static_cast<Bits>((first ^ static_cast<Bits>(first + first)) | (second ^ static_cast<Bits>(second + second)));
    changes |=
        static_cast<Bits>((third ^ static_cast<Bits>(third + third)) | (fourth ^ static_cast<Bits>(fourth + fourth)));
    set |= static_cast<Bits>((first | second) | (third | fourth));
  }
  for (int64_t i = 4 * quarter; i < n; ++i) {
    const Bits bits = bit_cast<Bits>(target[i]);
    changes |= static_cast<Bits>(bits ^ static_cast<Bits>(bits + bits));
    set |= bits;
  }
  constexpr int kBits = 8 * sizeof(Bits);
  constexpr auto kOfOne = static_cast<Bits>(Bits(1) << kMantissaBits | Bits(1) << (kBits - 2));
  return (changes & static_cast<Bits>(~kOfOne)) == 0 && set >> (kBits - 1) == 0;
}

bool all_hard(const float* target, int64_t n) { return all_hard_of_real<uint32_t>(target, n); }
bool all_hard(const double* target, int64_t n) { return all_hard_of_real<uint64_t>(target, n); }
bool all_hard(const Half* target, int64_t n) { return all_hard_of_bits<Half, uint16_t, 10>(target, n); }
bool all_hard(const BFloat16* target, int64_t n) { return all_hard_of_bits<BFloat16, uint16_t, 7>(target, n); }

template <typename Real>
FK_VECTOR_CLONES void fill(Real value, int64_t n, Real* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = value;
}

template <typename Real>
FK_VECTOR_CLONES void one_minus(const Real* from, int64_t n, Real* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = Real(1) - from[i];
}

template <typename Real>
FK_VECTOR_CLONES void multiply(Real by, int64_t n, Real* product) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) product[i] *= by;
}

// A scale of 0 stays 0, whatever comes from upstream.
template <typename Real>
FK_VECTOR_CLONES void multiply(const Real* by, int64_t n, Real* scale) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) scale[i] = scale[i] == Real(0) ? Real(0) : scale[i] * by[i];
}

template <typename Real>
FK_VECTOR_CLONES void products(Real sign, const Real* a, const Real* b, int64_t n, Real* product) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) product[i] = sign * a[i] * b[i];
}

// What is known of the gammas, and spares the loop a logarithm and an exponential, or a handful of products.
enum class Powers { kAny, kSmall, kSquare };

// ---- a tile of parameters ------------------------------------------------------------------------------------------

template <typename Scalar>
class TileReader {
 public:
  using Real = compute_t<Scalar>;

  // What is one number for all elements is written once. `sign_of_one` is that of TileView::one, `grad_loss` null in
  // the forward pass.
  TileReader(const SigmoidLossArgs<Scalar>& args, Real factor, Real sign_of_one, const Operand* grad_loss)
      : args_(args),
        factor_(factor),
        sign_of_one_(sign_of_one),
        grad_loss_(grad_loss && grad_loss->data ? grad_loss : nullptr) {
    if (args.target_is_labels) fill(Real(1), kTile, signs_);
    fill_number(args.gamma, gamma_);
    if (args.loss_kind == SigmoidLoss::kAsymmetric) fill_number(args.second, second_);
    if (args.has_alpha) {
      fill_number(args.second, second_);
      if (!args.second.data) one_minus(second_, kTile, negative_);
    } else if (args.loss_kind != SigmoidLoss::kAsymmetric) {
      fill(Real(1), kTile, second_);
      fill(Real(1), kTile, negative_);
    }
    if (!args.weight.data) fill(factor * static_cast<Real>(args.weight.value), kTile, scale_);
    has_numbers_ = !args.weight.data && !grad_loss_ && !(args.has_alpha && args.second.data);
    if (has_numbers_ && args.loss_kind != SigmoidLoss::kAsymmetric) weigh(second_, scale_, kTile);
  }

  Powers powers() const {
    const auto is_small = [](const Operand& operand) {
      return !operand.data && SmallPower<Real>::covers(static_cast<Real>(operand.value));
    };
    if (!is_small(args_.gamma)) return Powers::kAny;
    if (args_.loss_kind == SigmoidLoss::kAsymmetric) return is_small(args_.second) ? Powers::kSmall : Powers::kAny;
    return args_.gamma.value == 2 ? Powers::kSquare : Powers::kSmall;
  }

  // Without the logits, which a tile that is looked up needs as they are.
  TileView<Real> view(int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    TileView<Real> view{};
    flip_ones(false);
    logits_ = read_input(args_, begin, end, raw_);
    view.gamma = read_or_number(args_.gamma, begin, end, gamma_);
    view.second = read_or_number(args_.second, begin, end, second_);
    view.negative = negative_;
    if (args_.has_alpha && args_.second.data) one_minus(view.second, n, negative_);
    view.scale = scale_;
    if (args_.weight.data) {
      view.scale = own_scale(read(args_.weight, args_.space, begin, end, scale_), n);
      multiply(factor_, n, own_scale_);
    }
    if (grad_loss_) {
      view.scale = own_scale(view.scale, n);
      multiply(read(*grad_loss_, args_.space, begin, end, grad_), n, own_scale_);
    }
    if (args_.target_is_labels) {
      labels_.is_valid = true;
      labels_.ones = labels_.ignored_runs = labels_.ignored = 0;
      const Real* shares = nullptr;
      with_type(args_.target, [&](const auto* labels) {
        if constexpr (std::is_integral_v<std::decay_t<decltype(*labels)>>) {
          shares = read_labels(args_, labels, begin, end, target_, &labels_);
        }
      });
      view.targets = shares ? Targets::kHard : Targets::kLabels;
      view.target = shares ? shares : target_;
    } else {
      read_target(begin, end, &view);
    }
    if (!has_numbers_ && view.targets != Targets::kSoft && args_.loss_kind != SigmoidLoss::kAsymmetric) {
      weigh(view.second, view.scale, n);
    }
    view.one = one_;
    view.zero = zero_;
    view.sign = signs_;
    if (view.targets == Targets::kLabels && args_.loss_kind != SigmoidLoss::kAsymmetric) flip_ones(true);
    return view;
  }

  // The logits of the last view, and in the type of the computation.
  const Scalar* logits() const { return logits_; }
  const Real* input(int64_t n) {
    if constexpr (std::is_same_v<Scalar, Real>) {
      return logits_;
    } else {
      read_run(logits_, 1, n, input_);
      return input_;
    }
  }

  const TileLabels& labels() const { return labels_; }
  bool computes_ones_again() const { return args_.loss_kind == SigmoidLoss::kAsymmetric; }

  // The ones of a tile of labels side by side, and the first of them again until the last vector is full.
  int64_t padded_ones() const { return (labels_.ones + 15) / 16 * 16; }
  TileView<Real> ones(const TileView<Real>& tile) {
    if (!ones_) {
      ones_ = std::make_unique_for_overwrite<Ones>();
      std::fill_n(ones_->target, kTile, Real(1));
    }
    const auto gather = [&](const auto* from, auto* to) {
      for (int64_t k = 0; k < padded_ones(); ++k) to[k] = from[labels_.one[k < labels_.ones ? k : 0]];
      return to;
    };
    TileView<Real> view = tile;
    view.targets = Targets::kHard;
    view.target_size = 0;
    view.input = gather(tile.input, ones_->input);
    view.target = ones_->target;
    if (args_.gamma.data) view.gamma = gather(tile.gamma, ones_->gamma);
    if (args_.second.data) view.second = gather(tile.second, ones_->second);
    if (args_.weight.data || grad_loss_) view.scale = gather(tile.scale, ones_->scale);
    if (!has_numbers_) view.one = gather(tile.one, ones_->one);
    return view;
  }

  // For the formulas that read the target.
  void write_shares(int64_t n) {
    fill(Real(0), n, target_);
    for (int64_t k = 0; k < labels_.ones; ++k) target_[labels_.one[k]] = Real(1);
  }

  // Whatever the logits of ignored labels hold, they add nothing.
  template <typename Result>
  void clear_ignored(Result* results) const {
    for (int64_t k = 0; k < labels_.ignored_runs; ++k) {
      std::fill_n(results + labels_.ignored_run[k].first, labels_.ignored_run[k].length, Result{});
    }
  }

 private:
  void read_target(int64_t begin, int64_t end, TileView<Real>* view) {
    const int64_t n = end - begin;
    view->target = read(args_.target, args_.space, begin, end, target_);
    bool known = false, hard = false;
    if (args_.target.dense) {
      with_type(args_.target, [&](const auto* data) {
        view->target_source = reinterpret_cast<const char*>(data + begin);
        view->target_size = sizeof(*data);
        if constexpr (!std::is_integral_v<std::decay_t<decltype(*data)>>) {
          known = true;
          hard = all_hard(data + begin, n);
        }
      });
    }
    if (!known) hard = all_hard(view->target, n);
    view->targets = hard ? Targets::kHard : Targets::kSoft;
  }

  // The ones of the tile as the loops want them: logits that change their sign, with the weight of a one. Or back.
  void flip_ones(bool flip) {
    if (are_flipped_ == flip) return;
    are_flipped_ = flip;
    const Real zero = has_numbers_ ? negative_[0] * scale_[0] : Real(0);
    for (int64_t k = 0; k < labels_.ones; ++k) {
      const int64_t i = labels_.one[k];
      signs_[i] = flip ? Real(-1) : Real(1);
      zero_[i] = flip ? one_[i] : zero;
    }
  }

  void weigh(const Real* alpha, const Real* scale, int64_t n) {
    products(sign_of_one_, alpha, scale, n, one_);
    products(Real(1), negative_, scale, n, zero_);
  }

  // The scale in memory that may be written to.
  Real* own_scale(const Real* scale, int64_t n) {
    if (scale != own_scale_) std::copy(scale, scale + n, own_scale_);
    return own_scale_;
  }

  void fill_number(const Operand& operand, Real* buffer) {
    if (!operand.data) fill(static_cast<Real>(operand.value), kTile, buffer);
  }
  const Real* read_or_number(const Operand& operand, int64_t begin, int64_t end, Real* buffer) {
    return operand.data ? read(operand, args_.space, begin, end, buffer) : buffer;
  }

  const SigmoidLossArgs<Scalar>& args_;
  Real factor_;  // of every scale
  Real sign_of_one_;
  const Operand* grad_loss_;  // or null, where it is one number
  bool has_numbers_;          // for all that TileView::one and zero are made of
  bool are_flipped_ = false;  // the ones of labels_, in signs_ and zero_
  TileLabels labels_;
  struct Ones {
    Real input[kTile], target[kTile], gamma[kTile], second[kTile], scale[kTile], one[kTile];
  };
  std::unique_ptr<Ones> ones_;
  const Scalar* logits_ = nullptr;
  alignas(64) Scalar raw_[kTile];
  alignas(64) Real input_[std::is_same_v<Scalar, Real> ? 1 : kTile];
  alignas(64) Real target_[kTile + (kRowGroup + 1) * kFewClasses];
  alignas(64) Real gamma_[kTile];
  alignas(64) Real second_[kTile];  // alpha, or gamma_positive
  alignas(64) Real negative_[kTile];
  alignas(64) Real scale_[kTile];
  alignas(64) Real own_scale_[kTile];
  alignas(64) Real one_[kTile];
  alignas(64) Real zero_[kTile];
  alignas(64) Real signs_[kTile];
  alignas(64) Real grad_[kTile];
};

// ---- the loops -----------------------------------------------------------------------------------------------------

// A margin that is known to be there, or not, spares a loop one of two logarithms.
template <bool kShifted>
struct AsymmetricOfKnown {
  static constexpr bool kHasMargin = kShifted;
  template <bool kHard, typename Real, typename Power>
  static FK_HOST_DEVICE SigmoidTerms<Real> terms(Real x, Real share, const SigmoidParameters<Real, Power>& with) {
    return AsymmetricElement::terms_of<kHard>(x, share, with, kShifted);
  }
};

template <typename Loss>
constexpr bool kIsAsymmetric =
    std::is_same_v<Loss, AsymmetricOfKnown<false>> || std::is_same_v<Loss, AsymmetricOfKnown<true>>;

template <typename Loss, Targets kTargets, typename Power, typename Real>
FK_HOST_DEVICE SigmoidTerms<Real> terms_with(const TileView<Real>& view, int64_t i, const Power& gamma,
                                             const Power& gamma_positive, Real margin) {
  const Real share = kTargets == Targets::kLabels ? Real(0) : view.target[i];
  return Loss::template terms<kTargets != Targets::kSoft>(
      view.input[i], share,
      SigmoidParameters<Real, Power>{gamma, gamma_positive, view.second[i], view.negative[i], margin});
}

// Loss and slope as they go into the results.
template <typename Loss, Targets kTargets, typename Power, typename Real>
FK_HOST_DEVICE LossAndSlope<Real> result_with(const TileView<Real>& view, int64_t i, const Power& gamma,
                                              const Power& gamma_positive, Real margin) {
  if constexpr (std::is_same_v<Loss, FocalElement> && kTargets != Targets::kSoft) {
    const Real x = view.input[i], zero = view.zero[i];
    if constexpr (kTargets == Targets::kLabels) {
      return FocalElement::against_zero(x * view.sign[i], zero, gamma);
    } else {
      const Real one = view.one[i];
      const bool is_one = view.target[i] > Real(0);
      return FocalElement::against_zero(is_one ? -x : x, is_one ? one : zero, gamma);
    }
  } else if constexpr (kIsAsymmetric<Loss> && kTargets != Targets::kSoft) {
    const bool is_one = kTargets == Targets::kHard && view.target[i] > Real(0);
    const LossAndSlope<Real> result =
        hard_asymmetric_loss<Loss::kHasMargin>(view.input[i], is_one, margin, gamma, gamma_positive);
    return {result.loss * view.scale[i], result.slope * view.scale[i]};
  } else {
    const SigmoidTerms<Real> terms = terms_with<Loss, kTargets>(view, i, gamma, gamma_positive, margin);
    return {terms.loss * view.scale[i], terms.slope * view.scale[i]};
  }
}

template <typename Loss, Targets kTargets, Powers kPowers, typename Real>
FK_HOST_DEVICE LossAndSlope<Real> result_at(const TileView<Real>& view, int64_t i, const SmallPower<Real>& gamma,
                                            const SmallPower<Real>& gamma_positive, Real margin) {
  if constexpr (kPowers == Powers::kSquare) {
    const Square<Real> square;
    return result_with<Loss, kTargets>(view, i, square, square, margin);
  } else if constexpr (kPowers == Powers::kSmall) {
    return result_with<Loss, kTargets>(view, i, gamma, gamma_positive, margin);
  } else {
    const AnyPower<Real> any{view.gamma[i]}, any_positive{view.second[i]};
    return result_with<Loss, kTargets>(view, i, any, any_positive, margin);
  }
}

// Asks for the block's counterpart in the next tile: formulas this long keep the processor from finding out by itself
// what comes next. Where the elements lie in a buffer it asks in vain; an address outside the tensor never faults.
FK_HOST_DEVICE void ask_ahead(const void* block, int64_t size_of_element) {
  const char* ahead = static_cast<const char*>(block) + kTile * size_of_element;
  for (int64_t i = 0; i < kBlock * size_of_element; i += 64) __builtin_prefetch(ahead + i);
}

template <typename Real>
FK_HOST_DEVICE void ask_for_target(const TileView<Real>& view, int64_t first) {
  const char* block = view.target_source + first * view.target_size;
  if (view.target_size == static_cast<int64_t>(sizeof(Real))) {
    ask_ahead(block, sizeof(Real));  // without a loop
  } else if (view.target_size > 0) {
    ask_ahead(block, view.target_size);
  }
}

// Calls f(i) for the elements of a tile, and ask(first) for each whole block of them.
template <typename Ask, typename Function>
FK_HOST_DEVICE void for_each_element(int64_t n, Ask ask, Function f) {
  int64_t first = 0;
  for (; first + kBlock <= n; first += kBlock) {
    ask(first);
#pragma omp simd
    for (int64_t i = 0; i < kBlock; ++i) f(first + i);
  }
#pragma omp simd
  for (int64_t i = first; i < n; ++i) f(i);
}

// Numbers of one width in one loop: the sum in double is another.
template <typename Loss, Targets kTargets, Powers kPowers, typename Real>
FK_VECTOR_CLONES void forward_loop(const TileView<Real>& tile, Real margin, int64_t n, Real* loss) {
  const TileView<Real> view = tile;
  constexpr bool kSmall = kPowers == Powers::kSmall;
  const SmallPower<Real> gamma(kSmall ? view.gamma[0] : Real(0)), gamma_positive(kSmall ? view.second[0] : Real(0));
  for_each_element(
      n,
      [&](int64_t i) __attribute__((always_inline)) {
        ask_ahead(view.input + i, sizeof(Real));
        if (kTargets != Targets::kLabels) ask_for_target(view, i);
      },
      [&](int64_t i) __attribute__((always_inline)) {
        loss[i] = result_at<Loss, kTargets, kPowers>(view, i, gamma, gamma_positive, margin).loss;
      });
}

template <typename Real>
FK_VECTOR_CLONES double sum_of(const Real* loss, int64_t n) {
  double sum = 0;
  if (n == kTile) {
    // Eight at a time in Real, in pairs: three roundings, and an eighth of the conversions.
    constexpr int64_t kPart = kTile / 8;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < kPart; ++i) {
      const Real* at = loss + i;
      const Real low = (at[0] + at[kPart]) + (at[2 * kPart] + at[3 * kPart]);
      const Real high = (at[4 * kPart] + at[5 * kPart]) + (at[6 * kPart] + at[7 * kPart]);
      sum += static_cast<double>(low + high);
    }
    return sum;
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(loss[i]);
  return sum;
}

template <typename Loss, Targets kTargets, Powers kPowers, typename Real>
FK_VECTOR_CLONES void backward_loop(const TileView<Real>& tile, Real margin, int64_t n, Real* grad_input) {
  const TileView<Real> view = tile;
  constexpr bool kSmall = kPowers == Powers::kSmall;
  const SmallPower<Real> gamma(kSmall ? view.gamma[0] : Real(0)), gamma_positive(kSmall ? view.second[0] : Real(0));
  for_each_element(
      n,
      [&](int64_t i) __attribute__((always_inline)) {
        ask_ahead(view.input + i, sizeof(Real));
        if (kTargets != Targets::kLabels) ask_for_target(view, i);
        ask_ahead(grad_input + i, sizeof(Real));
      },
      [&](int64_t i) __attribute__((always_inline)) {
        grad_input[i] = result_at<Loss, kTargets, kPowers>(view, i, gamma, gamma_positive, margin).slope;
      });
}

// Every derivative there is.
template <typename Real>
struct Slopes {
  Real target[kTile];
  Real gamma[kTile];
  Real second[kTile];
};

template <typename Loss, typename Real>
FK_VECTOR_CLONES void slopes_loop(const TileView<Real>& tile, Real margin, int64_t n, Slopes<Real>& slopes) {
  const TileView<Real> view = tile;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const AnyPower<Real> gamma{view.gamma[i]}, gamma_positive{view.second[i]};
    const SigmoidTerms<Real> terms = terms_with<Loss, Targets::kSoft>(view, i, gamma, gamma_positive, margin);
    const Real scale = view.scale[i];
    slopes.target[i] = scale == Real(0) ? Real(0) : terms.slope_target * scale;
    slopes.gamma[i] = scale == Real(0) ? Real(0) : terms.slope_gamma * scale;
    slopes.second[i] = scale == Real(0) ? Real(0) : terms.slope_positive * scale;
  }
}

// Calls f with the formula of the loss; hard targets make the quality focal loss a focal loss.
template <typename Scalar, typename Function>
auto with_loss(const SigmoidLossArgs<Scalar>& args, bool hard, Function f) {
  const SigmoidLoss loss = args.loss_kind;
  if (loss == SigmoidLoss::kAsymmetric) {
    return args.margin > 0 ? f(AsymmetricOfKnown<true>{}) : f(AsymmetricOfKnown<false>{});
  }
  if (loss == SigmoidLoss::kQuality && !hard) return f(QualityElement{});
  return f(FocalElement{});
}

// Calls f<targets, powers>, of those that there are for the formula.
template <typename Loss, typename Function>
void with_variant(Targets targets, Powers powers, Function f) {
  const auto with_powers = [&](auto known) {
    if constexpr (!kIsAsymmetric<Loss>) {
      if (powers == Powers::kSquare) return f(known, std::integral_constant<Powers, Powers::kSquare>{});
    }
    if (powers == Powers::kAny) return f(known, std::integral_constant<Powers, Powers::kAny>{});
    return f(known, std::integral_constant<Powers, Powers::kSmall>{});
  };
  if constexpr (!std::is_same_v<Loss, QualityElement>) {
    if (targets == Targets::kHard) return with_powers(std::integral_constant<Targets, Targets::kHard>{});
    if (targets == Targets::kLabels) return with_powers(std::integral_constant<Targets, Targets::kLabels>{});
  }
  with_powers(std::integral_constant<Targets, Targets::kSoft>{});
}

template <typename Scalar>
void forward_tile(const SigmoidLossArgs<Scalar>& args, const TileView<compute_t<Scalar>>& view, Powers powers,
                  int64_t n, compute_t<Scalar>* to) {
  with_loss(args, view.targets != Targets::kSoft, [&](auto formula) {
    using Loss = decltype(formula);
    with_variant<Loss>(view.targets, powers, [&](auto targets, auto known) {
      forward_loop<Loss, decltype(targets)::value, decltype(known)::value>(view, args.margin, n, to);
    });
  });
}

template <typename Scalar>
void backward_tile(const SigmoidLossArgs<Scalar>& args, const TileView<compute_t<Scalar>>& view, Powers powers,
                   int64_t n, compute_t<Scalar>* to) {
  with_loss(args, view.targets != Targets::kSoft, [&](auto formula) {
    using Loss = decltype(formula);
    with_variant<Loss>(view.targets, powers, [&](auto targets, auto known) {
      backward_loop<Loss, decltype(targets)::value, decltype(known)::value>(view, args.margin, n, to);
    });
  });
}

// Computes a tile with compute(view, n, to); of the asymmetric loss again what the labels say is not background.
template <typename Scalar, typename Compute>
void compute_tile(TileReader<Scalar>& reader, const TileView<compute_t<Scalar>>& view, int64_t n, compute_t<Scalar>* to,
                  Compute compute) {
  compute(view, n, to);
  const TileLabels& labels = reader.labels();
  if (view.targets == Targets::kLabels && labels.ones > 0 && reader.computes_ones_again()) {
    alignas(64) compute_t<Scalar> of_ones[kTile];
    compute(reader.ones(view), reader.padded_ones(), of_ones);
    for (int64_t k = 0; k < labels.ones; ++k) to[labels.one[k]] = of_ones[k];
  }
}

// ---- results that are looked up ------------------------------------------------------------------------------------

constexpr int64_t kBFloat16Values = 65536;

#ifdef FK_HAS_AVX512_CODE
// `table` has the results for all values and a target of 0, then those for 1.
template <bool kHard>
FK_AVX512 FK_HOST_DEVICE __m512i place_in_table(const BFloat16* input, const float* target, __mmask16 mask) {
  const __m512i value = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, input));
  if constexpr (!kHard) return value;
  const __mmask16 is_one = _mm512_cmp_ps_mask(_mm512_maskz_loadu_ps(mask, target), _mm512_setzero_ps(), _CMP_GT_OQ);
  return _mm512_mask_add_epi32(value, is_one, value, _mm512_set1_epi32(kBFloat16Values));
}

FK_AVX512 FK_HOST_DEVICE void look_up_vector(__m512i place, const float* table, __mmask16 mask, float* to) {
  _mm512_mask_storeu_ps(to, mask, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, place, table, 4));
}
// Reads two bytes beyond each result, and with the last one beyond the table.
FK_AVX512 FK_HOST_DEVICE void look_up_vector(__m512i place, const BFloat16* table, __mmask16 mask, BFloat16* to) {
  const __m512i found = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, place, table, 2);
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(found));
}

template <bool kHard, typename Result>
FK_AVX512 void look_up(const BFloat16* input, const float* target, const Result* table, int64_t n, Result* to) {
  constexpr __mmask16 kAll = 0xffff;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    look_up_vector(place_in_table<kHard>(input + i, target + i, kAll), table, kAll, to + i);
  }
  if (i == n) return;
  const auto mask = static_cast<__mmask16>((1u << (n - i)) - 1);
  look_up_vector(place_in_table<kHard>(input + i, target + i, mask), table, mask, to + i);
}

template <typename Result>
void look_up_tile(const TileReader<BFloat16>& reader, const TileView<float>& view, const Result* table, int64_t n,
                  Result* to) {
  if (view.targets == Targets::kHard) return look_up<true>(reader.logits(), view.target, table, n, to);
  look_up<false>(reader.logits(), view.target, table, n, to);
  const TileLabels& labels = reader.labels();
  for (int64_t k = 0; k < labels.ones; ++k) {
    const int64_t i = labels.one[k];
    to[i] = table[kBFloat16Values + reader.logits()[i].bits];
  }
}
#endif

// Returns whether the tile was looked up.
template <typename Scalar, typename Result>
bool look_up_if_possible(const TileReader<Scalar>& reader, const TileView<compute_t<Scalar>>& view, const Result* table,
                         int64_t n, Result* to) {
#ifdef FK_HAS_AVX512_CODE
  if constexpr (std::is_same_v<Scalar, BFloat16>) {
    if (table != nullptr && view.targets != Targets::kSoft) {
      look_up_tile(reader, view, table, n, to);
      return true;
    }
  }
#endif
  return false;
}

// Results depend on the logit and a hard target alone, as far as the first tile shows.
bool can_be_looked_up(const SigmoidLossArgs<BFloat16>& args) {
  if (!has_avx512() || args.gamma.data || args.second.data || args.weight.data) return false;
  TileReader<BFloat16> reader(args, 1.0f, 1.0f, nullptr);
  return reader.view(0, std::min(kTile, args.space.size)).targets != Targets::kSoft;
}

// The same loss of table bfloat16, against a target of 0 and of 1.
template <typename Args>
Args bfloat16_table(const Args& args, std::vector<BFloat16>* logits) {
  static const uint8_t kTargets[2] = {0, 1};
  logits->resize(kBFloat16Values);
  for (int64_t k = 0; k < kBFloat16Values; ++k) (*logits)[k].bits = static_cast<uint16_t>(k);
  Args table = args;
  table.space = {2 * kBFloat16Values, 2, {2, kBFloat16Values}};
  table.input = {logits->data(), ElementType::kBFloat16, false, {0, 1}, 0};
  table.target = {kTargets, ElementType::kUInt8, false, {1, 0}, 0};
  table.target_is_labels = false;
  return table;
}

template <typename Scalar>
FK_VECTOR_CLONES void store_run(const compute_t<Scalar>* results, int64_t n, Scalar* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = Store<Scalar>::from_compute(results[i]);
}

}  // namespace

template <typename Scalar>
SigmoidLossSums sigmoid_loss_forward(const SigmoidLossForward<Scalar>& args, int64_t begin, int64_t end,
                                     const compute_t<Scalar>* table) {
  using Real = compute_t<Scalar>;
  TileReader<Scalar> reader(args, Real(1), Real(1), nullptr);
  const Powers powers = reader.powers();
  alignas(64) Real buffer[kTile];
  SigmoidLossSums sums{0, end - begin, true, 0};
  for (int64_t first = begin, last; first < end; first = last) {
    last = std::min(end, first + kTile);
    const int64_t n = last - first;
    TileView<Real> view = reader.view(first, last);
    if (!reader.labels().is_valid) return {0, 0, false, reader.labels().invalid_label};
    sums.count -= reader.labels().ignored;
    Real* to = args.loss_wide ? args.loss_wide + first : buffer;
    if (!look_up_if_possible(reader, view, table, n, to)) {
      view.input = reader.input(n);
      compute_tile(reader, view, n, to, [&](const TileView<Real>& part, int64_t size, Real* loss) {
        forward_tile<Scalar>(args, part, powers, size, loss);
      });
    }
    reader.clear_ignored(to);
    sums.loss += sum_of(to, n);
    if (args.loss) store_run(to, n, args.loss + first);
  }
  return sums;
}

template <typename Scalar>
void sigmoid_loss_backward(const SigmoidLossBackward<Scalar>& args, int64_t begin, int64_t end, const Scalar* table) {
  using Real = compute_t<Scalar>;
  const Real upstream = args.grad_loss.data ? Real(1) : static_cast<Real>(args.grad_loss.value);
  TileReader<Scalar> reader(args, upstream / (args.divisor ? *args.divisor : Real(1)), Real(-1), &args.grad_loss);
  const Powers powers = reader.powers();
  const bool everything = args.grad_target || args.grad_gamma || args.grad_second;
  Slopes<Real> slopes;
  alignas(64) Real buffer[kTile];
  for (int64_t first = begin, last; first < end; first = last) {
    last = std::min(end, first + kTile);
    const int64_t n = last - first;
    TileView<Real> view = reader.view(first, last);
    if (args.grad_input) {
      Scalar* to = args.grad_input + first;
      if (!look_up_if_possible(reader, view, table, n, to)) {
        view.input = reader.input(n);
        Real* slopes_of_input = buffer;
        if constexpr (std::is_same_v<Scalar, Real>) slopes_of_input = to;
        compute_tile(reader, view, n, slopes_of_input, [&](const TileView<Real>& part, int64_t size, Real* slope) {
          backward_tile<Scalar>(args, part, powers, size, slope);
        });
        if constexpr (!std::is_same_v<Scalar, Real>) store_run(buffer, n, to);
      }
      reader.clear_ignored(to);
    }
    if (!everything) continue;
    view.input = reader.input(n);
    if (view.targets == Targets::kLabels) reader.write_shares(n);
    with_loss<Scalar>(args, false, [&](auto formula) { slopes_loop<decltype(formula)>(view, args.margin, n, slopes); });
    for (auto [slope, to] : {std::pair(slopes.target, args.grad_target), std::pair(slopes.gamma, args.grad_gamma),
                             std::pair(slopes.second, args.grad_second)}) {
      if (to == nullptr) continue;
      reader.clear_ignored(slope);
      std::copy(slope, slope + n, to + first);
    }
  }
}

std::vector<float> sigmoid_loss_bfloat16_table(const SigmoidLossForward<BFloat16>& args) {
  if (!can_be_looked_up(args)) return {};
  std::vector<BFloat16> logits;
  std::vector<float> losses(2 * kBFloat16Values);
  auto table = bfloat16_table(args, &logits);
  table.loss = nullptr;
  table.loss_wide = losses.data();
  sigmoid_loss_forward(table, 0, table.space.size, nullptr);
  return losses;
}

std::vector<BFloat16> sigmoid_grad_bfloat16_table(const SigmoidLossBackward<BFloat16>& args) {
  if (args.grad_loss.data || !args.grad_input || !can_be_looked_up(args)) return {};
  std::vector<BFloat16> logits, slopes(2 * kBFloat16Values + 1);  // look_up reads beyond the last
  auto table = bfloat16_table(args, &logits);
  table.grad_input = slopes.data();
  table.grad_target = table.grad_gamma = table.grad_second = nullptr;
  sigmoid_loss_backward(table, 0, table.space.size, static_cast<const BFloat16*>(nullptr));
  return slopes;
}

#define FK_INSTANTIATE(Scalar)                                                                               \
  template SigmoidLossSums sigmoid_loss_forward<Scalar>(const SigmoidLossForward<Scalar>&, int64_t, int64_t, \
                                                        const compute_t<Scalar>*);                           \
  template void sigmoid_loss_backward<Scalar>(const SigmoidLossBackward<Scalar>&, int64_t, int64_t, const Scalar*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cpu
