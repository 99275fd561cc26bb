"""The fingerprint in slow, plain Python: one integer or fraction at a time, sharing no code with the package.

It is itself checked against ``fingerprint_golden.json``; every fast path is checked against both.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

MODULUS = 1 << 64
LARGEST = (2**24 - 1) * 2**104
ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "complex32": 2,
    "complex64": 4,
    "complex128": 8,
    "float4_e2m1fn_x2": 1,
}
"""Bytes per column, complex columns counted singly."""
NARROW = 64
Value = Fraction | None


@dataclass(frozen=True)
class Reference:
    """What a slice of one row must give; ``sketch`` and ``sum_squares`` are exact, ``scale`` is the sum of magnitudes."""

    digest: tuple[int, int]
    sketch: tuple[Fraction, ...]
    sum_squares: Fraction
    abs_max: Fraction
    nonfinite: int
    scale: Fraction


@dataclass(frozen=True)
class GoldenRow:
    """One row of the golden file."""

    name: str
    dtype: str
    columns: int
    start: int
    width: int
    raw: bytes
    widened: bool
    digest: tuple[int, int]
    sketch: tuple[float, ...]
    sum_squares: float
    abs_max: float
    nonfinite: int


@cache
def golden() -> dict[str, Any]:
    """The golden file as parsed JSON."""
    parsed: dict[str, Any] = json.loads((Path(__file__).parent / "fingerprint_golden.json").read_text())
    return parsed


@cache
def golden_rows() -> tuple[GoldenRow, ...]:
    """All rows of the golden file."""
    return tuple(
        GoldenRow(
            row["name"],
            row["dtype"],
            row["columns"],
            row["start_column"],
            row["row_columns"],
            bytes.fromhex(row["bytes"]),
            row["widened"],
            (int(row["digest"][0], 16), int(row["digest"][1], 16)),
            tuple(row["sketch"]),
            row["sum_squares"],
            row["abs_max"],
            row["nonfinite"],
        )
        for row in golden()["rows"]
    )


@cache
def key(number: int, seed: int) -> int:
    """``xxh3_64(le64(number), seed)`` by the xxhash package."""
    return xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"), seed=seed)


def bucket(column: int) -> int:
    """Bucket of a global column."""
    return (column + (key(column // 16, 2) & 15)) % 16


def sign(column: int) -> int:
    """Sign of a global column."""
    return 1 if key(column, 3) & 1 else -1


def is_narrow(dtype: str, width: int) -> bool:
    """Whether rows of this width keep their values."""
    return ("int" in dtype or dtype == "bool") and width <= NARROW


def reference(raw: bytes, dtype: str, start: int = 0, width: int | None = None) -> Reference:
    """The fingerprint of the slice that begins at global column ``start`` of a row of ``width`` columns."""
    items = [raw[at : at + ITEMSIZE[dtype]] for at in range(0, len(raw), ITEMSIZE[dtype])]
    stored = raw
    itemsize = ITEMSIZE[dtype]
    if is_narrow(dtype, len(items) if width is None else width):
        stored = b"".join((integer(item, dtype) % MODULUS).to_bytes(8, "little") for item in items)
        itemsize = 8
    values: list[Value] = [] if dtype == "float4_e2m1fn_x2" else [float32_value(item, dtype) for item in items]
    finite = [(start + index, value) for index, value in enumerate(values) if value is not None]
    sketch = [Fraction(0)] * 16
    for column, value in finite:
        sketch[bucket(column)] += sign(column) * value
    return Reference(
        digest=(digest(stored, start * itemsize, 0), digest(stored, start * itemsize, 1)),
        sketch=tuple(sketch),
        sum_squares=sum((value * value for _, value in finite), Fraction(0)),
        abs_max=max((abs(value) for _, value in finite), default=Fraction(0)),
        nonfinite=len(values) - len(finite),
        scale=sum((abs(value) for _, value in finite), Fraction(0)),
    )


def digest(stored: bytes, first_byte: int, lane: int) -> int:
    """One lane, byte by byte: byte p counts ``key(p // 4) * byte * 2^(8 (p mod 4))``."""
    return sum(key(at // 4, lane) * (byte << 8 * (at % 4)) for at, byte in enumerate(stored, first_byte)) % MODULUS


def integer(item: bytes, dtype: str) -> int:
    """The value of one integer or bool."""
    return int.from_bytes(item, "little", signed=dtype.startswith("int"))


def float32_value(item: bytes, dtype: str) -> Value:
    """The float32 nearest to one stored column, None where that is not finite."""
    if "int" in dtype or dtype == "bool":
        return nearest_float32(Fraction(integer(item, dtype)))
    formats = {"float64": "<d", "float32": "<f", "float16": "<e", "complex32": "<e", "complex64": "<f", "complex128": "<d"}
    if dtype in formats:
        (value,) = struct.unpack(formats[dtype], item)
    elif dtype == "bfloat16":
        (value,) = struct.unpack("<f", b"\0\0" + item)
    else:
        return float8_value(item[0], dtype)
    return nearest_float32(Fraction(value)) if math.isfinite(value) else None


def float8_value(byte: int, dtype: str) -> Value:
    """Value of an 8-bit float by its definition."""
    if dtype == "float8_e8m0fnu":
        return None if byte == 255 else Fraction(2) ** (byte - 127)
    mantissa_bits, bias = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15), "float8_e4m3fnuz": (3, 8), "float8_e5m2fnuz": (2, 16)}[dtype]
    magnitude = byte & 127
    missing = {"float8_e4m3fn": magnitude == 127, "float8_e5m2": magnitude >= 0x7C}.get(dtype, byte == 128)
    if missing:
        return None
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        value = Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    else:
        value = (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)
    return -value if byte >> 7 else value


def nearest_float32(value: Fraction) -> Value:
    """Round to nearest even float32; None beyond the largest."""
    if value == 0:
        return value
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(value / unit) * unit
    return rounded if abs(rounded) <= LARGEST else None
