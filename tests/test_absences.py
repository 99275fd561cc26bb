"""Nothing passes by absence: boundaries and rows of one side."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import tracer
from tests.sides import Side
from tests.small_model import SmallHost, SmallModel, small_map
from tracer.format.schema import BoundaryStatus
from tracer.read.absences import absent_boundary, missing_rows, token_findings, unknown_inputs
from tracer.read.compare import compare_boundary
from tracer.read.diff import diff_traces
from tracer.read.findings import BoundaryOutcome, Finding, FindingCode, Kind
from tracer.read.findings import Side as Which
from tracer.read.floor import Floors, Tolerance
from tracer.read.outcomes import judge
from tracer.read.pairing import pair_sides

NAME = "layers.1.attn.core"
NOTHING_SAID: dict[Which, set[str]] = {side: set() for side in Which}
Status = BoundaryStatus


@pytest.mark.parametrize(
    ("status_a", "status_b", "outcome", "side"),
    [
        (None, Status.VACUOUS, BoundaryOutcome.MISSING, Which.B),
        (Status.UNRESOLVED, None, BoundaryOutcome.MISSING, Which.A),
        (None, Status.NOT_SELECTED, BoundaryOutcome.MISSING, Which.B),
        (Status.VACUOUS, Status.VACUOUS, BoundaryOutcome.MISSING, Which.BOTH),
        (Status.VACUOUS, Status.NOT_SELECTED, BoundaryOutcome.MISSING, Which.A),
        (None, Status.NOT_OBSERVABLE, BoundaryOutcome.NOT_OBSERVABLE, None),
        (Status.NOT_OBSERVABLE, Status.UNRESOLVED, BoundaryOutcome.NOT_OBSERVABLE, None),
        (Status.NOT_SELECTED, Status.NOT_SELECTED, BoundaryOutcome.NOT_RECORDED, None),
        (Status.UNRESOLVED, Status.UNRESOLVED, BoundaryOutcome.NOT_RECORDED, None),
    ],
)
def test_what_a_status_means(status_a: Status | None, status_b: Status | None, outcome: BoundaryOutcome, side: Which | None) -> None:
    """A boundary is missing where a side should have it, and no absence where a host cannot show it or nobody wanted it."""
    a, b = Side(), Side()
    for made, status in ((a, status_a), (b, status_b)):
        if status is not None:
            made.drop(NAME, status=status)
    x, y = a.trace(), b.trace()
    info = next(boundary for boundary in x.catalogue if boundary.name == NAME)
    result, finding = absent_boundary(info, x, y, NOTHING_SAID)
    assert result.outcome is outcome
    assert (None if finding is None else finding.side) is side


def test_what_both_call_recorded_and_neither_holds_is_missing() -> None:
    """A boundary that is called recorded and of which no side has a single execution is an absence, not an equality."""
    sides = []
    for side in (Side(), Side()):
        side.drop(NAME)
        trace = side.trace()
        infos = [msgspec.structs.replace(info, status=Status.RECORDED) if info.name == NAME else info for info in trace.catalogue]
        sides.append(dataclasses.replace(trace, catalogue=tuple(infos)))
    result = tracer.diff_traces(*sides)
    assert (result.exit, "missing on both sides: 0 executions" in result.headline) == (2, True)


def test_what_a_side_said_itself_is_not_said_again() -> None:
    """The outcome stays missing, without a second finding."""
    b = Side()
    b.drop(NAME)
    x, y = Side().trace(), b.trace()
    info = next(boundary for boundary in x.catalogue if boundary.name == NAME)
    result, finding = absent_boundary(info, x, y, {**NOTHING_SAID, Which.B: {NAME}})
    assert (result.outcome, finding) == (BoundaryOutcome.MISSING, None)


def rows_of(a: Side, b: Side, name: str) -> list[Finding]:
    """Findings about the rows of one boundary that only one side has."""
    x, y = a.trace(), b.trace()
    pairing = pair_sides(x, y)
    judged = judge(compare_boundary(x.boundaries[name], y.boundaries[name], pairing.tokens), Floors())
    return list(missing_rows(judged, x, y, pairing, None).findings)


def test_rows_of_one_boundary_are_named_on_either_side() -> None:
    """Rows that a boundary lacks on one side are listed for that side."""
    a, b = Side(), Side()
    a.drop_rows("s1:4", boundary=NAME)
    b.drop_rows("s0:2", "s0:3", boundary=NAME)
    found = rows_of(a, b, NAME)
    assert [(finding.side, finding.kind, finding.text) for finding in found] == [
        (Which.B, Kind.ABSENCE, "2 rows only in A: s0 2 (2..3)"),
        (Which.A, Kind.ABSENCE, "1 row only in B: s1:4"),
    ]


def test_declared_rows_of_one_boundary_are_information() -> None:
    """A declaration for that boundary covers exactly its rows."""
    b = Side()
    b.drop_rows("s0:2", "s0:3", boundary=NAME)
    b.declared = {"kept in cache": {NAME: [("s0", 2)]}}
    found = rows_of(Side(), b, NAME)
    assert [(finding.code, finding.rows) for finding in found] == [(FindingCode.ROWS_NOT_COMPUTED, 1), (FindingCode.ROWS_UNMATCHED, 1)]


def test_logits_missing_without_a_declaration_are_an_absence() -> None:
    """That logits are computed only where needed excuses no row: the host must declare which it left out."""
    b = Side()
    b.drop_rows("s0:2", "s0:3", boundary="lm_head")
    (found,) = rows_of(Side(), b, "lm_head")
    assert (found.code, found.rows) == (FindingCode.ROWS_UNMATCHED, 2)


def test_tokens_that_part_match_and_are_missing_are_told_apart() -> None:
    """A pair that parts is a difference; a sequence without any partner is an absence."""
    a, b = Side({"x": [1, 2, 3, 4], "y": [7, 8]}), Side({"x": [1, 2, 3, 5]})
    x, y = a.trace(), b.trace()
    found = token_findings(x, y, pair_sides(x, y))
    assert [(finding.code, finding.kind) for finding in found] == [
        (FindingCode.INPUT_DIFFERS, Kind.DIFFERENCE),
        (FindingCode.ROWS_UNMATCHED, Kind.ABSENCE),
    ]
    assert found[0].text.startswith("x:3: A has id 4, B has id 5; 1 row of A and 1 of B from there on are not compared")


@pytest.mark.parametrize(
    ("options_a", "options_b", "code", "said"),
    [
        ({}, {"tokens": slice(0, 2)}, FindingCode.ROWS_UNMATCHED, "computed but not recorded by B: outside tokens="),
        ({"weights": False}, {}, FindingCode.WEIGHT_MISSING, "A recorded no weights, the other side did"),
        ({"boundaries": "input.*"}, {"boundaries": "input.*"}, FindingCode.NOTHING_COMPARED, "only inputs were compared"),
        ({"level": 0}, {"level": 2}, FindingCode.BOUNDARY_MISSING, "missing on A"),
    ],
    ids=["tokens=", "weights=False", "inputs alone", "levels"],
)
def test_what_one_side_left_out_of_its_recording_is_no_same(
    options_a: dict[str, Any], options_b: dict[str, Any], code: FindingCode, said: str, tmp_path: Path
) -> None:
    """Rows, weights or boundaries that a recording was told to leave out are exit 2 with the option, though all else is equal."""
    model = SmallModel()
    for name, options in (("a", options_a), ("b", options_b)):
        recording = tracer.trace(model, map=small_map(tmp_path), host=SmallHost(model), out=tmp_path / name, strict=True, **options)
        with torch.no_grad(), recording:
            model(torch.tensor([[11, 12, 13, 14, 15]]), mask=torch.ones(1, 5))
    result = tracer.diff_traces(tmp_path / "a", tmp_path / "b")
    assert result.exit == 2
    assert {finding.code for finding in result.findings if finding.kind is Kind.ABSENCE} == {code}
    assert said in result.headline
    assert result.next_step


@pytest.mark.parametrize("named", [False, True])
def test_automatic_labels_prove_no_difference(named: bool) -> None:
    """Tokens whose ids nobody knows are paired by label: a difference in them proves something only if a user named the requests."""
    a, b = Side(), Side()
    for made in (a, b):
        if named:
            made.requests = {"s0": "first"}
        made.label_only("s0")
    b.change("embedding", "s0:1")
    b.carry_on("layers.2.attn.out", "s0:5")
    result = diff_traces(a.trace(), b.trace())
    if named:
        assert result.exit == 1
        assert "what 7 tokens were fed is taken from the names of their requests" in result.headline
        return
    assert (result.exit, result.first, result.classification, result.roots) == (2, None, None, ())
    assert result.headline.startswith("Could not tell: inputs not known: 3 tokens that differ are paired by automatic labels alone")
    assert "t.requests([...])" in result.next_step
    assert diff_traces(a.trace(), b.trace(), tolerance=Tolerance(10.0)).exit == 2
    assert diff_traces(a.trace(), a.trace()).exit == 0


def test_equal_embeddings_of_a_whole_prefix_make_inputs_known() -> None:
    """Where every embedding up to a token is bitwise equal, what it was fed is known without ids; behind another one it is not."""
    a, b = Side(), Side()
    for made in (a, b):
        made.label_only("s0")
    b.carry_on("layers.2.attn.out", "s0:5")
    result = diff_traces(a.trace(), b.trace())
    assert (result.exit, result.roots[0].place.boundary) == (1, "layers.2.attn.out")
    x, y = a.trace(), b.trace()
    b.change("embedding", "s0:4")
    y = b.trace()
    pairing = pair_sides(x, y)
    embedding = compare_boundary(x.boundaries["embedding"], y.boundaries["embedding"], pairing.tokens)
    unknown_K = unknown_inputs(x, pairing, embedding)
    assert unknown_K is not None
    assert unknown_K.tolist() == [False] * 4 + [True] * 3 + [False] * 5
