"""Scenarios S43 to S55: values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tracer
from tests.expectations import expect_could_not_tell, expect_different, expect_same, outcome, texts
from tests.playback import POINTS, Cut, Full, Point, Rank, Stage, batch
from tracer.read.findings import BoundaryOutcome, DiffResult, FindingCode, Kind


def compare(a: Full, b: Full, tmp_path: Path) -> DiffResult:
    stage = Stage(tmp_path)
    return tracer.diff_traces(stage.plain("a", a), stage.plain("b", b))


def with_point(*extra: Point) -> Full:
    """The playback family with further boundaries behind the embedding."""
    return Full(points=[POINTS[0], *extra, *POINTS[1:]])


def test_s43_recorded_again(full: Full, plain: Path, tmp_path: Path) -> None:
    """A side against itself, recorded again."""
    expect_same(tracer.diff_traces(plain, Stage(tmp_path).plain("b", full)), rows=12)


def test_s44_one_element(full: Full, plain: Path, tmp_path: Path) -> None:
    """One element one ulp up is found, no earlier boundary and no row of the other sequence with it."""
    result = tracer.diff_traces(plain, Stage(tmp_path).plain("b", full.one_element()))
    expect_different(result, "layers.2.attn.out", "s0", 5)
    assert "all earlier boundaries identical" in result.headline
    for entry in result.boundaries:
        if entry.name.startswith(("layers.0.", "layers.1.")):
            assert entry.outcome is BoundaryOutcome.IDENTICAL, entry
        assert entry.first_request in ("", "s0"), entry


def test_s45_one_row_of_4096(tmp_path: Path) -> None:
    """One wholly different row among 4096 is named and counted."""
    a = Full({"s0": [7 + t % 500 for t in range(4096)]}, points=[Point("embedding", 32, ("input.ids",), 0)])
    b = a.copy()
    b.values["embedding"][("s0", 2900)] = torch.full((32,), 3.0, dtype=torch.bfloat16)
    stage = Stage(tmp_path)
    result = tracer.diff_traces(stage.plain("a", a, ["s0"]), stage.plain("b", b, ["s0"]))
    expect_different(result, "embedding", "s0", 2900)
    entry = next(entry for entry in result.boundaries if entry.name == "embedding")
    assert (entry.rows_differing, entry.rows_compared) == (1, 4096)


def test_s46_constant_ratio(full: Full, plain: Path, tmp_path: Path) -> None:
    """A boundary scaled by 1.04 differs there, in all rows."""
    b = full.copy()
    name = "layers.1.mlp.out"
    for row, value in b.values[name].items():
        b.values[name][row] = (value.float() * 1.04).to(torch.bfloat16)
    b.carry(name, b.rows(name))
    result = tracer.diff_traces(plain, Stage(tmp_path).plain("b", b))
    expect_different(result, name)
    entry = next(entry for entry in result.boundaries if entry.name == name)
    assert entry.tokens == "all"
    assert entry.distance is not None
    assert entry.distance.median == pytest.approx(0.04, rel=0.4)


@pytest.mark.parametrize("payload", [False, True], ids=["a", "b"])
def test_s47_nan_bits(payload: bool, full: Full, tmp_path: Path) -> None:
    """NaN with the same bits is equal; another payload differs, and only in its bits."""
    a = full.copy()
    name = "layers.0.attn.q"
    for column in (3, 9):
        a.values[name][("s0", 2)].view(torch.int16)[column] = 0x7FC0
    b = a.copy()
    if payload:
        b.values[name][("s0", 2)].view(torch.int16)[3] = 0x7FC1
        b.carry(name, [("s0", 2)])
    result = compare(a, b, tmp_path)
    entry = next(entry for entry in result.boundaries if entry.name == name)
    assert entry.nonfinite_a == 2
    if payload:
        expect_different(result, name, "s0", 2)
        assert "NaN bits only" in texts(result)
    else:
        expect_same(result, rows=12)


@pytest.mark.parametrize("finite", [False, True], ids=["a", "b"])
def test_s48_mask_boundary(finite: bool, tmp_path: Path) -> None:
    """-inf above the diagonal is equal to itself; the lowest finite value instead is a difference with counts."""
    a = with_point(Point("mask", 16, ("embedding",), dtype=torch.float32))
    for (seq, t), value in a.values["mask"].items():
        value[:] = torch.where(torch.arange(16) > t, float("-inf"), 0.0)
        assert seq in ("s0", "s1")
    b = a.copy()
    if finite:
        for value in b.values["mask"].values():
            value[value == float("-inf")] = torch.finfo(torch.float32).min
    result = compare(a, b, tmp_path)
    if finite:
        expect_different(result, "mask")
        entry = next(entry for entry in result.boundaries if entry.name == "mask")
        assert (entry.nonfinite_a > 0, entry.nonfinite_b) == (True, 0)
        assert str(entry.nonfinite_a) in texts(result)
    else:
        expect_same(result, rows=12)


def test_s49_sign_of_zero(full: Full, tmp_path: Path) -> None:
    """+0 against -0 is a difference below the sketch's resolution."""
    a, b = full.copy(), full.copy()
    name = "layers.2.attn.out"
    a.values[name][("s0", 5)][17] = 0.0
    b.values[name][("s0", 5)][17] = -0.0
    b.carry(name, [("s0", 5)])
    result = compare(a, b, tmp_path)
    expect_different(result, name, "s0", 5)
    entry = next(entry for entry in result.boundaries if entry.name == name)
    assert entry.distance is not None
    assert entry.distance.below_resolution
    assert "sign of zero" in entry.text


def test_s50_integers(tmp_path: Path) -> None:
    """Large integers one apart differ; where raw values are kept both are shown."""
    a = with_point(Point("narrow", 2, ("embedding",), dtype=torch.int64), Point("wide", 100, ("embedding",), dtype=torch.int64))
    for name in ("narrow", "wide"):
        for row in a.values[name]:
            a.values[name][row] = torch.zeros(a.points[name].columns, dtype=torch.int64)
    b = a.copy()
    a.values["narrow"][("s0", 3)][1], b.values["narrow"][("s0", 3)][1] = 2**24 + 1, 2**24 + 2
    a.values["wide"][("s1", 2)][70], b.values["wide"][("s1", 2)][70] = 2**53 + 1, 2**53
    result = compare(a, b, tmp_path)
    assert result.exit == 1
    assert outcome(result, "narrow") in (BoundaryOutcome.DIFFERS, BoundaryOutcome.HEALS)
    assert outcome(result, "wide") in (BoundaryOutcome.DIFFERS, BoundaryOutcome.HEALS)
    narrow = next(entry for entry in result.boundaries if entry.name == "narrow")
    assert (narrow.first_request, narrow.first_position) == ("s0", 3)
    assert str(2**24 + 1) in texts(result)
    assert str(2**24 + 2) in texts(result)


def test_s51_float64(tmp_path: Path) -> None:
    """A float64 element 1e-9 off is found."""
    a = with_point(Point("float64_point", 8, ("embedding",), dtype=torch.float64))
    b = a.copy()
    b.values["float64_point"][("s1", 4)][2] *= 1 + 1e-9
    result = compare(a, b, tmp_path)
    assert result.exit == 1
    assert result.first is not None
    assert (result.first.boundary, result.first.request, result.first.position) == ("float64_point", "s1", 4)


@pytest.mark.parametrize("case", ["a", "b"])
def test_s52_dtypes(case: str, full: Full, plain: Path, tmp_path: Path) -> None:
    """The same numbers in another float dtype are a dtype finding, no value difference; ids in another width are the same."""
    name = "layers.1.attn.norm" if case == "a" else "layers.1.moe.topk_ids"
    other = torch.float32 if case == "a" else torch.int32
    b = Stage(tmp_path).play("b", full, Rank(batch(full), cuts={name: Cut(change=lambda tensor: tensor.to(other))}))
    result = tracer.diff_traces(plain, b)
    if case == "b":
        expect_same(result, rows=12)
        return
    assert result.exit == 1
    differences = [finding for finding in result.findings if finding.kind is Kind.DIFFERENCE]
    assert {finding.code for finding in differences} == {FindingCode.DTYPE_DIFFERS}
    assert differences[0].boundary == name
    assert "below the sketch's resolution" in differences[0].text


def test_s53_heads_permuted(full: Full, plain: Path, tmp_path: Path) -> None:
    """Heads permuted alike in q and k heal at once and are the cause of nothing."""
    b = full.copy()
    for name in ("layers.1.attn.q", "layers.1.attn.k"):
        for row, value in b.values[name].items():
            b.values[name][row] = value.view(-1, 8).flip(0).reshape(-1)
    result = tracer.diff_traces(plain, Stage(tmp_path).plain("b", b))
    assert result.exit == 1
    assert outcome(result, "layers.1.attn.q") is BoundaryOutcome.HEALS
    assert outcome(result, "layers.1.attn.k") is BoundaryOutcome.HEALS
    assert outcome(result, "layers.1.attn.out") is BoundaryOutcome.IDENTICAL


def test_s54_two_faults(full: Full, plain: Path, tmp_path: Path) -> None:
    """A second fault in rows that the first does not reach is a root of its own."""
    b = full.one_element("layers.1.attn.out", ("s1", 0))
    b.nudge("layers.2.mlp.out", ("s0", 2)).carry("layers.2.mlp.out", [("s0", 2)])
    result = tracer.diff_traces(plain, Stage(tmp_path).plain("b", b))
    expect_different(result, "layers.1.attn.out", "s1", 0, roots=2)
    second = result.roots[1].place
    assert (second.boundary, second.request, second.position) == ("layers.2.mlp.out", "s0", 2)


@pytest.mark.parametrize("case", ["a", "b"])
def test_s55_floor(case: str, full: Full, plain: Path, tmp_path: Path) -> None:
    """A difference that the side shows against itself is within floor; a floor of zero covers nothing."""
    stage = Stage(tmp_path)
    name = "layers.2.attn.out"
    a2 = full.one_element(name, ("s0", 5), column=3) if case == "a" else full
    result = tracer.diff_traces(plain, stage.plain("b", full.one_element(name, ("s0", 5))), floor_a=[stage.plain("a2", a2)])
    if case == "a":
        assert result.exit == 0, result.findings
        assert outcome(result, name) is BoundaryOutcome.WITHIN_FLOOR
        assert outcome(result, "layers.1.residual") is BoundaryOutcome.IDENTICAL
    else:
        expect_different(result, name, "s0", 5)


def test_incomparable_width_is_not_judged(full: Full, tmp_path: Path) -> None:
    """A boundary of another width is exit 2 although every value before it is equal."""
    columns = (*range(32), 0)
    b = Stage(tmp_path).play("b", full, Rank(batch(full), cuts={"layers.3.residual": Cut(columns=columns)}))
    expect_could_not_tell(tracer.diff_traces(Stage(tmp_path).plain("a", full), b), FindingCode.WIDTH_DIFFERS)
