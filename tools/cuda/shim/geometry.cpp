// Invariants of the launch geometry (csrc/cuda/launch.h), over all sizes.

#include <cstdint>
#include <cstdio>
#include <vector>

#include "cuda/launch.h"

using namespace focalkern;

namespace {

char message[256];

}  // namespace

extern "C" {

#define FK_REQUIRE(condition)                                                                                \
  if (!(condition)) {                                                                                        \
    snprintf(message, sizeof(message), "%s for %lld rows of %lld", #condition, static_cast<long long>(rows), \
             static_cast<long long>(classes));                                                               \
    return message;                                                                                          \
  }

// With at most this many elements, every row is counted as the kernels visit it, for some sizes; otherwise only the
// ends of the tiles are compared.
constexpr int64_t kEnumerated = 20000;

// Runs of rows_at_once rows, where block b takes the runs b, b + grid, ... : whether every row is taken exactly once.
bool takes_each_row_once(int64_t rows, int64_t rows_at_once, int64_t grid) {
  std::vector<unsigned char> taken(static_cast<size_t>(rows));
  for (int64_t block = 0; block < grid; ++block) {
    for (int64_t first = block * rows_at_once; first < rows; first += grid * rows_at_once) {
      for (int64_t row = first; row < rows && row < first + rows_at_once; ++row) {
        if (taken[static_cast<size_t>(row)]++ != 0) return false;
      }
    }
  }
  for (const unsigned char count : taken) {
    if (count != 1) return false;
  }
  return true;
}

// Checks a plan: every row lies in exactly one tile, tiles and partial results fit a block, the grid is not too large.
// Returns the broken rule, or null.
const char* check_row_plan(int64_t rows, int64_t classes, int bytes, int end_to_end, int class_outermost, int pairs) {
  using namespace cuda;
  const RowPlan plan = plan_rows(rows, classes, bytes, end_to_end != 0, class_outermost != 0, pairs != 0);
  const bool two = plan.path == RowPath::kPairs || (plan.path == RowPath::kOwn && bytes == 2);
  const int rows_of_a_thread = two ? 2 : 1;
  FK_REQUIRE(plan.rows_per_tile >= 1 && plan.rows_per_tile <= kBlock * rows_of_a_thread);
  FK_REQUIRE(plan.parts >= 1 && plan.rows_per_tile * plan.parts <= kBlock * rows_of_a_thread);
  FK_REQUIRE(plan.grid >= 1 && plan.grid <= kMaxGrid && (plan.grid <= plan.tiles || rows == 0));
  FK_REQUIRE(plan.tiles == rows / plan.rows_per_tile + (rows % plan.rows_per_tile != 0));
  if (rows <= kEnumerated / classes && rows % 61 == 1) {
    FK_REQUIRE(takes_each_row_once(rows, plan.rows_per_tile, plan.grid));
  }
  // Contiguous tiles: the last one begins within the rows and reaches their end, so no row is missing or taken twice.
  FK_REQUIRE(rows == 0 || ((plan.tiles - 1) * plan.rows_per_tile < rows && rows <= plan.tiles * plan.rows_per_tile));
  FK_REQUIRE((plan.lanes & (plan.lanes - 1)) == 0 && plan.lanes <= kBlock);
  FK_REQUIRE(plan.lanes <= kWarp || plan.lanes == kBlock);
  FK_REQUIRE(!fits_one_block(rows, classes) || plan.grid == 1);
  if (plan.path == RowPath::kTile || plan.path == RowPath::kOwn) {
    FK_REQUIRE(end_to_end && plan.rows_per_tile * classes * bytes <= kTileBytes);
    FK_REQUIRE(plan.rows_per_tile * classes * bytes % kVectorBytes == 0);
    FK_REQUIRE(plan.lanes * tile_values_per_lane(bytes, classes) >= classes && plan.lanes <= kWarp);
    const int at_once = tile_values_at_once(bytes, classes);
    FK_REQUIRE(classes % at_once == 0 && plan.steps <= tile_values_per_lane(bytes, classes) / at_once);
    FK_REQUIRE(plan.steps * plan.lanes * at_once >= classes && (plan.steps - 1) * plan.lanes * at_once < classes);
    FK_REQUIRE(1 << plan.lane_bits == plan.lanes);
    // Assumptions of the kernels about several lanes, and about the number of sums.
    FK_REQUIRE(plan.lanes == 1 || plan.steps > (at_once == 2 ? 4 : 8));
    FK_REQUIRE(plan.path == RowPath::kOwn || plan.rows_per_tile <= kBlock);
    FK_REQUIRE(bytes < 8 || plan.around);
    FK_REQUIRE(plan.path == RowPath::kTile || (plan.lanes == 1 && classes <= kValuesPerLane && bytes <= 4));
  } else if (plan.path == RowPath::kPixels) {
    FK_REQUIRE(class_outermost && plan.rows_per_tile * plan.parts == kBlock && plan.rows_per_tile % kWarp == 0);
  } else if (plan.path == RowPath::kPairs) {
    FK_REQUIRE(class_outermost && pairs && plan.parts == 1 && plan.rows_per_tile == 2 * kBlock);
  } else {
    FK_REQUIRE(plan.parts == (plan.lanes > kWarp ? plan.lanes / kWarp : 1));
    FK_REQUIRE(plan.lanes > kWarp || plan.rows_per_tile % (kBlock / plan.lanes) == 0);
  }
  return nullptr;
}

// Only few long rows are cut; the chunks of a row are adjacent, and none is empty.
const char* check_chunks(int64_t rows, int64_t classes, int bytes) {
  using namespace cuda;
  const RowPlan plan = plan_rows(rows, classes, bytes, false, false);
  const bool is_cut = rows > 0 && rows < kFewRows && classes * bytes > kLongRowBytes;
  FK_REQUIRE(is_cut == (plan.chunks > 1));
  if (!is_cut) return nullptr;
  FK_REQUIRE(plan.path == RowPath::kRows && plan.lanes == kBlock && plan.rows_per_tile == 1);
  FK_REQUIRE(int64_t{plan.chunk_classes} * bytes % kChunkBytes == 0);
  FK_REQUIRE(int64_t{plan.chunks - 1} * plan.chunk_classes < classes);
  FK_REQUIRE(int64_t{plan.chunks} * plan.chunk_classes >= classes);
  FK_REQUIRE(rows * plan.chunks <= kMostChunks);
  return nullptr;
}

const char* check_map_plan(int64_t rows, int64_t classes, int small, int large) {
  using namespace cuda;
  const MapPlan plan = plan_map(rows, classes, small, large);
  FK_REQUIRE((plan.lanes & (plan.lanes - 1)) == 0 && (plan.lanes <= kWarp || plan.lanes == kBlock));
  FK_REQUIRE(plan.grid >= (rows > 0) && plan.grid <= 8 * kMaxGrid);
  if (rows <= kEnumerated / classes) {
    FK_REQUIRE(takes_each_row_once(rows, kBlock / plan.lanes, plan.grid));
  }
  FK_REQUIRE(plan.capacity == 0 || plan.capacity == large || (plan.capacity == small && plan.lanes == 1));
  FK_REQUIRE(plan.capacity > 0 ? classes <= int64_t{plan.capacity} * plan.lanes : plan.lanes == kBlock);
  FK_REQUIRE(plan.lanes != kWarp || classes > int64_t{plan.capacity} * kWarp / 2);
  return nullptr;
}

const char* check_grid_plan(int64_t rows, int64_t n_temperatures) {
  using namespace cuda;
  const int64_t classes = n_temperatures;  // for the message
  const GridPlan plan = plan_grid(rows, n_temperatures);
  FK_REQUIRE((plan.lanes & (plan.lanes - 1)) == 0 && plan.lanes <= kWarp);
  FK_REQUIRE(plan.rows_per_tile % (kBlock / plan.lanes) == 0);
  FK_REQUIRE(plan.row_tiles * plan.rows_per_tile >= rows && (plan.row_tiles - 1) * plan.rows_per_tile < rows);
  FK_REQUIRE(plan.temperature_tiles * plan.lanes >= n_temperatures);
  FK_REQUIRE(plan.blocks() <= INT32_MAX);
  if (rows <= kEnumerated / n_temperatures && rows % 61 == 1 && plan.blocks() <= 4096) {
    FK_REQUIRE(takes_each_row_once(rows, plan.rows_per_tile, plan.row_tiles));
    FK_REQUIRE(takes_each_row_once(n_temperatures, plan.lanes, plan.temperature_tiles));
  }
  return nullptr;
}

// ---- all sizes -----------------------------------------------------------------------------------------------------
// A plan is a function of rows and classes with few values: thresholds split either axis into runs. Only up to
// kMostRows do rows matter, where the last threshold lies; beyond, tiles and grid grow as quotients. So every number of
// classes up to a limit is checked at rows around each threshold, which gives the runs of classes. At both ends of each
// run, every number of rows up to kMostRows is checked, and powers of two and their neighbours beyond.

constexpr int64_t kMostRows = cuda::kManyPixels + 2;

std::vector<int64_t> rows_at_thresholds() {
  std::vector<int64_t> rows;
  for (int64_t n = 0; n <= 33; ++n) rows.push_back(n);  // fits_one_block
  for (int64_t count = 1; count <= 2 * cuda::kBlock; count *= 2) {
    for (int64_t by = -1; by <= 1; ++by) {
      rows.push_back(count * cuda::kEnoughBlocks + by);
      rows.push_back(count + by);
    }
  }
  rows.push_back(int64_t{1} << 40);
  return rows;
}

std::vector<int64_t> rows_beyond() {
  std::vector<int64_t> rows;
  for (int bits = 18; bits <= 40; ++bits) {
    for (int64_t by = -1; by <= 1; ++by) rows.push_back((int64_t{1} << bits) + by);
  }
  return rows;
}

bool same_choice(const cuda::RowPlan& a, const cuda::RowPlan& b) {
  return a.path == b.path && a.rows_per_tile == b.rows_per_tile && a.lanes == b.lanes && a.parts == b.parts;
}

const char* check_rows_of(int64_t classes, int bytes, int end_to_end, int class_outermost, int pairs) {
  for (int64_t rows = 0; rows <= kMostRows; ++rows) {
    const char* broken = check_row_plan(rows, classes, bytes, end_to_end, class_outermost, pairs);
    if (broken != nullptr) return broken;
  }
  const auto last = cuda::plan_rows(kMostRows, classes, bytes, end_to_end != 0, class_outermost != 0, pairs != 0);
  for (const int64_t rows : rows_beyond()) {
    const char* broken = check_row_plan(rows, classes, bytes, end_to_end, class_outermost, pairs);
    if (broken != nullptr) return broken;
    FK_REQUIRE(
        same_choice(cuda::plan_rows(rows, classes, bytes, end_to_end != 0, class_outermost != 0, pairs != 0), last));
  }
  return nullptr;
}

const char* check_layout(int64_t most_classes, int bytes, int end_to_end, int class_outermost, int pairs) {
  const std::vector<int64_t> thresholds = rows_at_thresholds();
  std::vector<cuda::RowPlan> run(thresholds.size()), next(thresholds.size());
  for (int64_t classes = 1; classes <= most_classes + 1; ++classes) {
    bool same = classes > 1 && classes <= most_classes;
    for (size_t i = 0; i < thresholds.size(); ++i) {
      next[i] = cuda::plan_rows(thresholds[i], classes, bytes, end_to_end != 0, class_outermost != 0, pairs != 0);
      same = same && same_choice(next[i], run[i]);
    }
    if (same) continue;
    const char* broken = nullptr;
    if (classes > 1) broken = check_rows_of(classes - 1, bytes, end_to_end, class_outermost, pairs);
    if (broken == nullptr && classes <= most_classes) {
      broken = check_rows_of(classes, bytes, end_to_end, class_outermost, pairs);
    }
    if (broken != nullptr) return broken;
    run = next;
  }
  return nullptr;
}

const char* check_all_row_plans(int64_t most_classes) {
  for (const int bytes : {2, 4, 8}) {
    for (const int layout : {0, 1, 2, 3}) {
      const char* broken = check_layout(most_classes, bytes, layout == 0, layout >= 2, layout == 3);
      if (broken != nullptr) return broken;
    }
  }
  return nullptr;
}

const char* check_all_chunks(int64_t most_classes) {
  for (const int bytes : {2, 4, 8}) {
    for (int64_t rows = 0; rows <= 2 * cuda::kFewRows; ++rows) {
      for (int64_t classes = 1; classes <= most_classes; classes += classes % 64 < 2 ? 1 : 62) {
        const char* broken = check_chunks(rows, classes, bytes);
        if (broken != nullptr) return broken;
      }
      for (const int64_t classes : {int64_t{1} << 20, (int64_t{1} << 30) + 1, int64_t{INT32_MAX} - 64 * 256 * 16}) {
        const char* broken = check_chunks(rows, classes, bytes);
        if (broken != nullptr) return broken;
      }
    }
  }
  return nullptr;
}

const char* check_all_map_plans(int64_t most_classes) {
  for (int64_t classes = 1; classes <= most_classes; ++classes) {
    for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{8}, int64_t{9}, int64_t{255}, int64_t{256},
                               int64_t{257}, int64_t{4097}, int64_t{1} << 20, int64_t{1} << 40}) {
      for (const int small : {8, 16}) {
        const char* broken = check_map_plan(rows, classes, small, 2 * small);
        if (broken != nullptr) return broken;
      }
    }
  }
  return nullptr;
}

const char* check_all_grid_plans(int64_t most_rows) {
  const auto check = [](int64_t rows) -> const char* {
    for (int64_t n_temperatures = 1; n_temperatures <= 34; ++n_temperatures) {
      const char* broken = check_grid_plan(rows, n_temperatures);
      if (broken != nullptr) return broken;
    }
    for (const int64_t n_temperatures : {64, 65, 512, 600}) {
      const char* broken = check_grid_plan(rows, n_temperatures);
      if (broken != nullptr) return broken;
    }
    return nullptr;
  };
  for (int64_t rows = 1; rows <= most_rows; ++rows) {
    const char* broken = check(rows);
    if (broken != nullptr) return broken;
  }
  for (const int64_t rows : rows_beyond()) {
    const char* broken = rows < INT32_MAX ? check(rows) : nullptr;
    if (broken != nullptr) return broken;
  }
  return nullptr;
}

}  // extern "C"
