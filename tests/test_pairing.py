"""Matching tokens and pairing sequences that do not match."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sides import Side
from tracer.format.schema import Boundary
from tracer.read.diff import diff_traces
from tracer.read.findings import FindingCode
from tracer.read.pairing import IDS, POSITIONS, Pairing, pair_sides

EMBEDDING = [Boundary(name="embedding", level=0)]
PROMPT = list(range(500, 520))


def paired(a: dict[str, list[int]], b: dict[str, list[int]], **requests: dict[str, str]) -> Pairing:
    """Pair two sides that were fed these ids."""
    sides = Side(a, boundaries=EMBEDDING), Side(b, boundaries=EMBEDDING)
    for side in sides:
        side.requests = requests.get("requests", {})
    return pair_sides(sides[0].trace(), sides[1].trace())


def where(pairing: Pairing) -> list[tuple[str, int, int, int, int]]:
    """Boundary, sequences and positions of every parting."""
    return [
        (parting.boundary, parting.sequence_a, parting.sequence_b, parting.position_a, parting.position_b) for parting in pairing.partings
    ]


@settings(deadline=None)
@given(st.permutations(range(6)), st.data())
def test_order_does_not_matter(order: list[int], data: st.DataObject) -> None:
    """The same sequences in any order and under any label match token by token."""
    lengths = [data.draw(st.integers(1, 6)) for _ in range(6)]
    sequences = [[100 * at + step for step in range(length)] for at, length in enumerate(lengths)]
    pairing = paired({str(at): ids for at, ids in enumerate(sequences)}, {f"x{at}": sequences[at] for at in order})
    assert pairing.matched == sum(lengths)
    assert not len(pairing.only_a)
    assert not len(pairing.only_b)
    assert pairing.tokens.identity is (order == sorted(order))


def test_prefix_beats_a_label_given_by_order() -> None:
    """Labels given by batch order pair nothing against the ids; the longest common prefix does."""
    pairing = paired({"0": [*PROMPT, 1, 2], "1": [7, 8, 9, 10, 11]}, {"0": [7, 8, 9, 10, 12], "1": [*PROMPT, 1, 3]})
    assert where(pairing) == [(IDS, 0, 1, 21, 21), (IDS, 1, 0, 4, 4)]


def test_a_label_supported_by_the_ids_pairs() -> None:
    """A sequence whose first id differs is found under its label when most other ids are equal."""
    pairing = paired({"0": [1, *PROMPT], "1": [5, 6]}, {"0": [2, *PROMPT], "1": [5, 6]})
    assert where(pairing) == [(IDS, 0, 0, 0, 0)]


def test_greedy_pairs_are_one_to_one() -> None:
    """Of several sequences with one prompt each is paired once, the longest common prefix first."""
    a = {"a": [*PROMPT, 1, 1, 1], "b": [*PROMPT, 2, 2, 2]}
    b = {"x": [*PROMPT, 2, 2, 9], "y": [*PROMPT, 1, 8, 8]}
    assert where(paired(a, b)) == [(IDS, 0, 1, 21, 21), (IDS, 1, 0, 22, 22)]


def test_a_side_that_stops_early_parts_nowhere() -> None:
    """A prefix of a sequence is that sequence cut short: its missing rows are unmatched, not different."""
    pairing = paired({"0": PROMPT, "1": [1, 2]}, {"0": PROMPT[:15], "1": [1, 2], "2": [3, 4]})
    assert pairing.partings == ()
    assert (len(pairing.only_a), len(pairing.only_b)) == (5, 2)


def test_siblings_share_their_prompt() -> None:
    """Tokens of a shared prompt are matched once, and only the sibling that differs parts."""
    a = {str(n): [*PROMPT, n, n] for n in range(4)}
    b = {**a, "3": [*PROMPT, 3, 99]}
    pairing = paired(a, b)
    assert where(pairing) == [(IDS, 3, 3, 21, 21)]
    assert pairing.matched == 20 + 3 * 2 + 1


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("longer", [True, False])
def test_of_several_beams_the_one_that_goes_along_is_the_partner(named: bool, longer: bool) -> None:
    """A beam that one side left early stands unmatched, although it bears the request or label of the other side's sequence."""
    final = [*PROMPT, 1, 2, 3, 4]
    a = {"0": [*PROMPT, 9, 9], "3.fork": final, "1": [50, 51, 52]}
    b = {"0": [*final, 5] if longer else final[:-1], "1": [50, 51, 52], "2": [PROMPT[0], 60, 61, 62]}
    requests = {"0": "r0", "3.fork": "r0", "1": "r1", "2": "r2"} if named else {}
    for sides in ((a, b), (b, a)):
        pairing = paired(*sides, requests=requests)
        assert pairing.partings == ()
        left_a, left_b = (pairing.only_a, pairing.only_b) if sides[0] is a else (pairing.only_b, pairing.only_a)
        assert (len(left_a), len(left_b)) == (2 if longer else 3, 4 if longer else 3)


def test_a_beam_left_behind_is_no_difference() -> None:
    """Beams of one side alone give exit 2 with their rows, the compared ones identical; a fault in the final beam is still found."""
    a = Side({"0": [*PROMPT, 9, 9], "3.fork": [*PROMPT, 1, 2, 3, 4]})
    b = Side({"0": [*PROMPT, 1, 2, 3]})
    result = diff_traces(a.trace(), b.trace())
    assert (result.exit, {finding.code for finding in result.findings}) == (2, {FindingCode.ROWS_UNMATCHED})
    assert "everything compared is identical" in result.headline
    b.carry_on("layers.1.attn.out", "0:21")
    found = diff_traces(a.trace(), b.trace())
    assert (found.exit, found.first and found.first.boundary) == (1, "layers.1.attn.out")


def test_siblings_of_one_request_are_paired_by_prefix() -> None:
    """Several sequences of one request are told apart by their ids; the one that differs parts, without a common id too."""
    a = {str(n): [*PROMPT, n, n] for n in range(3)}
    b = {**a, "2": [*PROMPT, 2, 99]}
    names = dict.fromkeys(("0", "1", "2"), "r0")
    assert where(paired(a, b, requests=names)) == [(IDS, 2, 2, 21, 21)]
    assert where(paired(a, {**a, "2": [7, 8, 9]}, requests=names)) == [(IDS, 2, 2, 0, 0)]


def test_documents_at_another_offset() -> None:
    """A packed row that one side reads as one document parts where the second document starts, by position."""
    first, second = PROMPT, list(range(700, 710))
    pairing = paired({"0.0": first, "0.1": second}, {"0": first + second})
    assert where(pairing) == [(POSITIONS, 1, 0, 0, 20)]
    assert (pairing.partings[0].value_a, pairing.partings[0].value_b) == (0, 20)
    assert not len(pairing.only_a)
    assert not len(pairing.only_b)


def test_tokens_in_front_are_other_ids() -> None:
    """Equal ids behind a token that only one side has are an input difference at the first position, not another document."""
    pairing = paired({"0": PROMPT, "1": [1, 2]}, {"9": [77, *PROMPT], "1": [1, 2]})
    assert where(pairing) == [(IDS, 0, 0, 0, 0)]
    assert "B has 1 more in front" in pairing.partings[0].text


@pytest.mark.parametrize("named", [True, False])
def test_a_request_pairs_without_support(named: bool) -> None:
    """A request id pairs sequences without a common id; a label does not."""
    requests = {"0": "step7-p2-s3"} if named else {}
    pairing = paired({"0": [1, 2, 3], "1": [5, 6]}, {"0": [7, 8, 9], "1": [5, 6]}, requests=requests)
    assert len(pairing.partings) == named
    assert len(pairing.only_a) == (0 if named else 3)


def test_another_context_is_told() -> None:
    """Equal ids under other keys (an adapter, images) part at the start, with the reason."""
    a, b = Side({"0": [1, 2, 3], "1": [5, 6]}, boundaries=EMBEDDING), Side({"0": [1, 2, 3], "1": [5, 6]}, boundaries=EMBEDDING)
    b.key = [key ^ 1 if at < 3 else key for at, key in enumerate(b.key)]
    pairing = pair_sides(a.trace(), b.trace())
    assert where(pairing) == [(IDS, 0, 0, 0, 0)]
    assert "another context" in pairing.partings[0].text


def test_rows_missing_at_different_places_are_no_other_context() -> None:
    """Sequences of equal ids that each lack some rows are unmatched there, and part nowhere."""
    a, b = Side(boundaries=EMBEDDING), Side(boundaries=EMBEDDING)
    a.drop_rows("s0:0")
    b.drop_rows("s0:6")
    pairing = pair_sides(a.trace(), b.trace())
    assert pairing.partings == ()
    assert (len(pairing.only_a), len(pairing.only_b)) == (1, 1)


def test_declared_rows_are_closed_by_reason() -> None:
    """Tokens that the other side declares never computed are neither matched nor unmatched."""
    a, b = Side(boundaries=EMBEDDING), Side(boundaries=EMBEDDING)
    b.drop_rows("s0:6")
    b.declared = {"last sampled token": {"": [("s0", 6)]}}
    pairing = pair_sides(a.trace(), b.trace())
    assert {reason: tokens.tolist() for reason, tokens in pairing.declared_a.items()} == {"last sampled token": [6]}
    assert not len(pairing.only_a)


def test_unknown_ids_match_by_name() -> None:
    """A side that does not know the ids is matched by unique name and position."""
    a, b = Side(boundaries=EMBEDDING), Side(boundaries=EMBEDDING)
    b.label_only("s1")
    pairing = pair_sides(a.trace(), b.trace())
    assert (pairing.matched, pairing.by_label) == (12, 5)
    np.testing.assert_array_equal(pairing.tokens.b_of_a, np.arange(12))


def test_an_empty_side_matches_nothing() -> None:
    """A side that recorded no row pairs without error."""
    a, b = Side(boundaries=EMBEDDING), Side(boundaries=EMBEDDING)
    b.drop("embedding")
    pairing = pair_sides(a.trace(), b.trace())
    assert (pairing.matched, len(pairing.only_a)) == (0, 12)
    assert pair_sides(b.trace(), b.trace()).matched == 0
