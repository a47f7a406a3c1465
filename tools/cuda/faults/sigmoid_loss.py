"""Planted faults of the losses of one logit."""

from tools.cuda.faults.fault import Fault

FAULTS = [
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
        "sigmoid_loss_pack.cuh",
        "first += threads * kSize",
        "first += args.space.size",
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
        "sigmoid_loss_pack.cuh",
        "elements.at[e] = e < size ? at[e] : missing;",
        "elements.at[e] = at[e];",
    ),
    Fault(
        "a plain pack is loaded beyond the end",
        "sigmoid_loss_pack.cuh",
        "  if (size == kSize) {",
        "  if (size <= kSize) {",
    ),
    Fault(
        "elements beyond the last have a loss",
        "sigmoid_loss_pack.cuh",
        "Store<Scalar>::from_compute(kLogitWithoutLoss<Real>));",
        "Store<Scalar>::from_compute(Real(0)));",
    ),
    Fault(
        "elements beyond the last count in the mean",
        "sigmoid_loss_pack.cuh",
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
        "sigmoid_loss_pack.cuh",
        "if (exists) label = row_label<may_score>(args, row);",
        "label = row_label<may_score>(args, row);",
    ),
    Fault(
        "a pack has the label of its first row",
        "sigmoid_loss_pack.cuh",
        "        if (j == divide.classes) {",
        "        if (false) {",
    ),
    Fault(
        "the row of a pack is one too small",
        "sigmoid_loss_pack.cuh",
        "      row += 1;\n      j -= classes;",
        "      j -= classes;",
    ),
    Fault(
        "soft targets count as hard",
        "sigmoid_loss_pack.cuh",
        "pack.is_hard = soft == Real(0);",
        "pack.is_hard = true;",
    ),
    Fault(
        "a vector of pixels has the label of its first",
        "sigmoid_loss_pack.cuh",
        "outer * pixels + pack_of_pixels * kSize + e);",
        "outer * pixels + pack_of_pixels * kSize);",
    ),
    Fault(
        "pixels: a thread takes one class alone",
        "sigmoid_loss_pack.cuh",
        "j < end; ++j",
        "j < begin + 1; ++j",
    ),
    Fault(
        "pixels: classes beyond the last are taken",
        "sigmoid_loss_pack.cuh",
        "begin + places.chunk_classes < classes ? begin + places.chunk_classes : classes;",
        "begin + places.chunk_classes;",
    ),
    Fault(
        "pixels: only the first vector of a thread",
        "sigmoid_loss_pack.cuh",
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
    Fault(
        "plain: every scored loss is the varifocal loss",
        "sigmoid_loss_vectorized.cu",
        "scored_loss_of(args.loss_kind)};",
        "ScoredLoss::kVarifocal};",
    ),
    Fault(
        "scores are not read",
        "sigmoid_loss_strided.cu",
        "if (args.scores.data != nullptr && label",
        "if (false && label",
    ),
    Fault(
        "the first of two scores in a pack counts as hard",
        "sigmoid_loss_pack.cuh",
        "    pack.is_hard = pack.is_hard && pack.scored < 0;\n",
        "",
    ),
    Fault(
        "the score of a label is 1",
        "sigmoid_loss_pack.cuh",
        "      score = score_of_match(read_share<Real>(args.scores, row));\n",
        "",
    ),
    Fault(
        "every scored loss is the varifocal loss",
        "sigmoid_loss_strided.cu",
        "terms_of<Loss>(found, args.constant, scored_loss_of(args.loss_kind)).loss",
        "terms_of<Loss>(found, args.constant, ScoredLoss::kVarifocal).loss",
    ),
    Fault(
        "every scored loss has the gradient of the varifocal loss",
        "sigmoid_loss_strided.cu",
        "terms = terms_of<Loss>(found, args.constant, scored_loss_of(args.loss_kind));",
        "terms = terms_of<Loss>(found, args.constant, ScoredLoss::kVarifocal);",
    ),
]
