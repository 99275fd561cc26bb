"""What became of every boundary: executions, rows, failures, and the verdict on each when the trace ends.

Nothing passes by absence: a boundary that was selected and bound, yet did not execute, failed to be read, or gave
fewer rows than the forward had, is vacuous, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tracer.errors import TracerError
from tracer.format.schema import Boundary, BoundaryStatus, NotComputed, RowScope, Span
from tracer.record.host import IntArray
from tracer.record.tokens import SequenceRegistry

__all__ = ["BoundaryTally", "PositionSet", "reason_of"]


def reason_of(error: BaseException) -> str:
    """An error as one line for a manifest."""
    if isinstance(error, TracerError):
        parts = (error.what, error.where, error.expected and f"expected {error.expected}", error.found and f"found {error.found}")
        return f"[{error.code.value}] " + "; ".join(part for part in parts if part)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class PositionSet:
    """Positions per sequence, gathered row by row and kept as spans."""

    def __init__(self) -> None:
        self._spans: dict[int, list[Span]] = {}

    def add(self, sequence_N: IntArray, position_N: IntArray) -> None:
        """Add rows; any order."""
        order_N = np.lexsort((position_N, sequence_N))
        sequence_N, position_N = sequence_N[order_N], position_N[order_N]
        breaks = np.flatnonzero((np.diff(sequence_N) != 0) | (np.diff(position_N) > 1)) + 1
        for run in np.split(np.arange(len(sequence_N)), breaks) if len(sequence_N) else ():
            start, stop = int(position_N[run[0]]), int(position_N[run[-1]]) + 1
            spans = self._spans.setdefault(int(sequence_N[run[0]]), [])
            if spans and spans[-1][0] <= start <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
            else:
                spans.append((start, stop))

    def without(self, sequence: int, removed: Sequence[Span]) -> None:
        """Take positions of one sequence out."""
        left = self.spans(sequence)
        for start, stop in removed:
            left = [piece for low, high in left for piece in ((low, min(high, start)), (max(low, stop), high)) if piece[0] < piece[1]]
        self._spans[sequence] = left

    def spans(self, sequence: int) -> list[Span]:
        """Ascending disjoint spans of one sequence."""
        merged: list[Span] = []
        for start, stop in sorted(self._spans.get(sequence, [])):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return merged

    def sequences(self) -> list[int]:
        """Sequences with at least one position, ascending."""
        return sorted(sequence for sequence, spans in self._spans.items() if spans)

    def __len__(self) -> int:
        return sum(stop - start for sequence in self._spans for start, stop in self.spans(sequence))


@dataclass(eq=False)
class BoundaryTally:
    """One boundary of the plan and what this process saw of it so far."""

    boundary: Boundary
    by_hand: bool = False
    """Recorded with ``t.record``."""
    executions: int = 0
    recomputed: int = 0
    rows: int = 0
    dtype: str = ""
    width: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    unavailable: Counter[str] = field(default_factory=Counter)
    """Why a derived boundary could not be derived, per forward."""
    unseen: str = ""
    """Why the host could not tell it in some forwards. Those rows are declared."""
    missing: list[tuple[IntArray, IntArray]] = field(default_factory=list)
    """(sequence, position) of rows that forwards had and this boundary did not show."""

    @property
    def covers_forward(self) -> bool:
        """Every row of a forward is expected here."""
        return self.boundary.status is BoundaryStatus.RECORDED and self.boundary.rows is RowScope.ALL and not self.by_hand

    def count(self, rows: int, executions: int, recompute: bool, dtype: str, width: int) -> None:
        """An execution was recorded (``executions`` 0: a further part of one)."""
        if recompute:
            self.recomputed += executions
        else:
            self.executions += executions
            self.rows += rows
        if dtype != self.dtype:
            self.dtype = "mixed" if self.dtype else dtype
        self.width = width

    def fail(self, error: BaseException) -> None:
        """An execution could not be read."""
        self.failures[reason_of(error)] += 1

    def finish(
        self, forwards: int, rows: int, silent_because: str, declared: Iterable[NotComputed], registry: SequenceRegistry
    ) -> Boundary:
        """The boundary for the manifest. ``forwards`` and ``rows``: of the whole trace. ``silent_because``: why its hook may
        never fire, or why no forward ran. ``declared``: rows the host never computed."""
        status, reason = self.boundary.status, self.boundary.reason
        if status is BoundaryStatus.RECORDED:
            status, reason = self._verdict(forwards, rows, silent_because, declared, registry)
        return msgspec.structs.replace(
            self.boundary,
            status=status,
            reason=reason,
            dtype=self.dtype,
            width=self.width,
            executions=self.executions,
            recomputed=self.recomputed,
            row_count=self.rows,
        )

    def _verdict(
        self, forwards: int, rows: int, silent_because: str, declared: Iterable[NotComputed], registry: SequenceRegistry
    ) -> tuple[BoundaryStatus, str]:
        if self.failures:
            total = self.executions + self.failures.total()
            return BoundaryStatus.VACUOUS, "; ".join(f"{why} ({n} of {total} executions)" for why, n in self.failures.items())
        if forwards == 0 and not self.executions:
            return BoundaryStatus.VACUOUS, f"no forward ran: {silent_because}" if silent_because else "no forward ran"
        if self.unavailable:
            why = "; ".join(self.unavailable)
            if not self.executions:
                return BoundaryStatus.NOT_OBSERVABLE, why
            return BoundaryStatus.VACUOUS, f"{why} (in {self.unavailable.total()} of {forwards} forwards)"
        if self.unseen and not self.executions:
            return BoundaryStatus.NOT_OBSERVABLE, self.unseen
        if rows and not self.executions:
            return BoundaryStatus.VACUOUS, f"0 executions: {silent_because}" if silent_because else "0 executions"
        return self._short(declared, registry)

    def _short(self, declared: Iterable[NotComputed], registry: SequenceRegistry) -> tuple[BoundaryStatus, str]:
        """Fewer rows than the forwards had, those declared not computed left out."""
        missing = PositionSet()
        for sequence_N, position_N in self.missing:
            missing.add(sequence_N, position_N)
        for entry in declared:
            excused = registry.index(entry.sequence, entry.scope)
            if excused is not None and (not entry.boundaries or self.boundary.name in entry.boundaries):
                missing.without(excused, entry.positions)
        count = len(missing)
        if not count:
            return BoundaryStatus.RECORDED, ""
        sequence = missing.sequences()[0]
        name = registry[sequence].request or registry[sequence].label
        first = missing.spans(sequence)[0][0]
        return BoundaryStatus.VACUOUS, f"{count} rows fewer than the forwards had, first {name}:{first}"
