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

// With so few elements every row is counted, as the kernels walk them; with more, the ends of the tiles have to meet.
constexpr int64_t kEnumerated = int64_t{1} << 20;

// Runs of rows_at_once rows, block b taking the runs b, b + grid, ... : whether every row is taken exactly once.
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

// Every row in exactly one tile, tiles and partial results within what a block has, and few enough blocks. Returns
// what is broken, or null.
const char* check_row_plan(int64_t rows, int64_t classes, int bytes, int end_to_end, int class_outermost) {
  using namespace cuda;
  const RowPlan plan = plan_rows(rows, classes, bytes, end_to_end != 0, class_outermost != 0);
  FK_REQUIRE(plan.rows_per_tile >= 1 && plan.rows_per_tile <= kBlock);
  FK_REQUIRE(plan.parts >= 1 && plan.rows_per_tile * plan.parts <= kBlock);
  FK_REQUIRE(plan.grid >= 1 && plan.grid <= kMaxGrid && (plan.grid <= plan.tiles || rows == 0));
  FK_REQUIRE(plan.tiles == rows / plan.rows_per_tile + (rows % plan.rows_per_tile != 0));
  if (rows <= kEnumerated / classes) {
    FK_REQUIRE(takes_each_row_once(rows, plan.rows_per_tile, plan.grid));
  }
  // Tiles end to end: the last one begins inside the rows and reaches their end, so none is left out or taken twice.
  FK_REQUIRE(rows == 0 || ((plan.tiles - 1) * plan.rows_per_tile < rows && rows <= plan.tiles * plan.rows_per_tile));
  FK_REQUIRE((plan.lanes & (plan.lanes - 1)) == 0 && plan.lanes <= kBlock);
  FK_REQUIRE(plan.lanes <= kWarp || plan.lanes == kBlock);
  FK_REQUIRE(!fits_one_block(rows, classes) || plan.grid == 1);
  if (plan.path == RowPath::kTile) {
    FK_REQUIRE(end_to_end && plan.rows_per_tile * classes * bytes <= kTileBytes);
    FK_REQUIRE(plan.rows_per_tile * classes * bytes % kVectorBytes == 0);
    FK_REQUIRE(plan.lanes * kValuesPerLane >= classes && plan.lanes <= kWarp);
  } else if (plan.path == RowPath::kPixels) {
    FK_REQUIRE(class_outermost && plan.rows_per_tile * plan.parts == kBlock && plan.rows_per_tile % kWarp == 0);
  } else {
    FK_REQUIRE(plan.parts == (plan.lanes > kWarp ? plan.lanes / kWarp : 1));
    FK_REQUIRE(plan.lanes > kWarp || plan.rows_per_tile % (kBlock / plan.lanes) == 0);
  }
  return nullptr;
}

const char* check_map_plan(int64_t rows, int64_t classes, int values_per_lane) {
  using namespace cuda;
  const MapPlan plan = plan_map(rows, classes, values_per_lane);
  FK_REQUIRE((plan.lanes & (plan.lanes - 1)) == 0 && (plan.lanes <= kWarp || plan.lanes == kBlock));
  FK_REQUIRE(plan.grid >= (rows > 0) && plan.grid <= 8 * kMaxGrid);
  if (rows <= kEnumerated / classes) {
    FK_REQUIRE(takes_each_row_once(rows, kBlock / plan.lanes, plan.grid));
  }
  FK_REQUIRE(plan.in_registers == (classes <= int64_t{values_per_lane} * plan.lanes));
  FK_REQUIRE(plan.in_registers || plan.lanes == kBlock);
  return nullptr;
}

const char* check_grid_plan(int64_t rows, int64_t n_temperatures, int64_t n_gammas) {
  using namespace cuda;
  const int64_t classes = n_temperatures;  // for the message
  const GridPlan plan = plan_grid(rows, n_temperatures, n_gammas);
  FK_REQUIRE((plan.lanes & (plan.lanes - 1)) == 0 && plan.lanes <= kWarp);
  FK_REQUIRE(plan.rows_per_tile % (kBlock / plan.lanes) == 0);
  FK_REQUIRE(plan.row_tiles * plan.rows_per_tile >= rows && (plan.row_tiles - 1) * plan.rows_per_tile < rows);
  FK_REQUIRE(plan.temperature_tiles * plan.lanes >= n_temperatures);
  FK_REQUIRE(plan.gamma_tiles * kGammasAtOnce >= n_gammas);
  FK_REQUIRE(plan.blocks() <= INT32_MAX);
  if (rows <= kEnumerated / (n_temperatures * n_gammas) && plan.blocks() <= 4096) {
    FK_REQUIRE(takes_each_row_once(rows, plan.rows_per_tile, plan.row_tiles));
    FK_REQUIRE(takes_each_row_once(n_temperatures, plan.lanes, plan.temperature_tiles));
    FK_REQUIRE(takes_each_row_once(n_gammas, kGammasAtOnce, plan.gamma_tiles));
  }
  return nullptr;
}

const char* check_all_row_plans(int64_t most_classes) {
  const int64_t sizes[] = {0,
                           1,
                           2,
                           15,
                           16,
                           17,
                           31,
                           32,
                           33,
                           255,
                           256,
                           257,
                           1000,
                           4097,
                           8448,
                           8449,
                           1 << 20,
                           INT32_MAX,
                           int64_t{1} << 31,
                           int64_t{1} << 40};
  for (int64_t classes = 1; classes <= most_classes; ++classes) {
    for (const int64_t rows : sizes) {
      for (const int bytes : {2, 4, 8}) {
        for (const int layout : {0, 1, 2}) {
          const char* broken = check_row_plan(rows, classes, bytes, layout == 0, layout == 2);
          if (broken != nullptr) return broken;
        }
        const int capacity = bytes == 8 ? 8 : 16;
        for (const int values : {capacity, capacity / 2}) {
          const char* broken = check_map_plan(rows, classes, values);
          if (broken != nullptr) return broken;
        }
      }
    }
  }
  for (const int64_t rows : sizes) {
    for (int64_t n_temperatures = 1; rows > 0 && rows < INT32_MAX && n_temperatures <= 600; ++n_temperatures) {
      for (const int64_t n_gammas : {1, 4, 5, 6, 9, 10, 100}) {
        const char* broken = check_grid_plan(rows, n_temperatures, n_gammas);
        if (broken != nullptr) return broken;
      }
    }
  }
  return nullptr;
}

}  // extern "C"
