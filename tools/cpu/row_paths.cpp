// Checks the choice of a loop for a tile of rows (csrc/cpu/row_loss/plan.h) over all sizes: each loop must be able to
// process the rows that it gets. Prints the first shape for which it cannot.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cpu/row_loss/plan.h"

using namespace focalkern;
using namespace focalkern::cpu;

namespace {

#define FK_REQUIRE(condition)                                                                             \
  if (!(condition)) {                                                                                     \
    std::printf("%s: %lld classes, %lld bytes, %lld rows\n", #condition, static_cast<long long>(classes), \
                static_cast<long long>(size), static_cast<long long>(rows));                              \
    return false;                                                                                         \
  }

bool forward_fits(const RowLayout& layout, int64_t classes, int64_t size, bool sum_only, bool avx512, int64_t row,
                  int64_t rows) {
  const RowPath path = plan_forward(layout, classes, size, sum_only, avx512, row, rows);
  const int64_t stride = row_stride(layout, row, rows);
  switch (path) {
    case RowPath::kAcrossRows:
      FK_REQUIRE(layout.class_stride != 1 && classes > 1);
      break;
    case RowPath::kFourRows:
      FK_REQUIRE(avx512 && sum_only && size == 4 && rows >= 16 && classes >= 16 && stride > 0 &&
                 stride < kFarthest / 16);
      break;
    case RowPath::kTransposedRegisters:
      FK_REQUIRE(avx512 && size <= 4 && rows >= 16 && stride > 0 && stride < kFarthest / 16);
      FK_REQUIRE(classes == 2 || classes == 3 || (classes >= 16 / size && classes <= 256));
      break;
    case RowPath::kTransposedTile:
      FK_REQUIRE(classes <= kFewClasses);
      break;
    case RowPath::kAlongClasses:
      FK_REQUIRE(layout.class_stride == 1 && classes > kFewClasses);  // a whole group of classes
      break;
    default:
      FK_REQUIRE(false);
  }
  return true;
}

bool backward_fits(const RowLayout& layout, const RowLayout& grad, int64_t rows, int64_t classes, int64_t size,
                   bool avx512) {
  const RowPath path = plan_backward(layout, grad, rows, classes, size, avx512);
  switch (path) {
    case RowPath::kAcrossRows:
      FK_REQUIRE(layout.class_stride != 1 && grad.class_stride != 1 && grad.inner_stride == 1);
      FK_REQUIRE(grad.inner % layout.inner == 0);
      break;
    case RowPath::kDenseRows:
      FK_REQUIRE(avx512 && size <= 4 && classes >= 2 && classes <= kMostDense);
      for (int64_t row = 0; row < rows; ++row) {
        FK_REQUIRE(layout.row_offset(row) == row * classes && grad.row_offset(row) == row * classes);
      }
      break;
    case RowPath::kAlongClasses:
      FK_REQUIRE(layout.class_stride == 1 && grad.class_stride == 1 && classes > kFewClasses);
      break;
    case RowPath::kTransposedTile:
      break;
    default:
      FK_REQUIRE(false);
  }
  return true;
}

bool all_fit() {
  for (int64_t classes = 1; classes <= 5000; classes += classes < 300 ? 1 : 97) {
    for (const int64_t rows : {1, 2, 15, 16, 17, 63, 64}) {
      const RowLayout layouts[] = {
          {1, classes, 0, 1},                    // [N, C]
          {1, classes + 3, 0, 1},                // rows with gaps
          {1, kFarthest, 0, 1},                  // far apart
          {1, 0, 0, 1},                          // one row, expanded
          {rows, 0, 1, rows},                    // [C, N]
          {8, 8 * classes, classes, 1},          // two runs
          {8, 8 * classes + 5, classes, 1},      // with a gap between them
          {8, 8 * classes, 1, 8},                // [N, C, d]
          {8, 10, 1, 60, 3, 60 * classes - 30},  // a crop of [N, C, h, w]
          // The same with the classes last, without and with a gap between the images.
          {8, 8 * classes, classes, 1, 3, 0},
          {8, 10 * classes, classes, 1, 3, 30 * classes},
      };
      for (const int64_t size : {2, 4, 8}) {
        for (const bool avx512 : {false, true}) {
          for (const RowLayout& layout : layouts) {
            for (const bool sum_only : {false, true}) {
              for (const int64_t row : {0, 3}) {
                if (!forward_fits(layout, classes, size, sum_only, avx512, row, rows)) return false;
              }
            }
            for (const RowLayout& grad : layouts) {
              if (!backward_fits(layout, grad, rows, classes, size, avx512)) return false;
            }
          }
        }
      }
    }
  }
  return true;
}

const char* name_of(RowPath path) {
  const char* names[] = {"along_classes", "across_rows",          "transposed_tile",
                         "four_rows",     "transposed_registers", "dense_rows"};
  return names[static_cast<int>(path)];
}

}  // namespace

// Without arguments, checks all sizes. With classes and the bytes of a logit, prints the loops of 64 rows [N, C].
int main(int argc, char** argv) {
  if (argc < 3) return all_fit() ? 0 : 1;
  const int64_t classes = std::atoll(argv[1]), size = std::atoll(argv[2]);
  const RowLayout layout = {1, classes, 0, 1};
  std::printf("%s %s\n", name_of(plan_forward(layout, classes, size, true, true, 0, 64)),
              name_of(plan_backward(layout, layout, 64, classes, size, true)));
}
