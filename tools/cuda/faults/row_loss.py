"""Planted faults of the other losses of rows, and of the headers that all kernels share."""

from tools.cuda.faults.fault import Fault

FAULTS = [
    Fault(
        "losses of rows: only the first rows of a block",
        "row_loss.cu",
        "t < geometry.tiles; t += gridDim.x",
        "t < geometry.tiles; t += geometry.tiles",
    ),
    Fault(
        "gradients of rows: only the first rows of a block",
        "row_loss.cu",
        "t < geometry.tiles; t += gridDim.x",
        "t < geometry.tiles; t += geometry.tiles",
        1,
    ),
    Fault(
        "losses of rows with class probabilities: only the first rows of a block",
        "row_loss_soft.cu",
        "t < geometry.tiles; t += gridDim.x",
        "t < geometry.tiles; t += geometry.tiles",
    ),
    Fault(
        "gradients of rows with class probabilities: only the first rows of a block",
        "row_loss_soft.cu",
        "t < geometry.tiles; t += gridDim.x",
        "t < geometry.tiles; t += geometry.tiles",
        1,
    ),
    Fault(
        "the last block adds up 256 blocks at most",
        "grid_sum.cuh",
        "block < gridDim.x; block += kBlock",
        "block < gridDim.x; block += gridDim.x",
    ),
    Fault(
        "vector loads without regard to the boundary",
        "common.cuh",
        "return static_cast<int>(((0u - low) & (kVectorBytes - 1)) / sizeof(Scalar));",
        "return 0;",
    ),
    Fault(
        "any thread writes the target's gradient of a row",
        "row_loss.cu",
        "if (is_mine(row, row.label)) grad",
        "if (row.index == 0) grad",
    ),
    Fault(
        "any thread writes the marked class's gradient of a row",
        "row_loss.cu",
        "is_mine(row, marked)) {",
        "row.index == 0) {",
    ),
    Fault(
        "any thread writes the label's gradient of a smoothed row",
        "row_loss_soft.cu",
        "row.label != row_top && is_mine(row, row.label)",
        "row.label != row_top && row.index == 0",
    ),
    Fault(
        "any thread writes the likely class's gradient of a smoothed row",
        "row_loss_soft.cu",
        "row_top != kNoClass && is_mine(row, row_top)",
        "row_top != kNoClass && row.index == 0",
    ),
    Fault(
        "a row's vectors go to a gradient on other boundaries",
        "row_groups.cuh",
        "elements_to_boundary(grad) == elements_to_boundary(row.logits)",
        "elements_to_boundary(grad) >= 0",
    ),
    Fault("all rows lie in one run", "row_loss.cuh", "if (row < inner) return", "if (row >= 0) return"),
    Fault(
        "no class before the first vector",
        "row_groups.cuh",
        "if (row.index < vectors.head) {",
        "if (row.index < 0) {",
    ),
    Fault(
        "no class after the last vector",
        "row_groups.cuh",
        "if (vectors.tail + row.index < row.classes) {",
        "if (row.index < 0) {",
    ),
    Fault(
        "two vectors where some lanes have one",
        "row_groups.cuh",
        "(vector | (kWarp - 1)) + row.lanes < vectors.count; vector +=",
        "vector < vectors.count; vector +=",
    ),
    Fault("no vector by itself", "row_groups.cuh", "for (; vector < vectors.count;", "for (; vector < 0;"),
    Fault(
        "four classes where some are beyond the row",
        "row_groups.cuh",
        "j + (kUnroll - 1) * row.lanes < row.classes;",
        "j + (kUnroll - 2) * row.lanes < row.classes;",
    ),
    Fault(
        "no class by itself",
        "row_groups.cuh",
        "for (; j < row.classes; j += row.lanes,",
        "for (; j < 0; j += row.lanes,",
    ),
    Fault(
        "the largest class is left out once for every lane",
        "row_groups.cuh",
        "group.sum(has_largest ? Real(1) : Real(0)) - Real(1);",
        "Real(0);",
    ),
    Fault(
        "a row's targets on other boundaries than its logits",
        "soft_shares.cuh",
        "elements_to_boundary(targets + head) == 0;",
        "elements_to_boundary(targets + head) >= 0;",
    ),
    Fault(
        "the second vector has the shares of the first",
        "soft_shares.cuh",
        "shares.read(next, 1, more);",
        "shares.read(first, 1, more);",
    ),
    Fault(
        "a gamma below 2 counts as 0",
        "soft_row.cuh",
        "is_zero = is_number && gamma == Real(0);",
        "is_zero = is_number && gamma < Real(2);",
    ),
    Fault(
        "the counter of finished blocks is not cleared",
        "grid_sum.cuh",
        "cudaMemsetAsync(to.finished, 0, sizeof(unsigned), static_cast<cudaStream_t>(stream));",
        "cudaSuccess;",
    ),
    Fault("one block fewer counts as all", "grid_sum.cuh", "== gridDim.x - 1;", "== gridDim.x - 2;"),
    Fault(
        "a barrier that rows beyond the end leave out",
        "row_loss_soft.cu",
        "    const int row_top = group.min(top);\n    const Real weight",
        "    if (row.row >= args.rows) continue;\n    const int row_top = group.min(top);\n    const Real weight",
    ),
    Fault("a thread without a row finishes that of its group", "row_groups.cuh", "  row.row = args.rows;\n", ""),
    Fault(
        "statistics: only the first rows of a block",
        "row_statistics.cu",
        "t < geometry.tiles; t += gridDim.x",
        "t < geometry.tiles; t += geometry.tiles",
    ),
    Fault(
        "sums of a smoothed loss: the target's number in place of the largest class's",
        "row_statistics.cu",
        "has_label ? logarithm(sums.rest) - log_s : Real(0)",
        "has_label ? (row.z(row.label) - sums.max) - log_s : Real(0)",
    ),
    Fault(
        "a wrong label counts as ignored",
        "row_statistics.cu",
        "row.label != kIgnored;  // rows",
        "row.label >= 0;  // rows",
    ),
    Fault(
        "the last thread's NaN alone counts",
        "row_statistics.cuh",
        "return group.min(first) != kNoClass;",
        "return first != kNoClass;",
    ),
    Fault(
        "the entropy keeps an older maximum", "row_groups.cuh", "sums.second + shrink * (", "sums.second + Real(0) * ("
    ),
    Fault(
        "the last of equal classes is the largest",
        "row_groups.cuh",
        "row.largest = group.min(max == row.max ? largest : kNoClass);",
        "row.largest = -group.min(max == row.max ? -largest : kNoClass);",
    ),
    Fault(
        "the slope of another term is left out", "row_loss.cuh", "return args.lse_slope != nullptr ?", "return false ?"
    ),
    Fault(
        "a number of the largest class is taken for its logit",
        "row_loss_soft.cu",
        "if (args.first_is_class) max",
        "if (false) max",
    ),
]
