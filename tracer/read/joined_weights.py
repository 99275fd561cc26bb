"""Weight fingerprints joined over processes: shards of one parameter add up, copies must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import Manifest, Weight
from tracer.format.store_read import Shard
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.spans import Box, cover, normal_spans, span_text

__all__ = ["join_weights", "weight_rows_loader"]

_MODULUS = 1 << 64


@dataclass(frozen=True)
class _Piece:
    """One process's part of a parameter."""

    rank: int
    weight: Weight
    box: Box


def _pieces(manifests: Sequence[Manifest]) -> dict[str, list[_Piece]]:
    found: dict[str, list[_Piece]] = {}
    for manifest in manifests:
        for weight in manifest.weights:
            box = (normal_spans(weight.row_spans, weight.rows), normal_spans(weight.column_spans, weight.columns))
            found.setdefault(weight.name, []).append(_Piece(manifest.rank, weight, box))
    return found


def join_weights(manifests: Sequence[Manifest]) -> tuple[dict[str, Weight], list[Finding]]:
    """Every parameter and buffer as a whole, by semantic name, in order of first mention. ``manifests``: by rank.

    A parameter with a part that is missing, unknown, or of another shape or dtype than the rest is ``unknown`` with that reason.
    Findings: copies that disagree, parts that overlap, no weight at all where weights were to be recorded.
    """
    joined: dict[str, Weight] = {}
    findings: list[Finding] = []
    wanted = next((manifest.weights_mode for manifest in manifests if manifest.weights_mode != "none"), "")
    if wanted and not any(manifest.weights for manifest in manifests):
        text = f'no weight was fingerprinted, although weights="{wanted}" was asked for'
        remedy = "find out why the map names no parameter of this model, or record with weights=False"
        findings.append(Finding(code=FindingCode.WEIGHT_MISSING, kind=Kind.ABSENCE, text=text, remedy=remedy))
    for name, pieces in _pieces(manifests).items():
        joined[name], found = _join_one(pieces)
        findings += found
    return joined, findings


def _join_one(pieces: Sequence[_Piece]) -> tuple[Weight, list[Finding]]:
    first = pieces[0].weight
    if len(pieces) == 1 and not first.row_spans and not first.column_spans:
        return first, []
    whole = msgspec.structs.replace(first, row_spans=(), column_spans=(), start=-1)

    def unknown(reason: str) -> Weight:
        return msgspec.structs.replace(whole, digest=("", ""), after=None, unknown=reason)

    for piece in pieces:
        weight = piece.weight
        if weight.unknown:
            return unknown(weight.unknown), []
        if (weight.dtype, weight.rows, weight.columns) != (first.dtype, first.rows, first.columns):
            shapes = [f"{one.rows} x {one.columns} {one.dtype}" for one in (weight, first)]
            return unknown(f"rank {piece.rank} has it as {shapes[0]}, rank {pieces[0].rank} as {shapes[1]}"), []
    kept: dict[Box, _Piece] = {}
    findings: list[Finding] = []
    for piece in pieces:
        copy = kept.setdefault(piece.box, piece)
        if (copy.weight.digest, copy.weight.after) != (piece.weight.digest, piece.weight.after) and not findings:
            text = f"the copies of rank {copy.rank} and rank {piece.rank} differ" + (
                "" if copy.weight.digest != piece.weight.digest else " at the end of the trace"
            )
            findings.append(
                Finding(
                    code=FindingCode.REPLICAS_DISAGREE, kind=Kind.DIFFERENCE, boundary=first.name, ranks=(copy.rank, piece.rank), text=text
                )
            )
    coverage = cover(list(kept), first.rows, first.columns)
    if coverage.twice:
        text = f"parts of several ranks overlap at {_box_text(coverage.twice[0], first)}"
        findings.append(
            Finding(
                code=FindingCode.SLICES_OVERLAP,
                kind=Kind.UNREADABLE,
                boundary=first.name,
                ranks=tuple(piece.rank for piece in kept.values()),
                text=text,
            )
        )
        return unknown(text), findings
    if coverage.missing:
        return unknown(f"no process holds {_box_text(coverage.missing[0], first)}"), findings
    parts = [piece.weight for piece in kept.values()]
    digest = _add(part.digest for part in parts)
    after = _add(part.after or part.digest for part in parts) if any(part.after for part in parts) else None
    return msgspec.structs.replace(whole, digest=digest, after=after), findings


def _add(digests: Iterable[tuple[str, str]]) -> tuple[str, str]:
    lanes = [0, 0]
    for digest in digests:
        for lane in (0, 1):
            lanes[lane] = (lanes[lane] + int(digest[lane], 16)) % _MODULUS
    return f"{lanes[0]:016x}", f"{lanes[1]:016x}"


def _box_text(box: Box, weight: Weight) -> str:
    rows, columns = box
    whole_rows, whole_columns = rows == ((0, weight.rows),), columns == ((0, weight.columns),)
    if whole_rows and not whole_columns:
        return f"cols {span_text(columns)}"
    return f"rows {span_text(rows)}" + ("" if whole_columns else f", cols {span_text(columns)}")


def weight_rows_loader(shards: Sequence[Shard], weights: Mapping[str, Weight]) -> Callable[[str], Fingerprints | None]:
    """A function that loads the fingerprints of every row of a parameter, in order of the global row.

    None where the trace was not recorded with ``weights="rows"``, or the parameter is unknown as a whole.
    """
    shard_of = {shard.rank: shard for shard in shards}
    manifests = [shard.manifest for shard in shards if shard.manifest is not None]
    pieces_of: dict[str, list[_Piece]] = {}

    def load(name: str) -> Fingerprints | None:
        if not pieces_of:
            pieces_of.update(_pieces(manifests))
        whole = weights.get(name)
        if whole is None or whole.unknown:
            return None
        distinct = {piece.box: piece for piece in reversed(pieces_of[name])}
        result = Fingerprints(
            np.zeros((whole.rows, 2), np.uint64),
            np.zeros((whole.rows, 16), np.float32),
            np.zeros(whole.rows, np.float64),
            np.zeros(whole.rows, np.float32),
            np.zeros(whole.rows, np.uint32),
        )
        assert result.sketch_N16 is not None
        assert result.sum_squares_N is not None
        assert result.abs_max_N is not None
        assert result.nonfinite_N is not None
        for box, piece in sorted(distinct.items()):
            stored = shard_of[piece.rank].weight_rows
            if stored is None or piece.weight.start < 0:
                return None
            rows = np.concatenate([np.arange(start, stop) for start, stop in piece.weight.row_spans or box[0]])
            part = stored.fingerprints(piece.weight.start, len(rows))
            assert part.sketch_N16 is not None
            assert part.sum_squares_N is not None
            assert part.abs_max_N is not None
            assert part.nonfinite_N is not None
            result.digest_N2[rows] += part.digest_N2
            result.sketch_N16[rows] += part.sketch_N16
            result.sum_squares_N[rows] += part.sum_squares_N
            result.abs_max_N[rows] = np.maximum(result.abs_max_N[rows], part.abs_max_N)
            result.nonfinite_N[rows] += part.nonfinite_N
        return result

    return load
