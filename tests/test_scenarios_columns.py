"""Scenarios S01 to S12: columns, heads, packed projections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tracer
from tests.expectations import expect_could_not_tell, expect_disagreement, expect_same, outcome
from tests.playback import Cut, Full, L, Point, Rank, Stage, batch, cut, even, flat, tensor_parallel
from tracer.read.findings import BoundaryOutcome, FindingCode, Side


def test_s01_columns_over_two_ranks(full: Full, plain: Path, tmp_path: Path) -> None:
    """A column-sharded projection equals the whole one."""
    b = Stage(tmp_path).play("b", full, tensor_parallel(batch(full), 2, lambda r: {"attn.q": even(r, 2, 32)}))
    expect_same(tracer.diff_traces(plain, b), rows=12)


def test_s02_four_ranks_against_two(full: Full, tmp_path: Path) -> None:
    """Heads cut inside, other split on each side, everything else replicated."""
    stage = Stage(tmp_path)

    def cuts(size: int) -> list[Rank]:
        return tensor_parallel(
            batch(full), size, lambda r: {"attn.q": even(r, size, 32), "attn.k": even(r, size, 16), "attn.v": even(r, size, 16)}
        )

    result = tracer.diff_traces(stage.play("a", full, cuts(4)), stage.play("b", full, cuts(2)))
    expect_same(result, rows=12)
    entry = next(boundary for boundary in result.boundaries if boundary.name == "layers.1.residual")
    assert (entry.copies_a, entry.copies_b) == (4, 2)


@pytest.mark.parametrize(("columns", "at"), [(10, 8), (6, 3)], ids=["s03_ten_columns", "s04_inside_a_word"])
def test_s03_s04_uneven_slices(columns: int, at: int, tmp_path: Path) -> None:
    """Slices that are no multiple of 16 columns, or start inside a 32-bit word, add up."""
    full = Full(points=[Point("embedding", columns, ("input.ids",), 0)])
    stage = Stage(tmp_path)
    spans = [(0, at), (at, columns)]
    b = stage.play("b", full, tensor_parallel(batch(full), 2, lambda r: {"embedding": cut(spans[r], width=columns)}))
    expect_same(tracer.diff_traces(stage.plain("a", full), b), rows=12)


def _packed(full: Full, ranks: int) -> tuple[list[Rank], dict[str, dict[str, object]]]:
    """One module returns this rank's [q | k | v]."""
    heads = ("attn.q", "attn.k", "attn.v")
    listed = tensor_parallel(batch(full), ranks, lambda r: {name: even(r, ranks, 32 if name == "attn.q" else 16) for name in heads})
    if ranks == 1:
        listed = [Rank(batch(full))]
    split = {"module": L + "attn_q", "layout": "b s c", "split": [L + name for name in heads]}
    return listed, {L + name: dict(split) for name in heads}


def test_s05_packed_projection_splits(full: Full, tmp_path: Path) -> None:
    """[q | k | v] of one rank equals [q_r | k_r | v_r] of two."""
    sides = []
    for side, size in (("a", 1), ("b", 2)):
        ranks, bindings = _packed(full, size)

        def pack(model: object, rank: Rank) -> None:
            for layer in range(full.layers):
                leaves = [model.leaf(f"layers.{layer}.attn.{name}") for name in "qkv"]  # type: ignore[attr-defined]
                leaves[0].prepared = [torch.cat([leaf.prepared[0] for leaf in leaves], -1)]
                leaves[1].prepared, leaves[2].prepared = [], []

        sides.append(Stage(tmp_path).play(side, full, ranks, bindings=bindings, prepare=pack))
    result = tracer.diff_traces(*sides)
    expect_same(result, rows=12)
    assert outcome(result, "layers.2.attn.v") is BoundaryOutcome.IDENTICAL


def test_s06_merged_gate_and_up(full: Full, plain: Path, tmp_path: Path) -> None:
    """Each rank's [gate_r | up_r] is two slices of the logical row."""
    ranks = tensor_parallel(batch(full), 4, lambda r: {"mlp.gate_up": cut((12 * r, 12 * r + 12), (48 + 12 * r, 60 + 12 * r), width=96)})
    expect_same(tracer.diff_traces(plain, Stage(tmp_path).play("b", full, ranks)), rows=12)


def _kv(full: Full) -> list[Rank]:
    return tensor_parallel(
        batch(full), 4, lambda r: {name: cut((8 * (r // 2), 8 * (r // 2) + 8), width=16) for name in ("attn.k", "attn.v")}
    )


def test_s07_replicated_kv_heads(full: Full, plain: Path, tmp_path: Path) -> None:
    """Two KV heads on four ranks are two copies of each head."""
    result = tracer.diff_traces(plain, Stage(tmp_path).play("b", full, _kv(full)))
    expect_same(result, rows=12)
    entry = next(boundary for boundary in result.boundaries if boundary.name == "layers.3.attn.k")
    assert (entry.copies_a, entry.copies_b) == (1, 2)


def test_s08_kv_replica_off_by_one_ulp(full: Full, plain: Path, tmp_path: Path) -> None:
    """A copy of a head that differs is the side's own disagreement, with both ranks named."""
    ranks = _kv(full)

    def nudge(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[2].view(torch.int16)[3] += 1
        return tensor

    ranks[3].cuts["layers.3.attn.k"] = replace(ranks[3].cuts["layers.3.attn.k"], change=nudge)
    result = tracer.diff_traces(plain, Stage(tmp_path).play("b", full, ranks))
    finding = expect_disagreement(result, FindingCode.REPLICAS_DISAGREE, Side.B, "layers.3.attn.k", "s0", 2)
    assert set(finding.ranks) == {2, 3}


def _vocabulary(full: Full, width: int | None) -> list[Rank]:
    def held(r: int) -> Cut:
        stop = min(12 * r + 12, 40)
        return cut((12 * r, stop), width=40, padding=12 * r + 12 - stop)

    return tensor_parallel(batch(full), 4, lambda r: {"lm_head": held(r)})


def test_s09_padded_vocabulary(full: Full, plain: Path, tmp_path: Path) -> None:
    """Padding columns of the last rank are left out where the logical width is known."""
    expect_same(tracer.diff_traces(plain, Stage(tmp_path).play("b", full, _vocabulary(full, 40))), rows=12)


def test_s10_padded_vocabulary_undeclared(full: Full, plain: Path, tmp_path: Path) -> None:
    """A boundary of another width is incomparable; nothing of it is judged, everything earlier is."""
    columns = (*range(40), *[-1] * 8)
    rank = Rank(batch(full), cuts={"lm_head": Cut(columns=columns)})
    result = tracer.diff_traces(plain, Stage(tmp_path).play("b", full, rank))
    (finding,) = expect_could_not_tell(result, FindingCode.WIDTH_DIFFERS)
    assert finding.boundary == "lm_head"
    assert "40" in finding.text
    assert "48" in finding.text
    assert outcome(result, "lm_head") is BoundaryOutcome.INCOMPARABLE
    assert outcome(result, "final_norm") is BoundaryOutcome.IDENTICAL


def test_s11_layouts(full: Full, tmp_path: Path) -> None:
    """The same values in other shapes are the same rows."""
    stage = Stage(tmp_path)
    a = stage.play("a", full, Rank([flat(full, ["s0", "s1"])], layouts={L + "attn.q": "t (h d)"}))
    b = stage.play(
        "b", full, Rank([flat(full, ["s0", "s1"])], layouts={L + "attn.q": "b s h d", L + "residual": "b s c", L + "mlp.out": "t 1 c"})
    )
    expect_same(tracer.diff_traces(a, b), rows=12)


def test_s12_layout_that_does_not_fit(full: Full, plain: Path, tmp_path: Path) -> None:
    """A leaf that contradicts its layout makes that boundary vacuous and names boundary, layout and shape."""
    binding = {L + "attn.q": {"module": L + "attn_q", "layout": "b s (h d)", "sizes": {"h": 4}}}

    def widen(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor[..., :1]], -1) if name == "layers.1.attn.q" else tensor

    b = Stage(tmp_path).play("b", full, Rank(batch(full)), bindings=binding, wrap=widen)
    result = tracer.diff_traces(plain, b)
    (finding,) = expect_could_not_tell(result, FindingCode.VACUOUS)
    assert finding.boundary == "layers.1.attn.q"
    assert "b s (h d)" in finding.text
    assert "[2, 7, 33]" in finding.text
    assert outcome(result, "layers.1.attn.k") is BoundaryOutcome.IDENTICAL
