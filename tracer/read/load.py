"""Opening a trace: which shards there are, whether they are whole, and whether they belong together.

What tears a file or makes it foreign raises; what makes a readable trace incomplete is a finding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tracer.errors import Code, TraceFormatError, UsageError
from tracer.format.container import checksum
from tracer.format.dumps import DUMPS_FOLDER, read_dump
from tracer.format.schema import MANIFEST_NAME, Boundary, Manifest, shard_name
from tracer.format.store_read import Shard, inspect_shard, manifest_files, read_manifest, shard_paths
from tracer.read.findings import Finding, FindingCode, Kind

__all__ = ["Problem", "Progress", "TraceFiles", "VerifyReport", "load_trace", "survey_trace", "verify_trace"]

Progress = Callable[[int, int], None]
"""``progress(bytes_done, bytes_total)``, called from the calling thread while files are hashed."""

_NAMED_SINGLY = 64
"""Missing ranks that get a finding each; what is beyond shares one."""


@dataclass(frozen=True, eq=False)
class TraceFiles:
    """An opened trace. ``shards``: committed ones by rank, each rank once. ``uncommitted``: folders without a manifest, with the
    segments that can be read. ``findings``: what keeps the trace from being whole, all of kind unreadable.
    ``world_size`` and ``run_id``: 0 and empty where no shard has committed."""

    path: Path
    shards: tuple[Shard, ...]
    uncommitted: tuple[Shard, ...]
    findings: tuple[Finding, ...]
    world_size: int
    run_id: str


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One file that is torn, altered, foreign or unreadable: a ``TraceFormatError`` as data."""

    code: str
    file: str
    text: str
    expected: str = ""
    found: str = ""
    remedy: str = ""


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``tracer verify`` says of one trace: every file read, every checksum, header, reference and count checked."""

    path: str
    run_id: str
    world_size: int
    shards: int
    """Committed."""
    files: int
    bytes: int
    rows: int
    fingerprints: int
    problems: tuple[Problem, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def good(self) -> bool:
        """Whole and unaltered."""
        return not self.problems and not self.findings


def load_trace(path: str | os.PathLike[str], *, verify: bool = True, progress: Progress | None = None) -> TraceFiles:
    """Open a trace; nothing but headers stays in memory.

    ``verify``: read and hash every file, and check every reference, at about the speed of memory; without it, only
    headers, sizes and counts. Raises ``UsageError`` (not-a-trace) and ``TraceFormatError``: format-unsupported, manifest-invalid,
    segment-invalid, checksum-mismatch, shard-incomplete (a listed file is gone, other counts than the manifest's).
    """
    root = _trace_folder(path)
    shards, _ = _inspect(root, verify, progress)
    for problem in _problems(shards):
        raise problem
    return _assemble(root, shards)


def verify_trace(path: str | os.PathLike[str], *, progress: Progress | None = None) -> VerifyReport:
    """Check everything about a trace and report all that is wrong, not only the first. Raises ``UsageError`` (not-a-trace)."""
    root = _trace_folder(path)
    shards, size = _inspect(root, True, progress)
    trace = _assemble(root, shards)
    segments = [segment for shard in shards for segment in shard.segments]
    return VerifyReport(
        path=str(root),
        run_id=trace.run_id,
        world_size=trace.world_size,
        shards=len(trace.shards),
        files=sum(len(shard.segments) + (shard.weight_rows is not None) for shard in shards)
        + sum(1 + len(shard.manifest.dumps) for shard in shards if shard.manifest is not None),
        bytes=size + sum(info.size_bytes for shard in shards if shard.manifest is not None for info in shard.manifest.dumps),
        rows=sum(segment.file.lines["rows.sequence"] for segment in segments),
        fingerprints=sum(segment.file.lines["digest"] for segment in segments),
        problems=_all_problems(root, shards),
        findings=trace.findings,
    )


def survey_trace(path: str | os.PathLike[str], *, progress: Progress | None = None) -> tuple[TraceFiles, tuple[Problem, ...]]:
    """Open a trace as far as it can be read, and everything that is wrong with its committed files, dumps among them. As
    ``load_trace`` otherwise; raises ``UsageError`` (not-a-trace) only."""
    root = _trace_folder(path)
    shards, _ = _inspect(root, True, progress)
    return _assemble(root, shards), _all_problems(root, shards)


def _all_problems(root: Path, shards: Iterable[Shard]) -> tuple[Problem, ...]:
    """What is wrong with committed shards, then with the dumps of those that are whole."""
    whole = [shard for shard in shards if shard.manifest is not None and not shard.problems]
    dumps = (error for shard in whole for error in _dump_problems(root, shard))
    return tuple(map(_problem, (*_problems(shards), *dumps)))


def _problems(shards: Iterable[Shard]) -> Iterator[TraceFormatError]:
    """What is wrong with committed shards. Of others the findings tell."""
    for shard in shards:
        if (shard.path / MANIFEST_NAME).exists():
            yield from shard.problems


def _trace_folder(path: str | os.PathLike[str]) -> Path:
    root = Path(path)
    found = remedy = ""
    try:
        if shard_paths(root):
            return root
        found = f"no {shard_name(0)}, ..."
        if (root / MANIFEST_NAME).exists() or root.name.startswith("shard-"):
            found, remedy = "one shard", f"pass its parent, {root.parent}"
    except OSError as error:
        found = error.strerror or str(error)
    raise UsageError(
        Code.NOT_A_TRACE, "not a trace", where=str(root), expected="a folder that trace(..., out=) wrote", found=found, remedy=remedy
    )


def _inspect(root: Path, verify: bool, progress: Progress | None) -> tuple[list[Shard], int]:
    """All shards of a trace with their problems, and the bytes of their listed files. Manifests first, then all hashes at once."""
    paths = shard_paths(root)
    manifests: dict[Path, Manifest] = {}
    boundaries: dict[Boundary, Boundary] = {}
    for path in paths:
        try:
            if (path / MANIFEST_NAME).exists():
                manifest = read_manifest(path / MANIFEST_NAME)
                shared = tuple(boundaries.setdefault(boundary, boundary) for boundary in manifest.boundaries)
                manifests[path] = msgspec.structs.replace(manifest, boundaries=shared)
        except TraceFormatError:
            pass  # inspect_shard meets it again and keeps it
    listed = {path / info.file: info.size_bytes for path, manifest in manifests.items() for info in manifest_files(manifest)}
    sizes = {file: size for file in listed if (size := _size(file)) is not None}
    checksums = _hash_files({file: size for file, size in sizes.items() if size == listed[file]}, progress) if verify else None
    shards = [inspect_shard(path, verify=verify, manifest=manifests.get(path), checksums=checksums) for path in paths]
    return shards, sum(sizes.values())


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _hash_files(sizes: dict[Path, int], progress: Progress | None) -> dict[Path, str]:
    """xxh3_128 per file, empty where one cannot be read."""

    def hashed(file: Path) -> tuple[Path, str]:
        try:
            return file, checksum(file)
        except OSError:
            return file, ""

    result: dict[Path, str] = {}
    done, total = 0, sum(sizes.values())
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        for future in as_completed([pool.submit(hashed, file) for file in sizes]):
            file, result[file] = future.result()
            done += sizes[file]
            if progress is not None:
                progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)
    return result


def _problem(error: TraceFormatError) -> Problem:
    return Problem(
        code=error.code.value, file=error.where, text=error.what, expected=error.expected, found=error.found, remedy=error.remedy
    )


def _dump_problems(root: Path, shard: Shard) -> Iterable[TraceFormatError]:
    """Dumps that are not as they were written, or whose rows do not have the digests recorded with them."""
    assert shard.manifest is not None
    for info in shard.manifest.dumps:
        path = root / DUMPS_FOLDER / info.file
        try:
            altered = {rows.block.boundary: int(rows.altered().sum()) for rows in read_dump(path, info)}
        except TraceFormatError as error:
            yield error
            continue
        for name, count in altered.items():
            if count:
                found = f"{count} rows"
                yield TraceFormatError(
                    Code.CHECKSUM_MISMATCH, f"rows of {name} do not have the digest recorded with them", where=str(path), found=found
                )


def _assemble(root: Path, shards: Sequence[Shard]) -> TraceFiles:
    """Shards in one trace, with findings about what is missing, doubled or does not belong."""
    findings: list[Finding] = []
    committed: dict[int, Shard] = {}
    # of two shards with one rank, the one in that rank's folder is kept
    for shard in sorted(shards, key=lambda shard: (shard.rank, shard.path.name != shard_name(shard.rank))):
        if shard.manifest is None:
            continue
        first = committed.setdefault(shard.rank, shard)
        if first is not shard:
            text = f"rank {shard.rank} is there twice: {first.path.name} and {shard.path.name}"
            findings.append(_unreadable(FindingCode.SHARD_TWICE, text, shard.rank, "remove the copy"))
    uncommitted = [shard for shard in shards if shard.manifest is None and not (shard.path / MANIFEST_NAME).exists()]
    present = [shard.manifest for shard in committed.values() if shard.manifest is not None]
    for shard in uncommitted:
        findings.append(
            _unreadable(
                FindingCode.SHARD_UNCOMMITTED,
                f"{shard.path.name} has no manifest: its process ended before the trace did; "
                f"{len(shard.segments)} finished segments can be read",
                shard.rank,
                "let the run end, or record it again",
            )
        )
        for error in shard.problems:
            findings.append(_unreadable(FindingCode.SEGMENT_TORN, f"{error.what}: {error.found}", shard.rank, error.remedy))
    findings += _mixed(present)
    for manifest in present:
        if not manifest.complete:
            text = f"rank {manifest.rank} stopped recording: {manifest.incomplete_reason or 'no reason given'}"
            findings.append(_unreadable(FindingCode.TRACE_INCOMPLETE, text, manifest.rank, "record it again"))
    world_size = max((manifest.world_size for manifest in present), default=0)
    known = committed.keys() | {shard.rank for shard in uncommitted}
    missing = [rank for rank in range(world_size) if rank not in known]
    strides = _axis_strides(present, world_size)
    for rank in missing[:_NAMED_SINGLY]:
        place = _coordinates(rank, strides)
        text = f"the shard of rank {rank}{f' ({place})' if place else ''} is missing: {len(committed)} of {world_size} committed"
        findings.append(_unreadable(FindingCode.SHARD_MISSING, text, rank, f"copy {shard_name(rank)} here, or record the run again"))
    if more := missing[_NAMED_SINGLY:]:
        text = f"the shards of {len(more)} more ranks are missing, from rank {more[0]} to rank {more[-1]}"
        findings.append(_unreadable(FindingCode.SHARD_MISSING, text, more, "copy them here, or record the run again"))
    return TraceFiles(
        path=root,
        shards=tuple(committed.values()),
        uncommitted=tuple(uncommitted),
        findings=tuple(findings),
        world_size=world_size,
        run_id=present[0].run_id if present else "",
    )


def _unreadable(code: FindingCode, text: str, ranks: int | Sequence[int], remedy: str) -> Finding:
    return Finding(code=code, kind=Kind.UNREADABLE, text=text, ranks=(ranks,) if isinstance(ranks, int) else tuple(ranks), remedy=remedy)


def _mixed(manifests: Sequence[Manifest]) -> Iterable[Finding]:
    """Shards that are not of the run, the world or the mesh that the first shard is of, or were not recorded alike: then a name
    may not mean the same on both."""
    sizes: dict[str, tuple[int, int]] = {}
    for manifest in manifests:
        first, text, remedy = manifests[0], "", "keep one run per folder"
        for what, found, wanted in (
            ("run", manifest.run_id, first.run_id),
            ("a world of size", str(manifest.world_size), str(first.world_size)),
        ):
            if found != wanted:
                text = f"rank {manifest.rank} belongs to {what} {found}, rank {first.rank} to {what} {wanted}"
                yield _unreadable(FindingCode.RUN_MIXED, text, manifest.rank, remedy)
        remedy = "let every process run the same code, and record the run again"
        for what, found, wanted in (
            ("the boundary map", f"{manifest.map.family} ({manifest.map.digest})", f"{first.map.family} ({first.map.digest})"),
            ("the host", manifest.host, first.host),
            ("tracer", manifest.tracer, first.tracer),
        ):
            if found != wanted:
                text = f"rank {manifest.rank} recorded with {what} {found}, rank {first.rank} with {wanted}"
                yield _unreadable(FindingCode.RUN_MIXED, text, manifest.rank, remedy)
        for axis in manifest.mesh:
            size, rank = sizes.setdefault(axis.name, (axis.size, manifest.rank))
            if axis.size != size:
                text = f"axis {axis.name} has {axis.size} processes at rank {manifest.rank} and {size} at rank {rank}"
                yield _unreadable(FindingCode.RUN_MIXED, text, manifest.rank, "give every process the same mesh")


def _axis_strides(present: Sequence[Manifest], world_size: int) -> list[tuple[str, int, list[int]]]:
    """Name, size and possible strides of every mesh axis.

    On a regular mesh an axis's index is ``rank // stride % size``, whatever the order of the axes, and axes may
    overlap (ep over dp x tp). Kept are the strides that explain the index of every present rank.
    """
    seen: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for manifest in present:
        for axis in manifest.mesh:
            seen.setdefault((axis.name, axis.size), []).append((manifest.rank, axis.index))
    result = []
    for (name, size), places in seen.items():
        strides = [stride for stride in range(1, world_size // size + 1) if world_size % (stride * size) == 0]
        result.append((name, size, [stride for stride in strides if all(rank // stride % size == index for rank, index in places)]))
    return result


def _coordinates(rank: int, axes: Iterable[tuple[str, int, list[int]]]) -> str:
    """Mesh coordinates of a missing rank: ``tp=1, dp=0 or 1``, axes that fit no regular mesh left out."""
    parts = []
    for name, size, strides in axes:
        indices = sorted({rank // stride % size for stride in strides})
        if indices:
            parts.append(f"{name}={' or '.join(map(str, indices))}")
    return ", ".join(parts)
