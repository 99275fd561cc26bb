"""Tests of ``tracer.read.references`` and ``tracer.format.reference``: another trace as recording may use it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import tracer
from tests.playback import Cut, Full, Stage, batch, tensor_parallel
from tracer.format.reference import ReferenceRows
from tracer.format.token_keys import token_keys
from tracer.read.references import make_reference


def test_rows_are_found_by_key_and_expert() -> None:
    """Every row has its line, whatever the order; rows the other trace lacks have none."""
    key_R, expert_R = np.array([5, 5, 9], np.uint64), np.array([0, 3, 1])
    rows = ReferenceRows("float32", 4, key_R, expert_R)
    assert rows.find(np.array([9, 5, 5, 5], np.uint64), np.array([1, 3, 0, 1])).tolist() == [2, 1, 0, -1]
    assert ReferenceRows("float32", 4, key_R[1:], None).find(np.array([9, 7, 5], np.uint64), None).tolist() == [1, -1, 0]
    assert rows.find(np.zeros(0, np.uint64), None).shape == (0,)


def test_a_reference_has_digests_choices_and_dumped_values(full: Full, tmp_path: Path) -> None:
    """Digests for every boundary with whole rows, raw ids for choices, bytes only where they were dumped and asked for."""
    path = Stage(tmp_path).plain("a", full, dump="embedding")
    trace = tracer.open_trace(path)
    plain, valued = make_reference(path), make_reference(trace, values=True)
    assert plain.name == valued.name == trace.manifest.run_id
    assert plain.order["embedding"] < plain.order["lm_head"]
    embedding = plain.load("embedding")
    assert embedding is not None
    assert embedding.raw_RB is None
    assert (embedding.find(token_keys(full.ids["s0"]), None) >= 0).all()
    np.testing.assert_array_equal(embedding.digest_R2, trace.boundaries["embedding"].digest_R2)
    dumped = valued.load("embedding")
    assert dumped is not None
    assert dumped.raw_RB is not None
    assert dumped.raw_RB.shape == (12, 64)
    choice = plain.load("layers.0.moe.topk_ids")
    assert choice is not None
    assert choice.raw_RB is not None
    np.testing.assert_array_equal(choice.raw_RB.view(np.int64), trace.boundaries["layers.0.moe.topk_ids"].load_values())
    assert plain.load("nothing") is None


def test_partial_sums_have_no_digest(full: Full, tmp_path: Path) -> None:
    """Nothing can be held against a sum of which only addends were recorded."""
    halves = tensor_parallel(batch(full), 2, lambda r: {"attn.out": Cut(partial="tp")})
    rows = make_reference(Stage(tmp_path).play("b", full, halves)).load("layers.0.attn.out")
    assert rows is not None
    assert rows.digest_R2 is None
