// The focal calibration map of [rows, classes] inputs, forward and backward, and its binary form, elementwise.
//
// One thread computes a row of few classes. A longer row is shared by a group: lanes of a warp, a warp, or the block.
// Passes over a row, with t its largest class:
//   1. t, and the largest of the others      2. sum of exp over the others
//   3. p_k / p_t or its logarithm, and sums  4. normalise and write
// Memory: if each thread's part of a row fits registers, inputs are read once and outputs written once. Otherwise each
// pass reads the row again. If every row begins on a 16-byte boundary, each load and store has 16 bytes.

#include <initializer_list>

#include "cuda/binary_map.cuh"
#include "cuda/common.cuh"
#include "cuda/map_group.cuh"
#include "cuda/map_row.cuh"
#include "kernels/calibration_map.h"
#include "math/calibration_map.h"
#include "math/map_gradient.h"

namespace focalkern::cuda {
namespace {

// constant_lanes: the threads per row, if that is one thread, one warp or the whole block. Otherwise it is 0, and 1 <<
// lane_bits threads share a row.
template <typename Scalar, int capacity, int constant_lanes>
__global__ __launch_bounds__(kBlock, kForwardBlocks<Scalar, capacity>) void calibration_map_forward_kernel(
    const __grid_constant__ CalibrationMapForward<Scalar> args,
    const __grid_constant__ MapNumbers<compute_t<Scalar>> numbers, int lane_bits, int vectors) {
  using Part = RowPart<Scalar, capacity, true>;
  using Real = typename Part::Real;
  constexpr int kVector = Part::kVector;
  constexpr bool kNarrow = sizeof(Scalar) < sizeof(Real);
  __shared__ double scratch[kWarpsPerBlock * MapGroup::kMost];
  const int lanes = constant_lanes > 0 ? constant_lanes : 1 << lane_bits;
  const MapGroup group = {lanes, scratch};
  const int rows_at_once = constant_lanes > 0 ? kBlock / constant_lanes : kBlock >> lane_bits;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < args.rows;
       first += static_cast<int64_t>(gridDim.x) * rows_at_once) {
    // Threads beyond the last row compute that row again, but write nothing.
    const int64_t wanted = first + (constant_lanes > 0 ? static_cast<int>(threadIdx.x) / constant_lanes
                                                       : static_cast<int>(threadIdx.x) >> lane_bits);
    const bool exists = wanted < args.rows;
    const int64_t row = exists ? wanted : args.rows - 1;
    auto x = row_part<Scalar, capacity, true>(args, row, lanes, vectors);
    assume_classes<Scalar, constant_lanes>(x.classes);
    const RowStart<Real> start = start_row(args, numbers, row, x, group);

    const auto finish = [&](auto log_output) {
      constexpr bool kLog = decltype(log_output)::value;
      const auto map_of = [&](int slot, Real y) {
        const Real e = x.power(slot, y);
        if constexpr (kLog) return map_log_ratio(y, e, start.map.terms);
        return map_ratio(y, e, start.map.terms);
      };
      typename Part::Sum sum = 0;
      Real part = 0;
      x.each_exponent(
          start,
          [&](int, int k, Real* y) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              y[i] = map_of(k + i, y[i]);
              part += kLog ? quick_power(y[i]) : y[i];
            }
          },
          [&] {
            sum = Part::kKept ? typename Part::Sum(part) : sum + part;
            part = 0;
          });
      const auto ratio_sum = static_cast<Real>(group.sum(sum));
      // 0, not -0
      Real top = kLog ? Real(0) - log_one_plus(ratio_sum) : quick_quotient(Real(1), Real(1) + ratio_sum);
      if (!start.valid) top = kNaN<Real>;
      if (!exists) return;
      const auto write = [&](auto* output) {
        output = worked_out(output + x.offset);
        x.each_exponent(
            start,
            [&](int begin, int k, Real* y) {
#pragma unroll
              for (int i = 0; i < kVector; ++i) {
                const Real ratio = Part::kKept ? y[i] : map_of(k + i, y[i]);
                y[i] = kLog ? multiply_add(ratio, Real(1) / quick_unit<Real>(), top) : ratio * top;
              }
              x.store(output, begin, y);
            },
            [] {});
        // Overwrites a value that the same thread has just written.
        using To = std::remove_reference_t<decltype(*output)>;
        if (x.top_vector >= 0) output[start.top - x.first] = Store<To>::from_compute(top);
      };
      if constexpr (kNarrow) {
        if (args.output != nullptr) return write(args.output);
        write(args.output_wide);
      } else {
        write(args.output != nullptr ? args.output : args.output_wide);
      }
    };
    if (args.log_output) {
      finish(std::true_type());
    } else {
      finish(std::false_type());
    }
  }
}

template <typename Scalar, int capacity, int constant_lanes>
__global__ __launch_bounds__(kBlock, kBackwardBlocks<Scalar, capacity>) void calibration_map_backward_kernel(
    const __grid_constant__ CalibrationMapBackward<Scalar> args,
    const __grid_constant__ MapNumbers<compute_t<Scalar>> numbers, int lane_bits, int vectors) {
  using Part = RowPart<Scalar, capacity, false>;
  using Real = typename Part::Real;
  using Sum = typename Part::Sum;
  constexpr int kVector = Part::kVector;
  constexpr bool kNarrow = sizeof(Scalar) < sizeof(Real);
  // A finite substitute for the exponent -inf of an impossible class: its product with 0 is 0, not NaN.
  const Real kImpossible = -largest_finite<Real>() * Real(0.75);
  __shared__ double scratch[kWarpsPerBlock * MapGroup::kMost];
  const int lanes = constant_lanes > 0 ? constant_lanes : 1 << lane_bits;
  const MapGroup group = {lanes, scratch};
  const int rows_at_once = constant_lanes > 0 ? kBlock / constant_lanes : kBlock >> lane_bits;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < args.rows;
       first += static_cast<int64_t>(gridDim.x) * rows_at_once) {
    const int64_t wanted = first + (constant_lanes > 0 ? static_cast<int>(threadIdx.x) / constant_lanes
                                                       : static_cast<int>(threadIdx.x) >> lane_bits);
    const bool exists = wanted < args.rows;
    const int64_t row = exists ? wanted : args.rows - 1;
    auto x = row_part<Scalar, capacity, false>(args, row, lanes, vectors);
    assume_classes<Scalar, constant_lanes>(x.classes);
    const Scalar* const grad_output = worked_out(args.grad_output + x.offset);
    const Real* const grad_output_wide = worked_out(args.grad_output_wide + x.offset);
    const auto load_grad = [&](int begin, Real* grad) {
      if (args.grad_output != nullptr) {
        x.load(grad_output, begin, Real(0), grad);
      } else {
        x.load(grad_output_wide, begin, Real(0), grad);
      }
    };
    // If few warps fit a multiprocessor, the upstream gradient is loaded early; pass 3 overwrites it with its result.
    constexpr bool kEarly = capacity == kLarge<Scalar>;
    Real kept_w[Part::kSlots];
    Real kept_hr[Part::kSlots];
    if constexpr (kEarly) {
      if (args.grad_output != nullptr) {
        x.load_all(grad_output, Real(0), kept_w);
      } else {
        x.load_all(grad_output_wide, Real(0), kept_w);
      }
    }
    const RowStart<Real> start = start_row(args, numbers, row, x, group);
    Real grad_top = 0;
    if (start.top < x.classes) {
      const int step = start.top - x.first;
      grad_top = args.grad_output != nullptr ? load_as_compute(grad_output[step]) : grad_output_wide[step];
    }

    const auto finish = [&](auto log_output) {
      constexpr bool kLog = decltype(log_output)::value;
      // The upstream gradient of a class other than the largest: w_k, or v_k if the output is probabilities; 0 for a
      // class of probability zero.
      const auto weight_of = [&](Real y, Real grad) {
        return y == -kInfinity<Real> ? Real(0) : kLog ? grad : grad - grad_top;
      };
      const auto class_of = [&](int slot, Real y) {
        return map_class<kNarrow, true>(y, x.power(slot, y), start.map.terms);
      };
      Sum totals[6] = {};
      Real part[6] = {};
      x.each_exponent(
          start,
          [&](int begin, int k, Real* y) {
            Real loaded[kVector];
            if constexpr (!kEarly) load_grad(begin, loaded);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              const Real w = weight_of(y[i], kEarly ? kept_w[k + i] : loaded[i]);
              y[i] = fmax(y[i], kImpossible);
              const MapClass<Real> c = class_of(k + i, y[i]);
              const Real hr = c.slope * c.ratio, cr = c.grad_gamma * c.ratio;
              part[0] += c.ratio;
              part[1] += kLog ? w : c.ratio * w;
              part[2] += hr;
              part[3] += (kLog ? c.slope : hr) * w;
              part[4] += cr;
              part[5] += (kLog ? c.grad_gamma : cr) * w;
              kept_hr[k + i] = hr;
              kept_w[k + i] = kLog ? c.slope * w : w;
            }
          },
          [&] {
#pragma unroll
            for (int i = 0; i < 6; ++i) {
              totals[i] = Part::kKept ? Sum(part[i]) : totals[i] + part[i];
              part[i] = 0;
            }
          });
      group.add(totals);
      const MapGradSums<Real> sums = {static_cast<Real>(totals[0]), static_cast<Real>(totals[1]),
                                      static_cast<Real>(totals[2]), static_cast<Real>(totals[3]),
                                      static_cast<Real>(totals[4]), static_cast<Real>(totals[5])};
      MapRowGrad<Real> grad = map_row_grad(start.map, sums, grad_top, kLog);
      if (!start.valid) grad.keep = grad.top = kNaN<Real>;
      // From dL/d(z / T) to dL/dz. If 1/T is extreme, it is applied last, after the sums, so that 0 is never multiplied
      // by infinity.
      const bool extreme = start.beta > Real(1e9) || start.beta < Real(1e-9);
      const Real inner = extreme ? Real(1) : start.beta, outer = extreme ? start.beta : Real(1);
      grad.keep *= inner;
      grad.spread *= inner;
      grad.shared *= inner;
      grad.top *= inner;

      // dL/dT is minus the sum of dL/dz_k (x_k - x_t), because the dL/dz_k add up to 0.
      Scalar* const grad_input = worked_out(args.grad_input + x.offset);
      const bool writes = args.grad_input != nullptr && exists;
      Sum temperature_sum = 0;
      Real temperature_part = 0;
      x.each_exponent(
          start,
          [&](int begin, int k, Real* y) {
            Real result[kVector];
            if constexpr (!Part::kKept) load_grad(begin, result);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              Real hr = kept_hr[k + i], w = kept_w[k + i];
              if constexpr (!Part::kKept) {
                w = weight_of(y[i], result[i]);
                y[i] = fmax(y[i], kImpossible);
                const MapClass<Real> c = class_of(k + i, y[i]);
                hr = c.slope * c.ratio;
                if (kLog) w *= c.slope;
              }
              // keep h_k m_k - spread h_k r_k
              const Real own = kLog ? grad.keep * w - grad.spread * hr : hr * (grad.keep * w - grad.spread);
              result[i] = own - grad.shared * x.power(k + i, y[i]);
            }
#pragma unroll
            for (int i = 0; i < kVector; ++i) temperature_part += result[i] * y[i];
            if (!writes) return;
            if (extreme) {
#pragma unroll
              for (int i = 0; i < kVector; ++i) result[i] *= outer;
            }
            if (x.probs) {
              // At p = 0 the map excludes the class, so its gradient is undefined; the code returns 0.
              Real p[kVector];
              x.load(x.input, begin, Real(0), p);
#pragma unroll
              for (int i = 0; i < kVector; ++i) p[i] = p[i] == Real(0) ? Real(0) * grad.keep : result[i] / p[i];
              return x.store(grad_input, begin, p);
            }
            x.store(grad_input, begin, result);
          },
          [&] {
            temperature_sum = Part::kKept ? Sum(temperature_part) : temperature_sum + temperature_part;
            temperature_part = 0;
          });
      // Overwrites a value that the same thread has just written.
      if (writes && x.top_vector >= 0) {
        Real result = grad.top * outer;
        if (x.probs) result /= load_as_compute(x.input[start.top - x.first]);
        grad_input[start.top - x.first] = Store<Scalar>::from_compute(result);
      }
      const double grad_temperature = (static_cast<double>(group.sum(temperature_sum)) * (-1.0 / quick_unit<Real>()) +
                                       static_cast<double>(grad.top) * static_cast<double>(start.gap)) *
                                      static_cast<double>(outer);
      if (exists && x.first == 0) {
        if (args.grad_gamma != nullptr) {
          args.grad_gamma[row] = start.valid ? static_cast<double>(grad.gamma) : kNaN<double>;
        }
        if (args.grad_temperature != nullptr) {
          args.grad_temperature[row] = start.valid ? grad_temperature : kNaN<double>;
        }
      }
    };
    if (args.log_output) {
      finish(std::true_type());
    } else {
      finish(std::false_type());
    }
  }
}

// ---- launchers -----------------------------------------------------------------------------------------------------

template <typename Scalar>
bool sizes_are_valid(const CalibrationMapArgs<Scalar>& args) {
  return args.rows >= 0 && args.classes >= 1 && args.classes <= INT32_MAX - 64 * kBlock;
}

// Whether every row of every operand begins on a 16-byte boundary.
template <typename Scalar>
bool rows_are_vectors(const CalibrationMapArgs<Scalar>& args, std::initializer_list<const void*> others) {
  auto addresses = reinterpret_cast<uintptr_t>(args.input);
  for (const void* other : others) addresses |= reinterpret_cast<uintptr_t>(other);
  return args.classes % kVectorSize<Scalar> == 0 && addresses % kVectorBytes == 0;
}

int lane_bits(int lanes) {
  int bits = 0;
  while (1 << bits < lanes) ++bits;
  return bits;
}

int64_t elementwise_grid(int64_t size) {
  const int64_t blocks = divide_up(size, kBlock);
  return blocks < 8 * kMaxGrid ? blocks : 8 * kMaxGrid;
}

}  // namespace

template <typename Scalar>
int calibration_map_forward(const CalibrationMapForward<Scalar>& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
  if (args.classes == 1) {
    return launch(binary_calibration_map_forward_kernel<Scalar>, elementwise_grid(args.rows), kBlock, stream, args);
  }
  const MapPlan plan = plan_map(args.rows, args.classes, kSmall<Scalar>, kLarge<Scalar>);
  const auto numbers = map_numbers<compute_t<Scalar>>(args.gamma_value, args.temperature_value);
  void (*kernel)(CalibrationMapForward<Scalar>, MapNumbers<compute_t<Scalar>>, int, int) =
      plan.capacity == 0                ? calibration_map_forward_kernel<Scalar, 0, kBlock>
      : plan.capacity == kSmall<Scalar> ? calibration_map_forward_kernel<Scalar, kSmall<Scalar>, 1>
      : plan.lanes == kBlock            ? calibration_map_forward_kernel<Scalar, kLarge<Scalar>, kBlock>
      : plan.lanes == kWarp             ? calibration_map_forward_kernel<Scalar, kLarge<Scalar>, kWarp>
                                        : calibration_map_forward_kernel<Scalar, kLarge<Scalar>, 0>;
  const int vectors = rows_are_vectors(args, {args.output, args.output_wide});
  return launch(kernel, plan.grid, kBlock, stream, args, numbers, lane_bits(plan.lanes), vectors);
}

template <typename Scalar>
int calibration_map_backward(const CalibrationMapBackward<Scalar>& args, void* stream) {
  if (args.rows == 0) return cudaSuccess;
  if (!sizes_are_valid(args)) return cudaErrorInvalidValue;
  if (args.classes == 1) {
    return launch(binary_calibration_map_backward_kernel<Scalar>, elementwise_grid(args.rows), kBlock, stream, args);
  }
  const MapPlan plan = plan_map(args.rows, args.classes, kSmall<Scalar>, kLarge<Scalar>);
  const auto numbers = map_numbers<compute_t<Scalar>>(args.gamma_value, args.temperature_value);
  void (*kernel)(CalibrationMapBackward<Scalar>, MapNumbers<compute_t<Scalar>>, int, int) =
      plan.capacity == 0                ? calibration_map_backward_kernel<Scalar, 0, kBlock>
      : plan.capacity == kSmall<Scalar> ? calibration_map_backward_kernel<Scalar, kSmall<Scalar>, 1>
      : plan.lanes == kBlock            ? calibration_map_backward_kernel<Scalar, kLarge<Scalar>, kBlock>
      : plan.lanes == kWarp             ? calibration_map_backward_kernel<Scalar, kLarge<Scalar>, kWarp>
                                        : calibration_map_backward_kernel<Scalar, kLarge<Scalar>, 0>;
  const int vectors = rows_are_vectors(args, {args.grad_output, args.grad_output_wide, args.grad_input});
  return launch(kernel, plan.grid, kBlock, stream, args, numbers, lane_bits(plan.lanes), vectors);
}

#define FK_INSTANTIATE(Scalar)                                                               \
  template int calibration_map_forward<Scalar>(const CalibrationMapForward<Scalar>&, void*); \
  template int calibration_map_backward<Scalar>(const CalibrationMapBackward<Scalar>&, void*);
FK_INSTANTIATE(Half)
FK_INSTANTIATE(BFloat16)
FK_INSTANTIATE(float)
FK_INSTANTIATE(double)
#undef FK_INSTANTIATE

}  // namespace focalkern::cuda
