"""What a side's dumps say about the side itself: whole, under the cap, and of the run that the plan was made from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tracer.format.dumps import DumpPlan, PlanBoundary, PlanWeight
from tracer.format.fingerprint import digest_of_rows
from tracer.read.dumped import Dumps
from tracer.read.findings import Finding, FindingCode, Kind, Side
from tracer.read.logical import LogicalBoundary, LogicalTrace
from tracer.read.wording import count, token_name

__all__ = ["check_dumps"]


def check_dumps(dumps: Dumps, side: Side) -> list[Finding]:
    """Findings about the dumps of one side. ``side``: which side of its plan it should be; where its rows are clearly those of the other
    one, it is taken for that."""
    findings = [msgspec.structs.replace(finding, side=side) for finding in dumps.findings]
    if dumps.left_out:
        rows = ", ".join(f"{left} rows of {name}" for name, left in list(dumps.left_out.items())[:3])
        more = f" and of {len(dumps.left_out) - 3} more boundaries" if len(dumps.left_out) > 3 else ""
        text = f"the dump of {side.value.upper()} reached its cap of {dumps.max_bytes} bytes: {rows}{more} left out"
        remedy = "raise max_dump_bytes= if they are needed"
        findings.append(Finding(code=FindingCode.DUMP_CAPPED, kind=Kind.INFORMATION, side=side, text=text, remedy=remedy))
    findings += _weights_checked(dumps, side)
    return findings if dumps.plan is None else findings + _reproduced(dumps.trace, dumps.plan, side)


def _weights_checked(dumps: Dumps, side: Side) -> list[Finding]:
    """Dumped rows of weights against the digests that the trace, and the run of its plan, recorded; what they were held against is said."""
    found = []
    plan = {} if dumps.plan is None else {weight.name: weight for weight in dumps.plan.weights}
    for name, held in dumps.weights.items():
        weight, rows = dumps.trace.weights.get(name), dumps.trace.load_weight_rows(name)
        wrong = 0
        if rows is not None:
            wrong = int((rows.digest_N2[held.row_R] != held.digest_R2).any(axis=1).sum())
            how = "each has the digest recorded for its row"
        elif weight is not None and len(held) == weight.rows and not weight.unknown:
            whole = tuple(f"{lane:016x}" for lane in digest_of_rows(held.digest_R2, held.row_R))
            wrong = len(held) if whole != tuple(weight.digest) else 0
            how = "together they have the digest recorded of the whole weight"
        else:
            how = 'they are held against no earlier digest: single rows were recorded only with weights="rows"'
        if wrong:
            text = f"{wrong} of {len(held)} dumped rows of the weight do not have the digest recorded for them"
            found.append(
                Finding(
                    code=FindingCode.DUMP_ALTERED, kind=Kind.UNREADABLE, boundary=name, side=side, rows=wrong, text=text,
                    remedy="record it again; if that does not help, report it",
                )
            )  # fmt: skip
            continue
        entry = plan.get(name)
        if entry is not None and weight is not None:
            then, run = _earlier(dumps, entry, side, "".join(weight.digest))
            if not then:
                found.append(
                    Finding(
                        code=FindingCode.NOT_REPRODUCIBLE, kind=Kind.DIFFERENCE, boundary=name, side=side,
                        text=f"the weight is not what run {run} recorded",
                        remedy=f"load the same weights into side {side.value.upper()} both times",
                    )
                )  # fmt: skip
                continue
            how += f", and the whole weight that of run {run}"
        text = f"{side.value.upper()}: {count(len(held), 'dumped row')} of {name}: {how}"
        found.append(Finding(code=FindingCode.NOTE, kind=Kind.INFORMATION, boundary=name, side=side, text=text))
    return found


def _earlier(dumps: Dumps, entry: PlanWeight, side: Side, digest: str) -> tuple[bool, str]:
    """Whether a weight has the digest that its side's run of the plan recorded, and which run that was. A side may have changed places."""
    assert dumps.plan is not None
    runs = {Side.A: (entry.whole_a, dumps.plan.a.run_id), Side.B: (entry.whole_b, dumps.plan.b.run_id)}
    own, other = runs[side], runs[Side.B if side is Side.A else Side.A]
    taken = other if digest == other[0] and digest != own[0] else own
    return digest == taken[0], taken[1]


def _reproduced(trace: LogicalTrace, plan: DumpPlan, side: Side) -> list[Finding]:
    """Whether this run has the rows that the plan's own run of this side had, boundary by boundary."""
    choices = [[_held_against(trace, rows, which) for rows in plan.boundaries] for which in (Side.A, Side.B)]
    own, other = choices if side is Side.A else choices[::-1]
    taken, run_id = own, (plan.a if side is Side.A else plan.b).run_id
    if sum(len(entry.apart) for entry in other) < sum(len(entry.apart) for entry in own):
        taken, run_id = other, (plan.b if side is Side.A else plan.a).run_id
    found = []
    for rows, entry in zip(plan.boundaries, taken, strict=True):
        if not entry.apart:
            continue
        boundary = trace.boundaries.get(rows.boundary)
        text = f"{len(entry.apart)} of {count(entry.checked, 'row')} are not what run {run_id} recorded"
        request, position = "", None
        if boundary is not None and entry.apart[0] >= 0:
            request, position = token_name(trace, int(boundary.token_R[entry.apart[0]]))
        found.append(
            Finding(
                code=FindingCode.NOT_REPRODUCIBLE, kind=Kind.DIFFERENCE, boundary=rows.boundary, side=side, rows=len(entry.apart),
                text=text, request=request, position=position,
                remedy=f"make side {side.value.upper()} reproducible first: two runs of it differ",
            )
        )  # fmt: skip
    return found


class _Held(msgspec.Struct, frozen=True):
    """``checked`` rows that have a digest on both runs' account; ``apart``: lines of this run that have another, -1 for a row it lacks."""

    checked: int
    apart: Sequence[int]


def _held_against(trace: LogicalTrace, rows: PlanBoundary, which: Side) -> _Held:
    digests = rows.digests_a if which is Side.A else rows.digests_b
    boundary = trace.boundaries.get(rows.boundary)
    if not any(digests) or (boundary is not None and boundary.partial_axis):
        return _Held(0, ())
    lines = {} if boundary is None else _lines(trace, boundary)
    experts = rows.experts or (-1,) * len(rows.keys)
    apart, checked = [], 0
    for key, expert, digest in zip(rows.keys, experts, digests, strict=True):
        if not digest:
            continue
        checked += 1
        line = lines.get((int(key, 16), expert), -1)
        if line < 0 or boundary is None or "".join(f"{lane:016x}" for lane in boundary.digest_R2[line].tolist()) != digest:
            apart.append(line)
    return _Held(checked, apart)


def _lines(trace: LogicalTrace, boundary: LogicalBoundary) -> dict[tuple[int, int], int]:
    expert_R = np.full(len(boundary), -1) if boundary.expert_R is None else boundary.expert_R
    keys = trace.tokens.key_K[boundary.token_R].tolist()
    return {row: line for line, row in enumerate(zip(keys, expert_R.tolist(), strict=True))}
