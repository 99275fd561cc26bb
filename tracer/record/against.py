"""``against=``: save bytes at the first boundary that differs from another trace, while the model runs.

Every whole row is held against the other trace's digest as soon as it is computed. The earliest boundary (in causal order)
with a row that differs is saved: the rows that differ, a few equal neighbours, and the rows of what it is computed from,
which are kept on their device until every reader of theirs has run. A boundary that cannot be judged in one process while
running (columns sharded, partial sums, ids unknown here) is left to a plan, and the trace says so.

Suffixes: R recorded rows of one observation, S those of them that are saved, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tracer.format.reference import Reference, ReferenceRows
from tracer.format.schema import Boundary, BoundaryStatus, Note
from tracer.record.dumping import Dumping
from tracer.record.host import IntArray
from tracer.record.outbox import Observation

__all__ = ["EQUAL_NEIGHBOURS", "Against"]

EQUAL_NEIGHBOURS = 4
_ROWS = 256
"""Differing rows saved per execution: enough for every statistic, and the cap is for more boundaries than one."""


@dataclass(frozen=True, eq=False)
class _Held:
    observation: Observation
    rows_RC: torch.Tensor


class Against:
    """Compares what is recorded with another trace. Called by the traced program's threads, one at a time."""

    def __init__(self, reference: Reference, boundaries: Sequence[Boundary], dumping: Dumping) -> None:
        """``boundaries``: of the resolved map, in causal order."""
        self.first = ""
        """The earliest boundary found to differ so far."""
        self._reference = reference
        self._dumping = dumping
        self._order = {boundary.name: at for at, boundary in enumerate(boundaries)}
        self._mixes = {boundary.name for boundary in boundaries if boundary.mixes_tokens}
        self._inputs = _recorded_inputs(boundaries)
        self._last_reader: dict[str, int] = {}
        for name, inputs in self._inputs.items():
            for source in inputs:
                self._last_reader[source] = max(self._last_reader.get(source, -1), self._order[name])
        self._first_at = len(boundaries)
        self._rows: dict[str, ReferenceRows | None] = {}
        self._held: dict[str, _Held] = {}
        self._left: dict[str, str] = {}

    def begin(self) -> None:
        """A forward begins: nothing of the one before is an input of it."""
        self._held.clear()

    def see(self, observation: Observation, taken_RC: torch.Tensor) -> None:
        """An execution of a boundary, ``taken_RC`` its recorded rows."""
        name = observation.boundary
        at = self._order.get(name, len(self._order))
        if at > self._first_at or not len(observation.rows):
            return
        differs_R = self._differing(observation)
        if differs_R is not None and differs_R.any():
            self.first, self._first_at = name, at
            self._save(observation, taken_RC, differs_R)
        self._held = {kept: held for kept, held in self._held.items() if self._last_reader[kept] > at}
        if self._last_reader.get(name, -1) > at:
            self._held[name] = _Held(observation, taken_RC.detach().clone())

    def _differing(self, observation: Observation) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """Rows that the other trace has and that differ, (R,); None where that cannot be told here."""
        name = observation.boundary
        if name not in self._rows:
            self._rows[name] = self._reference.load(name)
        theirs = self._rows[name]
        key_R, known_R = self._dumping.keys(observation)
        if theirs is None or theirs.digest_R2 is None:
            why = "the other trace has no digests of it"
        elif observation.partial or observation.spans not in ((), ((0, observation.width),)):
            why = "this process holds a part of its columns"
        elif not known_R.all():
            why = "token ids are not known in this process"
        else:
            line_R = theirs.find(key_R, None if observation.rows.expert_R is None else observation.rows.expert_R.astype(np.int64))
            paired_R = line_R >= 0
            if not paired_R.any():
                return paired_R
            digest_R2 = observation.fingerprints.resolve().digest_N2
            return np.asarray(paired_R & (digest_R2 != theirs.digest_R2[np.maximum(line_R, 0)]).any(axis=1))
        self._left.setdefault(name, why)
        return None

    def _save(self, observation: Observation, taken_RC: torch.Tensor, differs_R: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Save differing rows with neighbours, after the rows of what they are computed from."""
        differing, equal = np.flatnonzero(differs_R), np.flatnonzero(~differs_R)
        index_S = np.sort(np.concatenate([differing[:_ROWS], equal[:EQUAL_NEIGHBOURS]]))
        rows = observation.rows
        place_S = _places(rows.sequence_R[index_S], rows.position_R[index_S])
        for source in self._inputs[observation.boundary]:
            held = self._held.get(source)
            if held is not None:
                theirs = held.observation.rows
                place_R = _places(theirs.sequence_R, theirs.position_R)
                if observation.boundary in self._mixes:
                    chosen_R = np.isin(theirs.sequence_R, rows.sequence_R[index_S]) & (place_R <= place_S.max())
                else:
                    chosen_R = np.isin(place_R, place_S)
                self._dumping.save(held.observation, held.rows_RC, np.flatnonzero(chosen_R))
        self._dumping.save(observation, taken_RC, index_S)

    def notes(self) -> list[Note]:
        """What was found and what could not be judged, for the manifest."""
        last = self._first_at
        left = [name for name in self._left if self._order[name] < last]
        found = f"first differs at {self.first}, saved" if self.first else "nothing that could be judged differs"
        notes = [Note(code="against", text=f"against run {self._reference.name}: {found}")]
        if left:
            names = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            text = f"before that, {names} could not be judged while running ({self._left[left[0]]}): use tracer diff A B --plan FILE"
            notes.append(Note(code="against-left", text=text))
        return notes


def _recorded_inputs(boundaries: Sequence[Boundary]) -> dict[str, tuple[str, ...]]:
    """Per boundary its inputs, what is not recorded replaced by its own inputs, the model's inputs left out."""
    known = {boundary.name: boundary for boundary in boundaries}
    nearest: dict[str, tuple[str, ...]] = {}
    for boundary in boundaries:
        found: dict[str, None] = {}
        for source in boundary.inputs:
            if source in known and known[source].status is BoundaryStatus.RECORDED:
                found[source] = None
            else:
                found.update(dict.fromkeys(nearest.get(source, ())))
        nearest[boundary.name] = tuple(name for name in found if not name.startswith("input."))
    return nearest


def _places(sequence_R: IntArray, position_R: IntArray) -> IntArray:
    """(sequence, position) as one number each."""
    places: IntArray = sequence_R.astype(np.int64) << 32 | position_R.astype(np.int64)
    return places
