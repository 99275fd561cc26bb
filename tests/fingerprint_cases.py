"""Rows of every dtype and what a fingerprint of them is checked for, shared by the fingerprint tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from tests.fingerprint_reference import ITEMSIZE, Reference, is_narrow, reference
from tracer.format.fingerprint import Fingerprints
from tracer.format.schema import Span

DTYPES = tuple(ITEMSIZE)
FLOATS = tuple(name for name in DTYPES if name.startswith(("float", "bfloat")) and name != "float4_e2m1fn_x2")


def stored_rows(dtype: str, rows: int, columns: int, seed: int, *, wild: bool = True) -> npt.NDArray[np.uint8]:
    """Stored bytes of random rows, uint8 (rows, columns * itemsize): plausible values, and where ``wild`` a tenth of
    random bit patterns (NaN payloads, infinities, subnormals), kept below 2^64 where sums could overflow."""
    random = np.random.default_rng(seed)
    size = ITEMSIZE[dtype]
    if dtype == "bool":
        return random.integers(0, 2, (rows, columns), np.uint8)
    patterns = random.integers(0, 256, (rows, columns, size), np.uint8)
    native = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}
    values = random.standard_normal((rows, columns))
    if dtype in native:
        plausible = values.astype(native[dtype])[..., None].view(np.uint8)
    elif dtype == "bfloat16":
        plausible = np.ascontiguousarray(values.astype("<f4")[..., None].view(np.uint8)[..., 2:])
    else:
        if dtype == "float8_e8m0fnu":
            patterns[(patterns > 0xB0) & (patterns < 0xFF)] -= 0x50
        return patterns.reshape(rows, -1)
    if wild:
        large = patterns[..., -1] & 0x7F  # the exponent's high bits
        patterns[..., -1] = np.where((large > 0x5E) & (large < 0x7F), patterns[..., -1] & 0x9F, patterns[..., -1])
        pick = random.random((rows, columns)) < 0.1
        plausible[pick] = patterns[pick]
    return np.ascontiguousarray(plausible).reshape(rows, -1)


@st.composite
def splits(draw: st.DrawFn, columns: int, ranks: int = 3) -> list[tuple[Span, ...]]:
    """``[0, columns)`` cut into spans anywhere, dealt to ranks in any order; some ranks may hold nothing."""
    cuts = sorted(draw(st.lists(st.integers(0, columns), max_size=6)))
    spans = draw(st.permutations(list(zip([0, *cuts], [*cuts, columns], strict=True))))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=len(spans), max_size=len(spans)))
    return [tuple(span for span, owner in zip(spans, owners, strict=True) if owner == rank) or ((0, 0),) for rank in range(ranks)]


def held(raw: npt.NDArray[np.uint8], dtype: str, spans: Sequence[Span]) -> npt.NDArray[np.uint8]:
    """The bytes of these columns, in the order of the spans."""
    size = ITEMSIZE[dtype]
    return np.concatenate([raw[:, start * size : stop * size] for start, stop in spans], axis=1)


def joined(parts: Sequence[Fingerprints]) -> Fingerprints:
    """Fingerprints of whole rows from those of their slices, as a reader adds them."""
    digest = np.stack([part.digest_N2 for part in parts]).sum(axis=0, dtype=np.uint64)
    if parts[0].sketch_N16 is None:
        return Fingerprints(digest)
    names = ("sketch_N16", "sum_squares_N", "abs_max_N", "nonfinite_N")
    columns: dict[str, list[Any]] = {name: [getattr(part, name) for part in parts] for name in names}
    return Fingerprints(
        digest,
        np.sum(columns["sketch_N16"], axis=0, dtype=np.float32),
        np.sum(columns["sum_squares_N"], axis=0),
        np.max(columns["abs_max_N"], axis=0),
        np.sum(columns["nonfinite_N"], axis=0, dtype=np.uint32),
    )


def references(raw: npt.NDArray[np.uint8], dtype: str, start: int = 0, width: int | None = None) -> list[Reference]:
    """The slow fingerprint of every row."""
    return [reference(row.tobytes(), dtype, start, width) for row in raw]


def assert_matches(found: Fingerprints, expected: Sequence[Reference], dtype: str, width: int) -> None:
    """Every row is right: digest, maximum and count exactly, squares to 1e-12, buckets to 1e-6 of the magnitudes."""
    assert found.digest_N2.tolist() == [list(row.digest) for row in expected]
    if is_narrow(dtype, width) or dtype == "float4_e2m1fn_x2":
        assert found.sketch_N16 is None
        assert (found.values_NC is None) == (dtype == "float4_e2m1fn_x2")
        return
    assert found.sketch_N16 is not None
    assert found.sum_squares_N is not None
    assert found.abs_max_N is not None
    assert found.nonfinite_N is not None
    assert found.values_NC is None
    assert found.nonfinite_N.tolist() == [row.nonfinite for row in expected]
    assert found.abs_max_N.tolist() == [float(row.abs_max) for row in expected]
    for row, squares, buckets in zip(expected, found.sum_squares_N.tolist(), found.sketch_N16.tolist(), strict=True):
        assert abs(squares - float(row.sum_squares)) <= 1e-12 * float(row.sum_squares)
        limit = 1e-6 * float(row.scale)
        assert all(abs(value - float(exact)) <= limit for value, exact in zip(buckets, row.sketch, strict=True))


def assert_equal(left: Fingerprints, right: Fingerprints, scale: float = 1e-6) -> None:
    """Two paths agree: digests, maxima, counts and values bitwise, the rest up to the order of summation."""
    np.testing.assert_array_equal(left.digest_N2, right.digest_N2)
    assert (left.sketch_N16 is None, left.values_NC is None) == (right.sketch_N16 is None, right.values_NC is None)
    if left.values_NC is not None and right.values_NC is not None:
        np.testing.assert_array_equal(left.values_NC, right.values_NC)
    if left.sketch_N16 is None or right.sketch_N16 is None or left.sum_squares_N is None or right.sum_squares_N is None:
        return
    np.testing.assert_array_equal(left.abs_max_N, right.abs_max_N)
    np.testing.assert_array_equal(left.nonfinite_N, right.nonfinite_N)
    np.testing.assert_allclose(left.sum_squares_N, right.sum_squares_N, rtol=1e-12)
    norms = np.sqrt(left.sum_squares_N.max(initial=0)) * np.sqrt(left.sketch_N16.size + 1)
    np.testing.assert_allclose(left.sketch_N16, right.sketch_N16, rtol=1e-5, atol=scale * norms)
