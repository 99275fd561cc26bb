"""The fault catalogue: plant, trace both sides, diff, and check what the tool says against the row.

Covered here is what needs no dumps: exit code, first boundary, differing tokens, and the classes input mismatch, weight
mismatch and discrete path mismatch. Every other class is still ``unlocalized``.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import tracer
from tests.expectations import expect_same
from tests.planters.core import DISCRETE, INPUT, WEIGHT, Fault
from tests.planters.faults import FAULTS
from tracer.read.findings import BoundaryResult, Class, DiffResult, FindingCode, Kind, Verdict

pytestmark = pytest.mark.newest  # the catalogue was measured with it

TRACED = [fault for fault in FAULTS.values() if fault.kind == "trace"]
DECIDED = {INPUT: Class.INPUT, WEIGHT: Class.WEIGHT, DISCRETE: Class.DISCRETE}
FIRST_ALSO = {
    "F04": ("input.visible_from",),  # this host shows it
    "F21": ("layers.1.attn.kv_latent_norm",),
    "F33": ("layers.0.linear_attn.*",),
}
TOKENS = {
    "F01": "all of f0.r1.d0",  # the padded sequence
    "F04": "all of f0.r0.d1",  # document 2 of a packed row is a sequence of its own
    "F05b": "all of f0.r0.d1",
    "F53": "all but 0",  # a single key leaves attention nothing to sum
}


def diff_of(fault: Fault, folder: Path) -> DiffResult:
    """Trace both sides at level 2 and compare them."""
    model_a, model_b, inputs_a, inputs_b = fault.build()
    for side, model, inputs in (("a", model_a, inputs_a), ("b", model_b, inputs_b)):
        with tracer.trace(model, map="auto", out=folder / side, level=2):
            inputs.run(model)
    return tracer.diff_traces(folder / "a", folder / "b")


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def entry(result: DiffResult, name: str) -> BoundaryResult:
    return next(found for found in result.boundaries if found.name == name)


def check_tokens(fault: Fault, found: BoundaryResult) -> None:
    """The differing rows are those that the catalogue states."""
    some = 0 < found.rows_differing < found.rows_compared
    expected = TOKENS.get(fault.id, fault.tokens)
    if expected == "all":
        assert found.tokens == "all", found
    elif expected == "all but 0":
        assert found.tokens == "all but position 0", found
    elif expected.startswith("from "):
        assert found.tokens.startswith(f"from position {expected.removeprefix('from ')}"), found
    elif expected == "some":
        assert some, found
    else:
        assert found.tokens == expected, found


@pytest.mark.parametrize("fault", [fault for fault in TRACED if fault.effect not in ("same", "absent")], ids=lambda fault: fault.id)
def test_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    """The first divergence, its rows and (for input, weight, discrete) its class are those of the catalogue."""
    result = diff_of(fault, tmp_path)
    assert result.exit == 1, (result.headline, result.findings)
    assert result.first is not None
    assert matches(result.first.boundary, fault.first + FIRST_ALSO.get(fault.id, ())), result.headline
    assert result.classification is not None
    allowed = {DECIDED.get(name, Class.UNLOCALIZED) for name in fault.klass}
    assert result.classification.klass in allowed, result.classification
    for pattern in fault.roots:
        assert any(matches(root.place.boundary, (pattern,)) for root in result.roots), result.roots
    if fault.weights:
        differing = {finding.boundary for finding in result.findings if finding.code is FindingCode.WEIGHT_DIFFERS}
        assert differing
    if any(candidate.name == result.first.boundary for candidate in result.boundaries) and fault.effect != "input" and fault.id != "F05":
        check_tokens(fault, entry(result, result.first.boundary))


@pytest.mark.parametrize("fault", [fault for fault in TRACED if fault.effect == "same"], ids=lambda fault: fault.id)
def test_same_is_same(fault: Fault, tmp_path: Path) -> None:
    """Padding side, packing, batching, decode and later in-place edits change nothing."""
    expect_same(diff_of(fault, tmp_path))


@pytest.mark.parametrize("fault", [fault for fault in TRACED if fault.effect == "absent"], ids=lambda fault: fault.id)
def test_absence_is_never_green(fault: Fault, tmp_path: Path) -> None:
    """A boundary that never ran, or no token in common, is exit 2 and named."""
    result = diff_of(fault, tmp_path)
    assert result.exit == 2, (result.headline, result.findings)
    assert result.verdict is Verdict.COULD_NOT_TELL
    decisive = [finding for finding in result.findings if finding.kind is Kind.ABSENCE]
    if fault.first != ("*",):
        assert {finding.boundary for finding in decisive} == set(fault.first)
        assert any("0 executions" in finding.text for finding in decisive)
    else:
        assert "0 of" in result.headline
