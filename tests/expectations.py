"""What the scenarios demand of a result, in words."""

from __future__ import annotations

from tracer.read.findings import BoundaryOutcome, DiffResult, Finding, FindingCode, Kind, Side, Verdict

_QUIET = {BoundaryOutcome.IDENTICAL, BoundaryOutcome.NOT_OBSERVABLE, BoundaryOutcome.NOT_RECORDED}


def expect_same(result: DiffResult, rows: int | None = None) -> None:
    """Exit 0, every boundary identical, no finding but declared information."""
    explained = result.headline, result.findings
    assert result.exit == 0, explained
    assert result.verdict is Verdict.SAME
    assert result.first is None
    assert result.roots == ()
    assert [finding for finding in result.findings if finding.kind is not Kind.INFORMATION] == []
    assert {boundary.outcome for boundary in result.boundaries} <= _QUIET, explained
    assert result.counts.rows_compared > 0
    assert result.counts.rows_differing == 0
    assert (result.counts.rows_only_a, result.counts.rows_only_b) == (0, 0)
    if rows is not None:
        assert result.counts.tokens_matched == rows


def expect_different(result: DiffResult, boundary: str, request: str = "", position: int | None = None, roots: int = 1) -> None:
    """Exit 1, first divergence here, and nothing else called a cause."""
    assert result.exit == 1, (result.headline, result.findings)
    assert result.verdict is Verdict.DIFFERENT
    assert result.first is not None
    assert result.first.boundary == boundary, result.headline
    if request:
        assert result.first.request == request
    if position is not None:
        assert result.first.position == position
    assert len(result.roots) == roots, [(root.place, root.text) for root in result.roots]
    assert boundary in result.headline


def expect_could_not_tell(result: DiffResult, *codes: FindingCode) -> list[Finding]:
    """Exit 2 because of these findings; returns them."""
    assert result.exit == 2, (result.headline, result.findings)
    assert result.verdict is Verdict.COULD_NOT_TELL
    assert result.first is None
    decisive = [finding for finding in result.findings if finding.kind is not Kind.INFORMATION]
    assert {finding.code for finding in decisive} == set(codes), decisive
    return decisive


def expect_disagreement(result: DiffResult, code: FindingCode, side: Side, boundary: str, request: str, position: int) -> Finding:
    """Exit 1 because a side disagrees with itself; returns the finding."""
    assert result.exit == 1, (result.headline, result.findings)
    found = [finding for finding in result.findings if finding.code is code]
    assert found, result.findings
    first = found[0]
    assert (first.side, first.boundary, first.request, first.position) == (side, boundary, request, position), first
    assert first is next(finding for finding in result.findings if finding.kind is not Kind.INFORMATION), "the side's own noise comes first"
    return first


def outcome(result: DiffResult, boundary: str) -> BoundaryOutcome:
    """What became of one boundary."""
    return next(entry.outcome for entry in result.boundaries if entry.name == boundary)


def texts(result: DiffResult) -> str:
    """Everything the result says in words."""
    parts = [result.headline, result.next_step, *(finding.text + " " + finding.remedy for finding in result.findings)]
    parts += [root.text for root in result.roots] + [boundary.text for boundary in result.boundaries]
    return "\n".join(parts)
