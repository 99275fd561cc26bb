"""Dumps of a trace, joined into whole rows and keyed like everything else of it.

Suffixes: N rows of one block, R rows of one boundary, B bytes and C columns of a whole row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tracer.format.dtypes import decode_to_float32, dtype_info
from tracer.format.dumps import DUMPS_FOLDER, DumpFile, DumpPlan, DumpRows, read_dump
from tracer.format.schema import RowScope, Span
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.logical import LogicalTrace
from tracer.read.opening import TraceLike, opened
from tracer.read.spans import normal_spans
from tracer.read.wording import token_name

__all__ = ["DumpedBoundary", "DumpedWeight", "Dumps", "read_dumps"]

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

_EXPERTS = 1 << 20


@dataclass(frozen=True, eq=False)
class DumpedBoundary:
    """The dumped rows of one boundary: whole rows, each (token, expert) once, sorted by it.

    ``token_R``: index into the trace's token table. ``raw_RB``: bytes in ``dtype``. ``digest_R2``: as recorded with them, summed
    over slices. ``altered_R``: the bytes do not have that digest. Of a row seen several times the first sighting is kept."""

    trace: LogicalTrace
    name: str
    dtype: str
    width: int
    token_R: I64
    expert_R: I64 | None
    digest_R2: U64
    raw_RB: U8
    altered_R: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.token_R)

    @property
    def key_R(self) -> U64:
        """Token keys, uint64 (R,)."""
        return self.trace.tokens.key_K[self.token_R]

    @cached_property
    def float32_RC(self) -> F32:
        """The values; float64 and wide integers are rounded. Raises ``ValueError`` for packed dtypes."""
        return decode_to_float32(self.raw_RB, self.dtype).reshape(len(self), self.width)

    @cached_property
    def exact_RC(self) -> npt.NDArray[np.generic]:
        """The values without rounding where numpy has the dtype (integers, float64 ...), else ``float32_RC``, which is exact too."""
        native = dtype_info(self.dtype).native
        return self.float32_RC if native is None else self.raw_RB.view(native).reshape(len(self), self.width)

    def label(self, row: int) -> tuple[str, int]:
        """Request and position of a row, as people read them."""
        info = self.trace.boundaries.get(self.name)
        return token_name(self.trace, int(self.token_R[row]), int(info is not None and info.info.rows is RowScope.NEXT))


@dataclass(frozen=True, eq=False)
class DumpedWeight:
    """The dumped rows of one weight: whole rows, each once, sorted by ``row_R``, their number in it. The rest as of a boundary."""

    name: str
    dtype: str
    width: int
    row_R: I64
    digest_R2: U64
    raw_RB: U8
    altered_R: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.row_R)


@dataclass(frozen=True, eq=False)
class Dumps:
    """Everything a trace has dumped. ``plan``: the one that was followed, where one was. ``why``: what asked for them.
    ``left_out``: boundary -> rows that the cap left out, over all processes. ``findings``: what is wrong with them."""

    trace: LogicalTrace
    boundaries: Mapping[str, DumpedBoundary]
    why: str = ""
    plan: DumpPlan | None = None
    max_bytes: int = 0
    left_out: Mapping[str, int] | None = None
    findings: tuple[Finding, ...] = ()
    weights: Mapping[str, DumpedWeight] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.boundaries) or bool(self.weights)


def read_dumps(trace: TraceLike) -> Dumps:
    """The dumps of a trace; without any it is empty. Every file is hashed, every row's bytes are held against its digest.

    Raises ``TraceFormatError`` (shard-incomplete, checksum-mismatch, segment-invalid, format-unsupported), and what
    ``open_trace`` raises."""
    logical = opened(trace)
    folder = Path(logical.path) / DUMPS_FOLDER
    files = [read_dump(folder / info.file, info) for manifest in logical.manifests for info in manifest.dumps]
    index = {(sequence.scope, sequence.label): sequence.token for sequence in logical.sequences}
    pieces: dict[str, list[_Piece]] = {}
    of_weights: dict[str, list[_Piece]] = {}
    for file in files:
        for rows in file:
            if rows.block.weight:
                of_weights.setdefault(rows.block.boundary, []).append(_Piece(rows, rows.position_N.astype(np.int64)))
            else:
                pieces.setdefault(rows.block.boundary, []).append(_Piece(rows, _tokens(file, rows, logical, index)))
    findings: list[Finding] = []
    boundaries = {}
    order = {info.name: at for at, info in enumerate(logical.catalogue)}
    for name in sorted(pieces, key=lambda name: (order.get(name, len(order)), name)):
        joined = _join(logical, name, pieces[name], findings)
        if joined is not None:
            boundaries[name] = joined
    weights = {}
    for name, held in of_weights.items():
        joined = _join(logical, name, held, findings)
        if joined is not None:
            weights[name] = DumpedWeight(
                name, joined.dtype, joined.width, joined.token_R, joined.digest_R2, joined.raw_RB, joined.altered_R
            )
    last = [manifest.dumps[-1].file for manifest in logical.manifests if manifest.dumps]
    headers = [file.header for file in files if file.path.name in last]
    left_out: dict[str, int] = {}
    for header in headers:
        for name, count in header.left_out.items():
            left_out[name] = left_out.get(name, 0) + count
    return Dumps(
        logical,
        boundaries,
        why=headers[0].why if headers else "",
        plan=next((header.plan for header in headers if header.plan is not None), None),
        max_bytes=headers[0].max_bytes if headers else 0,
        left_out=left_out,
        findings=tuple(findings),
        weights=weights,
    )


@dataclass(frozen=True, eq=False)
class _Piece:
    """One block with the token of every row, -1 where the trace has no such token."""

    rows: DumpRows
    token_N: I64


def _tokens(file: DumpFile, rows: DumpRows, trace: LogicalTrace, index: Mapping[tuple[str, str], I64]) -> I64:
    """Tokens of the rows of a block."""
    boundary = trace.boundaries.get(rows.block.boundary)
    step = int(boundary is not None and boundary.info.rows is RowScope.NEXT)
    token_N = np.full(rows.block.rows, -1, np.int64)
    for number, sequence in enumerate(file.header.sequences):
        here = np.flatnonzero(rows.sequence_N == number)
        token_P = index.get((sequence.scope, sequence.label))
        if token_P is None or not len(here):
            continue
        place = rows.position_N[here].astype(np.int64) + step
        inside = (place >= 0) & (place < len(token_P))
        token_N[here[inside]] = token_P[place[inside]]
    return token_N


def _join(trace: LogicalTrace, name: str, pieces: Sequence[_Piece], findings: list[Finding]) -> DumpedBoundary | None:
    """Whole rows out of slices: per slice the first sighting of every row, then the rows that all slices have."""
    blocks = [piece.rows.block for piece in pieces]
    dtype, width = blocks[0].dtype, blocks[0].width
    if any((block.dtype, block.width) != (dtype, width) for block in blocks):
        found = ", ".join(sorted({f"{block.dtype} x {block.width}" for block in blocks}))
        findings.append(_left_out(name, f"its dumped rows are of several kinds: {found}"))
        return None
    if any(block.partial for block in blocks):
        findings.append(_left_out(name, f"its dumped rows are partial sums over {blocks[0].partial}: no bytes exist of their sum"))
        return None
    cells: dict[tuple[Span, ...], list[_Piece]] = {}
    for piece in pieces:
        cells.setdefault(normal_spans(piece.rows.block.spans, width), []).append(piece)
    covered = sorted(span for spans in cells for span in spans)
    if [start for start, _ in covered] != [0, *(stop for _, stop in covered)][: len(covered)] or covered[-1][1] != width:
        findings.append(_left_out(name, f"columns are missing of its dumped rows: {len(cells)} slices do not make {width} columns"))
        return None
    sheets = [_first_sightings(cell) for cell in cells.values()]
    code_R = sheets[0][0]
    for code, *_ in sheets[1:]:
        code_R = np.intersect1d(code_R, code)
    itemsize = dtype_info(dtype).itemsize
    raw_RB = np.empty((len(code_R), width * itemsize), np.uint8)
    digest_R2 = np.zeros((len(code_R), 2), np.uint64)
    altered_R = np.zeros(len(code_R), np.bool_)
    for spans, (code, raw, digest, altered) in zip(cells, sheets, strict=True):
        taken = np.searchsorted(code, code_R)
        at = 0
        for start, stop in spans:
            size = (stop - start) * itemsize
            raw_RB[:, start * itemsize : stop * itemsize] = raw[taken, at : at + size]
            at += size
        digest_R2 += digest[taken]
        altered_R |= altered[taken]
    if altered_R.any():
        findings.append(
            Finding(
                code=FindingCode.DUMP_ALTERED, kind=Kind.UNREADABLE, boundary=name, rows=int(altered_R.sum()),
                text=f"{int(altered_R.sum())} of {len(altered_R)} dumped rows do not have the digest recorded with them",
                remedy="record it again; if that does not help, report it",
            )
        )  # fmt: skip
    expert_R = code_R % _EXPERTS - 1
    has_experts = any(piece.rows.expert_N is not None for piece in pieces)
    return DumpedBoundary(trace, name, dtype, width, code_R // _EXPERTS, expert_R if has_experts else None, digest_R2, raw_RB, altered_R)


def _first_sightings(pieces: Iterable[_Piece]) -> tuple[I64, U8, U64, npt.NDArray[np.bool_]]:
    """Row code (token, expert), ascending, with bytes, digest and whether they disagree, of the first sighting of each row.

    First as for fingerprints: lowest sequence, then earliest forward and use."""
    ordered = sorted(pieces, key=lambda piece: (piece.rows.block.forward, piece.rows.block.occurrence))
    code, raw, digest, altered, rank = [], [], [], [], []
    for number, piece in enumerate(ordered):
        known = np.flatnonzero(piece.token_N >= 0)
        rows = piece.rows
        expert_N = np.zeros(len(known), np.int64) if rows.expert_N is None else rows.expert_N[known].astype(np.int64) + 1
        code.append(piece.token_N[known] * _EXPERTS + expert_N)
        raw.append(rows.raw_NB[known])
        digest.append(rows.digest_N2[known])
        altered.append(rows.altered()[known])
        rank.append(rows.sequence_N[known].astype(np.int64) * len(ordered) + number)
    code_N = np.concatenate(code)
    order = np.lexsort((np.concatenate(rank), code_N))
    first = order[np.append(True, np.diff(code_N[order]) != 0)] if len(order) else order
    return code_N[first], np.concatenate(raw)[first], np.concatenate(digest)[first], np.concatenate(altered)[first]


def _left_out(name: str, text: str) -> Finding:
    return Finding(code=FindingCode.DUMP_UNUSABLE, kind=Kind.INFORMATION, boundary=name, text=text)
