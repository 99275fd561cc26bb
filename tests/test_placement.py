"""Where a difference lies, by rows alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.material import F64
from tests.sides import Side
from tracer.read.findings import Shape
from tracer.read.logical import LogicalTrace
from tracer.read.placement import document, experts_only, from_position, grows


def side(lengths: tuple[int, ...] = (24, 20), *, packed: bool = False) -> LogicalTrace:
    """Sequences of these lengths; ``packed``: documents of one row."""
    trace = Side({f"s{number}": list(range(100 * number, 100 * number + length)) for number, length in enumerate(lengths)}).trace()
    row = "0/0" if packed else ""
    return replace(trace, sequences=tuple(replace(sequence, row=row) for sequence in trace.sequences))


def test_from_a_position_on() -> None:
    """All rows from one position on, in every sequence: with the window of that size, or the forward that begins there, by name."""
    a = side()
    position = a.tokens.position_K
    found = from_position(a, a, position, position >= 8, {}, False)
    assert found is not None
    assert (found.shape, found.parameters["position"]) == (Shape.FROM_POSITION, 8)
    assert "a window, a chunk or a document begins there" in found.text
    conditions = {"model.config.sliding_window": {"a": 8, "b": 9}}
    found = from_position(a, a, position, position >= 8, conditions, True)
    assert found is not None
    assert "which is the sliding_window of A (A 8, B 9)" in found.text
    chunked = replace(a, load_forwards=lambda: (position >= 8).astype(np.int64))
    found = from_position(a, chunked, position, position >= 8, {}, True)
    assert found is not None
    assert "where B begins another forward" in found.text


def test_first_token_and_every_other_one() -> None:
    """Token 0 alone, every token but it, and neither where single rows stand out."""
    a = side()
    position = a.tokens.position_K
    found = from_position(a, a, position, position == 0, {}, False)
    assert found is not None
    assert found.shape is Shape.FIRST_TOKEN
    found = from_position(a, a, position, position > 0, {}, True)
    assert found is not None
    assert "a single key leaves attention nothing to weigh" in found.text
    assert from_position(a, a, position, position % 3 == 1, {}, True) is None
    assert from_position(a, a, position, position >= 0, {}, True) is None


def test_later_documents_of_a_packed_row() -> None:
    """Only document 2 of a row differs; sequences that share no row are no documents."""
    packed = side(packed=True)
    token = np.arange(len(packed.tokens))
    second = packed.tokens.sequence_K == 1
    found = document(packed, token, second)
    assert found is not None
    assert "only document 2 (s1) of a packed row" in found.text
    assert document(packed, token, ~second) is None
    assert document(side(), token, second) is None


def test_growth_with_the_position() -> None:
    """A distance that grows with the position, over ranks and not single values; noise does not grow."""
    position = np.arange(1, 200)
    noise: F64 = np.random.default_rng(0).uniform(0.5, 1.5, 199)
    found = grows(position, np.asarray(1e-4 * position * noise, np.float64))
    assert found is not None
    assert "grows with position" in found.text
    assert grows(position, noise) is None
    assert grows(position[:8], noise[:8]) is None


def test_experts_to_blame() -> None:
    """Exactly the tokens that went to expert 5, or the rows of it; a difference beyond them blames nobody."""
    ids = np.array([[0, 5], [1, 2], [5, 3], [0, 1], [2, 5], [3, 4], [5, 1], [0, 2], [3, 0], [4, 1]])
    differs = (ids == 5).any(axis=1)
    found = experts_only(ids, differs, 8)
    assert found is not None
    assert found.parameters["experts"] == [5]
    assert "expert 5 only" in found.text
    differs[3] = True
    assert experts_only(ids, differs, 8) is None
    assert experts_only(ids, np.ones(10, np.bool_), 8) is None
