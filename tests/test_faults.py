"""The fault catalogue: every fault is planted, traced, diffed, dumped by plan and controlled, and held against its row.

``fault_runs`` does what a user would do; all that is asked of a fault is asked of one run of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.expectations import expect_same
from tests.fault_runs import EXPLAINED, TRACED, matches, run_fault
from tests.planters.core import Fault
from tracer.read.findings import Class, FindingCode, Kind, Verdict

pytestmark = pytest.mark.newest  # the catalogue was measured with it

DIFFERENT = [fault for fault in TRACED if fault.effect not in ("same", "absent")]
CONTROLS = {fault.id for fault in TRACED if fault.effect == "rounding"}


@pytest.mark.parametrize("fault", DIFFERENT, ids=lambda fault: fault.id)
def test_fault_is_found_classed_and_explained(fault: Fault, tmp_path: Path) -> None:
    """First divergence, differing rows, further roots, class and explanation are those of the catalogue; no control is called an error."""
    run = run_fault(fault, tmp_path)
    assert run.first.exit == run.last.exit == 1, (run.first.headline, run.first.findings)
    assert run.place_right, run.first.headline
    assert run.tokens_right, run.entry
    for pattern in fault.roots:
        assert any(matches(root.place.boundary, (pattern,)) for root in run.first.roots), run.first.roots
    if fault.weights:
        assert any(finding.code is FindingCode.WEIGHT_DIFFERS for finding in run.first.findings)
    assert run.class_right, run.last.classification
    assert run.explained in (True, None), run.said
    for result in (run.first, run.last):
        found = result.classification
        assert found is not None
        assert found.next_step
        assert found.klass is Class.UNLOCALIZED or found.klass.value in fault.klass, found
        assert found.not_proven, "no class is proven in every respect"
        if fault.id in CONTROLS:
            assert found.klass is not Class.CORRECTNESS


def test_every_explained_fault_is_in_the_catalogue() -> None:
    """What is asked of explanations names faults that exist, and covers every error of values."""
    known = {fault.id for fault in TRACED}
    assert EXPLAINED.keys() <= known
    assert {fault.id for fault in DIFFERENT if fault.effect == "semantic" and "quantization" not in fault.family} <= EXPLAINED.keys()


@pytest.mark.parametrize("fault", [fault for fault in TRACED if fault.effect == "same"], ids=lambda fault: fault.id)
def test_same_is_same(fault: Fault, tmp_path: Path) -> None:
    """Padding side, packing, batching, decode and later in-place edits change nothing."""
    expect_same(run_fault(fault, tmp_path).first)


@pytest.mark.parametrize("fault", [fault for fault in TRACED if fault.effect == "absent"], ids=lambda fault: fault.id)
def test_absence_is_never_green(fault: Fault, tmp_path: Path) -> None:
    """A boundary that never ran, or no token in common, is exit 2 and named."""
    result = run_fault(fault, tmp_path).first
    assert result.exit == 2, (result.headline, result.findings)
    assert result.verdict is Verdict.COULD_NOT_TELL
    decisive = [finding for finding in result.findings if finding.kind is Kind.ABSENCE]
    if fault.first != ("*",):
        assert {finding.boundary for finding in decisive} == set(fault.first)
        assert any("0 executions" in finding.text for finding in decisive)
    else:
        assert "0 of" in result.headline
