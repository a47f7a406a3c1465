"""The state of a grid that grows batch by batch."""

import copy
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import dense
from focalkern._devices import where_float64
from focalkern.ops.calibration_grid import (
    _ESTIMATORS,
    _INPUT_KINDS,
    CalibrationGrid,
    _check_option,
    _criteria,
    calibration_grid,
)
from focalkern.ops.calibration_sums import CalibrationSums, add_calibration_sums, check_rows
from focalkern.streaming._checks import as_ours, checked_axis, checked_int, short
from focalkern.streaming._reduce import all_reduced
from focalkern.streaming._saved import saved_rows, saved_sums
from focalkern.streaming._spill import Spill
from focalkern.streaming._tables import Cut, bounds_of, tables_of

__all__ = ["CalibrationGridState"]

_FORMAT = 1


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

    Example:
        >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0], criteria=("nll",))
        >>> for target in ([0, 0, 0, 0, 1], [0, 0, 0, 0, 1]):  # batches
        ...     _ = state.update(torch.tensor([[4.0, 0.0]]).repeat(5, 1), torch.tensor(target))
        >>> gamma, temperature, nll = state.compute().best("nll")
        >>> temperature, round(nll, 4), state.n_samples, state.n_classes, state.device
        (3.0, 0.5006, 10, 2, device(type='cpu'))
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
        with as_ours("CalibrationGridState"):
            self._gammas = checked_axis("gammas", gammas, -1)
            self._temperatures = checked_axis("temperatures", temperatures, 0)
            self._criteria = _criteria(criteria)
            _check_option("estimator", estimator, _ESTIMATORS)
            _check_option("input_kind", input_kind, _INPUT_KINDS)
        self._n_bins = checked_int("n_bins", n_bins, 1)
        self._n_buckets = checked_int("n_buckets", n_buckets, 16)
        self._ignore_index = checked_int("ignore_index", ignore_index, None)
        self._estimator = estimator
        self._input_kind = input_kind
        if not isinstance(exact, bool):
            raise TypeError(f"CalibrationGridState: exact must be a bool, got {type(exact).__name__}")
        self._sketched = estimator != "equal_width" and not {"ece", "mce"}.isdisjoint(self._criteria)
        self._exact = exact and self._sketched
        self._spill_dir = spill_dir
        self._n_classes: int | None = None
        self._sums: CalibrationSums | None = None
        self._rows: Spill | None = None

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
                and the contribution of a batch from elsewhere is moved there. A batch on a device without float64 is
                taken to the CPU.
            target: [N] labels, int64, int32 or uint8, on the device of ``logits``.

        Returns:
            The state itself.

        Raises:
            TypeError, ValueError, IndexError, NotImplementedError: as :func:`focalkern.calibration_grid`, with the
                row counted from the start of the batch; another number of classes than before.

        Example:
            >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0], criteria=("nll",))
            >>> state.update(torch.tensor([[4.0, 0.0], [2.0, 0.0]]), torch.tensor([0, -100])).n_samples
            1
        """
        with as_ours("CalibrationGridState.update"):
            for name, value in (("logits", logits), ("target", target)):
                if not isinstance(value, Tensor):
                    raise TypeError(f"calibration_grid: {name} must be a tensor, got {type(value).__name__}")
                dense("calibration_grid", name, value)
            logits, target = where_float64(logits.detach()), where_float64(target.detach())
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
        rows = self._rows or Spill(logits.shape[1], logits.dtype, self._spill_dir)
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

        Example:
            >>> one, other = (fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0]) for _ in range(2))
            >>> _ = one.update(torch.tensor([[4.0, 0.0]]), torch.tensor([0]))
            >>> _ = other.update(torch.tensor([[3.0, 0.0]]), torch.tensor([1]))
            >>> one.merge(other).n_samples
            2
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
            rows = self._rows or Spill(input.shape[1], input.dtype, self._spill_dir)
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

        Example:
            >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0])
            >>> _ = state.update(torch.tensor([[4.0, 0.0]]), torch.tensor([0]))  # this process's share of the rows
            >>> state.all_reduce().n_samples
            1
            >>> torch.distributed.destroy_process_group()
        """
        total, n_classes = all_reduced(
            "CalibrationGridState.all_reduce",
            self._sums,
            self._zeros,
            digest=self._digest(),
            n_classes=self._n_classes,
            exact=self._exact,
            words=f"{self!r} of {self._n_classes} classes",
            group=group,
            timeout=timeout,
        )
        if n_classes is not None:
            self._sums, self._n_classes = total, n_classes
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
        assert self._sums is not None
        tables = tables_of(self._sums, self._cut)
        device = next(iter(tables.values())).device
        return CalibrationGrid(
            gammas=self._gammas.to(device),
            temperatures=self._temperatures.to(device),
            tables={name: tables[name].view(len(self._gammas), -1) for name in self._criteria},
            n_bins=self._n_bins,
            estimator=self._estimator,
        )

    def total(self, criterion: Literal["nll", "brier"]) -> Tensor:
        """The sum of a criterion over the rows seen so far, where :meth:`compute` has the mean.

        Args:
            criterion: ``"nll"`` or ``"brier"``, out of ``criteria``.

        Returns:
            [Gg, Gt] float64, a copy; zeros before the first row.

        Raises:
            ValueError: another criterion, or a state with ``exact=True``, which has rows and no sums.

        Example:
            >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0], criteria=("nll",))
            >>> _ = state.update(torch.tensor([[4.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))
            >>> state.total("nll").round(decimals=4)
            tensor([[2.1451, 1.3150]], dtype=torch.float64)
        """
        if criterion not in ("nll", "brier") or criterion not in self._criteria or self._exact:
            raise ValueError(
                f"CalibrationGridState.total: criterion must be one of nll and brier that is summed, got {criterion!r}"
            )
        if self._sums is None:
            return torch.zeros(len(self._gammas), len(self._temperatures), dtype=torch.float64)
        return dict(self._sums.items())[criterion].clone()

    def error_bound(self, criterion: str) -> Tensor:
        """How far :meth:`compute` can be from what all rows at once would give, apart from rounding.

        Zero but for ``ece`` and ``mce`` of an equal-mass estimator without ``exact=True``.

        Args:
            criterion: one of ``criteria``.

        Returns:
            [Gg, Gt] float64, in the unit of the criterion.

        Raises:
            ValueError: another criterion; no row was seen.

        Example:
            >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0], estimator="equal_mass", n_bins=2)
            >>> _ = state.update(torch.tensor([[4.0, 0.0], [2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1, 0]))
            >>> state.error_bound("nll"), bool(state.error_bound("ece") < 0.01)
            (tensor([[0.]], dtype=torch.float64), True)
        """
        if criterion not in self._criteria:
            raise ValueError(
                f"CalibrationGridState.error_bound: criterion must be one of {', '.join(self._criteria)}, "
                f"got {criterion!r}"
            )
        self._check_not_empty("error_bound")
        if criterion not in ("ece", "mce") or not self._sketched or self._exact:
            return torch.zeros(len(self._gammas), len(self._temperatures), dtype=torch.float64, device=self.device)
        assert self._sums is not None
        return bounds_of(self._sums, self._cut)[criterion].view(len(self._gammas), -1)

    @property
    def _cut(self) -> Cut:
        return Cut(self._n_bins, self._estimator, self._sketched, self.n_samples)

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
                raise ValueError(f"{subject} must have {name} = {short(value)}, got {short(config.get(name))}")
        if None not in (n_classes, self._n_classes) and n_classes != self._n_classes:
            raise ValueError(f"{subject} must have {self._n_classes} classes, got {n_classes}")

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors, numbers and strings: for ``torch.save``, and ``torch.load(weights_only=True)``.

        The tensors are the state's own, not copies. With ``exact=True`` the rows are among them.

        Returns:
            A dictionary.

        Example:
            >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0])
            >>> _ = state.update(torch.tensor([[4.0, 0.0]]), torch.tensor([0]))
            >>> torch.save(state.state_dict(), "state.pt")
            >>> fk.CalibrationGridState.from_state_dict(torch.load("state.pt", weights_only=True)).n_samples
            1
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

        Args:
            state_dict: of a state for the same grid.

        Returns:
            The state itself.

        Raises:
            ValueError: not such a dictionary, of a later format, or of a state for something else. Nothing has
                changed then.

        Example:
            >>> state, other = (fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0]) for _ in range(2))
            >>> _ = state.update(torch.tensor([[4.0, 0.0]]), torch.tensor([0]))
            >>> other.load_state_dict(state.state_dict()).n_samples
            1
        """
        subject = "CalibrationGridState.load_state_dict: state_dict"
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("config"), Mapping):
            raise ValueError(f"{subject} must be what state_dict() returns, got {short(state_dict)}")
        if state_dict.get("format") != _FORMAT:
            raise ValueError(f"{subject} must have format {_FORMAT}, got {short(state_dict.get('format'))}")
        self._check_same(subject, state_dict["config"], None)
        n_samples, n_classes = state_dict.get("n_samples"), state_dict.get("n_classes")
        if not isinstance(n_samples, int) or n_samples < 0:
            raise ValueError(f"{subject} must have the tensors of this grid, got n_samples = {short(n_samples)}")
        sums, rows = None, None
        if n_samples == 0:
            pass
        elif self._exact:
            input, target = saved_rows(subject, state_dict.get("tensors"))
            options: Any = {"is_probs": _INPUT_KINDS[self._input_kind], "ignore_index": self._ignore_index}
            check_rows(input, target, self._gammas, self._temperatures, **options)
            rows = Spill(input.shape[1], input.dtype, self._spill_dir)
            rows.append(input, target)
        else:
            sums = saved_sums(subject, state_dict.get("tensors"), self._zeros(torch.device("cpu")), n_samples)
        self._sums, self._rows = sums, rows
        self._n_classes = n_classes
        return self

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> Self:
        """The state that :meth:`state_dict` describes, grid and all.

        Args:
            state_dict: what :meth:`state_dict` has given.

        Returns:
            A new state.

        Raises:
            ValueError: as :meth:`load_state_dict`.

        Example:
            >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0])
            >>> _ = state.update(torch.tensor([[4.0, 0.0]]), torch.tensor([0]))
            >>> fk.CalibrationGridState.from_state_dict(state.state_dict()).n_samples
            1
        """
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("config"), Mapping):
            raise ValueError(
                "CalibrationGridState.from_state_dict: state_dict must be what state_dict() returns, got "
                f"{short(state_dict)}"
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
