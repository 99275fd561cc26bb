"""Traces as arguments: a folder or an opened trace, and a side in a few words."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

from tracer.read.findings import SideSummary
from tracer.read.load import load_trace
from tracer.read.logical import LogicalTrace
from tracer.read.stitch import stitch

__all__ = ["Progress", "TraceLike", "opened", "summarize"]

TraceLike: TypeAlias = "str | os.PathLike[str] | LogicalTrace"

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``: called now and then during long work."""


def opened(trace: TraceLike, role: str = "trace", progress: Progress | None = None) -> LogicalTrace:
    """The trace itself, or what is in that folder. ``role``: what to call it while it is read. Raises what ``open_trace`` raises."""
    if isinstance(trace, LogicalTrace):
        return trace
    if progress is None:
        return stitch(load_trace(trace))
    reading = f"reading {role}"
    progress(reading, 0, 1)
    files = load_trace(trace, progress=lambda done, total: progress(reading, done, total))
    progress(f"stitching {role}", 0, 1)
    return stitch(files)


def summarize(trace: LogicalTrace) -> SideSummary:
    """A side in a few words."""
    if not trace.manifests:
        return SideSummary(path=trace.path, sequences=len(trace.sequences), tokens=len(trace.tokens))
    manifest = trace.manifest
    sizes = {axis.name: axis.size for shard in trace.manifests for axis in shard.mesh if axis.size > 1}
    return SideSummary(
        path=trace.path,
        run_id=manifest.run_id,
        host=manifest.host,
        root_class=manifest.map.root_class,
        world_size=manifest.world_size,
        mesh=" ".join(f"{name}={size}" for name, size in sizes.items()),
        level=manifest.level,
        sequences=len(trace.sequences),
        tokens=len(trace.tokens),
    )
