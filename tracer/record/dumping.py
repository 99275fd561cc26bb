"""Which rows are saved with their bytes, how many of them, and the copies themselves.

Rows are chosen by globs over boundaries, by a plan, or by what differs from another trace (``tracer.record.against``).
Copies are made in the hook that saw the values; a byte cap bounds all of them together. Nothing here runs unless it was asked for.

Suffixes: R recorded rows of one observation, S those of them that are saved, C columns, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tracer.errors import Code, UsageError
from tracer.format.dtypes import AnyArray
from tracer.format.dumps import DumpBlock, DumpPlan, PlanBoundary
from tracer.format.schema import Boundary, BoundaryStatus, Note, RowScope
from tracer.record.boundaries import matches
from tracer.record.fingerprint_tensors import copy_to_host, dense_reals
from tracer.record.host import IntArray
from tracer.record.outbox import Observation, Outbox, SavedRows
from tracer.record.tokens import SequenceRegistry

__all__ = ["MAX_DUMP_BYTES", "Dumping", "dump_globs"]

MAX_DUMP_BYTES = 64 << 20

U64 = npt.NDArray[np.uint64]


def dump_globs(dump: str | Sequence[str] | None) -> tuple[str, ...]:
    """``dump=`` as globs."""
    return () if dump is None else (dump,) if isinstance(dump, str) else tuple(dump)


@dataclass
class _Wanted:
    """Rows of one boundary that a plan asks for: by (key, expert), and for processes that do not know the ids by
    (scope, label, position, expert)."""

    keys: set[tuple[int, int]] = field(default_factory=set)
    places: set[tuple[str, str, int, int]] = field(default_factory=set)


class Dumping:
    """What is saved in one process. Called by the traced program's threads, one at a time."""

    def __init__(
        self,
        registry: SequenceRegistry,
        outbox: Outbox,
        boundaries: Iterable[Boundary],
        *,
        globs: Sequence[str] = (),
        plan: DumpPlan | None = None,
        max_bytes: int = MAX_DUMP_BYTES,
        left_out: dict[str, int] | None = None,
    ) -> None:
        """``boundaries``: of the resolved map. ``left_out``: counts per boundary what the cap leaves out.

        Raises UsageError (bad-argument) for a glob that matches nothing recorded."""
        known = {boundary.name: boundary for boundary in boundaries}
        self.max_bytes = max_bytes
        self.bytes = 0
        self.left_out: dict[str, int] = {} if left_out is None else left_out
        self._registry = registry
        self._outbox = outbox
        self._following = {name for name, boundary in known.items() if boundary.rows is RowScope.NEXT}
        recorded = [name for name, boundary in known.items() if boundary.status is BoundaryStatus.RECORDED]
        self._whole = {name for name in recorded for glob in globs if matches(name, glob)}
        for glob in globs:
            if not any(matches(name, glob) for name in recorded):
                raise UsageError(
                    Code.BAD_ARGUMENT,
                    f"dump={glob!r} matches no boundary that is recorded here",
                    expected="globs over names such as layers.*.residual",
                    found=glob,
                    remedy="`tracer map show` lists the names, and which of them this host can show",
                )
        self._wanted = {rows.boundary: _wanted(rows, plan) for rows in (() if plan is None else plan.boundaries)}

    def begin(self) -> None:
        """A forward begins."""

    def see(self, observation: Observation, taken_RC: torch.Tensor) -> None:
        """An execution of a boundary, ``taken_RC`` its recorded rows: save what was asked for of them."""
        if observation.boundary in self._whole:
            self.save(observation, taken_RC, np.arange(len(observation.rows)))
        elif observation.boundary in self._wanted:
            self.save(observation, taken_RC, self._asked_for(observation))

    def save(self, observation: Observation, taken_RC: torch.Tensor, index_S: IntArray) -> None:
        """Copy some rows, now, as far as the cap allows; the rest is counted."""
        reals_RC, _ = dense_reals(taken_RC)
        row_bytes = reals_RC.shape[1] * reals_RC.element_size()
        room = max(self.max_bytes - self.bytes, 0) // max(row_bytes, 1)
        if len(index_S) > room:
            name = observation.boundary
            self.left_out[name] = self.left_out.get(name, 0) + len(index_S) - room
            index_S = index_S[:room]
        if not len(index_S):
            return
        self.bytes += len(index_S) * row_bytes
        block = DumpBlock(
            boundary=observation.boundary,
            dtype=observation.dtype,
            width=observation.width,
            spans=observation.spans,
            partial=observation.partial,
            occurrence=observation.occurrence,
            forward=observation.rows.forward,
            rows=len(index_S),
        )
        self._outbox.save(SavedRows(block, observation.rows, index_S, observation.fingerprints, _copy(reals_RC, index_S)))

    def keys(self, observation: Observation) -> tuple[U64, npt.NDArray[np.bool_]]:
        """Token keys of the recorded rows, and which of them are known here: both (R,)."""
        step = int(observation.boundary in self._following)
        rows = observation.rows
        return self._registry.keys(rows.sequence_R.astype(np.int64), rows.position_R.astype(np.int64) + step)

    def _asked_for(self, observation: Observation) -> IntArray:
        """Rows that the plan asks for, (S,)."""
        wanted, rows = self._wanted[observation.boundary], observation.rows
        key_R, known_R = self.keys(observation)
        expert_R = np.full(len(rows), -1) if rows.expert_R is None else rows.expert_R
        chosen = []
        for row, (key, known, expert) in enumerate(zip(key_R.tolist(), known_R.tolist(), expert_R.tolist(), strict=True)):
            if known:
                asked = (key, expert) in wanted.keys
            else:
                sequence = self._registry[int(rows.sequence_R[row])]
                asked = (sequence.scope, sequence.label, int(rows.position_R[row]), expert) in wanted.places
            if asked:
                chosen.append(row)
        return np.array(chosen, np.int64)

    def notes(self) -> list[Note]:
        """What the cap left out, for the manifest."""
        if not self.left_out:
            return []
        rows = ", ".join(f"{count} rows of {name}" for name, count in list(self.left_out.items())[:4])
        more = f" and of {len(self.left_out) - 4} more boundaries" if len(self.left_out) > 4 else ""
        return [Note(code="dump-capped", text=f"the dump reached its cap of {self.max_bytes} bytes and left out {rows}{more}")]


def _wanted(rows: PlanBoundary, plan: DumpPlan | None) -> _Wanted:
    assert plan is not None
    experts = rows.experts or (-1,) * len(rows.keys)
    wanted = _Wanted({(int(key, 16), expert) for key, expert in zip(rows.keys, experts, strict=True)})
    for side, places in ((plan.a, rows.places_a), (plan.b, rows.places_b)):
        for (sequence, position), expert in zip(places, experts, strict=False):
            if sequence >= 0:
                wanted.places.add((*side.sequences[sequence], position, expert))
    return wanted


def _copy(reals_RC: torch.Tensor, index_S: IntArray) -> Callable[[], AnyArray]:
    """Bytes of some rows, uint8 (S, B), copied before this returns (CPU) or in the order of the stream."""
    with torch.no_grad():
        if len(index_S) == len(reals_RC):
            chosen_SC = reals_RC.clone(memory_format=torch.contiguous_format)
        else:
            chosen_SC = reals_RC[torch.from_numpy(index_S).to(reals_RC.device)].contiguous()
        return copy_to_host(chosen_SC.view(torch.uint8))
