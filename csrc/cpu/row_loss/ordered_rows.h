// The dual focal loss with label smoothing, where every class has a share of the target and a rival: the class ranked
// next below its own. Formulas: math/dual_focal.h.
//
// Both passes order the classes of a row. All numbers of a row are then arrays in ascending order of the logits. The
// forward pass saves nothing: the order would need as much memory as the logits. Only the largest class can be so
// likely that 1 - p cancels; it has a formula of its own.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "cpu/row_loss/epilogue.h"
#include "cpu/row_loss/ordered_classes.h"
#include "cpu/row_loss/read.h"
#include "cpu/row_loss/soft_reader.h"
#include "cpu/row_loss/tile.h"
#include "cpu/row_order.h"
#include "cpu/simd/dispatch.h"
#include "cpu/simd/math.h"
#include "kernels/row_loss.h"
#include "math/dual_focal.h"

namespace focalkern::cpu {
namespace {

// Reads rows and computes their results.
template <typename Scalar>
class OrderedRow {
 public:
  using Real = compute_t<Scalar>;

  explicit OrderedRow(const RowLossArgs<Scalar>& given) : args(given) {
    const int64_t n = args.classes;
    const int64_t padded = (whole_vectors(n) + kMostPairedLanes) & -kMostPairedLanes;  // more than row_.whole
    memory_.resize(9 * padded);
    Real** const arrays[] = {&logits_,    &row_.z,      &p_,         &row_.p_rival, &row_.share,
                             &row_.gamma, &row_.factor, &row_.slope, &row_.taken};
    for (int64_t i = 0; i < 9; ++i) *arrays[i] = memory_.data() + i * padded;
    row_.whole = whole_vectors(n - 1);
    row_.p = p_ + 1;  // p_[0] = 0 for a class without a rival
    order_.resize(n);
    rival_.resize(n);
    if (n > kFewPairs) {
      sorter_ = std::make_unique<RowOrder>(n);
    } else {
      n_lower_.resize(padded);
      n_placed_.resize(n);
    }
    if constexpr (std::is_same_v<Real, float>) wide_.resize(sorter_ ? n : 0);
  }

  const RowLossArgs<Scalar>& args;

  // Reads a row. Returns false if its results are NaN.
  bool read(int64_t offset, int64_t label, Real label_weight, Real gamma) {
    constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
    const int64_t n = args.classes, top = n - 1;
    if (!copy_classes(args.logits + offset, args.layout.class_stride, n, logits_)) return false;
    sort();
    max_ = row_.z[top];
    if (max_ == -kInfinity) return false;
    find_rivals();
    gap_ = rival_[top] == 0 ? -kInfinity : row_.z[rival_[top] - 1] - max_;
    std::fill(row_.z + top, row_.z + row_.whole, -kInfinity);
    rest_ = exponentials_of(row_, max_);
    log_s_ = log_of_unit_sum(Real(1), rest_);
    p_top_ = Real(1) / (Real(1) + rest_);
    multiply(row_.p, row_.whole, p_top_);
    for (int64_t k = 0; k < top; ++k) row_.p_rival[k] = p_[rival_[k]];
    read_shares(label, label_weight);
    if (args.edges) {
      look_up_gamma(row_.p, row_.whole, args.edges, args.gamma, args.n_bins, row_.gamma);
      look_up_gamma(&p_top_, 1, args.edges, args.gamma, args.n_bins, &gamma_top_);
    } else {
      gamma_top_ = gamma;
      std::fill_n(row_.gamma, row_.whole, gamma);
    }
    return true;
  }

  Real loss() const {
    const double of_top = static_cast<double>(share_of_loss(share_top_, terms_of_top().loss));
    return static_cast<Real>(sum_losses(row_, max_, log_s_) + of_top);
  }

  // Writes the gradient of a row if `to` is not null. Returns the derivative in gamma.
  Real gradient(Real scale, Scalar* to, int64_t stride) {
    const int64_t top = args.classes - 1;
    const Real kept = args.detach_modulation ? 0 : 1;
    const DualTerms<Real> terms = terms_of_top();
    const double of_gamma = write_slopes(row_, max_, log_s_, kept) + static_cast<double>(share_top_ * terms.grad_gamma);
    if (to) {
      const Real slope = kept * (share_top_ * terms.slope), q = share_top_ * terms.factor + p_top_ * slope;
      std::fill_n(row_.taken, row_.whole + 1, Real(0));
      for (int64_t k = 0; k < top; ++k) row_.taken[rival_[k]] += row_.slope[k];
      row_.taken[rival_[top]] += slope;
      const Real others = write_q(row_);
      write_gradient(row_, others + q, scale);
      for (int64_t k = 0; k < top; ++k) to[order_[k] * stride] = Store<Scalar>::from_compute(row_.slope[k]);
      // p (others + q) - q cancels as p approaches 1.
      to[order_[top] * stride] = Store<Scalar>::from_compute(scale * p_top_ * (others - rest_ * q));
    }
    return scale * static_cast<Real>(of_gamma);
  }

 private:
  DualTerms<Real> terms_of_top() const {
    return dual_terms(-log_s_, log_of_unit_sum(rest_, Real(0)) - log_s_, gap_, gamma_top_);
  }

  void read_shares(int64_t label, Real label_weight) {
    const int64_t n = args.classes, top = n - 1, place = place_of(order_.data(), n, static_cast<int32_t>(label));
    const Real kept = (Real(1) - args.label_smoothing) * label_weight;
    const Real spread_share = args.label_smoothing / static_cast<Real>(n);
    std::fill_n(row_.share, top, spread_share);
    std::fill(row_.share + top, row_.share + row_.whole, Real(0));
    share_top_ = spread_share;
    if (args.class_weight) {
      for (int64_t k = 0; k < top; ++k) row_.share[k] *= args.class_weight[order_[k]];
      share_top_ *= args.class_weight[order_[top]];
    }
    (place == top ? share_top_ : row_.share[place]) += kept;
  }

  void sort() {
    const int64_t n = args.classes;
    if (!sorter_) {
      run_in_widest<CountLower>(static_cast<const Real*>(logits_), n, n_lower_.data());
      std::fill(n_placed_.begin(), n_placed_.end(), 0);
      for (int64_t c = 0; c < n; ++c) {
        const auto place = n_lower_[c] + n_placed_[n_lower_[c]]++;
        row_.z[place] = logits_[c];
        order_[place] = static_cast<int32_t>(c);
      }
      return;
    }
    const double* wide = nullptr;
    if constexpr (std::is_same_v<Real, float>) {
      std::copy_n(logits_, n, wide_.data());
      wide = wide_.data();
    } else {
      wide = logits_;
    }
    const std::vector<uint32_t>& order = sorter_->of(wide, /*is_probs=*/false);
    for (int64_t k = 0; k < n; ++k) {
      order_[k] = static_cast<int32_t>(order[k]);
      row_.z[k] = logits_[order_[k]];
    }
  }

  // The place after that of each class's rival; 0 without a rival. Of equal classes, the rival is the first of the row.
  void find_rivals() {
    int32_t rival = 0, first = 0;
    for (int32_t k = 0; k < static_cast<int32_t>(args.classes); ++k) {
      if (k > 0 && row_.z[k] != row_.z[k - 1]) {
        rival = first + 1;
        first = k;
      } else if (order_[k] < order_[first]) {
        first = k;
      }
      rival_[k] = rival;
    }
  }

  OrderedClasses<Real> row_;
  Real *logits_, *p_;
  Real max_, gap_, p_top_, share_top_, gamma_top_;  // of the largest class
  Real rest_;                                       // the sum of e^(z - max) over the other classes
  Real log_s_;                                      // log(1 + rest)
  std::vector<Real> memory_;
  std::vector<int32_t> order_, rival_;
  std::unique_ptr<RowOrder> sorter_;  // of many classes; the next two serve few
  std::vector<label_int<Real>> n_lower_;
  std::vector<int32_t> n_placed_;
  std::vector<double> wide_;
};

template <typename Scalar>
RowLossSums forward_in_order(const RowLossForward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  OrderedRow<Scalar> classes(args);
  Tile<Real> tile;
  std::fill_n(tile.gamma, kTileRows, args.gamma_value);
  RowLossSums sums{0, 0, -1};
  for (int64_t row = row_begin, n; row < row_end; row += n) {
    n = std::min(kTileRows, row_end - row);
    const int64_t invalid = read_rows(args, row, n, true, tile);
    if (invalid >= 0) {
      sums.invalid_row = invalid;
      return sums;
    }
    RowCursor at(args.layout, row);
    for (int64_t r = 0; r < n; ++r, at.next()) {
      Real loss = 0;
      if (tile.label[r] != kNoTarget) {
        const bool is_number = classes.read(at.offset(), tile.label[r], tile.weight[r], tile.gamma[r]);
        loss = is_number ? classes.loss() : std::numeric_limits<Real>::quiet_NaN();
      }
      sums.loss += static_cast<double>(loss);
      sums.weight += static_cast<double>(tile.weight[r]);
      if (args.row_loss) args.row_loss[row + r] = loss;
    }
    for (int64_t i = 0; i < kSavedNumbers<DualFocalFormula>; ++i) std::fill_n(args.saved + i * args.rows + row, n, 0);
  }
  return sums;
}

template <typename Scalar>
void backward_in_order(const RowLossBackward<Scalar>& args, int64_t row_begin, int64_t row_end) {
  using Real = compute_t<Scalar>;
  OrderedRow<Scalar> classes(args);
  Tile<Real> tile;
  std::fill_n(tile.gamma, kTileRows, args.gamma_value);
  const Real divisor = args.divisor ? *args.divisor : Real(1);
  // A missing gradient has no layout; that of the logits serves.
  const RowLayout& grad_layout = args.grad_logits ? args.grad_layout : args.layout;
  const int64_t stride = grad_layout.class_stride;
  for (int64_t row = row_begin, n; row < row_end; row += n) {
    n = std::min(kTileRows, row_end - row);
    read_rows(args, row, n, true, tile);
    RowCursor at(args.layout, row), grad_at(grad_layout, row);
    for (int64_t r = 0; r < n; ++r, at.next(), grad_at.next()) {
      const Real scale = args.grad_loss[(row + r) * args.grad_stride] / divisor;
      Scalar* to = args.grad_logits ? args.grad_logits + grad_at.offset() : nullptr;
      const bool is_zero = tile.label[r] == kNoTarget || scale == Real(0);
      Real of_gamma = is_zero ? Real(0) : std::numeric_limits<Real>::quiet_NaN();
      if (!is_zero && classes.read(at.offset(), tile.label[r], tile.weight[r], tile.gamma[r])) {
        of_gamma = classes.gradient(scale, to, stride);
      } else if (to) {
        for (int64_t c = 0; c < args.classes; ++c) to[c * stride] = Store<Scalar>::from_compute(of_gamma);
      }
      if (args.grad_gamma) args.grad_gamma[row + r] = of_gamma;
    }
  }
}

}  // namespace
}  // namespace focalkern::cpu
