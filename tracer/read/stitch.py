"""Stitching: the shards of all processes become one logical trace.

1. Sequences are joined by (scope, label), token ids gathered from whoever knew them, tokens keyed (``token_table``).
2. Boundaries are listed in causal order (``catalogue``), and per boundary the blocks of all processes are grouped
   into tracks and joined (``joining``): slices add up, copies are compared, nothing may be missing or doubled.
3. What disagrees within the side is found on the way (``self_checks``). Statistics and raw values stay on disk until asked for.

The result does not depend on the order in which shards are given. Shape suffixes: see ``joining``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.errors import Code, TraceFormatError
from tracer.format.schema import Block, Boundary, Manifest, RowScope
from tracer.format.store_read import Segment, Shard
from tracer.read.catalogue import later_use, merge_catalogue, vacuous_findings, with_later_uses
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.gathering import clashes, gather
from tracer.read.joined_scores import join_scores
from tracer.read.joined_weights import join_weights, weight_rows_loader
from tracer.read.joining import Join, make_join, take
from tracer.read.load import Progress, TraceFiles, load_trace
from tracer.read.logical import LogicalBoundary, LogicalTrace, PartialPart, Statistics
from tracer.read.self_checks import Scene, check_copies, check_faults, check_partial, check_recompute, check_seen_again
from tracer.read.spans import Spans, normal_spans
from tracer.read.token_table import Places, Tokens, build_tokens, declared_keys, gather_ids, lay_out_places
from tracer.read.tracks import Cell, Rows, Track
from tracer.read.wording import count

__all__ = ["open_trace", "stitch"]

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_FORWARD_BITS = 20


def open_trace(path: str | os.PathLike[str], *, progress: Progress | None = None) -> LogicalTrace:
    """Read and stitch a trace directory, every checksum verified. Raises what ``load_trace`` and ``stitch`` raise."""
    return stitch(load_trace(path, progress=progress))


def stitch(files: TraceFiles) -> LogicalTrace:
    """Join the committed shards of a trace. Fingerprint columns are mapped; statistics and values load on demand.

    What is wrong with the side is in ``findings``: those of ``files``, then contradictory ids, then per boundary in causal order,
    then weights. Raises ``TraceFormatError``: segment-invalid, manifest-invalid (a partial sum over an axis the mesh lacks).
    """
    shards = sorted((shard for shard in files.shards if shard.manifest is not None), key=lambda shard: shard.rank)
    manifests = [shard.manifest for shard in shards if shard.manifest is not None]
    places, findings = lay_out_places(shards)
    ids, contradictions = gather_ids(places, shards)
    scopes = [next((sequence.scope for sequence in shard.sequences), "") for shard in shards]
    catalogue = merge_catalogue(manifests, scopes)
    recorded = _group_blocks(shards, manifests)
    known = {boundary.name for boundary in catalogue}
    catalogue += [Boundary(name=name, level=0) for name in sorted(recorded.keys() - known)]
    following = {boundary.name for boundary in catalogue if boundary.rows is RowScope.NEXT}

    rows, seen_P = _code_rows(shards, places, following)
    tokens = build_tokens(places, ids, seen_P)
    uses, catalogue = _tell_uses_apart(recorded, catalogue, rows, following)
    scene = Scene(places, {manifest.rank: manifest for manifest in manifests}, files.world_size)
    joiner = _Joiner(scene, tokens, rows, whole=not any(finding.kind is Kind.UNREADABLE for finding in files.findings))
    silent: dict[str, list[Finding]] = {}
    for finding in vacuous_findings(manifests, catalogue):
        silent.setdefault(finding.boundary, []).append(finding)
    boundaries: dict[str, LogicalBoundary] = {}
    about: list[Finding] = []
    for index, info in enumerate(catalogue):
        about += silent.get(info.name, [])
        if info.name in uses:
            joined = joiner.join(info, uses[info.name], info.name.partition("#")[0] in following)
            if joined is not None:
                joined = join_scores(joined) if info.rows is RowScope.NEXT else joined
                boundaries[info.name] = joined
                catalogue[index] = joined.info
            about += joiner.taken_findings()
    weights, weight_findings = join_weights(manifests)
    declarations = [declared for manifest in manifests for declared in manifest.not_computed]
    return LogicalTrace(
        path=str(files.path),
        manifests=tuple(manifests),
        sequences=tokens.sequences,
        tokens=tokens.table,
        catalogue=tuple(catalogue),
        boundaries=boundaries,
        weights=weights,
        not_computed=declared_keys(places, ids, declarations, following),
        noise=joiner.noise,
        findings=(*files.findings, *findings, *contradictions, *about, *weight_findings),
        load_weight_rows=weight_rows_loader(shards, weights),
        load_forwards=lambda: _first_forwards(shards, places, tokens),
    )


def _first_forwards(shards: Sequence[Shard], places: Places, tokens: Tokens) -> I64:
    """Earliest forward of every token, int64 (K,): of the process that says the lowest."""
    latest = np.iinfo(np.int64).max
    forward_K = np.full(len(tokens.table), latest)
    for number, shard in enumerate(shards):
        for segment in shard.segments:
            if segment.header.blocks:
                token_R = tokens.token_P[places.row_codes(number, segment) >> places.expert_bits]
                known = token_R >= 0
                np.minimum.at(forward_K, token_R[known], segment.rows_forward[known].astype(np.int64))
    forward_K[forward_K == latest] = -1  # only spoken of by the token before it
    return forward_K


@dataclass(frozen=True, eq=False)
class _Recorded:
    """One block, and where it comes from."""

    manifest: Manifest
    segment: Segment
    block: Block


def _group_blocks(shards: Sequence[Shard], manifests: Sequence[Manifest]) -> dict[str, list[_Recorded]]:
    """Blocks by boundary, by rank and then in order of recording."""
    recorded: dict[str, list[_Recorded]] = {}
    for shard, manifest in zip(shards, manifests, strict=True):
        for segment, block in shard.blocks():
            recorded.setdefault(block.boundary, []).append(_Recorded(manifest, segment, block))
    return recorded


def _code_rows(shards: Sequence[Shard], places: Places, following: set[str]) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """The row list of every block, and which places have a row at all."""
    rows, seen_P = Rows(), np.zeros(len(places), np.bool_)
    for number, shard in enumerate(shards):
        for segment in shard.segments:
            code_R = places.row_codes(number, segment) if segment.header.blocks else np.empty(0, np.int64)
            for block in segment.header.blocks:
                step = 1 << places.expert_bits if block.boundary in following else 0
                new = rows.add(segment, block, code_R, step) if block.row_count else None
                if new is not None:
                    seen_P[new.code_N >> places.expert_bits] = True
    return rows, seen_P


def _tell_uses_apart(
    recorded: Mapping[str, Sequence[_Recorded]], catalogue: Sequence[Boundary], rows: Rows, following: set[str]
) -> tuple[dict[str, list[_Recorded]], list[Boundary]]:
    """Blocks by boundary and use, and the catalogue with those uses.

    A module called several times in a forward on different rows (micro-batches) is one boundary; called again on
    the same rows (a shared layer) it has a boundary per use.
    """
    uses: dict[str, list[_Recorded]] = {}
    later: dict[str, set[int]] = {}
    for name, blocks in recorded.items():
        if all(entry.block.occurrence == 0 for entry in blocks):
            uses[name] = list(blocks)
            continue
        taken: dict[tuple[int, Spans, bool], I64] = {}
        for occurrence in sorted({entry.block.occurrence for entry in blocks}):
            chosen = [entry for entry in blocks if entry.block.occurrence == occurrence]
            held: dict[tuple[int, Spans, bool], list[I64]] = {}
            for entry in chosen:
                if entry.block.row_count:
                    code_N = rows.roll([(entry.segment, entry.block)], name in following).code_N
                    forward_N = entry.segment.rows_forward[entry.segment.block_lines(entry.block)].astype(np.int64)
                    key = (entry.manifest.rank, entry.block.spans, entry.block.recompute)
                    held.setdefault(key, []).append(code_N | forward_N % (1 << _FORWARD_BITS) << (63 - _FORWARD_BITS))
            again = any(len(np.intersect1d(np.concatenate(codes), taken[key])) for key, codes in held.items() if key in taken)
            if again and occurrence:
                later.setdefault(name, set()).add(occurrence + 1)
            else:
                for key, codes in held.items():
                    taken[key] = np.concatenate([*codes, taken[key]] if key in taken else codes)
            uses.setdefault(later_use(name, occurrence + 1 if again else 1), []).extend(chosen)
    return uses, with_later_uses(catalogue, later)


class _Joiner:
    """Joins one boundary after the other; joins are kept for boundaries of the same layout."""

    def __init__(self, scene: Scene, tokens: Tokens, rows: Rows, *, whole: bool) -> None:
        """``whole``: every shard is there, so that a hole is worth a finding of its own."""
        self.noise: dict[str, float] = {}
        self._scene = scene
        self._tokens = tokens
        self._rows = rows
        self._whole = whole
        self._joins: dict[tuple[object, ...], Join] = {}
        self._findings: list[Finding] = []

    def taken_findings(self) -> list[Finding]:
        """Findings of the boundaries joined since the last call."""
        findings, self._findings = self._findings, []
        return findings

    def join(self, info: Boundary, recorded: Sequence[_Recorded], following: bool) -> LogicalBoundary | None:
        """Join one boundary; None where its processes declare it in ways that exclude each other."""
        executions = info.executions or _executions(recorded, recompute=False)
        recomputed = info.recomputed or _executions(recorded, recompute=True)
        filled = self._of_one_width(info, [entry for entry in recorded if entry.block.row_count])
        width = filled[0].block.width if filled else max((entry.block.width for entry in recorded), default=0)
        dtype = _joined_dtype([entry.block for entry in filled or recorded])
        info = msgspec.structs.replace(info, executions=executions, recomputed=recomputed, dtype=dtype, width=width)
        sizes = {_axis(entry)[1:] for entry in filled}
        if len(sizes) > 1:
            self._findings.append(_mixed_declarations(info, filled))
            return None
        axis, coordinates = next(iter(sizes), ("", 1))
        tracks, again = (
            self._tracks([entry for entry in filled if entry.block.recompute == recompute], width, following) for recompute in (False, True)
        )
        if not tracks:
            return _empty(info)
        join = self._join(tracks, coordinates, width)
        if self._whole:
            self._findings += check_faults(self._scene, info, join, tracks, width, axis)
        clashing = clashes(join, tracks)
        self._found(check_copies(self._scene, info, join, clashing, width))
        digests: list[U64] = [gather(join, tracks, lambda track: track.digest_N2, coordinate=index) for index in range(coordinates)]
        if axis:
            self._found(check_partial(info, digests, axis))
        if again:
            self._found(check_recompute(self._scene, info, tracks, again))
        has_statistics = all(track.has_statistics for track in tracks)
        has_values = all(track.has_values for track in tracks)

        def sightings(*, summed: bool, every_copy: bool = False) -> Statistics | None:
            return _statistics(join, tracks, summed=summed, every_copy=every_copy) if has_statistics else None

        found, noise = check_seen_again(self._scene, info, join, digests, lambda: sightings(summed=bool(axis)))
        self._findings += found
        if noise is not None:
            self.noise[info.name] = noise

        def load_values() -> I64 | None:
            return take(gather(join, tracks, lambda track: track.values(width)), join.kept_R) if has_values else None

        def load_nonfinite() -> npt.NDArray[np.uint32] | None:
            return take(gather(join, tracks, lambda track: track.statistic("nonfinite")), join.kept_R) if has_statistics else None

        kept = [take(digest, join.kept_R) for digest in digests]
        return LogicalBoundary(
            info=msgspec.structs.replace(info, row_count=int(join.seen_R.sum())),
            dtype=dtype,
            width=width,
            token_R=join.token_R,
            expert_R=join.expert_R,
            seen_R=join.seen_R,
            digest_R2=kept[0] if not axis else np.add.reduce(kept),
            load_statistics=lambda: _kept(sightings(summed=bool(axis)), join),
            load_values=load_values,
            load_nonfinite=load_nonfinite,
            copies=join.copies,
            executions=executions,
            recomputed=recomputed,
            partial_axis=axis,
            parts=tuple(PartialPart(index, coordinates, digest) for index, digest in enumerate(kept)) if axis else (),
            load_sum_of_copies=(lambda: _kept(sightings(summed=True, every_copy=True), join)) if clashing else None,
        )

    def _found(self, finding: Finding | None) -> None:
        if finding is not None:
            self._findings.append(finding)

    def _of_one_width(self, info: Boundary, recorded: Sequence[_Recorded]) -> list[_Recorded]:
        """Blocks of the width that most rows have; a finding tells of the others."""
        rows = Counter[int]()
        for entry in recorded:
            rows[entry.block.width] += entry.block.row_count
        if len(rows) < 2:
            return list(recorded)
        width = min(rows, key=lambda width: (-rows[width], width))
        others = [entry for entry in recorded if entry.block.width != width]
        self._findings.append(
            Finding(
                code=FindingCode.WIDTH_DIFFERS,
                kind=Kind.ABSENCE,
                boundary=info.name,
                rows=sum(entry.block.row_count for entry in others),
                ranks=tuple(sorted({entry.manifest.rank for entry in others})),
                text=f"rows of width {', '.join(str(other) for other in sorted(rows) if other != width)} "
                f"beside {count(rows[width], 'row')} of width {width}: left out",
                remedy="padding columns need the logical width from the map or the model's config",
            )
        )
        return [entry for entry in recorded if entry.block.width == width]

    def _tracks(self, recorded: Iterable[_Recorded], width: int, following: bool) -> list[Track]:
        """Tracks by cell, then rank."""
        pieces: dict[tuple[Cell, int], list[tuple[Segment, Block]]] = {}
        for entry in recorded:
            cell = Cell(_axis(entry)[0], normal_spans(entry.block.spans, width))
            pieces.setdefault((cell, entry.manifest.rank), []).append((entry.segment, entry.block))
        return [
            Track(rank, cell, tuple(parts), self._rows.roll(parts, following))
            for (cell, rank), parts in sorted(pieces.items(), key=lambda item: item[0])
        ]

    def _join(self, tracks: Sequence[Track], coordinates: int, width: int) -> Join:
        key = (coordinates, width, tuple((track.cell, id(track.roll)) for track in tracks))
        if key not in self._joins:
            self._joins[key] = make_join(tracks, self._tokens.token_P, self._scene.places.expert_bits, coordinates, width)
        return self._joins[key]


def _axis(entry: _Recorded) -> tuple[int, str, int]:
    """This process's coordinate on the axis its partial sums go over, the axis and its size; 0, "", 1 for whole values."""
    if not entry.block.partial:
        return 0, "", 1
    for axis in entry.manifest.mesh:
        if axis.name == entry.block.partial:
            return (axis.index, axis.name, axis.size) if axis.size > 1 else (0, "", 1)
    raise TraceFormatError(
        Code.MANIFEST_INVALID,
        f"{entry.block.boundary} holds partial sums over an axis that the mesh lacks",
        where=str(entry.segment.path.parent),
        expected=", ".join(axis.name for axis in entry.manifest.mesh) or "no axis",
        found=entry.block.partial,
        remedy="record the trace again; the host must list the axis in its mesh",
    )


def _mixed_declarations(info: Boundary, recorded: Sequence[_Recorded]) -> Finding:
    said = {entry.block.partial: entry.manifest.rank for entry in reversed(recorded)}
    parts = [f"rank {rank} holds {f'partial sums over {axis}' if axis else 'whole values'}" for axis, rank in sorted(said.items())]
    return Finding(
        code=FindingCode.SLICES_OVERLAP,
        kind=Kind.UNREADABLE,
        boundary=info.name,
        ranks=tuple(sorted(said.values())),
        text=f"cannot be joined: {', '.join(parts)}",
        remedy="every process must declare this boundary alike",
    )


def _executions(recorded: Iterable[_Recorded], *, recompute: bool) -> int:
    """Executions of the busiest process and slice."""
    counts = Counter[tuple[int, Spans]]()
    for entry in recorded:
        if entry.block.recompute == recompute:
            counts[entry.manifest.rank, entry.block.spans] += entry.block.executions
    return max(counts.values(), default=0)


def _joined_dtype(blocks: Sequence[Block]) -> str:
    dtypes = {block.dtype for block in blocks}
    if len(dtypes) == 1:
        return dtypes.pop()
    return "int64" if all(block.values_start >= 0 for block in blocks) else "mixed"


def _statistics(join: Join, tracks: Sequence[Track], *, summed: bool, every_copy: bool) -> Statistics:
    """Statistics of every sighting. ``summed``: the tracks hold addends of the values, not slices."""
    with np.errstate(over="ignore", invalid="ignore"):
        sketch: npt.NDArray[np.float32] = gather(join, tracks, lambda track: track.statistic("sketch"), every_copy=every_copy)
        nonfinite = gather(join, tracks, lambda track: track.statistic("nonfinite"), every_copy=every_copy)
        if summed:
            squares = np.square(sketch.astype(np.float64)).sum(axis=1)
            return Statistics(sketch, squares, np.full(len(join), np.nan, np.float32), nonfinite)
        squares = gather(join, tracks, lambda track: track.statistic("sum_squares"))
        return Statistics(sketch, squares, gather(join, tracks, lambda track: track.statistic("abs_max"), np.maximum), nonfinite)


def _kept(statistics: Statistics | None, join: Join) -> Statistics | None:
    if statistics is None or join.kept_R is None:
        return statistics
    return Statistics(
        take(statistics.sketch_R16, join.kept_R),
        take(statistics.sum_squares_R, join.kept_R),
        take(statistics.abs_max_R, join.kept_R),
        take(statistics.nonfinite_R, join.kept_R),
    )


def _empty(info: Boundary) -> LogicalBoundary:
    """A boundary that executed without any row."""
    none = np.empty(0, np.int64)
    return LogicalBoundary(
        info=info,
        dtype=info.dtype,
        width=info.width,
        token_R=none,
        expert_R=None,
        seen_R=none,
        digest_R2=np.empty((0, 2), np.uint64),
        load_statistics=lambda: None,
        load_values=lambda: None,
        executions=info.executions,
        recomputed=info.recomputed,
    )
