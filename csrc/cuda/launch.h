// Launch geometry: pure functions of the shape that assign work to threads. No CUDA is needed, so that tests check
// every size without a GPU.
#pragma once

#include <cstdint>

namespace focalkern::cuda {

constexpr int kWarp = 32;
constexpr int kBlock = 256;
constexpr int kWarpsPerBlock = kBlock / kWarp;

// Work is cut into tiles; block b takes tiles b, b + grid, ... . The grid has more blocks than the largest chip runs at
// once, which keeps the chip full, but few enough that the last block adds their partial results quickly.
#ifdef FOCALKERN_TEST_GRID
inline int64_t kMaxGrid = 2048;  // tests lower it, so that a block has several tiles
#else
constexpr int64_t kMaxGrid = 2048;
#endif

// Two blocks for every multiprocessor of a large chip. With less work, tiles shrink.
constexpr int64_t kEnoughBlocks = 264;

// With fewer rows than this and one block per row, multiprocessors would idle. Long rows are then cut into chunks, each
// a multiple of a block's loads.
constexpr int64_t kFewRows = kEnoughBlocks / 2;
constexpr int64_t kLongRowBytes = 32768;
constexpr int64_t kChunkBytes = 16384;                         // four vectors for each thread
constexpr int64_t kMostChunks = kEnoughBlocks + kFewRows - 1;  // for all rows together

// Enough pixels for one thread each on a large chip.
#ifdef FOCALKERN_TEST_GRID
inline int64_t kManyPixels = kEnoughBlocks * kBlock * 2;  // tests lower it, so that few pixels count as many
#else
constexpr int64_t kManyPixels = kEnoughBlocks * kBlock * 2;
#endif

constexpr int kTileBytes = 16384;   // shared memory for a tile of short rows
constexpr int kValuesPerLane = 16;  // values of a short row that stay in registers between its maximum and its sum
constexpr int kVectorBytes = 16;    // the widest load of a thread

enum class RowPath : int {
  kTile,  // short contiguous rows: read as one run, for every row length
  kRows,  // a group of lanes, a warp, or the block for each row
  // classes are further apart than rows: one lane per row, so that neighbouring lanes read neighbouring addresses
  kPixels,
  kPairs,  // kPixels with one lane for two adjacent rows
  kOwn,    // kTile for the shortest rows: a thread computes one or two rows by itself
};

struct RowPlan {
  RowPath path;
  int rows_per_tile;
  int lanes;      // threads per row: a power of two up to a warp, or the block
  int lane_bits;  // log2(lanes): the kernels shift instead of dividing
  int steps;      // loads per lane for a row of a tile; each loads one element, or two of 16 bits
  // the rows of a tile would begin in few banks of shared memory, so each row starts its loop at another position
  bool around;
  int parts;          // partial results per row: one per warp that works on it; rows_per_tile * parts <= kBlock
  int chunks;         // chunks per row, one block each; 1 if rows are not cut
  int chunk_classes;  // classes in each chunk but the last
  int64_t tiles;
  int64_t grid;
};

inline int power_of_two_at_least(int64_t value, int limit) {
  int power = 1;
  while (power < value && power < limit) power *= 2;
  return power;
}

inline int64_t divide_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// The largest number of values of a short row per lane. Two values of 16 bits are loaded together if all rows begin on
// a word. More words would spill registers.
constexpr int kWordsPerLane = 13;
constexpr int tile_values_at_once(int element_bytes, int64_t classes) {
  return element_bytes == 2 && classes % 2 == 0 ? 2 : 1;
}
constexpr int tile_values_per_lane(int element_bytes, int64_t classes) {
  return tile_values_at_once(element_bytes, classes) == 2 ? 2 * kWordsPerLane : kValuesPerLane;
}

// The largest power of two from `least` to `most` that leaves enough tiles to fill the chip; `least` if none does.
inline int rows_per_tile(int64_t rows, int most, int least) {
  int count = most;
  while (count > least && rows / count < kEnoughBlocks) count /= 2;
  return count;
}

inline RowPlan finish_row_plan(RowPlan plan, int64_t rows) {
  plan.lane_bits = 0;
  while (1 << plan.lane_bits < plan.lanes) ++plan.lane_bits;
  plan.tiles = divide_up(rows, plan.rows_per_tile);
  // One block even if there are no rows: it writes the sum 0.
  plan.grid = plan.tiles < 1 ? 1 : plan.tiles < kMaxGrid ? plan.tiles : kMaxGrid;
  return plan;
}

// Whether one block takes all rows, for every layout; the reduction then needs no scratch memory.
inline bool fits_one_block(int64_t rows, int64_t classes) {
  return rows <= 32 && classes <= 1024 / (rows > 0 ? rows : 1);
}

// element_bytes: of the logits. end_to_end: every operand is [rows, classes] without gaps and starts on a 16-byte
// boundary. class_outermost: the classes of a row are further apart than neighbouring rows. pairs: two adjacent rows
// may be read at a time, and the number of rows is even.
inline RowPlan plan_rows(int64_t rows, int64_t classes, int element_bytes, bool end_to_end, bool class_outermost,
                         bool pairs = false) {
  const int64_t row_bytes = classes * element_bytes;
  RowPlan plan = {};
  plan.parts = 1;
  plan.chunks = 1;
  if (end_to_end && classes > 0 && row_bytes <= 1024 && classes <= kValuesPerLane * kWarp) {
    plan.path = RowPath::kTile;
    plan.lanes = power_of_two_at_least(divide_up(classes, tile_values_per_lane(element_bytes, classes)), kWarp);
    const int of_a_step = plan.lanes * tile_values_at_once(element_bytes, classes);
    plan.steps = static_cast<int>(divide_up(classes, of_a_step));
    // Whether four or more groups of a warp would access one bank.
    plan.around = element_bytes == 8 || row_bytes % (16 * plan.lanes) == 0;
    // A multiple of 16 rows fills whole vectors at every row length.
    int most = kBlock;
    // If rows begin on 16-byte boundaries, threads would access few banks; they take the loop with rotated positions
    // instead.
    if (classes <= kValuesPerLane && element_bytes <= 4 && row_bytes % kVectorBytes != 0) {
      plan.path = RowPath::kOwn;
      most = kBlock * (4 / element_bytes);
    }
    while (most * row_bytes > kTileBytes) most /= 2;
    // Work that fits one tile stays in one tile: a single block needs no counter to detect the last block.
    plan.rows_per_tile = rows <= most ? most : rows_per_tile(rows, most, 16);
  } else if (class_outermost) {
    plan.path = RowPath::kPixels;
    plan.lanes = 1;
    // For few rows, several warps share 32 rows, and each warp takes every n-th class.
    while (plan.parts < kWarpsPerBlock && rows * plan.parts < kManyPixels && plan.parts * 8 < classes) plan.parts *= 2;
    plan.rows_per_tile = kBlock / plan.parts;
    if (pairs && plan.parts == 1) {
      plan.path = RowPath::kPairs;
      plan.rows_per_tile = 2 * kBlock;
    }
  } else {
    plan.path = RowPath::kRows;
    // A warp takes rows up to this size. The block takes longer ones: its reductions cost as much as about a hundred
    // values.
    const int64_t most_bytes = rows >= kEnoughBlocks * kWarpsPerBlock ? 16384 : 8192;
    if (row_bytes > most_bytes) {
      plan.lanes = kBlock;
      plan.parts = kWarpsPerBlock;
      const int most = row_bytes > 65536 ? 1 : row_bytes > 32768 ? 2 : row_bytes > 16384 ? 4 : 8;
      plan.rows_per_tile = fits_one_block(rows, classes) ? 8 : rows_per_tile(rows, most, 1);
      if (rows > 0 && rows < kFewRows && row_bytes > kLongRowBytes) {
        const int64_t loads = divide_up(row_bytes, kChunkBytes * divide_up(kEnoughBlocks, rows));
        const int64_t chunk_bytes = kChunkBytes * loads;
        plan.chunk_classes = static_cast<int>(chunk_bytes / element_bytes);
        plan.chunks = static_cast<int>(divide_up(row_bytes, chunk_bytes));
      }
    } else {
      plan.lanes = power_of_two_at_least(divide_up(classes, kValuesPerLane), kWarp);
      const int rows_at_once = kBlock / plan.lanes;
      const int least = fits_one_block(rows, classes) && rows_at_once < 32 ? 32 : rows_at_once;
      plan.rows_per_tile = rows_per_tile(rows, rows_at_once < 32 ? 64 : kBlock, least);
    }
  }
  return finish_row_plan(plan, rows);
}

// ---- calibration map -----------------------------------------------------------------------------------------------

// Groups of threads share contiguous rows, and continue with further rows in strides of the grid. Each thread of a
// group computes the per-row numbers, so a group is the fewest threads that can hold the row.
struct MapPlan {
  int lanes;     // a power of two up to a warp, or the block
  int capacity;  // registers for a thread's part of a row; 0: it does not fit, and each pass reads it again
  int64_t grid;
};
inline MapPlan plan_map(int64_t rows, int64_t classes, int small, int large) {
  MapPlan plan = {};
  if (classes <= small) {
    plan.lanes = 1;
    plan.capacity = small;
  } else if (classes <= int64_t{large} * kWarp) {
    plan.lanes = power_of_two_at_least(divide_up(classes, large), kWarp);
    plan.capacity = large;
  } else {
    plan.lanes = kBlock;
    plan.capacity = classes <= int64_t{large} * kBlock ? large : 0;
  }
  const int64_t blocks = divide_up(rows, kBlock / plan.lanes);
  plan.grid = blocks < 8 * kMaxGrid ? blocks : 8 * kMaxGrid;
  return plan;
}

// ---- calibration grid ----------------------------------------------------------------------------------------------

constexpr int kSharedGammas = 12;  // gammas per launch that share sums over the classes
constexpr int kGammasAtOnce = 5;   // gammas per launch with sums of their own, in registers
constexpr int64_t kConfidenceBytes = int64_t{128} << 20;

// Temperatures per block of the grid: as many as keep the confidences of all cells below a fixed size. The lanes of a
// warp are temperatures, so the number is a multiple of a warp where possible.
inline int64_t grid_block_temperatures(int64_t rows, int64_t n_gammas, int64_t real_bytes) {
  const int64_t each = rows * n_gammas * real_bytes;
  const int64_t fit = kConfidenceBytes / (each > 0 ? each : 1);
  if (fit >= 512) return 512;
  if (fit >= kWarp) return fit / kWarp * kWarp;
  return fit < 1 ? 1 : power_of_two_at_least(fit + 1, kWarp) / 2;
}

// Stage 1 of the grid: thread (row, temperature), a few gammas per launch. A launch has row_tiles * temperature_tiles
// blocks; the index of the row tile varies fastest.
struct GridPlan {
  int lanes;          // adjacent threads that share a row, a power of two up to a warp: one temperature each
  int rows_per_tile;  // a multiple of kBlock / lanes
  int64_t row_tiles;
  int64_t temperature_tiles;

  int64_t blocks() const { return row_tiles * temperature_tiles; }
};

inline GridPlan plan_grid(int64_t rows, int64_t n_temperatures) {
  GridPlan plan = {};
  plan.lanes = power_of_two_at_least(n_temperatures, kWarp);
  plan.temperature_tiles = divide_up(n_temperatures, plan.lanes);
  // Sums over the rows of a tile stay in registers: more rows per tile need less scratch memory but give fewer blocks.
  const int rows_at_once = kBlock / plan.lanes;
  int steps = 16;
  while (steps > 1 && rows / (rows_at_once * steps) * plan.temperature_tiles < 4 * kEnoughBlocks) {
    steps /= 2;
  }
  // The tile index must fit 31 bits.
  while (divide_up(rows, int64_t{rows_at_once} * steps) * plan.temperature_tiles > INT32_MAX) {
    steps *= 2;
  }
  plan.rows_per_tile = rows_at_once * steps;
  plan.row_tiles = divide_up(rows, plan.rows_per_tile);
  return plan;
}

}  // namespace focalkern::cuda
