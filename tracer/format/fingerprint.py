"""Fingerprints of rows: digest, sketch and statistics that add up over column slices.

The definition is in ``docs/explanation/fingerprints.md``; this is its numpy form, and everything a reader does
with fingerprints. ``tracer.record.fingerprint_tensors`` takes them from tensors on any device.

How the numpy form is fast: rows are cut into tiles that stay in cache; a digest lane is one integer dot product
per row (``einsum`` on uint64, exact modulo 2^64); the sketch is a product with a matrix of signs, split into
pieces below the size at which a BLAS starts threads of its own; what is not finite shows up in the sum of
squares, so finite tiles are never searched for it.

Shape suffixes: N rows, C columns held here, W words, R rows and T columns of one tile.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tracer.errors import Code, UsageError
from tracer.format.dtypes import DTYPES, AnyArray, DtypeInfo, Kind, as_storage, decode_to_float32, dtype_info, float8_values
from tracer.format.fingerprint_plan import GROUP, LANES, Plan, keyed_hash, plan_for
from tracer.format.schema import Span

__all__ = [
    "DTYPES",
    "DtypeInfo",
    "Fingerprints",
    "Kind",
    "RowStatistics",
    "check_columns",
    "decode_to_float32",
    "digest_of_rows",
    "dtype_info",
    "fingerprint_rows",
    "row_distance",
]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_SEED_ROW = 4


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """Fingerprints of N rows, owned by whoever holds them.

    ``digest_N2`` uint64. Float statistics ``sketch_N16`` float32, ``sum_squares_N`` float64, ``abs_max_N``
    float32, ``nonfinite_N`` uint32: all present, or all None. ``values_NC`` int64: the held columns of narrow
    integer rows, else None.
    """

    digest_N2: U64
    sketch_N16: F32 | None = None
    sum_squares_N: F64 | None = None
    abs_max_N: F32 | None = None
    nonfinite_N: npt.NDArray[np.uint32] | None = None
    values_NC: I64 | None = None

    def __len__(self) -> int:
        return len(self.digest_N2)

    def take(self, index: npt.NDArray[Any] | slice) -> Fingerprints:
        """Only the rows of ``index`` (integers, mask or slice), in its order."""
        return Fingerprints(
            self.digest_N2[index],
            None if self.sketch_N16 is None else self.sketch_N16[index],
            None if self.sum_squares_N is None else self.sum_squares_N[index],
            None if self.abs_max_N is None else self.abs_max_N[index],
            None if self.nonfinite_N is None else self.nonfinite_N[index],
            None if self.values_NC is None else self.values_NC[index],
        )

    @property
    def sketch_R16(self) -> F32 | None:
        """``sketch_N16``, as ``RowStatistics`` calls it."""
        return self.sketch_N16

    @property
    def sum_squares_R(self) -> F64 | None:
        """``sum_squares_N``, as ``RowStatistics`` calls it."""
        return self.sum_squares_N


class RowStatistics(Protocol):
    """What a distance needs of R rows; ``Fingerprints`` has it, and so do a reader's stitched statistics."""

    @property
    def sketch_R16(self) -> F32 | None:
        """float32 (R, 16)."""

    @property
    def sum_squares_R(self) -> F64 | None:
        """float64 (R,)."""


def row_distance(x: RowStatistics, y: RowStatistics) -> F64:
    """How far rows are apart: ``|sketch(x) - sketch(y)| / max(|x|, |y|)``, float64 (R,), squared in float64.

    NaN means undefined: both norms are zero, or a bucket overflowed. 0 with different digests means below the
    sketch's resolution, not equal. Raises ``UsageError`` (bad-argument) where either side keeps no sketch.
    """
    if x.sketch_R16 is None or y.sketch_R16 is None or x.sum_squares_R is None or y.sum_squares_R is None:
        raise UsageError(Code.BAD_ARGUMENT, "these rows keep no sketch, so they have no distance", expected="rows of a float dtype")
    with np.errstate(all="ignore"):
        apart = np.square(x.sketch_R16.astype(np.float64) - y.sketch_R16).sum(axis=-1)
        distance: F64 = np.sqrt(apart / np.maximum(x.sum_squares_R, y.sum_squares_R))
    distance[~np.isfinite(distance)] = np.nan
    return distance


def digest_of_rows(digest_R2: U64, rows_R: npt.ArrayLike) -> tuple[int, int]:
    """One digest of many rows: ``sum_r xxh3_64(le64(r), seed=4) * digest_r mod 2^64``, per lane.

    ``rows_R``: global row index of each row. Linear in the rows, so parts of them add up.
    """
    weights = keyed_hash(rows_R, _SEED_ROW)
    with np.errstate(over="ignore"):
        lanes = (digest_R2 * weights[:, None]).sum(axis=0, dtype=np.uint64)
    return int(lanes[0]), int(lanes[1])


def fingerprint_rows(
    rows_NC: AnyArray, dtype: str, *, width: int | None = None, spans: tuple[Span, ...] = (), threads: int = 1
) -> Fingerprints:
    """Fingerprints of N rows of ``dtype``, which are read and never kept or changed.

    ``rows_NC``: one item per column (floats, ints, or stored bits as integers of the same size), complex numbers,
    or raw uint8 bytes; any strides. Columns of complex rows are counted singly: real, imaginary, real ...
    ``width``: columns of the whole logical row (default: those held). ``spans``: global columns of the local ones,
    in local order; empty means the whole row. Local columns beyond them are padding and not looked at.
    ``threads``: at most so many threads work on it, this one included.

    Integer and bool rows of a width up to 64 are widened to int64 and keep values instead of statistics;
    packed dtypes keep a digest only.
    Raises ``UsageError`` (bad-argument) where rows, width and spans do not fit, ``TraceFormatError`` (segment-invalid)
    for an unknown dtype.
    """
    info = dtype_info(dtype, "fingerprint_rows")
    storage_NC = as_storage(rows_NC, info)
    width = storage_NC.shape[-1] if width is None else width
    narrow = info.is_narrow(width)
    plan = plan_for("int64" if narrow else dtype, width, spans)
    check_columns(storage_NC.shape[1:], plan, info)
    storage_NC = storage_NC[:, : plan.columns]
    if narrow:
        return _narrow(storage_NC, info, plan)
    return _wide(storage_NC, plan, threads)


def check_columns(shape: Sequence[int], plan: Plan, info: DtypeInfo) -> None:
    """Raise ``UsageError`` (bad-argument) unless rows of this ``shape`` (without N) hold the plan's columns.

    More columns than that are padding; of complex rows there is none, so that reals cannot be lost by miscounting.
    """
    if len(shape) != 1 or plan.columns > shape[0] or (plan.columns < shape[0] and info.kind == "complex"):
        raise UsageError(
            Code.BAD_ARGUMENT,
            "the rows do not hold the columns they are said to hold",
            expected=f"(N, {plan.columns}) of {info.name}, reals of complex rows counted singly",
            found=f"(N, {', '.join(map(str, shape))})",
        )


def _narrow(storage_NC: AnyArray, info: DtypeInfo, plan: Plan) -> Fingerprints:
    """Digest over int64 values, and the values themselves."""
    native = info.native
    assert native is not None
    values_NC = np.array(storage_NC.view(native), np.int64, order="C")  # uint64 beyond int64 wraps, as a cast in torch does
    digest_N2 = np.zeros((len(values_NC), LANES), np.uint64)
    _digest_tile(plan.pack(values_NC.view(np.uint64)), plan.keys_2W, digest_N2)
    return Fingerprints(digest_N2, values_NC=values_NC)


# The fast path: blocks of rows, each cut into tiles.

_TILE_ITEMS = 1 << 16
"""Columns times rows of one tile: its widest scratch array is 512 KiB."""
_TILE_COLUMNS = 512
"""BLAS splits a product over its own threads from m * n * k > 2^18 on (OpenBLAS; matrix-vector: m * n >= 9216);
16 rows x 512 columns x 16 buckets stay below both."""
_TILE_ROWS = 16


class _Scratch(threading.local):
    """Per-thread work arrays of one tile."""

    def __init__(self) -> None:
        self.wide = np.empty(_TILE_ITEMS * 2, np.uint64)
        self.values = np.empty(_TILE_ITEMS * 2, np.float32)


_scratch = _Scratch()


def _wide(storage_NC: AnyArray, plan: Plan, threads: int) -> Fingerprints:
    rows = len(storage_NC)
    out = Fingerprints(np.zeros((rows, LANES), np.uint64))
    if plan.info.kind != "packed":
        out = Fingerprints(
            out.digest_N2, np.zeros((rows, GROUP), np.float32), np.zeros(rows), np.zeros(rows, np.float32), np.zeros(rows, np.uint32)
        )
    blocks = deque(_row_blocks(rows, plan.columns, threads))

    def work() -> None:
        with np.errstate(all="ignore"):
            while True:
                try:
                    start, stop = blocks.popleft()  # atomic: each block is one thread's, whoever asks first
                except IndexError:
                    return
                _fingerprint_block(storage_NC[start:stop], plan, out.take(slice(start, stop)))

    futures: list[Future[None]] = [_pool(threads).submit(work) for _ in range(min(threads, len(blocks)) - 1)]
    work()
    for future in futures:
        future.result()
    return out


def _row_blocks(rows: int, columns: int, threads: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows for one thread at a time."""
    step = max(1, _TILE_ITEMS // max(1, min(columns, _TILE_COLUMNS)))
    if threads > 1 and rows * columns > _TILE_ITEMS // 2:
        step = min(step, -(-rows // threads))
    if step > _TILE_ROWS:
        step -= step % _TILE_ROWS
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


_pools: dict[int, ThreadPoolExecutor] = {}


def _pool(threads: int) -> ThreadPoolExecutor:
    """Helper threads of this process (a forked child gets its own)."""
    pool = _pools.get(os.getpid())
    if pool is None or pool._max_workers < threads - 1:
        pool = _pools[os.getpid()] = ThreadPoolExecutor(threads - 1, thread_name_prefix="tracer-fingerprint")
    return pool


def _fingerprint_block(storage_RC: AnyArray, plan: Plan, out: Fingerprints) -> None:
    """Fill ``out``, which is a view, with the fingerprints of one block of rows."""
    rows, columns = storage_RC.shape
    step = _TILE_ITEMS // max(rows, 1) // _TILE_COLUMNS * _TILE_COLUMNS
    step = min(max(step, _TILE_COLUMNS), 8192)  # BLAS splits a plain dot product beyond 10000
    words_RW = plan.pack(storage_RC)
    for start in range(0, words_RW.shape[1], step):
        _digest_tile(words_RW[:, start : start + step], plan.keys_2W[:, start : start + step], out.digest_N2)
    if out.sketch_N16 is None:
        return
    for start in range(0, columns, step):
        values_RT = _values(storage_RC[:, start : start + step], plan.info)
        _statistics_tile(values_RT, plan.projection_C16[start : start + step], out)


def _digest_tile(words_RT: npt.NDArray[np.uint32], keys_2T: U64, digest_R2: U64) -> None:
    """Add the tile's part of both lanes."""
    size = words_RT.size
    wide = _scratch.wide[:size] if size <= len(_scratch.wide) else np.empty(size, np.uint64)
    wide_RT = wide.reshape(words_RT.shape)
    np.copyto(wide_RT, words_RT)
    for lane in range(LANES):
        digest_R2[:, lane] += np.einsum("rt,t->r", wide_RT, keys_2T[lane])


def _values(storage_RT: AnyArray, info: DtypeInfo) -> F32:
    """The tile as float32: a view of the tile or of scratch."""
    native = info.native
    if native == np.float32:
        return storage_RT.view(np.float32)
    values_RT = _scratch.values[: storage_RT.size].reshape(storage_RT.shape)
    if native is not None:
        np.copyto(values_RT, storage_RT.view(native), casting="unsafe")
    elif info.itemsize == 2:
        bits_RT = values_RT.view(np.uint32)
        np.copyto(bits_RT, storage_RT)
        np.left_shift(bits_RT, np.uint32(16), out=bits_RT)
    else:
        np.take(float8_values(info.name), storage_RT, out=values_RT, mode="clip")
    return values_RT


def _statistics_tile(values_RT: F32, projection_T16: F32, out: Fingerprints) -> None:
    """Add the tile's part of sketch and statistics."""
    assert out.sketch_N16 is not None
    assert out.sum_squares_N is not None
    assert out.abs_max_N is not None
    assert out.nonfinite_N is not None
    squares_R = _sum_squares(values_RT)
    if not math.isfinite(squares_R.sum()):  # the square of a finite float32 is finite in float64
        finite_RT = np.isfinite(values_RT)
        out.nonfinite_N[...] += np.uint32(values_RT.shape[1]) - np.count_nonzero(finite_RT, axis=1).astype(np.uint32)
        values_RT = np.where(finite_RT, values_RT, np.float32(0))
        squares_R = _sum_squares(values_RT)
    out.sum_squares_N[...] += squares_R
    np.maximum(out.abs_max_N, np.maximum.reduce(values_RT, axis=1), out=out.abs_max_N)
    np.maximum(out.abs_max_N, -np.minimum.reduce(values_RT, axis=1), out=out.abs_max_N)
    _project(values_RT, projection_T16, out.sketch_N16)


def _sum_squares(values_RT: F32) -> F64:
    rows, columns = values_RT.shape
    wide_RT = _scratch.wide[: rows * columns].view(np.float64).reshape(rows, columns)
    np.copyto(wide_RT, values_RT)
    squares: F64 = np.matmul(wide_RT[:, None, :], wide_RT[:, :, None])[:, 0, 0]
    return squares


def _project(values_RT: F32, projection_T16: F32, sketch_R16: F32) -> None:
    """Add ``values @ projection`` in products too small for a BLAS to thread."""
    rows, columns = values_RT.shape
    even_rows = rows - rows % _TILE_ROWS if rows > _TILE_ROWS else rows
    even_columns = columns - columns % _TILE_COLUMNS
    for first, last in ((0, even_rows), (even_rows, rows)):
        for start, stop in ((0, even_columns), (even_columns, columns)):
            if first == last or start == stop:
                continue
            height, depth = min(last - first, _TILE_ROWS), min(stop - start, _TILE_COLUMNS)
            batch = values_RT[first:last, start:stop].reshape(-1, height, (stop - start) // depth, depth).transpose(0, 2, 1, 3)
            product = np.matmul(batch, projection_T16[start:stop].reshape(-1, depth, GROUP))
            sketch_R16[first:last] += product.sum(axis=1).reshape(-1, GROUP)
