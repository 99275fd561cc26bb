"""Scenarios S26 to S31: copies and partial sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tracer
from tests.expectations import expect_could_not_tell, expect_different, expect_disagreement, expect_same, outcome, texts
from tests.playback import Cut, Full, Stage, batch, layered, tensor_parallel
from tracer.read.findings import BoundaryOutcome, FindingCode, Kind, Side


@pytest.mark.parametrize("off", [False, True], ids=["a", "b"])
def test_s26_replicated_residual(off: bool, full: Full, plain: Path, tmp_path: Path) -> None:
    """Equal copies are one row; a copy one ulp off is the side's own disagreement."""
    ranks = tensor_parallel(batch(full), 2, lambda r: {})

    def nudge(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[7 + 3].view(torch.int16)[5] += 1
        return tensor

    if off:
        ranks[1].cuts["layers.1.residual"] = Cut(change=nudge)
    result = tracer.diff_traces(plain, Stage(tmp_path).play("b", full, ranks))
    if off:
        finding = expect_disagreement(result, FindingCode.REPLICAS_DISAGREE, Side.B, "layers.1.residual", "s1", 3)
        assert set(finding.ranks) == {0, 1}
    else:
        expect_same(result, rows=12)
        assert next(entry for entry in result.boundaries if entry.name == "layers.1.residual").copies_b == 2


def partial(full: Full, shares: tuple[float, float], *, declared: str = "tp", doubled: str = "") -> list:  # type: ignore[type-arg]
    """attn.out before its reduction: two ranks hold ``shares`` of it in float32."""

    def cuts(r: int) -> dict[str, Cut]:
        return {"attn.out": Cut(partial=declared, change=lambda tensor: tensor.float() * shares[r])}

    ranks = tensor_parallel(batch(full), 2, cuts)
    if doubled:
        ranks[1].cuts[doubled] = Cut(partial=declared, change=lambda tensor: tensor.float() * shares[1] * 2)
    return ranks


def coarse() -> Full:
    """attn.out in float32 with few bits, so that shares of it add up exactly."""
    full = Full()
    for layer in range(4):
        values = full.values[f"layers.{layer}.attn.out"]
        for row, value in values.items():
            values[row] = (value.float() * 4).round() / 4
    return full


def test_s27_partial_sums_alike(full: Full, tmp_path: Path) -> None:
    """The same split on both sides is compared rank by rank, bitwise, and marked."""
    stage = Stage(tmp_path)
    result = tracer.diff_traces(stage.play("a", full, partial(full, (0.75, 0.25))), stage.play("b", full, partial(full, (0.75, 0.25))))
    assert result.exit == 0, result.findings
    assert outcome(result, "layers.1.attn.out") is BoundaryOutcome.IDENTICAL
    assert "partial sums" in next(entry.text for entry in result.boundaries if entry.name == "layers.1.attn.out")


@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_s28_reduced_against_partial(case: str, tmp_path: Path) -> None:
    """Only the sketch compares a sum with its parts: not told without a tolerance, same with one, different where a part is doubled."""
    full = coarse()
    stage = Stage(tmp_path)
    doubled = "layers.2.attn.out" if case == "c" else ""
    side_b = full.copy().carry(doubled, full.rows(doubled)) if doubled else full
    a, b = stage.plain("a", full), stage.play("b", side_b, partial(full, (0.75, 0.25), doubled=doubled))
    result = tracer.diff_traces(a, b, tolerance=tracer.Tolerance(relative=1e-5) if case == "b" else None)
    if case == "a":
        findings = expect_could_not_tell(result, FindingCode.ONLY_BY_SKETCH)
        assert {finding.boundary for finding in findings} == {f"layers.{n}.attn.out" for n in range(4)}
        assert "resolution" in findings[0].text
    elif case == "b":
        assert result.exit == 0, result.findings
        assert outcome(result, "layers.2.attn.out") is BoundaryOutcome.BY_SKETCH
    else:
        expect_different(result, "layers.2.attn.out")
        assert result.roots[0].rows == 12


def test_s29_declared_partial_but_reduced(full: Full, plain: Path, tmp_path: Path) -> None:
    """Copies that are identical are no partial sums: a wrong declaration, not a difference."""
    ranks = tensor_parallel(batch(full), 2, lambda r: {"attn.out": Cut(partial="tp")})
    result = tracer.diff_traces(plain, Stage(tmp_path).play("b", full, ranks))
    findings = expect_could_not_tell(result, FindingCode.PARTIAL_COPIES_IDENTICAL)
    assert "all 2 copies are identical" in findings[0].text
    assert findings[0].remedy


def test_s30_declared_replicated_but_partial(tmp_path: Path) -> None:
    """Copies that differ but add up to the other side's value are hinted to be partial sums."""
    full = coarse()
    stage = Stage(tmp_path)
    ranks = partial(full, (0.75, 0.25), declared="")
    result = tracer.diff_traces(stage.plain("a", full), stage.play("b", full, ranks))
    finding = expect_disagreement(result, FindingCode.REPLICAS_DISAGREE, Side.B, "layers.0.attn.out", "s0", 0)
    assert "add up" in finding.text + finding.remedy
    assert "partial" in finding.text + finding.remedy


def test_s31_undeclared_axis(full: Full, plain: Path, tmp_path: Path) -> None:
    """A boundary cut over an axis that the map does not mention is named with axis and size, not guessed."""
    ranks = tensor_parallel(batch(full), 2, lambda r: {"attn.q": Cut(columns=tuple(range(16 * r, 16 * r + 16)), silent=True)})
    result = tracer.diff_traces(plain, Stage(tmp_path).play("b", full, ranks))
    findings = expect_could_not_tell(result, FindingCode.VACUOUS)
    assert {finding.boundary for finding in findings} == set(layered({"attn.q": Cut()}))
    assert "tp" in findings[0].text
    assert "size 2" in findings[0].text
    assert not [finding for finding in result.findings if finding.kind is Kind.DIFFERENCE]
    assert "attn.q" in texts(result)
