"""Which part of a whole row or parameter a process of a Megatron mesh holds. Pure: numbers in, spans out.

Spans are in local order: the first span is where the first local columns (or rows) lie.

Shape suffixes: B batch rows, S columns of the batch (positions of this context-parallel process).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tracer.format.schema import Span
from tracer.record.host import IntArray

__all__ = ["Heads", "contiguous", "gate_up", "merge_spans", "zigzag_slots"]


@dataclass(frozen=True)
class Heads:
    """Attention heads of the whole model. ``groups``: key-value heads."""

    heads: int
    groups: int
    size: int

    @property
    def query(self) -> int:
        """Columns of q."""
        return self.heads * self.size

    @property
    def key(self) -> int:
        """Columns of k, and of v."""
        return self.groups * self.size

    def key_span(self, rank: int, size: int) -> Span:
        """Columns of k or v that tensor-parallel process ``rank`` of ``size`` computes; with more processes than groups,
        neighbours compute the same one."""
        first, held = rank * self.groups // size, max(self.groups // size, 1)
        return first * self.size, (first + held) * self.size

    def packed_spans(self, rank: int, size: int) -> tuple[Span, ...]:
        """Rows of ``linear_qkv`` at process ``rank`` of ``size``, counted in the order all of q, all of k, all of v.

        Stored per key-value group, its queries, its key, its value; processes take equal pieces, also inside a group."""
        per_group = self.heads // self.groups
        places: list[Span] = []
        for group in range(self.groups):
            for start, heads in (
                (group * per_group * self.size, per_group),
                (self.query + group * self.size, 1),
                (self.query + self.key + group * self.size, 1),
            ):
                places.append((start, start + heads * self.size))
        whole = self.query + 2 * self.key
        return tuple(_window(places, rank * whole // size, (rank + 1) * whole // size))


def contiguous(whole: int, rank: int, size: int) -> Span:
    """The piece of process ``rank`` where ``size`` processes hold equal pieces in order."""
    return rank * whole // size, (rank + 1) * whole // size


def gate_up(width: int, rank: int, size: int) -> tuple[Span, ...]:
    """Columns of gate, then up, each of ``width``, at a process that holds its piece of gate beside its piece of up."""
    start, stop = contiguous(width, rank, size)
    return merge_spans(((start, stop), (width + start, width + stop)))


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Neighbours that continue each other as one."""
    merged: list[Span] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def zigzag_slots(columns: int, rank: int, size: int) -> IntArray:
    """Columns of the whole sequence that context-parallel process ``rank`` of ``size`` holds: (S,), S = ``columns``.

    Of 2 x ``size`` equal chunks it has one from the front and its mirror image from the back, so that all have equal work."""
    chunk = columns // 2
    if size == 1:
        return np.arange(columns)
    last = 2 * size - 1 - rank
    return np.concatenate([np.arange(rank * chunk, (rank + 1) * chunk), np.arange(last * chunk, (last + 1) * chunk)])


def _window(places: Iterable[Span], start: int, stop: int) -> Iterable[Span]:
    """Local rows ``start:stop`` of rows that lie at ``places`` one after another."""
    at, held = 0, []
    for first, end in places:
        low, high = max(start - at, 0), min(stop - at, end - first)
        if low < high:
            held.append((first + low, first + high))
        at += end - first
    return merge_spans(held)
