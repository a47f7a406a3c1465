// Schemas of the operators of torch's library "focalkern": of the bindings and of the stable module.
#pragma once

namespace focalkern::bindings {

inline constexpr const char* kFocalLossForwardSchema =
    "focal_loss_forward(Tensor input, Tensor target, Tensor gamma, Tensor? edges, Tensor? weight, int "
    "reduction, int ignore_index, float label_smoothing, bool detach_modulation, bool float32_loss, int "
    "kind=0, float epsilon=0.0) -> (Tensor loss, Tensor saved)";
inline constexpr const char* kFocalLossWithGradientSchema =
    "focal_loss_with_gradient(Tensor input, Tensor target, float gamma, Tensor? weight, int reduction, int "
    "ignore_index, float label_smoothing, bool detach_modulation, int kind, float epsilon) -> (Tensor loss, "
    "Tensor grad_input)";
inline constexpr const char* kFocalLossBackwardSchema =
    "focal_loss_backward(Tensor grad, Tensor input, Tensor target, Tensor gamma, Tensor? edges, Tensor? "
    "weight, Tensor saved, int reduction, int ignore_index, float label_smoothing, bool detach_modulation, "
    "bool[3] needed, int kind=0, float epsilon=0.0) -> (Tensor grad_input, Tensor grad_target, Tensor "
    "grad_gamma)";
inline constexpr const char* kFocalLossCompositeSchema =
    "focal_loss_composite(Tensor input, Tensor target, Tensor gamma, Tensor? edges, Tensor? weight, int "
    "reduction, int ignore_index, float label_smoothing, bool detach_modulation, bool float32_loss, int "
    "kind=0, float epsilon=0.0) -> Tensor";
inline constexpr const char* kSigmoidLossForwardSchema =
    "sigmoid_loss_forward(Tensor input, Tensor target, Tensor gamma, Tensor? second, Tensor? weight, Tensor? "
    "scores, int kind, float constant, int reduction, int ignore_index, bool float32_loss) -> (Tensor loss, Tensor "
    "divisor)";
inline constexpr const char* kSigmoidLossBackwardSchema =
    "sigmoid_loss_backward(Tensor grad, Tensor input, Tensor target, Tensor gamma, Tensor? second, Tensor? "
    "weight, Tensor? scores, Tensor divisor, int kind, float constant, int reduction, int ignore_index, bool[4] "
    "needed) -> (Tensor grad_input, Tensor grad_target, Tensor grad_gamma, Tensor grad_second)";
inline constexpr const char* kSigmoidLossCompositeSchema =
    "sigmoid_loss_composite(Tensor input, Tensor target, Tensor gamma, Tensor? second, Tensor? weight, Tensor? "
    "scores, int kind, float constant, int reduction, int ignore_index, bool float32_loss) -> Tensor";
inline constexpr const char* kCalibrationMapForwardSchema =
    "calibration_map_forward(Tensor input, Tensor gamma, Tensor temperature, int kind, bool log_output, bool "
    "wide, bool validate) -> Tensor";
inline constexpr const char* kCalibrationMapBackwardSchema =
    "calibration_map_backward(Tensor grad, Tensor input, Tensor gamma, Tensor temperature, int kind, bool "
    "log_output, bool[3] needed) -> (Tensor grad_input, Tensor grad_gamma, Tensor grad_temperature)";
inline constexpr const char* kCalibrationMapCompositeSchema =
    "calibration_map_composite(Tensor input, Tensor gamma, Tensor temperature, int kind, bool log_output, "
    "bool wide) -> Tensor";
inline constexpr const char* kCalibrationGridSchema =
    "calibration_grid(Tensor input, Tensor target, Tensor gammas, Tensor temperatures, int n_bins, int "
    "criteria, int estimator, bool input_is_probs, int ignore_index) -> Tensor";
inline constexpr const char* kMmceLossCompositeSchema =
    "mmce_loss_composite(Tensor input, Tensor target, float coefficient, bool weighted, float bandwidth, int "
    "reduction, int ignore_index) -> Tensor";
inline constexpr const char* kSplineMapForwardSchema =
    "spline_map_forward(Tensor input, Tensor parameters, Tensor knots, Tensor coefficients, Tensor? weight, "
    "Tensor? bias, bool is_probs, bool keep_zeros, bool log_output, bool wide, bool keep_order, bool "
    "validate) -> Tensor";
inline constexpr const char* kSplineMapBackwardSchema =
    "spline_map_backward(Tensor grad, Tensor input, Tensor parameters, Tensor knots, Tensor coefficients, "
    "Tensor? weight, Tensor? bias, bool is_probs, bool keep_zeros, bool log_output, bool[6] needed) -> "
    "(Tensor grad_input, Tensor grad_parameters, Tensor grad_knots, Tensor grad_coefficients, Tensor "
    "grad_weight, Tensor grad_bias)";
inline constexpr const char* kSplineMapCompositeSchema =
    "spline_map_composite(Tensor input, Tensor parameters, Tensor knots, Tensor coefficients, Tensor? "
    "weight, Tensor? bias, bool is_probs, bool keep_zeros, bool log_output, bool wide) -> Tensor";

}  // namespace focalkern::bindings
