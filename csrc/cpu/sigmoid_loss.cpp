// Losses of one logit (sigmoid focal, asymmetric, quality focal, varifocal, matchability and IA-BCE), forward and
// backward, on the CPU.
//
//   forward   input, target (and gamma, alpha, weight) -> loss per element, or its sum
//   backward  the same and grad_loss -> grad_input (and grad_target, grad_gamma)
//
// Memory: each direction reads the logits and the dense target once. Operands of another type or order (a broadcast
// alpha, a bool target, logits with strides) are first copied into a buffer of the tile. Then one loop over the tile
// applies the formula of math/sigmoid_loss.h or math/scored_loss.h. The loop has variants for soft targets, hard
// targets and labels, and for small whole gammas (no logarithm, no second exponential) and any others. With labels of
// many classes the loop treats every element as background. For the focal loss, the sign of the logit and the weight of
// the elements with target 1 are changed before the loop; for the other losses, these elements are computed again after
// it. Labels of few classes become one-hot targets. Dense targets of which few are not 0 are treated as labels, with
// scores if not all of these are 1.
//
// A bfloat16 has only 65536 values. For a large tensor with one number for each parameter, the kernel first computes
// the results of all values for targets 0 and 1, and the tiles look them up. Targets in between are computed.

#include <algorithm>
#include <memory>
#include <type_traits>
#include <vector>

#include "cpu/sigmoid_loss/look_up.h"
#include "cpu/sigmoid_loss/loops.h"
#include "cpu/sigmoid_loss/tile.h"
#include "cpu/sigmoid_loss/tile_reader.h"
#include "cpu/simd/dispatch.h"
#include "kernels/sigmoid_loss.h"
#include "math/sigmoid_loss.h"

namespace focalkern::cpu {
namespace {

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
    const auto compute = [&](const TileView<Real>& part, int64_t size, Real* loss) {
      forward_tile<Scalar>(args, part, powers, size, loss);
    };
    const bool looked_up = look_up_if_possible(reader, view, table, n, to);
    if (!looked_up) {
      view.input = reader.input(n);
      compute(view, n, to);
    }
    if (looked_up ? reader.has_scores() : reader.computes_ones_again()) compute_ones(reader, view, to, compute);
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
      const auto compute = [&](const TileView<Real>& part, int64_t size, Real* slope) {
        backward_tile<Scalar>(args, part, powers, size, slope);
      };
      const bool looked_up = look_up_if_possible(reader, view, table, n, to);
      if (!looked_up) {
        view.input = reader.input(n);
        if constexpr (std::is_same_v<Scalar, Real>) {
          compute(view, n, to);
        } else {
          compute(view, n, buffer);
          store_run(buffer, n, to);
        }
      }
      if (looked_up ? reader.has_scores() : reader.computes_ones_again()) compute_ones(reader, view, to, compute);
      reader.clear_ignored(to);
    }
    if (!everything) continue;
    view.input = reader.input(n);
    if (view.targets == Targets::kLabels) reader.write_shares(n);
    with_loss<Scalar>(args, false,
                      [&](auto formula) { slopes_loop<decltype(formula)>(view, args.constant, n, slopes); });
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
  std::vector<BFloat16> logits, slopes(2 * kBFloat16Values + 1);  // look_up reads beyond the last result
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
