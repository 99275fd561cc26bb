"""Fingerprints of rows: digest, sketch and statistics that add up over column slices.

What they mean is in ``docs/explanation/why-fingerprints.md``. This is their numpy form and everything a reader does
with them; the arithmetic is in ``fingerprint_kernel``. ``tracer.record.fingerprint_tensors`` takes them from tensors.

Shape suffixes: N rows, C columns held here; R rows of a comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tracer.errors import Code, UsageError
from tracer.format.dtypes import DTYPES, AnyArray, DtypeInfo, Kind, as_storage, decode_to_float32, dtype_info
from tracer.format.fingerprint_kernel import digest_rows, fingerprint_parts
from tracer.format.fingerprint_plan import Plan, keyed_hash, plan_for
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
        squares = np.maximum(x.sum_squares_R, y.sum_squares_R)
        distance: F64 = np.sqrt(apart / squares)
    distance[~np.isfinite(distance) | np.isinf(squares)] = np.nan
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
    if info.kind == "packed":
        return Fingerprints(digest_rows(plan.pack(storage_NC), plan.keys_2W))
    return Fingerprints(*fingerprint_parts(storage_NC, plan, threads))


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
    return Fingerprints(digest_rows(plan.pack(values_NC.view(np.uint64)), plan.keys_2W), values_NC=values_NC)
