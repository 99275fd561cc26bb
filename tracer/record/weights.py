"""Fingerprints of parameters and buffers under semantic names, so that packed, stacked and sharded ones compare.

A parameter's rows are its output rows; a 1-D parameter is one row, trailing dimensions beyond two count as columns.
The map's rules name it, turn transposed storage, take stacked experts apart and split what is packed. What no rule
names keeps its path, as ``other.<path>``. Tensors are read in blocks and neither kept nor changed.

Shape suffixes: R rows, C columns held here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch
import xxhash

from tracer.errors import Code, MapError
from tracer.format.dtypes import DTYPES
from tracer.format.fingerprint import Fingerprints, digest_of_rows
from tracer.format.fingerprint_kernel import digest_rows
from tracer.format.fingerprint_plan import plan_for
from tracer.format.schema import Span, Weight
from tracer.record.boundaries import Plan, WeightRule
from tracer.record.fingerprint_tensors import fingerprint_tensor
from tracer.record.host import Host, HostParameter

__all__ = ["Matrix", "WeightSnapshot", "fingerprint_weights", "held_rows", "matrices", "unreadable", "weights_changed"]

_BLOCK_ITEMS = 1 << 22
"""Elements of one block of rows."""
_MAX_THREADS = 8
_NOT_KEPT = ("", "")


@dataclass(frozen=True)
class WeightSnapshot:
    """``weights``: one per semantic name, in the host's order. ``parts``: with mode ``rows`` the fingerprints of their rows,
    as ``ShardWriter.write_weight_rows`` takes them. ``checksums``: xxh3 of local memory per host parameter, where it is
    cheap; equal checksums spare a second fingerprint."""

    mode: str
    weights: tuple[Weight, ...] = ()
    parts: tuple[Fingerprints, ...] = ()
    checksums: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(weight.name for weight in self.weights)


def fingerprint_weights(host: Host, plan: Plan, mode: str = "digest") -> WeightSnapshot:
    """Fingerprint everything ``host.parameters()`` gives. ``mode``: ``digest`` (one digest per weight), ``rows`` or ``none``.

    Raises MapError (map-unfit) where a rule of the map does not fit a parameter's shape.
    """
    if mode == "none":
        return WeightSnapshot(mode)
    with _Reader(keep_rows=mode == "rows") as reader:
        weights: list[Weight] = []
        checksums: dict[str, bytes] = {}
        for parameter in host.parameters():
            weights.extend(reader.weights(parameter, host, plan))
            checksum = _checksum(parameter.tensor)
            if checksum is not None:
                checksums[parameter.parameter] = checksum
        return WeightSnapshot(mode, tuple(weights), tuple(reader.parts), checksums)


def weights_changed(before: WeightSnapshot, host: Host, plan: Plan) -> tuple[tuple[Weight, ...], str]:
    """``before.weights`` with ``after`` where a weight has another digest now, and whether any has: equal, changed or unknown.

    A weight whose bytes could not be read at either time, or of which this process holds another part now, makes it unknown
    unless another one changed."""
    if before.mode == "none" or not before.weights:
        return before.weights, "unknown"
    now: dict[str, Weight] = {}
    same: set[str] = set()
    with _Reader(keep_rows=False) as reader:
        for parameter in host.parameters():
            checksum = before.checksums.get(parameter.parameter)
            if checksum is not None and checksum == _checksum(parameter.tensor):
                same.add(parameter.parameter)
            else:
                now.update((weight.name, weight) for weight in reader.weights(parameter, host, plan))
    weights: list[Weight] = []
    changed = unknown = False
    for weight in before.weights:
        later = now.get(weight.name)
        if weight.parameter not in same:
            comparable = later is not None and not later.unknown and not weight.unknown and _place(later) == _place(weight)
            if later is not None and comparable and later.digest != weight.digest:
                weight, changed = msgspec.structs.replace(weight, after=later.digest), True
            unknown |= not comparable
        weights.append(weight)
    changed |= bool(now.keys() - set(before.names))
    return tuple(weights), "changed" if changed else "unknown" if unknown else "equal"


def _place(weight: Weight) -> tuple[object, ...]:
    return weight.dtype, weight.rows, weight.columns, weight.row_spans, weight.column_spans


@dataclass(frozen=True)
class Matrix:
    """Local rows of one named weight. ``rows``, ``columns``: of the whole. Spans: what is held of them, empty means all."""

    tensor: torch.Tensor | None
    rows: int
    columns: int
    row_spans: tuple[Span, ...] = ()
    column_spans: tuple[Span, ...] = ()


class _Reader:
    """Fingerprints matrices, each memory once; use as a context."""

    def __init__(self, keep_rows: bool) -> None:
        self._keep_rows = keep_rows
        self._known: dict[object, tuple[tuple[str, str], int]] = {}
        self._lines = 0
        self.parts: list[Fingerprints] = []

    def __enter__(self) -> _Reader:
        self._pool = ThreadPoolExecutor(min(torch.get_num_threads(), os.cpu_count() or 1, _MAX_THREADS))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()

    def weights(self, parameter: HostParameter, host: Host, plan: Plan) -> Iterator[Weight]:
        """The weights that one host parameter holds, in order."""
        rule = plan.name_weights(parameter.parameter)
        for name, matrix in matrices(parameter, rule, host):
            unknown = parameter.unknown or unreadable(matrix.tensor)
            if unknown or matrix.tensor is None:
                digest, start = _NOT_KEPT, -1
            elif parameter.rows is not None:
                digest, start = self._keep([parameter.rows.take(matrix.tensor[:, 0].numpy())], matrix)
            else:
                digest, start = self._fingerprint(matrix.tensor, matrix, parameter)
            yield Weight(
                name=name,
                parameter=parameter.parameter,
                dtype=parameter.dtype or _dtype(parameter.tensor),
                rows=matrix.rows,
                columns=matrix.columns,
                row_spans=matrix.row_spans,
                column_spans=matrix.column_spans,
                digest=digest,
                buffer=parameter.buffer,
                start=start,
                unknown=unknown,
            )

    def _fingerprint(self, tensor_RC: torch.Tensor, matrix: Matrix, parameter: HostParameter) -> tuple[tuple[str, str], int]:
        """Digest of a matrix as hex, and the first line of its rows among ``parts``."""
        key = (
            tensor_RC.data_ptr(), tensor_RC.dtype, tensor_RC.shape, tensor_RC.stride(), tensor_RC.device,
            matrix.columns, matrix.row_spans, matrix.column_spans,
        )  # fmt: skip
        passing = not tensor_RC.data_ptr() or not _shares_memory(tensor_RC, parameter.tensor)
        if key not in self._known or passing:
            step = max(1, _BLOCK_ITEMS // max(1, tensor_RC.shape[1]))
            blocks = [tensor_RC[start : start + step] for start in range(0, len(tensor_RC), step)]
            reals = 2 if tensor_RC.is_complex() else 1
            width, spans = reals * matrix.columns, tuple((reals * first, reals * end) for first, end in matrix.column_spans)
            if self._keep_rows or not _digest_suffices(tensor_RC):
                taken = [fingerprint_tensor(block, width=width, spans=spans).resolve() for block in blocks]
            else:
                taken = list(self._pool.map(lambda block: _row_digests(block, width, spans), blocks))
            found = self._keep(taken, matrix)
            if passing:  # a copy, whose memory the next one may get
                return found
            self._known[key] = found
        return self._known[key]

    def _keep(self, taken: list[Fingerprints], matrix: Matrix) -> tuple[tuple[str, str], int]:
        """Digest of a matrix out of the fingerprints of its rows, and where they stand among ``parts``."""
        rows_R = held_rows(matrix.row_spans, matrix.rows)
        digest_R2 = np.concatenate([part.digest_N2 for part in taken]) if taken else np.zeros((0, 2), np.uint64)
        first, second = digest_of_rows(digest_R2, rows_R)
        start = -1
        if self._keep_rows:
            start, self._lines = self._lines, self._lines + len(rows_R)
            self.parts.extend(replace(part, values_NC=None) for part in taken)
        return (f"{first:016x}", f"{second:016x}"), start


def _shares_memory(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def matrices(parameter: HostParameter, rule: tuple[WeightRule, tuple[str, ...]] | None, host: Host) -> Iterator[tuple[str, Matrix]]:
    """The named matrices that a parameter holds, experts taken apart, turned and split as the rule says."""
    names = rule[1] if rule else (f"other.{parameter.parameter}",)
    shares: Sequence[int] = rule[0].shares if rule else ()
    transpose = rule is not None and rule[0].transpose
    spans = parameter.spans or tuple(() for _ in parameter.shape)
    tensor = parameter.tensor if parameter.rows is None else _row_numbers(parameter, spans)
    if not any("{expert}" in name for name in names):
        yield from _split(parameter, names, shares, _as_matrix(tensor, parameter.shape, spans, transpose), host)
        return
    if len(parameter.shape) < 2:
        raise _unfit(parameter, "experts stacked along the first of at least two dimensions", str(parameter.shape))
    for local, expert in enumerate(held_rows(spans[0], parameter.shape[0]).tolist()):
        piece = None if tensor is None else tensor[local]
        matrix = _as_matrix(piece, parameter.shape[1:], spans[1:], transpose)
        yield from _split(parameter, [name.replace("{expert}", str(expert)) for name in names], shares, matrix, host)


def _row_numbers(parameter: HostParameter, spans: Sequence[tuple[Span, ...]]) -> torch.Tensor:
    """Stands for a tensor of which only the rows' fingerprints are left: (..., 1), the number of every row held."""
    local = [sum(stop - start for start, stop in held) if held else whole for held, whole in zip(spans, parameter.shape, strict=True)]
    return torch.arange(int(np.prod(local[:-1]))).reshape(*local[:-1], 1)


def _as_matrix(tensor: torch.Tensor | None, shape: tuple[int, ...], spans: Sequence[tuple[Span, ...]], transpose: bool) -> Matrix:
    """Rows and columns of a tensor of any rank."""
    if len(shape) < 2:
        columns = shape[0] if shape else 1
        return Matrix(None if tensor is None else tensor.reshape(1, -1), 1, columns, (), spans[0] if shape else ())
    if len(shape) == 2 and transpose:
        return Matrix(None if tensor is None else tensor.t(), shape[1], shape[0], spans[1], spans[0])
    if len(shape) == 2:
        return Matrix(tensor, shape[0], shape[1], spans[0], spans[1])
    columns = int(np.prod(shape[1:]))
    if any(spans[1:]):
        return Matrix(None, shape[0], columns, spans[0])
    return Matrix(None if tensor is None else tensor.flatten(1), shape[0], columns, spans[0])


def _split(
    parameter: HostParameter, names: Sequence[str], shares: Sequence[int], matrix: Matrix, host: Host
) -> Iterator[tuple[str, Matrix]]:
    """Consecutive rows (of a 1-D parameter: elements) for every name."""
    if len(names) == 1:
        yield names[0], matrix
        return
    flat = matrix.rows == 1
    whole, spans = (matrix.columns, matrix.column_spans) if flat else (matrix.rows, matrix.row_spans)
    held = [host.local_columns(name.rpartition(".")[0]) for name in names]
    known = [size for size in held if size is not None]
    shares = parameter.sizes or (known if len(known) == len(names) else shares or [1] * len(names))
    if any(whole * share % sum(shares) for share in shares):
        raise _unfit(parameter, f"{whole} rows in proportions {':'.join(map(str, shares))}", f"{whole} rows")
    edges = (np.cumsum([0, *shares]) * whole // sum(shares)).tolist()
    for name, start, stop in zip(names, edges[:-1], edges[1:], strict=True):
        local, inside = _cut(spans or ((0, whole),), start, stop)
        if not inside:
            continue
        kept = () if not spans else inside
        piece = None if matrix.tensor is None else _take(matrix.tensor, local, 1 if flat else 0)
        if flat:
            yield name, Matrix(piece, 1, stop - start, (), kept)
        else:
            yield name, Matrix(piece, stop - start, matrix.columns, kept, matrix.column_spans)


def _cut(spans: Sequence[Span], start: int, stop: int) -> tuple[list[Span], tuple[Span, ...]]:
    """The part of ``spans`` inside ``start:stop``: where it lies locally, and its spans counted from ``start``."""
    local: list[Span] = []
    inside: list[Span] = []
    at = 0
    for first, end in spans:
        low, high = max(first, start), min(end, stop)
        if low < high:
            here = (at + low - first, at + high - first)
            if local and local[-1][1] == here[0]:
                here = (local.pop()[0], here[1])
            local.append(here)
            inside.append((low - start, high - start))
        at += end - first
    return local, tuple(inside)


def _take(tensor: torch.Tensor, local: Sequence[Span], dim: int) -> torch.Tensor:
    """These rows or columns; a view where they lie together, else a copy (projections interleaved per head group)."""
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in local]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def held_rows(spans: Sequence[Span], whole: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Global indices held, in local order."""
    return np.concatenate([np.arange(start, stop) for start, stop in spans or ((0, whole),)])


def unreadable(tensor: torch.Tensor | None) -> str:
    """Why a matrix has no fingerprint, empty where it has one."""
    if tensor is None:
        return "cut along an inner dimension"
    if tensor.layout != torch.strided or _dtype(tensor) not in DTYPES:
        return f"no fingerprint is defined for {tensor.layout} memory of {tensor.dtype}"
    return ""


def _digest_suffices(tensor: torch.Tensor) -> bool:
    """Whether the digest can be taken straight from memory: plain floats on the CPU."""
    return tensor.device.type == "cpu" and tensor.is_floating_point() and DTYPES[_dtype(tensor)].kind == "float"


def _row_digests(rows_RC: torch.Tensor, width: int, spans: tuple[Span, ...]) -> Fingerprints:
    """Digests alone: no value is decoded, which is most of the work for 16-bit floats."""
    info = DTYPES[_dtype(rows_RC)]
    plan = plan_for(info.name, width, spans)
    storage_RC = rows_RC.detach().contiguous().view(getattr(torch, f"int{8 * info.itemsize}")).numpy().view(info.storage)
    return Fingerprints(digest_rows(plan.pack(storage_RC), plan.keys_2W))


def _checksum(tensor: torch.Tensor | None) -> bytes | None:
    """Checksum of a tensor's own memory, None where that needs a copy."""
    if tensor is None or tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous() or not tensor.numel():
        return None
    described = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    memory = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return described + xxhash.xxh3_128_digest(memory.data)


def _dtype(tensor: torch.Tensor | None) -> str:
    return "unknown" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _unfit(parameter: HostParameter, expected: str, found: str) -> MapError:
    return MapError(
        Code.MAP_UNFIT,
        f"a weight rule of the map does not fit parameter {parameter.parameter}",
        where="hosts.*.weights",
        expected=expected,
        found=found,
        remedy="correct the rule's names, shares or transpose",
    )
