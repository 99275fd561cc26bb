"""A trace as recording may use it while it runs (``against=``, ``feed=``, ``pin=``): the facade's only way from reading to recording."""

from __future__ import annotations

import numpy as np

from tracer.errors import Code, UsageError
from tracer.format.reference import Reference, ReferenceRows
from tracer.read.dumped import Dumps, read_dumps
from tracer.read.findings import Kind
from tracer.read.logical import LogicalTrace
from tracer.read.opening import TraceLike, opened

__all__ = ["make_reference"]


def make_reference(trace: TraceLike, *, values: bool = False) -> Reference:
    """Digests of every boundary, raw ids of choices, and with ``values`` the bytes of rows that were dumped (only those rows then).

    Raises what ``open_trace`` and ``read_dumps`` raise, and ``UsageError`` (bad-argument) for a trace that is not whole."""
    logical = opened(trace)
    torn = [finding for finding in logical.findings if finding.kind is Kind.UNREADABLE]
    if torn:
        raise UsageError(
            Code.BAD_ARGUMENT, "a trace that is not whole cannot be held against", where=logical.path, found=torn[0].text,
            remedy=torn[0].remedy,
        )  # fmt: skip
    dumps = read_dumps(logical) if values else None
    order = {info.name: at for at, info in enumerate(logical.catalogue)}
    return Reference(logical.manifest.run_id, order, lambda name: _rows(logical, dumps, name))


def _rows(trace: LogicalTrace, dumps: Dumps | None, name: str) -> ReferenceRows | None:
    if dumps is not None and name in dumps.boundaries:
        dumped = dumps.boundaries[name]
        return ReferenceRows(dumped.dtype, dumped.width, dumped.key_R, dumped.expert_R, dumped.digest_R2, dumped.raw_RB)
    boundary = trace.boundaries.get(name)
    if boundary is None:
        return None
    values_RC = boundary.load_values()
    return ReferenceRows(
        "int64" if values_RC is not None else boundary.dtype,
        boundary.width,
        trace.tokens.key_K[boundary.token_R],
        boundary.expert_R,
        None if boundary.partial_axis else boundary.digest_R2,
        None if values_RC is None else np.ascontiguousarray(values_RC, "<i8").view(np.uint8).reshape(len(boundary), -1),
    )
