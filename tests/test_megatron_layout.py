"""Spans of a Megatron mesh, checked against tensors that are really packed and cut."""

from __future__ import annotations

import numpy as np
import pytest

from tracer.hosts.megatron_layout import Heads, contiguous, gate_up, merge_spans, zigzag_slots


def indices(spans: tuple[tuple[int, int], ...]) -> list[int]:
    return [index for start, stop in spans for index in range(start, stop)]


@pytest.mark.parametrize(
    ("heads", "groups", "size", "tp"),
    [(4, 4, 16, 1), (4, 4, 16, 2), (8, 2, 4, 2), (8, 2, 4, 4), (8, 2, 4, 8), (6, 3, 2, 3)],
)
def test_packed_rows_are_where_packing_puts_them(heads: int, groups: int, size: int, tp: int) -> None:
    """Rows packed per key-value group and cut into equal pieces lie where the spans say, also inside a group."""
    layout = Heads(heads, groups, size)
    whole = np.arange(layout.query + 2 * layout.key)
    q, k, v = (part.reshape(groups, -1) for part in np.split(whole, [layout.query, layout.query + layout.key]))
    packed = np.concatenate([q, k, v], axis=1).reshape(-1)
    for rank, held in enumerate(np.split(packed, tp)):
        assert indices(layout.packed_spans(rank, tp)) == held.tolist()


@pytest.mark.parametrize(
    ("groups", "tp", "expected"),
    [(4, 2, [(0, 8), (8, 16)]), (2, 4, [(0, 4), (0, 4), (4, 8), (4, 8)]), (1, 2, [(0, 4), (0, 4)])],
)
def test_key_heads_are_shared_where_processes_outnumber_them(groups: int, tp: int, expected: list[tuple[int, int]]) -> None:
    """Every process has its own key heads, or neighbours have the same one."""
    assert [Heads(8, groups, 4).key_span(rank, tp) for rank in range(tp)] == expected


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gate_and_up_lie_beside_each_other(tp: int) -> None:
    """A process holds its piece of gate, then its piece of up; together they are all columns once."""
    held = [indices(gate_up(12, rank, tp)) for rank in range(tp)]
    assert held[-1][-1] == 23
    assert sorted(index for piece in held for index in piece) == list(range(24))
    assert all(piece[: len(piece) // 2] == list(range(*contiguous(12, rank, tp))) for rank, piece in enumerate(held))


def test_neighbouring_spans_are_merged() -> None:
    """Spans that continue each other become one, in local order."""
    assert merge_spans([(4, 6), (6, 8), (0, 2)]) == ((4, 8), (0, 2))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_slots_are_mirrored(size: int) -> None:
    """Every context-parallel process has a chunk from the front and its mirror image, and together all columns once."""
    slots = [zigzag_slots(16 // size, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(slots).tolist()) == list(range(16))
    if size > 1:
        assert all((held + held[::-1] == 15).all() for held in slots)
