// The spline map and its gradients, for torch's interface and its stable one.
#pragma once

#include "bindings/spline_run.h"

namespace focalkern::bindings {

// Checked arguments of the spline map. Tensors but `parameters`, [3] on the CPU, lie on one device and are contiguous;
// all but `input` are in float64.
template <typename Torch>
class SplineMapRun {
 public:
  using Tensor = typename Torch::Tensor;
  using OptionalTensor = std::optional<Tensor>;

  SplineMapRun(const Tensor& input, const Tensor& parameters, const Tensor& knots, const Tensor& coefficients,
               const OptionalTensor& weight, const OptionalTensor& bias, bool is_probs, bool keep_zeros)
      : input_(input),
        parameters_(parameters),
        knots_(knots),
        coefficients_(coefficients),
        weight_(weight),
        bias_(bias),
        is_matrix_(weight.has_value() && weight->dim() == 2) {
    const double* numbers = const_doubles_of(parameters);
    rows_ = spline_input<Torch>(input, numbers[1], numbers[2], is_probs);
    curve_ = {knots.numel(), const_doubles_of(knots), const_doubles_of(coefficients)};
    scores_ = {numbers[0], is_matrix_ ? nullptr : const_doubles_of(weight), const_doubles_of(bias), nullptr,
               keep_zeros};
  }

  const Tensor& input() const { return input_; }

  // Whether the caller has to bring the results into the order of the input: the CUDA kernel keeps it in steps, for
  // which float64 is too fine.
  bool leaves_order() const { return input_.is_cuda() && rows_.storage == SplineStorage::kDouble; }

  // Fills the output; returns the first row without an answer, or -1 (always -1 on CUDA, where its results are NaN).
  int64_t forward(const Tensor& output, bool log_output, bool keep_order) const {
    SplineMapForward args{rows_,
                          curve_,
                          scores_,
                          log_output,
                          keep_order,
                          output.mutable_data_ptr(),
                          spline_storage<Torch>(output),
                          /*tolerance=*/0};
    Torch::dispatch(input_, [&](auto scalar) { args.tolerance = probability_sum_tolerance<decltype(scalar)>(); });
#ifdef FOCALKERN_WITH_CUDA
    if (input_.is_cuda()) {
      for_each_part([&](int64_t begin, int64_t end) {
        SplineMapForward part = args;
        part.rows = rows_of_part(begin, end);
        part.output = part_of(output, begin, end).mutable_data_ptr();
        const OptionalTensor extra =
            is_matrix_ ? OptionalTensor(matrix_scores(log_probs_on_device(part.rows))) : std::nullopt;
        part.scores.extra = const_doubles_of(extra);
        part.rows.in_steps = keep_order && !leaves_order();
        const SplineDeviceSums<Torch> memory(part.rows, input_, /*numbers=*/0, /*by_class=*/false);
        launch_spline<Torch>(input_, cuda::spline_map_forward, part, memory.scratch);
      });
      return -1;
    }
#endif
    constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
    std::atomic<int64_t> first_invalid{kNone};
    for_each_spline_chunk<Torch>(rows_, [&](int64_t /*chunk*/, int64_t begin, int64_t end) {
      SplineMapForward part = args;
      OptionalTensor extra;
      if (is_matrix_) {
        const Tensor x = Torch::empty_doubles(input_, {end - begin, rows_.classes});
        cpu::spline_log_probs(rows_, doubles_of(x), begin, end);
        extra = matrix_scores(x);
        part.scores.extra = const_doubles_of(extra);
        part.scores.first_row = begin;
      }
      const int64_t invalid = cpu::spline_map_forward(part, begin, end);
      int64_t first = first_invalid.load();
      while (invalid >= 0 && invalid < first && !first_invalid.compare_exchange_weak(first, invalid)) {
      }
    });
    return first_invalid == kNone ? -1 : first_invalid.load();
  }

  // Of parameters, knots, coefficients, weight and bias, on the CPU; [0] for absent ones.
  using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

  // Fills the gradient of the input, if it is given. `grad` is contiguous.
  Gradients backward(const Tensor& grad, const OptionalTensor& grad_input, bool log_output) const {
    const SplineMapBackward args{rows_,
                                 curve_,
                                 scores_,
                                 log_output,
                                 grad.const_data_ptr(),
                                 spline_storage<Torch>(grad),
                                 /*of_x=*/nullptr,
                                 /*grad_scores=*/nullptr,
                                 grad_input.has_value() ? grad_input->mutable_data_ptr() : nullptr};
#ifdef FOCALKERN_WITH_CUDA
    if (input_.is_cuda()) return backward_on_device(args, grad, grad_input);
#endif
    return backward_on_cpu(args);
  }

 private:
  // W x of the rows x.
  Tensor matrix_scores(const Tensor& x) const { return Torch::product(x, Torch::transposed(*weight_)); }

  Gradients backward_on_cpu(const SplineMapBackward& args) const {
    const int64_t n = rows_.classes, classes = weight_ || bias_ ? n : 0;
    std::vector<cpu::SplineMapGradient> sums(n_spline_chunks(rows_) + 1, cpu::SplineMapGradient(curve_.knots, classes));
    // The gradient of a matrix is a product over all rows at once.
    const int64_t of_entries = is_matrix_ ? rows_.rows : 0;
    const Tensor all_x = Torch::empty_doubles(input_, {of_entries, n});
    const Tensor all_slopes = Torch::empty_doubles(input_, {of_entries, n});
    for_each_spline_chunk<Torch>(rows_, [&](int64_t chunk, int64_t begin, int64_t end) {
      SplineMapBackward part = args;
      OptionalTensor extra, of_x;
      if (is_matrix_) {
        const Tensor x = Torch::slice(all_x, 0, begin, end), slopes = Torch::slice(all_slopes, 0, begin, end);
        cpu::spline_log_probs(rows_, doubles_of(x), begin, end);
        extra = matrix_scores(x);
        part.scores.extra = const_doubles_of(extra);
        part.scores.first_row = begin;
        part.grad_scores = doubles_of(slopes);
        part.grad_input = nullptr;
        cpu::SplineMapGradient unused(curve_.knots, classes);
        cpu::spline_map_backward(part, begin, end, unused);
        of_x = Torch::product(slopes, *weight_);
        part.of_x = const_doubles_of(of_x);
        part.grad_scores = nullptr;
        part.grad_input = args.grad_input;
      }
      cpu::spline_map_backward(part, begin, end, sums[chunk]);
    });
    cpu::SplineMapGradient& sum = sums.back();
    for (size_t i = 0; i + 1 < sums.size(); ++i) sum.add(sums[i]);
    std::vector<double> numbers{sum.factor, sum.temperature, sum.floor};
    numbers.insert(numbers.end(), sum.coefficients.begin(), sum.coefficients.end());
    const auto of_class = [&](const OptionalTensor& tensor, const std::vector<double>& values) {
      return copy_of(values.data(), {tensor.has_value() ? n : 0});
    };
    return gradients(numbers.data(),
                     is_matrix_ ? Torch::product(Torch::transposed(all_slopes), all_x) : of_class(weight_, sum.weight),
                     of_class(bias_, sum.bias));
  }

  // numbers: of factor, T, e, then of the coefficients.
  Gradients gradients(const double* numbers, const Tensor& of_weight, const Tensor& of_bias) const {
    const int64_t m = curve_.knots;
    const double* of_powers = numbers + cuda::kSplineOfRows;
    const Tensor host = Torch::on_host(coefficients_), of_knots = Torch::empty_doubles(parameters_, {m});
    // In the origins of the pieces; knot 1 is the origin of two. f depends on u - origin.
    std::fill_n(doubles_of(of_knots), m, 0.0);
    for (int64_t piece = 0; piece <= m; ++piece) {
      const double *of = of_powers + 4 * piece, *c = const_doubles_of(host) + 4 * piece;
      doubles_of(of_knots)[std::max<int64_t>(piece - 1, 0)] -= c[1] * of[0] + 2 * c[2] * of[1] + 3 * c[3] * of[2];
    }
    return {copy_of(numbers, {cuda::kSplineOfRows}), of_knots, copy_of(of_powers, {m + 1, 4}), of_weight, of_bias};
  }

  // On the CPU.
  Tensor copy_of(const double* values, std::initializer_list<int64_t> shape) const {
    const Tensor result = Torch::empty_doubles(parameters_, shape);
    std::copy_n(values, result.numel(), doubles_of(result));
    return result;
  }

#ifdef FOCALKERN_WITH_CUDA
  // Calls work(begin, end) for all rows at once; for a matrix, whose products need tensors [rows, C] in float64, for
  // ranges that keep these small.
  template <typename Work>
  void for_each_part(Work work) const {
    constexpr int64_t kEntries = int64_t{1} << 24;
    const int64_t rows = rows_.rows;
    const int64_t step = std::max<int64_t>(1, is_matrix_ ? kEntries / std::max<int64_t>(1, rows_.classes) : rows);
    for (int64_t begin = 0; begin < rows; begin += step) work(begin, std::min(rows, begin + step));
  }

  // Rows begin to end of a tensor [..., C].
  Tensor part_of(const Tensor& tensor, int64_t begin, int64_t end) const {
    return Torch::slice(Torch::view(tensor, {rows_.rows, rows_.classes}), 0, begin, end);
  }

  SplineInput rows_of_part(int64_t begin, int64_t end) const {
    SplineInput rows = rows_;
    rows.input = part_of(input_, begin, end).const_data_ptr();
    rows.rows = end - begin;
    return rows;
  }

  Tensor log_probs_on_device(const SplineInput& rows) const {
    const Tensor x = Torch::empty_doubles(input_, {rows.rows, rows.classes});
    const SplineDeviceSums<Torch> memory(rows, input_, /*numbers=*/0, /*by_class=*/false);
    launch_spline<Torch>(input_, cuda::spline_log_probs, rows, doubles_of(x), memory.scratch);
    return x;
  }

  Gradients backward_on_device(const SplineMapBackward& args, const Tensor& grad,
                               const OptionalTensor& grad_input) const {
    const int64_t numbers = cuda::kSplineOfRows + 4 * (curve_.knots + 1), classes = rows_.classes;
    const bool by_class = weight_.has_value() || bias_.has_value();
    const Tensor sums = Torch::zero_doubles(input_, {numbers});
    const Tensor of_classes = Torch::zero_doubles(input_, {by_class ? 2 : 0, classes});
    const int64_t of_matrix_rows = is_matrix_ ? classes : 0;
    const Tensor of_matrix = Torch::zero_doubles(input_, {of_matrix_rows, classes});
    for_each_part([&](int64_t begin, int64_t end) {
      SplineMapBackward part = args;
      part.rows = rows_of_part(begin, end);
      part.grad_output = part_of(grad, begin, end).const_data_ptr();
      part.grad_input = nullptr;
      OptionalTensor extra, of_x;
      if (is_matrix_) {
        const Tensor x = log_probs_on_device(part.rows);
        extra = matrix_scores(x);
        const Tensor slopes = Torch::empty_doubles(input_, {part.rows.rows, classes});
        part.scores.extra = const_doubles_of(extra);
        part.grad_scores = doubles_of(slopes);
        const SplineDeviceSums<Torch> memory(part.rows, input_, /*numbers=*/0, /*by_class=*/false);
        launch_spline<Torch>(input_, cuda::spline_map_backward, part, memory.sums, memory.scratch);
        of_x = Torch::product(slopes, *weight_);
        part.of_x = const_doubles_of(of_x);
        part.grad_scores = nullptr;
        Torch::add_to(of_matrix, Torch::product(Torch::transposed(slopes), x), 1);
      }
      if (grad_input.has_value()) part.grad_input = part_of(*grad_input, begin, end).mutable_data_ptr();
      const SplineDeviceSums<Torch> memory(part.rows, input_, numbers, by_class);
      launch_spline<Torch>(input_, cuda::spline_map_backward, part, memory.sums, memory.scratch);
      Torch::add_to(sums, Torch::sum(memory.of_threads, 1), 1);
      if (by_class) Torch::add_to(of_classes, Torch::sum(memory.of_classes, 0), 1);
    });
    // Parameters and their gradients lie on the host.
    const Tensor host = Torch::on_host(sums), host_classes = Torch::on_host(of_classes);
    const auto of_class = [&](const OptionalTensor& tensor, int64_t which) {
      return copy_of(const_doubles_of(host_classes) + which * classes, {tensor.has_value() ? classes : 0});
    };
    return gradients(const_doubles_of(host), is_matrix_ ? Torch::on_host(of_matrix) : of_class(weight_, 0),
                     of_class(bias_, 1));
  }
#endif

  Tensor input_, parameters_, knots_, coefficients_;
  OptionalTensor weight_, bias_;
  bool is_matrix_;
  SplineInput rows_;
  SplineCurve curve_;
  SplineScores scores_;
};

}  // namespace focalkern::bindings
