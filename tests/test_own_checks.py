"""A side's own findings inside a comparison."""

from __future__ import annotations

import pytest

from tests.sides import Side, catalogue
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.findings import Side as Which
from tracer.read.floor import Floors
from tracer.read.own_checks import covered, first_noise, sided
from tracer.read.verdict import NOISE

NAME = "layers.1.attn.out"


def finding(code: FindingCode, boundary: str = NAME) -> Finding:
    """A disagreement of side B with itself."""
    return Finding(code=code, kind=Kind.DIFFERENCE, boundary=boundary, side=Which.B, text="differs")


def test_findings_learn_their_side() -> None:
    """Every finding of a trace is told which side it is, and interventions are listed once."""
    side = Side()
    side.findings = [Finding(code=FindingCode.NOTE, kind=Kind.INFORMATION, text="x")]
    side.interventions = ("feed=a", "feed=a")
    assert [(found.code, found.side) for found in sided(side.trace(), Which.B)] == [
        (FindingCode.NOTE, Which.B),
        (FindingCode.INTERVENTION, Which.B),
    ]


@pytest.mark.parametrize(("floor", "kind"), [(1e-4, Kind.DIFFERENCE), (1e-3, Kind.INFORMATION)])
def test_a_floor_covers_repeats_up_to_twice_its_size(floor: float, kind: Kind) -> None:
    """Repeats that disagree by no more than twice the floor are information."""
    side = Side()
    side.noise = {NAME: 1.5e-3}
    floors = Floors({NAME: floor}, measured=True)
    assert covered(finding(FindingCode.REPEATS_DISAGREE), side.trace(), floors, None).kind is kind


def test_no_floor_covers_replicas_or_recompute() -> None:
    """Copies and recompute must agree bitwise whatever is given."""
    side = Side()
    side.noise = {NAME: 1e-9}
    floors = Floors({NAME: 1.0}, measured=True, own=True)
    for code in (FindingCode.REPLICAS_DISAGREE, FindingCode.RECOMPUTE_DISAGREES):
        assert covered(finding(code), side.trace(), floors, None) == finding(code)


def test_the_earliest_disagreement_counts() -> None:
    """Of several the first in causal order is taken; a weight stands before its boundary; what is covered does not count."""
    late, early = finding(FindingCode.REPEATS_DISAGREE, "layers.3.residual"), finding(FindingCode.REPLICAS_DISAGREE)
    weight = finding(FindingCode.REPLICAS_DISAGREE, "layers.1.attn.out.weight")
    boundaries = catalogue()
    place = [boundary.name for boundary in boundaries].index(NAME)
    assert first_noise([late, early], NOISE, boundaries) == (early, place)
    assert first_noise([late, weight], NOISE, boundaries) == (weight, place - 0.5)
    information = Finding(code=FindingCode.REPEATS_DISAGREE, kind=Kind.INFORMATION, boundary=NAME, text="within the floor")
    assert first_noise([information], NOISE, boundaries) == (None, float("inf"))
