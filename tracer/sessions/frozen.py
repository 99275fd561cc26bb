"""Frozen means proven: what a trace says about the weights, the policy and the image it ran with, and what it may not say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from tracer.errors import TracerError
from tracer.format.schema import Manifest
from tracer.read.findings import FindingCode, Kind
from tracer.read.load import load_trace
from tracer.read.logical import LogicalTrace
from tracer.read.stitch import stitch

__all__ = ["Evidence", "look_at", "moved_boundaries"]


@dataclass(frozen=True)
class Evidence:
    """What one run's trace proves. ``weights``: a digest over all weights by name, empty where none is known. ``problem``: why the
    run cannot be used, empty where it can; ``vacuous``: the problem is something that never executed."""

    trace: LogicalTrace | None
    weights: str = ""
    policy: str = ""
    image: str = ""
    problem: str = ""
    vacuous: bool = False


def look_at(path: Path) -> Evidence:
    """Read a run's trace and hold it to what a session needs: complete, executed, weights known and untouched."""
    if not path.exists():
        return Evidence(None, problem="it wrote no trace: the command must run `with trace(...)`, which takes its folder from TRACER_OUT")
    try:
        trace = stitch(load_trace(path))
    except TracerError as error:
        return Evidence(None, problem=error.what)
    manifests = trace.manifests
    seen = Evidence(
        trace,
        weights=_weights(manifests),
        policy=", ".join(dict.fromkeys(mark.version for manifest in manifests for mark in manifest.policies)),
        image=str(manifests[0].conditions.get("image", "")) if manifests else "",
    )
    torn = next((finding for finding in trace.findings if finding.kind is Kind.UNREADABLE), None)
    if torn is not None:
        return replace(seen, problem=torn.text)
    empty = next((finding for finding in trace.findings if finding.code is FindingCode.VACUOUS), None)
    if empty is not None:
        where = f"{empty.boundary}: " if empty.boundary else ""
        return replace(seen, problem=f"{where}{empty.text}" + (f" ({empty.remedy})" if empty.remedy else ""), vacuous=True)
    if any(manifest.weights_after == "changed" for manifest in manifests):
        return replace(seen, problem="its weights changed while it was recorded")
    stepped = next((manifest for manifest in manifests if _optimizer_steps(manifest)), None)
    if stepped is not None:
        return replace(seen, problem=f"an optimizer stepped {_optimizer_steps(stepped)} times while it was recorded")
    return seen


def _optimizer_steps(manifest: Manifest) -> int:
    found = manifest.conditions.get("optimizer_steps", 0)
    return found if isinstance(found, int) else 0


def _weights(manifests: tuple[Manifest, ...]) -> str:
    """xxh3_128 over (rank, name, digest) of every weight, 32 hex digits; empty where a weight is unknown or none was recorded."""
    lines = []
    for manifest in manifests:
        for weight in manifest.weights:
            if weight.unknown:
                return ""
            lines.append(f"{manifest.rank} {weight.name} {weight.row_spans} {weight.column_spans} {' '.join(weight.digest)}")
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(lines)).encode()) if lines else ""


def moved_boundaries(before: LogicalTrace, now: LogicalTrace) -> list[str]:
    """Boundaries that two traces of one side both recorded and that are not bitwise equal: the side does not repeat itself."""
    moved = []
    order_before, order_now = (np.argsort(trace.tokens.key_K, kind="stable") for trace in (before, now))
    if not np.array_equal(before.tokens.key_K[order_before], now.tokens.key_K[order_now]):
        return ["input.ids"]
    rank_before, rank_now = np.argsort(order_before), np.argsort(order_now)
    for name, old in before.boundaries.items():
        new = now.boundaries.get(name)
        if new is None:
            continue
        ranked = [
            (np.lexsort((np.zeros(len(one)) if one.expert_R is None else one.expert_R, rank[one.token_R])), one)
            for one, rank in ((old, rank_before), (new, rank_now))
        ]
        (at_old, _), (at_new, _) = ranked
        if len(old) != len(new) or not np.array_equal(old.digest_R2[at_old], new.digest_R2[at_new]):
            moved.append(name)
    return moved
