"""Which token of which sequence every row of a transformers call is, also through key-value caches.

A cache has no idea whose tokens it holds, so each cache that a traced model uses carries a ``CacheHistory``: for every
batch row the documents it went through and which cache slots are tokens (the others are padding). Edits of the cache
(beams, repeats, selections) edit the history; a cropped or reset cache is recognised by its length, a deep-copied one
takes a copy along. A cache that holds tokens nobody saw starts sequences in the middle.

Shape suffixes: B batch rows, S columns of this call, P slots in the cache before it, K = P + S.
A *row index* counts the tokens of one batch row from 0, over all its documents; padding does not count.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.format.schema import NotComputed, Note, Span
from tracer.record.host import IntArray, Rows
from tracer.record.tokens import SequenceRegistry

__all__ = ["CacheHistory", "Call", "Labelled", "SequenceTracker", "first_visible_slots"]

BoolArray = npt.NDArray[np.bool_]

SCORE_BOUNDARIES = ("scorer.logprobs",)
LOGIT_BOUNDARIES = ("lm_head.raw", "lm_head", "scorer.logprobs")
"""What is not computed for a row whose logits nobody asked for."""

_SKIPPED, _KEPT = 1, 2


@dataclass(eq=False)
class _Document:
    """One sequence of the run, as long as some cache may still continue it."""

    sequence: int
    label: str
    request: str
    salt: str
    row: str
    start: int
    """First position this trace saw; tokens before it are unknown."""
    known: bool = True
    """Whether all ids from ``start`` on are known."""
    ids: array[int] = field(default_factory=lambda: array("q"))
    """Ids from ``start`` on; zeros where unknown."""
    registered: int = 0
    """Ids given to the registry so far."""
    logits: bytearray = field(default_factory=bytearray)
    """Per position: 0 never run, 1 run without logits, 2 logits computed."""

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)

    def agrees(self, position: int, ids: IntArray | None) -> bool:
        """Whether tokens from ``position`` on may be this document's: they are new, or known to be the same."""
        if position >= self.stop:
            return True
        if ids is None or not self.known or position < self.start:
            return False
        at = position - self.start
        mine = np.frombuffer(self.ids, np.int64)[at : at + len(ids)]
        return bool((mine == ids[: len(mine)]).all())

    def extend(self, position: int, count: int, ids: IntArray | None) -> None:
        new = position + count - self.stop
        if new > 0:
            self.known = self.known and ids is not None
            self.ids.extend(ids[-new:].tolist() if ids is not None else [0] * new)

    def register(self, registry: SequenceRegistry, stop: int) -> None:
        """Give the registry every id up to position ``stop``."""
        count = stop - self.start
        if self.known and count > self.registered:
            ids = np.frombuffer(self.ids, np.int64)[self.registered : count].copy()
            registry.record_ids(self.sequence, self.start + self.registered, ids)
            self.registered = count

    def mark_logits(self, position: int, kept: BoolArray) -> None:
        end = position + len(kept)
        if position == len(self.logits) and len(kept) == 1:
            self.logits.append(_KEPT if kept[0] else _SKIPPED)
            return
        self.logits.extend(bytes(max(end - len(self.logits), 0)))
        state = np.frombuffer(self.logits, np.uint8)[position:end]
        np.maximum(state, np.where(kept, _KEPT, _SKIPPED).astype(np.uint8), out=state)

    def spans_without_logits(self) -> tuple[Span, ...]:
        skipped = np.frombuffer(bytes(self.logits), np.uint8) == _SKIPPED
        edges = np.flatnonzero(np.diff(np.concatenate([[False], skipped, [False]]).astype(np.int8)))
        return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


class CacheHistory:
    """Whose tokens a cache holds. ``documents``: per batch row (document, row index of its first token), in order."""

    def __init__(self, real_BP: BoolArray, documents: list[list[tuple[_Document, int]]], finished_B: BoolArray) -> None:
        self.real_BP = real_BP
        self.documents = documents
        self.finished_B = finished_B

    @classmethod
    def empty(cls, batch: int) -> CacheHistory:
        return cls(np.zeros((batch, 0), bool), [[] for _ in range(batch)], np.zeros(batch, bool))

    @property
    def batch(self) -> int:
        return len(self.documents)

    @property
    def length(self) -> int:
        return int(self.real_BP.shape[1])

    def copy(self) -> CacheHistory:
        return CacheHistory(self.real_BP.copy(), [list(row) for row in self.documents], self.finished_B.copy())

    def select(self, index: Any) -> None:
        """Batch row i becomes what row ``index[i]`` was."""
        index_B = np.arange(self.batch)[np.asarray(index)]
        self.real_BP = self.real_BP[index_B]
        self.documents = [list(self.documents[i]) for i in index_B.tolist()]
        self.finished_B = self.finished_B[index_B]

    def repeat(self, repeats: int) -> None:
        self.select(np.repeat(np.arange(self.batch), int(repeats)))

    def crop(self, length: int) -> None:
        """Only the first ``length`` slots are left."""
        self.real_BP = self.real_BP[:, :length]
        for row, count in zip(self.documents, self.real_BP.sum(axis=1).tolist(), strict=True):
            while row and row[-1][1] >= count:
                row.pop()


@dataclass(frozen=True)
class Call:
    """One call of the model, as far as it says what the rows are. ``token_BS``: real tokens, not padding."""

    number: int
    """Forward of this process, from 0."""
    ids_BS: IntArray | None
    token_BS: BoolArray
    position_BS: IntArray
    positions_given: bool
    past: int
    """P: slots that the cache held before."""
    past_BP: BoolArray | None = None
    """Which of those are tokens, where a mask says so."""
    visible_BS: IntArray | None = None
    """First slot each row may attend to, K where there is none; None where nothing limits it."""
    mask_unseen: str = ""
    """Why ``visible_BS`` does not tell all that the mask hides, where it does not."""
    lengths: Sequence[Sequence[int]] | None = None
    """Document lengths per batch row, where given."""
    generating: bool = False
    """Called by ``generate``: the tokens of one-column calls are sampled ones."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end a sampled sequence."""
    salt: str = ""


@dataclass(frozen=True)
class _Segment:
    """Consecutive tokens of one document in one batch row of a call. ``first``: row index of the document's position 0."""

    document: _Document
    first: int
    position: int
    batch_row: int
    columns: IntArray


@dataclass(frozen=True)
class Labelled:
    """What ``SequenceTracker.label`` found out. ``visible_from_N`` as ``input.visible_from``."""

    rows: Rows
    visible_from_N: IntArray
    skipped: dict[str, int]
    segments: tuple[_Segment, ...]
    history: CacheHistory
    """The cache's history once the call has returned."""


@dataclass(frozen=True)
class _Sampled:
    """Where the token goes that ``generate`` sampled last: position in its document, column of the returned sequences."""

    position: int
    slots: int


class SequenceTracker:
    """Opens the sequences of one host's run and continues them from call to call."""

    def __init__(self, scope: str = "") -> None:
        self.scope = scope
        self._documents: list[_Document] = []
        self._sampled: dict[_Document, _Sampled] = {}
        self._next_elsewhere: dict[str, IntArray] = {}

    def label(self, call: Call, history: CacheHistory | None, registry: SequenceRegistry) -> Labelled:
        """Label every row of a call. ``history`` is the cache's, None without a cache or for a cache never seen; it is
        not changed. Opens sequences in batch order, document order inside a row, and records their ids."""
        before = self._before(call, history, registry)
        after = CacheHistory(
            np.concatenate([before.real_BP, call.token_BS], axis=1), [list(row) for row in before.documents], before.finished_B.copy()
        )
        segments = self._segments(call, before, after, registry)
        sequence_BS = np.full(call.token_BS.shape, -1, np.int64)
        first_BS = np.zeros(call.token_BS.shape, np.int64)
        for segment in segments:
            sequence_BS[segment.batch_row, segment.columns] = segment.document.sequence
            first_BS[segment.batch_row, segment.columns] = segment.first
        position_BS, visible_BS = _positions(call, after.real_BP, first_BS)
        finished_B = self._finish(call, after)
        finished = int((sequence_BS[finished_B] >= 0).sum())
        sequence_BS[finished_B] = -1
        for segment in segments:
            if not finished_B[segment.batch_row]:
                segment.document.register(registry, segment.position + len(segment.columns))
        self._note_sampled(call, before, after)
        skipped = {"padding": int((~call.token_BS).sum()), "after the end of a sampled sequence": finished}
        return Labelled(
            Rows(sequence_BS.reshape(-1), position_BS.reshape(-1)),
            visible_BS.reshape(-1),
            {reason: count for reason, count in skipped.items() if count},
            segments,
            after,
        )

    def label_by_position(self, call: Call, registry: SequenceRegistry) -> Labelled:
        """Label a call that holds some tokens of every sequence, in any order (context parallelism): one sequence per batch
        row, and every row is where its position id says. Nothing is cached, all earlier tokens are taken for visible."""
        batch, columns = call.token_BS.shape
        sequence_BS = np.full((batch, columns), -1, np.int64)
        for b, name in enumerate(registry.take_requests(batch)):
            label = f"f{call.number}.r{b}.d0"
            place = f"{call.number}/{b}"
            sequence_BS[b, call.token_BS[b]] = registry.open(label, request=name, scope=self.scope, salt=call.salt, row=place)
            held_T = call.position_BS[b, call.token_BS[b]]
            self._next_elsewhere[label] = np.sort(held_T[~np.isin(held_T + 1, held_T)])
        rows = Rows(sequence_BS.reshape(-1), np.where(call.token_BS, call.position_BS, 0).reshape(-1))
        if call.ids_BS is not None:
            registry.record_rows(rows, call.ids_BS)
        padding = int((~call.token_BS).sum())
        skipped = {"padding": padding} if padding else {}
        return Labelled(rows, np.zeros(batch * columns, np.int64), skipped, (), CacheHistory.empty(batch))

    def note_logits(self, labelled: Labelled, kept_BS: BoolArray) -> None:
        """The call computed logits for the columns in ``kept_BS`` only."""
        for segment in labelled.segments:
            segment.document.mark_logits(segment.position, kept_BS[segment.batch_row, segment.columns])

    def note_returned(self, ids_BL: IntArray, registry: SequenceRegistry) -> None:
        """``generate`` returned these sequences, left padding included: record the id of every last sampled token among them."""
        for document, sampled in self._sampled.items():
            held = sampled.position - document.start
            begin, end = sampled.slots - held, sampled.slots
            if not document.known or document.start or begin < 0 or end >= ids_BL.shape[1] or document.stop != sampled.position:
                continue
            mine = np.frombuffer(document.ids, np.int64).copy()
            found = np.flatnonzero((ids_BL[:, begin:end] == mine).all(axis=1))
            if len(found):
                document.extend(sampled.position, 1, ids_BL[found[0], end:][:1])
                document.register(registry, document.stop)

    def not_computed(self) -> Iterable[NotComputed]:
        """Rows whose logits were not asked for, and tokens that were sampled but never run."""
        for document in self._documents:
            spans = document.spans_without_logits()
            if spans:
                yield NotComputed(
                    sequence=document.label, scope=self.scope, positions=spans, boundaries=LOGIT_BOUNDARIES, reason="logits not requested"
                )
        for label, position_T in self._next_elsewhere.items():
            yield NotComputed(
                sequence=label,
                scope=self.scope,
                positions=tuple((position, position + 1) for position in position_T.tolist()),
                boundaries=SCORE_BOUNDARIES,
                reason="the next token lies on another context-parallel process",
            )
        for document, sampled in self._sampled.items():
            span = (sampled.position, sampled.position + 1)
            yield NotComputed(sequence=document.label, scope=self.scope, positions=(span,), reason="last sampled token")

    def _before(self, call: Call, history: CacheHistory | None, registry: SequenceRegistry) -> CacheHistory:
        """History of the cache as it is now, whatever happened to it since the last call."""
        batch = len(call.token_BS)
        if not call.past:
            return CacheHistory.empty(batch)
        if history is not None and history.length >= call.past and history.batch == batch:
            before = history.copy()
            before.crop(call.past)
            return before
        if not any(note.code == "cache-unseen" for note in registry.notes):
            text = (
                f"forward {call.number} was given a cache of {call.past} tokens that this trace did not see: its sequences start "
                "in the middle, their rows have no token key and match by label and position only"
            )
            registry.notes.append(Note(code="cache-unseen", text=text))
        real_BP = call.past_BP if call.past_BP is not None else np.ones((batch, call.past), bool)
        return CacheHistory(real_BP, [[] for _ in range(batch)], np.zeros(batch, bool))

    def _segments(self, call: Call, before: CacheHistory, after: CacheHistory, registry: SequenceRegistry) -> tuple[_Segment, ...]:
        """The documents of every batch row; ``after.documents`` gets the new ones."""
        parts = [(b, *part) for b in range(before.batch) for part in _split(call, b, bool(before.documents[b]))]
        names = registry.take_requests(len(parts)) if any(starts for _, starts, _ in parts) else [""] * len(parts)
        count_B = before.real_BP.sum(axis=1).tolist()
        index_BS = np.cumsum(call.token_BS, axis=1) - 1
        used: set[_Document] = set()
        opened = [0] * before.batch
        segments = []
        for (b, starts, columns), name in zip(parts, names, strict=True):
            row = after.documents[b]
            index = count_B[b] + int(index_BS[b, columns[0]])
            ids = None if call.ids_BS is None else call.ids_BS[b, columns]
            label = f"f{call.number}.r{b}.d{opened[b]}"
            place = row[0][0].row if row else f"{call.number}/{b}"
            if starts:
                unseen = count_B[b] if not row else 0
                document = self._open(registry, label, request=name, salt=call.salt, row=place, start=unseen)
                row.append((document, index - unseen))
            else:
                document, first = row[-1]
                if document in used or not document.agrees(index - first, ids):
                    document = self._fork(registry, label, document, index - first, f"{call.number}/{b}")
                    row[-1] = (document, first)
            opened[b] += document.label == label
            used.add(document)
            first = row[-1][1]
            document.extend(index - first, len(columns), ids)
            segments.append(_Segment(document, first, index - first, b, columns))
        return tuple(segments)

    def _finish(self, call: Call, after: CacheHistory) -> BoolArray:
        """Batch rows that ``generate`` feeds behind the end of their sequence while others go on: (B,)."""
        sampled = call.generating and call.past > 0 and call.token_BS.shape[1] == 1
        over_B: BoolArray = after.finished_B & sampled
        after.finished_B = over_B.copy()
        if sampled and call.ids_BS is not None and call.end_ids:
            after.finished_B |= np.isin(call.ids_BS[:, 0], list(call.end_ids))
        return over_B

    def _note_sampled(self, call: Call, before: CacheHistory, after: CacheHistory) -> None:
        """Keep, per document that ``generate`` is at the end of, the position of the token it samples next."""
        for row in before.documents:
            if row:
                self._sampled.pop(row[-1][0], None)
        if not call.generating:
            return
        for row, count, finished in zip(after.documents, after.real_BP.sum(axis=1).tolist(), after.finished_B.tolist(), strict=True):
            if row and not finished:
                document, first = row[-1]
                stale = [] if call.past else [other for other in self._sampled if _is_prefix(other, document)]
                for other in stale:
                    del self._sampled[other]
                self._sampled[document] = _Sampled(count - first, after.length)

    def _open(self, registry: SequenceRegistry, label: str, *, request: str, salt: str, row: str, start: int) -> _Document:
        index = registry.open(label, request=request, scope=self.scope, salt=salt, start=start, row=row)
        document = _Document(index, label, request, salt, row, start)
        self._documents.append(document)
        return document

    def _fork(self, registry: SequenceRegistry, label: str, parent: _Document, position: int, row: str) -> _Document:
        """A sequence that shares ``parent``'s tokens before ``position`` and goes on with others (beams, rejected drafts)."""
        start = min(parent.start, position)
        fork = self._open(registry, label, request=parent.request, salt=parent.salt, row=row, start=start)
        fork.known = parent.known or position == start
        fork.ids = parent.ids[: position - start]
        return fork


def _split(call: Call, b: int, continues: bool) -> list[tuple[bool, IntArray]]:
    """The documents of one batch row: (whether it begins here, its columns), in order. ``continues``: the cache holds one."""
    columns_T = np.flatnonzero(call.token_BS[b])
    if len(columns_T) < 2:
        return [(not continues, columns_T)] if len(columns_T) else []
    starts_T = np.zeros(len(columns_T), bool)
    if call.lengths is not None and not call.past:
        starts_T = np.isin(np.arange(len(columns_T)), np.cumsum([0, *call.lengths[b]]))
    elif call.positions_given:
        position_T = call.position_BS[b, columns_T]
        starts_T[1:] = (position_T[1:] < position_T[:-1]) | (position_T[1:] == 0)
        # a chunk that begins a document; one lone token at position 0 behind a prefix is a wrong position, not a document
        starts_T[0] = position_T[0] == 0
    starts_T[0] |= not continues
    edges = [*np.flatnonzero(starts_T).tolist(), len(columns_T)]
    if edges[0] != 0:
        edges.insert(0, 0)
    return [(bool(starts_T[a]), columns_T[a:z]) for a, z in itertools.pairwise(edges)]


def _positions(call: Call, real_BK: BoolArray, first_BS: IntArray) -> tuple[IntArray, IntArray]:
    """Position of every row in its document, and the first position it may attend to: both (B, S), 0 for padding.

    ``first_BS``: row index of the document's position 0. Visible is negative for what lies before the document, be it
    another one or padding that no mask hides, and one behind the own position where a row sees nothing."""
    batch, slots = real_BK.shape
    if not slots:
        return np.zeros((batch, 0), np.int64), np.zeros((batch, 0), np.int64)
    index_BK: IntArray = np.cumsum(real_BK, axis=1) - real_BK
    lead_B1 = real_BK.argmax(axis=1)[:, None]
    slot_BK = np.broadcast_to(np.arange(slots), (batch, slots))
    index_BK = np.where(slot_BK < lead_B1, slot_BK - lead_B1, index_BK)
    own_BS = slot_BK[:, call.past :]
    visible_BS = np.broadcast_to(lead_B1, own_BS.shape) if call.visible_BS is None else call.visible_BS
    sees_BS = visible_BS <= own_BS
    seen_BS = np.take_along_axis(index_BK, np.where(sees_BS, visible_BS, own_BS), axis=1)
    position_BS = np.where(call.token_BS, index_BK[:, call.past :] - first_BS, 0)
    return position_BS, np.where(call.token_BS, seen_BS - first_BS + ~sees_BS, 0)


def _is_prefix(shorter: _Document, longer: _Document) -> bool:
    return (
        shorter is not longer
        and shorter.known
        and longer.known
        and shorter.start == longer.start
        and len(shorter.ids) < len(longer.ids)
        and shorter.ids == longer.ids[: len(shorter.ids)]
    )


def first_visible_slots(allowed: BoolArray, past: int, columns: int) -> IntArray:
    """First slot that every row may attend to: (B, S). ``allowed``: (B, K) or (B, S, K), True where a slot may be
    attended to; K where there is none."""
    if not allowed.size:
        return np.zeros((len(allowed), columns), np.int64)
    first = np.where(allowed.any(axis=-1), allowed.argmax(axis=-1), past + columns).astype(np.int64)
    return first if first.ndim == 2 else np.repeat(first[:, None], columns, axis=1)
