"""How rows are cut into tiles and blocks, and that no helper of a BLAS library wakes up."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fingerprint_cases import assert_equal
from tracer.format import fingerprint_kernel
from tracer.format.dtypes import AnyArray
from tracer.format.fingerprint import Fingerprints, fingerprint_rows
from tracer.format.fingerprint_kernel import digest_rows, fingerprint_parts
from tracer.format.fingerprint_plan import plan_for


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(1, 1500), st.integers(1, 3), st.sampled_from(["float32", "bfloat16", "float64", "uint8"]))
def test_tile_sizes_change_nothing(rows: int, columns: int, threads: int, dtype: str) -> None:
    """Small tiles and blocks, with ragged rows and columns, give what one large tile gives."""
    plan = plan_for(dtype, columns)
    bits = np.random.default_rng(columns).integers(0, 250, (rows, columns * plan.info.itemsize), np.uint8)
    bits[:, plan.info.itemsize - 1 :: plan.info.itemsize] &= 0x3F
    storage = bits.view(plan.info.storage)
    with pytest.MonkeyPatch.context() as patched:
        whole = Fingerprints(*fingerprint_parts(storage, plan, 1))
        patched.setattr(fingerprint_kernel, "_TILE_ITEMS", 1 << 14)
        patched.setattr(fingerprint_kernel, "_TILE_ROWS", 48)
        assert_equal(whole, Fingerprints(*fingerprint_parts(storage, plan, threads)))


def test_digests_alone_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests without statistics are the same in pieces of any size."""
    words = np.random.default_rng(0).integers(0, 2**32, (37, 90), np.uint32)
    keys = plan_for("float32", 90).keys_2W
    whole = digest_rows(words, keys)
    for items in (1 << 10, 64):
        monkeypatch.setattr(fingerprint_kernel, "_TILE_ITEMS", items)
        np.testing.assert_array_equal(digest_rows(words, keys), whole)
    exact = [[sum(int(w) * int(k) for w, k in zip(row, lane, strict=True)) % 2**64 for lane in keys] for row in words[:3]]
    assert whole[:3].tolist() == exact


@pytest.mark.parametrize("rows", [1, 2, 16, 100, 512])
@pytest.mark.parametrize("columns", [100, 1024, 9001, 40_000])
def test_products_stay_below_what_a_blas_threads(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix product or dot product is large enough for OpenBLAS to wake its own threads, which then spin."""
    sizes: list[tuple[int, ...]] = []
    product = np.matmul

    def watched(left: AnyArray, right: AnyArray) -> object:
        sizes.append((left.shape[-2], left.shape[-1], right.shape[-1]))
        return product(left, right)

    def watched_dot(left: AnyArray, right: AnyArray) -> object:
        assert left.shape[-1] <= 10_000
        return np.einsum("rt,rt->r", left, right)

    monkeypatch.setattr(np, "matmul", watched)
    monkeypatch.setattr(fingerprint_kernel, "_row_dot", watched_dot)
    fingerprint_rows(np.ones((rows, columns), np.float32), "float32")
    assert sizes
    for high, deep, wide in sizes:
        assert high * deep * wide <= 1 << 18
        assert min(high, wide) > 1 or high * deep * wide < 9216


def test_helpers_are_shared_and_few() -> None:
    """Many calls start no more helper threads than one call asks for."""
    rows = np.ones((512, 1024), np.float32)
    before = {thread.name for thread in threading.enumerate()}
    for _ in range(5):
        fingerprint_rows(rows, "float32", threads=3)
    started = {thread.name for thread in threading.enumerate()} - before
    assert len([name for name in started if name.startswith("fingerprint-rows")]) <= 2


def test_errors_of_helpers_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in any block is raised by the call."""

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(fingerprint_kernel, "_block", broken)
    with pytest.raises(MemoryError):
        fingerprint_rows(np.ones((512, 1024), np.float32), "float32", threads=2)
