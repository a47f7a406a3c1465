// Sigmoid focal, asymmetric and quality focal loss, forward and backward, on the CPU.
//
//   forward   input, target (and gamma, alpha, weight) -> loss per element, or its sum
//   backward  the same and grad_loss -> grad_input (and grad_target, grad_gamma)
//
// Memory: each direction reads the logits and the dense target once; labels are turned into one-hot shares in cache.
// Elements are taken a tile at a time. What is not there in the right type and order (a broadcast alpha, a bool target,
// logits with strides) is brought into a buffer of the tile; then one loop over the tile, with the formula of
// math/sigmoid_loss.h inside. It exists for hard and for soft tiles, and for gammas that are small whole numbers (no
// logarithm, no second exponential) and any others.

#include <algorithm>
#include <type_traits>

#include "cpu/vector_clones.h"
#include "kernels.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cpu {
namespace {

constexpr int64_t kTile = 512;  // elements
constexpr int64_t kBlock = 64;  // elements between two requests for memory

struct LabelCount {
  int64_t ignored = 0;  // elements
  bool is_valid = true;
  int64_t invalid_label = 0;
};

// What the loops read: a buffer of the tile, or the user's memory.
template <typename Scalar>
struct TileView {
  using Real = compute_t<Scalar>;
  const Scalar* input;
  const Real* target;
  const Real* gamma;
  const Real* second;    // alpha, or gamma_positive
  const Real* negative;  // 1 - alpha
  const Real* scale;     // weight, and in the backward pass times the upstream gradient
  bool hard;             // all targets are 0 or 1
  LabelCount labels;
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
  if (stride == 1) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) share[i] = labels[i] == static_cast<Label>(this_class) ? Real(1) : Real(0);
  } else {
    for (int64_t i = 0; i < n; ++i) share[i] = labels[i * stride] == static_cast<Label>(this_class) ? Real(1) : Real(0);
  }
}

// One-hot shares of the elements [begin, end). `ignored` is called with each run of elements that count nothing.
template <typename Scalar, typename Label, typename Ignored>
LabelCount read_labels(const SigmoidLossArgs<Scalar>& args, const Label* labels, int64_t begin, int64_t end,
                       compute_t<Scalar>* share, Ignored ignored) {
  using Real = compute_t<Scalar>;
  LabelCount count;
  const int last = args.space.dims - 1;
  const int64_t stride = args.target.strides[last];
  // Returns whether the run of elements is to be left out.
  const auto leave_out = [&](int64_t label, int64_t first, int64_t n) {
    if (label >= 0 && label <= args.classes && label != args.ignore_index) return false;
    if (label == args.ignore_index) {
      count.ignored += n;
      ignored(first, n);
    } else {
      count.is_valid = false;
      count.invalid_label = label;
    }
    return true;
  };
  int64_t first = 0;
  if (args.class_dim == last) std::fill_n(share, end - begin, Real(0));
  if (args.class_dim == last && args.space.dims <= 2) {
    // Rows of classes, by far the most frequent case.
    const int64_t classes = args.space.sizes[last], row_stride = last > 0 ? args.target.strides[0] : 0;
    const Label* label = labels + begin / classes * row_stride;
    const int64_t ignore_index = args.ignore_index;
    for (int64_t row = -(begin % classes), n = end - begin; row < n; row += classes, label += row_stride) {
      const auto this_label = static_cast<int64_t>(*label);
      const auto at = static_cast<uint64_t>(row + this_label);
      if (static_cast<uint64_t>(this_label) >= static_cast<uint64_t>(classes) || this_label == ignore_index) {
        const int64_t from = std::max<int64_t>(row, 0);
        leave_out(this_label, from, std::min(row + classes, n) - from);
      } else if (at < static_cast<uint64_t>(n)) {
        share[at] = Real(1);
      }
    }
    return count;
  }
  for (Runs runs(args.space, begin, end); runs.more(); first += runs.length(), runs.next()) {
    const Label* label = labels + runs.offset(args.target);
    const int64_t n = runs.length();
    if (args.class_dim == last) {
      // A run is a row of classes, or a part of one.
      if (leave_out(*label, first, n)) continue;
      const int64_t at = static_cast<int64_t>(*label) - runs.position(last);
      if (at >= 0 && at < n) share[first + at] = Real(1);
      continue;
    }
    for (int64_t i = 0; i < n; ++i) leave_out(label[i * stride], first + i, 1);
    compare_labels(label, stride, runs.position(args.class_dim), n, share + first);
  }
  return count;
}

// Whether all targets are 0 or 1. Of positive numbers only these have their bits change, from one to the next, nowhere
// or at both ends of those that 1 has: two instructions per vector instead of comparisons.
template <typename Stored, typename Bits, int kMantissaBits>
FK_VECTOR_CLONES bool all_hard(const Stored* target, int64_t n) {
  Bits changes = 0, set = 0;
#pragma omp simd reduction(| : changes, set)
  for (int64_t i = 0; i < n; ++i) {
    const Bits bits = bit_cast<Bits>(target[i]);
    changes |= static_cast<Bits>(bits ^ static_cast<Bits>(bits + bits));
    set |= bits;
  }
  constexpr int kBits = 8 * sizeof(Bits);
  constexpr auto kOfOne = static_cast<Bits>(Bits(1) << kMantissaBits | Bits(1) << (kBits - 2));
  return (changes & static_cast<Bits>(~kOfOne)) == 0 && set >> (kBits - 1) == 0;
}
bool all_hard(const float* target, int64_t n) { return all_hard<float, uint32_t, 23>(target, n); }
bool all_hard(const double* target, int64_t n) { return all_hard<double, uint64_t, 52>(target, n); }
bool all_hard(const Half* target, int64_t n) { return all_hard<Half, uint16_t, 10>(target, n); }
bool all_hard(const BFloat16* target, int64_t n) { return all_hard<BFloat16, uint16_t, 7>(target, n); }

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

// What is known of the gammas, and spares the loop a logarithm and an exponential, or a handful of products.
enum class Powers { kAny, kSmall, kSquare };

// ---- a tile of parameters ------------------------------------------------------------------------------------------

template <typename Scalar>
class TileReader {
 public:
  using Real = compute_t<Scalar>;

  // What is one number for all elements is written once.
  TileReader(const SigmoidLossArgs<Scalar>& args, Real factor) : args_(args), factor_(factor) {
    fill_number(args.gamma, gamma_);
    if (args.loss_kind == SigmoidLoss::kAsymmetric) fill_number(args.second, second_);
    has_alpha_ = args.loss_kind == SigmoidLoss::kFocal && (args.second.data || args.second.value >= 0);
    if (has_alpha_) {
      fill_number(args.second, second_);
      if (!args.second.data) one_minus(second_, kTile, negative_);
    } else if (args.loss_kind != SigmoidLoss::kAsymmetric) {
      std::fill_n(second_, kTile, Real(1));
      std::fill_n(negative_, kTile, Real(1));
    }
    if (!args.weight.data) std::fill_n(scale_, kTile, factor * static_cast<Real>(args.weight.value));
  }

  Powers powers() const {
    const auto is_small = [](const Operand& operand) {
      return !operand.data && SmallPower<Real>::covers(static_cast<Real>(operand.value));
    };
    if (!is_small(args_.gamma)) return Powers::kAny;
    if (args_.loss_kind == SigmoidLoss::kAsymmetric) return is_small(args_.second) ? Powers::kSmall : Powers::kAny;
    return args_.gamma.value == 2 ? Powers::kSquare : Powers::kSmall;
  }

  TileView<Scalar> view(int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    TileView<Scalar> view{};
    view.input = read_input(args_, begin, end, input_);
    view.gamma = read_or_number(args_.gamma, begin, end, gamma_);
    view.second = read_or_number(args_.second, begin, end, second_);
    view.negative = negative_;
    if (has_alpha_ && args_.second.data) one_minus(view.second, n, negative_);
    view.scale = scale_;
    if (args_.weight.data) {
      view.scale = own_scale(read(args_.weight, args_.space, begin, end, scale_), n);
      multiply(factor_, n, own_scale_);
    }
    if (!args_.target_is_labels) {
      view.target = read(args_.target, args_.space, begin, end, target_);
      bool known = false;
      if (args_.target.dense) {
        with_type(args_.target, [&](const auto* data) {
          view.target_source = reinterpret_cast<const char*>(data + begin);
          view.target_size = sizeof(*data);
          if constexpr (!std::is_integral_v<std::decay_t<decltype(*data)>>) {
            known = true;
            view.hard = all_hard(data + begin, n);
          }
        });
      }
      if (!known) view.hard = all_hard(view.target, n);
      return view;
    }
    view.target = target_;
    view.hard = true;
    with_type(args_.target, [&](const auto* labels) {
      if constexpr (!std::is_integral_v<std::decay_t<decltype(*labels)>>)
        return;  // labels are integers
      else
        view.labels = read_labels(args_, labels, begin, end, target_, [&](int64_t first, int64_t length) {
          // Whatever the logits of these hold, they add nothing.
          if (view.input != input_) view.input = std::copy(view.input, view.input + n, input_) - n;
          std::fill_n(input_ + first, length, Scalar{});
          view.scale = own_scale(view.scale, n);
          std::fill_n(own_scale_ + first, length, Real(0));
        });
    });
    return view;
  }

  // The scale in memory that may be written to.
  Real* own_scale(const Real* scale, int64_t n) {
    if (scale != own_scale_) std::copy(scale, scale + n, own_scale_);
    return own_scale_;
  }

 private:
  void fill_number(const Operand& operand, Real* buffer) {
    if (!operand.data) std::fill_n(buffer, kTile, static_cast<Real>(operand.value));
  }
  const Real* read_or_number(const Operand& operand, int64_t begin, int64_t end, Real* buffer) {
    return operand.data ? read(operand, args_.space, begin, end, buffer) : buffer;
  }

  const SigmoidLossArgs<Scalar>& args_;
  Real factor_;  // of every scale
  bool has_alpha_;
  alignas(64) Scalar input_[kTile];
  alignas(64) Real target_[kTile];
  alignas(64) Real gamma_[kTile];
  alignas(64) Real second_[kTile];  // alpha, or gamma_positive
  alignas(64) Real negative_[kTile];
  alignas(64) Real scale_[kTile];
  alignas(64) Real own_scale_[kTile];
};

// ---- the loops -----------------------------------------------------------------------------------------------------

template <typename Loss, bool kHard, Powers kPowers, typename Scalar>
FK_HOST_DEVICE SigmoidTerms<compute_t<Scalar>> terms_at(const TileView<Scalar>& view, int64_t i,
                                                        const SmallPower<compute_t<Scalar>>& gamma,
                                                        const SmallPower<compute_t<Scalar>>& gamma_positive,
                                                        compute_t<Scalar> margin) {
  using Real = compute_t<Scalar>;
  const Real x = load_as_compute(view.input[i]);
  if constexpr (kPowers == Powers::kSquare) {
    const Square<Real> square;
    return Loss::template terms<kHard>(
        x, view.target[i],
        SigmoidParameters<Real, Square<Real>>{square, square, view.second[i], view.negative[i], margin});
  } else if constexpr (kPowers == Powers::kSmall) {
    return Loss::template terms<kHard>(
        x, view.target[i],
        SigmoidParameters<Real, SmallPower<Real>>{gamma, gamma_positive, view.second[i], view.negative[i], margin});
  } else {
    const AnyPower<Real> any{view.gamma[i]}, any_positive{view.second[i]};
    return Loss::template terms<kHard>(
        x, view.target[i],
        SigmoidParameters<Real, AnyPower<Real>>{any, any_positive, view.second[i], view.negative[i], margin});
  }
}

// Asks for the block's counterpart in the next tile: formulas this long keep the processor from finding out by itself
// what comes next. Where the elements lie in a buffer it asks in vain; an address outside the tensor never faults.
FK_HOST_DEVICE void ask_ahead(const void* block, int64_t size_of_element) {
  const char* ahead = static_cast<const char*>(block) + kTile * size_of_element;
  for (int64_t i = 0; i < kBlock * size_of_element; i += 64) __builtin_prefetch(ahead + i);
}

template <typename Scalar>
FK_HOST_DEVICE void ask_for_target(const TileView<Scalar>& view, int64_t first) {
  const char* block = view.target_source + first * view.target_size;
  if (view.target_size == static_cast<int64_t>(sizeof(Scalar))) {
    ask_ahead(block, sizeof(Scalar));  // without a loop
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
template <typename Loss, bool kHard, Powers kPowers, typename Scalar>
FK_VECTOR_CLONES void forward_loop(const TileView<Scalar>& tile, compute_t<Scalar> margin, int64_t n,
                                   compute_t<Scalar>* loss) {
  using Real = compute_t<Scalar>;
  const TileView<Scalar> view = tile;
  constexpr bool kSmall = kPowers == Powers::kSmall;
  const SmallPower<Real> gamma(kSmall ? view.gamma[0] : Real(0)), gamma_positive(kSmall ? view.second[0] : Real(0));
  for_each_element(
      n,
      [&](int64_t i) __attribute__((always_inline)) {
        ask_ahead(view.input + i, sizeof(Scalar));
        ask_for_target(view, i);
      },
      [&](int64_t i) __attribute__((always_inline)) {
        loss[i] = terms_at<Loss, kHard, kPowers>(view, i, gamma, gamma_positive, margin).loss * view.scale[i];
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

template <typename Loss, bool kHard, Powers kPowers, typename Scalar>
FK_VECTOR_CLONES void backward_loop(const TileView<Scalar>& tile, compute_t<Scalar> margin, int64_t n,
                                    Scalar* grad_input) {
  using Real = compute_t<Scalar>;
  const TileView<Scalar> view = tile;
  constexpr bool kSmall = kPowers == Powers::kSmall;
  const SmallPower<Real> gamma(kSmall ? view.gamma[0] : Real(0)), gamma_positive(kSmall ? view.second[0] : Real(0));
  for_each_element(
      n,
      [&](int64_t i) __attribute__((always_inline)) {
        ask_ahead(view.input + i, sizeof(Scalar));
        ask_for_target(view, i);
        ask_ahead(grad_input + i, sizeof(Scalar));
      },
      [&](int64_t i) __attribute__((always_inline)) {
        const Real slope = terms_at<Loss, kHard, kPowers>(view, i, gamma, gamma_positive, margin).slope * view.scale[i];
        grad_input[i] = Store<Scalar>::from_compute(slope);
      });
}

// Every derivative there is.
template <typename Real>
struct Slopes {
  Real target[kTile];
  Real gamma[kTile];
  Real second[kTile];
};

template <typename Loss, typename Scalar>
FK_VECTOR_CLONES void slopes_loop(const TileView<Scalar>& tile, compute_t<Scalar> margin, int64_t n,
                                  Slopes<compute_t<Scalar>>& slopes) {
  using Real = compute_t<Scalar>;
  const TileView<Scalar> view = tile;
  const SmallPower<Real> unused{Real(0)};
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const SigmoidTerms<Real> terms = terms_at<Loss, false, Powers::kAny>(view, i, unused, unused, margin);
    const Real scale = view.scale[i];
    slopes.target[i] = scale == Real(0) ? Real(0) : terms.slope_target * scale;
    slopes.gamma[i] = scale == Real(0) ? Real(0) : terms.slope_gamma * scale;
    slopes.second[i] = scale == Real(0) ? Real(0) : terms.slope_positive * scale;
  }
}

// Calls f with the formula of the loss; hard targets make the quality focal loss a focal loss.
template <typename Function>
auto with_loss(SigmoidLoss loss, bool hard, Function f) {
  if (loss == SigmoidLoss::kAsymmetric) return f(AsymmetricElement{});
  if (loss == SigmoidLoss::kQuality && !hard) return f(QualityElement{});
  return f(FocalElement{});
}

// Calls f<hard, powers>, of those that there are for the formula.
template <typename Loss, typename Function>
void with_variant(bool hard, Powers powers, Function f) {
  const auto with_powers = [&](auto is_hard) {
    if constexpr (!std::is_same_v<Loss, AsymmetricElement>) {
      if (powers == Powers::kSquare) return f(is_hard, std::integral_constant<Powers, Powers::kSquare>{});
    }
    if (powers == Powers::kAny) return f(is_hard, std::integral_constant<Powers, Powers::kAny>{});
    return f(is_hard, std::integral_constant<Powers, Powers::kSmall>{});
  };
  if constexpr (!std::is_same_v<Loss, QualityElement>) {
    if (hard) return with_powers(std::true_type{});
  }
  with_powers(std::false_type{});
}

template <typename Scalar>
void forward_tile(SigmoidLoss loss, const TileView<Scalar>& view, Powers powers, compute_t<Scalar> margin, int64_t n,
                  compute_t<Scalar>* to) {
  with_loss(loss, view.hard, [&](auto formula) {
    using Loss = decltype(formula);
    with_variant<Loss>(view.hard, powers, [&](auto hard, auto known) {
      forward_loop<Loss, decltype(hard)::value, decltype(known)::value>(view, margin, n, to);
    });
  });
}

template <typename Scalar>
void backward_tile(SigmoidLoss loss, const TileView<Scalar>& view, Powers powers, compute_t<Scalar> margin, int64_t n,
                   Scalar* to) {
  with_loss(loss, view.hard, [&](auto formula) {
    using Loss = decltype(formula);
    with_variant<Loss>(view.hard, powers, [&](auto hard, auto known) {
      backward_loop<Loss, decltype(hard)::value, decltype(known)::value>(view, margin, n, to);
    });
  });
}

template <typename Scalar>
FK_VECTOR_CLONES void store_loss(const compute_t<Scalar>* loss, int64_t n, Scalar* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] = Store<Scalar>::from_compute(loss[i]);
}

}  // namespace

template <typename Scalar>
SigmoidLossSums sigmoid_loss_forward(const SigmoidLossForward<Scalar>& args, int64_t begin, int64_t end) {
  using Real = compute_t<Scalar>;
  TileReader<Scalar> reader(args, Real(1));
  const Powers powers = reader.powers();
  alignas(64) Real buffer[kTile];
  SigmoidLossSums sums{0, end - begin, true, 0};
  for (int64_t first = begin, last; first < end; first = last) {
    last = std::min(end, first + kTile);
    const int64_t n = last - first;
    const TileView<Scalar> view = reader.view(first, last);
    if (!view.labels.is_valid) return {0, 0, false, view.labels.invalid_label};
    sums.count -= view.labels.ignored;
    Real* to = args.loss_wide ? args.loss_wide + first : buffer;
    forward_tile(args.loss_kind, view, powers, args.margin, n, to);
    sums.loss += sum_of(to, n);
    if (args.loss) store_loss(to, n, args.loss + first);
  }
  return sums;
}

template <typename Scalar>
void sigmoid_loss_backward(const SigmoidLossBackward<Scalar>& args, int64_t begin, int64_t end) {
  using Real = compute_t<Scalar>;
  const Real upstream = args.grad_loss.data ? Real(1) : static_cast<Real>(args.grad_loss.value);
  TileReader<Scalar> reader(args, upstream / (args.divisor ? *args.divisor : Real(1)));
  const Powers powers = reader.powers();
  const bool everything = args.grad_target || args.grad_gamma || args.grad_second;
  alignas(64) Real buffer[kTile];
  Slopes<Real> slopes;
  for (int64_t first = begin, last; first < end; first = last) {
    last = std::min(end, first + kTile);
    const int64_t n = last - first;
    TileView<Scalar> view = reader.view(first, last);
    if (args.grad_loss.data) {
      Real* scale = reader.own_scale(view.scale, n);
      multiply(read(args.grad_loss, args.space, first, last, buffer), n, scale);
      view.scale = scale;
    }
    if (args.grad_input) backward_tile(args.loss_kind, view, powers, args.margin, n, args.grad_input + first);
    if (!everything) continue;
    with_loss(args.loss_kind, false,
              [&](auto formula) { slopes_loop<decltype(formula)>(view, args.margin, n, slopes); });
    if (args.grad_target) std::copy(slopes.target, slopes.target + n, args.grad_target + first);
    if (args.grad_gamma) std::copy(slopes.gamma, slopes.gamma + n, args.grad_gamma + first);
    if (args.grad_second) std::copy(slopes.second, slopes.second + n, args.grad_second + first);
  }
}

#define FK_INSTANTIATE(Scalar)                                                                                \
  template SigmoidLossSums sigmoid_loss_forward<Scalar>(const SigmoidLossForward<Scalar>&, int64_t, int64_t); \
  template void sigmoid_loss_backward<Scalar>(const SigmoidLossBackward<Scalar>&, int64_t, int64_t);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cpu
