"""What is wrong with one boundary of one side by itself: holes, overlaps, copies, recompute, repeats, siblings.

Shape suffixes: M sightings of a join, A sightings of rows seen before, D differing ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.format.fingerprint import row_distance
from tracer.format.schema import Boundary, BoundaryStatus, Manifest, Sequence
from tracer.read.catalogue import ranks_text
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.gathering import Clash
from tracer.read.joining import Fault, Join, take
from tracer.read.logical import Statistics
from tracer.read.spans import Spans, span_text
from tracer.read.token_table import Places
from tracer.read.tracks import Track
from tracer.read.wording import count

__all__ = ["Scene", "check_copies", "check_faults", "check_partial", "check_recompute", "check_seen_again"]

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Scene:
    """Who is there: what it takes to name rows and ranks. ``manifests``: by rank, in the order of ``places.of_shard``."""

    places: Places
    manifests: Mapping[int, Manifest]
    world_size: int

    def row(self, code: int, info: Boundary) -> tuple[str, str, int]:
        """``s0:5`` or ``s0:5/e3``, then its request and position."""
        name, position, expert = self.places.describe(code, info.rows)
        return f"{name}:{position}" + ("" if expert is None else f"/e{expert}"), name, position

    def sequence(self, code: int) -> Sequence:
        """The sequence of a row."""
        return self.places.sequences[int(self.places.sequence_of(np.array([code >> self.places.expert_bits]))[0])]

    def rank(self, rank: int) -> str:
        """``rank 1 (tp=1)``."""
        manifest = self.manifests.get(rank)
        mesh = ", ".join(f"{axis.name}={axis.index}" for axis in manifest.mesh if axis.size > 1) if manifest is not None else ""
        return f"rank {rank}" + (f" ({mesh})" if mesh else "")


def check_faults(scene: Scene, info: Boundary, join: Join, tracks: Listed[Track], width: int, axis: str) -> list[Finding]:
    """Rows that are not whole, once: one finding per pattern. ``axis``: of partial sums."""
    return [_fault(scene, info, fault, tracks, width, axis) for fault in join.faults]


def _fault(scene: Scene, info: Boundary, fault: Fault, tracks: Listed[Track], width: int, axis: str) -> Finding:
    overlap = bool(fault.coverage.twice)
    boxes = fault.coverage.twice or fault.coverage.missing
    coordinates, columns = boxes[0]
    row, request, position = scene.row(int(fault.code_F[0]), info)
    rows = len(np.unique(fault.code_F))
    where = f"cols {span_text(columns)}"
    if axis:
        where = f"the partial sums of {axis}={span_text(coordinates)}" + ("" if columns == ((0, width),) else f", {where}")
    if overlap:
        ranks = sorted({track.rank for track in tracks if track.cell in fault.cells and _touch(track.cell.spans, columns)})
        text = f"slices of {ranks_text(ranks)} overlap at {where} without being equal slices, in {count(rows, 'row')}, first {row}"
        remedy = "slices of one row must be equal (copies) or disjoint: correct what the map or host says about this boundary's columns"
    else:
        ranks, why = _missing_ranks(scene, info, fault, tracks, axis)
        who = " or ".join(scene.rank(rank) for rank in ranks[:8]) + (f" or {len(ranks) - 8} more" if len(ranks) > 8 else "")
        text = f"hole: {where} of {count(rows, 'row')}, first {row}, recorded by nobody" + (f"; missing is {who}, {why}" if ranks else "")
        remedy = "record the trace again with every process taking part"
    return Finding(
        code=FindingCode.SLICES_OVERLAP if overlap else FindingCode.HOLE,
        kind=Kind.UNREADABLE,
        boundary=info.name,
        rows=rows,
        text=text,
        request=request,
        position=position,
        ranks=tuple(ranks),
        remedy=remedy,
    )


def _touch(x: Spans, y: Spans) -> bool:
    return any(a < d and c < b for a, b in x for c, d in y)


def _missing_ranks(scene: Scene, info: Boundary, fault: Fault, tracks: Listed[Track], axis: str) -> tuple[list[int], str]:
    """Whose slice is most likely missing: an absent shard, else a process with that sequence and no row here, else
    whoever holds these columns of other rows."""
    absent = [rank for rank in range(scene.world_size) if rank not in scene.manifests]
    if absent:
        return absent, "whose shard is not there"
    sequence = int(scene.places.sequence_of(fault.code_F[:1] >> scene.places.expert_bits)[0])
    coordinates = {index for rows, _ in fault.coverage.missing for start, stop in rows for index in range(start, stop)}
    holders = {track.rank for track in tracks}
    silent, unselected = [], []
    for (rank, manifest), own in zip(scene.manifests.items(), scene.places.of_shard, strict=True):
        if rank in holders or sequence not in own or not _fits(manifest, axis, coordinates):
            continue
        status = next((known.status for known in manifest.boundaries if known.name == info.name), BoundaryStatus.RECORDED)
        if status is BoundaryStatus.NOT_SELECTED:
            unselected.append(rank)
        elif status is not BoundaryStatus.ELSEWHERE:
            silent.append(rank)
    if silent or unselected:
        return (silent, "with no row of this boundary") if silent else (unselected, "which did not select this boundary")
    partly = set()
    for rows, columns in fault.coverage.missing:
        for track in tracks:
            if _touch(((track.cell.coordinate, track.cell.coordinate + 1),), rows) and _touch(track.cell.spans, columns):
                partly.add(track.rank)
    return sorted(partly), "which holds these columns of other rows"


def _fits(manifest: Manifest, axis: str, coordinates: set[int]) -> bool:
    return not axis or any(known.name == axis and known.index in coordinates for known in manifest.mesh)


def check_copies(scene: Scene, info: Boundary, join: Join, found: Listed[Clash], width: int) -> Finding | None:
    """Copies of one slice that are not bitwise equal."""
    if not found:
        return None
    differing = np.unique(np.concatenate([clash.into_D for clash in found]))
    first = int(differing[0])
    here = [clash for clash in found if first in clash.into_D]
    row, request, position = scene.row(int(join.code_M[first]), info)
    spans = here[0].other.cell.spans
    others = list(dict.fromkeys(clash.other.rank for clash in here))
    distance = np.concatenate([_track_distance(clash.first, clash.first_line_D, clash.other, clash.other_line_D) for clash in found])
    text = (
        f"copies disagree at {row}: {' and '.join(scene.rank(rank) for rank in others)} against {scene.rank(here[0].first.rank)}"
        + ("" if spans == ((0, width),) else f", cols {span_text(spans)}")
        + f"; {len(differing)} of {count(len(join), 'row')}{size_text(distance)}"
    )
    return Finding(
        code=FindingCode.REPLICAS_DISAGREE,
        kind=Kind.DIFFERENCE,
        boundary=info.name,
        rows=len(differing),
        text=text,
        request=request,
        position=position,
        ranks=(here[0].first.rank, *others),
    )


def _track_distance(x: Track, x_lines: I64, y: Track, y_lines: I64) -> F64:
    """Distances of chosen recorded lines of two tracks, NaN where no statistics are kept."""
    if not (x.has_statistics and y.has_statistics):
        return np.full(len(x_lines), np.nan)
    return row_distance(_lines(x, x_lines), _lines(y, y_lines))


def _lines(track: Track, lines: I64) -> Statistics:
    names = ("sketch", "sum_squares", "abs_max", "nonfinite")
    return Statistics(*(track.statistic(name)[lines] for name in names))


def size_text(distance: F64) -> str:
    """How large differences are, as the end of a sentence; nothing where no distance is defined."""
    known = distance[np.isfinite(distance)]
    if not len(known):
        return ""
    if not known.any():
        return ", below the sketch's resolution"
    return f", distance up to {known.max():.2g}"


def check_partial(info: Boundary, parts: Listed[U64], axis: str) -> Finding | None:
    """Partial sums that are bitwise identical on every coordinate are no partial sums."""
    if len(parts) < 2 or not parts[0].any() or any(not np.array_equal(parts[0], part) for part in parts[1:]):
        return None
    return Finding(
        code=FindingCode.PARTIAL_COPIES_IDENTICAL,
        kind=Kind.ABSENCE,
        boundary=info.name,
        rows=len(parts[0]),
        text=f"declared partial over {axis}, but all {len(parts)} copies are identical",
        remedy=f"declare it replicated over {axis} in the map: it was reduced already where it is taken",
    )


def check_recompute(scene: Scene, info: Boundary, tracks: Listed[Track], again: Listed[Track]) -> Finding | None:
    """Rows computed again for the backward pass, against the first pass of the same process, slice and forward."""
    first_pass = {(track.rank, track.cell): track for track in tracks}
    found: list[tuple[int, int, F64]] = []
    differing = compared = 0
    for track in again:
        first = first_pass.get((track.rank, track.cell))
        if first is None:
            continue
        lines, first_lines = _matched_lines(track, first)
        wrong = (track.digest_N2[lines] != first.digest_N2[first_lines]).any(axis=1)
        compared += len(lines)
        if wrong.any():
            differing += int(wrong.sum())
            distance = _track_distance(first, first_lines[wrong], track, lines[wrong])
            found.append((int(track.roll.code_N[lines[wrong]].min()), track.rank, distance))
    if not found:
        return None
    code, rank, _ = min(found, key=lambda entry: entry[:2])
    row, request, position = scene.row(code, info)
    size = size_text(np.concatenate([distance for _, _, distance in found]))
    return Finding(
        code=FindingCode.RECOMPUTE_DISAGREES,
        kind=Kind.DIFFERENCE,
        boundary=info.name,
        rows=differing,
        text=f"recompute differs from the first pass at {row} on {scene.rank(rank)}; "
        f"{differing} of {count(compared, 'recomputed row')}{size}",
        request=request,
        position=position,
        ranks=(rank,),
    )


def _matched_lines(again: Track, first: Track) -> tuple[I64, I64]:
    """Recorded lines of both that are one row: of the first pass the last one up to the recompute's forward."""
    if again.roll is first.roll and again.forward_N.shape == first.forward_N.shape and np.array_equal(again.forward_N, first.forward_N):
        every = np.arange(len(again.roll))
        return every, every
    _, row = np.unique(np.concatenate([again.roll.code_N, first.roll.code_N]), return_inverse=True)
    again_row, first_row = row[: len(again.roll)], row[len(again.roll) :]
    forwards = max(int(again.forward_N.max(initial=0)), int(first.forward_N.max(initial=0))) + 1
    first_key = first_row * forwards + first.forward_N
    order = np.argsort(first_key, kind="stable")
    at = np.searchsorted(first_key[order], again_row * forwards + again.forward_N, side="right") - 1
    found = (at >= 0) & (first_row[order[at]] == again_row)
    return np.flatnonzero(found), order[at[found]]


def check_seen_again(
    scene: Scene, info: Boundary, join: Join, digests: Iterable[U64], load: Callable[[], Statistics | None]
) -> tuple[list[Finding], float | None]:
    """Repeats and siblings that are not bitwise equal, and the largest distance: NaN if undefined, None if all agree, infinite
    where they hold non-finite values, of which no distance speaks.

    ``digests``: of every sighting, one array or one per coordinate of partial sums. ``load``: statistics of every sighting.
    """
    if not len(join.again_A):
        return [], None
    wrong_A = np.zeros(len(join.again_A), np.bool_)
    for digest_M2 in digests:
        wrong_A |= (take(digest_M2, join.again_A) != take(digest_M2, join.first_A)).any(axis=1)
    if not wrong_A.any():
        return [], None
    wrong = np.flatnonzero(wrong_A)
    statistics = load()
    if statistics is None:
        distance_D, unlike = np.full(len(wrong), np.nan), False
    else:
        x, y = (
            Statistics(statistics.sketch_R16[at], statistics.sum_squares_R[at], statistics.abs_max_R[at], statistics.nonfinite_R[at])
            for at in (join.first_A[wrong], join.again_A[wrong])
        )
        distance_D = row_distance(x, y)
        unlike = bool(((x.nonfinite_R > 0) | (y.nonfinite_R > 0)).any())
    findings = []
    for code, same_place in ((FindingCode.REPEATS_DISAGREE, True), (FindingCode.SIBLINGS_DISAGREE, False)):
        kind = join.same_place_A[wrong] == same_place
        if kind.any():
            findings.append(_seen_again(scene, info, join, code, wrong[kind], distance_D[kind]))
    known = distance_D[np.isfinite(distance_D)]
    return findings, math.inf if unlike else float(known.max()) if len(known) else math.nan


def _seen_again(scene: Scene, info: Boundary, join: Join, code: FindingCode, wrong: I64, distance_D: F64) -> Finding:
    again, first = int(join.again_A[wrong[0]]), int(join.first_A[wrong[0]])
    row, request, position = scene.row(int(join.code_M[again]), info)
    if code is FindingCode.REPEATS_DISAGREE:
        text = f"executions {int(join.nth_M[first]) + 1} and {int(join.nth_M[again]) + 1} of {row} differ"
    else:
        siblings = join.again_A[(join.first_A == first) & ~join.same_place_A]
        ordinal = 2 + int(np.searchsorted(join.code_M[siblings], join.code_M[again]))
        x, y = (scene.sequence(int(join.code_M[at])) for at in (first, again))
        names = [sequence.request or sequence.label for sequence in (x, y)]
        if names[0] == names[1]:
            names = [f"{sequence.scope} {sequence.label}".strip() for sequence in (x, y)]
        text = f"siblings 1 and {ordinal} of one prefix, {names[0]} and {names[1]}, differ at {row}"
    return Finding(
        code=code,
        kind=Kind.DIFFERENCE,
        boundary=info.name,
        rows=len(wrong),
        text=f"{text}; {count(len(wrong), 'row')}{size_text(distance_D)}",
        request=request,
        position=position,
    )
