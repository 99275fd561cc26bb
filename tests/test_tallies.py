"""Verdicts on boundaries when a trace ends (``tracer.record.tallies``)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracer.errors import CaptureError, Code
from tracer.format.schema import Boundary, BoundaryStatus, NotComputed, RowScope
from tracer.record.tallies import BoundaryTally, PositionSet, reason_of
from tracer.record.tokens import SequenceRegistry

B = Boundary(name="b", level=0)


def verdict(
    tally: BoundaryTally, forwards: int = 1, rows: int = 4, silent: str = "", declared: tuple[NotComputed, ...] = ()
) -> tuple[str, str]:
    """Status and reason of the boundary."""
    registry = SequenceRegistry()
    registry.open("s", request="p0")
    boundary = tally.finish(forwards, rows, silent, declared, registry)
    return boundary.status.value, boundary.reason


def test_a_boundary_that_ran_is_recorded_with_its_numbers() -> None:
    """Executions, recomputations, rows, dtype and width reach the manifest."""
    tally = BoundaryTally(B)
    tally.count(4, 1, False, "bfloat16", 32)
    tally.count(4, 1, True, "bfloat16", 32)
    tally.count(0, 0, False, "bfloat16", 32)
    done = tally.finish(1, 4, "", (), SequenceRegistry())
    assert (done.status, done.executions, done.recomputed, done.row_count) == (BoundaryStatus.RECORDED, 1, 1, 4)
    assert (done.dtype, done.width) == ("bfloat16", 32)
    tally.count(4, 1, False, "float32", 32)
    assert tally.finish(1, 4, "", (), SequenceRegistry()).dtype == "mixed"


def test_what_did_not_run_is_vacuous() -> None:
    """No forward, no execution, a known cause: each has its reason."""
    assert verdict(BoundaryTally(B), forwards=0) == ("vacuous", "no forward ran")
    assert verdict(BoundaryTally(B), forwards=0, silent="compiled") == ("vacuous", "no forward ran: compiled")
    assert verdict(BoundaryTally(B)) == ("vacuous", "0 executions")
    assert verdict(BoundaryTally(B), silent="compiled") == ("vacuous", "0 executions: compiled")


def test_a_process_without_rows_is_not_vacuous() -> None:
    """Where no forward had a row, a module that was not called is no absence."""
    assert verdict(BoundaryTally(B), rows=0) == ("recorded", "")


def test_failures_are_counted_by_reason() -> None:
    """A leaf that could not be read makes the boundary vacuous, however often others could."""
    tally = BoundaryTally(B)
    tally.count(4, 1, False, "float32", 8)
    tally.fail(CaptureError(Code.LEAF_NOT_TENSOR, "leaf is None", where="output[1]"))
    tally.fail(CaptureError(Code.LEAF_NOT_TENSOR, "leaf is None", where="output[1]"))
    assert verdict(tally) == ("vacuous", "[leaf-not-tensor] leaf is None; output[1] (2 of 3 executions)")


def test_what_is_never_available_is_not_observable() -> None:
    """A derived boundary that no forward allowed is not observable; one that some did is vacuous."""
    tally = BoundaryTally(B)
    tally.unavailable["columns are sharded"] += 2
    assert verdict(tally, forwards=2) == ("not observable", "columns are sharded")
    tally.count(4, 1, False, "float32", 1)
    assert verdict(tally, forwards=3) == ("vacuous", "columns are sharded (in 2 of 3 forwards)")


def test_missing_rows_are_named_unless_declared() -> None:
    """Rows that a forward had are missing unless the host declared them for this boundary or for all."""
    tally = BoundaryTally(B)
    tally.count(2, 1, False, "float32", 8)
    tally.missing.append((np.array([0, 0]), np.array([3, 2])))
    assert verdict(tally) == ("vacuous", "2 rows fewer than the forwards had, first p0:2")
    one = NotComputed(sequence="s", positions=((2, 3),), boundaries=("b",), reason="pruned")
    assert verdict(tally, declared=(one,)) == ("vacuous", "1 rows fewer than the forwards had, first p0:3")
    rest = NotComputed(sequence="s", positions=((0, 9),), reason="pruned")
    assert verdict(tally, declared=(one, rest)) == ("recorded", "")
    other = NotComputed(sequence="s", positions=((0, 9),), boundaries=("c",), reason="pruned")
    assert verdict(tally, declared=(other,))[0] == "vacuous"


def test_what_was_not_to_be_recorded_keeps_its_status() -> None:
    """The plan's own verdicts stand."""
    tally = BoundaryTally(Boundary(name="b", level=2, status=BoundaryStatus.NOT_SELECTED, reason="level 2"))
    assert verdict(tally) == ("not selected", "level 2")
    assert not tally.covers_forward
    assert not BoundaryTally(Boundary(name="b", level=0, rows=RowScope.SAMPLED)).covers_forward


def test_reasons_are_one_line() -> None:
    """Errors of ours give code, words, place, expected and found; any other its class."""
    error = CaptureError(Code.MAP_LAYOUT, "does not fit", where="x", expected="a", found="b")
    assert reason_of(error) == "[map-layout] does not fit; x; expected a; found b"
    assert reason_of(ValueError("two\nlines")) == "ValueError: two lines"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=30), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))))
def test_positions_are_a_set(rows: list[tuple[int, int]], removed: list[tuple[int, int]]) -> None:
    """Positions added in any order and any number of times, less what is taken out, are kept as ascending spans."""
    positions = PositionSet()
    for start in range(0, len(rows), 7):
        piece = np.array(rows[start : start + 7]).reshape(-1, 2)
        positions.add(piece[:, 0], piece[:, 1])
    spans = [(low, high) for low, high in removed if low < high]
    positions.without(1, spans)
    left = {(s, p) for s, p in rows if s != 1 or not any(low <= p < high for low, high in spans)}
    found = {(s, p) for s in positions.sequences() for start, stop in positions.spans(s) for p in range(start, stop)}
    assert found == left
    assert len(positions) == len(left)
    for sequence in positions.sequences():
        edges = [edge for span in positions.spans(sequence) for edge in span]
        assert edges == sorted(set(edges))
