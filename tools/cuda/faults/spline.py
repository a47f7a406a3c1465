"""Planted faults of spline scaling: map and sums."""

from tools.cuda.faults.fault import Fault

FAULTS = [
    Fault(
        "the spline kernels stop after the first rows",
        "spline_row.cuh",
        "first < input.rows; first += stride",
        "first < input.rows; first += input.rows",
    ),
    Fault(
        "the spline kernels take rows beyond the last",
        "spline_row.cuh",
        "part.classes = exists ? static_cast<int>(input.classes) : 0;",
        "part.classes = static_cast<int>(input.classes);",
    ),
    Fault(
        "the spline kernels leave out the last class",
        "spline_row.cuh",
        "c < classes; c += lanes",
        "c + 1 < classes; c += lanes",
    ),
    Fault(
        "too little shared memory for the classes of a spline",
        "spline_row.cuh",
        "kept ? kSplineSlots * kBlock : 1",
        "kept ? kBlock : 1",
    ),
    Fault(
        "long rows of two blocks share the memory of a spline",
        "spline_row.cuh",
        "* 2 * input.classes + thread",
        "* input.classes + thread",
    ),
    Fault(
        "the last piece of a spline has no coefficients",
        "spline_row.cuh",
        "i < 4 * (curve.knots + 1)",
        "i < 4 * curve.knots",
    ),
    Fault(
        "knots beyond the last are finite",
        "spline_row.cuh",
        "i < curve.knots ? curve.positions[i] : kInfinity<double>",
        "curve.positions[i < curve.knots ? i : curve.knots - 1]",
    ),
    Fault(
        "the bisection of the knots begins too late",
        "spline_row.cuh",
        "first_step = pieces / 2;",
        "first_step = pieces / 4;",
    ),
    Fault(
        "classes that tie with the largest one of a spline are left out",
        "spline_row.cuh",
        "group.sum(ties) - 1.0",
        "0.0",
    ),
    Fault(
        "groups of a block share their sums by class",
        "spline_row.cuh",
        "* rows_at_once() + static_cast<int>(threadIdx.x) / plan.lanes;",
        "* rows_at_once();",
    ),
    Fault(
        "sums of a spline overlap",
        "spline_row.cuh",
        "stride(static_cast<int64_t>(gridDim.x) * kBlock)",
        "stride(kBlock)",
    ),
    Fault(
        "blocks share their sums of a spline",
        "spline_row.cuh",
        "sums.of_threads + static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x",
        "sums.of_threads + threadIdx.x",
    ),
    Fault(
        "long rows of the spline map use shared memory",
        "spline_map.cu",
        "plan.in_shared ? spline_map_forward_kernel<true> : spline_map_forward_kernel<false>",
        "spline_map_forward_kernel<true>",
    ),
    Fault(
        "the large class of a spline counts as one of the rest",
        "spline_map.cu",
        "(of.features.large ? of_large : of_rest) += of_log_q;",
        "of_rest += of_log_q;",
    ),
    Fault(
        "an impossible class has a gradient in the spline map",
        "spline_map.cu",
        "args.scores.keep_zeros && part.d[at] == -kInfinity<double>",
        "false",
    ),
    Fault(
        "means of rows beyond the last",
        "spline_sums.cu",
        "if (exists && part.lane == 0)",
        "if (part.lane == 0)",
    ),
    Fault(
        "every thread of a row writes its means",
        "spline_sums.cu",
        "if (exists && part.lane == 0)",
        "if (exists)",
    ),
    Fault(
        "falls to an impossible class are infinite",
        "spline_sums.cu",
        "fall > -kSplineLowestFall ? fall : -kSplineLowestFall",
        "fall",
    ),
    Fault(
        "the label of a row is left out of its slopes",
        "spline_sums.cu",
        " - (c == label ? weight : 0.0)",
        "",
    ),
]
