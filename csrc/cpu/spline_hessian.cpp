// Sums over rows for the Hessian of spline scaling in all parameters of a matrix, for few classes.
//
// Memory: one read of the logits. A tile of rows becomes x, s and p in cache (spline_tile.h), in the column layout. The
// products of two terms of z = (x, 1) are columns of the tile, too; each sum for a pair of classes is the product of
// two columns.

#include <array>

#include "cpu/spline_losses.h"

namespace focalkern::cpu {
namespace {

using Column = double[kSplineTileRows];

int64_t n_pairs(int64_t n) { return n * (n + 1) / 2; }

// Columns of a tile: w p of each class, products of z, and the derivatives F of the scores of each row in the curve.
struct HessianTile {
  explicit HessianTile(int64_t classes)
      : memory(new double[(classes + n_pairs(classes + 1) + 1) * kSplineTileRows]),
        share(reinterpret_cast<Column*>(memory.get())),
        products(share + classes),
        both(*(products + n_pairs(classes + 1))) {}
  std::unique_ptr<double[]> memory;
  Column* share;
  Column* products;
  Column& both;  // w p_j (1 - p_j), or -w p_j p_k
};

// Adds the product of `column` with each of n columns to n sums.
FK_HOST_DEVICE void add_products(const Column& column, const Column* columns, int64_t n, double* sums) {
  int64_t k = 0;
  const auto add = [&](auto count) __attribute__((always_inline)) {
    constexpr int64_t size = decltype(count)::value;
    Four found[size] = {};
    for (int64_t i = 0; i < kSplineTileRows; i += 4) {
      const Four factor = load_simd<Four>(column + i);
      for (int64_t c = 0; c < size; ++c) found[c] += factor * load_simd<Four>(columns[k + c] + i);
    }
    for (int64_t c = 0; c < size; ++c) sums[k + c] += total_of(found[c]);
    k += size;
  };
  while (k + 8 <= n) add(std::integral_constant<int64_t, 8>());
  while (k < n) add(std::integral_constant<int64_t, 1>());
}

// Replaces f by p, and computes w p and the products of z.
FK_HOST_DEVICE void fill(const SplineTile& t, const double* weight, const HessianTile& h) {
  const int64_t classes = t.classes;
  double of_row[kSplineTileRows] = {};
  std::copy_n(weight, t.n_rows, of_row);
  for (int64_t c = 0; c < classes; ++c) {
    double* p = t.f + c * kSplineTileRows;
    for (int64_t i = 0; i < kSplineTileRows; ++i) {
      p[i] /= t.sum[i];
      h.share[c][i] = p[i] * of_row[i];
    }
  }
  Column* to = h.products;
  for (int64_t j = 0; j < classes; ++j) {
    const double* first = t.x + j * kSplineTileRows;
    for (int64_t k = j; k < classes; ++k, ++to) {
      const double* second = t.x + k * kSplineTileRows;
      for (int64_t i = 0; i < kSplineTileRows; ++i) (*to)[i] = first[i] * second[i];
    }
    std::copy_n(first, kSplineTileRows, *to++);
  }
  std::fill_n(*to, kSplineTileRows, 1.0);
}

// Adds w p_j z_t E_j of each row.
FK_HOST_DEVICE void add_cross(const SplineTile& t, const Basis& basis, const HessianTile& h, double* cross) {
  constexpr int64_t kVectors = kSize / 4;
  Four of_class[kSplineFewClasses][kVectors];
  for (int64_t r = 0; r < t.n_rows; ++r) {
    Four mean[kVectors] = {};
    for (int64_t c = 0; c < t.classes; ++c) {
      const int64_t i = c * kSplineTileRows + r;
      const Four powers = powers_of(t.u[i]);
      const auto& terms = basis.terms[t.piece[i]];
      for (int64_t v = 0; v < kVectors; ++v) {
        Four found = load_simd<Four>(terms[0] + 4 * v);
        for (int64_t k = 1; k < 4; ++k) found += powers[k] * load_simd<Four>(terms[k] + 4 * v);
        if (v == 0) found[0] = t.x[i];
        of_class[c][v] = found;
        mean[v] += t.f[i] * found;
      }
    }
    double* sums = cross;
    for (int64_t c = 0; c < t.classes; ++c) {
      Four away[kVectors];
      for (int64_t v = 0; v < kVectors; ++v) away[v] = h.share[c][r] * (of_class[c][v] - mean[v]);
      for (int64_t k = 0; k <= t.classes; ++k, sums += kSize) {
        const double factor = k < t.classes ? t.x[k * kSplineTileRows + r] : 1;
        for (int64_t v = 0; v < kVectors; ++v) {
          store_simd(load_simd<Four>(sums + 4 * v) + factor * away[v], sums + 4 * v);
        }
      }
    }
  }
}

FK_VECTOR_CLONES void add_tile(const SplineTile& t, const double* weight, const Basis& basis, const HessianTile& h,
                               SplineMatrixSums& sums) {
  fill(t, weight, h);
  add_cross(t, basis, h, sums.cross.data());
  const int64_t of_z = n_pairs(t.classes + 1);
  double* to = sums.pairs.data();
  for (int64_t j = 0; j < t.classes; ++j) {
    for (int64_t k = j; k < t.classes; ++k, to += of_z) {
      const double *share = h.share[j], *p = t.f + k * kSplineTileRows;
      for (int64_t i = 0; i < kSplineTileRows; ++i) h.both[i] = share[i] * ((j == k ? 1 : 0) - p[i]);
      add_products(h.both, h.products, of_z, to);
    }
  }
}

}  // namespace

SplineMatrixSums::SplineMatrixSums(int64_t classes)
    : pairs(n_pairs(classes) * n_pairs(classes + 1)), cross(classes * (classes + 1) * kSize) {}

void SplineMatrixSums::add(const SplineMatrixSums& other) {
  for (size_t i = 0; i < pairs.size(); ++i) pairs[i] += other.pairs[i];
  for (size_t i = 0; i < cross.size(); ++i) cross[i] += other.cross[i];
}

void spline_matrix_sums(const SplineInput& rows, const SplineCurve& curve, const SplineFitScores& scores,
                        const SplineTargets& targets, const double* of_knots, int64_t row_begin, int64_t row_end,
                        SplineMatrixSums& sums) {
  SplineScratch scratch(rows.classes, /*arrays=*/5);
  const CurveTables tables(curve);
  const Basis basis(curve.knots, of_knots);
  const HessianTile columns(rows.classes);
  for (int64_t row = row_begin; row < row_end; row += scratch.rows()) {
    const auto tile = scratch.tile(std::min(scratch.rows(), row_end - row));
    softmax_and_loss(rows, tables, scores, targets, row, tile);
    add_tile(tile, targets.weight + row, basis, columns, sums);
  }
}

void spline_matrix_hessian(const SplineMatrixSums& sums, int64_t classes, int64_t knots, double* hessian) {
  const int64_t n = knots + 1, terms = classes + 1, size = n + classes * terms;
  const auto place = [&](int64_t j, int64_t t) { return n + (t < classes ? j * classes + t : classes * classes + j); };
  const auto set = [&](int64_t i, int64_t j, double value) { hessian[i * size + j] = hessian[j * size + i] = value; };
  for (int64_t i = 0; i < n; ++i) std::fill_n(hessian + i * size, n, 0.0);
  const double* cross = sums.cross.data();
  const double* pairs = sums.pairs.data();
  for (int64_t j = 0; j < classes; ++j) {
    for (int64_t t = 0; t < terms; ++t, cross += kSize) {
      for (int64_t i = 0; i < n; ++i) set(i, place(j, t), cross[i]);
    }
    for (int64_t k = j; k < classes; ++k) {
      for (int64_t s = 0; s < terms; ++s) {
        for (int64_t t = s; t < terms; ++t, ++pairs) {
          set(place(j, s), place(k, t), *pairs);
          set(place(j, t), place(k, s), *pairs);
        }
      }
    }
  }
}

}  // namespace focalkern::cpu
