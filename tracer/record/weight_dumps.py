"""Rows of weights, saved with their bytes when a trace begins: those that a plan names, or of the first that differs from another trace.

Suffixes: R rows of one weight held here, S those of them that are saved, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tracer.format.dtypes import AnyArray
from tracer.format.dumps import DumpBlock, DumpPlan, DumpWriter
from tracer.format.reference import Reference
from tracer.format.schema import Note, Weight
from tracer.record.boundaries import Plan
from tracer.record.fingerprint_tensors import dense_reals, fingerprint_tensor
from tracer.record.host import Host, IntArray
from tracer.record.weights import Matrix, WeightSnapshot, held_rows, matrices, unreadable

__all__ = ["MOST_ROWS", "WantedRows", "differing_weight", "dump_weights", "planned_weights"]

U64 = npt.NDArray[np.uint64]

MOST_ROWS = 1024
_NEIGHBOURS = 4


@dataclass(frozen=True, eq=False)
class WantedRows:
    """Rows of one weight. ``rows``: their numbers in the whole, None for all, evenly spread where there are more than ``MOST_ROWS``.
    ``theirs_R2``: digests of all rows on the other side, by which those that differ are chosen instead; None where unknown."""

    rows: IntArray | None = None
    theirs_R2: U64 | None = None


def planned_weights(plan: DumpPlan | None) -> dict[str, WantedRows]:
    """What a plan asks for."""
    return {} if plan is None else {weight.name: WantedRows(np.array(weight.rows, np.int64)) for weight in plan.weights}


def differing_weight(reference: Reference, snapshot: WeightSnapshot, plan: Plan) -> tuple[dict[str, WantedRows], list[Note]]:
    """The first weight, in the order in which boundaries are computed with them, that is another on the other side, and notes.

    Weights of which this process holds a part are left to a plan."""
    own = {weight.name: weight for weight in snapshot.weights if not weight.unknown and weight.name in reference.weights}
    ordered = dict.fromkeys(name for boundary in plan.with_weights(snapshot.names) for name in boundary.weights if name in own)
    left = [name for name in (*ordered, *own) if own[name].row_spans or own[name].column_spans]
    notes = []
    if left:
        held = f"{len(set(left))} weights could not be judged while running (this process holds a part of each)"
        text = f"{held}: use tracer diff A B --plan FILE"
        notes.append(Note(code="against-left", text=text))
    for name in dict.fromkeys((*ordered, *own)):
        theirs = reference.weights[name]
        if name in left or (theirs.rows, theirs.columns) != (own[name].rows, own[name].columns) or _same(own[name], reference):
            continue
        notes.insert(0, Note(code="against", text=f"against run {reference.name}: the weight {name} differs, saved"))
        return {name: WantedRows(theirs_R2=theirs.load_rows())}, notes
    return {}, notes


def _same(weight: Weight, reference: Reference) -> bool:
    theirs = reference.weights[weight.name]
    return (weight.dtype, weight.digest) == (theirs.dtype, theirs.digest)


def dump_weights(wanted: Mapping[str, WantedRows], host: Host, plan: Plan, dumps: DumpWriter) -> list[Note]:
    """Save rows of weights, as far as the cap of ``dumps`` allows; what cannot be saved is noted. May raise CaptureError (write-failed)."""
    notes = []
    for parameter in host.parameters() if wanted else ():
        for name, matrix in matrices(parameter, plan.name_weights(parameter.parameter), host):
            if name not in wanted:
                continue
            why = parameter.unknown or unreadable(matrix.tensor)
            why = why or ("only its rows' fingerprints are left" if parameter.rows is not None else "")
            if why:
                notes.append(Note(code="dump-left", text=f"the rows of {name} could not be saved: {why}"))
            else:
                _save(name, matrix, wanted[name], dumps)
    return notes


def _save(name: str, matrix: Matrix, wanted: WantedRows, dumps: DumpWriter) -> None:
    assert matrix.tensor is not None
    rows_R = held_rows(matrix.row_spans, matrix.rows)
    with torch.no_grad():
        chosen = _chosen(matrix, rows_R, wanted)
        taken_SC = matrix.tensor.detach()[torch.from_numpy(chosen).to(matrix.tensor.device)]
        reals = 2 if taken_SC.is_complex() else 1
        spans = tuple((reals * start, reals * stop) for start, stop in matrix.column_spans)
        block = DumpBlock(
            boundary=name, weight=True, dtype=str(taken_SC.dtype).removeprefix("torch."), width=reals * matrix.columns, spans=spans,
            forward=0, rows=len(chosen),
        )  # fmt: skip
        room = max(dumps.max_bytes - dumps.bytes, 0) // max(block.row_bytes, 1)
        if room < len(chosen):
            dumps.left_out[name] = dumps.left_out.get(name, 0) + len(chosen) - room
            chosen, taken_SC = chosen[:room], taken_SC[:room]
            block = DumpBlock(boundary=name, weight=True, dtype=block.dtype, width=block.width, spans=spans, forward=0, rows=room)
        if len(chosen):
            digest_S2 = fingerprint_tensor(taken_SC, width=block.width, spans=spans).resolve().digest_N2
            numbers = rows_R[chosen]
            dumps.add(block, digest_S2, _bytes(taken_SC), np.zeros(len(numbers), np.int64), numbers, None)


def _chosen(matrix: Matrix, rows_R: IntArray, wanted: WantedRows) -> IntArray:
    """Local indices of the rows to save, ascending."""
    if wanted.rows is not None:
        return np.flatnonzero(np.isin(rows_R, wanted.rows))
    if wanted.theirs_R2 is not None and matrix.tensor is not None:
        own_R2 = fingerprint_tensor(matrix.tensor, width=matrix.columns, spans=matrix.column_spans).resolve().digest_N2
        apart_R = (own_R2 != wanted.theirs_R2[rows_R]).any(axis=1)
        differing, equal = np.flatnonzero(apart_R), np.flatnonzero(~apart_R)
        return np.sort(np.concatenate([_spread(differing, MOST_ROWS), _spread(equal, _NEIGHBOURS)]))
    return _spread(np.arange(len(rows_R)), MOST_ROWS)


def _spread(indices: IntArray, most: int) -> IntArray:
    return indices if len(indices) <= most else indices[np.unique(np.linspace(0, len(indices) - 1, most).astype(np.int64))]


def _bytes(rows_SC: torch.Tensor) -> AnyArray:
    """Their bytes, uint8 (S, B)."""
    dense_SC, _ = dense_reals(rows_SC)
    found: AnyArray = dense_SC.contiguous().view(torch.uint8).cpu().numpy()
    return found
