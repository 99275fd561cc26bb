"""The dtype table and the decoding of stored bytes to float32."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from tests.fingerprint_cases import FLOATS, stored_rows
from tests.fingerprint_reference import ITEMSIZE, float8_value, float32_value
from tracer.errors import Code, TraceFormatError
from tracer.format.dtypes import DTYPES, as_storage, decode_to_float32, dtype_info, float8_values

FLOAT8 = [name for name in DTYPES if name.startswith("float8")]


def test_sizes_and_kinds() -> None:
    """Every dtype has the column size of the reference, and complex columns are counted singly."""
    assert {name: DTYPES[name].itemsize for name in ITEMSIZE} == ITEMSIZE
    assert {info.kind for info in DTYPES.values()} == {"float", "integer", "bool", "complex", "packed"}
    assert all(info.name == name and info.storage.itemsize == info.itemsize for name, info in DTYPES.items())


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_table_agrees_with_torch(name: str) -> None:
    """Names are torch's, with torch's sizes, halved for complex."""
    if not hasattr(torch, name):
        pytest.skip("this torch has no such dtype")
    dtype: torch.dtype = getattr(torch, name)
    assert str(dtype) == f"torch.{name}"
    assert dtype.itemsize == DTYPES[name].itemsize * (2 if dtype.is_complex else 1)


def test_every_torch_dtype_is_known() -> None:
    """No dtype of this torch is missing, save quantized ones, which have no memory of plain numbers."""
    names = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {name for name in names - set(DTYPES) if not name.startswith(("q", "uint1x", "bit"))} <= set()
    assert not {name for name in names - set(DTYPES) if name.startswith("bits")}


@pytest.mark.parametrize("name", FLOAT8)
def test_all_values_of_8_bit_floats(name: str) -> None:
    """All 256 bytes decode to what the definition says, and to what torch says."""
    found = float8_values(name)
    for byte, value in enumerate(found.tolist()):
        exact = float8_value(byte, name)
        assert (value == exact) if exact is not None else not math.isfinite(value)
    by_torch = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float().numpy()
    np.testing.assert_array_equal(found, by_torch)


@pytest.mark.parametrize("name", [*FLOATS, "int8", "uint16", "int64", "uint64", "bool", "complex64"])
def test_decoding_matches_the_reference(name: str) -> None:
    """Random bit patterns become the nearest float32, or something not finite."""
    raw = stored_rows(name, 2, 60, 4)
    found = decode_to_float32(raw, name)
    assert (found.dtype, found.shape) == (np.dtype(np.float32), (2, 60))
    for row, line in zip(raw, found.tolist(), strict=True):
        size = ITEMSIZE[name]
        for at, value in enumerate(line):
            exact = float32_value(row[at * size : (at + 1) * size].tobytes(), name)
            assert (value == exact) if exact is not None else not math.isfinite(value)


def test_decoding_keeps_float32_bits() -> None:
    """float32 is returned as it is, NaN payloads included."""
    raw = np.array([[0x7FA00001, 0xFF800000, 0x80000000]], np.uint32)
    assert decode_to_float32(raw, "float32").view(np.uint32).tolist() == raw.tolist()


def test_infinities_of_float8_e5m2_keep_their_sign() -> None:
    """The two infinities decode as such."""
    assert decode_to_float32(np.array([[0x7C, 0xFC]], np.uint8), "float8_e5m2").tolist() == [[math.inf, -math.inf]]


def test_storage_from_values_bytes_and_pairs() -> None:
    """Values, stored bits, raw bytes and complex numbers give the same storage."""
    values = np.array([[1.5, -2.0, 3.25, 0.0]], np.float32)
    info = dtype_info("float32")
    expected = [list(struct.unpack("<4I", values.tobytes()))]
    assert as_storage(values, info).tolist() == expected
    assert as_storage(values.view(np.int32), info).tolist() == expected
    assert as_storage(values.view(np.uint8), info).tolist() == expected
    assert as_storage(values.astype(">f4"), info).tolist() == expected
    assert as_storage(values.view(np.complex64), dtype_info("complex64")).tolist() == expected
    with pytest.raises(ValueError, match="whole columns"):
        as_storage(values.view(np.uint8)[:, :-1], info)
    with pytest.raises(ValueError, match="whole columns"):
        as_storage(values, dtype_info("bfloat16"))


def test_packed_dtypes_have_no_values() -> None:
    """Decoding a sub-byte dtype is refused."""
    with pytest.raises(ValueError, match="no float values"):
        decode_to_float32(np.zeros((1, 4), np.uint8), "float4_e2m1fn_x2")


def test_unknown_names_are_refused() -> None:
    """An unknown dtype is a format error with place, expected names and the name found."""
    with pytest.raises(TraceFormatError) as raised:
        dtype_info("float9", "segment-000000.safetensors, layers.0.attn.out")
    assert (raised.value.code, raised.value.found) == (Code.SEGMENT_INVALID, "'float9'")
    assert raised.value.where == "segment-000000.safetensors, layers.0.attn.out"
    assert "float8_e8m0fnu" in raised.value.expected
