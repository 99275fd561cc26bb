"""A trace as recording may use it while it runs (``against=``, ``feed=``, ``pin=``): the facade's only way from reading to recording."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tracer.errors import Code, UsageError
from tracer.format.reference import Reference, ReferenceRows, ReferenceWeight
from tracer.format.schema import RowScope
from tracer.read.dumped import Dumps, read_dumps
from tracer.read.findings import Kind
from tracer.read.logical import LogicalTrace
from tracer.read.opening import TraceLike, opened

__all__ = ["make_reference", "operator_rows"]

U64 = npt.NDArray[np.uint64]


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
    return Reference(
        logical.manifest.run_id, order, lambda name: _rows(logical, dumps, name), os.path.abspath(logical.path), dict(_weights(logical))
    )


def _weights(trace: LogicalTrace) -> Iterator[tuple[str, ReferenceWeight]]:
    """Every weight with a digest of the whole."""

    def rows_of(name: str) -> Callable[[], U64 | None]:
        def load() -> U64 | None:
            rows = trace.load_weight_rows(name)
            return None if rows is None else rows.digest_N2

        return load

    for name, weight in trace.weights.items():
        if not weight.unknown:
            yield name, ReferenceWeight(weight.dtype, weight.rows, weight.columns, weight.digest, rows_of(name))


def operator_rows(
    trace: TraceLike, boundary: str, inputs: Sequence[str] | None = None
) -> tuple[str, ReferenceRows, dict[str, ReferenceRows]]:
    """Run id, dumped output and dumped inputs of one boundary. ``inputs``: by default those of ``from:`` that were dumped.

    Raises ``UsageError`` (intervention-refused) where either is not in the dump, or the boundary mixes tokens or has expert rows, which
    no single module call on rows computes; and what ``read_dumps`` raises."""
    dumps = read_dumps(trace)
    info = next((entry for entry in dumps.trace.catalogue if entry.name == boundary), None)
    if info is None or boundary not in dumps.boundaries:
        raise _refused(f"{boundary} was not dumped", dumps)
    if info.mixes_tokens or info.rows is not RowScope.ALL:
        raise _refused(f"{boundary} is not computed row by row, so one module on dumped rows does not give it", dumps)
    names = [name for name in info.inputs if name in dumps.boundaries] if inputs is None else list(inputs)
    missing = [name for name in names if name not in dumps.boundaries]
    if missing or not names:
        raise _refused(f"the inputs of {boundary} were not dumped: {', '.join(missing or info.inputs)}", dumps)
    found = {name: _rows(dumps.trace, dumps, name) for name in (boundary, *names)}
    rows = {name: entry for name, entry in found.items() if entry is not None}
    return dumps.trace.manifest.run_id, rows[boundary], {name: rows[name] for name in names}


def _refused(what: str, dumps: Dumps) -> UsageError:
    return UsageError(
        Code.INTERVENTION_REFUSED, what, where=dumps.trace.path, expected="dump= or plan= with this boundary and what it is computed from",
        found=f"dumps of {', '.join(dumps.boundaries) or 'nothing'}",
    )  # fmt: skip


def _rows(trace: LogicalTrace, dumps: Dumps | None, name: str) -> ReferenceRows | None:
    declared = trace.declared(name)
    never_K = np.unique(np.concatenate(list(declared.values()))) if declared else None
    if dumps is not None and name in dumps.boundaries:
        dumped = dumps.boundaries[name]
        return ReferenceRows(dumped.dtype, dumped.width, dumped.key_R, dumped.expert_R, dumped.digest_R2, dumped.raw_RB, never_K)
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
        never_K,
    )
