"""Tests of ``tracer.format.token_keys``."""

from __future__ import annotations

import struct

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tracer.format.token_keys import label_keys, token_keys

IDS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=80)


@given(ids=IDS, salt=st.text(max_size=8))
def test_key_is_the_hash_of_the_whole_prefix(ids: list[int], salt: str) -> None:
    """Key t is xxh3_64 over the salt and the little-endian int64 ids up to t, for any ids."""
    expected = [
        xxhash.xxh3_64_intdigest(salt.encode() + b"".join(struct.pack("<q", token) for token in ids[: t + 1])) for t in range(len(ids))
    ]
    keys = token_keys(np.array(ids, dtype=np.int64), salt)
    assert keys.dtype == np.uint64
    assert keys.tolist() == expected


@given(ids=IDS, cut=st.integers(0, 80))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(ids: list[int], cut: int) -> None:
    """What comes after a token does not change its key."""
    np.testing.assert_array_equal(token_keys(np.array(ids[:cut], dtype=np.int64)), token_keys(np.array(ids, dtype=np.int64))[:cut])


def test_integer_width_and_memory_layout_do_not_matter() -> None:
    """int32, strided and list ids give the keys of contiguous int64 ids."""
    ids = np.arange(40, dtype=np.int64)
    for same in (ids.astype(np.int32), np.repeat(ids, 2)[::2], ids.tolist()):
        np.testing.assert_array_equal(token_keys(same), token_keys(ids))


def test_one_other_token_changes_every_later_key_and_no_earlier_one() -> None:
    """Two sequences share keys exactly up to the token where they part."""
    ids = np.arange(300, dtype=np.int64)
    other = ids.copy()
    other[200] += 1
    np.testing.assert_array_equal(token_keys(ids) == token_keys(other), np.arange(300) < 200)


def test_salt_separates() -> None:
    """The same ids under another salt share no key."""
    ids = np.arange(50)
    assert not set(token_keys(ids).tolist()) & set(token_keys(ids, "adapter=1").tolist())


def test_label_keys_depend_on_name_and_position_only() -> None:
    """A label key is the same in any order and batch, and differs for any other name or position."""
    positions = np.array([5, 0, 3])
    keys = label_keys("step7-p2", positions)
    assert keys.dtype == np.uint64
    np.testing.assert_array_equal(keys[[1, 2, 0]], label_keys("step7-p2", np.array([0, 3, 5])))
    every = np.concatenate([label_keys(name, np.arange(100)) for name in ("a", "b", "ab", "")] + [token_keys(np.arange(100))])
    assert len(np.unique(every)) == len(every)
