"""Keys, signs and buckets by global position, and how slices are laid out in words."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.fingerprint_reference import bucket, golden, sign
from tracer.errors import UsageError
from tracer.format.fingerprint_plan import keyed_hash, plan_for, sketch_buckets, sketch_signs

U64 = st.integers(0, 2**64 - 1)


@given(st.lists(U64, max_size=5), U64)
def test_keyed_hash_is_xxh3(numbers: list[int], seed: int) -> None:
    """The vectorised hash equals xxh3_64 of the eight little-endian bytes, for any number and seed."""
    expected = [xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"), seed=seed) for number in numbers]
    assert keyed_hash(np.array(numbers, np.uint64), seed).tolist() == expected


def test_keyed_hash_keeps_the_shape() -> None:
    """One number, many, none: the shape stays."""
    for numbers in (3, [3], [[3, 4]], np.empty((2, 0))):
        assert keyed_hash(numbers, 1).shape == np.shape(numbers)


def test_golden_constants() -> None:
    """Keys, buckets and signs are the golden file's, far positions too."""
    assert all(int(keyed_hash(entry["j"], entry["seed"])) == int(entry["key"], 16) for entry in golden()["keys"])
    columns = np.arange(128)
    assert sketch_buckets(columns).tolist() == golden()["buckets"]
    assert sketch_signs(columns).tolist() == golden()["signs"]
    far = np.arange(2**33, 2**33 + 40)
    assert sketch_buckets(far).tolist() == [bucket(column) for column in far.tolist()]
    assert sketch_signs(far).tolist() == [sign(column) for column in far.tolist()]


def test_sixteen_columns_fill_sixteen_buckets() -> None:
    """Every aligned group of 16 columns uses every bucket once."""
    assert (np.sort(sketch_buckets(np.arange(16 * 500)).reshape(-1, 16), axis=1) == np.arange(16)).all()


def test_plans_are_kept() -> None:
    """The same slice has the same plan object."""
    assert plan_for("bfloat16", 96, ((32, 64),)) is plan_for("bfloat16", 96, ((32, 64),))


def test_joined_spans_make_a_direct_plan() -> None:
    """Neighbouring spans are one; a whole row of whole words needs no packing, an odd start does."""
    assert plan_for("float32", 64, ((0, 16), (16, 16), (16, 64))).pieces == plan_for("float32", 64).pieces
    assert plan_for("bfloat16", 64, ((2, 10), (20, 24))).direct
    assert not plan_for("bfloat16", 64, ((1, 10),)).direct
    assert not plan_for("bfloat16", 63).direct
    assert not plan_for("int8", 64, ((0, 6), (8, 16))).direct


def test_packing_fills_shared_words_with_zeros() -> None:
    """A slice that starts or ends inside a word has zeros in the rest of it."""
    plan = plan_for("uint8", 100, ((5, 11), (2, 3)))
    words = plan.pack(np.arange(1, 8, dtype=np.uint8)[None])
    assert words.view(np.uint8).tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 7, 0]]
    assert (plan.keys_2W == [[keyed_hash(word, lane) for word in (1, 2, 0)] for lane in (0, 1)]).all()


def test_wrong_spans() -> None:
    """Spans outside the row or overlapping are refused."""
    for spans in (((0, 5),), ((-1, 2),), ((3, 2),), ((0, 3), (2, 4))):
        with pytest.raises(UsageError):
            plan_for("float32", 4, spans)
