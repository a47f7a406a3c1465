// The launchers as plain C functions, with the dtype as additional argument; and guarded memory. A new launcher needs
// two lines: the size of its arguments in size_of, which is compared with that of the ctypes structure, and FK_ENTRY.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <cuda_runtime.h>
#include "cuda/launch.h"
#include "kernels/calibration_grid.h"
#include "kernels/calibration_map.h"
#include "kernels/row_loss.h"
#include "kernels/row_loss_statistics.h"
#include "kernels/sigmoid_loss.h"
#include "kernels/spline.h"
#include "math/grid_plan.h"
#include "math/row_losses.h"

using namespace focalkern;

namespace {

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
#ifndef FOCALKERN_ONLY_FLOAT
    case 1:
      return f(double{});
    case 2:
      return f(BFloat16{});
    case 3:
      return f(Half{});
#endif
    default:
      return -1;
  }
}

struct Guarded {
  int64_t page;
  int64_t body;      // bytes between the two pages
  int64_t from_end;  // bytes from the memory's first byte to the second page
};

Guarded guarded_layout(int64_t bytes, int64_t byte_of_vector) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t from_end = (bytes + byte_of_vector + 15) / 16 * 16 - byte_of_vector;
  return {page, (from_end + page - 1) / page * page, from_end};
}

}  // namespace

extern "C" {

void set_seed(uint64_t seed) { shim::machine.seed = seed; }
int has_dtype(int dtype) {
  return with_scalar(dtype, [](auto) { return 1; }) == 1;
}
void set_max_grid(int64_t blocks) { cuda::kMaxGrid = blocks; }
int64_t max_grid() { return cuda::kMaxGrid; }
void set_many_pixels(int64_t pixels) { cuda::kManyPixels = pixels; }
int64_t many_pixels() { return cuda::kManyPixels; }
int64_t rows_of_a_tile(int64_t rows, int64_t classes, int64_t bytes, int64_t end_to_end, int64_t class_outermost,
                       int64_t pairs) {
  return cuda::plan_rows(rows, classes, static_cast<int>(bytes), end_to_end != 0, class_outermost != 0, pairs != 0)
      .rows_per_tile;
}
int64_t chunk_of_a_row(int64_t rows, int64_t classes, int64_t bytes) {  // 0: rows are not cut
  return cuda::plan_rows(rows, classes, static_cast<int>(bytes), true, false).chunk_classes;
}

// Memory between two protected pages. It begins at a given offset in a 16-byte vector, as close to the second page as
// possible. An access outside crashes or changes the remaining bytes, which unguard checks.
void* guarded(int64_t bytes, int64_t byte_of_vector) {
  const Guarded g = guarded_layout(bytes, byte_of_vector);
  char* base = static_cast<char*>(
      mmap(nullptr, g.body + 2 * g.page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (base == MAP_FAILED) abort();
  mprotect(base, g.page, PROT_NONE);
  mprotect(base + g.page + g.body, g.page, PROT_NONE);
  memset(base + g.page, 0xff, g.body);
  void* memory = base + g.page + g.body - g.from_end;
  shim::memory_made(memory, bytes);
  return memory;
}

// Whether no byte outside the memory was written.
int unguard(void* memory, int64_t bytes, int64_t byte_of_vector) {
  const Guarded g = guarded_layout(bytes, byte_of_vector);
  const char* end = static_cast<char*>(memory) + g.from_end;
  const char* body = end - g.body;
  bool clean = true;
  for (const char* at = body; at < memory; ++at) clean &= *at == static_cast<char>(0xff);
  for (const char* at = static_cast<char*>(memory) + bytes; at < end; ++at) clean &= *at == static_cast<char>(0xff);
  shim::memory_gone(memory);
  munmap(const_cast<char*>(body) - g.page, g.body + 2 * g.page);
  return clean;
}

// Marks these bytes as never written, if the emulator tracks this.
void mark_undefined(void* memory, int64_t bytes) { shim::memory_undefined(memory, bytes); }

int64_t size_of(const char* name, int is_double) {
#define FK_SIZE(Args) \
  if (!strcmp(name, #Args)) return Size<Args>::of(is_double)
  FK_SIZE(RowLossForward);
  FK_SIZE(RowLossBackward);
  FK_SIZE(RowStatisticsResult);
  FK_SIZE(SigmoidLossForward);
  FK_SIZE(SigmoidLossBackward);
  FK_SIZE(CalibrationMapForward);
  FK_SIZE(CalibrationMapBackward);
  FK_SIZE(CalibrationGridSamples);
  FK_SIZE(CalibrationGridBlock);
  FK_SIZE(CalibrationSums);
#undef FK_SIZE
#define FK_SIZE(Args) \
  if (!strcmp(name, #Args)) return sizeof(Args)
  FK_SIZE(SplineMapForward);
  FK_SIZE(SplineMapBackward);
  FK_SIZE(SplineInput);
  using cuda::SplineFit;
  FK_SIZE(SplineFit);
#undef FK_SIZE
  return -1;
}

int64_t focal_loss_workspace(int64_t rows, int64_t classes, int reduced) {
  return cuda::focal_loss_workspace(rows, classes, reduced != 0);
}

int focal_loss_forward(int dtype, const void* args, int mean, void* loss, void* divisor, void* workspace) {
  return with_scalar(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    return cuda::focal_loss_forward(*static_cast<const RowLossForward<Scalar>*>(args), mean != 0,
                                    static_cast<Real*>(loss), static_cast<Real*>(divisor), workspace, nullptr);
  });
}

}  // extern "C"

// `kind` is the position in math/row_losses.def.
template <typename Function>
int with_loss(int kind, Function f) {
  int number = 0, status = -1;
  const auto take = [&](auto formula) {
    if (number == kind) status = f(formula);
    ++number;
  };
#define FK_ROW_LOSS(number, Formula, name) take(Formula{});
#include "math/row_losses.def"
  return status;
}

extern "C" {

int row_loss_forward(int kind, int dtype, const void* args, int mean, void* loss, void* divisor, void* workspace) {
  return with_scalar(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    return with_loss(kind, [&](auto row) {
      return cuda::row_loss_forward<decltype(row)>(*static_cast<const RowLossForward<Scalar>*>(args), mean != 0,
                                                   static_cast<Real*>(loss), static_cast<Real*>(divisor), workspace,
                                                   nullptr);
    });
  });
}

int row_loss_backward(int kind, int dtype, const void* args) {
  return with_scalar(dtype, [&](auto scalar) {
    return with_loss(kind, [&](auto row) {
      return cuda::row_loss_backward<decltype(row)>(*static_cast<const RowLossBackward<decltype(scalar)>*>(args),
                                                    nullptr);
    });
  });
}

// A negative kind: the statistics alone.
int row_loss_with_statistics(int kind, int dtype, const void* args, const void* statistics, int mean, void* loss,
                             void* divisor, void* workspace) {
  return with_scalar(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    const auto& forward = *static_cast<const RowLossForward<Scalar>*>(args);
    const auto& of_rows = *static_cast<const RowStatisticsResult<Real>*>(statistics);
    if (kind < 0) return cuda::row_statistics<Scalar>(forward, of_rows, nullptr);
    return with_loss(kind, [&](auto row) {
      return cuda::row_loss_with_statistics<decltype(row)>(forward, of_rows, mean != 0, static_cast<Real*>(loss),
                                                           static_cast<Real*>(divisor), workspace, nullptr);
    });
  });
}

int64_t sigmoid_loss_workspace(int64_t size) { return cuda::sigmoid_loss_workspace(size); }

int sigmoid_loss_forward(int dtype, const void* args, int mean, void* total, void* divisor, void* workspace) {
  return with_scalar(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    using Real = compute_t<Scalar>;
    return cuda::sigmoid_loss_forward(*static_cast<const SigmoidLossForward<Scalar>*>(args), mean != 0,
                                      static_cast<Real*>(total), static_cast<Real*>(divisor), workspace, nullptr);
  });
}

#define FK_ENTRY(name, Args)                                                                                         \
  int name(int dtype, const void* args) {                                                                            \
    return with_scalar(                                                                                              \
        dtype, [&](auto scalar) { return cuda::name(*static_cast<const Args<decltype(scalar)>*>(args), nullptr); }); \
  }
FK_ENTRY(focal_loss_backward, RowLossBackward)
FK_ENTRY(sigmoid_loss_backward, SigmoidLossBackward)
FK_ENTRY(calibration_map_forward, CalibrationMapForward)
FK_ENTRY(calibration_map_backward, CalibrationMapBackward)
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
    const Block& args = *static_cast<const Block*>(block);
    const bool shared = calibration_grid_shares_sums(args);
    const CalibrationGridPlan plan = calibration_grid_plan(args.gammas, args.n_gammas, args.samples.classes, shared);
    return cuda::calibration_grid_block(args, plan, workspace, nullptr);
  });
}
int calibration_sums(int dtype, const void* args) {
  if (dtype == 1) return cuda::calibration_sums(*static_cast<const CalibrationSums<double>*>(args), nullptr);
  return cuda::calibration_sums(*static_cast<const CalibrationSums<float>*>(args), nullptr);
}

// Writes the numbers of threads, of groups, and of doubles of scratch memory to `sizes`.
void spline_sizes(int64_t rows, int64_t classes, int64_t numbers, int by_class, int64_t* sizes) {
  const cuda::SplineSizes found = cuda::spline_sizes(rows, classes, numbers, by_class != 0);
  sizes[0] = found.threads;
  sizes[1] = found.groups;
  sizes[2] = found.scratch;
}
int spline_map_forward(const void* args, double* scratch) {
  return cuda::spline_map_forward(*static_cast<const SplineMapForward*>(args), scratch, nullptr);
}
int spline_map_backward(const void* args, double* of_threads, double* of_classes, int64_t numbers, double* scratch) {
  return cuda::spline_map_backward(*static_cast<const SplineMapBackward*>(args), {of_threads, of_classes, numbers},
                                   scratch, nullptr);
}
int spline_log_probs(const void* args, double* output, double* scratch) {
  return cuda::spline_log_probs(*static_cast<const SplineInput*>(args), output, scratch, nullptr);
}
int spline_curve_sums(const void* args, const double* basis, double* means, double* of_threads, int64_t numbers,
                      double* scratch) {
  return cuda::spline_curve_sums(*static_cast<const cuda::SplineFit*>(args), basis, means,
                                 {of_threads, nullptr, numbers}, scratch, nullptr);
}
int spline_linear_sums(const void* args, double* slopes, double* of_threads, double* of_classes, int64_t numbers,
                       double* scratch) {
  return cuda::spline_linear_sums(*static_cast<const cuda::SplineFit*>(args), slopes, {of_threads, of_classes, numbers},
                                  scratch, nullptr);
}
int spline_temperature_sums(const void* args, const int64_t* target, const double* weight, const double* betas,
                            int64_t n_betas, double* of_threads, double* scratch) {
  return cuda::spline_temperature_sums(*static_cast<const SplineInput*>(args), {target, weight}, betas, n_betas,
                                       {of_threads, nullptr, 2 * n_betas}, scratch, nullptr);
}

}  // extern "C"
