"""How rows and sets of tokens are written."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sides import Side
from tracer.read.findings import Place
from tracer.read.wording import by_sequence, count, place_text, row_text, short, token_profile


def profile(*rows: str, shift: int = 0, compared: list[str] | None = None) -> str:
    """Profile of these rows of the two sequences."""
    side = Side()
    among = np.array([side.at(row) for row in compared]) if compared else np.arange(len(side))
    return token_profile(side.trace(), among, np.array([side.at(row) for row in rows], np.int64), shift)


def rows(name: str, start: int, stop: int) -> list[str]:
    """``s0:1`` .. of one sequence."""
    return [f"{name}:{at}" for at in range(start, stop)]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([], ""),
        ([*rows("s0", 0, 7), *rows("s1", 0, 5)], "all"),
        ([*rows("s0", 1, 7), *rows("s1", 1, 5)], "all but position 0"),
        (rows("s1", 0, 5), "all of s1"),
        (rows("s0", 1, 7), "from position 1 of s0"),
        ([*rows("s0", 3, 7), *rows("s1", 3, 5)], "from position 3"),
        (rows("s0", 4, 7), "from position 4 of s0"),
        ([*rows("s0", 5, 7), *rows("s1", 1, 5)], "from s0:5, s1:1"),
        (["s0:5"], "s0:5"),
        (["s0:5", "s1:2"], "s0:5, s1:2"),
        (["s0:1", "s0:2", "s0:3", "s0:5"], "4 of 12 (s0)"),
        (["s0:1", "s0:3", "s1:0", "s1:2"], "4 of 12"),
    ],
)
def test_profiles(chosen: list[str], expected: str) -> None:
    """Which tokens differ is said in the shortest words that are exactly true."""
    assert profile(*chosen) == expected


def test_rows_about_the_next_token_are_named_by_their_own_position() -> None:
    """With a shift of one, positions are those of the rows."""
    assert profile("s0:4", shift=1) == "s0:3"


def test_tokens_by_sequence() -> None:
    """Several tokens are counted per sequence with their range, one is named."""
    side = Side()
    trace = side.trace()
    assert by_sequence(trace, np.array([3, 4, 5, 6, 7])) == "s0 4 (3..6), s1 1 (0)"
    assert by_sequence(trace, np.array([side.at("s1:2")])) == "s1:2"


def test_small_words() -> None:
    """Counts take plurals, numbers two digits, places their parts."""
    assert (count(1, "row"), count(2, "row"), count(3, "boundary")) == ("1 row", "2 rows", "3 boundaries")
    assert (short(0.0), short(0.371), short(2.84e-3)) == ("0", "0.37", "2.8e-03")
    assert row_text("s0", 3, 5) == "s0:3/e5"
    assert place_text(Place(boundary="x", request="r", position=41, expert=2)) == "x, request r, token 41, expert 2"
    assert place_text(Place(boundary="x.weight")) == "x.weight"
