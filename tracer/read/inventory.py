"""``tracer show``: what a trace holds, from headers and manifests, whether it was finished, or is whole, or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tracer.format.schema import BoundaryStatus, Manifest, Note
from tracer.format.store_read import Shard
from tracer.read.catalogue import merge_catalogue
from tracer.read.findings import Finding
from tracer.read.load import Problem, Progress, TraceFiles, survey_trace

__all__ = ["BoundaryLine", "Inventory", "ShardLine", "take_inventory"]


class ShardLine(msgspec.Struct, frozen=True, kw_only=True):
    """One process."""

    rank: int
    committed: bool
    mesh: str = ""
    segments: int = 0
    rows: int = 0
    """Fingerprints, over all boundaries."""


class BoundaryLine(msgspec.Struct, frozen=True, kw_only=True):
    """One boundary, over all processes. ``rows``: recorded by all of them together, replicas included."""

    name: str
    level: int | None = None
    """None where only unfinished shards hold it."""
    status: str
    dtype: str = ""
    width: int = 0
    executions: int = 0
    recomputed: int = 0
    rows: int = 0
    reason: str = ""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """What ``tracer show`` found."""

    version: int = 1
    path: str
    complete: bool
    """All there, and unaltered."""
    run_id: str
    world_size: int
    host: str = ""
    root_class: str = ""
    family: str = ""
    level: int | None = None
    tracer: str = ""
    sequences: int = 0
    forwards: int = 0
    bytes: int = 0
    weights: str = ""
    weights_after: str = ""
    shards: tuple[ShardLine, ...] = ()
    boundaries: tuple[BoundaryLine, ...] = ()
    skipped: dict[str, int] = {}
    not_computed: dict[str, int] = {}
    policies: tuple[str, ...] = ()
    interventions: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    conditions: dict[str, Any] = {}
    findings: tuple[Finding, ...] = ()
    problems: tuple[Problem, ...] = ()
    """Committed files that are torn, altered, foreign or unreadable. What they hold is not listed."""


def take_inventory(path: str, *, progress: Progress | None = None) -> Inventory:
    """List what a trace holds, every checksum verified. Raises ``UsageError`` (not-a-trace)."""
    files, problems = survey_trace(path, progress=progress)
    manifests = [shard.manifest for shard in files.shards if shard.manifest is not None]
    shards = sorted((*files.shards, *files.uncommitted), key=lambda shard: shard.rank)
    inventory = Inventory(
        path=str(files.path),
        complete=not files.findings and not problems,
        run_id=files.run_id,
        world_size=files.world_size,
        sequences=len({(sequence.scope, sequence.label) for shard in shards for sequence in shard.sequences}),
        bytes=sum(segment.file.size_bytes for shard in shards for segment in shard.segments),
        shards=tuple(_shard_line(shard) for shard in shards),
        boundaries=tuple(_boundary_lines(files, manifests)),
        findings=files.findings,
        problems=problems,
    )
    if not manifests:
        return inventory
    first = manifests[0]
    skipped: dict[str, int] = {}
    not_computed: dict[str, int] = {}
    for manifest in manifests:
        for entry in manifest.counts.skipped:
            skipped[entry.reason] = skipped.get(entry.reason, 0) + (entry.rows or entry.forwards)
        for declared in manifest.not_computed:
            rows = sum(stop - start for start, stop in declared.positions)
            not_computed[declared.reason] = not_computed.get(declared.reason, 0) + rows
    return msgspec.structs.replace(
        inventory,
        host=first.host,
        root_class=first.map.root_class,
        family=first.map.family,
        level=first.level,
        tracer=first.tracer,
        forwards=sum(manifest.counts.forwards for manifest in manifests),
        weights=f"{len({weight.name for manifest in manifests for weight in manifest.weights})} ({first.weights_mode})",
        weights_after=first.weights_after,
        skipped=skipped,
        not_computed=not_computed,
        policies=tuple(dict.fromkeys(mark.version for manifest in manifests for mark in manifest.policies)),
        interventions=tuple(dict.fromkeys(name for manifest in manifests for name in manifest.interventions)),
        notes=tuple(dict.fromkeys(note for manifest in manifests for note in manifest.notes)),
        conditions=first.conditions,
    )


def _shard_line(shard: Shard) -> ShardLine:
    axes = shard.manifest.mesh if shard.manifest is not None else ()
    return ShardLine(
        rank=shard.rank,
        committed=shard.manifest is not None,
        mesh=", ".join(f"{axis.name}={axis.index}/{axis.size}" for axis in axes if axis.size > 1),
        segments=len(shard.segments),
        rows=sum(segment.file.lines["digest"] for segment in shard.segments),
    )


def _boundary_lines(files: TraceFiles, manifests: list[Manifest]) -> Iterable[BoundaryLine]:
    """From the manifests, with the rows of the segments; boundaries of unfinished shards as their segments name them."""
    rows: dict[str, int] = {}
    loose: dict[str, BoundaryLine] = {}
    for shard in (*files.shards, *files.uncommitted):
        for _, block in shard.blocks():
            rows[block.boundary] = rows.get(block.boundary, 0) + block.row_count
            loose.setdefault(block.boundary, BoundaryLine(name=block.boundary, status="recorded", dtype=block.dtype, width=block.width))
    scopes = [next((sequence.scope for sequence in shard.sequences), "") for shard in files.shards if shard.manifest is not None]
    for boundary in merge_catalogue(manifests, scopes):
        loose.pop(boundary.name, None)
        recorded = boundary.status is BoundaryStatus.RECORDED
        yield BoundaryLine(
            name=boundary.name,
            level=boundary.level,
            status=boundary.status.value,
            dtype=boundary.dtype if recorded else "",
            width=boundary.width if recorded else 0,
            executions=boundary.executions,
            recomputed=boundary.recomputed,
            rows=rows.get(boundary.name, 0),
            reason=boundary.reason,
        )
    for name, line in loose.items():
        yield msgspec.structs.replace(line, rows=rows[name])
