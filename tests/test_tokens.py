"""Sequences, rows and documents (``tracer.record.tokens``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracer.errors import CaptureError, Code, UsageError
from tracer.format.schema import Sequence
from tracer.format.token_keys import token_keys
from tracer.record.host import Rows
from tracer.record.tokens import (
    SequenceRegistry,
    document_rows,
    documents_from_cu_seqlens,
    documents_from_lengths,
    documents_from_mask,
    documents_from_positions,
    label_rows,
    offsets_in_documents,
    visible_from,
    visible_keys,
)


def heard() -> tuple[SequenceRegistry, list[Any]]:
    """A registry and what it told its listeners."""
    events: list[Any] = []
    registry = SequenceRegistry(
        lambda sequence: events.append(sequence), lambda sequence, position, ids: events.append((sequence, position, ids.tolist()))
    )
    return registry, events


def test_padding_on_either_side_is_no_document() -> None:
    """A mask gives one document per batch row, wherever its padding lies, and none to a row without tokens."""
    document_N = documents_from_mask([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]])
    assert document_N.tolist() == [-1, -1, 0, 0, 1, 1, 1, -1, -1, -1, -1, -1, 2, -1, -1, 2]
    rows = label_rows(document_N, [5, 6, 9])
    assert rows.sequence_N.tolist() == [-1, -1, 5, 5, 6, 6, 6, -1, -1, -1, -1, -1, 9, -1, -1, 9]
    assert rows.position_N.tolist() == [0, 0, 0, 1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_documents_begin_where_positions_restart() -> None:
    """Packed rows split where the position is 0 again, one-token documents included; padding takes no part."""
    assert documents_from_positions([[0, 1, 2, 0, 0, 1]]).tolist() == [0, 0, 0, 1, 2, 2]
    assert documents_from_positions([[1, 1, 0, 1, 0, 0]], [[0, 0, 1, 1, 1, 1]]).tolist() == [-1, -1, 0, 0, 1, 2]
    assert documents_from_positions([[7, 8, 9], [0, 1, 0]]).tolist() == [0, 0, 0, 1, 1, 2]


def test_wrong_positions_split_no_document() -> None:
    """A position that jumps, repeats or falls back to anything but 0 is a wrong position, not a new document."""
    assert documents_from_positions([[0, 1, 5, 6, 3, 3]]).tolist() == [0] * 6


def test_cu_seqlens_leave_the_rest_to_padding() -> None:
    """Boundaries give documents in order; empty ones have no number; rows behind the last are padding."""
    assert documents_from_cu_seqlens([0, 3, 3, 5], 7).tolist() == [0, 0, 0, 1, 1, -1, -1]


@pytest.mark.parametrize("boundaries", [[1, 3], [0, 5, 3], [0, 9], []], ids=["start", "order", "too-long", "empty"])
def test_cu_seqlens_that_do_not_fit_are_refused(boundaries: list[int]) -> None:
    """Boundaries must ascend from 0 and end inside the packed rows."""
    with pytest.raises(CaptureError) as caught:
        documents_from_cu_seqlens(boundaries, 7)
    assert caught.value.code is Code.BAD_ARGUMENT


def test_lengths_are_given_per_batch_row() -> None:
    """Document lengths per batch row give numbers that run on over the rows."""
    document_N = documents_from_lengths([[2, 1], [3]], 4)
    assert document_N.tolist() == [0, 0, 1, -1, 2, 2, 2, -1]
    assert document_rows(document_N, 4).tolist() == [0, 0, 1]
    with pytest.raises(CaptureError):
        documents_from_lengths([[3, 2]], 4)


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_packing_counts_every_document_from_zero(lengths: list[list[int]]) -> None:
    """However documents are packed, the rows of each count 0, 1, 2 ... and nothing else is labelled."""
    columns = max(sum(row) for row in lengths)
    document_N = documents_from_lengths(lengths, columns)
    flat = [length for row in lengths for length in row]
    offset_N = offsets_in_documents(document_N)
    for number, length in enumerate(flat):
        assert offset_N[document_N == number].tolist() == list(range(length))
    assert (document_N >= 0).sum() == sum(flat)


def test_a_cached_prefix_moves_the_positions() -> None:
    """Rows of a decode step continue where the cached prefix ends."""
    rows = label_rows(documents_from_mask(np.ones((2, 1))), [0, 1], start_D=[7, 4])
    assert rows.position_N.tolist() == [7, 4]


def test_rows_without_tokens_are_no_rows() -> None:
    """A call on ``[0, 0]`` inputs has no rows and no documents."""
    rows = label_rows(documents_from_mask(np.ones((0, 0))), [])
    assert len(rows) == 0


def test_visibility_starts_at_the_own_first_token() -> None:
    """With padding masked away every row sees from position 0 of its sequence."""
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 0]])
    rows = label_rows(documents_from_mask(mask), [0, 1])
    assert visible_from(rows, visible_keys(mask, 4)).tolist() == [0] * 8


def test_unseparated_documents_see_what_lies_before_them() -> None:
    """Under an all-ones mask a packed document sees the ones before it: its first visible position is minus their length,
    in later cached steps too."""
    rows = label_rows(documents_from_positions([[0, 1, 2, 0, 1, 0, 1]]), [0, 1, 2])
    assert visible_from(rows, visible_keys(np.ones((1, 7)), 7)).tolist() == [0, 0, 0, -3, -3, -5, -5]
    step = Rows(np.array([2]), np.array([2]))
    assert visible_from(step, visible_keys(np.ones((1, 8)), 1)).tolist() == [-5]


def test_a_mask_per_row_separates_documents() -> None:
    """A mask that names keys per row gives the first visible one, whatever is allowed beyond the diagonal."""
    document = np.array([0, 0, 0, 1, 1])
    mask_BSK = (document[:, None] == document[None, :])[None]
    rows = label_rows(documents_from_positions([[0, 1, 2, 0, 1]]), [0, 1])
    assert visible_from(rows, visible_keys(mask_BSK, 5)).tolist() == [0] * 5
    assert visible_from(Rows(np.array([1]), np.array([1])), visible_keys(mask_BSK[:, 4:], 1)).tolist() == [0]


def test_a_row_that_sees_less_starts_later() -> None:
    """A mask that hides cached tokens moves the first visible position forward."""
    step = Rows(np.array([0]), np.array([4]))
    assert visible_from(step, visible_keys([[0, 1, 1, 1, 1]], 1)).tolist() == [1]


def test_equal_labels_of_one_scope_are_one_sequence() -> None:
    """Opening a label again gives the same index; another scope gives another sequence; listeners hear of each once."""
    registry, events = heard()
    assert registry.open("a") == registry.open("a") == 0
    assert registry.open("a", scope="dp=1", request="p1") == 1
    assert events == [Sequence(label="a"), Sequence(label="a", scope="dp=1", request="p1")]
    assert (registry.find("p1"), registry.find("b"), registry.index("a", "dp=1"), len(registry)) == (1, None, 1, 2)


def test_known_ids_are_told_once() -> None:
    """Repeating a known prefix tells listeners only what is new, in pieces where it lies apart."""
    registry, events = heard()
    registry.open("a")
    registry.record_ids(0, 2, [12, 13])
    registry.record_ids(0, 0, [10, 11, 12, 13, 14])
    registry.record_ids(0, 0, [10, 11])
    assert events[1:] == [(0, 2, [12, 13]), (0, 0, [10, 11]), (0, 4, [14])]
    id_N, known_N = registry.look_up(np.array([0, 0, -1, 0]), np.array([1, 5, 0, -1]))
    assert (id_N[0], known_N.tolist()) == (11, [True, False, False, False])


def test_another_id_for_a_known_token_is_refused() -> None:
    """One position of a sequence cannot have two ids: the error names sequence, position and both."""
    registry, _ = heard()
    registry.open("a")
    registry.record_ids(0, 0, [10, 11, 12])
    with pytest.raises(CaptureError, match="'a', position 1") as caught:
        registry.record_ids(0, 1, [99])
    assert (caught.value.expected, caught.value.found) == ("11", "99")


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_ids_survive_growth(position: int, count: int) -> None:
    """Ids at any position are found again, whatever room the table had."""
    registry = SequenceRegistry()
    registry.open("a")
    registry.record_ids(0, position, np.arange(count))
    id_N, known_N = registry.look_up(np.zeros(count, np.int64), np.arange(position, position + count))
    assert known_N.all()
    assert id_N.tolist() == list(range(count))


def test_ids_of_a_forward_are_recorded_by_row() -> None:
    """Rows in any order, padding among them, give every sequence its ids."""
    registry, events = heard()
    registry.open("a")
    registry.open("b")
    registry.record_rows(Rows(np.array([1, -1, 0, 0, 1]), np.array([4, 0, 1, 0, 7])), [24, 0, 11, 10, 27])
    assert events[2:] == [(0, 0, [10, 11]), (1, 4, [24]), (1, 7, [27])]


def test_request_names_are_used_up() -> None:
    """Names go to the next forward only; another number of names than sequences names none of them and is noted."""
    registry = SequenceRegistry()
    assert registry.take_requests(2) == ["", ""]
    registry.name_requests(["p0", "p1"])
    assert registry.take_requests(2) == ["p0", "p1"]
    for names in (["p0", "p1"], ["p0", "p1", "p2", "p3"]):
        registry.name_requests(names)
        assert registry.take_requests(3) == ["", "", ""]
        assert registry.unused_requests() == []
    assert [note.code for note in registry.notes] == ["requests-mismatch"] * 2


def test_an_engine_takes_names_as_it_takes_requests() -> None:
    """Names wait for the requests they are for, over several steps."""
    registry = SequenceRegistry()
    registry.name_requests(["p0", "p1", "p2"])
    assert [registry.take_first_requests(n) for n in (2, 0, 2)] == [["p0", "p1"], [], ["p2", ""]]
    assert registry.notes == []


def test_names_replaced_before_a_forward_are_noted() -> None:
    """The later names count; that the earlier ones were never taken is noted."""
    registry = SequenceRegistry()
    registry.name_requests(["p0", "p1"])
    registry.name_requests(["p2", ""])
    assert registry.take_requests(2) == ["p2", ""]
    assert [(note.code, "p0, p1" in note.text) for note in registry.notes] == [("requests-replaced", True)]


@pytest.mark.parametrize("names", ["ab", 5, None, [1, 2], ["a", None], ["a", "b", "a"]])
def test_what_is_no_list_of_names_is_refused(names: Any) -> None:
    """Anything but strings, and one name for two sequences, is a typed error that shows what was given."""
    with pytest.raises(UsageError) as caught:
        SequenceRegistry().name_requests(names)
    assert caught.value.code is Code.BAD_ARGUMENT
    assert caught.value.expected
    assert caught.value.found


def test_the_user_gives_boundaries_or_lengths() -> None:
    """``sequences=`` is cu_seqlens of one packed row or document lengths per row."""
    registry = SequenceRegistry()
    assert registry.document_lengths(np.ones((3, 4))) is None
    registry.give_lengths(np.array([0, 7, 12]))
    assert registry.document_lengths(np.ones((1, 12))) == [[7, 5]]
    registry.give_lengths([[3, 4], (5,)])
    assert registry.document_lengths([[1] * 7, [0, 1, 1, 1, 1, 1, 0]]) == [[3, 4], [5]]


@pytest.mark.parametrize(
    ("token_BS", "where", "expected", "found"),
    [
        ([[1] * 7], "", "documents of 1 batch rows", "documents of 2"),
        ([[1] * 7] * 3, "", "documents of 3 batch rows", "documents of 2"),
        ([[1] * 7, [1] * 6 + [0]], "batch row 1", "documents of 6 tokens in all", "5 = 5"),
        ([[1] * 6, [1] * 5 + [0]], "batch row 0", "documents of 6 tokens in all", "3 + 4 = 7"),
    ],
)
def test_lengths_must_fit_the_batch(token_BS: list[list[int]], where: str, expected: str, found: str) -> None:
    """Documents of another number of rows, or of more or fewer tokens than a row has, are refused with both numbers."""
    registry = SequenceRegistry()
    registry.give_lengths([[3, 4], [5]])
    with pytest.raises(UsageError, match="does not fit the batch") as caught:
        registry.document_lengths(token_BS)
    assert (caught.value.where, caught.value.expected, caught.value.found) == (where, expected, found)


@pytest.mark.parametrize("told", [5, "x", [], [1, 3, 6], [0, 4, 3], [3, 3], [1.5], [["a"]], [[2, 4], 6], [[-1, 7]], [[1.5]]])
def test_what_says_nothing_of_documents_is_refused(told: Any) -> None:
    """Neither cu_seqlens nor lengths: a typed error that shows both forms."""
    with pytest.raises(UsageError) as caught:
        SequenceRegistry().give_lengths(told)
    assert caught.value.code is Code.BAD_ARGUMENT
    assert "cu_seqlens" in caught.value.expected
    assert caught.value.found == repr(told)


def test_lengths_skip_padding() -> None:
    """Documents lie in the columns that are no padding, wherever those are."""
    assert documents_from_lengths([[1, 2], [2]], 4, [[0, 1, 1, 1], [1, 0, 1, 0]]).tolist() == [-1, 0, 1, 1, 2, -1, 2, -1]


def test_keys_are_known_as_far_as_the_ids_are() -> None:
    """A token has its key once every id up to it is known, whatever order they came in; the keys are those of the reading side."""
    registry = SequenceRegistry()
    sequence = registry.open("s0", salt="adapter")
    registry.record_ids(sequence, 0, [5, 6, 7])
    registry.record_ids(sequence, 4, [9])
    asked = np.full(5, sequence), np.arange(5)
    key_N, known_N = registry.keys(*asked)
    assert known_N.tolist() == [True, True, True, False, False]
    registry.record_ids(sequence, 3, [8])
    key_N, known_N = registry.keys(*asked)
    assert known_N.all()
    np.testing.assert_array_equal(key_N, token_keys([5, 6, 7, 8, 9], "adapter"))
    padding_N, unknown_N = registry.keys(np.array([-1]), np.array([0]))
    assert (padding_N.tolist(), unknown_N.tolist()) == ([0], [False])
