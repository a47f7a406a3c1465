"""Sums over rows for the fit of spline scaling in plain torch, in blocks of rows, in float64.

Names, arguments and results are those of the compiled module:

* ``input`` [N, C], logits or probabilities, with ``temperature`` T and ``floor`` e; ``target`` [N] int64;
  ``weight`` [N];
* ``input`` of the sums in the curve may also be the features [2, N, C] float64 of rows without impossible classes;
* the curve: ``knots`` [m], ``basis`` [m + 1, 4, m] (the coefficients of the spline that is 1 at one knot and 0 at the
  others), ``slope`` a and ``values`` [m]; they, and derivatives in them, are on the CPU;
* ``of_x``, ``bias``: v and b [C], or None; for features of few classes ``of_x`` may be D [C, C];
* ``extra``: [N, C], added to the scores, or None;
* ``keep_zeros``: a logit of -inf keeps the probability 0.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from focalkern.fallback._spline_arguments import FEW_CLASSES, check_curve, check_input, check_rows

__all__ = [
    "spline_curve_sums",
    "spline_features",
    "spline_histogram",
    "spline_linear_sums",
    "spline_log_probs",
    "spline_matrix_hessian",
    "spline_row_losses",
    "spline_spread",
    "spline_temperature_sums",
]

_BLOCK = 1 << 19  # entries
_HESSIAN_BLOCK = 1 << 13  # entries, each with 4 m coefficients
_LARGE = 0.75  # above this P, 1 - P is computed as the sum of the other classes

# Log-odds are counted in bins of 1/64 from -60 to 60.
_BINS_PER_UNIT, _HISTOGRAM_END = 64, 60


def spline_temperature_sums(
    input: Tensor, target: Tensor, weight: Tensor, betas: Tensor, floor: float, is_probs: bool
) -> Tensor:
    """[2, B]: the sum of -w log((1 - e) softmax(z beta)_target + e / C) for each beta, and its derivative in beta.

    With e = 0, a label whose logit is -inf has an infinite loss.
    """
    check_rows("spline_temperature_sums", input, target, weight)
    sums = torch.zeros(2, len(betas), dtype=torch.float64)
    for block, labels, w in _blocks(input, target.unsqueeze(1), weight):
        gap = _logits(block, is_probs)
        gap = gap - gap.amax(-1, keepdim=True)
        for i, beta in enumerate(betas.tolist()):
            log_q = (gap * beta).log_softmax(-1)
            q = log_q.exp()
            # Impossible classes contribute 0 to the mean under q; 0 * -inf would be NaN.
            rise = (gap.gather(1, labels).squeeze(1)) - (q * gap.masked_fill(q == 0, 0.0)).sum(-1)
            log_p, share = log_q.gather(1, labels).squeeze(1), torch.ones_like(w)
            if floor > 0:
                kept = log_p.exp() * (1 - floor)
                p = kept + floor / input.shape[1]
                log_p, share = p.log(), kept / p
                rise = rise.masked_fill(share == 0, 0.0)
            sums[0, i] -= float((w * log_p).sum())
            sums[1, i] -= float((w * share * rise).sum())
    return sums


def spline_spread(input: Tensor, weight: Tensor, scale: float, lowest: float, is_probs: bool) -> float:
    """The sum over rows of w times the variance of logits / ``scale``, each raised to at least the row's maximum -
    ``lowest``."""
    check_rows("spline_spread", input, None, weight)
    total = 0.0
    for block, w in _blocks(input, weight):
        scores = _logits(block, is_probs) / scale
        scores = scores.maximum(scores.amax(-1, keepdim=True) - lowest)
        total += float((w * scores.var(-1, correction=0)).sum())
    return total


def spline_histogram(input: Tensor, weight: Tensor, temperature: float, floor: float, is_probs: bool) -> Tensor:
    """[7680]: histogram of the log-odds u with the weights w P (1 - P), in bins of 1/64 from -60 to 60."""
    check_rows("spline_histogram", input, None, weight)
    n_bins = 2 * _HISTOGRAM_END * _BINS_PER_UNIT
    counts = torch.zeros(n_bins, dtype=torch.float64)
    for block, w in _blocks(input, weight):
        x, u = _features(block, temperature, floor, is_probs)
        p = x.exp()
        bins = ((u + _HISTOGRAM_END) * _BINS_PER_UNIT).to(torch.int64).clamp_(0, n_bins - 1)
        counts += torch.bincount(bins.reshape(-1), (w.unsqueeze(1) * p * (1 - p)).reshape(-1), n_bins).cpu()
    return counts


def spline_log_probs(input: Tensor, temperature: float, floor: float, is_probs: bool) -> Tensor:
    """x [N, C], the floored log-probabilities."""
    check_input("spline_log_probs", input)
    return torch.cat([_features(block, temperature, floor, is_probs)[0] for (block,) in _blocks(input)])


def spline_features(input: Tensor, temperature: float, floor: float, is_probs: bool) -> Tensor:
    """[2, N, C]: the floored log-probabilities x and their log-odds u. On the CPU only."""
    check_input("spline_features", input)
    blocks = [torch.stack(_features(block, temperature, floor, is_probs)) for (block,) in _blocks(input)]
    return torch.cat(blocks, 1)


def spline_curve_sums(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    temperature: float,
    floor: float,
    knots: Tensor,
    basis: Tensor,
    slope: float,
    values: Tensor,
    of_x: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
) -> tuple[float, Tensor, Tensor]:
    r"""Value, gradient [m + 1] and Hessian [m + 1, m + 1] of the sum of -w log p_target in (a, f).

    With F the derivative of a score in (a, f), which is x and the spline's basis, and m its mean over the classes of a
    row, the gradient is :math:`\sum w (m - F_y)` and the Hessian :math:`\sum w (\sum_j p_j F_j F_j' - m m')`. A basis
    function is a sum of powers s^k of the offset s on each piece, so that sums of p s^k are all that is read of the
    entries.
    """
    op = "spline_curve_sums"
    check_rows(op, input, target, weight, of_curve=True)
    check_curve(op, input, knots, basis, values, of_x, bias, extra)
    device, m = input.device, len(knots)
    pieces, of_entries = m + 1, basis.to(device)
    flat = of_entries.reshape(pieces * 4, m)
    nll = 0.0
    gradient = torch.zeros(m + 1, dtype=torch.float64)
    hessian = torch.zeros(m + 1, m + 1, dtype=torch.float64)
    for block, labels, w, *added in _blocks(_by_row(input), target.unsqueeze(1), weight, *_given(extra)):
        x, u = _features(block, temperature, floor, is_probs)
        piece, s = _located(u, knots.to(device))
        scores = _plus((1 + slope) * x + _curve(basis @ values, piece, s), x, of_x, bias, *added)
        log_probs = _masked(scores, block, is_probs, keep_zeros).log_softmax(-1)
        nll -= float((log_probs.gather(1, labels).squeeze(1) * w).sum())
        power = log_probs.exp_()
        with_x = power * x
        squared = (with_x * x).sum(1) @ w
        # [n, pieces]: sums of p s^k and of p x s^k over the classes of a row whose u lies on a piece.
        none = x.new_zeros(len(w), pieces)
        sums, sums_with_x = [], []
        for k in range(7):
            sums.append(none.scatter_add(1, piece, power))
            power *= s
            if k < 4:
                sums_with_x.append(none.scatter_add(1, piece, with_x))
                with_x *= s
        means = torch.cat([sums_with_x[0].sum(1, keepdim=True), torch.stack(sums[:4], -1).flatten(1) @ flat], 1)
        powers = s.gather(1, labels) ** torch.arange(4, dtype=torch.float64, device=device)
        of_piece = of_entries[piece.gather(1, labels).squeeze(1)]
        of_target = torch.cat([x.gather(1, labels), torch.einsum("nk,nkm->nm", powers, of_piece)], 1)
        gradient += (w @ (means - of_target)).cpu()
        moments = torch.stack([w @ one for one in sums], -1).unfold(1, 4, 1)  # [pieces, 4, 4], of p s^(k + l)
        part = torch.zeros_like(hessian, device=device)
        part[0, 0] = squared
        part[0, 1:] = torch.einsum("ik,ikm->m", torch.stack([w @ one for one in sums_with_x], -1), of_entries)
        part[1:, 0] = part[0, 1:]
        part[1:, 1:] = torch.einsum("ikm,ikl,iln->mn", of_entries, moments, of_entries)
        hessian += (part - (means * w.unsqueeze(1)).T @ means).cpu()
    return nll, gradient, hessian


def spline_matrix_hessian(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    temperature: float,
    floor: float,
    knots: Tensor,
    basis: Tensor,
    slope: float,
    values: Tensor,
    of_x: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
) -> Tensor:
    r"""[P, P]: the Hessian of the sum of -w log p_target in (a, f) [m + 1], the rows of D and b; 0 in its first block.

    For at most :data:`FEW_CLASSES` classes. With F and m as in :func:`spline_curve_sums` and z = (x, 1), the derivative
    in the parameters of a class, the other blocks are the sums of

    .. math:: w p_j (F_j - m) z', \qquad w p_j (\delta_{jk} - p_k) z z'.
    """
    op, n_classes, n_curve = "spline_matrix_hessian", input.shape[-1], knots.numel() + 1
    check_rows(op, input, target, weight, of_curve=True)
    check_curve(op, input, knots, basis, values, of_x, bias, extra)
    if n_classes > FEW_CLASSES:
        raise ValueError(f"{op}: input must have at most {FEW_CLASSES} classes, got {n_classes}")
    device, size = input.device, n_classes * (n_classes + 1)
    of_entries = basis.to(device)
    own = torch.zeros(n_classes, n_classes, (n_classes + 1) ** 2, dtype=torch.float64, device=device)
    cross = torch.zeros(n_classes * n_curve, n_classes + 1, dtype=torch.float64, device=device)
    for block, w, *added in _blocks(_by_row(input), weight, *_given(extra), entries=_HESSIAN_BLOCK):
        x, u = _features(block, temperature, floor, is_probs)
        piece, s = _located(u, knots.to(device))
        scores = _plus((1 + slope) * x + _curve(basis @ values, piece, s), x, of_x, bias, *added)
        p = _masked(scores, block, is_probs, keep_zeros).softmax(-1)
        share, z = p * w.unsqueeze(1), torch.cat([x, torch.ones_like(x[:, :1])], 1)
        powers = s.unsqueeze(-1) ** torch.arange(4, dtype=torch.float64, device=device)
        slopes = torch.cat([x.unsqueeze(-1), torch.einsum("njk,njkm->njm", powers, of_entries[piece])], -1)
        slopes -= torch.einsum("nj,njm->nm", p, slopes).unsqueeze(1)
        cross += (share.unsqueeze(-1) * slopes).flatten(1).T @ z
        products = (z.unsqueeze(2) * z.unsqueeze(1)).flatten(1)
        own -= ((p.unsqueeze(2) * share.unsqueeze(1)).flatten(1).T @ products).view_as(own)
        own.diagonal().add_((share.T @ products).T)
    places = torch.arange(size, device=device).reshape(n_classes, -1)
    order = torch.cat([places[:, :-1].reshape(-1), places[:, -1]])  # from class by class to D, b
    of_classes = own.reshape(n_classes, n_classes, n_classes + 1, -1).transpose(1, 2).reshape(size, size)
    of_both = cross.reshape(n_classes, n_curve, -1).transpose(0, 1).reshape(n_curve, size)[:, order]
    nothing = of_both.new_zeros(n_curve, n_curve)
    return torch.cat([torch.cat([nothing, of_both], 1), torch.cat([of_both.T, of_classes[order][:, order]], 1)])


def spline_row_losses(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    temperature: float,
    floor: float,
    knots: Tensor,
    basis: Tensor,
    slope: float,
    values: Tensor,
    of_x: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
) -> Tensor:
    """[2, N]: the loss -log p_target and the Brier score of each row, without its weight."""
    op = "spline_row_losses"
    check_rows(op, input, target, weight, of_curve=True)
    check_curve(op, input, knots, basis, values, of_x, bias, extra)
    found = []
    for block, labels, *added in _blocks(_by_row(input), target.unsqueeze(1), *_given(extra)):
        x, u = _features(block, temperature, floor, is_probs)
        curve = _curve(basis @ values, *_located(u, knots.to(input.device)))
        scores = _plus((1 + slope) * x + curve, x, of_x, bias, *added)
        log_probs = _masked(scores, block, is_probs, keep_zeros).log_softmax(-1)
        of_target = log_probs.gather(1, labels).squeeze(1)
        found.append(torch.stack([-of_target, log_probs.exp().square().sum(1) - 2 * of_target.exp() + 1]))
    return torch.cat(found, 1)


def spline_linear_sums(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    temperature: float,
    floor: float,
    knots: Tensor,
    basis: Tensor,
    slope: float,
    values: Tensor,
    of_x: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
    want_slopes: bool,
) -> tuple[float, Tensor, Tensor, Tensor, Tensor | None]:
    """Value of the sum of -w log p_target and its gradients in (a, f) [m + 1], of_x [C] or [C, C], and b [C].

    With ``want_slopes`` also the gradient in the scores [N, C], else None.
    """
    op = "spline_linear_sums"
    check_rows(op, input, target, weight, of_curve=True)
    check_curve(op, input, knots, basis, values, of_x, bias, extra)
    device, pieces = input.device, len(knots) + 1
    nll, sum_of_x = 0.0, 0.0
    moments = torch.zeros(pieces, 4, dtype=torch.float64, device=device)
    of_bias = torch.zeros(input.shape[-1], dtype=torch.float64, device=device)
    matrix = of_x is not None and of_x.dim() == 2
    of_weight = torch.zeros_like(of_x if of_x is not None and matrix else of_bias)
    slopes = []
    for block, labels, w, *added in _blocks(_by_row(input), target.unsqueeze(1), weight, *_given(extra)):
        x, u = _features(block, temperature, floor, is_probs)
        piece, s = _located(u, knots.to(device))
        scores = _plus((1 + slope) * x + _curve(basis @ values, piece, s), x, of_x, bias, *added)
        log_probs = _masked(scores, block, is_probs, keep_zeros).log_softmax(-1)
        nll -= float((log_probs.gather(1, labels).squeeze(1) * w).sum())
        # Softmax minus one-hot; all gradients are weighted sums of it.
        residual = log_probs.exp_()
        residual.scatter_add_(1, labels, residual.new_full((len(residual), 1), -1.0))
        residual *= w.unsqueeze(1)
        if want_slopes:
            slopes.append(residual.clone())
        of_bias += residual.sum(0)
        of_classes = (residual * x).sum(0)
        of_weight += residual.T @ x if matrix else of_classes
        sum_of_x += float(of_classes.sum())
        places = piece.reshape(-1)
        for k in range(4):
            moments[:, k] += torch.bincount(places, residual.reshape(-1), pieces)
            residual *= s
    of_curve = torch.einsum("ik,ikm->m", moments.cpu(), basis)
    gradient = torch.cat([torch.tensor([sum_of_x], dtype=torch.float64), of_curve])
    return nll, gradient, of_weight, of_bias, torch.cat(slopes) if want_slopes else None


def _given(column: Tensor | None) -> tuple[Tensor, ...]:
    return () if column is None else (column,)


def _blocks(input: Tensor, *columns: Tensor, entries: int = _BLOCK) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of the input [N, C] and the columns [N, ...], about ``entries`` logits each."""
    rows = max(1, entries // input.shape[-1])
    return zip(input.split(rows), *(column.split(rows) for column in columns), strict=True)


def _by_row(input: Tensor) -> Tensor:
    """Features as [N, 2, C]; other input unchanged."""
    return input.transpose(0, 1) if input.dim() == 3 else input


def _logits(input: Tensor, is_probs: bool) -> Tensor:
    wide = input.to(torch.float64)
    return wide.log() if is_probs else wide


def _features(input: Tensor, temperature: float, floor: float, is_probs: bool) -> tuple[Tensor, Tensor]:
    """x and u [n, C]: floored log-probabilities and their log-odds."""
    if input.dim() == 3:
        x, u = input.unbind(1)
        return x, u
    probs = (_logits(input, is_probs) / temperature).softmax(-1) * (1 - floor) + floor / input.shape[-1]
    x = probs.log()
    large = probs > _LARGE
    others = probs.masked_fill(large, 0.0).sum(-1, keepdim=True)
    return x, x - torch.where(large, others, 1 - probs).log()


def _located(u: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    """The piece of every u, and u minus the origin of its piece."""
    piece = torch.bucketize(u, knots)
    return piece, u - torch.cat([knots[:1], knots])[piece]


def _curve(coefficients: Tensor, piece: Tensor, s: Tensor) -> Tensor:
    c0, c1, c2, c3 = (column.contiguous() for column in coefficients.to(s.device).unbind(1))
    result = c3[piece] * s
    for column in (c2, c1):
        result = result.add_(column[piece]).mul_(s)
    return result.add_(c0[piece])


def _plus(scores: Tensor, x: Tensor, of_x: Tensor | None, *terms: Tensor | None) -> Tensor:
    if of_x is not None:
        of_x = of_x.to(x.device)
        scores += of_x * x if of_x.dim() == 1 else x @ of_x.T
    for term in terms:
        if term is not None:
            scores += term.to(x.device)
    return scores


def _masked(scores: Tensor, input: Tensor, is_probs: bool, keep_zeros: bool) -> Tensor:
    if not keep_zeros or input.dim() == 3:
        return scores
    return scores.masked_fill_(input == (0 if is_probs else -torch.inf), -torch.inf)
