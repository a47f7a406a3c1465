"""The NLL of the focal calibration map with its derivatives, summed over rows, in plain torch and float64."""

import torch
from torch import Tensor

from focalkern.fallback.calibration_map import calibration_map

__all__ = ["map_nll_sums"]

# Logits per block: on the CPU as many as fit its caches, on other devices enough to use the device fully.
_BLOCK = {"cpu": 1 << 19}
_OTHER_BLOCK = 1 << 24
_LOGITS = 0
_SUMS = 7


def map_nll_sums(
    input: Tensor, target: Tensor, share: Tensor, gammas: Tensor | None, betas: Tensor, is_probs: bool
) -> Tensor:
    r"""[B, 7] on the CPU: for each network, with beta = 1/T, the sums over its rows of share times

    0 to 2. the loss -log p_y, its slope and its curvature in beta;
    3. the largest logit minus that of the target;
    4 to 6. with gammas, the slope in gamma, the derivative in gamma and beta, the curvature in gamma.

    Args:
        input: [B, N, C].
        target: [B, N] int64.
        share: [B, N] float64.
        gammas: [B] float64 on the CPU, or None for gamma = 0 without derivatives in it.
        betas: [B] float64 on the CPU; the sums of a network whose beta is NaN are 0.
        is_probs: whether ``input`` holds probabilities.
    """
    found = torch.zeros(len(input), _SUMS, dtype=torch.float64, device=input.device)
    rows = max(1, _BLOCK.get(input.device.type, _OTHER_BLOCK) // input.shape[2])
    for network, beta in enumerate(betas.tolist()):
        if beta != beta:
            continue
        parts = (one[network].split(rows) for one in (input, target, share))
        for block, labels, part in zip(*parts, strict=True):
            scores = block.to(torch.float64)
            scores = scores.log() if is_probs else scores
            scores = scores - scores.amax(-1, keepdim=True)
            of_target = scores.gather(1, labels.unsqueeze(1)).squeeze(1)
            # A row with one possible class does not depend on the map.
            counted = torch.where((scores > -torch.inf).sum(1) > 1, part, 0.0)
            if gammas is None:
                sums = _at_zero(scores, of_target, counted, beta)
            else:
                sums = _with_gamma(scores, labels, counted, float(gammas[network]), beta)
            gap = -_product(counted, of_target)
            found[network] += torch.stack([*sums[:3], gap, *sums[3:]])
    return found.cpu()  # the only synchronisation


def _product(share: Tensor, values: Tensor) -> Tensor:
    return (share * torch.where(share == 0, 0.0, values)).sum()


def _at_zero(scores: Tensor, of_target: Tensor, share: Tensor, beta: float) -> list[Tensor]:
    finite = scores.masked_fill(scores == -torch.inf, 0.0)
    q = (beta * finite).exp().masked_fill(scores == -torch.inf, 0.0)
    total = q.sum(1)
    q = q / total.unsqueeze(1)
    mean = (q * finite).sum(1)
    variance = (q * (finite - mean.unsqueeze(1)).square()).sum(1)
    sums = (total.log() - beta * of_target, mean - of_target, variance)
    nothing = scores.new_zeros(())
    return [*(_product(share, one) for one in sums), nothing, nothing, nothing]


def _with_gamma(scores: Tensor, labels: Tensor, share: Tensor, gamma: float, beta: float) -> list[Tensor]:
    of = [torch.tensor(value, dtype=torch.float64, device=scores.device, requires_grad=True) for value in (gamma, beta)]
    with torch.enable_grad():
        kept = share != 0
        log_p = calibration_map(scores[kept], of[0], 1 / of[1], _LOGITS, True)
        value = -(share[kept] * log_p.gather(1, labels[kept].unsqueeze(1)).squeeze(1)).sum()
        by_gamma, by_beta = torch.autograd.grad(value, of, create_graph=True)
        twice = [torch.autograd.grad(one, of, retain_graph=True) for one in (by_gamma, by_beta)]
    found = (value, by_beta, twice[1][1], by_gamma, twice[0][1], twice[0][0])
    return [one.detach() for one in found]
