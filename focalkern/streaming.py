"""The calibration grid over data that comes in batches, from files larger than memory or from several processes."""

import copy
import datetime
import hashlib
import json
import math
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from focalkern.ops.calibration_grid import (
    _ESTIMATORS,
    _INPUT_KINDS,
    CalibrationGrid,
    _axis,
    _check_option,
    _criteria,
    calibration_grid,
)
from focalkern.ops.calibration_sums import CalibrationSums, add_calibration_sums, check_rows

__all__ = ["CalibrationGridState"]

_FORMAT = 1

# How far a bucket's ends may be from where a confidence of float32, rounded on its way to the bucket, puts them.
_SLACK = 1e-6


class CalibrationGridState:
    r"""The calibration grid, batch by batch: what :func:`focalkern.calibration_grid` gives of all rows at once.

    ``nll``, ``brier`` and, with ``estimator="equal_width"``, ``ece`` and ``mce`` are exact: sums over the samples,
    in int64 and float64, of what the bins need. The bins of ``"equal_mass"`` and ``"equal_mass_interp"`` are cut
    at quantiles of the confidences, which no fixed amount of memory knows exactly. Here each cell counts its samples
    in ``n_buckets`` fixed buckets of the confidence c, uniform in sqrt(2c)/3 up to 1/2 and in
    1 - (2/3) (2(1 - c))^(1/4) above. A cut inside a bucket takes its share of the bucket's sums.
    :meth:`error_bound` is how far the result can be from the exact one, per cell. It is found from the sums
    themselves: the m lowest of a bucket's n samples have at least max(0, k - (n - m)) and at most min(m, k) of its k
    correct ones. With ``exact=True`` the rows themselves are kept, in a temporary file.

    Memory does not depend on the number of samples. For the Gg Gt cells it is 8 bytes per cell for each of ``nll`` and
    ``brier``, and 24 bytes per cell and bucket for ``ece`` and ``mce``: for the 4500 cells of the paper's grid,
    1.6 MB with ``"equal_width"`` and 15 bins, 111 MB with the 1024 buckets of the others. An update needs scratch
    memory of about 16 MB besides, per thread 128 bytes per class, and 5 bytes per row of the batch.

    Args:
        gammas: [Gg] numbers, finite and greater than -1.
        temperatures: [Gt] numbers, finite and greater than 0.
        n_bins: M >= 1.
        criteria: from ``"ece"``, ``"mce"``, ``"nll"`` and ``"brier"``.
        estimator: bins of ``ece`` and ``mce``, as for :func:`focalkern.calibration_grid`.
        input_kind: ``"logits"`` or ``"probs"``, what ``update`` is given.
        ignore_index: label of rows that are left out.
        n_buckets: >= 16, of the sketch behind the equal-mass estimators; the bound shrinks about as 1 / n_buckets.
        exact: keep the rows that were seen in an unnamed temporary file in ``spill_dir``, and let :meth:`compute` map
            it and do what :func:`focalkern.calibration_grid` does: disk space for the input and 8 bytes per row, and
            in :meth:`compute` memory of 64 bytes per row and gamma. Without effect for ``"equal_width"``, which is
            exact anyway.
        spill_dir: folder of that file; that of :mod:`tempfile` by default.

    Raises:
        TypeError, ValueError: as :func:`focalkern.calibration_grid`, for the arguments above.

    Source: Komisarenko & Kull, ECAI 2024 (arXiv 2408.11598), section 5. Sketches with fixed buckets that add up are
    those of Masson, Rim & Lee, DDSketch, VLDB 2019 (arXiv 1908.10693); the spacing is this project's.
    """

    def __init__(
        self,
        gammas: Sequence[float] | np.ndarray[Any, Any] | Tensor,
        temperatures: Sequence[float] | np.ndarray[Any, Any] | Tensor,
        *,
        n_bins: int = 15,
        criteria: Sequence[str] = ("ece", "nll"),
        estimator: Literal["equal_width", "equal_mass", "equal_mass_interp"] = "equal_mass",
        input_kind: Literal["logits", "probs"] = "logits",
        ignore_index: int = -100,
        n_buckets: int = 1024,
        exact: bool = False,
        spill_dir: str | None = None,
    ) -> None:
        with _as_ours("CalibrationGridState"):
            self._gammas = _checked_axis("gammas", gammas, -1)
            self._temperatures = _checked_axis("temperatures", temperatures, 0)
            self._criteria = _criteria(criteria)
            _check_option("estimator", estimator, _ESTIMATORS)
            _check_option("input_kind", input_kind, _INPUT_KINDS)
        self._n_bins = _checked_int("n_bins", n_bins, 1)
        self._n_buckets = _checked_int("n_buckets", n_buckets, 16)
        self._ignore_index = _checked_int("ignore_index", ignore_index, None)
        self._estimator = estimator
        self._input_kind = input_kind
        if not isinstance(exact, bool):
            raise TypeError(f"CalibrationGridState: exact must be a bool, got {type(exact).__name__}")
        self._sketched = estimator != "equal_width" and not {"ece", "mce"}.isdisjoint(self._criteria)
        self._exact = exact and self._sketched
        self._spill_dir = spill_dir
        self._n_classes: int | None = None
        self._sums: CalibrationSums | None = None
        self._rows: _Spill | None = None

    # ---- what is known ---------------------------------------------------------------------------------------------

    @property
    def n_samples(self) -> int:
        """Rows seen so far, those with ``ignore_index`` left out."""
        if self._rows is not None:
            return self._rows.n_rows
        return 0 if self._sums is None else int(self._sums.rows)

    @property
    def n_classes(self) -> int | None:
        """C, or None before the first batch."""
        return self._n_classes

    @property
    def device(self) -> torch.device | None:
        """Where the sums are: the device of the first batch; None before it."""
        if self._rows is not None:
            return torch.device("cpu")
        return None if self._sums is None else self._sums.items()[0][1].device

    def __repr__(self) -> str:
        return (
            f"CalibrationGridState({len(self._gammas)} gammas x {len(self._temperatures)} temperatures, "
            f"criteria={self._criteria}, estimator={self._estimator!r}, n_samples={self.n_samples})"
        )

    # ---- adding ----------------------------------------------------------------------------------------------------

    def update(self, logits: Tensor, target: Tensor) -> Self:
        """Add a batch: all of it or, when an error is raised, nothing.

        Sums are taken in the order of the rows, so the same batches in the same order give the same bits, for every
        number of threads. An interrupt (Ctrl-C) waits for the end of the batch.

        Args:
            logits: [N, C], logits or probabilities as ``input_kind`` says, with N >= 0 and the C of the batches
                before; float16, bfloat16, float32 or float64, which may differ from batch to batch (with
                ``exact=True`` it must not). On any device that has kernels: the sums are where the first batch was,
                and the contribution of a batch from elsewhere is moved there.
            target: [N] labels, int64, int32 or uint8, on the device of ``logits``.

        Returns:
            The state itself.

        Raises:
            TypeError, ValueError, IndexError, NotImplementedError: as :func:`focalkern.calibration_grid`, with the
                row counted from the start of the batch; another number of classes than before.
        """
        with _as_ours("CalibrationGridState.update"):
            for name, value in (("logits", logits), ("target", target)):
                if not isinstance(value, Tensor):
                    raise TypeError(f"calibration_grid: {name} must be a tensor, got {type(value).__name__}")
            logits, target = logits.detach(), target.detach()
            if logits.dim() == 2 and self._n_classes not in (None, logits.shape[1]):
                raise ValueError(
                    f"calibration_grid: logits must have the {self._n_classes} classes of the batches before, got "
                    f"[N, C] = {list(logits.shape)}"
                )
            if self._adds_nothing(logits, target):
                return self
            options: dict[str, Any] = {
                "is_probs": _INPUT_KINDS[self._input_kind],
                "ignore_index": self._ignore_index,
            }
            axes = (self._gammas, self._temperatures)
            if self._exact:
                check_rows(logits, target, *axes, **options)
                self._spill(logits, target)
            else:
                sums, there = self._sums, self.device
                if sums is None or there != logits.device:
                    sums = self._zeros(logits.device)
                add_calibration_sums(
                    sums, logits, target, *axes, criteria=self._criteria, sketch=self._sketched, **options
                )
                if self._sums is None:
                    self._sums = sums
                elif sums is not self._sums:
                    self._sums = _added(self._sums, sums)
        self._n_classes = logits.shape[1]
        return self

    def _adds_nothing(self, logits: Tensor, target: Tensor) -> bool:
        """Whether a batch of the right form has no row that counts, which the operator would refuse."""
        fits = logits.dim() == 2 and target.dim() == 1 and len(logits) == len(target) and logits.is_floating_point()
        if not fits or target.dtype not in (torch.int64, torch.int32, torch.uint8) or target.device != logits.device:
            return False
        return len(target) == 0 or bool((target.to(torch.int64) == self._ignore_index).all())

    def _zeros(self, device: torch.device) -> CalibrationSums:
        n_buckets = self._n_buckets if self._sketched else self._n_bins
        return CalibrationSums.zeros(len(self._gammas), len(self._temperatures), n_buckets, self._criteria, device)

    def _spill(self, logits: Tensor, target: Tensor) -> None:
        target = target.to(torch.int64)
        kept = target != self._ignore_index
        rows = self._rows or _Spill(logits.shape[1], logits.dtype, self._spill_dir)
        rows.append(logits[kept].cpu(), target[kept].cpu())
        self._rows = rows

    def merge(self, other: "CalibrationGridState") -> Self:
        """Add what another state has seen, as if its rows had come after the rows of this one.

        Counts add up exactly; float64 sums in any order to 1e-15 relative.

        Args:
            other: a state for the same grid, criteria, bins and kind of input; on any device. It stays as it is.

        Returns:
            The state itself.

        Raises:
            TypeError: no CalibrationGridState.
            ValueError: a state of something else, naming the first difference. Nothing is added then.
        """
        if not isinstance(other, CalibrationGridState):
            raise TypeError(
                f"CalibrationGridState.merge: other must be a CalibrationGridState, got {type(other).__name__}"
            )
        self._check_same("CalibrationGridState.merge: other", other._config(), other._n_classes)
        if other.n_samples == 0:
            return self
        if other._rows is not None:
            input, target = other._rows.load()
            rows = self._rows or _Spill(input.shape[1], input.dtype, self._spill_dir)
            rows.append(input, target)
            self._rows = rows
        elif self._sums is None:
            self._sums = copy.deepcopy(other._sums)
        else:
            assert other._sums is not None
            self._sums = _added(self._sums, other._sums)
        self._n_classes = other._n_classes
        return self

    def all_reduce(self, group: Any = None, *, timeout: datetime.timedelta | None = None) -> Self:
        """Add up the states of all processes of a ``torch.distributed`` group: each has the sum afterwards.

        Every process calls it, also one that has seen no rows. The state changes only when all of it has succeeded.

        Args:
            group: a process group; the default one when None. With gloo the sums travel through the CPU, with NCCL
                through the current CUDA device.
            timeout: how long to wait for the others; by default what the group was made with.

        Returns:
            The state itself.

        Raises:
            ValueError: the states are for different grids or numbers of classes (on every process), or exact.
            RuntimeError: torch.distributed is not initialized; another process has died, or did not come in time.
        """
        import torch.distributed as dist

        op = "CalibrationGridState.all_reduce"
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(f"{op}: torch.distributed must be initialized: call init_process_group first")
        through = torch.device("cpu")
        if "nccl" in dist.get_backend(group):
            through = torch.device("cuda", torch.cuda.current_device())

        def wait(work: Any) -> None:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)

        try:
            facts = torch.tensor([self._digest(), self._n_classes or 0, int(self._exact)], device=through)
            everybody = [torch.empty_like(facts) for _ in range(dist.get_world_size(group))]
            wait(dist.all_gather(everybody, facts, group=group, async_op=True))
            known = torch.stack(everybody).cpu()
            classes = known[:, 1][known[:, 1] > 0].unique()
            if bool((known[:, 0] != known[0, 0]).any()) or bool(known[:, 2].any()) or len(classes) > 1:
                raise ValueError(
                    f"{op}: every process must have a state for the same grid, criteria, bins, kind of input and "
                    f"number of classes, without exact=True; this one is {self!r} of {self._n_classes} classes"
                )
            here = self.device or through
            mine = self._sums or self._zeros(here)
            rows = torch.tensor([self.n_samples], device=through)
            wait(dist.all_reduce(rows, group=group, async_op=True))
            total = CalibrationSums(rows.cpu())
            for name, tensor in mine.items():
                moved = tensor.to(through, copy=True)
                wait(dist.all_reduce(moved, group=group, async_op=True))
                setattr(total, name, moved.to(here))
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RuntimeError(
                f"{op}: another process has died or did not answer in time, and nothing was added: {reason}"
            ) from error
        if len(classes):
            self._sums, self._n_classes = total, int(classes[0])
        return self

    # ---- results ---------------------------------------------------------------------------------------------------

    def compute(self) -> CalibrationGrid:
        """The grid over all rows seen so far; further batches may follow.

        Returns:
            A :class:`focalkern.CalibrationGrid` on the state's device.

        Raises:
            ValueError: no row was seen.
        """
        self._check_not_empty("compute")
        if self._rows is not None:
            input, target = self._rows.load()
            return calibration_grid(
                input,
                target,
                self._gammas,
                self._temperatures,
                n_bins=self._n_bins,
                criteria=self._criteria,
                estimator=self._estimator,
                input_kind=self._input_kind,
                ignore_index=self._ignore_index,
            )
        sums = self._sums
        assert sums is not None
        tables = {name: tensor / self.n_samples for name, tensor in sums.items() if name in ("nll", "brier")}
        if sums.count is not None:
            parts = [bins.tables() for bins in self._bins(limits=False)]
            for name in ("ece", "mce"):
                tables[name] = torch.cat([part[name] for part in parts]).view(len(self._gammas), -1)
        device = next(iter(tables.values())).device
        return CalibrationGrid(
            gammas=self._gammas.to(device),
            temperatures=self._temperatures.to(device),
            tables={name: tables[name] for name in self._criteria},
            n_bins=self._n_bins,
            estimator=self._estimator,
        )

    def error_bound(self, criterion: str) -> Tensor:
        """How far :meth:`compute` can be from what all rows at once would give, apart from rounding.

        Zero but for ``ece`` and ``mce`` of an equal-mass estimator without ``exact=True``.

        Args:
            criterion: one of ``criteria``.

        Returns:
            [Gg, Gt] float64, in the unit of the criterion.

        Raises:
            ValueError: another criterion; no row was seen.
        """
        if criterion not in self._criteria:
            raise ValueError(
                f"CalibrationGridState.error_bound: criterion must be one of {', '.join(self._criteria)}, "
                f"got {criterion!r}"
            )
        self._check_not_empty("error_bound")
        if criterion not in ("ece", "mce") or not self._sketched or self._exact:
            return torch.zeros(len(self._gammas), len(self._temperatures), dtype=torch.float64, device=self.device)
        parts = [bins.bounds()[criterion] for bins in self._bins(limits=True)]
        return torch.cat(parts).view(len(self._gammas), -1)

    def _bins(self, *, limits: bool) -> Iterator["_Bins"]:
        """A few cells at a time: the cumulated sums of all would take as much memory as the state."""
        sums = self._sums
        assert sums is not None
        assert sums.count is not None
        assert sums.confidence is not None
        assert sums.correct is not None
        flat = [tensor.flatten(0, 1) for tensor in (sums.count, sums.confidence, sums.correct)]
        at_once = max(1, 2**15 // flat[0].shape[1])
        for begin in range(0, len(flat[0]), at_once):
            count, confidence, correct = (tensor[begin : begin + at_once] for tensor in flat)
            if self._sketched:
                yield _Bins.of_sketch(
                    count,
                    confidence,
                    correct,
                    self.n_samples,
                    self._n_bins,
                    interpolated=self._estimator == "equal_mass_interp",
                    limits=limits,
                )
            else:
                yield _Bins.of_bins(count, confidence, correct, self.n_samples)

    def _check_not_empty(self, method: str) -> None:
        if self.n_samples == 0:
            raise ValueError(f"CalibrationGridState.{method}: at least one row must have been seen, got none")

    # ---- saving ----------------------------------------------------------------------------------------------------

    def _config(self) -> dict[str, Any]:
        """What two states must share to be added up."""
        return {
            "gammas": self._gammas.tolist(),
            "temperatures": self._temperatures.tolist(),
            "n_bins": self._n_bins,
            "criteria": list(self._criteria),
            "estimator": self._estimator,
            "input_kind": self._input_kind,
            "ignore_index": self._ignore_index,
            "n_buckets": self._n_buckets,
            "exact": self._exact,
        }

    def _digest(self) -> int:
        text = json.dumps(self._config(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _check_same(self, subject: str, config: Mapping[str, Any], n_classes: int | None) -> None:
        for name, value in self._config().items():
            if config.get(name) != value:
                raise ValueError(f"{subject} must have {name} = {_short(value)}, got {_short(config.get(name))}")
        if None not in (n_classes, self._n_classes) and n_classes != self._n_classes:
            raise ValueError(f"{subject} must have {self._n_classes} classes, got {n_classes}")

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors, numbers and strings: for ``torch.save``, and ``torch.load(weights_only=True)``.

        The tensors are the state's own, not copies. With ``exact=True`` the rows are among them.
        """
        tensors = {} if self._sums is None else dict(self._sums.items())
        if self._rows is not None:
            tensors["input"], tensors["target"] = self._rows.load()
        return {
            "format": _FORMAT,
            "config": self._config(),
            "n_samples": self.n_samples,
            "n_classes": self._n_classes,
            "tensors": tensors,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Self:
        """Go on from what :meth:`state_dict` has given, in place of what was seen so far.

        Returns:
            The state itself.

        Raises:
            ValueError: not such a dictionary, of a later format, or of a state for something else. Nothing has
                changed then.
        """
        subject = "CalibrationGridState.load_state_dict: state_dict"
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("config"), Mapping):
            raise ValueError(f"{subject} must be what state_dict() returns, got {_short(state_dict)}")
        if state_dict.get("format") != _FORMAT:
            raise ValueError(f"{subject} must have format {_FORMAT}, got {_short(state_dict.get('format'))}")
        self._check_same(subject, state_dict["config"], None)
        tensors: Any = state_dict.get("tensors")
        n_samples, n_classes = state_dict.get("n_samples"), state_dict.get("n_classes")
        fresh = CalibrationGridState.__new__(CalibrationGridState)
        fresh.__dict__.update(self.__dict__)
        fresh._sums = fresh._rows = None
        wanted = {}
        if isinstance(n_samples, int) and n_samples > 0 and not self._exact:
            fresh._sums = self._zeros(torch.device("cpu"))
            fresh._sums.rows.fill_(n_samples)
            wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in fresh._sums.items()}
        found = {
            name: (tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else None
            for name, tensor in (tensors.items() if isinstance(tensors, Mapping) else ())
        }
        if not isinstance(n_samples, int) or n_samples < 0 or (not self._exact and found != wanted):
            raise ValueError(f"{subject} must have the tensors of this grid, got {_short(found)}")
        if fresh._sums is not None:
            for name, tensor in fresh._sums.items():
                tensor.copy_(tensors[name])
        elif n_samples:
            if set(found) != {"input", "target"} or None in found.values():
                raise ValueError(f"{subject} must have the rows of an exact state, got {_short(found)}")
            input, target = tensors["input"].cpu(), tensors["target"].cpu()
            check_rows(
                input,
                target,
                self._gammas,
                self._temperatures,
                is_probs=_INPUT_KINDS[self._input_kind],
                ignore_index=self._ignore_index,
            )
            fresh._rows = _Spill(input.shape[1], input.dtype, self._spill_dir)
            fresh._rows.append(input, target)
        self._sums, self._rows = fresh._sums, fresh._rows
        self._n_classes = n_classes
        return self

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> Self:
        """The state that :meth:`state_dict` describes, grid and all.

        Raises:
            ValueError: as :meth:`load_state_dict`.
        """
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("config"), Mapping):
            raise ValueError(
                "CalibrationGridState.from_state_dict: state_dict must be what state_dict() returns, got "
                f"{_short(state_dict)}"
            )
        try:
            state = cls(**state_dict["config"])
        except TypeError as error:
            raise ValueError(
                f"CalibrationGridState.from_state_dict: state_dict has an unknown config: {error}"
            ) from None
        return state.load_state_dict(state_dict)


def _added(sums: CalibrationSums, others: CalibrationSums) -> CalibrationSums:
    """New sums, which take the place of the old ones in one step."""
    with torch.inference_mode(False):  # as in CalibrationSums.zeros
        total = CalibrationSums(sums.rows + others.rows)
        for (name, mine), (_, other) in zip(sums.items(), others.items(), strict=True):
            setattr(total, name, mine + other.to(mine.device))
    return total


# ---- bins out of sums ----------------------------------------------------------------------------------------------


class _Bins:
    """The bins of some cells, by their M + 1 cuts: how many samples lie below, and their sum of confidence - correct.

    Both are known within limits where a cut falls into a bucket of the sketch.
    """

    def __init__(self, rank: Tensor, most: Tensor, value: Tensor, low: Tensor, high: Tensor, n_samples: int) -> None:
        self.rank, self.most = rank, most  # [cells, M + 1] int64: the rank in use, and the largest it can be
        self.value, self.low, self.high = value, low, high  # [cells, M + 1] float64
        self.n_samples = n_samples

    @classmethod
    def of_bins(cls, count: Tensor, confidence: Tensor, correct: Tensor, n_samples: int) -> "_Bins":
        """``count`` and the others [cells, M] are the bins themselves."""
        rank, value = (torch.nn.functional.pad(x.cumsum(1), (1, 0)) for x in (count, confidence - correct))
        return cls(rank, rank, value, value, value, n_samples)

    @classmethod
    def of_sketch(
        cls,
        count: Tensor,
        confidence: Tensor,
        correct: Tensor,
        n_samples: int,
        n_bins: int,
        *,
        interpolated: bool,
        limits: bool,
    ) -> "_Bins":
        """``count`` and the others [cells, n_buckets] are buckets of the sketch; without ``limits`` no ``bounds``."""
        cells, n_buckets = count.shape
        ranks, following = _cuts(n_samples, n_bins, interpolated)
        excess = confidence - correct
        up_to, excess_up_to = count.cumsum(1), excess.cumsum(1)
        rank = ranks.to(count.device).expand(cells, -1).contiguous()

        def bucket_of(samples: Tensor) -> Tensor:
            """The bucket with the last of the ``samples`` lowest, [cells, M + 1]."""
            return torch.searchsorted(up_to, samples.contiguous()).clamp_(max=n_buckets - 1)

        def hull(place: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
            """Limits of the excess of the m lowest of a bucket's n samples, over m in [least, most]."""
            n, k = count.gather(1, place), correct.gather(1, place)
            total = confidence.gather(1, place)
            mean = total / n.clamp(min=1)
            base = excess_up_to.gather(1, place) - excess.gather(1, place)

            least_of, most_of = _bucket_limits(place, n_buckets)

            def upper(m: Tensor) -> Tensor:
                return m * mean - (m + k - n).clamp(min=0)

            def lower(m: Tensor) -> Tensor:
                of_lowest = torch.maximum(m * least_of, total - (n - m) * most_of)
                return of_lowest - torch.minimum(m, k)

            # Concave and convex in m, with kinks: linear pieces end there or at the ends of the range.
            high = torch.stack([upper(m) for m in (least, most, (n - k).clamp(least, most))]).amax(0)
            low = torch.stack([m * least_of - torch.minimum(m, k) for m in (least, most, k.clamp(least, most))])
            low = torch.where(least == most, lower(least), low.amin(0))
            return base + low, base + high

        place = bucket_of(rank)
        inside = rank - up_to.gather(1, place) + count.gather(1, place)
        rest = 1 - inside / count.gather(1, place).clamp(min=1)
        value = excess_up_to.gather(1, place) - rest * excess.gather(1, place)
        if not limits:
            return cls(rank, rank, value, value, value, n_samples)
        if not interpolated:
            low, high = hull(place, inside, inside)
            return cls(rank, rank, value, low, high, n_samples)
        # An edge takes all samples that tie with it; with an edge that rounds up to the next sample, also those that
        # tie with that one.
        low, high = hull(place, inside, count.gather(1, place))
        after = bucket_of(following.to(count.device).expand(cells, -1))
        next_low, next_high = hull(after, torch.zeros_like(inside), count.gather(1, after))
        apart = after != place
        low = torch.where(apart, torch.minimum(low, next_low), low)
        high = torch.where(apart, torch.maximum(high, next_high), high)
        return cls(rank, up_to.gather(1, after), value, low, high, n_samples)

    def tables(self) -> dict[str, Tensor]:
        """{criterion: [cells]}"""
        gap = self.value.diff(dim=1).abs()
        size = self.rank.diff(dim=1)
        return {
            "ece": gap.sum(1) / self.n_samples,
            "mce": torch.where(size > 0, gap / size.clamp(min=1), 0.0).amax(1),
        }

    def bounds(self) -> dict[str, Tensor]:
        """{criterion: [cells]}, the largest possible error of ``tables``."""
        tables = self.tables()
        least, most = (total / self.n_samples for total in self._total_gap())
        ece = torch.maximum(most - tables["ece"], tables["ece"] - least)
        # The excess of a bin lies in [from_low, from_high], its size in [smallest, largest].
        from_low, from_high = self.low[:, 1:] - self.high[:, :-1], self.high[:, 1:] - self.low[:, :-1]
        smallest = (self.rank[:, 1:] - self.most[:, :-1]).clamp(min=0)
        largest = self.most[:, 1:] - self.rank[:, :-1]
        widest = torch.maximum(from_low.abs(), from_high.abs()) / smallest
        narrowest = torch.maximum(from_low, -from_high).clamp(min=0) / largest.clamp(min=1)
        highest = torch.where(largest > 0, widest.nan_to_num(nan=1.0).clamp(max=1.0), 0.0).amax(1)
        lowest = torch.where(largest > 0, narrowest, 0.0).amax(1)
        mce = torch.maximum(highest - tables["mce"], tables["mce"] - lowest)
        return {"ece": ece.clamp(min=0), "mce": mce.clamp(min=0)}

    def _total_gap(self) -> tuple[Tensor, Tensor]:
        """The least and the largest sum of |x_(b+1) - x_b| over all x_b in [low_b, high_b]."""
        low, high = self.low.unbind(1), self.high.unbind(1)
        # No sample's confidence - correct exceeds 1, so neither does that of a bin its size.
        sizes = (self.most[:, 1:] - self.rank[:, :-1]).double().unbind(1)
        # The largest is at ends of the intervals: keep the best for either end of the last one.
        at_low = at_high = torch.zeros_like(low[0])
        # The least: the x that it costs least to be at are an interval, and moving out of it costs the distance.
        cost, left, right = torch.zeros_like(low[0]), low[0], high[0]
        for b in range(1, len(low)):
            at_low, at_high = (
                torch.maximum(
                    at_low + torch.minimum((end - low[b - 1]).abs(), sizes[b - 1]),
                    at_high + torch.minimum((end - high[b - 1]).abs(), sizes[b - 1]),
                )
                for end in (low[b], high[b])
            )
            up, down = (low[b] - right).clamp(min=0), (left - high[b]).clamp(min=0)
            cost = cost + up + down
            new_left = torch.where(down > 0, high[b], torch.maximum(left, low[b]))
            right = torch.where(up > 0, low[b], torch.minimum(right, high[b]))
            left = new_left
        return cost, torch.maximum(at_low, at_high).clamp(max=self.n_samples)


def _cuts(n_samples: int, n_bins: int, interpolated: bool) -> tuple[Tensor, Tensor]:
    """How many samples lie below each of the M + 1 cuts, [M + 1] each: at least, and one that may tie with it."""
    bins = range(n_bins + 1)
    if not interpolated:
        size, larger = divmod(n_samples, n_bins)
        ranks = [bin * size + min(bin, larger) for bin in bins]
        return torch.tensor(ranks), torch.tensor(ranks)
    # Positions in the sorted samples, as numpy.interp has them; samples up to the position lie below the cut.
    positions = [n_samples if bin == n_bins else bin * (n_samples / n_bins) for bin in bins]
    at_end = [position >= n_samples - 1 for position in positions]
    ranks = [n_samples if end else math.floor(position) + 1 for position, end in zip(positions, at_end, strict=True)]
    return torch.tensor(ranks), torch.tensor([min(rank + 1, n_samples) for rank in ranks])


def _bucket_limits(place: Tensor, n_buckets: int) -> tuple[Tensor, Tensor]:
    """float64, in the shape of ``place``: no confidence in these buckets is below the first or above the second."""

    def edge(index: Tensor) -> Tensor:
        x = index.to(torch.float64) / n_buckets
        return torch.where(x <= 1 / 3, (3 * x) ** 2 / 2, 1 - (1.5 * (1 - x)) ** 4 / 2)

    return (edge(place) - _SLACK).clamp(min=0), (edge(place + 1) + _SLACK).clamp(max=1)


# ---- rows on disk --------------------------------------------------------------------------------------------------


class _Spill:
    """Rows in two unnamed temporary files, which the system removes with the process."""

    def __init__(self, n_classes: int, dtype: torch.dtype, folder: str | None) -> None:
        self.n_classes, self.dtype, self.folder = n_classes, dtype, folder
        self.n_rows = 0
        self.input, self.target = (tempfile.TemporaryFile(dir=folder) for _ in range(2))  # noqa: SIM115
        for stream in (self.input, self.target):
            weakref.finalize(self, stream.close)

    def append(self, input: Tensor, target: Tensor) -> None:
        """Add rows; when that fails, for want of disk space, those before them are still there."""
        if input.dtype != self.dtype:
            raise TypeError(
                f"calibration_grid: logits must be {self.dtype} as in the batches before with exact=True, "
                f"got {input.dtype}"
            )
        for stream, tensor in ((self.input, input), (self.target, target)):
            size = tensor.element_size() * (self.n_classes if tensor is input else 1)
            stream.seek(self.n_rows * size)
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            stream.flush()
        self.n_rows += len(target)

    def load(self) -> tuple[Tensor, Tensor]:
        """[N, C] and [N], mapped."""
        mapped = []
        for stream, dtype, width in ((self.input, self.dtype, self.n_classes), (self.target, torch.int64, 1)):
            data = np.memmap(stream, dtype=np.uint8, mode="r+", shape=(self.n_rows * width * dtype.itemsize,))
            mapped.append(torch.from_numpy(data).view(dtype))
        return mapped[0].view(self.n_rows, self.n_classes), mapped[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Spill":
        other = _Spill(self.n_classes, self.dtype, self.folder)
        if self.n_rows:
            other.append(*self.load())
        return other

    def __reduce__(self) -> Any:
        raise TypeError("CalibrationGridState: a state with exact=True cannot be pickled; save its state_dict()")


# ---- checks --------------------------------------------------------------------------------------------------------


class _as_ours:  # noqa: N801  # reads as a statement
    """Puts the name of the state's method in front of errors in place of the operator's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        text = str(error)
        if isinstance(error, TypeError | ValueError | IndexError | NotImplementedError) and text.startswith(
            "calibration_grid: "
        ):
            text = text.removeprefix("calibration_grid: ")
            if text.startswith("input "):
                text = "logits " + text.removeprefix("input ")
            raise type(error)(f"{self.name}: {text}") from None


def _checked_axis(name: str, values: Any, above: float) -> Tensor:
    axis = _axis(name, values)
    if len(axis) == 0:
        raise ValueError(f"calibration_grid: {name} must have at least one value, got none")
    good = axis.isfinite() & (axis > above)
    if not bool(good.all()):
        index = int((~good).nonzero()[0])
        raise ValueError(
            f"calibration_grid: {name} must be finite and greater than {above}, got {float(axis[index]):g} at index "
            f"{index}"
        )
    return axis.clone()


def _checked_int(name: str, value: Any, least: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"CalibrationGridState: {name} must be an int, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"CalibrationGridState: {name} must be at least {least}, got {value}")
    return int(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
