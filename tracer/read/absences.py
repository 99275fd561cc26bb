"""Nothing passes by absence: inputs that part, rows and boundaries that only one side has, each with a reason or a finding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tracer.format.schema import OUTSIDE_TOKENS, Boundary, BoundaryStatus, RowScope
from tracer.read.compare import Comparison, Method
from tracer.read.findings import BoundaryOutcome, BoundaryResult, Finding, FindingCode, Kind, Side
from tracer.read.logical import LogicalTrace
from tracer.read.outcomes import Judged
from tracer.read.pairing import Pairing
from tracer.read.wording import by_sequence, count, row_text, sequence_name, token_name

__all__ = ["absent_boundary", "inputs_unknown", "missing_rows", "token_findings", "unknown_inputs"]

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def token_findings(a: LogicalTrace, b: LogicalTrace, pairing: Pairing) -> list[Finding]:
    """Inputs that part, tokens without a partner, tokens declared never computed."""
    findings = []
    for parting in pairing.partings:
        request = sequence_name(a, parting.sequence_a)
        behind = f"; {count(len(parting.behind_a), 'row')} of A and {len(parting.behind_b)} of B from there on are not compared"
        findings.append(
            Finding(
                code=FindingCode.INPUT_DIFFERS,
                kind=Kind.DIFFERENCE,
                boundary=parting.boundary,
                rows=len(parting.behind_a),
                request=request,
                position=parting.position_a,
                text=f"{row_text(request, parting.position_a)}: {parting.text}{behind}",
            )
        )
    if not pairing.matched:
        fed_a, fed_b = (int(np.count_nonzero(fed)) for fed in (pairing.fed_a, pairing.fed_b))
        total = count(fed_a, "row") if fed_a == fed_b else f"{fed_a} (A) and {fed_b} (B) rows"
        parted = f"; {findings[0].text}" if findings else ""
        findings.insert(0, Finding(code=FindingCode.NOTHING_COMPARED, kind=Kind.ABSENCE, text=f"0 of {total} matched{parted}"))
    for trace, tokens, lacking in ((a, pairing.only_a, Side.B), (b, pairing.only_b, Side.A)):
        if len(tokens):
            request, position = token_name(trace, int(tokens[0]))
            present = "A" if lacking is Side.B else "B"
            findings.append(
                Finding(
                    code=FindingCode.ROWS_UNMATCHED,
                    kind=Kind.ABSENCE,
                    side=lacking,
                    rows=len(tokens),
                    request=request,
                    position=position,
                    text=f"{count(len(tokens), 'row')} only in {present}: {by_sequence(trace, tokens)}",
                )
            )
    for lacking, declared in ((Side.B, pairing.declared_a), (Side.A, pairing.declared_b)):
        for reason, tokens in declared.items():
            findings.append(_declared("", lacking, reason, len(tokens)))
    if pairing.by_label:
        text = f"{count(pairing.by_label, 'token')} matched by request and position: one side does not know the ids"
        findings.append(Finding(code=FindingCode.NOTE, kind=Kind.INFORMATION, rows=pairing.by_label, text=text))
    return findings


def unknown_inputs(a: LogicalTrace, pairing: Pairing, embedding: Comparison | None) -> Bools | None:
    """Tokens of A whose inputs are not known to be those of their partners, bool (K,); None where there are none.

    Automatic labels pair tokens by where their row stood. That proves nothing about what was fed, unless the embeddings of the
    token and of everything before it were recorded and are equal bit for bit."""
    if pairing.assumed_K is None or embedding is None or embedding.method is not Method.DIGEST:
        return pairing.assumed_K
    unknown_K, equal_K = pairing.assumed_K.copy(), np.zeros(len(a.tokens), np.bool_)
    equal_K[embedding.token_R] = True
    equal_K[embedding.token_R[embedding.differing]] = False
    for sequence in a.sequences:
        told_T = (sequence.token >= 0) & equal_K[sequence.token]
        unknown_K[sequence.token[: len(told_T) if told_T.all() else int(told_T.argmin())]] = False
    return unknown_K if unknown_K.any() else None


def inputs_unknown(a: LogicalTrace, judged: Mapping[str, Judged], unknown_K: Bools | None) -> list[Finding]:
    """That differences were found where nobody knows whether the sides were fed the same: one finding."""
    apart = [found for found in judged.values() if found.unknown]
    if unknown_K is None or not apart:
        return []
    tokens = np.unique(np.concatenate([found.comparison.token_R[found.comparison.differing] for found in apart]))
    tokens = tokens[unknown_K[tokens]]
    request, position = token_name(a, int(tokens[0]))
    more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
    text = (
        f"inputs not known: {count(len(tokens), 'token')} that differ are paired by automatic labels alone, first "
        f"{row_text(request, position)} (their ids, or what came before them, were not seen); they differ at {apart[0].name}{more}"
    )
    return [
        Finding(
            code=FindingCode.INPUTS_UNKNOWN, kind=Kind.ABSENCE, rows=len(tokens), request=request, position=position, text=text,
            remedy="name the sequences on both sides (t.requests([...]) before the forward), or trace from the first token on, with ids",
        )
    ]  # fmt: skip


# ---------------------------------------------------------------- rows of one boundary


def missing_rows(judged: Judged, a: LogicalTrace, b: LogicalTrace, pairing: Pairing, chosen_K: Bools | None) -> Judged:
    """Account for rows of one boundary that only one side has, of tokens that both sides were fed.

    ``chosen_K``: tokens of A whose choice of experts differs, so that their expert rows have no partner.
    """
    comparison = judged.comparison
    if comparison.method is Method.NONE or not (len(comparison.only_a) or len(comparison.only_b)):
        return judged
    findings: list[Finding] = []
    for lacking, rows, own, other in ((Side.B, comparison.only_a, a, b), (Side.A, comparison.only_b, b, a)):
        boundary = comparison.a if lacking is Side.B else comparison.b
        info = comparison.b.info if lacking is Side.B else comparison.a.info
        partner, fed = (pairing.tokens.b_of_a, pairing.fed_b) if lacking is Side.B else (pairing.tokens.a_of_b, pairing.fed_a)
        token = boundary.token_R[rows]
        here = (partner[token] >= 0) & fed[partner[token]] if len(fed) else np.zeros(len(rows), np.bool_)
        rows, token = rows[here], token[here]
        left = np.ones(len(rows), np.bool_)
        if chosen_K is not None and info.rows is RowScope.EXPERTS:
            left &= ~chosen_K[token if lacking is Side.B else partner[token]]
        for reason, keys in sorted(other.declared(judged.name).items()):
            hit = left & np.isin(own.tokens.key_K[token], keys)
            if hit.any():
                findings.append(_declared(judged.name, lacking, reason, int(hit.sum())))
            left &= ~hit
        if left.any():
            findings.append(_unmatched(judged, own, lacking, boundary.expert_R, rows[left], token[left]))
    return replace(judged, findings=(*judged.findings, *findings))


def _declared(boundary: str, lacking: Side, reason: str, rows: int) -> Finding:
    """Rows that a side says it does not have. What it never computed is no absence; what it left out of the recording is."""
    who = lacking.value.upper()
    if reason == OUTSIDE_TOKENS:
        text = f"{count(rows, 'row')} computed but not recorded by {who}: {reason}"
        return Finding(
            code=FindingCode.ROWS_UNMATCHED, kind=Kind.ABSENCE, boundary=boundary, side=lacking, rows=rows, text=text,
            remedy="give both sides the same tokens=",
        )  # fmt: skip
    never = "not told" if boundary.startswith("input.") else "never computed"
    text = f"{count(rows, 'row')} {never} by {who}: {reason}"
    return Finding(code=FindingCode.ROWS_NOT_COMPUTED, kind=Kind.INFORMATION, boundary=boundary, side=lacking, rows=rows, text=text)


def _unmatched(judged: Judged, own: LogicalTrace, lacking: Side, expert_R: I64 | None, rows: I64, token: I64) -> Finding:
    request, position = token_name(own, int(token[0]), judged.shift)
    present = "A" if lacking is Side.B else "B"
    if len(rows) == 1 or expert_R is not None:
        names = [
            row_text(*token_name(own, int(at), judged.shift), None if expert_R is None else int(expert_R[row]))
            for row, at in zip(rows[:8], token[:8], strict=True)
        ]
        shown = ", ".join(names) + (", ..." if len(rows) > len(names) else "")
    else:
        shown = by_sequence(own, token, judged.shift)
    return Finding(
        code=FindingCode.ROWS_UNMATCHED, kind=Kind.ABSENCE, boundary=judged.name, side=lacking, rows=len(rows), request=request,
        position=position, text=f"{count(len(rows), 'row')} only in {present}: {shown}",
    )  # fmt: skip


# ---------------------------------------------------------------- boundaries without a comparison


def absent_boundary(
    info: Boundary, a: LogicalTrace, b: LogicalTrace, said: Mapping[Side, set[str]]
) -> tuple[BoundaryResult, Finding | None]:
    """A boundary that at least one side did not record, and whether that is an absence.

    ``said``: boundaries that a side's own findings name already.
    """
    result = BoundaryResult(name=info.name, outcome=BoundaryOutcome.NOT_RECORDED, level=info.level)
    status_a, status_b = _status(info.name, a), _status(info.name, b)
    for side, status in ((Side.A, status_a), (Side.B, status_b)):
        if status is not None and status.status is BoundaryStatus.NOT_OBSERVABLE and info.name not in (a, b)[side is Side.B].boundaries:
            text = f"not observable on {side.value.upper()}: {status.reason or 'no reason given'}"
            return _with(result, BoundaryOutcome.NOT_OBSERVABLE, text), None
    recorded_a, recorded_b = info.name in a.boundaries, info.name in b.boundaries
    lacking, status = (Side.A, status_a) if recorded_b else (Side.B, status_b)
    if not recorded_a and not recorded_b:
        never = (BoundaryStatus.VACUOUS, BoundaryStatus.RECORDED)  # to be recorded, and without a single execution
        vacuous = [side for side, known in ((Side.A, status_a), (Side.B, status_b)) if known and known.status in never]
        if not vacuous:
            reason = next((known.reason for known in (status_a, status_b) if known and known.reason), "")
            return _with(result, BoundaryOutcome.NOT_RECORDED, reason), None
        lacking, status = (Side.BOTH if len(vacuous) == 2 else vacuous[0]), status_a if vacuous[0] is Side.A else status_b
    executions = status.executions if status is not None else 0
    if status is None:
        why = "its map has no such boundary"
    elif status.status is BoundaryStatus.NOT_SELECTED:
        why = status.reason or "not selected there (level, or boundaries=)"
    else:
        reason = "" if "execution" in status.reason else status.reason
        why = count(executions, "execution") + (f", {reason}" if reason else "")
    sides = "both sides" if lacking is Side.BOTH else lacking.value.upper()
    text = f"missing on {sides}: {why}"
    finding = None
    if not any(info.name in said[side] for side in (Side.A, Side.B) if lacking in (side, Side.BOTH)):
        selected = status is not None and status.status is BoundaryStatus.NOT_SELECTED
        finding = Finding(
            code=FindingCode.BOUNDARY_MISSING, kind=Kind.ABSENCE, boundary=info.name, side=lacking, text=text,
            remedy="record both sides at the same level and with the same boundaries=" if selected else "",
        )  # fmt: skip
    return _with(result, BoundaryOutcome.MISSING, text), finding


def _with(result: BoundaryResult, outcome: BoundaryOutcome, text: str) -> BoundaryResult:
    return BoundaryResult(name=result.name, outcome=outcome, level=result.level, text=text)


def _status(name: str, trace: LogicalTrace) -> Boundary | None:
    return next((boundary for boundary in trace.catalogue if boundary.name == name), None)
