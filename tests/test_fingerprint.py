"""Fingerprints of numpy rows: against the golden file, the slow reference, and what a fingerprint is for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fingerprint_cases import DTYPES, FLOATS, assert_equal, assert_matches, held, joined, references, splits, stored_rows
from tests.fingerprint_reference import ITEMSIZE, GoldenRow, bucket, golden, golden_rows, is_narrow, key, reference, sign
from tracer.errors import Code, TraceFormatError, UsageError
from tracer.format.fingerprint import Fingerprints, digest_of_rows, fingerprint_rows, row_distance
from tracer.format.schema import Span

F32 = np.float32


def normal(rows: int, columns: int, seed: int = 1) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Random float32 rows."""
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(F32)


def values_of(found: Fingerprints) -> list[list[int]]:
    """Raw values, which must be there."""
    assert found.values_NC is not None
    return [[int(value) for value in row] for row in found.values_NC]


def test_reference_equals_golden_constants() -> None:
    """The slow reference derives the keys, buckets and signs of the golden file."""
    assert [bucket(column) for column in range(len(golden()["buckets"]))] == golden()["buckets"]
    assert [sign(column) for column in range(len(golden()["signs"]))] == golden()["signs"]
    assert all(key(entry["j"], entry["seed"]) == int(entry["key"], 16) for entry in golden()["keys"])


@pytest.mark.parametrize("row", golden_rows(), ids=lambda row: row.name)
def test_golden(row: GoldenRow) -> None:
    """The slow reference equals the golden row, and the numpy path equals both."""
    expected = reference(row.raw, row.dtype, row.start, row.width)
    assert expected.digest == row.digest
    assert [float(F32(float(value))) for value in expected.sketch] == list(row.sketch)
    assert (float(expected.abs_max), expected.nonfinite) == (row.abs_max, row.nonfinite)
    assert float(expected.sum_squares) == pytest.approx(row.sum_squares, rel=1e-12)
    assert is_narrow(row.dtype, row.width) == row.widened
    raw = np.frombuffer(row.raw, np.uint8)[None]
    found = fingerprint_rows(raw, row.dtype, width=row.width, spans=((row.start, row.start + row.columns),))
    assert_matches(found, [expected], row.dtype, row.width)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_rows_match_the_reference(data: st.DataObject) -> None:
    """Rows of any dtype, width and bit pattern, as any slice of a wider row, match the slow reference."""
    dtype = data.draw(st.sampled_from(DTYPES))
    columns = data.draw(st.integers(0, 90))
    start = data.draw(st.integers(0, 70))
    width = start + columns + data.draw(st.integers(0, 20))
    raw = stored_rows(dtype, data.draw(st.integers(1, 3)), columns, data.draw(st.integers(0, 999)))
    found = fingerprint_rows(raw, dtype, width=width, spans=((start, start + columns),))
    assert_matches(found, references(raw, dtype, start, width), dtype, width)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_slices_add_up(data: st.DataObject) -> None:
    """Columns cut anywhere and dealt to ranks in any order give the whole row's fingerprint when added."""
    dtype = data.draw(st.sampled_from(DTYPES))
    width = data.draw(st.integers(0, 150))
    raw = stored_rows(dtype, 2, width, data.draw(st.integers(0, 999)))
    parts = [fingerprint_rows(held(raw, dtype, spans), dtype, width=width, spans=spans) for spans in data.draw(splits(width))]
    assert_matches(joined(parts), references(raw, dtype), dtype, width) if not is_narrow(dtype, width) else None
    np.testing.assert_array_equal(joined(parts).digest_N2, fingerprint_rows(raw, dtype).digest_N2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_row_order_does_not_matter(data: st.DataObject) -> None:
    """Rows in another order, or fewer of them, have the same fingerprints."""
    dtype = data.draw(st.sampled_from(DTYPES))
    rows = data.draw(st.integers(1, 80))
    raw = stored_rows(dtype, rows, data.draw(st.integers(1, 300)), 7, wild=False)
    index = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=90)), np.int64)
    assert_equal(fingerprint_rows(raw, dtype).take(index), fingerprint_rows(raw[index], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5000), (70, 1030), (1, 300_000), (5000, 7), (129, 257)])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_shapes_equal_small_pieces(dtype: str, shape: tuple[int, int], threads: int) -> None:
    """Shapes of several tiles, blocks and threads give what single rows and short column slices give."""
    rows, columns = shape
    raw = stored_rows(dtype, rows, columns, 3, wild=False)
    whole = fingerprint_rows(raw, dtype, threads=threads)
    some = np.unique(np.linspace(0, rows - 1, 4, dtype=np.int64))
    if columns <= 64 or dtype == "float4_e2m1fn_x2":
        assert_equal(whole.take(some), fingerprint_rows(raw[some], dtype))
        return
    cuts = [0, columns // 3, 2 * columns // 3 + 1, columns]
    pieces = [((start, stop),) for start, stop in pairwise(cuts)]
    parts = [fingerprint_rows(held(raw[some], dtype, spans), dtype, width=columns, spans=spans) for spans in pieces]
    assert_equal(whole.take(some), joined(parts))


def test_several_blocks_on_threads_equal_one() -> None:
    """A tensor of many blocks gives the same digests on any number of threads, every row once."""
    rows = normal(700, 1024)
    rows[5, 9], rows[600, 1] = np.inf, np.nan
    one, many = fingerprint_rows(rows, "float32"), fingerprint_rows(rows, "float32", threads=4)
    assert_equal(one, many)
    assert one.nonfinite_N is not None
    assert one.nonfinite_N.nonzero()[0].tolist() == [5, 600]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nonfinite_counts_and_enters_as_zero(dtype: str) -> None:
    """What is not finite is counted per row and leaves the statistics of the rest, in any tile."""
    raw = stored_rows(dtype, 40, 600, 5, wild=dtype not in ("float8_e4m3fn",))
    assert_matches(fingerprint_rows(raw, dtype), references(raw, dtype), dtype, 600)


def test_float64_beyond_float32_is_nonfinite() -> None:
    """A float64 that overflows float32 counts as not finite although it is finite itself."""
    found = fingerprint_rows(np.array([[1e300, 2.0]]), "float64")
    assert_matches(found, [reference(np.array([1e300, 2.0]).tobytes(), "float64")], "float64", 2)
    assert found.nonfinite_N == np.array([1])


def test_complex_rows_are_pairs_of_reals() -> None:
    """A complex row has the statistics of its real and imaginary parts in turn, and twice the columns."""
    rows = normal(3, 20)
    pairs = fingerprint_rows(rows.view(np.complex64), "complex64", width=20)
    assert_equal(pairs, fingerprint_rows(rows, "float32"))
    with pytest.raises(UsageError):
        fingerprint_rows(rows.view(np.complex64), "complex64", width=10)


# What hashes of whole tensors get wrong.


def test_permuted_rows_differ() -> None:
    """The same rows in another order have the same row digests but another digest of the whole."""
    found = fingerprint_rows(normal(4, 32), "float32")
    swapped = found.take(np.array([1, 0, 2, 3]))
    assert digest_of_rows(found.digest_N2, np.arange(4)) != digest_of_rows(swapped.digest_N2, np.arange(4))


def test_permuted_columns_differ() -> None:
    """Swapping two columns changes both lanes."""
    rows = normal(1, 64)
    swapped = rows.copy()
    swapped[0, [3, 40]] = rows[0, [40, 3]]
    assert (fingerprint_rows(rows, "float32").digest_N2 != fingerprint_rows(swapped, "float32").digest_N2).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_flipped_signs_differ(dtype: str) -> None:
    """Flipping any number of signs changes both lanes, an even number too."""
    size = ITEMSIZE[dtype]
    raw = stored_rows(dtype, 1, 96, 2, wild=False)
    seen = {tuple(fingerprint_rows(raw, dtype).digest_N2[0].tolist())}
    for count in (1, 2, 4, 96):
        flipped = raw.copy()
        flipped[:, size - 1 : count * size : size] ^= 0x80
        seen.add(tuple(fingerprint_rows(flipped, dtype).digest_N2[0].tolist()))
    assert len(seen) == 5
    assert len({lane for pair in seen for lane in pair}) == 10


def test_even_repeats_do_not_cancel() -> None:
    """Equal words repeated an even number of times, in a row or as rows, leave a digest of their own."""
    word = np.full((1, 2), 1.5, F32)
    digests = [fingerprint_rows(np.tile(word, count), "float32").digest_N2[0].tolist() for count in (1, 2, 4)]
    assert len({tuple(pair) for pair in digests}) == 3
    twice = np.repeat(fingerprint_rows(word, "float32").digest_N2, 2, axis=0)
    four = np.repeat(fingerprint_rows(word, "float32").digest_N2, 4, axis=0)
    assert 0 not in digest_of_rows(twice, np.arange(2))
    assert digest_of_rows(twice, np.arange(2)) != digest_of_rows(four, np.arange(4))


@pytest.mark.parametrize("dtype", FLOATS)
def test_equality_is_bitwise(dtype: str) -> None:
    """A NaN equals the same NaN; every single flipped bit of a row differs, +0 from -0 too."""
    size = ITEMSIZE[dtype]
    raw = np.full((1, 40 * size), 0xFF, np.uint8)
    np.testing.assert_array_equal(fingerprint_rows(raw, dtype).digest_N2, fingerprint_rows(raw.copy(), dtype).digest_N2)
    zero = np.zeros((1, 40 * size), np.uint8)
    seen = set()
    for bit in range(8 * size):
        flipped = zero.copy()
        flipped[0, 7 * size + bit // 8] ^= 1 << bit % 8
        seen.add(tuple(fingerprint_rows(flipped, dtype).digest_N2[0].tolist()))
    assert len(seen) == 8 * size
    assert (0, 0) not in seen


def test_rows_are_read_before_the_call_returns() -> None:
    """Reusing the buffer afterwards changes nothing that was returned."""
    rows, ids = normal(3, 128), np.arange(12).reshape(3, 4)
    found, values = fingerprint_rows(rows, "float32"), fingerprint_rows(ids, "int64")
    before = fingerprint_rows(rows.copy(), "float32")
    rows[:], ids[:] = -1, -1
    assert_equal(found, before, scale=0)
    assert values_of(values) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# Narrow integers, packed dtypes, empty rows.


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_narrow_integers_of_any_size_are_one(dtype: str) -> None:
    """The same ids in any integer dtype have one digest and keep the same values."""
    ids = np.array([[3, 120, 7], [0, 1, 2]])
    found, wide = fingerprint_rows(ids.astype(dtype), dtype), fingerprint_rows(ids, "int64")
    assert_equal(found, wide)
    assert values_of(found) == ids.tolist()


def test_narrow_slices_keep_their_own_values() -> None:
    """A slice of a narrow integer row keeps the columns it holds, and digests add up."""
    ids = np.arange(24, dtype=np.int32).reshape(2, 12) - 5
    spans: tuple[Span, ...] = ((8, 12), (2, 3))
    part = fingerprint_rows(np.concatenate([ids[:, 8:12], ids[:, 2:3]], axis=1), "int32", width=12, spans=spans)
    rest = fingerprint_rows(np.concatenate([ids[:, :2], ids[:, 3:8]], axis=1), "int32", width=12, spans=((0, 2), (3, 8)))
    assert values_of(part) == [[3, 4, 5, 6, -3], [15, 16, 17, 18, 9]]
    np.testing.assert_array_equal(part.digest_N2 + rest.digest_N2, fingerprint_rows(ids, "int32").digest_N2)


def test_width_decides_what_is_narrow() -> None:
    """Few columns of a wide integer row keep statistics: the whole row's width counts, up to 64."""
    ids = np.arange(8)[None]
    assert fingerprint_rows(ids, "int64", width=65, spans=((0, 8),)).sketch_N16 is not None
    assert fingerprint_rows(ids, "int64", width=64, spans=((0, 8),)).values_NC is not None
    assert fingerprint_rows(np.ones((1, 65), np.bool_), "bool").sketch_N16 is not None
    assert fingerprint_rows(np.ones((1, 64), np.bool_), "bool").values_NC is not None


def test_packed_dtypes_keep_a_digest_only() -> None:
    """Sub-byte dtypes have a digest of their bytes and nothing else."""
    found = fingerprint_rows(np.arange(10, dtype=np.uint8)[None], "float4_e2m1fn_x2")
    assert found.digest_N2.tolist() == [list(reference(bytes(range(10)), "float4_e2m1fn_x2").digest)]
    assert (found.sketch_N16, found.values_NC) == (None, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 100), (3, 0), (0, 0)])
def test_empty_rows(dtype: str, shape: tuple[int, int]) -> None:
    """No rows and no columns are fine: digests and statistics of nothing are zero."""
    found = fingerprint_rows(np.empty((shape[0], shape[1] * ITEMSIZE[dtype]), np.uint8), dtype, width=100, spans=((0, shape[1]),))
    assert len(found) == shape[0]
    assert not found.digest_N2.any()
    if found.sketch_N16 is not None:
        assert found.sketch_N16.shape == (shape[0], 16)
        assert not found.sketch_N16.any()


def test_columns_beyond_the_spans_are_padding() -> None:
    """Local columns past those held, such as vocabulary padding, are not looked at."""
    rows = normal(2, 70)
    rows[:, 66:] = np.nan
    assert_equal(fingerprint_rows(rows, "float32", width=66), fingerprint_rows(rows[:, :66], "float32"))


@pytest.mark.parametrize("order", ["C", "F"])
def test_any_strides(order: str) -> None:
    """Transposed, sliced, reversed, broadcast and foreign-endian memory give what a plain copy gives."""
    base = np.asarray(normal(60, 300), order="F" if order == "F" else "C")
    views = [base[::2, 3:200], base[:, ::3], base[::-1, ::-1], np.broadcast_to(base[3], (5, 300)), base.astype(">f4")]
    for view in views:
        assert_equal(fingerprint_rows(view, "float32"), fingerprint_rows(np.array(view, "<f4", order="C"), "float32"))
    halves = base.astype(np.float16)
    assert_equal(fingerprint_rows(halves[:, 1:288], "float16"), fingerprint_rows(halves[:, 1:288].copy(), "float16"))


# Distance.


def test_distance_is_exact_up_to_16_columns() -> None:
    """Sixteen columns fall into sixteen buckets, so the distance is the true one."""
    x, y = normal(50, 16, 1), normal(50, 16, 2)
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    largest = np.maximum(np.linalg.norm(wide_x, axis=1), np.linalg.norm(wide_y, axis=1))
    found = row_distance(fingerprint_rows(x, "float32"), fingerprint_rows(y, "float32"))
    np.testing.assert_allclose(found, np.linalg.norm(wide_x - wide_y, axis=1) / largest, rtol=1e-6)


def test_distance_is_unbiased() -> None:
    """The squared estimate is right on average over many independent rows, and good to about 35 % for one."""
    x = normal(4000, 1000, 1)
    noise = normal(4000, 1000, 2) * F32(0.01)
    estimate = np.square(row_distance(fingerprint_rows(x, "float32"), fingerprint_rows(x + noise, "float32")))
    larger = np.maximum(np.square(x).sum(axis=1), np.square(x + noise).sum(axis=1))
    true = np.square((x + noise).astype(np.float64) - x).sum(axis=1) / larger
    ratio = estimate / true
    assert ratio.mean() == pytest.approx(1, abs=0.02)
    assert ratio.std() == pytest.approx(np.sqrt(2 / 16), abs=0.03)
    assert np.abs(ratio.reshape(40, 100).mean(axis=1) - 1).max() < 0.15


@pytest.mark.parametrize("head", [16, 64, 128, 256])
def test_one_bad_column_per_head_is_seen(head: int) -> None:
    """A difference in the same column of every head, all of one sign, does not cancel."""
    x = normal(1, 32 * head)
    y = x.copy()
    y[0, 5::head] += F32(1)
    estimate = row_distance(fingerprint_rows(x, "float32"), fingerprint_rows(y, "float32"))[0]
    true = np.sqrt(32) / np.linalg.norm(y if np.linalg.norm(y) > np.linalg.norm(x) else x)
    assert 0.4 < estimate / true < 2


def test_distance_of_a_flipped_sign_is_two() -> None:
    """A row against its negative is twice its norm apart, within what one sketch can tell."""
    x = normal(200, 512)
    found = row_distance(fingerprint_rows(x, "float32"), fingerprint_rows(-x, "float32"))
    assert np.sqrt(np.square(found).mean()) == pytest.approx(2, rel=0.05)


def test_undefined_distances_are_nan() -> None:
    """Two zero rows, and a bucket that overflowed, have no distance; equal rows have distance 0."""
    rows = np.zeros((3, 64), F32)
    rows[1] = np.finfo(F32).max
    rows[2] = 1
    other = rows.copy()
    other[0] = -0.0
    other[1] *= sign_row(64)
    found = row_distance(fingerprint_rows(rows, "float32"), fingerprint_rows(other, "float32"))
    assert np.isnan(found).tolist() == [True, True, False]
    assert found[2] == 0
    with pytest.raises(UsageError, match="no sketch"):
        row_distance(fingerprint_rows(np.ones((1, 3), np.int64), "int64"), fingerprint_rows(rows[:1], "float32"))


def sign_row(columns: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Signs that make every bucket add up."""
    return np.array([sign(column) for column in range(columns)], F32)


def test_large_norms_square_in_float64() -> None:
    """Sketches beyond 1e19 are squared without overflow."""
    rows = np.full((1, 16), 1e30, F32)
    assert row_distance(fingerprint_rows(rows, "float32"), fingerprint_rows(rows * F32(2), "float32")) == pytest.approx(0.5)


# Digest of many rows, refusals.


def test_digest_of_rows_is_the_keyed_sum() -> None:
    """The digest of a parameter is the sum of its rows weighted by their global index, and parts add up."""
    digests = fingerprint_rows(normal(6, 24), "float32").digest_N2
    rows = np.array([4, 0, 9, 2, 7, 1])
    weighted = [[key(row, 4) * lane for lane in pair] for row, pair in zip(rows.tolist(), digests.tolist(), strict=True)]
    expected = tuple(sum(lane) % 2**64 for lane in zip(*weighted, strict=True))
    assert digest_of_rows(digests, rows) == expected
    first, second = digest_of_rows(digests[:2], rows[:2]), digest_of_rows(digests[2:], rows[2:])
    assert tuple((a + b) % 2**64 for a, b in zip(first, second, strict=True)) == expected
    assert digest_of_rows(np.empty((0, 2), np.uint64), []) == (0, 0)


@pytest.mark.parametrize(
    ("width", "spans", "expected"),
    [
        (8, ((0, 9),), "inside a row of 8 columns"),
        (8, ((4, 2),), "inside a row"),
        (8, ((0, 4), (3, 8)), "held twice"),
        (8, ((2, 4), (0, 4)), "held twice"),
        (9, (), r"\(N, 9\)"),
    ],
)
def test_wrong_spans_are_refused(width: int, spans: tuple[Span, ...], expected: str) -> None:
    """Spans outside the row, backwards or overlapping, and rows with too few columns, are errors that say so."""
    with pytest.raises(UsageError, match=expected) as raised:
        fingerprint_rows(normal(2, 8), "float32", width=width, spans=spans)
    assert raised.value.code is Code.BAD_ARGUMENT


def test_unknown_dtype_is_refused() -> None:
    """A dtype the format does not know is a format error that lists those it knows."""
    with pytest.raises(TraceFormatError, match="bfloat16") as raised:
        fingerprint_rows(normal(2, 8), "float31")
    assert (raised.value.code, raised.value.found) == (Code.SEGMENT_INVALID, "'float31'")


def test_rows_must_be_two_dimensional() -> None:
    """One or three dimensions are refused rather than guessed at."""
    for shape in ((8,), (2, 2, 8)):
        with pytest.raises(UsageError, match="do not hold"):
            fingerprint_rows(np.zeros(shape, F32), "float32")
