"""Following sequences through calls, without any model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.hosts.transformers_sequences import CacheHistory, Call, SequenceTracker, first_visible_slots
from tracer.record.tokens import SequenceRegistry


def call(number: int, ids: Any, past: int = 0, mask: Any = None, **more: Any) -> Call:
    ids_BS = np.asarray(ids, np.int64)
    token_BS = np.ones(ids_BS.shape, bool) if mask is None else np.asarray(mask, bool)
    settings = {"position_BS": np.zeros_like(ids_BS), "positions_given": False, **more}
    return Call(number=number, ids_BS=ids_BS, token_BS=token_BS, past=past, **settings)


@given(st.data())
def test_any_chunking_with_cache_edits_keeps_every_rows_prefix(data: st.DataObject) -> None:
    """After any chunks, crops, reorders and copies, a row's recorded ids are exactly the tokens its cache row went through."""
    registry, tracker = SequenceRegistry(), SequenceTracker()
    batch = data.draw(st.integers(1, 3))
    held: list[list[int]] = [[] for _ in range(batch)]
    history = None
    for number in range(data.draw(st.integers(1, 6))):
        size = data.draw(st.integers(1, 3))
        tokens = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=size, max_size=size), min_size=batch, max_size=batch))
        labelled = tracker.label(call(number, tokens, past=len(held[0])), history, registry)
        held = [row + new for row, new in zip(held, tokens, strict=True)]
        sequence_BS = labelled.rows.sequence_N.reshape(batch, size)
        position_BS = labelled.rows.position_N.reshape(batch, size)
        assert position_BS.tolist() == [list(range(len(held[0]) - size, len(held[0])))] * batch
        assert len(set(sequence_BS[:, 0].tolist())) == batch
        for b in range(batch):
            known, is_known = registry.look_up(np.full(len(held[b]), sequence_BS[b, 0]), np.arange(len(held[b])))
            assert is_known.all()
            assert known.tolist() == held[b]
        assert labelled.visible_from_N.tolist() == [0] * batch * size
        history = labelled.history
        match data.draw(st.sampled_from(["nothing", "crop", "reorder", "copy"])):
            case "crop":
                length = data.draw(st.integers(1, len(held[0])))
                held = [row[:length] for row in held]
            case "reorder":
                index = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
                history.select(np.array(index))
                held = [list(held[i]) for i in index]
            case "copy":
                history = history.copy()


def test_edits_of_a_history() -> None:
    """Select takes indices or a mask, repeat repeats each row, crop keeps documents that still have a token."""
    registry, tracker = SequenceRegistry(), SequenceTracker()
    history = tracker.label(call(0, [[1, 2, 3, 4], [5, 6, 7, 8]], lengths=[[2, 2], [4]]), None, registry).history
    names = [[document.label for document, _ in row] for row in history.documents]
    assert names == [["f0.r0.d0", "f0.r0.d1"], ["f0.r1.d0"]]
    history.repeat(2)
    assert history.batch == 4
    history.select(np.array([False, True, True, False]))
    assert [[document.label for document, _ in row] for row in history.documents] == names
    history.crop(2)
    assert [len(row) for row in history.documents] == [1, 1]
    assert CacheHistory.empty(3).batch == 3


def test_unseen_prefix_that_is_cropped_away_starts_a_sequence_there() -> None:
    """Going back before the first seen token of a sequence opens one that starts at the new place."""
    registry, tracker = SequenceRegistry(), SequenceTracker()
    history = tracker.label(call(0, [[1]], past=5), None, registry).history
    labelled = tracker.label(call(1, [[2]], past=3), history, registry)
    assert registry[0].start == 5
    assert registry[labelled.rows.sequence_N[0]].start == 3
    assert labelled.rows.position_N.tolist() == [3]


def test_rows_without_a_token_open_nothing() -> None:
    """A batch row that is all padding has no sequence, and an all-padding call records nothing."""
    registry, tracker = SequenceRegistry(), SequenceTracker()
    labelled = tracker.label(call(0, [[1, 2], [3, 4]], mask=[[0, 0], [0, 1]]), None, registry)
    assert labelled.rows.sequence_N.tolist() == [-1, -1, -1, 0]
    assert labelled.skipped == {"padding": 3}
    assert tracker.label(call(1, [[1]], mask=[[0]]), None, registry).rows.sequence_N.tolist() == [-1]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [([[1, 1, 1]], [-1, -1, -1]), ([[2, 2, 2]], [0, 0, 0]), ([[3, 3, 4]], [1, 1, 2]), ([[5, 5, 5]], [1, 2, 3])],
    ids=["padding visible", "from its first", "prefix hidden", "sees nothing"],
)
def test_visible_from_counts_from_the_sequences_first_token(visible: list[list[int]], expected: list[int]) -> None:
    """Slots 0 and 1 are padding: what a row sees before its sequence is negative, what is hidden is positive."""
    registry, tracker = SequenceRegistry(), SequenceTracker()
    labelled = tracker.label(call(0, [[0, 0, 1, 2, 3]], mask=[[0, 0, 1, 1, 1]], visible_BS=np.array([[0, 0, *visible[0]]])), None, registry)
    assert labelled.visible_from_N.tolist()[2:] == expected


def test_first_visible_slots() -> None:
    """The first True of a mask per row, K where there is none, from (B, K) and (B, S, K)."""
    assert first_visible_slots(np.array([[0, 1, 1], [0, 0, 0]], bool), 1, 2).tolist() == [[1, 1], [3, 3]]
    assert first_visible_slots(np.array([[[0, 1, 0], [0, 0, 0]]], bool), 1, 2).tolist() == [[1, 3]]


def test_steps_stay_cheap() -> None:
    """Labelling one decode step of a long batch does not grow with what is known: ids are given to the registry once."""
    registry, tracker = SequenceRegistry(), SequenceTracker()
    given: list[int] = []
    registry._on_ids = lambda sequence, position, ids: given.append(len(ids))
    history = tracker.label(call(0, np.arange(400).reshape(2, 200)), None, registry).history
    for step in range(5):
        history = tracker.label(call(step + 1, [[1], [2]], past=200 + step), history, registry).history
    assert given == [200, 200] + [1] * 10
