"""From hooks to observations: which forward a call belongs to, which rows it has, and what is written of it.

``Recorder`` is told what happens (a root forward begins, a module ran, a tap fired, the forward ended) and hands
fingerprints to the outbox. It knows no hooks and no files: ``tracer.record.capture`` wires both to it.

Shape suffixes: N rows of a leaf, R those of them that are recorded, C columns held here, K ids per row.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from tracer.errors import CaptureError, Code, MapError, TracerError, UsageError
from tracer.format.fingerprint import fingerprint_rows
from tracer.format.schema import (
    NARROW_INTEGER_COLUMNS,
    OUTSIDE_TOKENS,
    Axis,
    Boundary,
    BoundaryStatus,
    Counts,
    NotComputed,
    Note,
    RowScope,
    Skipped,
)
from tracer.format.score_shares import SHARE_COLUMNS
from tracer.format.store import RowSet
from tracer.record.boundaries import Plan
from tracer.record.fingerprint_tensors import PendingFingerprints, fingerprint_tensor
from tracer.record.forward_record import Call, ForwardRecord, PositionFilter, Watch, expert_rows
from tracer.record.host import Host, IntArray, Placement, Rows, SkippedForward
from tracer.record.next_token import NextTokenScores, ScoredRows
from tracer.record.outbox import Observation, Outbox
from tracer.record.readers import SourceReader, canonical_order
from tracer.record.recompute import RecomputeFinder, in_backward
from tracer.record.snapshot import local_tensor
from tracer.record.tallies import BoundaryTally, PositionSet
from tracer.record.tokens import SequenceRegistry

__all__ = ["Recorder", "Saver"]

_OUTSTANDING = 64
"""Forwards with checkpointed regions that a recomputation may still belong to."""
_COUNTED = {
    "outside-forward": "{n} calls of watched modules outside any forward of the root module were not recorded",
    "other-thread": "{n} calls of watched modules from other threads than the forward's were not recorded",
    "recompute-unattributed": "{n} recomputed module calls were not recorded: the forward they belong to could not be told",
    "scores-dropped": "{n} last rows waited too long for their next token; their log probability was not recorded",
}
_BY_HAND = "recorded by hand"
_EAGER = 'run it under torch.compiler.set_stance("force_eager")'


class Saver(Protocol):
    """Sees what is recorded with its values, to save some of them."""

    def begin(self) -> None:
        """A forward begins."""

    def see(self, observation: Observation, taken_RC: torch.Tensor) -> None:
        """An execution of a boundary, ``taken_RC`` its recorded rows, to be read before this returns."""


class Recorder:
    """What is recorded of one process's run. Every method may raise; the caller stops recording then."""

    def __init__(
        self,
        host: Host,
        plan: Plan,
        registry: SequenceRegistry,
        outbox: Outbox,
        wanted: PositionFilter | None,
        savers: Sequence[Saver] = (),
    ) -> None:
        """``wanted``: positions to record, None for all. ``savers``: see every execution with its values. Raises MapError where a
        source's selector or layout makes no sense."""
        self.tallies = {boundary.name: BoundaryTally(boundary) for boundary in plan.boundaries}
        self.forwards = 0
        self.rows = 0
        self.counted: Counter[str] = Counter()
        """Things worth a note, by code, with how often they happened."""
        self.readers = [SourceReader(source, host) for source in plan.sources if source.derived != "host"]
        self._host = host
        self._plan = plan
        self._registry = registry
        self._outbox = outbox
        self._wanted = wanted
        self._savers = savers
        self._whole = host.mesh().world_size == 1
        self._skipped_rows: Counter[str] = Counter()
        self._skipped_forwards: Counter[str] = Counter()
        self._left_out = PositionSet()
        self._unseen: dict[tuple[str, str], PositionSet] = {}
        """(input, why) -> rows of which the host could not tell it."""
        self._current: ForwardRecord | None = None
        self._ended: ForwardRecord | None = None
        """The forward that modules after the root still belong to."""
        self._skipping = False
        self._outstanding: deque[ForwardRecord] = deque(maxlen=_OUTSTANDING)
        self._finder: RecomputeFinder[ForwardRecord] = RecomputeFinder()
        self._inputs = [source.boundary for source in plan.sources if source.derived == "host"]
        self._scored = next((source.boundary for source in plan.sources if source.derived == "logprobs"), "")
        self._scores = NextTokenScores(registry)
        self._held: list[tuple[Observation, torch.Tensor]] = []
        self._score_slice: Axis | None = None
        """The axis that cuts the logits, where scores are recorded in shares."""
        self._taps: dict[tuple[str, str], Watch] = {}
        for reader in self.readers:
            if reader.source.tap:
                watch = self._taps.setdefault((reader.source.module, reader.source.leaf), Watch([[]]))
                watch.readers[0].append(reader)

    # ------------------------------------------------------------------------------------------------ forwards

    def running(self) -> ForwardRecord | None:
        """The forward that is running, None outside any that is recorded."""
        return self._current

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A root forward begins with the caller's arguments."""
        forward = self._host.begin_forward(args, kwargs, self._registry)
        self._ended = None
        if isinstance(forward, SkippedForward):
            self._skipping = True
            self._skipped_forwards[forward.reason] += 1
            return
        record = self._current = ForwardRecord(self.forwards, forward, self._wanted)
        self.forwards += 1
        self.rows += len(record.main.rows)
        self._skipped_rows.update(forward.skipped)
        for saver in self._savers:
            saver.begin()
        self._leave_out(forward.rows)
        self._release_scores()
        for scored in self._scores.score_waiting():
            self._hold_scores(scored, executions=0)
        for name in self._inputs:
            self._record_input(name, record)

    def end(self, output: Any) -> None:
        """The root forward returned ``output``."""
        record, self._current, self._skipping = self._current, None, False
        if record is None:
            return
        self._ended = record
        self._host.finish_forward(record.forward, output)
        for (ids, _, recompute), waiting in record.waiting.items():
            for fail in waiting if not recompute else ():
                fail(CaptureError(Code.CAPTURE_FAILED, "its ids were not shown in this forward", where=ids))
        record.waiting.clear()
        record.ids.clear()
        if self._whole:
            for name, tally in self.tallies.items():
                if tally.covers_forward and (missing := record.missing(name)) is not None:
                    tally.missing.append(missing)
        self._outbox.send()

    def abandon(self) -> None:
        """The root forward ended in an exception."""
        self._current, self._ended, self._skipping = None, None, False

    def close(self) -> None:
        """No more forwards: what was held back goes out, scores whose token the host told of last too."""
        self._release_scores()
        for scored in self._scores.score_waiting():
            self._hold_scores(scored, executions=0)
        self._release_scores()
        if self._scores.dropped:
            self.counted["scores-dropped"] += self._scores.dropped

    def _leave_out(self, rows: Rows) -> None:
        """Count the rows that ``tokens=`` leaves out of a forward."""
        if self._wanted is not None:
            out_N = np.flatnonzero((rows.sequence_N >= 0) & ~self._wanted(rows.position_N))
            self._skipped_rows[OUTSIDE_TOKENS] += len(out_N)
            self._left_out.add(rows.sequence_N[out_N], rows.position_N[out_N])

    # ------------------------------------------------------------------------------------------------ hooks and taps

    def module_ran(self, watch: Watch, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """A watched module was called (where it is read before it runs, ``output`` is None)."""
        found = self._call_of(watch, args, kwargs)
        if found is None:
            return
        call, readers = found
        for reader in readers:
            try:
                leaf = reader.leaf(args, kwargs, output)
                rows_NC, row_shape = reader.rows(leaf, len(call.record.forward.rows), args, kwargs, output)
                self._take(reader, call, leaf, rows_NC, row_shape)
            except TracerError as error:
                self.tallies[reader.source.boundary].fail(error)

    def tapped(self, module_path: str, leaf_name: str, leaf: torch.Tensor) -> None:
        """A function tap shows a tensor."""
        watch = self._taps.get((module_path, leaf_name))
        found = None if watch is None else self._call_of(watch, (), {})
        if found is None:
            return
        call, readers = found
        for reader in readers:
            try:
                rows_NC, row_shape = reader.rows(leaf, len(call.record.forward.rows))
                self._take(reader, call, leaf, rows_NC, row_shape)
            except TracerError as error:
                self.tallies[reader.source.boundary].fail(error)

    def _call_of(self, watch: Watch, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, list[SourceReader]] | None:
        """Which call of which forward this is, and what to read of it; None where it belongs to none."""
        recompute = in_backward()
        if recompute:
            record = self._finder.find(args, kwargs) or self._only_candidate(watch)
            if record is None:
                self.counted["recompute-unattributed"] += 1
                return None
        else:
            record = self._current or (self._ended if watch.after_root else None)
            if record is None:
                if not (self._skipping or watch.after_root):
                    self.counted["outside-forward"] += 1
                return None
            if record is self._current and record.thread != threading.get_ident():
                self.counted["other-thread"] += 1
                return None
            if record.grad and self._finder.note_first_pass(record, args, kwargs) and not record.checkpointed:
                record.checkpointed = True
                self._outstanding.append(record)
        number = record.calls[watch, recompute]
        record.calls[watch, recompute] += 1
        if recompute:
            number %= max(record.calls[watch, False], 1)
        paths = len(watch.readers)
        return Call(record, 0 if watch.after_root else number // paths, recompute), watch.readers[number % paths]

    def _only_candidate(self, watch: Watch) -> ForwardRecord | None:
        """The only forward in which this module has run and not been recomputed yet."""
        waiting = [record for record in self._outstanding if record.calls[watch, False] > record.calls[watch, True]]
        return waiting[0] if len(waiting) == 1 else None

    def _take(self, reader: SourceReader, call: Call, leaf: torch.Tensor, rows_NC: torch.Tensor, row_shape: tuple[int, ...]) -> None:
        """Record one execution of one source."""
        source = reader.source
        placed_NC, placement = reader.place(rows_NC, leaf)
        rows = call.record.rows_of(reader, row_shape, self._host)
        if source.derived == "logprobs":
            if not call.recompute:
                self._score(call.record, placed_NC, rows, placement)
            return
        slots = "e" in reader.layout.row_axes and rows.expert_N is None
        if not source.canonical_by:
            if slots:
                rows = expert_rows(rows, reader.layout.row_axes, row_shape, None, source.boundary)
            self._record(reader, call, placed_NC, rows, placement)
            return
        key = (source.canonical_by, call.occurrence, call.recompute)
        if source.boundary == source.canonical_by:
            call.record.ids[key] = placed_NC.clone()
        ids_NK = call.record.ids.get(key)
        if ids_NK is None:
            self._await_ids(reader, call, leaf, rows_NC.clone(), row_shape)
            return
        if slots:
            rows = expert_rows(rows, reader.layout.row_axes, row_shape, ids_NK, source.boundary)
        elif ids_NK.shape == placed_NC.shape:
            placed_NC = placed_NC.gather(1, canonical_order(ids_NK))
        else:
            raise MapError(
                Code.MAP_LAYOUT,
                f"{source.boundary} cannot be ordered by {source.canonical_by}",
                expected=f"as many rows and columns as its ids, {list(ids_NK.shape)}",
                found=str(list(placed_NC.shape)),
            )
        self._record(reader, call, placed_NC, rows, placement)
        if source.boundary == source.canonical_by:
            for resume in call.record.waiting.pop(key, []):
                resume(None)

    def _await_ids(self, reader: SourceReader, call: Call, leaf: torch.Tensor, kept_NC: torch.Tensor, row_shape: tuple[int, ...]) -> None:
        """Take a copy once the ids that order it have been shown."""

        def resume(error: TracerError | None) -> None:
            try:
                if error is not None:
                    raise error
                self._take(reader, call, leaf, kept_NC, row_shape)
            except TracerError as failure:
                self.tallies[reader.source.boundary].fail(failure)

        key = (reader.source.canonical_by, call.occurrence, call.recompute)
        call.record.waiting.setdefault(key, []).append(resume)

    def _record(self, reader: SourceReader, call: Call, rows_NC: torch.Tensor, rows: Rows, placement: Placement) -> None:
        """Fingerprint the recorded rows, now, and send them."""
        source = reader.source
        if len(rows) != len(rows_NC):
            raise MapError(
                Code.MAP_LAYOUT,
                f"the host labels other rows than {source.boundary} has",
                expected=f"{len(rows)} rows",
                found=f"{len(rows_NC)} rows",
            )
        selection = call.record.select(rows)
        width, spans = placement.width, placement.spans
        if rows_NC.is_complex():
            width, spans = 2 * width, tuple((2 * start, 2 * stop) for start, stop in spans)
        row_set, taken_RC = selection.rows, selection.take(rows_NC)
        if spans and not rows_NC.shape[1]:  # it ran, and this process has no column of any row
            none = np.zeros(0, np.int64)
            row_set, taken_RC, spans = RowSet(none, none, call.record.number), rows_NC.new_zeros((0, 1)), ((0, 1),)
        observation = Observation(
            source.boundary,
            row_set,
            fingerprint_tensor(taken_RC, width=width, spans=spans),
            _dtype(rows_NC),
            width,
            spans,
            placement.partial,
            call.occurrence,
            call.recompute,
            executions=int(source.part == 0),
        )
        self._send(observation, source.part == 0)
        self._show(observation, taken_RC)
        if not (source.part or call.recompute):
            call.record.shown.setdefault(source.boundary, []).append(selection)

    def _send(self, observation: Observation, first_part: bool = True) -> None:
        """Hand an observation on, and count it. Of a boundary in parts only the first one's rows count."""
        self._outbox.add(observation)
        rows = len(observation.rows) if first_part else 0
        tally = self.tallies[observation.boundary]
        tally.count(rows, observation.executions, observation.recompute, observation.dtype, observation.width)

    def _show(self, observation: Observation, taken_RC: torch.Tensor) -> None:
        """Let the savers see the values of what was just recorded, recompute apart."""
        if not observation.recompute:
            for saver in self._savers:
                saver.see(observation, taken_RC)

    # ------------------------------------------------------------------------------------------------ derived boundaries

    def _record_input(self, name: str, record: ForwardRecord) -> None:
        """An integer input that the host gives by name."""
        forward, tally = record.forward, self.tallies[name]
        values = forward.inputs.get(name, forward.ids_N if name == "input.ids" else None)
        if name in forward.unseen:
            rows = record.main.rows
            self._unseen.setdefault((name, forward.unseen[name]), PositionSet()).add(rows.sequence_R, rows.position_R)
            tally.unseen = forward.unseen[name]
            return
        if values is None:
            tally.unavailable["the host is not given it in this process"] += 1
            return
        values_NC = np.asarray(values, np.int64).reshape(len(forward.rows), -1) if len(forward.rows) else np.zeros((0, 1), np.int64)
        taken: Any = slice(None) if record.main.index_R is None else record.main.index_R
        fingerprints = fingerprint_rows(values_NC[taken], "int64", width=values_NC.shape[1])
        pending = PendingFingerprints(lambda: fingerprints)
        self._send(Observation(name, record.main.rows, pending, "int64", values_NC.shape[1]))
        record.shown.setdefault(name, []).append(record.main)

    def _score(self, record: ForwardRecord, logits_NV: torch.Tensor, rows: Rows, placement: Placement) -> None:
        """Scores of the tokens that follow, from the logits of this call."""
        tally = self.tallies[self._scored]
        if tally.by_hand:
            return
        whole = not placement.axis and placement.spans in ((), ((0, placement.width),))
        self._score_slice = None if whole else self._host.mesh().axis(placement.axis)
        if placement.partial or (not whole and not self._shareable(placement)):
            tally.unavailable["columns are sharded in a way that no share of a score can be taken of"] += 1
            return
        scored = self._scores.score(logits_NV, rows, record.number, None if whole else placement.spans[0])
        if scored is None:
            tally.unavailable["token ids are not known in this process"] += 1
        else:
            self._hold_scores(scored, executions=1)

    def _shareable(self, placement: Placement) -> bool:
        """Whether the columns are one run of a row that the processes along one axis cut, few enough to keep raw shares."""
        axis = self._score_slice
        return axis is not None and len(placement.spans) == 1 and SHARE_COLUMNS * axis.size <= NARROW_INTEGER_COLUMNS

    def _hold_scores(self, scored: ScoredRows, executions: int) -> None:
        """Fingerprint scores; they go out with the next forward, unless the user records them by hand until then."""
        keep: Any = slice(None) if self._wanted is None else np.flatnonzero(self._wanted(scored.position_N))
        rows = RowSet(scored.sequence_N[keep], scored.position_N[keep], scored.forward)
        score_N = scored.score_N if self._wanted is None else scored.score_N[torch.from_numpy(keep).to(scored.score_N.device)]
        if self._score_slice is None:
            fingerprints = fingerprint_tensor(score_N[:, None], width=1)
            self._held.append((Observation(self._scored, rows, fingerprints, "float32", 1, executions=executions), score_N[:, None]))
            return
        width, start = SHARE_COLUMNS * self._score_slice.size, SHARE_COLUMNS * self._score_slice.index
        spans = ((start, start + SHARE_COLUMNS),)
        fingerprints = fingerprint_tensor(score_N, width=width, spans=spans)
        self._held.append((Observation(self._scored, rows, fingerprints, "int64", width, spans, executions=executions), score_N))

    def _release_scores(self) -> None:
        for observation, score_NC in self._held:
            self._send(observation)
            self._show(observation, score_NC)
        self._held.clear()

    def record_by_hand(self, name: str, values: torch.Tensor, sequence: int, position_N: IntArray) -> None:
        """Rows of a boundary computed outside the model. ``values``: (N,) or (N, ...), read before this returns.

        Raises UsageError (bad-argument) where the boundary is recorded by hooks, or its scores went out already."""
        tally = self.tallies.get(name)
        if tally is None:
            boundary = Boundary(name=name, level=0, rows=RowScope.SAMPLED, source=_BY_HAND)
            tally = self.tallies[name] = BoundaryTally(boundary, by_hand=True)
        elif not tally.by_hand:
            recorded = tally.boundary.status is BoundaryStatus.RECORDED
            if recorded and (name != self._scored or tally.executions):
                raise UsageError(
                    Code.BAD_ARGUMENT,
                    f"{name} is recorded already",
                    expected="a boundary that neither hooks nor the logits show",
                    found=tally.boundary.source,
                    remedy="leave it out with boundaries=; scores recorded by hand come before the second forward begins",
                )
            tally.boundary = msgspec.structs.replace(tally.boundary, status=BoundaryStatus.RECORDED, reason="", source=_BY_HAND)
            tally.by_hand = True
            tally.unavailable.clear()
            if name == self._scored:
                self._held.clear()
        values = local_tensor(values)
        rows_NC = values.reshape(len(position_N), -1) if len(position_N) else values.new_zeros((0, max(math.prod(values.shape[1:]), 1)))
        if self._wanted is not None:
            keep_R = np.flatnonzero(self._wanted(position_N))
            rows_NC, position_N = rows_NC[torch.from_numpy(keep_R).to(rows_NC.device)], position_N[keep_R]
        rows = RowSet(np.full(len(position_N), sequence, np.int64), position_N, max(self.forwards - 1, 0))
        width = rows_NC.shape[1] * (2 if rows_NC.is_complex() else 1)
        observation = Observation(name, rows, fingerprint_tensor(rows_NC, width=width), _dtype(rows_NC), width)
        self._send(observation)
        self._show(observation, rows_NC)

    # ------------------------------------------------------------------------------------------------ the end

    def boundaries(self, weights: Mapping[str, tuple[str, ...]], declared: Sequence[NotComputed]) -> tuple[Boundary, ...]:
        """Every boundary with its verdict. ``weights``: semantic names per boundary; ``declared``: rows the host never computed."""
        modules = {source.boundary: source.module for source in self._plan.sources if source.derived != "host"}
        skipped = "; ".join(f"{n} skipped: {reason}" for reason, n in self._skipped_forwards.items())
        no_forward = skipped or self._host.compiled_reason("") or self._uncalled()
        finished = []
        for name, tally in self.tallies.items():
            silent = "" if tally.executions or name not in modules else self._host.compiled_reason(modules[name])
            boundary = tally.finish(self.forwards, self.rows, silent if self.forwards else no_forward, declared, self._registry)
            finished.append(msgspec.structs.replace(boundary, weights=weights.get(name, boundary.weights)))
        return tuple(finished)

    def _uncalled(self) -> str:
        """Why no forward was seen, as far as the calls of modules tell."""
        if outside := self.counted["outside-forward"]:
            remedy = "call model(...), not model.forward(...) or a part like model.model(...)"
            return f"{outside} calls of its modules came from elsewhere: {remedy}"
        return f"nothing called model(...); torch.compile(model)(...) is no such call: {_EAGER}"

    def counts(self) -> Counts:
        """Totals of this process."""
        skipped = [Skipped(reason=reason, rows=n) for reason, n in self._skipped_rows.items() if n]
        skipped += [Skipped(reason=reason, forwards=n) for reason, n in self._skipped_forwards.items()]
        return Counts(forwards=self.forwards, rows=self.rows, skipped=tuple(skipped))

    def notes(self) -> list[Note]:
        """What the reader should know besides the verdicts: counted oddities, and what could not be read, at most 20 of it."""
        counted = [Note(code=code, text=_COUNTED[code].format(n=n)) for code, n in self.counted.items()]
        failed = [(name, why) for name, tally in self.tallies.items() for why in tally.failures]
        return [*counted, *(Note(code="boundary-unreadable", text=f"{name}: {why}") for name, why in failed[:20])]

    def left_out(self) -> list[NotComputed]:
        """The rows that ``tokens=`` left out, and those of which an input could not be told, as declarations."""
        return [
            *self._declared(self._left_out, OUTSIDE_TOKENS),
            *(entry for (name, why), positions in self._unseen.items() for entry in self._declared(positions, why, (name,))),
        ]

    def _declared(self, positions: PositionSet, reason: str, boundaries: tuple[str, ...] = ()) -> Iterator[NotComputed]:
        for sequence in positions.sequences():
            known = self._registry[sequence]
            yield NotComputed(
                sequence=known.label, scope=known.scope, positions=tuple(positions.spans(sequence)), boundaries=boundaries, reason=reason
            )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
