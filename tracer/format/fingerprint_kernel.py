"""The numpy arithmetic of fingerprints: rows cut into tiles that stay in cache.

A digest lane is one integer dot product per row (``einsum`` on uint64, exact modulo 2^64). The sketch is a product
with a matrix of signs, cut so small that no BLAS starts threads of its own. What is not finite shows up in the sum of
squares, so finite tiles are never searched for it. Everything large releases the interpreter lock, so blocks of rows
run on several threads.

Shape suffixes: N rows, C columns held here, W words; R rows and T columns (or words) of one tile.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tracer.format.dtypes import AnyArray, DtypeInfo, float8_values
from tracer.format.fingerprint_plan import GROUP, LANES, WORD, Plan

__all__ = ["Parts", "digest_rows", "fingerprint_parts"]

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_TILE_ITEMS = 1 << 18
"""Columns times rows of one tile: few enough for the outer caches, enough to hide about 40 microseconds of calls."""
_SCRATCH_ITEMS = _TILE_ITEMS
_TILE_ROWS = 64
_BLAS_VECTOR = 8192
"""OpenBLAS splits a dot product over threads of its own beyond 10000 items ..."""
_BLAS_ROWS = 32
_BLAS_COLUMNS = 256
"""... a matrix product beyond m * n * k = 2^18, a matrix-vector product from m * n = 9216: stay below."""
_SMALL = 1 << 13
"""Items up to which the plain integer product beats two ``einsum`` calls."""

_row_dot: Any = getattr(np, "vecdot", None) or (lambda x, y: np.matmul(x[:, None, :], y[:, :, None])[:, 0, 0])


class Parts(NamedTuple):
    """Fingerprint columns of R rows: ``digest`` uint64 (R, 2), ``sketch`` float32 (R, 16), ``sum_squares`` float64,
    ``abs_max`` float32, ``nonfinite`` uint32, all (R,)."""

    digest: U64
    sketch: F32
    sum_squares: F64
    abs_max: F32
    nonfinite: U32

    @classmethod
    def zeros(cls, rows: int) -> Parts:
        """Of rows without columns."""
        return cls(
            np.zeros((rows, LANES), np.uint64),
            np.zeros((rows, GROUP), np.float32),
            np.zeros(rows),
            np.zeros(rows, np.float32),
            np.zeros(rows, np.uint32),
        )


class _Scratch(threading.local):
    """Work arrays of one thread, for one tile."""

    def __init__(self) -> None:
        self.wide = np.empty(2 * _SCRATCH_ITEMS, np.uint64)
        self.values = np.empty(_SCRATCH_ITEMS, np.float32)


_scratch = _Scratch()


def digest_rows(words_NW: U32, keys_2W: U64) -> U64:
    """Both lanes of every row, uint64 (N, 2)."""
    rows, words = words_NW.shape
    digest_N2 = np.zeros((rows, LANES), np.uint64)
    high, wide = max(1, _TILE_ITEMS // max(1, words)), max(1, min(words, _TILE_ITEMS))
    for start in range(0, rows, high):
        for first in range(0, words, wide):
            tile_RT = words_NW[start : start + high, first : first + wide]
            digest_N2[start : start + high] += _digest_tile(tile_RT, keys_2W[:, first : first + wide])
    return digest_N2


def fingerprint_parts(storage_NC: AnyArray, plan: Plan, threads: int) -> Parts:
    """Fingerprint columns of rows of a dtype that keeps statistics; ``storage_NC``: unsigned integers, as stored."""
    rows, columns = storage_NC.shape
    step = _block_rows(rows, columns, threads)
    if step >= rows:
        with np.errstate(all="ignore"):
            return _block(storage_NC, plan)
    out = Parts.zeros(rows)
    starts = deque(range(0, rows, step))

    def work() -> None:
        with np.errstate(all="ignore"):
            while True:
                try:
                    start = starts.popleft()  # atomic: each block is one thread's
                except IndexError:
                    return
                block = _block(storage_NC[start : start + step], plan)
                for column, part in zip(out, block, strict=True):
                    cast("AnyArray", column)[start : start + step] = part

    helpers = [_helpers(threads - 1).submit(work) for _ in range(min(threads, len(starts)) - 1)]
    work()
    for helper in helpers:
        helper.result()
    return out


def _block_rows(rows: int, columns: int, threads: int) -> int:
    """Rows of one block: about one tile, less where a thread would have none."""
    step = max(_TILE_ROWS, _TILE_ITEMS // max(columns, 1))
    if threads > 1 and rows * columns >= _TILE_ITEMS // 2:
        step = min(step, -(-rows // threads))
    return step - step % _BLAS_ROWS if step > _BLAS_ROWS else step


_pools: dict[int, tuple[int, ThreadPoolExecutor]] = {}


def _helpers(count: int) -> ThreadPoolExecutor:
    """Helper threads of this process, ``count`` or more; a forked child starts its own."""
    size, pool = _pools.get(os.getpid(), (0, None))
    if pool is None or size < count:
        pool = ThreadPoolExecutor(count, thread_name_prefix="fingerprint-rows")
        _pools[os.getpid()] = count, pool
    return pool


def _block(storage_RC: AnyArray, plan: Plan) -> Parts:
    """All columns of some rows, tile after tile: digest and statistics of a tile together, while it is in cache."""
    rows, columns = storage_RC.shape
    if not rows or not columns:
        return Parts.zeros(rows)
    if storage_RC.strides[1] != storage_RC.itemsize:
        storage_RC = np.ascontiguousarray(storage_RC)
    words_RW = plan.pack(storage_RC)
    step = max(_TILE_ITEMS // rows // _BLAS_COLUMNS, 1) * _BLAS_COLUMNS
    if columns <= step and plan.direct:
        return Parts(_digest_tile(words_RW, plan.keys_2W), *_statistics_tile(_values(storage_RC, plan.info), plan.projection_C16))
    total = Parts.zeros(rows)
    word_step = step * plan.info.itemsize // WORD
    for tile in range(max(-(-columns // step), -(-plan.words // word_step))):
        span, word_span = slice(tile * step, (tile + 1) * step), slice(tile * word_step, (tile + 1) * word_step)
        words_RT, storage_RT = words_RW[:, word_span], storage_RC[:, span]
        if words_RT.shape[1]:
            total.digest[...] += _digest_tile(words_RT, plan.keys_2W[:, word_span])
        if storage_RT.shape[1]:
            sketch, sum_squares, abs_max, nonfinite = _statistics_tile(_values(storage_RT, plan.info), plan.projection_C16[span])
            total.sketch[...] += sketch
            total.sum_squares[...] += sum_squares
            np.maximum(total.abs_max, abs_max, out=total.abs_max)
            total.nonfinite[...] += nonfinite
    return total


def _digest_tile(words_RT: U32, keys_2T: U64) -> U64:
    """Both lanes of the tile, uint64 (R, 2)."""
    wide_RT = _scratch.wide[: words_RT.size].reshape(words_RT.shape)
    np.copyto(wide_RT, words_RT)
    if words_RT.size <= _SMALL:
        small_R2: U64 = np.dot(wide_RT, keys_2T.T)
        return small_R2
    digest_2R = np.empty((LANES, len(words_RT)), np.uint64)
    for lane in range(LANES):
        np.einsum("rt,t->r", wide_RT, keys_2T[lane], out=digest_2R[lane])
    return np.ascontiguousarray(digest_2R.T)


def _values(storage_RT: AnyArray, info: DtypeInfo) -> F32:
    """The tile as float32: a view of it, or scratch."""
    native = info.native
    if native == np.float32:
        return storage_RT.view(np.float32)
    values_RT = _scratch.values[: storage_RT.size].reshape(storage_RT.shape)
    if native == np.float16:
        _put_halves(storage_RT, values_RT)
    elif native is not None:
        np.copyto(values_RT, storage_RT.view(native), casting="unsafe")
    elif info.name == "bfloat16":
        bits_RT = values_RT.view(np.uint32)
        np.copyto(bits_RT, storage_RT)
        np.left_shift(bits_RT, np.uint32(16), out=bits_RT)
    else:
        np.take(float8_values(info.name), storage_RT, out=values_RT, mode="clip")
    return values_RT


def _put_halves(storage_RT: AnyArray, values_RT: F32) -> None:
    """float16 to float32, five times as fast as numpy's cast: move sign, exponent and mantissa into place, then rescale."""
    if np.maximum.reduce(storage_RT & np.uint16(0x7C00), axis=None) == 0x7C00:  # an inf or NaN: rare, and not a matter of scale
        np.copyto(values_RT, storage_RT.view(np.float16))
        return
    bits_RT = values_RT.view(np.int32)
    np.copyto(bits_RT, storage_RT.view(np.int16))
    np.left_shift(bits_RT, np.int32(13), out=bits_RT)
    np.bitwise_and(bits_RT, np.int32(-0x70002000), out=bits_RT)  # 0x8fffe000: the copied sign bits go
    np.multiply(values_RT, np.float32(2.0**112), out=values_RT)


def _statistics_tile(values_RT: F32, projection_T16: F32) -> tuple[F32, F64, F32, U32]:
    """Sketch, sum of squares, largest magnitude and non-finite count of every row."""
    nonfinite_R = np.zeros(len(values_RT), np.uint32)
    squares_R = _sum_squares(values_RT)
    if not math.isfinite(np.add.reduce(squares_R)):  # squares of finite float32 values, and their sums, are finite in float64
        finite_RT = np.isfinite(values_RT)
        nonfinite_R[...] = np.count_nonzero(~finite_RT, axis=1)
        values_RT = np.where(finite_RT, values_RT, np.float32(0))
        squares_R = _sum_squares(values_RT)
    return _sketch_tile(values_RT, projection_T16), squares_R, _abs_max(values_RT), nonfinite_R


def _abs_max(values_RT: F32) -> F32:
    """Largest magnitude of every row of finite values, without a copy: float32 magnitudes are ordered as their bits are.

    As unsigned bits negative values come last, ordered by magnitude; as signed bits the largest positive value does. Both
    maxima together take two thirds of the time of an absolute value and a maximum, and no scratch.
    """
    negative_R = np.maximum.reduce(values_RT.view(np.uint32), axis=1) & np.uint32(0x7FFFFFFF)
    positive_R = np.maximum.reduce(values_RT.view(np.int32), axis=1)
    largest_R: F32 = np.maximum(negative_R.view(np.int32), positive_R).view(np.float32)
    return largest_R


def _sum_squares(values_RT: F32) -> F64:
    rows, columns = values_RT.shape
    if columns > _BLAS_VECTOR:
        return _sum_squares(values_RT[:, :_BLAS_VECTOR]) + _sum_squares(values_RT[:, _BLAS_VECTOR:])
    wide_RT = _scratch.wide[: rows * columns].view(np.float64).reshape(rows, columns)
    np.copyto(wide_RT, values_RT)
    squares_R: F64 = _row_dot(wide_RT, wide_RT)
    return squares_R


def _sketch_tile(values_RT: F32, projection_T16: F32) -> F32:
    """``values @ projection`` as a batch of products each too small for a BLAS to use threads."""
    rows, columns = values_RT.shape
    if rows > _BLAS_ROWS and rows % _BLAS_ROWS:
        whole = rows - rows % _BLAS_ROWS
        return np.concatenate([_sketch_tile(values_RT[:whole], projection_T16), _sketch_tile(values_RT[whole:], projection_T16)])
    if columns > _BLAS_COLUMNS and columns % _BLAS_COLUMNS:
        whole = columns - columns % _BLAS_COLUMNS
        return _sketch_tile(values_RT[:, :whole], projection_T16[:whole]) + _sketch_tile(values_RT[:, whole:], projection_T16[whole:])
    high, wide = min(rows, _BLAS_ROWS), min(columns, _BLAS_COLUMNS)
    batch = values_RT.reshape(rows // high, high, columns // wide, wide).transpose(0, 2, 1, 3)
    product: F32 = np.add.reduce(np.matmul(batch, projection_T16.reshape(-1, wide, GROUP)), axis=1)
    return product.reshape(rows, GROUP)
