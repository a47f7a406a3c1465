// Sums over rows for the fit of spline scaling: the loss with its derivatives in the curve, in a vector and for a
// matrix.
//
// Memory: one read of the logits. A tile of rows becomes x, u and p in cache (spline_tile.h). Then every entry adds p
// s^k and p x s^k to the sums of its piece. Gradient and Hessian are linear in these sums, with the basis of the spline
// as coefficients. With many classes most entries lie left of the first knot: these are added in vectors, the others
// one by one.

#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/spline_losses.h"

namespace focalkern::cpu {
namespace {

// The entries on piece 0, and 0 for the others. For a comparison of bytes with doubles g++ would emit a scalar loop.
FK_HOST_DEVICE Four left_of(const Four& entries, const uint8_t* piece) {
  simd_t<uint8_t, 4> pieces;
  std::memcpy(&pieces, piece, sizeof(pieces));
  return __builtin_convertvector(pieces, simd_t<int64_t, 4>) == 0 ? entries : Four{};
}
// Calls work(i) for each of n entries, in whole groups of eight, that is not on piece 0.
template <typename Work>
FK_HOST_DEVICE void for_each_inner(const uint8_t* piece, int64_t n, Work work) {
  for (int64_t group = 0; group < n; group += 8) {
    uint64_t pieces;
    std::memcpy(&pieces, piece + group, sizeof(pieces));
    // The addition sets the highest bit of every byte from 1 to 128. A branch per entry would be mispredicted.
    for (uint64_t rest = (pieces + 0x7f7f7f7f7f7f7f7f) & 0x8080808080808080; rest != 0; rest &= rest - 1) {
      work(group + (std::countr_zero(rest) >> 3));
    }
  }
}

// ---- gradient and Hessian in the curve -----------------------------------------------------------------------------

// The sums of one row, by piece.
struct RowMoments {
  double of_piece[kSize][12];
  double x_squared;
  uint32_t seen;  // a bit for each piece that has a term; the sums of all others are 0
};

FK_HOST_DEVICE void add_entry(RowMoments& row, int64_t piece, double s, double x, double p) {
  double* sums = row.of_piece[piece];
  const Four powers = p * powers_of(s);
  const double fourth = s * s * (s * s);
  add_to(sums, powers);
  add_to(sums + 4, fourth * powers);
  add_to(sums + 8, x * powers);
  row.seen |= uint32_t{1} << piece;
}

// Sums over entries on piece 0, where the spline is a line, and of all p x^2. Lanes are classes or rows.
struct LineMoments {
  Four p0{}, p1{}, p2{}, x0{}, x1{}, squares{};
  FK_HOST_DEVICE void add(const SplineTile& t, int64_t i) {
    const Four s = load_simd<Four>(t.u + i), x = load_simd<Four>(t.x + i), p = load_simd<Four>(t.f + i);
    const Four left = left_of(p, t.piece + i), with_s = left * s, with_x = left * x;
    squares += p * x * x;
    p0 += left;
    p1 += with_s;
    p2 += with_s * s;
    x0 += with_x;
    x1 += with_x * s;
  }
};

// Of the rows from r on in the column layout. Entries right of piece 0 are listed: a branch for each is mispredicted.
FK_HOST_DEVICE void moments_of_rows(const SplineTile& t, int64_t r, RowMoments (&rows)[4]) {
  LineMoments line;
  uint16_t inner[4 * kSplineFewClasses];
  int64_t n = 0;
  for (int64_t c = 0; c < t.classes; ++c) {
    const int64_t first = c * kSplineTileRows + r;
    line.add(t, first);
    for (int64_t i = first; i < first + 4; ++i) {
      inner[n] = static_cast<uint16_t>(i);
      n += t.piece[i] != 0 ? 1 : 0;
    }
  }
  for (int64_t k = 0; k < n; ++k) {
    const int64_t i = inner[k];
    add_entry(rows[i % 4], t.piece[i], t.u[i], t.x[i], t.f[i]);
  }
  for (int64_t lane = 0; lane < 4; ++lane) {
    RowMoments& row = rows[lane];
    row.x_squared = line.squares[lane];
    add_to(row.of_piece[0], Four{line.p0[lane], line.p1[lane], line.p2[lane], 0.0});
    add_to(row.of_piece[0] + 8, Four{line.x0[lane], line.x1[lane], 0.0, 0.0});
    row.seen |= 1;
  }
}

// Of row r in the row layout.
FK_HOST_DEVICE void moments_of_row(const SplineTile& t, int64_t r, RowMoments& row) {
  const int64_t first = r * t.inner;
  LineMoments line;
  for (int64_t i = 0; i < t.inner; i += 4) line.add(t, first + i);
  row.x_squared = total_of(line.squares);
  add_to(row.of_piece[0], Four{total_of(line.p0), total_of(line.p1), total_of(line.p2), 0.0});
  add_to(row.of_piece[0] + 8, Four{total_of(line.x0), total_of(line.x1), 0.0, 0.0});
  row.seen |= 1;
  for_each_inner(t.piece + first, t.inner, [&](int64_t c) {
    const int64_t i = first + c;
    add_entry(row, t.piece[i], t.u[i], t.x[i], t.f[i]);
  });
}

// Adds the sums of a row with this weight, clears them, and writes its mean times the weight and its mean. `vectors`
// of four numbers hold m + 1.
template <int64_t vectors>
FK_HOST_DEVICE void add_curve_row(const SplineTile& t, int64_t r, int64_t target, double weight, int64_t knots,
                                  const Basis& basis, RowMoments& moments, SplineCurveSums& sums,
                                  Four (&mean)[vectors]) {
  const double share = 1 / t.sum[r], total = weight * share;
  sums.nll += weight * t.shared[r];
  sums.x_squared += total * moments.x_squared;
  sums.of_target_x += weight * t.x[target];
  // t.u holds the offset of the target on its piece.
  add_to(sums.of_target[t.piece[target]], weight * powers_of(t.u[target]));
  Four even[vectors] = {}, odd[vectors] = {};  // a chain of additions for each parity of the power
  double of_x = 0;
  for (uint32_t rest = moments.seen; rest != 0; rest &= rest - 1) {
    const int64_t piece = std::countr_zero(rest);
    double* of_row = moments.of_piece[piece];
    double* of_all = sums.moments[piece];
    of_x += of_row[8];
    const int64_t powers = piece == 0 || piece == knots ? 2 : 4;  // of a line, or of a cubic
    for (int64_t k = 0; k < powers; k += 2) {
      const double* terms = basis.terms[piece][k];
      for (int64_t j = 0; j < vectors; ++j) {
        even[j] += of_row[k] * load_simd<Four>(terms + 4 * j);
        odd[j] += of_row[k + 1] * load_simd<Four>(terms + kSize + 4 * j);
      }
    }
    for (int64_t k = 0; k < 12; k += 4) {
      add_to(of_all + k, total * load_simd<Four>(of_row + k));
      store_simd(Four{}, of_row + k);
    }
  }
  moments.seen = 0;
  even[0] += Four{of_x, 0.0, 0.0, 0.0};
  for (int64_t j = 0; j < vectors; ++j) mean[j] = share * (even[j] + odd[j]);
}

template <int64_t vectors>
FK_HOST_DEVICE void add_rows(const SplineTile& t, const SplineTargets& targets, int64_t row, int64_t knots,
                             const Basis& basis, RowMoments (&moments)[4], SplineCurveSums& sums) {
  for (int64_t first = 0; first < t.n_rows; first += 4) {
    if (t.column) moments_of_rows(t, first, moments);
    Four means[4][vectors] = {};
    double weights[4] = {};
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t r = first + i;
      weights[i] = r < t.n_rows ? targets.weight[row + r] : 0;
      if (weights[i] == 0) {
        moments[i] = {};
        continue;
      }
      if (!t.column) moments_of_row(t, r, moments[i]);
      const int64_t target = r * t.row_stride + targets.target[row + r] * t.class_stride;
      add_curve_row<vectors>(t, r, target, weights[i], knots, basis, moments[i], sums, means[i]);
    }
    for (int64_t j = 0; j <= knots; ++j) {
      double factors[4];
      for (int64_t i = 0; i < 4; ++i) factors[i] = weights[i] * means[i][j / 4][j % 4];
      for (int64_t k = 0; k < vectors; ++k) {
        Four found = load_simd<Four>(sums.means[j] + 4 * k);
        for (int64_t i = 0; i < 4; ++i) found += factors[i] * means[i][k];
        store_simd(found, sums.means[j] + 4 * k);
      }
    }
  }
}

FK_VECTOR_CLONES void add_curve_rows(const SplineTile& t, const SplineTargets& targets, int64_t row, int64_t knots,
                                     const Basis& basis, RowMoments (&moments)[4], SplineCurveSums& sums) {
  knots < 12 ? add_rows<3>(t, targets, row, knots, basis, moments, sums)
             : add_rows<4>(t, targets, row, knots, basis, moments, sums);
}

// ---- gradient in the curve and in a vector -------------------------------------------------------------------------

// Replaces p by r = w (p - [target]).
FK_VECTOR_CLONES void residuals_of_tile(const SplineTile& t, const SplineTargets& targets, int64_t row) {
  double share[kSplineTileRows] = {};
  for (int64_t r = 0; r < t.n_rows; ++r) share[r] = targets.weight[row + r] / t.sum[r];
  for (int64_t o = 0; o < t.outer; ++o) {
    double* f = t.f + o * t.inner;
    if (t.column) {
#pragma omp simd
      for (int64_t i = 0; i < kSplineTileRows; ++i) f[i] *= share[i];
    } else {
      const double factor = share[o];
#pragma omp simd
      for (int64_t i = 0; i < t.inner; ++i) f[i] *= factor;
    }
  }
  for (int64_t r = 0; r < t.n_rows; ++r) {
    t.f[r * t.row_stride + targets.target[row + r] * t.class_stride] -= targets.weight[row + r];
  }
}

// Adds four copies: consecutive entries often lie on one piece, and an addition to memory waits for the one before.
FK_HOST_DEVICE void add_copies(const double (&copies)[4][kSize][4], double (&moments)[kSize][4]) {
  for (int64_t i = 0; i < kSize; ++i) {
    for (const auto& copy : copies) add_to(moments[i], load_simd<Four>(copy[i]));
  }
}

// Adds the sums over the rows of r x of class j and of each class, in the column layout.
FK_HOST_DEVICE void add_products(const SplineTile& t, int64_t j, double* sums) {
  const double* r = t.f + j * kSplineTileRows;
  int64_t k = 0;
  const auto add = [&](auto count) __attribute__((always_inline)) {
    constexpr int64_t n = decltype(count)::value;
    const double* x = t.x + k * kSplineTileRows;
    Four found[n] = {};
    for (int64_t i = 0; i < kSplineTileRows; i += 4) {
      const Four of_r = load_simd<Four>(r + i);
      for (int64_t c = 0; c < n; ++c) found[c] += of_r * load_simd<Four>(x + c * kSplineTileRows + i);
    }
    for (int64_t c = 0; c < n; ++c) sums[k + c] += total_of(found[c]);
    k += n;
  };
  while (k + 5 <= t.classes) add(std::integral_constant<int64_t, 5>());
  while (k < t.classes) add(std::integral_constant<int64_t, 1>());
}

FK_VECTOR_CLONES void add_linear_rows(const SplineTile& t, SplineLinearSums& sums) {
  const bool of_matrix = sums.weight.size() > sums.bias.size();
  double* const bias = sums.bias.data();
  double* const weight = sums.weight.data();
  double moments[4][kSize][4] = {};
  for (int64_t o = 0; o < t.outer; ++o) {
    const double *r = t.f + o * t.inner, *s = t.u + o * t.inner, *x = t.x + o * t.inner;
    const uint8_t* piece = t.piece + o * t.inner;
    const auto add_entry = [&](int64_t i) __attribute__((always_inline)) {
      add_to(moments[i & 3][piece[i]], r[i] * powers_of(s[i]));
    };
    Four r0{}, r1{}, all{}, of_x{};
    for (int64_t i = 0; i < t.inner; i += 4) {
      const Four of_r = load_simd<Four>(r + i);
      of_x += of_r * load_simd<Four>(x + i);
      if (t.column) {
        all += of_r;
      } else {
        const Four left = left_of(of_r, piece + i);
        r0 += left;
        r1 += left * load_simd<Four>(s + i);
      }
    }
    sums.x += total_of(of_x);
    if (t.column) {
      for (int64_t i = 0; i < t.n_rows; ++i) add_entry(i);  // too few are on piece 0 for a branch
      bias[o] += total_of(all);
      of_matrix ? add_products(t, o, weight + o * t.classes) : void(weight[o] += total_of(of_x));
    } else {
      for_each_inner(piece, t.inner, add_entry);
      sums.moments[0][0] += total_of(r0);
      sums.moments[0][1] += total_of(r1);
#pragma omp simd
      for (int64_t i = 0; i < t.classes; ++i) {
        bias[i] += r[i];
        weight[i] += r[i] * x[i];
      }
    }
  }
  add_copies(moments, sums.moments);
}

// ---- losses of rows ------------------------------------------------------------------------------------------------

FK_VECTOR_CLONES void briers_of_tile(const SplineTile& t, const int64_t* target, double* brier) {
  double squares[kSplineTileRows] = {};
  for (int64_t o = 0; o < t.outer; ++o) {
    const double* f = t.f + o * t.inner;
    if (t.column) {
#pragma omp simd
      for (int64_t i = 0; i < kSplineTileRows; ++i) squares[i] += f[i] * f[i];
    } else {
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < t.inner; ++i) sum += f[i] * f[i];
      squares[o] = sum;
    }
  }
  for (int64_t r = 0; r < t.n_rows; ++r) {
    const double share = 1 / t.sum[r];
    const double p = share * t.f[r * t.row_stride + target[r] * t.class_stride];
    brier[r] = share * share * squares[r] - 2 * p + 1;
  }
}

}  // namespace

int64_t spline_chunk_rows(int64_t rows, int64_t classes) {
  constexpr int64_t kEntries = 1 << 16, kMostChunks = 256;
  const int64_t few = std::max<int64_t>(1, kEntries / std::max<int64_t>(classes, 1));
  const int64_t chunk = std::max(few, (rows + kMostChunks - 1) / kMostChunks);
  return (chunk + kSplineTileRows - 1) / kSplineTileRows * kSplineTileRows;
}

void SplineCurveSums::add(const SplineCurveSums& other) {
  nll += other.nll;
  x_squared += other.x_squared;
  of_target_x += other.of_target_x;
  for (int64_t i = 0; i < kSize; ++i) {
    for (int64_t k = 0; k < 12; ++k) moments[i][k] += other.moments[i][k];
    for (int64_t k = 0; k < 4; ++k) of_target[i][k] += other.of_target[i][k];
    for (int64_t k = 0; k < kSize; ++k) means[i][k] += other.means[i][k];
  }
}

void SplineLinearSums::add(const SplineLinearSums& other) {
  nll += other.nll;
  x += other.x;
  for (int64_t i = 0; i < kSize; ++i) {
    for (int64_t k = 0; k < 4; ++k) moments[i][k] += other.moments[i][k];
  }
  for (size_t i = 0; i < weight.size(); ++i) weight[i] += other.weight[i];
  for (size_t c = 0; c < bias.size(); ++c) bias[c] += other.bias[c];
}

void spline_curve_sums(const SplineInput& rows, const SplineCurve& curve, const SplineFitScores& scores,
                       const SplineTargets& targets, const double* of_knots, int64_t row_begin, int64_t row_end,
                       SplineCurveSums& sums) {
  SplineScratch scratch(rows.classes, /*arrays=*/5);
  const CurveTables tables(curve);
  const Basis basis(curve.knots, of_knots);
  RowMoments moments[4] = {};
  for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
    const auto tile = scratch.tile(std::min(scratch.rows(), row_end - row));
    softmax_and_loss(rows, tables, scores, targets, row, tile);
    add_curve_rows(tile, targets, row, curve.knots, basis, moments, sums);
  }
}

void spline_curve_derivatives(const SplineCurveSums& sums, int64_t knots, const double* of_knots, double* gradient,
                              double* hessian) {
  const Basis basis(knots, of_knots);
  const int64_t n = knots + 1;
  double of[kSize] = {}, second[kSize][kSize] = {};
  of[0] = -sums.of_target_x;
  second[0][0] = sums.x_squared;
  for (int64_t piece = 0; piece <= knots; ++piece) {
    const double* moments = sums.moments[piece];
    of[0] += moments[8];
    for (int64_t k = 0; k < 4; ++k) {
      const double* terms = basis.terms[piece][k];
      for (int64_t j = 1; j < n; ++j) {
        of[j] += (moments[k] - sums.of_target[piece][k]) * terms[j];
        second[0][j] += moments[8 + k] * terms[j];
      }
      for (int64_t l = 0; l < 4; ++l) {
        for (int64_t i = 1; i < n; ++i) {
          const double factor = moments[k + l] * basis.terms[piece][l][i];
          for (int64_t j = 1; j < n; ++j) second[i][j] += factor * terms[j];
        }
      }
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    gradient[i] = of[i];
    for (int64_t j = 0; j < n; ++j)
      hessian[i * n + j] = (i > j && j == 0 ? second[j][i] : second[i][j]) - sums.means[i][j];
  }
}

void spline_linear_sums(const SplineInput& rows, const SplineCurve& curve, const SplineFitScores& scores,
                        const SplineTargets& targets, double* slopes, int64_t row_begin, int64_t row_end,
                        SplineLinearSums& sums) {
  SplineScratch scratch(rows.classes, /*arrays=*/5);
  const CurveTables tables(curve);
  for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
    const auto tile = scratch.tile(std::min(scratch.rows(), row_end - row));
    softmax_and_loss(rows, tables, scores, targets, row, tile);
    for (int64_t r = 0; r < tile.n_rows; ++r) sums.nll += targets.weight[row + r] * tile.shared[r];
    residuals_of_tile(tile, targets, row);
    add_linear_rows(tile, sums);
    if (slopes) write_tile(tile, tile.f, slopes, SplineStorage::kDouble, row);
  }
}

void spline_row_losses(const SplineInput& rows, const SplineCurve& curve, const SplineFitScores& scores,
                       const SplineTargets& targets, double* nll, double* brier, int64_t row_begin, int64_t row_end) {
  SplineScratch scratch(rows.classes, /*arrays=*/5);
  const CurveTables tables(curve);
  for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
    const auto tile = scratch.tile(std::min(scratch.rows(), row_end - row));
    softmax_and_loss(rows, tables, scores, targets, row, tile);
    std::copy_n(tile.shared, tile.n_rows, nll + row);
    briers_of_tile(tile, targets.target + row, brier + row);
  }
}

}  // namespace focalkern::cpu
