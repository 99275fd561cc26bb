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
    """What one run's trace proves. ``weights``: a digest over all weights by name; ``unknown``: names of those whose bytes nobody
    knows, of ``known`` others. ``problem``: why the run cannot be used, empty where it can; ``vacuous``: the problem is something
    that never executed."""

    trace: LogicalTrace | None
    weights: str = ""
    known: int = 0
    unknown: tuple[str, ...] = ()
    policy: str = ""
    image: str = ""
    problem: str = ""
    vacuous: bool = False

    @property
    def proof(self) -> str:
        """What of the weights is not proven, in words; empty where all is."""
        if not self.unknown:
            return ""
        named = ", ".join(self.unknown[:2]) + (", ..." if len(self.unknown) > 2 else "")
        return f"frozen as far as known: {self.known} weights, of {len(self.unknown)} nothing is known ({named})"


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
        weights=_weights(trace),
        known=sum(not weight.unknown for weight in trace.weights.values()),
        unknown=tuple(name for name, weight in trace.weights.items() if weight.unknown),
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
    if not any(len(rows) for name, rows in trace.boundaries.items() if not name.startswith("input.")):
        return replace(seen, problem="nothing was recorded in it: the model did not run inside `with trace(...)`", vacuous=True)
    if all(manifest.weights_mode == "none" for manifest in manifests):
        return replace(seen, problem="it recorded no weights, so that nothing proves they stay the same: leave out weights=False")
    if any(manifest.weights_after == "changed" for manifest in manifests):
        return replace(seen, problem="its weights changed while it was recorded")
    stepped = next((manifest for manifest in manifests if _optimizer_steps(manifest)), None)
    if stepped is not None:
        return replace(seen, problem=f"an optimizer stepped {_optimizer_steps(stepped)} times while it was recorded")
    return seen


def _optimizer_steps(manifest: Manifest) -> int:
    found = manifest.conditions.get("optimizer_steps", 0)
    return found if isinstance(found, int) else 0


def _weights(trace: LogicalTrace) -> str:
    """xxh3_128 over (name, dtype, digest) of every weight of the joined model, 32 hex digits, so that another mesh with the same weights
    has the same; one that is not known goes in by name. Empty where there are none."""
    lines = [f"{name} {weight.dtype} {weight.unknown and 'unknown'} {' '.join(weight.digest)}" for name, weight in trace.weights.items()]
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
