// Reads operands of any type and strides into a buffer of the tile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/simd/dispatch.h"
#include "kernels/sigmoid_loss.h"
#include "math/portable.h"

namespace focalkern::cpu {
namespace {

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

// Calls f with a pointer of the operand's type.
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

// The elements [begin, end) as runs along the innermost dim.
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

// The operand's elements [begin, end): in place if type and order allow it, else copied to `buffer`.
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

}  // namespace
}  // namespace focalkern::cpu
