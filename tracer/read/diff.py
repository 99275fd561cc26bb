"""``diff_traces``: two traces in, everything that can be said about their difference out.

1. Each side by itself: what cannot be read as a whole ends the comparison; a side that disagrees with itself comes first.
2. Conditions, inputs, weights, then boundaries in causal order: structure before values.
3. Causal roots: what differs although everything it is computed from is equal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.read.absences import absent_boundary, inputs_unknown, missing_rows, token_findings, unknown_inputs
from tracer.read.advice import classification, next_step
from tracer.read.causes import Causes, Graph, find_causes, merge_catalogues
from tracer.read.conditions import differing_conditions, leads
from tracer.read.control import check_control
from tracer.read.divergence import Candidate, Scene, boundary_findings, find_candidates, first_bitwise
from tracer.read.dump_checks import check_dumps
from tracer.read.dump_table import dump_kinds, dump_lines, dump_ulps
from tracer.read.dumped import DumpedBoundary, Dumps, read_dumps
from tracer.read.evidence import Account, EvidenceGatherer
from tracer.read.explain import Material
from tracer.read.findings import (
    BoundaryOutcome,
    BoundaryResult,
    Counts,
    DiffResult,
    Finding,
    FindingCode,
    Kind,
    Place,
    Side,
    Verdict,
)
from tracer.read.floor import LARGE_FLOOR, SELF, Floors, Tolerance, large_floors, measure_floors
from tracer.read.logical import LogicalTrace
from tracer.read.opening import Progress, TraceLike, opened, summarize
from tracer.read.outcomes import Judged, cells_of, compare_all, judge, result_of
from tracer.read.own_checks import covered, first_noise, sided, without_replaced
from tracer.read.pairing import pair_sides
from tracer.read.token_map import draw_token_map
from tracer.read.verdict import NOISE, Facts, headline
from tracer.read.weight_diff import compare_weights, weight_findings
from tracer.read.wording import count, row_text, sequence_name, short

__all__ = ["diff_traces"]

_FLOORS_NAMED = 3
_EMBEDDING = "embedding"
"""What a model is fed, as values."""
_ROOTS_EXPLAINED = 4
"""Roots that are explained and classed, earliest first."""


def diff_traces(
    a: TraceLike,
    b: TraceLike,
    *,
    floor_a: TraceLike | Iterable[TraceLike] = (),
    floor_b: TraceLike | Iterable[TraceLike] = (),
    floor: TraceLike | Iterable[TraceLike] = (),
    control: tuple[TraceLike, TraceLike] | None = None,
    tolerance: Tolerance | None = None,
    progress: Progress | None = None,
) -> DiffResult:
    """Compare two traces and find the first place where they part.

    ``a``, ``b``: trace folders, or what ``open_trace`` returned. ``floor_a``, ``floor_b``: further traces of the same side,
    whose differences from it are its noise; ``floor``: the same, for the side with that host, mesh and weights, or ``"self"``
    for each side's own siblings and repeats. ``tolerance``: a stated limit. ``control``: the same pair traced in float32,
    which tells an error from rounding. Dumps of both sides are found by themselves. Nothing on disk is changed.

    Raises ``UsageError`` (not-a-trace, bad-argument) and ``TraceFormatError`` for what cannot be read at all; everything
    else, incomplete sides included, is in the result.
    """
    side_a, side_b = opened(a, "A", progress), opened(b, "B", progress)
    findings = [*sided(side_a, Side.A), *sided(side_b, Side.B)]
    dumps = read_dumps(side_a), read_dumps(side_b)
    for held, side in zip(dumps, (Side.A, Side.B), strict=True):
        findings += check_dumps(held, side)
    if any(finding.kind is Kind.UNREADABLE for finding in findings):
        return _unreadable(side_a, side_b, findings)
    named = _several(floor)
    floors = measure_floors(
        side_a,
        side_b,
        floor_a=[opened(path, "floor", progress) for path in _several(floor_a)],
        floor_b=[opened(path, "floor", progress) for path in _several(floor_b)],
        floor=[opened(path, "floor", progress) for path in named if path != SELF],
        own=SELF in [path for path in named if isinstance(path, str)],
        tolerance=tolerance,
        dumped=all(dumps),
    )
    pair = None
    if control is not None:
        pair = opened(control[0], "A32", progress), opened(control[1], "B32", progress)
        check_control(pair, side_a, side_b)
    return _Comparing(side_a, side_b, floors, dumps, pair, progress).result(findings)


def _several(value: TraceLike | Iterable[TraceLike]) -> list[TraceLike]:
    if isinstance(value, str | os.PathLike | LogicalTrace):
        return [value]
    return list(value)


def _unreadable(a: LogicalTrace, b: LogicalTrace, findings: Sequence[Finding]) -> DiffResult:
    """No value verdict: what is left being equal does not help."""
    torn = [finding for finding in findings if finding.kind is Kind.UNREADABLE]
    sides = sorted({finding.side.value.upper() for finding in torn})
    who = f"side {sides[0]} cannot be read as a whole" if len(sides) == 1 else "both sides cannot be read as a whole"
    where = f"{torn[0].boundary}: " if torn[0].boundary else ""
    remedy = next((finding.remedy for finding in torn if finding.remedy), "")
    step = remedy[0].upper() + remedy[1:] if remedy else f"Record {' and '.join(sides)} again"
    return DiffResult(
        exit=Verdict.COULD_NOT_TELL.exit_code,
        verdict=Verdict.COULD_NOT_TELL,
        headline=f"Could not tell: {who}: {where}{torn[0].text}"
        + (f" (and {count(len(torn) - 1, 'more finding')})" if len(torn) > 1 else ""),
        next_step=step,
        findings=tuple(findings),
        counts=Counts(tokens_a=len(a.tokens), tokens_b=len(b.tokens), skipped=_skipped(a, b)),
        a=summarize(a),
        b=summarize(b),
    )


def _skipped(a: LogicalTrace, b: LogicalTrace) -> dict[str, int]:
    skipped: dict[str, int] = {}
    for side, trace in (("a", a), ("b", b)):
        for manifest in trace.manifests:
            for entry in manifest.counts.skipped:
                skipped[f"{side}: {entry.reason}"] = skipped.get(f"{side}: {entry.reason}", 0) + entry.rows
    return skipped


class _Comparing:
    """One comparison of two readable sides."""

    def __init__(
        self,
        a: LogicalTrace,
        b: LogicalTrace,
        floors: Floors,
        dumps: tuple[Dumps, Dumps],
        control: tuple[LogicalTrace, LogicalTrace] | None,
        progress: Progress | None,
    ) -> None:
        self.a, self.b, self.floors, self.control = a, b, floors, control
        self.catalogue = merge_catalogues(a.catalogue, b.catalogue)
        self.pairing = pair_sides(a, b)
        self.dumps = dumps if all(dumps) else None
        self.floors = replace(floors, row_ulps=self._row_ulps, row_kinds=self._row_kinds)
        self.judged = self._judge_all(progress)
        weights = compare_weights(a, b, self.catalogue)
        differing = [name for name, judged in self.judged.items() if name.startswith("input.") and judged.above_D.any()]
        graph = Graph.of(without_replaced(self.catalogue, a, b), differing)
        causes = Causes()
        if any(judged.above_D.any() for judged in self.judged.values()):
            cells = {name: cell for name, judged in self.judged.items() if (cell := cells_of(judged, len(a.tokens))) is not None}
            causes = find_causes(graph, cells, a.tokens, [weight.name for weight in weights.differing])
        self.conditions = differing_conditions(a, b)
        self.scene = Scene(a, self.pairing, weights, graph, self.judged, causes, leads(self.conditions))
        self.dump_lines = dump_lines(*self.dumps, self.pairing.tokens) if self.dumps is not None else ()
        known = {info.name: info for info in self.catalogue}
        self.material = Material(a, b, self.judged, self.conditions, self.dumps, known)

    def _judge_all(self, progress: Progress | None) -> dict[str, Judged]:
        comparisons = compare_all(self.a, self.b, self.pairing, [boundary.name for boundary in self.catalogue])
        self.unknown_K = unknown_inputs(self.a, self.pairing, comparisons.get(_EMBEDDING))
        judged: dict[str, Judged] = {}
        chosen_K: npt.NDArray[np.bool_] | None = None
        for done, info in enumerate(self.catalogue):
            comparison = comparisons.get(info.name)
            if comparison is None:
                continue
            if progress is not None:
                progress("comparing", done, len(self.catalogue))
            found = judge(comparison, self.floors, comparisons.get(info.scores), self._dumped(info.scores), self.unknown_K)
            found = missing_rows(found, self.a, self.b, self.pairing, chosen_K)
            if info.discrete and found.above_D.any():
                chosen_K = np.zeros(len(self.a.tokens), np.bool_) if chosen_K is None else chosen_K
                chosen_K[comparison.token_R[found.above]] = True
            judged[info.name] = found
        return judged

    def _row_ulps(self, name: str) -> Mapping[tuple[int, int], float]:
        held = self._dumped(name)
        return {} if held is None else dump_ulps(*held, self.pairing.tokens)

    def _row_kinds(self, name: str) -> Mapping[tuple[int, int], bool]:
        held = self._dumped(name)
        return {} if held is None else dump_kinds(*held, self.pairing.tokens)

    def _dumped(self, name: str) -> tuple[DumpedBoundary, DumpedBoundary] | None:
        """Raw values of a boundary on both sides."""
        if self.dumps is None or not all(name in held.boundaries for held in self.dumps):
            return None
        return self.dumps[0].boundaries[name], self.dumps[1].boundaries[name]

    def result(self, findings: Sequence[Finding]) -> DiffResult:
        """Put everything together. ``findings``: of each side by itself."""
        scene = self.scene
        own = [self._covered(finding) for finding in findings]
        noise, noise_at = first_noise(own, NOISE, self.catalogue)
        candidates = find_candidates(scene)
        results, about = self._boundaries(own, candidates, noise_at)
        tokens = [*inputs_unknown(self.a, self.judged, self.unknown_K), *token_findings(self.a, self.b, self.pairing)]
        everything = [*own, *tokens, *weight_findings(scene.weights, self.a, self.b), *about]
        if self.pairing.matched and not any(entry.rows_compared for entry in results if not entry.name.startswith("input.")):
            text = "only inputs were compared: no boundary of the model has rows on both sides"
            remedy = "record the same boundaries on both sides"
            everything.append(Finding(code=FindingCode.NOTHING_COMPARED, kind=Kind.ABSENCE, text=text, remedy=remedy))
        large = large_floors(self.floors, self.catalogue)
        if large:
            names = ", ".join(f"{name} {short(value)}" for name, value in large[:_FLOORS_NAMED])
            more = f" and {len(large) - _FLOORS_NAMED} more" if len(large) > _FLOORS_NAMED else ""
            text = f"the floor is above {LARGE_FLOOR} at {names}{more}: a difference of the order of the values passes there"
            everything.append(Finding(code=FindingCode.FLOOR_LARGE, kind=Kind.INFORMATION, boundary=large[0][0], text=text))
        verdict = self._verdict(everything)
        earliest = candidates[0] if candidates else None
        first = earliest.place if earliest is not None else None
        if noise is not None:
            first = Place(boundary=noise.boundary, request=noise.request, position=noise.position, side=noise.side, ranks=noise.ranks)
        if verdict is not Verdict.DIFFERENT:
            first = None
        accounts = self._accounts([candidate for candidate in candidates if candidate.order < noise_at], results)
        roots = [candidate.root for candidate in candidates if candidate.root is not None and candidate.order < noise_at]
        explained = tuple(found for account in accounts for found in account.explanations)
        earliest_account = accounts[0] if accounts else None
        facts = Facts(
            a=self.a,
            b=self.b,
            verdict=verdict,
            floors=self.floors,
            pairing=self.pairing,
            weights=scene.weights,
            results=results,
            findings=everything,
            roots=[*(account.root for account in accounts), *roots[len(accounts) :]],
            explanations=explained,
            leads=scene.leads,
            first=first,
            first_bitwise=first_bitwise(scene) if self.floors.given else first,
            order=earliest.order if earliest is not None else -1.0,
            weight=earliest is not None and earliest.weight and noise is None,
            noise=noise,
            classified=earliest_account.classification if earliest_account is not None else None,
            dumped=first is not None and any(line.boundary == first.boundary and line.rows for line in self.dump_lines),
            controlled=self.control is not None,
            large_floors=large,
        )
        classified = classification(facts)
        return DiffResult(
            exit=verdict.exit_code,
            verdict=verdict,
            headline=headline(facts),
            first=first,
            first_bitwise=facts.first_bitwise,
            classification=classified,
            next_step=classified.next_step if classified is not None else next_step(facts),
            roots=tuple(facts.roots),
            explanations=explained,
            dumps=self.dump_lines,
            control=earliest_account.control if earliest_account is not None else None,
            findings=tuple(everything),
            boundaries=tuple(results),
            counts=self._counts(results),
            conditions=self.conditions,
            token_map=draw_token_map(self.a, self.judged, scene.causes),
            a=summarize(self.a),
            b=summarize(self.b),
        )

    def _accounts(self, candidates: Sequence[Candidate], results: Sequence[BoundaryResult]) -> list[Account]:
        """The earliest roots, explained and classed."""
        gatherer = EvidenceGatherer(self.scene, self.material, self.dump_lines, self.control)
        accounts: list[Account] = []
        for candidate in candidates:
            if candidate.root is None:
                continue
            outcomes = [result.outcome for result in results[: max(0, int(candidate.order + 0.5))] if not result.name.startswith("input.")]
            account = gatherer.account(candidate, outcomes)
            assert account is not None
            accounts.append(account)
            if len(accounts) == _ROOTS_EXPLAINED:
                break
        return accounts

    def _covered(self, finding: Finding) -> Finding:
        judged = self.judged.get(finding.boundary)
        own = self.a if finding.side is Side.A else self.b
        return covered(finding, own, self.floors, None if judged is None else judged.comparison)

    def _verdict(self, findings: Sequence[Finding]) -> Verdict:
        kinds = {finding.kind for finding in findings}
        if not self.pairing.matched or not any(len(judged.comparison) for judged in self.judged.values()):
            return Verdict.COULD_NOT_TELL
        if Kind.DIFFERENCE in kinds:
            return Verdict.DIFFERENT
        return Verdict.COULD_NOT_TELL if Kind.ABSENCE in kinds else Verdict.SAME

    def _boundaries(
        self, own: Sequence[Finding], candidates: Sequence[Candidate], noise_at: float
    ) -> tuple[list[BoundaryResult], list[Finding]]:
        """Every boundary of the catalogue, and findings about them: dtypes of all first, then in causal order. What a side's
        own findings name already is not said again."""
        said = {(finding.code, finding.boundary) for finding in own if finding.kind is Kind.ABSENCE}
        silent = {side: {finding.boundary for finding in own if finding.side is side and finding.kind is Kind.ABSENCE} for side in Side}
        found = boundary_findings(self.scene, candidates, noise_at)
        causes = self.scene.causes
        results: list[BoundaryResult] = []
        findings: list[Finding] = []
        for info in self.catalogue:
            judged = self.judged.get(info.name)
            if judged is None:
                result, absence = absent_boundary(info, self.a, self.b, silent)
                results.append(result)
                findings += [absence] if absence is not None else []
                continue
            healed_at = causes.healed.get(info.name, "")
            root = info.name in causes.cells and bool(causes.cells[info.name].root_K.any()) and info.name not in causes.harmless
            results.append(result_of(judged, self.a, self.floors, root=root, healed_at=healed_at))
            findings += [finding for finding in found.get(info.name, ()) if (finding.code, info.name) not in said]
        findings.sort(key=lambda finding: finding.code is not FindingCode.DTYPE_DIFFERS)
        return [self._with_partings(result) for result in results], findings

    def _with_partings(self, result: BoundaryResult) -> BoundaryResult:
        """An input at which paired sequences part: one position per pair was held against the other, and differs."""
        partings = [parting for parting in self.pairing.partings if parting.boundary == result.name]
        if not partings:
            return result
        first = partings[0]
        request = sequence_name(self.a, first.sequence_a)
        return msgspec.structs.replace(
            result,
            outcome=BoundaryOutcome.DIFFERS,
            rows_compared=result.rows_compared + len(partings),
            rows_differing=result.rows_differing + len(partings),
            rows_above_floor=result.rows_above_floor + len(partings),
            tokens=result.tokens or f"from {row_text(request, first.position_a)}",
            first_request=result.first_request or request,
            first_position=first.position_a if result.first_position is None else result.first_position,
            root=True,
            text="; ".join(text for text in (result.text, first.text) if text),
        )

    def _counts(self, results: Sequence[BoundaryResult]) -> Counts:
        pairing, judged, weights = self.pairing, self.judged.values(), self.scene.weights
        compared = [result for result in results if result.rows_compared]
        not_computed = {
            f"{side}: {reason}": len(tokens)
            for side, declared in (("b", pairing.declared_a), ("a", pairing.declared_b))
            for reason, tokens in declared.items()
        }
        for found in judged:
            for finding in found.findings:
                if finding.code is FindingCode.ROWS_NOT_COMPUTED:
                    key = f"{finding.side.value}: {finding.text.partition(': ')[2]}"
                    not_computed[key] = max(not_computed.get(key, 0), finding.rows)
        return Counts(
            tokens_a=int(np.count_nonzero(pairing.fed_a)),
            tokens_b=int(np.count_nonzero(pairing.fed_b)),
            tokens_matched=pairing.matched,
            rows_compared=sum(result.rows_compared for result in results),
            rows_differing=sum(result.rows_differing for result in results),
            rows_only_a=sum(len(found.comparison.only_a) for found in judged),
            rows_only_b=sum(len(found.comparison.only_b) for found in judged),
            boundaries_compared=len(compared),
            boundaries_identical=sum(result.outcome is BoundaryOutcome.IDENTICAL for result in compared),
            boundaries_differing=sum(result.rows_above_floor > 0 for result in compared),
            boundaries_missing=sum(result.outcome is BoundaryOutcome.MISSING for result in results),
            weights_compared=weights.compared,
            weights_differing=len(weights.differing),
            weights_unknown=len(weights.unknown),
            not_computed=not_computed,
            skipped=_skipped(self.a, self.b),
        )
