"""What a fingerprint multiplies by: digest keys, sketch signs and buckets, for any slice of any row.

All of it follows from *global* word and column numbers, so that slices of one row add up. A ``Plan`` holds
it for one (dtype, width, spans) and is cached; the numpy and the torch path read the same plans.

Shape suffixes: W words of 4 bytes, C columns held here.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.errors import Code, UsageError
from tracer.format.dtypes import DTYPES, DtypeInfo
from tracer.format.schema import Span

__all__ = ["GROUP", "LANES", "Piece", "Plan", "keyed_hash", "plan_for", "sketch_buckets", "sketch_signs"]

GROUP = 16
"""Buckets of a sketch, and columns that share one rotation."""
LANES = 2
WORD = 4
_SEED_ROTATION, _SEED_SIGN = 2, 3
_PLAN_BYTES = 256 << 20

U64 = npt.NDArray[np.uint64]

_SECRET = 0x1CAD21F72C81017C ^ 0xDB979083E96DD4DE  # bytes 8..16 and 16..24 of xxh3's default secret
_PRIME = np.uint64(0x9FB21C651E98DF25)


def keyed_hash(numbers: npt.ArrayLike, seed: int) -> U64:
    """``xxh3_64(le64(n), seed)`` of every number, vectorised; uint64 in, uint64 of the same shape out."""
    swapped = int.from_bytes((seed & 0xFFFFFFFF).to_bytes(4, "little"), "big")
    flip = (_SECRET - (seed ^ (swapped << 32))) & 0xFFFFFFFFFFFFFFFF
    value = np.array(numbers, np.uint64, ndmin=1)
    value = _rotated(value, 32) ^ np.uint64(flip)
    value ^= _rotated(value, 49) ^ _rotated(value, 24)
    value *= _PRIME
    value ^= (value >> np.uint64(35)) + np.uint64(8)
    value *= _PRIME
    value ^= value >> np.uint64(28)
    hashed: U64 = value.reshape(np.shape(numbers))
    return hashed


def _rotated(value: U64, bits: int) -> U64:
    turned: U64 = (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))
    return turned


def sketch_buckets(columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bucket 0..15 of every global column, int64."""
    rotations = keyed_hash(columns // GROUP, _SEED_ROTATION) & np.uint64(GROUP - 1)
    buckets: npt.NDArray[np.int64] = (columns + rotations.astype(np.int64)) % GROUP
    return buckets


def sketch_signs(columns: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """+1 or -1 of every global column, float32."""
    odd = (keyed_hash(columns, _SEED_SIGN) & np.uint64(1)).astype(np.float32)
    signs: npt.NDArray[np.float32] = odd * np.float32(2) - np.float32(1)
    return signs


@dataclass(frozen=True)
class Piece:
    """Local bytes ``[start, stop)`` go to bytes ``[offset, offset + stop - start)`` of the packed row, which is
    zero elsewhere. Each span is one piece and starts a word of its own."""

    start: int
    stop: int
    offset: int


@dataclass(frozen=True, eq=False)
class Plan:
    """One slice of a row of one dtype.

    ``columns``: columns held (C). ``pieces``: how local bytes become W whole words. ``direct``: the local
    bytes are whole words as they lie, so no packing is needed. ``keys_2W``: uint64, of both lanes.
    ``columns_C``: global column numbers, int64.
    """

    info: DtypeInfo
    width: int
    columns: int
    pieces: tuple[Piece, ...]
    direct: bool
    keys_2W: U64
    columns_C: npt.NDArray[np.int64]

    @property
    def words(self) -> int:
        """Words of the packed row."""
        return int(self.keys_2W.shape[1])

    @cached_property
    def signs_C(self) -> npt.NDArray[np.float32]:
        """Sign of every held column."""
        return sketch_signs(self.columns_C)

    @cached_property
    def buckets_C(self) -> npt.NDArray[np.int64]:
        """Bucket of every held column."""
        return sketch_buckets(self.columns_C)

    @cached_property
    def projection_C16(self) -> npt.NDArray[np.float32]:
        """The sketch as a matrix: each row holds one sign, in the column's bucket."""
        matrix = np.zeros((self.columns, GROUP), np.float32)
        matrix[np.arange(self.columns), self.buckets_C] = self.signs_C
        return matrix

    @property
    def size_bytes(self) -> int:
        """Memory of the plan once everything in it was used."""
        return self.keys_2W.nbytes + self.columns * (8 + 4 + 8 + 4 * GROUP)

    def pack(self, storage_NC: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
        """Whole words of every row, uint32 (N, W): a view where ``direct`` and the memory is aligned, else a copy."""
        rows = len(storage_NC)
        if self.direct and _word_viewable(storage_NC):
            return storage_NC.view("<u4")
        source = np.ascontiguousarray(storage_NC).view(np.uint8).reshape(rows, storage_NC.shape[1] * storage_NC.itemsize)
        packed = np.zeros((rows, self.words * WORD), np.uint8)
        for piece in self.pieces:
            packed[:, piece.offset : piece.offset + piece.stop - piece.start] = source[:, piece.start : piece.stop]
        return packed.view("<u4")


def _word_viewable(storage: npt.NDArray[Any]) -> bool:
    size = storage.dtype.itemsize
    if storage.shape[1] > 1 and storage.strides[1] != size:
        return False
    if size >= WORD:
        return storage.flags.aligned
    return storage.ctypes.data % WORD == 0 and storage.strides[0] % WORD == 0


_plans: OrderedDict[tuple[str, int, tuple[Span, ...]], Plan] = OrderedDict()
_plans_lock = threading.Lock()


def plan_for(dtype: str, width: int, spans: tuple[Span, ...] = ()) -> Plan:
    """The plan of this slice, made once and kept while recently used plans fit in 256 MiB.

    ``spans``: global columns of the local ones, in local order; empty means ``[0, width)``.
    Raises ``UsageError`` (bad-argument) where spans leave the row or overlap, ``KeyError`` for an unknown dtype.
    """
    key = (dtype, width, spans)
    plan = _plans.get(key)
    if plan is not None:
        return plan
    plan = _make_plan(DTYPES[dtype], width, spans)
    with _plans_lock:
        _plans[key] = plan
        while len(_plans) > 1 and sum(held.size_bytes for held in _plans.values()) > _PLAN_BYTES:
            _plans.popitem(last=False)
    return plan


def _make_plan(info: DtypeInfo, width: int, spans: tuple[Span, ...]) -> Plan:
    held = _joined(spans or ((0, width),), width)
    pieces: list[Piece] = []
    words: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    local = packed = 0
    for start, stop in held:
        first, last = start * info.itemsize // WORD, -(-stop * info.itemsize // WORD)
        size = (stop - start) * info.itemsize
        pieces.append(Piece(local, local + size, packed + start * info.itemsize % WORD))
        words.append(np.arange(first, last))
        local += size
        packed += (last - first) * WORD
    word_numbers = np.concatenate(words)
    return Plan(
        info=info,
        width=width,
        columns=local // info.itemsize,
        pieces=tuple(pieces),
        direct=local == packed and all(piece.start == piece.offset for piece in pieces),
        keys_2W=np.stack([keyed_hash(word_numbers, lane) for lane in range(LANES)]),
        columns_C=np.concatenate([np.empty(0, np.int64), *(np.arange(start, stop) for start, stop in held)]),
    )


def _joined(spans: Sequence[Span], width: int) -> list[Span]:
    """Checked spans without empty ones, neighbours joined, in local order."""
    joined: list[Span] = []
    for start, stop in spans:
        if not 0 <= start <= stop <= width:
            raise _bad_spans(spans, f"inside a row of {width} columns", f"[{start}, {stop})")
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    ordered = sorted(joined)
    for left, right in pairwise(ordered):
        if left[1] > right[0]:
            raise _bad_spans(spans, "no column held twice", f"{left} and {right} overlap")
    return joined


def _bad_spans(spans: Sequence[Span], expected: str, found: str) -> UsageError:
    return UsageError(Code.BAD_ARGUMENT, "column spans do not fit the row", where=f"spans={tuple(spans)}", expected=expected, found=found)


if sys.byteorder != "little":  # words are read as they lie in memory
    raise ImportError("tracer needs a little-endian machine")
