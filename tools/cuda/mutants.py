"""Planted faults: what tools.cuda.cases have to see, proven one fault at a time.

    python -m tools.cuda.mutants [--out FOLDER] [--csv FILE] [WORD ...]    faults whose name or file holds a WORD

Every barrier, fence and atomic of csrc/cuda is a fault by itself (``synchronization``): it is deleted, or made a plain
read and write. ``FAULTS`` are the others: tails, strides, counts. A fault is text to replace; where the source has
moved on, test_mutants.py says so. Each is compiled to PTX, for float, and has to fail its cases on the emulator, unless
``REDUNDANT`` says in a line why nothing can depend on it.
"""

import argparse
import csv
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import focalkern  # noqa: F401  (for the children)
from tools.cuda import build

ROOT = Path(__file__).parents[2]
CUDA = ROOT / "csrc/cuda"

# The cases that run a file's kernels, or those that use a header.
CASES = {
    "common.cuh": "focal_loss+blind_spots",
    "grid_sum.cuh": "focal_loss+blind_spots",
    "focal_loss.cu": "focal_loss+blind_spots",
    "focal_loss_row.cuh": "focal_loss+blind_spots",
    "focal_loss_tiles.cuh": "focal_loss+blind_spots",
    "focal_loss_rows.cuh": "focal_loss+blind_spots",
    "focal_loss_thread_per_row.cuh": "focal_loss+blind_spots",
    "focal_loss_two_rows_per_thread.cuh": "focal_loss+blind_spots",
    "focal_loss_split_rows.cuh": "focal_loss+blind_spots",
    "calibration_map.cu": "calibration_map+blind_spots",
    "calibration_grid.cu": "calibration_grid+blind_spots",
    "grid_confidence.cuh": "calibration_grid+blind_spots",
    "grid_bins.cuh": "calibration_grid+blind_spots",
    "calibration_sums.cu": "calibration_sums",
    "spline_map.cu": "spline",
    "spline_sums.cu": "spline",
    "spline_row.cuh": "spline",
    "sigmoid_loss_strided.cu": "sigmoid_loss",
    "sigmoid_loss_vectorized.cu": "sigmoid_loss",
    "row_loss.cu": "row_loss+focal_loss",
    "row_loss_soft.cu": "row_loss+focal_loss",
    "row_groups.cuh": "row_loss+focal_loss",
    "row_loss.cuh": "row_loss+focal_loss",
}
# What is compiled anew where a header changes: files that together use all of it.
COMPILED = {
    "common.cuh": ("focal_loss.cu", "row_loss.cu", "row_loss_soft.cu"),
    "row_groups.cuh": ("row_loss.cu", "row_loss_soft.cu"),
    "row_loss.cuh": ("focal_loss.cu", "row_loss.cu", "row_loss_soft.cu"),
    "grid_sum.cuh": ("focal_loss.cu",),
    "focal_loss_row.cuh": ("focal_loss.cu",),
    "focal_loss_tiles.cuh": ("focal_loss.cu",),
    "focal_loss_rows.cuh": ("focal_loss.cu",),
    "focal_loss_thread_per_row.cuh": ("focal_loss.cu",),
    "focal_loss_two_rows_per_thread.cuh": ("focal_loss.cu",),
    "focal_loss_split_rows.cuh": ("focal_loss.cu",),
    "grid_confidence.cuh": ("calibration_grid.cu",),
    "grid_bins.cuh": ("calibration_grid.cu",),
    "spline_row.cuh": ("spline_map.cu", "spline_sums.cu"),
}
# Where a file's cases are among others: pytest -k.
CHOICE = {
    "common.cuh": "not (map or grid)",
    "grid_sum.cuh": "not (map or grid)",
    "focal_loss.cu": "not (map or grid)",
    "focal_loss_row.cuh": "not (map or grid)",
    "focal_loss_tiles.cuh": "not (map or grid)",
    "focal_loss_rows.cuh": "not (map or grid)",
    "focal_loss_thread_per_row.cuh": "not (map or grid)",
    "focal_loss_two_rows_per_thread.cuh": "not (map or grid)",
    "focal_loss_split_rows.cuh": "not (map or grid)",
    "calibration_map.cu": "map",
    "calibration_grid.cu": "grid",
    "grid_confidence.cuh": "grid",
    "grid_bins.cuh": "grid",
}


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # in csrc/cuda
    old: str  # occurs once, or the `nth` is meant
    new: str
    nth: int = 0

    def plant(self, text: str) -> str:
        at = -1
        for _ in range(self.nth + 1):
            at = text.index(self.old, at + 1)
        return text[:at] + self.new + text[at + len(self.old) :]


FAULTS = [
    # ---- tiles and strides of the grid
    Fault(
        "forward: only the first tile of a block",
        "focal_loss_rows.cuh",
        "t < plan.tiles; t += gridDim.x",
        "t < plan.tiles; t += plan.tiles",
    ),
    Fault(
        "forward: only the first tile of short rows",
        "focal_loss_tiles.cuh",
        "t < plan.tiles; t += gridDim.x",
        "t < plan.tiles; t += plan.tiles",
        0,
    ),
    Fault(
        "backward: only the first tile of a block",
        "focal_loss_rows.cuh",
        "t < plan.tiles; t += gridDim.x",
        "t < plan.tiles; t += plan.tiles",
        1,
    ),
    Fault(
        "forward: only the first tile of own rows",
        "focal_loss_thread_per_row.cuh",
        "t < plan.tiles; t += gridDim.x",
        "t < plan.tiles; t += plan.tiles",
        0,
    ),
    Fault(
        "backward: only the first tile of own rows",
        "focal_loss_thread_per_row.cuh",
        "t < plan.tiles; t += gridDim.x",
        "t < plan.tiles; t += plan.tiles",
        1,
    ),
    Fault(
        "forward: a block takes its neighbour's tiles",
        "focal_loss_rows.cuh",
        "t < plan.tiles; t += gridDim.x",
        "t < plan.tiles; t += gridDim.x - (gridDim.x > 1)",
    ),
    # ---- long rows in chunks
    Fault(
        "the target's class is not counted from the chunk's first",
        "focal_loss_split_rows.cuh",
        "const int target = label - chunk.first;",
        "const int target = label;",
    ),
    Fault(
        "the last chunk reaches beyond the row",
        "focal_loss_split_rows.cuh",
        "left < plan.chunk_classes ? left : plan.chunk_classes;",
        "plan.chunk_classes;",
    ),
    Fault(
        "chunks begin where neighbouring classes would lie",
        "focal_loss_split_rows.cuh",
        "geometry.logits(chunk.row) + chunk.first * class_stride;",
        "geometry.logits(chunk.row) + chunk.first;",
    ),
    Fault(
        "chunks of gradients begin where neighbouring classes would lie",
        "focal_loss_split_rows.cuh",
        "geometry.grad_logits(chunk.row) + chunk.first * grad_stride,",
        "geometry.grad_logits(chunk.row) + chunk.first,",
    ),
    Fault(
        "only as many chunks as lanes are brought together",
        "focal_loss_split_rows.cuh",
        "c < chunks; c += lanes",
        "c < chunks; c += chunks",
    ),
    Fault(
        "only the first rows of chunks are brought together",
        "focal_loss_split_rows.cuh",
        "first < rows; first += rows_at_once",
        "first < rows; first += rows",
    ),
    Fault(
        "labels of rows beyond those in chunks are read",
        "focal_loss_split_rows.cuh",
        "row < rows ? as_class(args, args.labels[row]) : kIgnored;",
        "as_class(args, args.labels[row]);",
    ),
    Fault(
        "every lane brings the chunks of a row to an end",
        "focal_loss_split_rows.cuh",
        "if (index == 0 && row < rows) finish_row",
        "if (row < rows) finish_row",
    ),
    Fault(
        "a chunk writes the target's gradient of a later one",
        "focal_loss_split_rows.cuh",
        "if (gradient.target >= chunk.classes) gradient.target = kIgnored;",
        "",
    ),
    Fault(
        "every chunk writes the gradient of gamma",
        "focal_loss_split_rows.cuh",
        "offset, chunk.first == 0);",
        "offset, true);",
    ),
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
        "the map stops after the first rows",
        "calibration_map.cu",
        "first += static_cast<int64_t>(gridDim.x) * rows_at_once",
        "first += args.rows",
    ),
    Fault(
        "the gradient of the map stops after the first rows",
        "calibration_map.cu",
        "first += static_cast<int64_t>(gridDim.x) * rows_at_once",
        "first += args.rows",
        1,
    ),
    Fault(
        "the map reads a vector beyond the row",
        "calibration_map.cu",
        "if (!kKept || begin < left()) vector",
        "vector",
    ),
    Fault(
        "the map writes a vector beyond the row",
        "calibration_map.cu",
        "if (kKept && begin >= left()) return;",
        "",
    ),
    Fault(
        "the map reads a class beyond the row",
        "calibration_map.cu",
        "begin + i * lanes < left() ? load_as_compute(from[begin + i * lanes]) : missing",
        "load_as_compute(from[begin + i * lanes])",
    ),
    Fault(
        "the map writes a class beyond the row",
        "calibration_map.cu",
        "if (begin + i * lanes < left()) to[",
        "to[",
    ),
    Fault(
        "the map takes vectors of rows off the boundary",
        "calibration_map.cu",
        "args.classes % kVectorSize<Scalar> == 0 && ",
        "",
    ),
    Fault(
        "the map takes vectors of data off the boundary",
        "calibration_map.cu",
        " && addresses % kVectorBytes == 0;",
        ";",
    ),
    Fault(
        "the map leaves out the last vector of a thread",
        "calibration_map.cu",
        "n * step() < classes",
        "(n + 1) * step() < classes",
    ),
    Fault(
        "the map leaves out the last vector of a long row",
        "calibration_map.cu",
        "begin < left();) {",
        "begin + step() < left();) {",
    ),
    Fault(
        "the map takes out every one of several largest classes",
        "calibration_map.cu",
        "if (own_class != *top) x.top_vector = -1;",
        "",
    ),
    Fault(
        "the map finds the largest class in the first vector",
        "calibration_map.cu",
        "if (own_top > before) top_vector = begin;",
        "",
    ),
    Fault(
        "the map finds the largest class of a long row in the first vector",
        "calibration_map.cu",
        "if (two[0] > before) top_vector = begin;",
        "",
    ),
    Fault(
        "the map takes the largest class out of the first vector",
        "calibration_map.cu",
        "if (begin != top_vector) return;",
        "if (begin != 0) return;",
    ),
    Fault(
        "the map leaves out the sums of the last warp",
        "calibration_map.cu",
        "for (int warp = 1; warp < kWarpsPerBlock; ++warp) {",
        "for (int warp = 1; warp < kWarpsPerBlock - 1; ++warp) {",
    ),
    Fault(
        "too little shared memory for the largest of the map",
        "calibration_map.cu",
        "scratch[kWarpsPerBlock * MapGroup::kMost];",
        "scratch[4];",
    ),
    Fault(
        "too little shared memory for the sums of the map",
        "calibration_map.cu",
        "scratch[kWarpsPerBlock * MapGroup::kMost];",
        "scratch[kWarpsPerBlock];",
        1,
    ),
    Fault(
        "a row of NaN has a largest class in the map",
        "calibration_map.cu",
        "if (own_top == *largest && own_top > -kInfinity<Real>) {",
        "if (own_top == *largest) {",
    ),
    Fault(
        "a long row of NaN has a largest class in the map",
        "calibration_map.cu",
        "if (own_top == *largest && own_top > -kInfinity<Real>) {",
        "if (own_top == *largest) {",
        1,
    ),
    Fault(
        "the map leaves out what comes after the first pause in a long row",
        "calibration_map.cu",
        "sum = Part::kKept ? Sum(part) : sum + part;",
        "sum = part;",
    ),
    Fault(
        "the map writes rows beyond the last",
        "calibration_map.cu",
        "      if (!exists) return;\n",
        "",
    ),
    Fault(
        "the map writes gradients of rows beyond the last",
        "calibration_map.cu",
        "args.grad_input != nullptr && exists",
        "args.grad_input != nullptr",
    ),
    Fault(
        "the losses of one logit stop after the first round",
        "sigmoid_loss_strided.cu",
        "first < args.space.size; first += stride",
        "first < args.space.size; first += args.space.size",
    ),
    Fault(
        "the gradients of one logit stop after the first round",
        "sigmoid_loss_strided.cu",
        "first < args.space.size; first += stride",
        "first < args.space.size; first += args.space.size",
        1,
    ),
    Fault(
        "the plain losses of one logit stop after the first round",
        "sigmoid_loss_vectorized.cu",
        "first += threads * kSize",
        "first += args.space.size",
    ),
    Fault(
        "samples beyond the first run are not checked",
        "calibration_grid.cu",
        "row += static_cast<int64_t>(gridDim.x) * kWarpsPerBlock",
        "row += samples.rows",
    ),
    # ---- tails
    Fault("the tile's tail is not staged", "focal_loss_tiles.cuh", "tile[at] = source[at];", ";"),
    Fault(
        "the tile's tail is a vector of nothing", "focal_loss_tiles.cuh", "count & ~(kVectorSize<Scalar> - 1)", "count"
    ),
    Fault(
        "a tile's last vector is left out",
        "focal_loss_tiles.cuh",
        "if (k * kBlock < left) loaded",
        "if (k * kBlock < left - 1) loaded",
    ),
    Fault("vectors beyond a tile are loaded", "focal_loss_tiles.cuh", "if (k * kBlock < left) loaded", "loaded"),
    Fault(
        "the last tile has as many rows as others",
        "focal_loss_tiles.cuh",
        "left < most ? static_cast<uint32_t>(left) : most",
        "most",
    ),
    Fault(
        "warps with rows bring nothing to the sums",
        "focal_loss_tiles.cuh",
        "thread < plan.rows_per_tile || thread < kWarp",
        "thread < kWarp",
    ),
    Fault(
        "half a warp brings its rows to the sums",
        "focal_loss_tiles.cuh",
        "thread < plan.rows_per_tile || thread < kWarp",
        "thread < 16",
    ),
    Fault(
        "what rounding the base leaves is not made up for",
        "focal_loss_tiles.cuh",
        "return sum * power_of_two(-fmaf(base, scale, -scaled_base));",
        "return sum;",
    ),
    Fault(
        "the base's product is infinite",
        "focal_loss_tiles.cuh",
        "fabsf(base) < 0x1p30f ? 1.44269504f : 1.0f",
        "1.44269504f",
    ),
    Fault(
        "rows beyond a tile are read",
        "focal_loss_tiles.cuh",
        "        const int of = r < rows ? r : 0;\n",
        "        const int of = r;\n",
    ),
    Fault(
        "the tile's tail gets no gradient",
        "focal_loss_tiles.cuh",
        "  if (rest < count) {\n    const Real z",
        "  if (rest < 0) {\n    const Real z",
    ),
    Fault(
        "NaN in the gradient's tail",
        "focal_loss_tiles.cuh",
        "const Real z = load_as_compute(logits[rest]);",
        "const Real z = kNaN<Real>;",
    ),
    Fault(
        "loose elements are read one too far",
        "focal_loss_rows.cuh",
        "loose < classes && loose != target && (index",
        "loose <= classes && loose != target && (index",
    ),
    Fault(
        "loose elements before the vectors are left out",
        "focal_loss_rows.cuh",
        "(index < head || loose >= tail)) {\n    const Real values",
        "loose >= tail) {\n    const Real values",
    ),
    Fault(
        "loose gradients after the vectors are left out",
        "focal_loss_rows.cuh",
        "if (loose < classes && (index < head || loose >= tail)) {",
        "if (loose < classes && index < head) {",
    ),
    Fault(
        "values beyond the row are used",
        "focal_loss_rows.cuh",
        "if (first + k * threads < vectors) loaded[k] = load_vector(at + k",
        "loaded[k] = load_vector(at + k",
    ),
    Fault(
        "vectors beyond the row count as zeros",
        "focal_loss_rows.cuh",
        "nothing.at[e] = Store<Scalar>::from_compute(-kInfinity<Real>);",
        "nothing.at[e] = Store<Scalar>::from_compute(Real(0));",
    ),
    Fault(
        "a warp goes on a block further",
        "focal_loss_rows.cuh",
        "first < vectors; first += kUnroll * threads, at +=",
        "first < vectors; first += kUnroll * kBlock, at +=",
    ),
    Fault(
        "a place of a row is its neighbour's",
        "focal_loss_rows.cuh",
        "offsets[thread] = offset;",
        "offsets[thread ^ 1] = offset;",
    ),
    Fault(
        "a place of a gradient is its neighbour's",
        "focal_loss_rows.cuh",
        "offsets[thread] = offset;",
        "offsets[thread ^ 1] = offset;",
        1,
    ),
    Fault(
        "vector loads without regard to the boundary",
        "common.cuh",
        "return static_cast<int>(((0u - low) & (kVectorBytes - 1)) / sizeof(Scalar));",
        "return 0;",
    ),
    Fault(
        "vector stores without regard to the gradient's boundary",
        "focal_loss_rows.cuh",
        " || head_of_row != elements_to_boundary(grad)",
        "",
    ),
    Fault(
        "the last row of a tile lends its neighbour's gradient", "focal_loss_tiles.cuh", "r += r + 1 < rows;", "r += 1;"
    ),
    Fault(
        "a thread's own row is taken for a longer one",
        "focal_loss_thread_per_row.cuh",
        "if (classes <= middle)",
        "if (classes < middle)",
    ),
    Fault(
        "a thread's own row has its target among the others",
        "focal_loss_thread_per_row.cuh",
        "        target = Store<Scalar>::from_compute(-kInfinity<float>);\n",
        "",
    ),
    Fault(
        "the tail of a tile of gradients is not stored",
        "focal_loss_tiles.cuh",
        "if (at < count) target[at] = tile[at];",
        "",
    ),
    Fault(
        "a thread stores one vector of a tile of gradients",
        "focal_loss_tiles.cuh",
        "vector < vectors; vector += kBlock",
        "vector < vectors; vector += vectors",
    ),
    Fault(
        "elements beyond the last count",
        "sigmoid_loss_strided.cu",
        "if (element >= args.space.size) break;",
        "",
    ),
    Fault(
        "elements beyond the last have gradients",
        "sigmoid_loss_strided.cu",
        "if (element >= args.space.size) break;",
        "",
        1,
    ),
    Fault(
        "a pack's tail is not loaded", "sigmoid_loss_strided.cu", "if (first + e < args.space.size) {", "if (false) {"
    ),
    Fault(
        "a pack is loaded beyond the end",
        "sigmoid_loss_strided.cu",
        "const bool whole = first +",
        "const bool whole = first + 0 *",
    ),
    Fault(
        "a pack's tail gets no gradient",
        "sigmoid_loss_strided.cu",
        "if (first + e < args.space.size) args.grad_input",
        "if (first < 0) args.grad_input",
    ),
    Fault(
        "packs without regard to the boundary",
        "sigmoid_loss_strided.cu",
        "% sizeof(Pack<Scalar>) == 0;",
        "% 1 == 0;",
    ),
    Fault(
        "a plain pack's tail is read beyond the end",
        "sigmoid_loss_vectorized.cu",
        "elements.at[e] = e < size ? at[e] : missing;",
        "elements.at[e] = at[e];",
    ),
    Fault(
        "a plain pack is loaded beyond the end",
        "sigmoid_loss_vectorized.cu",
        "  if (size == kSize) {",
        "  if (size <= kSize) {",
    ),
    Fault(
        "elements beyond the last have a loss",
        "sigmoid_loss_vectorized.cu",
        "Store<Scalar>::from_compute(kLogitWithoutLoss<Real>));",
        "Store<Scalar>::from_compute(Real(0)));",
    ),
    Fault(
        "elements beyond the last count in the mean",
        "sigmoid_loss_vectorized.cu",
        "pack.counts = pack.size;",
        "pack.counts = kSize;",
    ),
    Fault(
        "losses are written beyond the last",
        "sigmoid_loss_vectorized.cu",
        "      if (e >= pack.size) break;\n",
        "",
    ),
    Fault(
        "a plain pack's tail gets no gradient",
        "sigmoid_loss_vectorized.cu",
        "if (e < pack.size) args.grad_input",
        "if (e < 0) args.grad_input",
    ),
    Fault(
        "a label is read beyond the last row",
        "sigmoid_loss_vectorized.cu",
        "if (exists) label = row_label(args, row);",
        "label = row_label(args, row);",
    ),
    Fault(
        "a pack has the label of its first row",
        "sigmoid_loss_vectorized.cu",
        "        if (j == divide.classes) {",
        "        if (false) {",
    ),
    Fault(
        "the row of a pack is one too small",
        "sigmoid_loss_vectorized.cu",
        "      row += 1;\n      j -= classes;",
        "      j -= classes;",
    ),
    Fault(
        "soft targets count as hard",
        "sigmoid_loss_vectorized.cu",
        "pack.is_hard = soft == Real(0);",
        "pack.is_hard = true;",
    ),
    Fault(
        "a vector of pixels has the label of its first",
        "sigmoid_loss_vectorized.cu",
        "outer * pixels + pack_of_pixels * kSize + e);",
        "outer * pixels + pack_of_pixels * kSize);",
    ),
    Fault(
        "pixels: a thread takes one class alone",
        "sigmoid_loss_vectorized.cu",
        "j < end; ++j",
        "j < begin + 1; ++j",
    ),
    Fault(
        "pixels: classes beyond the last are taken",
        "sigmoid_loss_vectorized.cu",
        "begin + places.chunk_classes < classes ? begin + places.chunk_classes : classes;",
        "begin + places.chunk_classes;",
    ),
    Fault(
        "pixels: only the first vector of a thread",
        "sigmoid_loss_vectorized.cu",
        "unit < places.units; unit += threads",
        "unit < places.units; unit += places.units",
    ),
    Fault(
        "pixels that are no whole vectors",
        "sigmoid_loss_vectorized.cu",
        "pixels % kVectorSize<Scalar> == 0 &&",
        "pixels % 1 == 0 &&",
    ),
    Fault(
        "plain packs without regard to the boundary",
        "sigmoid_loss_vectorized.cu",
        "% kVectorBytes == 0; }",
        "% 1 == 0; }",
    ),
    # ---- pairs of pixels
    Fault(
        "forward: pairs of the first round only",
        "focal_loss_two_rows_per_thread.cuh",
        "row += 2 * int64_t{gridDim.x} * kBlock",
        "row += args.rows",
    ),
    Fault(
        "backward: pairs of the first round only",
        "focal_loss_two_rows_per_thread.cuh",
        "row += 2 * int64_t{gridDim.x} * kBlock",
        "row += args.rows",
        1,
    ),
    Fault("pairs without regard to the boundary", "focal_loss.cu", "% (2 * kBytes) == 0;", "% 1 == 0;"),
    Fault("pairs of an odd plane", "focal_loss.cu", "layout.inner % 2 == 0 && rows % 2 == 0 && ", ""),
    Fault("pairs at an odd distance of planes", "focal_loss.cu", "layout.class_stride % 2 == 0", "true"),
    Fault("pairs at an odd distance of images", "focal_loss.cu", "layout.outer_stride % 2 == 0", "true"),
    Fault("pairs of pixels that are apart", "focal_loss.cu", "layout.inner_stride == 1 && ", ""),
    Fault(
        "pairs of classes beyond the last",
        "focal_loss_two_rows_per_thread.cuh",
        "if (k < count) pair = load_pair",
        "pair = load_pair",
    ),
    Fault("too few slots for what is over", "focal_loss_two_rows_per_thread.cuh", "if (over <= 4)", "if (over <= 8)"),
    Fault(
        "too few slots for what is over, 8",
        "focal_loss_two_rows_per_thread.cuh",
        "} else if (over <= 8)",
        "} else if (over <= 16)",
    ),
    Fault(
        "the second of a pair has the target of the first",
        "focal_loss_two_rows_per_thread.cuh",
        "values[1][k] = k == target[1]",
        "values[1][k] = k == target[0]",
    ),
    Fault(
        "the second of a pair has the upstream gradient of the first",
        "focal_loss_two_rows_per_thread.cuh",
        "p == 0 ? grad_loss : next_grad_loss",
        "grad_loss",
    ),
    Fault(
        "gradients of pairs beyond the last class are read",
        "focal_loss_two_rows_per_thread.cuh",
        "if (!kIsLast || k < left) values[k]",
        "values[k]",
    ),
    Fault(
        "gradients of pairs beyond the last class are written",
        "focal_loss_two_rows_per_thread.cuh",
        "if (!kIsLast || k < left) *to",
        "*to",
    ),
    # ---- the target's gradient, which goes over another value
    Fault("any thread writes the target's gradient", "focal_loss_rows.cuh", "index == writer", "index == 0"),
    Fault(
        "any thread writes the target's gradient, strided",
        "focal_loss_rows.cuh",
        "(target & (threads - 1)) == index",
        "index == 0",
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
    # ---- the classes of a thread
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
    Fault("too few slots for a short row", "focal_loss_tiles.cuh", "|| steps <= 13)", "|| steps <= 16)"),
    Fault(
        "too few slots for a short row, 10",
        "focal_loss_tiles.cuh",
        "  if (steps <= 10) return",
        "  if (steps <= 11) return",
    ),
    Fault(
        "too few slots for a short row, 8",
        "focal_loss_tiles.cuh",
        "    if (steps <= 8) return",
        "    if (steps <= 12) return",
    ),
    Fault(
        "more slots than are there for sure",
        "focal_loss_tiles.cuh",
        "tile_exp_sum<10, 8, kAround",
        "tile_exp_sum<10, 10, kAround",
    ),
    # ---- sizes
    Fault(
        "the tile of shared memory is one vector short",
        "focal_loss_tiles.cuh",
        "tile_bytes[kTileBytes];\n  __shared__ ExpSum<Real>",
        "tile_bytes[kTileBytes - 16];\n  __shared__ ExpSum<Real>",
    ),
    Fault(
        "the counter of finished blocks is not cleared",
        "grid_sum.cuh",
        "cudaMemsetAsync(to.finished, 0, sizeof(unsigned), static_cast<cudaStream_t>(stream));",
        "cudaSuccess;",
    ),
    Fault("one block fewer counts as all", "grid_sum.cuh", "== gridDim.x - 1;", "== gridDim.x - 2;"),
    # ---- divergence
    Fault(
        "a shuffle after divergence",
        "focal_loss_rows.cuh",
        "share = group_exp_sum(share, warp_lanes);",
        "if (is_live) share = group_exp_sum(share, warp_lanes);",
    ),
    Fault(
        "a barrier that rows beyond the end leave out",
        "row_loss_soft.cu",
        "    const int row_top = group.min(top);\n    const Real weight",
        "    if (row.row >= args.rows) continue;\n    const int row_top = group.min(top);\n    const Real weight",
    ),
    # ---- what only some callers want
    Fault(
        "NLL is wrong without the Brier score",
        "grid_confidence.cuh",
        "nll[g] += static_cast<double>(log_norm - log_ratio);",
        "nll[g] += static_cast<double>(with_brier ? log_norm - log_ratio : log_norm);",
    ),
    Fault(
        "a warp's lanes beyond the temperatures write",
        "grid_confidence.cuh",
        "if (thread >= plan.lanes || !has_temperature) return;",
        "if (thread >= plan.lanes) return;",
    ),
    Fault(
        "lanes beyond the temperatures write sums of shared gammas",
        "grid_confidence.cuh",
        "if (t >= block.n_temperatures) continue;",
        "",
    ),
    Fault("rows beyond the last count, shared", "grid_confidence.cuh", "if (!counts) continue;", ""),
    Fault("rows beyond the last count", "grid_confidence.cuh", "if (!counts) continue;", "", 1),
    Fault("only the first part of a long row", "grid_confidence.cuh", "if (first > 0) fill(first);", ""),
    Fault(
        "the last part of a long row stays for the next pass",
        "grid_confidence.cuh",
        "if (classes > capacity) fill(0);",
        "",
    ),
    Fault(
        "beyond the row's last class anything",
        "grid_confidence.cuh",
        "k < count && first + k != top",
        "first + k != top",
    ),
    Fault(
        "shared gammas beyond those of a launch",
        "calibration_grid.cu",
        "if (tile.count == kSharedGammas) flush();",
        "if (tile.count == kSharedGammas) tile = {};",
    ),
    Fault(
        "gradients are written where none are wanted",
        "focal_loss_rows.cuh",
        "    if (args.grad_logits == nullptr) continue;\n",
        "",
    ),
    Fault(
        "the row's digits end one too early",
        "grid_bins.cuh",
        "while (row_digits < 4 && ",
        "while (row_digits < 1 && ",
    ),
    Fault("tied confidences keep no order", "grid_bins.cuh", "counts[digit] > 1", "counts[digit] > 1000000"),
    Fault(
        "a cut that shares its digits counts by itself",
        "grid_bins.cuh",
        "shared.counts[shared.leader[c]]",
        "shared.counts[c]",
    ),
    Fault(
        "the low half of a bin's sum carries nothing",
        "grid_bins.cuh",
        "+ low < low ? 1 : 0;",
        "+ low < low ? 0 : 0;",
    ),
    Fault(
        "samples beyond the bins are counted",
        "grid_bins.cuh",
        "if (b < 0 || b >= bins) continue;",
        "if (b < 0) continue;",
    ),
    Fault(
        "the low half of a sum of confidences carries nothing",
        "calibration_sums.cu",
        "+ low < low ? 1 : 0;",
        "+ low < low ? 0 : 0;",
    ),
    Fault(
        "buckets beyond those of a pass are written",
        "calibration_sums.cu",
        "if (b < 0 || b >= buckets) continue;",
        "if (b < 0) continue;",
    ),
    Fault(
        "an ignored row is read",
        "focal_loss_rows.cuh",
        "if (r < rows && labels[r] >= 0) {\n          shares",
        "if (r < rows && labels[r] != kOutOfRange) {\n          shares",
    ),
    # ---- spline scaling
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

# By the name of the fault: why no result can depend on it.
REDUNDANT = {
    "calibration_sums.cu: __syncthreads 3": "a thread clears no bucket but those that it has written out itself",
    "the last row of a tile lends its neighbour's gradient": "a whole vector ends with the last row at the latest, and "
    "what its last element fetches is for no other",
    "rows beyond a tile are read": "in 32 bits they lie within the tile's memory, and their sum goes nowhere; "
    "in double, which is not compiled for the faults, they lie beyond it",
    "an ignored row is read": "what it brings is not looked at: leaving it out saves time",
}


def synchronization() -> Iterator[Fault]:
    """A fault for every barrier and fence, which is deleted, and every atomic, which is made a plain update."""
    for path in sorted([*CUDA.glob("*.cu"), *CUDA.glob("*.cuh")]):
        text = path.read_text()
        seen: dict[str, int] = {}
        for match in re.finditer(r"__sync(?:threads|warp)\(\);|__threadfence\(\);|atomicAdd\(|atomicMin\(", text):
            what = match[0].rstrip("();")
            nth = seen[what] = seen.get(what, -1) + 1
            new = "" if what.startswith("__") else f"mutant::{what}("
            yield Fault(f"{path.name}: {what} {nth + 1}", path.name, match[0], new, nth)


def all_faults() -> list[Fault]:
    return [*synchronization(), *FAULTS]


# What an atomic becomes.
PLAIN = """namespace mutant {
template <typename T, typename U>
__device__ inline T atomicAdd(T* at, U value) {
  const T old = *at;
  *at = old + static_cast<T>(value);
  return old;
}
template <typename T>
__device__ inline T atomicMin(T* at, T value) {
  const T old = *at;
  *at = value < old ? value : old;
  return old;
}
}  // namespace mutant
"""


class Workshop:
    """A copy of the sources, their objects without a fault, and the library of one fault at a time."""

    def __init__(self, folder: Path) -> None:
        self.build, self.folder, self.csrc, self.base = build, folder, folder / "csrc", folder / "base"
        self.is_new = not (self.base / "kernels.so").is_file()
        shutil.rmtree(self.csrc, ignore_errors=True)
        shutil.copytree(CUDA.parent, self.csrc)
        for kernel in self.build.kernels(self.csrc):
            # The other types differ in no barrier, tail or stride.
            lines = kernel.read_text().splitlines(keepends=True)
            kernel.write_text("".join(x for x in lines if not re.match(r"FK_INSTANTIATE\((Half|BFloat16|double)\)", x)))
        common = self.csrc / "cuda/common.cuh"  # which all of them include first
        common.write_text(common.read_text().replace("namespace focalkern", PLAIN + "namespace focalkern", 1))
        if self.is_new:
            shutil.rmtree(self.base, ignore_errors=True)
            self.base.mkdir()
            others = self.build.interpreter_commands(self.base, self.csrc)
            self.compile(self.build.kernels(self.csrc), self.base, others)

    def compile(self, kernels: list[Path], folder: Path, others: list[list[str]] = []) -> Path:  # noqa: B006
        code = "arch=compute_90,code=compute_90"
        few = "-DFOCALKERN_ONLY_FLOAT"
        others = [[*command, few] if "harness.cpp" in " ".join(command) else command for command in others]
        self.build.run_all([self.build.nvcc_command(k, folder, self.csrc, code) for k in kernels] + others)
        return self.build.link(folder)

    def library(self, fault: Fault) -> Path:
        file = self.csrc / "cuda" / fault.file
        text = file.read_text()
        mutant = self.folder / "mutant"
        shutil.rmtree(mutant, ignore_errors=True)
        shutil.copytree(self.base, mutant)
        file.write_text(fault.plant(text))
        try:
            return self.compile([file.with_name(name) for name in COMPILED.get(fault.file, (fault.file,))], mutant)
        finally:
            file.write_text(text)

    def run(self, library: Path, cases: str | None, choice: str | None, settings: str = "") -> tuple[bool, str]:
        """Whether all of the cases pass; and the first report, or the last line."""
        chosen = f",cases={cases}" if cases else ""
        code, output = self.in_a_child(
            ["-p", "no:cacheprovider", "-q", "-x", "--tb=line", *(["-k", choice] if choice else []),
             str(ROOT / "tests/kernels/test_cuda_ptx.py")],
            f"library={library}{chosen}{settings}",
        )  # fmt: skip
        if code < 0:
            return False, f"ended by signal {-code}"
        if code not in (0, 1):  # interrupted, misused, or nothing was collected
            raise RuntimeError(f"pytest ended with {code}: {output[-2000:]}")
        report = re.search(r"ptxrun: \S+?: (block.*)", output) or re.search(r"^E +(.*)", output, re.MULTILINE)
        return code == 0, report[1][:120] if report else output.strip().splitlines()[-1]

    def in_a_child(self, arguments: list[str], settings: str) -> tuple[int, str]:
        """Runs pytest in a copy of this process, which has imported torch once for all."""
        path = self.folder / "output"
        if (child := os.fork()) == 0:
            with path.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ["FOCALKERN_PTX"] = settings
            os.chdir(ROOT)
            code = int(pytest.main(arguments))
            sys.stdout.flush()
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), path.read_text()


@dataclass(frozen=True)
class Verdict:
    fault: str
    result: str  # caught, redundant, or MISSED; also REDUNDANT BUT CAUGHT
    report: str
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.result in ("caught", "redundant")


def verdicts(folder: Path, faults: list[Fault]) -> Iterator[Verdict]:
    workshop = Workshop(folder)
    began = time.monotonic()
    if workshop.is_new:
        passed, report = workshop.run(workshop.base / "kernels.so", None, None)
        if not passed:
            yield Verdict("no fault", "MISSED", f"the cases fail without one: {report}", time.monotonic() - began)
            return
    for fault in faults:
        began = time.monotonic()
        library = workshop.library(fault)
        cases, choice = CASES.get(fault.file), CHOICE.get(fault.file)
        passed, report = workshop.run(library, cases, choice)
        if passed:
            passed, report = workshop.run(library, cases, choice, ",random_lanes=1")
        reason = REDUNDANT.get(fault.name)
        result = (
            ("MISSED" if reason is None else "redundant")
            if passed
            else "caught"
            if reason is None
            else "REDUNDANT BUT CAUGHT"
        )
        yield Verdict(fault.name, result, reason if passed and reason else report, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tools/cuda/mutants.py", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument(
        "--out", type=Path, help="keep what is built in this folder; the objects there are taken as they are"
    )
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    faults = [
        f
        for f in all_faults()
        if not arguments.words or any(word in f.name or word in f.file for word in arguments.words)
    ]
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary, "mutants")
        for verdict in verdicts(folder, faults):
            found.append(verdict)
            print(f"{verdict.result:9} {verdict.fault}: {verdict.report} ({verdict.seconds:.0f} s)", flush=True)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["fault", "result", "report"])
            writer.writerows([v.fault, v.result, v.report] for v in found)
    wrong = [v for v in found if not v.is_right]
    print(f"{len(found) - len(wrong)} of {len(found)} faults caught or redundant")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
