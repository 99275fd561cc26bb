"""A pair in float32 as a control: errors survive, rounding falls."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sides import Side
from tracer.errors import Code, UsageError
from tracer.read.diff import diff_traces
from tracer.read.findings import Class, ControlOutcome, DiffResult

NAME = "layers.1.attn.out"


def native(by: float = 1e-2) -> tuple[Side, Side]:
    """Two sides in bfloat16 that differ in one boundary."""
    pair = Side(path="a"), Side(path="b")
    for side in pair:
        for values in side.values.values():
            values.dtype = "bfloat16" if values.dtype == "float32" else values.dtype
    pair[1].carry_on(NAME, "s0:3", "s1:2", by=by)
    return pair


def control(by: float) -> tuple[Side, Side]:
    """The same pair in float32, where the boundary differs by this much."""
    pair = Side(path="a32"), Side(path="b32")
    if by:
        pair[1].carry_on(NAME, "s0:3", "s1:2", by=by)
    return pair


def compared(wide: tuple[Side, Side], by: float = 0.1) -> DiffResult:
    """The native pair under a control pair."""
    a, b = native(by)
    return diff_traces(a.trace(), b.trace(), control=(wide[0].trace(), wide[1].trace()))


@pytest.mark.parametrize(
    ("by", "outcome", "klass"),
    [
        (0.0, ControlOutcome.FALLS, Class.FLOATING_POINT),
        (1e-7, ControlOutcome.FALLS, Class.FLOATING_POINT),
        (5e-4, ControlOutcome.UNCLEAR, Class.UNLOCALIZED),
        (0.1, ControlOutcome.SURVIVES, Class.CORRECTNESS),
    ],
)
def test_what_survives_is_an_error_and_what_falls_is_rounding(by: float, outcome: ControlOutcome, klass: Class) -> None:
    """The same rows in float32 decide the class; between the two nothing is decided."""
    result = compared(control(by))
    assert result.control is not None
    assert (result.control.outcome, result.control.boundary, result.control.rows) == (outcome, NAME, 2)
    assert result.classification is not None
    assert result.classification.klass is klass
    assert any(result.control.text in text for text in result.classification.evidence)


def test_a_control_whose_inputs_differ_says_nothing() -> None:
    """Where the control pair parts earlier, its difference here may be inherited."""
    wide = control(0.1)
    wide[1].change("layers.1.attn.core", "s0:3", by=0.1)
    result = compared(wide)
    assert result.control is not None
    assert result.control.outcome is ControlOutcome.UNCLEAR
    assert "its input layers.1.attn.core differs" in result.control.text


def test_a_control_that_lacks_the_boundary_says_so() -> None:
    """Not recorded there, or without these rows: unclear, never fallen."""
    for whole in (True, False):
        wide = control(0.0)
        for side in wide:
            if whole:
                side.drop(NAME)
            else:
                side.drop_rows("s0:3", "s1:2")
        result = compared(wide)
        assert result.control is not None
        assert result.control.outcome is ControlOutcome.UNCLEAR


def test_pairs_that_control_nothing_are_refused() -> None:
    """Another host, other tokens, or a pair that is not in float32."""
    a, b = native()
    coarse, foreign, other = native(), control(0.0), (Side({"x": [1, 2]}), Side({"x": [1, 2]}))
    foreign[1].host = "engine"
    for pair, words in ((coarse, "not run in float32"), (foreign, "no trace of that side's program"), (other, "shares no token")):
        with pytest.raises(UsageError, match=words) as error:
            diff_traces(a.trace(), b.trace(), control=(pair[0].trace(), pair[1].trace()))
        assert error.value.code is Code.BAD_ARGUMENT


def test_choices_that_float32_does_not_flip() -> None:
    """A choice that differs only in the coarse pair was flipped by rounding, and the report says so."""
    a, b = Side(moe=True), Side(moe=True)
    ids = "layers.1.moe.topk_ids"
    b.values[ids].rows = b.values[ids].rows.copy()
    b.values[ids].rows[3] = np.sort((b.values[ids].rows[3] + 1) % 8)
    wide = Side(moe=True), Side(moe=True)
    result = diff_traces(a.trace(), b.trace(), control=(wide[0].trace(), wide[1].trace()))
    assert result.control is not None
    assert "in float32 none of 1 row differ: rounding flipped these choices" in result.control.text
