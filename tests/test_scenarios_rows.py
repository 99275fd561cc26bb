"""Scenarios S13 to S25: rows over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tracer
from tests.expectations import expect_could_not_tell, expect_different, expect_same, outcome, texts
from tests.playback import IDS, Cut, Full, Grid, L, Rank, Row, Stage, cut, even, expert_rows, flat, layered, padded, tensor_parallel
from tracer.read.findings import BoundaryOutcome, FindingCode


def zigzag(full: Full, size: int, lengths: dict[str, int] | None = None) -> list[Rank]:
    """Context parallel, load balanced: rank r holds chunks r and 2 * size - 1 - r of every sequence."""
    lengths = lengths or {name: len(tokens) for name, tokens in full.ids.items()}
    ranks = []
    for r in range(size):
        rows: list[Row | None] = []
        for name, length in lengths.items():
            step = length // (2 * size)
            for chunk in (r, 2 * size - 1 - r):
                rows += [(name, t) if t < len(full.ids[name]) else None for t in range(chunk * step, chunk * step + step)]
        ranks.append(Rank([[rows]], r, size, {"cp": (r, size)}))
    return ranks


@pytest.mark.parametrize(("tokens", "size_a", "size_b"), [(24, 1, 2), (60, 2, 3)], ids=["a", "b"])
def test_s13_context_parallel_zigzag(tokens: int, size_a: int, size_b: int, tmp_path: Path) -> None:
    """Chunks of a sequence spread head-tail over ranks are the same rows."""
    full = Full({"s0": list(range(100, 100 + tokens))})
    stage = Stage(tmp_path)
    a = stage.plain("a", full, ["s0"]) if size_a == 1 else stage.play("a", full, zigzag(full, size_a))
    expect_same(tracer.diff_traces(a, stage.play("b", full, zigzag(full, size_b))), rows=tokens)


def test_s14_packed_zigzag_with_padding(tmp_path: Path) -> None:
    """Each packed sequence is padded to whole chunks; padding rows are counted and dropped."""
    full = Full({"s0": list(range(30, 40)), "s1": list(range(50, 56))})
    stage = Stage(tmp_path)
    b = stage.play("b", full, zigzag(full, 2, {"s0": 12, "s1": 8}))
    result = tracer.diff_traces(stage.play("a", full, Rank([flat(full, ["s0", "s1"])])), b)
    expect_same(result, rows=16)
    assert result.counts.skipped == {"b: padding": 4}


def test_s15_zigzag_rank_with_wrong_positions(tmp_path: Path) -> None:
    """A rank that numbers its own rows from zero differs at the positions, first where its chunk begins."""
    full = Full({"s0": list(range(100, 124))})
    stage = Stage(tmp_path)
    ranks = zigzag(full, 2)
    ranks[1].positions = [[list(range(12))]]
    result = tracer.diff_traces(stage.plain("a", full, ["s0"]), stage.play("b", full, ranks))
    expect_different(result, "input.positions", "s0", 6)
    assert outcome(result, "input.ids") is BoundaryOutcome.IDENTICAL


def test_s16_zigzag_times_columns(tmp_path: Path) -> None:
    """Four ranks hold a quarter of attn.q each, by rows and columns."""
    full = Full({"s0": list(range(100, 124))})
    stage = Stage(tmp_path)
    ranks = []
    for cp in zigzag(full, 2):
        for tp in range(2):
            ranks.append(
                replace(
                    cp,
                    rank=cp.rank * 2 + tp,
                    world_size=4,
                    axes={"cp": (cp.rank, 2), "tp": (tp, 2)},
                    cuts=layered({"attn.q": even(tp, 2, 32)}),
                )
            )
    expect_same(tracer.diff_traces(stage.plain("a", full, ["s0"]), stage.play("b", full, ranks)), rows=24)


@pytest.mark.parametrize("padding", [0, 1], ids=["a", "b"])
def test_s17_sequence_parallel(padding: int, tmp_path: Path) -> None:
    """Norms and residual hold a part of the rows with all columns; projections all rows and half the columns."""
    full = Full() if not padding else Full({"s0": IDS["s0"], "s1": [*IDS["s1"], 26]})
    rows: list[Row | None] = [row for line in flat(full, ["s0", "s1"]) for row in line] + [None] * padding
    half = len(rows) // 2
    stage = Stage(tmp_path)

    def cuts(r: int) -> dict[str, Cut]:
        own = Cut(rows=tuple(rows[r * half : r * half + half]))
        gate_up = cut((24 * r, 24 * r + 24), (48 + 24 * r, 72 + 24 * r), width=96)
        return {"attn.norm": own, "residual": own, "attn.q": even(r, 2, 32), "mlp.gate_up": gate_up}

    b = stage.play("b", full, tensor_parallel([[rows]], 2, cuts))
    result = tracer.diff_traces(stage.plain("a", full), b)
    expect_same(result, rows=12 + padding)
    assert result.counts.skipped.get("b: padding", 0) == padding * 2, "one padding row, seen by both ranks"


def pipeline(full: Full, stages: list[range], grid: Grid, ids_everywhere: bool = True) -> list[Rank]:
    """Each rank plays its own layers; the first has the embedding, the last the head."""
    ranks = []
    for r, layers in enumerate(stages):

        def only(name: str, r: int = r, layers: range = layers) -> bool:
            if name == "embedding":
                return r == 0
            if name in ("final_norm", "lm_head"):
                return r == len(stages) - 1
            return int(name.split(".")[1]) in layers

        ranks.append(Rank([grid], r, len(stages), {"pp": (r, len(stages))}, only=only, ids_known=ids_everywhere or r == 0))
    return ranks


@pytest.mark.parametrize("changed", [False, True], ids=["a", "b"])
def test_s18_pipeline_stages(changed: bool, full: Full, plain: Path, tmp_path: Path) -> None:
    """Stages hold different layers and join to one model, in layer order."""
    side = full.one_element() if changed else full
    b = Stage(tmp_path).play("b", side, pipeline(side, [range(2), range(2, 4)], padded(side, ["s0", "s1"])))
    result = tracer.diff_traces(plain, b)
    if changed:
        expect_different(result, "layers.2.attn.out", "s0", 5)
    else:
        expect_same(result, rows=12)
        names = [entry.name for entry in result.boundaries if entry.name.endswith(".residual")]
        assert names == [f"layers.{layer}.residual" for layer in range(4)]


def test_s19_later_stages_take_keys_from_the_first(full: Full, tmp_path: Path) -> None:
    """Stages that are never given ids are keyed by the stage that had them."""
    stage = Stage(tmp_path)
    grid = padded(full, ["s0", "s1"])
    a = stage.play("a", full, pipeline(full, [range(n, n + 1) for n in range(4)], grid, ids_everywhere=False))
    b = stage.play("b", full, pipeline(full, [range(2), range(2, 4)], grid, ids_everywhere=False))
    expect_same(tracer.diff_traces(a, b), rows=12)


@pytest.mark.parametrize("tp", [1, 2], ids=["a", "b"])
def test_s20_data_parallel(tp: int, tmp_path: Path) -> None:
    """Sequences spread over data-parallel ranks equal one batch; a further cut of the columns changes nothing."""
    full = Full({**IDS, "s2": list(range(41, 46))})
    stage = Stage(tmp_path)
    ranks = []
    for dp, names in enumerate((["s0", "s2"], ["s1"])):
        for t in range(tp):
            cuts = layered({"attn.q": even(t, tp, 32)}) if tp > 1 else {}
            axes = {"dp": (dp, 2), **({"tp": (t, tp)} if tp > 1 else {})}
            ranks.append(Rank([padded(full, names)], dp * tp + t, 2 * tp, axes, cuts))
    expect_same(tracer.diff_traces(stage.plain("a", full, ["s0", "s1", "s2"]), stage.play("b", full, ranks)), rows=17)


def test_s21_data_parallel_rank_without_tokens(full: Full, plain: Path, tmp_path: Path) -> None:
    """A rank whose forward ran on no tokens is counted and not vacuous."""
    ranks = [Rank([padded(full, ["s0", "s1"])], 0, 2, {"dp": (0, 2)}), Rank([[]], 1, 2, {"dp": (1, 2)})]
    expect_same(tracer.diff_traces(plain, Stage(tmp_path).play("b", full, ranks)), rows=12)


def expert_parallel(full: Full, missing: tuple[str, int, int] | None = None) -> list[Rank]:
    """Uneven expert ranks: 17 and 7 rows of every layer, in expert order."""
    grid = padded(full, ["s0", "s1"])
    ranks = []
    for r in range(2):
        cuts = {}
        for layer in range(full.layers):
            name = f"layers.{layer}.moe.expert_out"
            ordered = sorted(expert_rows(full, name, grid), key=lambda row: (row[2], row))
            rows = ordered[:17] if r == 0 else ordered[17:]
            if layer == 0 and missing is not None:
                rows = [row for row in rows if row != missing]
            cuts[name] = Cut(rows=tuple(rows))
        ranks.append(Rank([grid], r, 2, {"ep": (r, 2)}, cuts))
    return ranks


def test_s22_expert_parallel_uneven(full: Full, plain: Path, tmp_path: Path) -> None:
    """Expert rows are keyed by token and expert id, whatever rank and order they come in."""
    expect_same(tracer.diff_traces(plain, Stage(tmp_path).play("b", full, expert_parallel(full))), rows=12)


def test_s23_expert_row_missing(full: Full, plain: Path, tmp_path: Path) -> None:
    """One expert row that no rank returned is named."""
    expert = int(full.values["layers.0.moe.topk_ids"][("s1", 4)][1])
    result = tracer.diff_traces(plain, Stage(tmp_path).play("b", full, expert_parallel(full, ("s1", 4, expert))))
    findings = expect_could_not_tell(result, FindingCode.ROWS_UNMATCHED)
    assert len(findings) == 1
    assert findings[0].boundary == "layers.0.moe.expert_out"
    assert f"s1:4/e{expert}" in findings[0].text
    entry = next(boundary for boundary in result.boundaries if boundary.name == "layers.0.moe.expert_out")
    assert (entry.rows_compared, entry.rows_differing) == (23, 0)


def test_s24_canonical_order(full: Full, plain: Path, tmp_path: Path) -> None:
    """Expert ids in another order, weights and expert rows moved with them, are the same choice."""
    turned = full.copy()
    for layer in range(4):
        for name in ("topk_ids", "topk_weights"):
            values = turned.values[f"layers.{layer}.moe.{name}"]
            for row in values:
                values[row] = values[row].flip(0)
    router = {
        L + "moe.topk_ids": {"module": L + "moe_topk_ids", "leaf": "output[0]", "layout": "b s c", "canonical_order": L + "moe.topk_ids"},
        L + "moe.topk_weights": {
            "module": L + "moe_topk_ids",
            "leaf": "output[1]",
            "layout": "b s c",
            "canonical_order": L + "moe.topk_ids",
        },
    }

    def pair(model: object, rank: Rank) -> None:
        for layer in range(4):
            ids, weights = (model.leaf(f"layers.{layer}.moe.{name}") for name in ("topk_ids", "topk_weights"))  # type: ignore[attr-defined]
            ids.prepared = [(ids.prepared[0], weights.prepared[0])]
            weights.prepared = []

    stage = Stage(tmp_path)
    b = stage.play("b", turned, Rank([padded(full, ["s0", "s1"])]), bindings=router, prepare=pair)
    expect_same(tracer.diff_traces(stage.play("a", full, Rank([padded(full, ["s0", "s1"])]), bindings=router, prepare=pair), b), rows=12)


def test_s25_discrete_difference_on_a_tie(full: Full, tmp_path: Path) -> None:
    """A flipped expert on an exact tie is a discrete difference; nothing later is called a cause."""
    a = full.copy()
    name = "layers.1.moe.topk_ids"
    logits = torch.tensor([0.1, 0.2, 3.0, 0.3, 0.1, 1.0, 1.0, 0.2], dtype=torch.bfloat16)
    a.values["layers.1.moe.router_logits"][("s1", 1)] = logits
    old = a.values[name][("s1", 1)].tolist()
    a.values[name][("s1", 1)] = torch.tensor([2, 5])
    experts = a.values["layers.1.moe.expert_out"]
    kept = [experts.pop(("s1", 1, e)) for e in old]
    for e, value in zip((2, 5), kept, strict=True):
        experts[("s1", 1, e)] = value
    b = a.copy()
    b.values[name][("s1", 1)] = torch.tensor([2, 6])
    b.values["layers.1.moe.expert_out"][("s1", 1, 6)] = b.values["layers.1.moe.expert_out"].pop(("s1", 1, 5)) * 2
    weights = b.values["layers.1.moe.topk_weights"][("s1", 1)]
    weights.view(torch.int16)[0] += 1
    b.carry("layers.1.moe.topk_weights", [("s1", 1)])
    stage = Stage(tmp_path)
    result = tracer.diff_traces(stage.plain("a", a), stage.plain("b", b))
    expect_different(result, name, "s1", 1)
    assert result.classification is not None
    assert result.classification.klass.value == "discrete path mismatch"
    said = texts(result)
    assert "tie" in said
    assert "1 token" in said
    assert "pin" in result.next_step.lower()
