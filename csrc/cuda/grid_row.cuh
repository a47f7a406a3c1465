// A row of the calibration grid at one temperature, and the gammas of a launch (grid_confidence.cuh).
#pragma once

#include "cuda/common.cuh"
#include "kernels/calibration_grid.h"
#include "math/calibration_map.h"
#include "math/grid_plan.h"

namespace focalkern::cuda {

template <typename Scalar>
struct Scratch {
  compute_t<Scalar>* confidence;  // [n_temperatures, n_gammas, rows], or null
  double* nll;                    // [row_tiles, n_temperatures, n_gammas], or null
  double* brier;                  // likewise
};

// ---- gammas of a launch --------------------------------------------------------------------------------------------

struct SharedGammas {
  int count;
  int reciprocals;
  int index[kSharedGammas];  // position among all gammas
  double gamma[kSharedGammas];
  float coefficient[kSharedGammas][WideBasis::kTerms + kMaxReciprocals];  // one per sum; a whole gamma has its own sum
  float whole[kMaxReciprocals];
  float bit[kMaxReciprocals][3];  // bits of gamma - 1

  void add(const GammaPlan& plan, int place) {
    index[count] = place;
    gamma[count] = plan.gamma;
    if (plan.route == Route::kMoments) {
      for (int i = 0; i < WideBasis::kTerms; ++i) coefficient[count][i] = static_cast<float>(plan.coefficient[i]);
    } else {  // plan.coefficient is from a fit that was not accurate enough, so it is not used
      whole[reciprocals] = static_cast<float>(plan.gamma);
      for (int b = 0; b < 3; ++b) bit[reciprocals][b] = static_cast<float>((static_cast<int>(plan.gamma) - 1) >> b & 1);
      coefficient[count][WideBasis::kTerms + reciprocals++] = 1;
    }
    ++count;
  }
};

struct OtherGammas {
  int count;
  int index[kGammasAtOnce];
  double gamma[kGammasAtOnce];  // 0 beyond the last

  void add(double value, int place) {
    index[count] = place;
    gamma[count++] = value;
  }
};

// ---- exponents -----------------------------------------------------------------------------------------------------
// Exponents are logarithms to the base of quick_power.

template <typename Real>
__device__ __forceinline__ Real natural(Real exponent) {
  return exponent * (Real(1) / quick_unit<Real>());
}

// ---- rows ----------------------------------------------------------------------------------------------------------

constexpr int kStageBytes = 2048;  // of a warp
// The rows of one warp start one vector apart in the banks of shared memory.
constexpr int kStageStride = kStageBytes + kWarp * kVectorBytes;
// Classes per partial sum in Real; partial sums are added in double, or in a second Real.
constexpr int kClassesPerSum = 64;

// The row and temperature of a thread. Threads beyond the last row or temperature compute the last one again, but write
// nothing.
template <typename Scalar>
struct GridRow {
  using Real = compute_t<Scalar>;
  static constexpr int kPerVector = kVectorSize<Real>;
  struct alignas(kVectorBytes) Vector {
    Real at[kPerVector];
  };

  const Scalar* input;
  bool is_probs;
  int classes;
  int top;
  int label;
  bool correct;
  Real shift;  // the largest of the other classes
  Real beta;
  Real gap;       // (shift - top) / T
  Real per_unit;  // factor from a difference of logits to an exponent
  int lane;
  int lanes;
  int capacity;  // classes that shared memory holds at once
  Real* stage;

  __device__ __forceinline__ Real logit(int k) const {
    const Real value = load_as_compute(input[k]);
    return is_probs ? logit_of_probability(value) : value;
  }

  __device__ __forceinline__ void start(const CalibrationGridSamples<Scalar>& samples, int64_t row, double temperature,
                                        int row_lanes, char* warp_memory) {
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t source = samples.input_row(row);
    input = samples.input + source * samples.row_stride;
    is_probs = samples.input_is_probs;
    classes = static_cast<int>(samples.classes);
    top = samples.top[row];
    label = static_cast<int>(samples.labels[source]);
    correct = samples.correct[row] != 0;
    lanes = row_lanes;
    lane = thread % lanes;
    capacity = kStageBytes / static_cast<int>(sizeof(Real)) / (kWarp / lanes);
    stage = reinterpret_cast<Real*>(warp_memory) + thread % kWarp / lanes * (capacity + kPerVector);

    Real next = -kInfinity<Real>;
    for (int k = lane; k < classes; k += lanes) {
      if (k != top) next = fmax(next, logit(k));
    }
    next = group_max(next, lanes);
    const Real top_logit = logit(top);
    // If no other class is possible, any shift serves.
    shift = next > -kInfinity<Real> ? next : top_logit;
    beta = inverse_temperature<Real>(temperature);
    gap = fmax((shift - top_logit) * beta, -largest_finite<Real>() / Real(16));
    per_unit = fmin(beta * quick_unit<Real>(), largest_finite<Real>());
    fill(0);
  }

  // (z_k - shift) / T
  __device__ __forceinline__ Real y(int k) const { return (logit(k) - shift) * beta; }

  // Loads the classes from `first` on into shared memory, padded with impossible classes to a whole vector. Every lane
  // of the warp calls it.
  __device__ __forceinline__ void fill(int first) const {
    const int count = classes - first < capacity ? classes - first : capacity;
    __syncwarp();  // all lanes have read the previous part
    for (int k = lane; k < (count + kPerVector - 1) / kPerVector * kPerVector; k += lanes) {
      stage[k] = k < count && first + k != top ? logit(first + k) - shift : -kInfinity<Real>;
    }
    __syncwarp();
  }

  // Calls f(z_k - shift) for each class, with -inf for the largest, and done() after each kClassesPerSum classes.
  // Before and after the call, shared memory holds the first part of the row.
  template <typename Function, typename Done>
  __device__ __forceinline__ void each(Function f, Done done) const {
    for (int first = 0; first < classes; first += capacity) {
      if (first > 0) fill(first);
      const int count = classes - first < capacity ? classes - first : capacity;
      for (int begin = 0; begin < count; begin += kClassesPerSum) {
        const int end = begin + kClassesPerSum < count ? begin + kClassesPerSum : count;
        for (int k = begin; k < end; k += kPerVector) {
          const Vector values = *reinterpret_cast<const Vector*>(stage + k);
#pragma unroll
          for (int e = 0; e < kPerVector; ++e) f(values.at[e]);
        }
        done();
      }
    }
    if (classes > capacity) fill(0);
  }

  __device__ __forceinline__ MapSoftmax<Real> softmax() const {
    double sum = 0;
    Real part = 0;
    each([&](Real d) { part += quick_power(d * per_unit); },
         [&] {
           sum += static_cast<double>(part);
           part = 0;
         });
    return map_softmax(gap, sum > 0 ? static_cast<Real>(sum) : Real(1));
  }

  // A finite exponent for an impossible class, so that q log q is 0, not NaN.
  __device__ __forceinline__ Real exponent(Real d) const { return fmax(d * per_unit, Real(-1e30)); }
};

// The position of the thread in its block.
struct GridPlace {
  int64_t row_tile;
  int64_t temperature;
  __device__ __forceinline__ explicit GridPlace(const GridPlan& plan) {
    row_tile = blockIdx.x % plan.row_tiles;
    temperature = blockIdx.x / plan.row_tiles * plan.lanes + threadIdx.x % plan.lanes;
  }
};

}  // namespace focalkern::cuda
