// The launchers as plain C functions, one dtype argument each; and invariants of the launch geometry, over all sizes.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/launch.h"
#include "cuda_runtime.h"
#include "kernels.h"

asm(R"(
.text
.globl shim_switch
shim_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

using namespace focalkern;

namespace {

char message[256];

template <template <typename> class Args>
struct Size {
  static int64_t of(int is_double) { return is_double ? sizeof(Args<double>) : sizeof(Args<float>); }
};

// Calls f with a value of the storage type: 0 float, 1 double, 2 bfloat16, 3 half.
template <typename Function>
int with_scalar(int dtype, Function f) {
  switch (dtype) {
    case 0:
      return f(float{});
    case 1:
      return f(double{});
    case 2:
      return f(BFloat16{});
    default:
      return f(Half{});
  }
}

}  // namespace

extern "C" {

void set_seed(uint64_t seed) { shim::machine.seed = seed; }

// Memory between two pages that nobody may touch, ending at the second: a read or write outside is a crash.
void* guarded(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t body = (bytes + page - 1) / page * page;
  char* base =
      static_cast<char*>(mmap(nullptr, body + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (base == MAP_FAILED) abort();
  mprotect(base, page, PROT_NONE);
  mprotect(base + page + body, page, PROT_NONE);
  memset(base + page, 0xff, body);
  return base + page + body - bytes;
}

void unguard(void* memory, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t body = (bytes + page - 1) / page * page;
  munmap(static_cast<char*>(memory) + bytes - body - page, body + 2 * page);
}

int64_t size_of(const char* name, int is_double) {
  if (!strcmp(name, "FocalLossForward")) return Size<FocalLossForward>::of(is_double);
  if (!strcmp(name, "FocalLossBackward")) return Size<FocalLossBackward>::of(is_double);
  if (!strcmp(name, "CalibrationMapForward")) return Size<CalibrationMapForward>::of(is_double);
  if (!strcmp(name, "CalibrationMapBackward")) return Size<CalibrationMapBackward>::of(is_double);
  if (!strcmp(name, "BinaryCalibrationMapForward")) return Size<BinaryCalibrationMapForward>::of(is_double);
  if (!strcmp(name, "BinaryCalibrationMapBackward")) return Size<BinaryCalibrationMapBackward>::of(is_double);
  if (!strcmp(name, "CalibrationGridSamples")) return Size<CalibrationGridSamples>::of(is_double);
  if (!strcmp(name, "CalibrationGridBlock")) return Size<CalibrationGridBlock>::of(is_double);
  if (!strcmp(name, "CalibrationSums")) return Size<CalibrationSums>::of(is_double);
  return -1;
}

int64_t focal_loss_workspace(int64_t rows, int64_t classes) { return cuda::focal_loss_workspace(rows, classes); }

int focal_loss_forward(int dtype, const void* args, int mean, void* loss, void* divisor, void* workspace) {
  return with_scalar(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    return cuda::focal_loss_forward(*static_cast<const FocalLossForward<Scalar>*>(args), mean != 0,
                                    static_cast<Real*>(loss), static_cast<Real*>(divisor), workspace, nullptr);
  });
}

#define FK_ENTRY(name, Args)                                                                                         \
  int name(int dtype, const void* args) {                                                                            \
    return with_scalar(                                                                                              \
        dtype, [&](auto scalar) { return cuda::name(*static_cast<const Args<decltype(scalar)>*>(args), nullptr); }); \
  }
FK_ENTRY(focal_loss_backward, FocalLossBackward)
FK_ENTRY(calibration_map_forward, CalibrationMapForward)
FK_ENTRY(calibration_map_backward, CalibrationMapBackward)
FK_ENTRY(binary_calibration_map_forward, BinaryCalibrationMapForward)
FK_ENTRY(binary_calibration_map_backward, BinaryCalibrationMapBackward)
#undef FK_ENTRY

int calibration_grid_prepare(int dtype, const void* samples, int64_t* first_problem) {
  return with_scalar(dtype, [&](auto scalar) {
    using Samples = CalibrationGridSamples<decltype(scalar)>;
    return cuda::calibration_grid_prepare(*static_cast<const Samples*>(samples), first_problem, nullptr);
  });
}
int64_t calibration_grid_workspace(int64_t rows, int64_t classes, int64_t n_gammas, int64_t n_temperatures,
                                   int64_t n_bins, int64_t real_size) {
  return cuda::calibration_grid_workspace(rows, classes, n_gammas, n_temperatures, n_bins, real_size);
}
int calibration_grid_block(int dtype, const void* block, void* workspace) {
  return with_scalar(dtype, [&](auto scalar) {
    using Block = CalibrationGridBlock<decltype(scalar)>;
    return cuda::calibration_grid_block(*static_cast<const Block*>(block), workspace, nullptr);
  });
}
int calibration_sums(int dtype, const void* args) {
  if (dtype == 1) return cuda::calibration_sums(*static_cast<const CalibrationSums<double>*>(args), nullptr);
  return cuda::calibration_sums(*static_cast<const CalibrationSums<float>*>(args), nullptr);
}

// ---- launch geometry -----------------------------------------------------------------------------------------------

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
