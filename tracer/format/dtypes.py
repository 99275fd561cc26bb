"""The dtypes a trace can name, and how stored bytes of each become float32: numpy only.

Shape suffixes: N rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tracer.errors import Code, TraceFormatError
from tracer.format.schema import NARROW_INTEGER_COLUMNS

__all__ = ["DTYPES", "AnyArray", "DtypeInfo", "Kind", "as_storage", "decode_to_float32", "dtype_info"]

Kind = Literal["float", "integer", "bool", "complex", "packed"]
AnyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class DtypeInfo:
    """One dtype by torch's name without the prefix.

    ``itemsize``: bytes of one column of one row. Complex columns are counted singly, as pairs of reals, so
    complex64 has itemsize 4. Packed (sub-byte) dtypes count storage units: one column is one byte.
    """

    name: str
    itemsize: int
    kind: Kind

    @cached_property
    def storage(self) -> np.dtype[Any]:
        """Unsigned little-endian integer as wide as one column."""
        return np.dtype(f"<u{self.itemsize}")

    @cached_property
    def native(self) -> np.dtype[Any] | None:
        """numpy's own dtype of one column, None where numpy has none (bfloat16, float8, packed)."""
        return _NATIVE.get(self.name)

    def is_narrow(self, width: int) -> bool:
        """True where rows of this width are widened to int64 and keep raw values instead of statistics."""
        return self.kind in ("integer", "bool") and width <= NARROW_INTEGER_COLUMNS


def _table() -> dict[str, DtypeInfo]:
    kinds: dict[Kind, dict[str, int]] = {
        "float": {
            "float64": 8,
            "float32": 4,
            "float16": 2,
            "bfloat16": 2,
            "float8_e4m3fn": 1,
            "float8_e5m2": 1,
            "float8_e4m3fnuz": 1,
            "float8_e5m2fnuz": 1,
            "float8_e8m0fnu": 1,
        },
        "integer": {f"{sign}int{8 * size}": size for sign in ("", "u") for size in (1, 2, 4, 8)},
        "bool": {"bool": 1},
        "complex": {"complex128": 8, "complex64": 4, "complex32": 2},
        "packed": {"float4_e2m1fn_x2": 1, "bits8": 1, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1, "bits16": 2}
        | {f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    }
    return {name: DtypeInfo(name, size, kind) for kind, sizes in kinds.items() for name, size in sizes.items()}


DTYPES: Mapping[str, DtypeInfo] = MappingProxyType(_table())
"""Every dtype of the format by torch's name without the prefix."""

_NATIVE: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<") for name in DTYPES if name in {"float64", "float32", "float16"} or DTYPES[name].kind == "integer"
} | {
    "bool": np.dtype(np.bool_),
    "complex128": np.dtype("<f8"),
    "complex64": np.dtype("<f4"),
    "complex32": np.dtype("<f2"),
}


def dtype_info(name: str, where: str = "") -> DtypeInfo:
    """The dtype of that name.

    Raises ``TraceFormatError`` (segment-invalid) naming ``where``, the expected names and the one found.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise TraceFormatError(
            Code.SEGMENT_INVALID,
            "unknown dtype",
            where=where,
            expected=", ".join(DTYPES),
            found=repr(name),
            remedy="read the trace with the tracer version that wrote it, or a newer one",
        ) from None


def as_storage(rows: AnyArray, info: DtypeInfo) -> AnyArray:
    """The same bytes as unsigned integers, one per column; a view wherever the memory allows it.

    ``rows``: any array whose items are one column wide (floats, ints, stored bits), or one complex number
    wide (then the last axis doubles), or raw uint8 bytes (then the last axis shrinks by the itemsize).
    Raises ``ValueError`` where the bytes do not make whole columns.
    """
    if not rows.dtype.isnative:
        rows = rows.astype(rows.dtype.newbyteorder("="))
    size = rows.dtype.itemsize
    if size == info.itemsize and rows.dtype.kind != "c":
        return rows.view(info.storage)
    if info.kind == "complex" and rows.dtype.kind == "c" and size == 2 * info.itemsize:
        return _last_axis_contiguous(rows).view(info.storage)
    if rows.dtype == np.uint8 and rows.shape[-1] % info.itemsize == 0:
        return _last_axis_contiguous(rows).view(info.storage)
    raise ValueError(f"an array of {rows.dtype} with {rows.shape[-1]} columns does not hold whole columns of {info.name}")


def _last_axis_contiguous(rows: AnyArray) -> AnyArray:
    if rows.shape[-1] <= 1 or rows.strides[-1] == rows.dtype.itemsize:
        return rows
    return np.ascontiguousarray(rows)


def decode_to_float32(raw: AnyArray, dtype: str) -> npt.NDArray[np.float32]:
    """Stored bytes as float32, the last axis being columns; a new array unless ``raw`` is float32 already.

    ``raw``: as for ``as_storage``. float64 and integers are rounded to nearest, overflow gives inf.
    Raises ``ValueError`` for packed dtypes, which have no values of their own.
    """
    info = dtype_info(dtype)
    storage = as_storage(np.asarray(raw), info)
    if info.native is not None:
        with np.errstate(over="ignore"):
            return storage.view(info.native).astype(np.float32, copy=False)
    if dtype == "bfloat16":
        bits = storage.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return float8_values(dtype)[storage]


_FLOAT8_LAYOUTS: dict[str, tuple[int, int, int]] = {  # exponent bits, mantissa bits, exponent bias
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}


@cache
def float8_values(dtype: str) -> npt.NDArray[np.float32]:
    """All 256 values of an 8-bit float, float32 (256,), read-only. Raises ``ValueError`` for any other dtype."""
    if dtype == "float8_e8m0fnu":
        values = [math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan]
    elif dtype in _FLOAT8_LAYOUTS:
        values = [_float8_value(byte, dtype) for byte in range(256)]
    else:
        raise ValueError(f"{dtype} has no float values")
    table = np.array(values, np.float64).astype(np.float32)
    table.flags.writeable = False
    return table


def _float8_value(byte: int, dtype: str) -> float:
    exponent_bits, mantissa_bits, bias = _FLOAT8_LAYOUTS[dtype]
    magnitude = byte & 0x7F
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    if dtype.endswith("fnuz"):
        if byte == 0x80:
            return math.nan
    elif dtype == "float8_e4m3fn":
        if magnitude == 0x7F:
            return math.nan
    elif exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else math.copysign(math.inf, -(byte >> 7))
    scale = max(exponent, 1) - bias - mantissa_bits
    value = math.ldexp(mantissa + ((1 << mantissa_bits) if exponent else 0), scale)
    return -value if byte >> 7 else value
