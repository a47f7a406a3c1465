"""The state of a calibration grid to which batches are added."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import dense
from focalkern._devices import where_float64
from focalkern._types import LOGITS, PROPER, Estimator, InputKind, Proper, is_assumed
from focalkern.ops.calibration_grid import CalibrationGrid, pixels_as_rows, refuse_rows_of_probs
from focalkern.streaming._config import GridConfig, adds_nothing, as_ours, short
from focalkern.streaming._reduce import all_reduced
from focalkern.streaming._sums import Accumulator, SampleStore, SumAccumulator

__all__ = ["CalibrationGridState"]

_FORMAT = 1


class CalibrationGridState:
    r"""The calibration grid batch by batch; the result is that of :func:`focalkern.calibration_grid` on all rows.

    ``nll``, ``brier`` and, with ``estimator="equal_width"``, ``ece`` and ``mce`` are exact: int64 and float64 sums over
    the samples. The edges of the bins of ``"equal_mass"`` and ``"equal_mass_interp"`` are quantiles of the confidences,
    which a fixed amount of memory cannot hold exactly. For these, each cell counts its samples in ``n_buckets`` fixed
    buckets of the confidence c, uniform in sqrt(2c)/3 up to 1/2 and in 1 - (2/3) (2(1 - c))^(1/4) above. An edge inside
    a bucket divides the sums of the bucket in proportion. :meth:`error_bound` bounds the error of each cell. It follows
    from the sums: of the k correct samples among the n of a bucket, the m lowest samples contain at least
    max(0, k - (n - m)) and at most min(m, k). With ``exact=True`` the rows are kept in a temporary file.

    Memory does not depend on the number of samples. For the Gg Gt cells it is 8 bytes per cell for each of ``nll`` and
    ``brier``, and 24 bytes per cell and bucket for ``ece`` and ``mce``: for the 4500 cells of the paper's grid, 1.6 MB
    with ``"equal_width"`` and 15 bins, 111 MB with the 1024 buckets of the other estimators. An update also needs about
    16 MB of scratch memory, 128 bytes per class and thread, and 5 bytes per row of the batch. A pickled state has only
    the buckets that have samples, compressed without loss: about a fifth of its memory.

    Args:
        gammas: [Gg] numbers, finite and greater than -1.
        temperatures: [Gt] numbers, finite and greater than 0.
        n_bins: M >= 1.
        criteria: from ``"ece"``, ``"mce"``, ``"nll"`` and ``"brier"``.
        estimator: bins of ``ece`` and ``mce``, as for :func:`focalkern.calibration_grid`.
        input_kind: ``"logits"`` or ``"probs"``, as :func:`focalkern.calibration_grid`, which checks the first batch.
        ignore_index: label of ignored rows.
        n_buckets: >= 16, number of buckets for the equal-mass estimators; the error bound falls about as
            1 / n_buckets.
        exact: keep the rows in an unnamed temporary file in ``spill_dir``; :meth:`compute` maps the file and computes
            the grid as :func:`focalkern.calibration_grid`. It needs disk space for the input plus 8 bytes per row, and
            in :meth:`compute` memory of 64 bytes per row and gamma. No effect with ``"equal_width"``, which is always
            exact.
        spill_dir: folder of that file; None is the folder of :mod:`tempfile`.

    Raises:
        TypeError, ValueError: as :func:`focalkern.calibration_grid`, for the arguments above.

    Source: Komisarenko & Kull, ECAI 2024 (arXiv 2408.11598), section 5. Mergeable sketches with fixed buckets: Masson,
    Rim & Lee, DDSketch, VLDB 2019 (arXiv 1908.10693); the spacing of the buckets is this project's.

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
        estimator: Estimator = "equal_mass",
        input_kind: InputKind = LOGITS,
        ignore_index: int = -100,
        n_buckets: int = 1024,
        exact: bool = False,
        spill_dir: str | None = None,
    ) -> None:
        self._config = GridConfig.checked(
            gammas,
            temperatures,
            n_bins=n_bins,
            criteria=criteria,
            estimator=estimator,
            input_kind="logits" if is_assumed(input_kind) else input_kind,
            ignore_index=ignore_index,
            n_buckets=n_buckets,
            exact=exact,
        )
        self._content: Accumulator = (
            SampleStore(self._config, spill_dir) if self._config.exact else SumAccumulator(self._config)
        )
        self._n_classes: int | None = None
        self._is_assumed = is_assumed(input_kind)

    @property
    def n_samples(self) -> int:
        """Number of rows added so far, without ignored rows."""
        return self._content.n_rows

    @property
    def n_classes(self) -> int | None:
        """C, or None before the first batch."""
        return self._n_classes

    @property
    def device(self) -> torch.device | None:
        """Device of the sums: the device of the first batch; None before it."""
        return self._content.device

    def __repr__(self) -> str:
        of = self._config
        return (
            f"CalibrationGridState({len(of.gammas)} gammas x {len(of.temperatures)} temperatures, "
            f"criteria={of.criteria}, estimator={of.estimator!r}, n_samples={self.n_samples})"
        )

    def update(self, logits: Tensor, target: Tensor) -> Self:
        """Add a batch. After an error the state is unchanged.

        Sums are accumulated in the order of the rows, so the same batches in the same order give the same bits, for
        every number of threads. An interrupt (Ctrl-C) waits for the end of the batch.

        Args:
            logits: [N, C] or [N, C, d1, ...], logits or probabilities according to ``input_kind``, with N >= 0 and the
                same C for all batches; float16, bfloat16, float32 or float64, which may differ between batches (not
                with ``exact=True``). The sums are on the device of the first batch; the sums of a batch on another
                device are moved there. A batch on a device without float64 is copied to the CPU.
            target: [N] or [N, d1, ...] labels, int64, int32 or uint8, on the device of ``logits``.

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
            logits, target = pixels_as_rows(where_float64(logits.detach()), where_float64(target.detach()))
            if logits.dim() == 2 and self._n_classes not in (None, logits.shape[1]):
                raise ValueError(
                    f"calibration_grid: logits must have the {self._n_classes} classes of the batches before, got "
                    f"[N, C] = {list(logits.shape)}"
                )
            if self._n_classes is None and self._is_assumed:
                refuse_rows_of_probs(logits, "logits")
            if adds_nothing(logits, target, self._config.ignore_index):
                return self
            self._content.add(logits, target)
        self._n_classes = logits.shape[1]
        return self

    def merge(self, other: "CalibrationGridState") -> Self:
        """Add the sums of another state, as if its rows followed the rows of this one.

        Counts are exact; float64 sums depend on the order of merging by about 1e-15 relative.

        Args:
            other: a state for the same grid, criteria, bins and kind of input; on any device. It is not changed.

        Returns:
            The state itself.

        Raises:
            TypeError: ``other`` is not a CalibrationGridState.
            ValueError: a state for another grid, naming the first difference; this state stays unchanged.

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
        subject = "CalibrationGridState.merge: other"
        self._config.check_same(subject, other._config.as_dict())
        if None not in (other._n_classes, self._n_classes) and other._n_classes != self._n_classes:
            raise ValueError(f"{subject} must have {self._n_classes} classes, got {other._n_classes}")
        if other.n_samples:
            self._content.merge(other._content)
            self._n_classes = other._n_classes
        return self

    def all_reduce(self, group: Any = None, *, timeout: datetime.timedelta | None = None) -> Self:
        """Add up the states of all processes of a ``torch.distributed`` group; afterwards each process has the sum.

        Every process must call it, also a process without rows. After an error the state is unchanged.

        Args:
            group: a process group; None is the default group. With gloo the sums are sent from the CPU, with NCCL from
                the current CUDA device.
            timeout: time to wait for the other processes; None is the timeout of the group.

        Returns:
            The state itself.

        Raises:
            ValueError: the states are for different grids or numbers of classes (on every process), or exact.
            RuntimeError: torch.distributed is not initialized; another process has died or did not answer in time.

        Example:
            >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0])
            >>> _ = state.update(torch.tensor([[4.0, 0.0]]), torch.tensor([0]))  # this process's share of the rows
            >>> state.all_reduce().n_samples
            1
            >>> torch.distributed.destroy_process_group()
        """
        # Exact states have no sums; all_reduced raises for them.
        sums = self._content if isinstance(self._content, SumAccumulator) else SumAccumulator(self._config)
        total, n_classes = all_reduced(
            "CalibrationGridState.all_reduce",
            sums.sums,
            sums.zeros,
            digest=self._config.digest(),
            n_classes=self._n_classes,
            exact=self._config.exact,
            words=f"{self!r} of {self._n_classes} classes",
            group=group,
            timeout=timeout,
        )
        if n_classes is not None:
            sums.sums, self._n_classes = total, n_classes
        return self

    def compute(self) -> CalibrationGrid:
        """The grid over all rows added so far. More batches may follow.

        Returns:
            A :class:`focalkern.CalibrationGrid` on the state's device.

        Raises:
            ValueError: no row was added.
        """
        self._check_not_empty("compute")
        return self._content.grid()

    def total(self, criterion: Proper) -> Tensor:
        """The sum of a criterion over the rows added so far; :meth:`compute` gives the mean.

        Args:
            criterion: ``"nll"`` or ``"brier"``, one of ``criteria``.

        Returns:
            [Gg, Gt] float64, a copy; zeros before the first row.

        Raises:
            ValueError: another criterion, or a state with ``exact=True``, which keeps rows instead of sums.

        Example:
            >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0], criteria=("nll",))
            >>> _ = state.update(torch.tensor([[4.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))
            >>> state.total("nll").round(decimals=4)
            tensor([[2.1451, 1.3150]], dtype=torch.float64)
        """
        of, content = self._config, self._content
        if criterion not in PROPER or criterion not in of.criteria or not isinstance(content, SumAccumulator):
            raise ValueError(
                f"CalibrationGridState.total: criterion must be one of nll and brier that is summed, got {criterion!r}"
            )
        if content.sums is None:
            return torch.zeros(len(of.gammas), len(of.temperatures), dtype=torch.float64, device="cpu")
        return dict(content.sums.items())[criterion].clone()

    def error_bound(self, criterion: str) -> Tensor:
        """A bound on the error of :meth:`compute` against the grid of all rows at once, apart from rounding.

        Zero, except for ``ece`` and ``mce`` of an equal-mass estimator without ``exact=True``.

        Args:
            criterion: one of ``criteria``.

        Returns:
            [Gg, Gt] float64, in the unit of the criterion.

        Raises:
            ValueError: another criterion; no row was added.

        Example:
            >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0], estimator="equal_mass", n_bins=2)
            >>> _ = state.update(torch.tensor([[4.0, 0.0], [2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1, 0]))
            >>> state.error_bound("nll"), bool(state.error_bound("ece") < 0.01)
            (tensor([[0.]], dtype=torch.float64), True)
        """
        known = self._config.criteria
        if criterion not in known:
            raise ValueError(
                f"CalibrationGridState.error_bound: criterion must be one of {', '.join(known)}, got {criterion!r}"
            )
        self._check_not_empty("error_bound")
        return self._content.error_bound(criterion)

    def _check_not_empty(self, method: str) -> None:
        if self.n_samples == 0:
            raise ValueError(f"CalibrationGridState.{method}: at least one row must have been seen, got none")

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors, numbers and strings, for ``torch.save`` and ``torch.load(weights_only=True)``.

        Later batches do not change it. With ``exact=True`` it has the rows.

        Returns:
            A dictionary.

        Example:
            >>> state = fk.CalibrationGridState(gammas=[0.0], temperatures=[1.0, 3.0])
            >>> _ = state.update(torch.tensor([[4.0, 0.0]]), torch.tensor([0]))
            >>> torch.save(state.state_dict(), "state.pt")
            >>> fk.CalibrationGridState.from_state_dict(torch.load("state.pt", weights_only=True)).n_samples
            1
        """
        return {
            "format": _FORMAT,
            "config": self._config.as_dict(),
            "n_samples": self.n_samples,
            "n_classes": self._n_classes,
            "tensors": self._content.saved(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Self:
        """Replace the sums with the content of a :meth:`state_dict`.

        Args:
            state_dict: state_dict of a state for the same grid.

        Returns:
            The state itself.

        Raises:
            ValueError: not a dictionary of :meth:`state_dict`, a later format, or a state with other arguments. The
                state stays unchanged.

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
        self._config.check_same(subject, state_dict["config"])
        n_samples, n_classes = state_dict.get("n_samples"), state_dict.get("n_classes")
        if not isinstance(n_samples, int) or n_samples < 0:
            raise ValueError(f"{subject} must have the tensors of this grid, got n_samples = {short(n_samples)}")
        self._content.load(subject, state_dict.get("tensors"), n_samples)
        self._n_classes = n_classes
        return self

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> Self:
        """A new state from a :meth:`state_dict`, with its grid and arguments.

        Args:
            state_dict: the result of :meth:`state_dict`.

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
            subject = "CalibrationGridState.from_state_dict: state_dict"
            raise ValueError(f"{subject} must be what state_dict() returns, got {short(state_dict)}")
        try:
            state = cls(**state_dict["config"])
        except TypeError as error:
            raise ValueError(
                f"CalibrationGridState.from_state_dict: state_dict has an unknown config: {error}"
            ) from None
        return state.load_state_dict(state_dict)
