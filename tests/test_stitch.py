"""Stitching: shards of any layout become the one logical trace of the run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.shard_records import IDS, ROWS, Rank, assert_holds, commit_all, stitched, tensor_parallel, values
from tracer.errors import Code, TraceFormatError
from tracer.format.fingerprint import fingerprint_rows
from tracer.format.schema import NotComputed, RowScope, Span
from tracer.format.token_keys import label_keys, token_keys
from tracer.read.findings import FindingCode, Kind
from tracer.read.stitch import open_trace

Q = "layers.0.attn.q"
OUT = "layers.0.attn.out"


def test_one_process_stitches_to_what_it_recorded(tmp_path: Path) -> None:
    """One shard with whole rows gives the same rows, tokens in sequence order, and no finding."""
    whole = values(32)
    Rank(tmp_path / "t").ids().add(Q, whole).commit()
    trace = open_trace(tmp_path / "t")
    assert_holds(trace.boundaries[Q], whole)
    assert trace.findings == ()
    assert len(trace.tokens) == 12
    np.testing.assert_array_equal(trace.tokens.key_K, np.concatenate([token_keys(ids) for ids in IDS.values()]))
    np.testing.assert_array_equal(trace.tokens.previous_K, [-1, 0, 1, 2, 3, 4, 5, -1, 7, 8, 9, 10])
    assert [sequence.ids.tolist() for sequence in trace.sequences] == list(IDS.values())
    assert [sequence.token.tolist() for sequence in trace.sequences] == [list(range(7)), list(range(7, 12))]
    boundary = trace.boundaries[Q]
    assert (boundary.copies, boundary.executions, boundary.info.row_count, boundary.dtype, boundary.width) == (1, 1, 12, "float32", 32)


@pytest.mark.parametrize(
    ("width", "dtype", "slices"),
    [
        pytest.param(32, "float32", [((0, 16),), ((16, 32),)], id="s01_halves"),
        pytest.param(16, "float32", [((0, 4),), ((4, 8),), ((8, 12),), ((12, 16),)], id="s02_inside_heads"),
        pytest.param(10, "uint16", [((0, 8),), ((8, 10),)], id="s03_uneven_values"),
        pytest.param(10, "float16", [((0, 8),), ((8, 10),)], id="s03_uneven"),
        pytest.param(6, "float16", [((0, 3),), ((3, 6),)], id="s04_inside_a_word"),
        pytest.param(96, "float32", [((12 * r, 12 * r + 12), (48 + 12 * r, 60 + 12 * r)) for r in range(4)], id="s06_gate_and_up"),
    ],
)
def test_column_slices_add_up(tmp_path: Path, width: int, dtype: str, slices: list[tuple[Span, ...]]) -> None:
    """Column slices over ranks add up to the fingerprints of the whole row, however the columns are cut."""
    whole = values(width) if dtype == "float32" else values(width).astype(np.float16).view(np.dtype(dtype))
    ranks = tensor_parallel(tmp_path, len(slices))
    for rank, spans in zip(ranks, slices, strict=True):
        rank.add(Q, whole, spans=spans, dtype=dtype)
    commit_all(ranks)
    trace = stitched(tmp_path)
    assert_holds(trace.boundaries[Q], whole, dtype)
    assert trace.findings == ()
    assert trace.boundaries[Q].copies == 1
    assert trace.boundaries[Q].executions == 1


def test_s07_copies_of_slices_are_counted(tmp_path: Path) -> None:
    """Two KV heads on four ranks join to whole rows with two copies of each head."""
    whole = values(16)
    ranks = tensor_parallel(tmp_path, 4)
    for index, rank in enumerate(ranks):
        rank.add(Q, whole, spans=((8 * (index // 2), 8 * (index // 2) + 8),))
    commit_all(ranks)
    trace = stitched(tmp_path)
    assert_holds(trace.boundaries[Q], whole)
    assert trace.boundaries[Q].copies == 2


def test_s13_s16_rows_and_columns_over_a_grid(tmp_path: Path) -> None:
    """Context parallel zigzag times tensor parallel: each of four ranks holds a quarter, copies hold half the rows."""
    whole, norm = values(32), values(32, 1)
    chunks = {0: [0, 1, 2, 9, 10, 11], 1: [8, 7, 6, 5, 4, 3]}
    ranks = [Rank(tmp_path, rank, 4, {"cp": (rank // 2, 2), "tp": (rank % 2, 2)}) for rank in range(4)]
    for index, rank in enumerate(ranks):
        rank.ids({label: ids for label, ids in IDS.items() if index == 3})
        columns = 16 * (index % 2)
        rank.add(Q, whole, take=chunks[index // 2], spans=((columns, columns + 16),)).add(OUT, norm, take=chunks[index // 2])
    commit_all(ranks)
    trace = stitched(tmp_path)
    # rank 3 alone knew the ids, yet it is the first rank whose rows decide the order of sequences
    assert [sequence.label for sequence in trace.sequences] == ["s0", "s1"]
    assert_holds(trace.boundaries[Q], whole)
    assert_holds(trace.boundaries[OUT], norm)
    assert (trace.boundaries[Q].copies, trace.boundaries[OUT].copies) == (1, 2)
    assert not trace.tokens.labelled_K.any()
    assert trace.findings == ()


def test_s18_s19_pipeline_stages_take_keys_from_the_first(tmp_path: Path) -> None:
    """Later stages know no ids; their rows are keyed by those of the first, and layers come out in numeric order."""
    names = ["embedding", *(f"layers.{layer}.residual" for layer in range(12)), "final_norm"]
    tensors = {name: values(8, seed) for seed, name in enumerate(names)}
    stages = [Rank(tmp_path, rank, 3, {"pp": (rank, 3)}) for rank in range(3)]
    stages[0].ids()
    for name, tensor in tensors.items():
        stage = {"embedding": 0, "final_norm": 2}.get(name) if "layers" not in name else int(name.split(".")[1]) // 4
        inputs = (names[names.index(name) - 1],) if name != "embedding" else ()
        assert stage is not None
        stages[stage].add(name, tensor, fields={"inputs": inputs})
    commit_all(stages)
    for reverse in (False, True):
        trace = stitched(tmp_path, reverse=reverse)
        assert [boundary.name for boundary in trace.catalogue] == names
        assert list(trace.boundaries) == names
        assert not trace.tokens.labelled_K.any()
        for name, tensor in tensors.items():
            assert_holds(trace.boundaries[name], tensor)


def test_s20_s21_data_parallel_scopes_stay_apart(tmp_path: Path) -> None:
    """Equal labels in two scopes are two sequences; a rank without rows is no finding; executions add over scopes."""
    first, second = Rank(tmp_path, 0, 3, {"dp": (0, 3)}), Rank(tmp_path, 1, 3, {"dp": (1, 3)})
    idle = Rank(tmp_path, 2, 3, {"dp": (2, 3)})
    whole = values(8)
    first.open("0", IDS["s0"], scope="dp=0")
    second.open("0", IDS["s1"], scope="dp=1")
    first.add(Q, whole[:7], [("0", position) for position in range(7)])
    second.add(Q, whole[7:], [("0", position) for position in range(5)])
    idle.add(Q, whole[:0], [])
    commit_all([first, second, idle])
    trace = stitched(tmp_path)
    assert_holds(trace.boundaries[Q], whole)
    assert [(sequence.scope, sequence.label) for sequence in trace.sequences] == [("dp=0", "0"), ("dp=1", "0")]
    assert trace.boundaries[Q].executions == 3
    assert trace.findings == ()


def test_s22_expert_rows_are_keyed_by_token_and_expert(tmp_path: Path) -> None:
    """Uneven expert parallel rows in expert order come out by (token, expert)."""
    rows = [row for row in ROWS for _ in range(2)]
    experts = [expert for index in range(12) for expert in ((index * 3) % 4, 4 + index % 4)]
    whole = values(32, count=24)
    order = sorted(range(24), key=lambda i: (experts[i], i))
    ranks = [Rank(tmp_path, rank, 2, {"ep": (rank, 2)}).ids() for rank in range(2)]
    ranks[0].add("layers.0.moe.expert_out", whole, rows, take=order[:17], experts=experts)
    ranks[1].add("layers.0.moe.expert_out", whole, rows, take=order[17:], experts=experts)
    commit_all(ranks)
    boundary = stitched(tmp_path).boundaries["layers.0.moe.expert_out"]
    assert_holds(boundary, whole)
    assert boundary.expert_R is not None
    assert boundary.expert_R.tolist() == experts
    assert boundary.token_R.tolist() == [index for index in range(12) for _ in range(2)]


def test_parts_of_one_rank_join(tmp_path: Path) -> None:
    """Gate and up recorded by separate modules of one process are two slices of one row."""
    whole = values(96)
    rank = Rank(tmp_path).ids()
    rank.add(Q, whole, spans=((0, 48),)).add(Q, whole, spans=((48, 96),)).commit()
    trace = stitched(tmp_path)
    assert_holds(trace.boundaries[Q], whole)
    assert trace.findings == ()


def test_narrow_integers_keep_values_whatever_their_dtype(tmp_path: Path) -> None:
    """Raw values of integer slices land in their logical columns, and int32 beside int64 is one int64 boundary."""
    ids = np.random.default_rng(0).integers(0, 99, (12, 6))
    ranks = tensor_parallel(tmp_path, 2)
    ranks[0].add("layers.0.moe.topk_ids", ids.astype(np.int32), spans=((4, 6), (0, 1)), dtype="int32")
    ranks[1].add("layers.0.moe.topk_ids", ids, spans=((1, 4),), dtype="int64")
    commit_all(ranks)
    trace = stitched(tmp_path)
    assert trace.boundaries["layers.0.moe.topk_ids"].dtype == "int64"
    assert_holds(trace.boundaries["layers.0.moe.topk_ids"], ids, "int64")
    assert trace.findings == ()


def test_s58_chunks_of_a_prefill_and_decode_steps_are_rows_of_one_sequence(tmp_path: Path) -> None:
    """A prefill of 4, then single tokens over several segments, give the same rows as one prefill."""
    whole = values(8)[:7]
    rank = Rank(tmp_path).ids({"s0": IDS["s0"]})
    rank.add(Q, whole, ROWS[:7], take=range(4))
    rank.writer.flush()
    for step in range(4, 7):
        rank.add(Q, whole, ROWS[:7], take=[step], forward=step - 3)
    rank.commit()
    trace = stitched(tmp_path)
    assert_holds(trace.boundaries[Q], whole)
    assert trace.boundaries[Q].executions == 4


def test_s60_a_cached_prefix_belongs_to_whoever_computed_it(tmp_path: Path) -> None:
    """A sequence that starts behind a shared prefix hangs on the tokens of the sequence that computed it, whichever came first."""
    ids = {"s2": [11, 12, 13, 14, 98, 99], "s0": IDS["s0"]}
    rank = Rank(tmp_path).ids(ids)
    rank.add(Q, values(8, count=2), [("s2", 4), ("s2", 5)]).add(Q, values(8)[:7], ROWS[:7], forward=1).commit()
    trace = stitched(tmp_path)
    table = trace.tokens
    assert len(table) == 9
    after_prefix = int(trace.sequences[0].token[4])
    assert table.previous_K[after_prefix] == trace.sequences[1].token[3]
    assert (table.previous_K < np.arange(9)).all()
    assert trace.sequences[0].token[:4].tolist() == [-1] * 4
    assert trace.findings == ()


def test_s61_siblings_share_rows(tmp_path: Path) -> None:
    """Four siblings of one prompt are seen four times on the prompt and once after it."""
    ids = {f"p{sibling}": [1, 2, 3, 4, 10 * sibling, 7, 8] for sibling in range(4)}
    rows = [(label, position) for label in ids for position in range(7)]
    prompt, rest = values(8, count=4), values(8, 1, count=12).reshape(4, 3, 8)
    whole = np.concatenate([np.concatenate([prompt, rest[sibling]]) for sibling in range(4)])
    Rank(tmp_path).ids(ids).add(Q, whole, rows).commit()
    trace = stitched(tmp_path)
    boundary = trace.boundaries[Q]
    assert len(trace.tokens) == 16
    assert boundary.seen_R.tolist() == [4] * 4 + [1] * 12
    assert_holds(boundary, np.concatenate([whole[:7], *(whole[7 * sibling + 4 : 7 * sibling + 7] for sibling in range(1, 4))]))
    assert trace.findings == ()
    assert trace.noise == {}


def test_salts_keep_equal_ids_apart(tmp_path: Path) -> None:
    """Sequences of equal ids under different adapters are different tokens."""
    rank = Rank(tmp_path)
    rank.open("x", [1, 2], salt="adapter-a")
    rank.open("y", [1, 2], salt="adapter-b")
    rank.add(Q, values(8, count=4), [("x", 0), ("x", 1), ("y", 0), ("y", 1)]).commit()
    trace = stitched(tmp_path)
    assert len(trace.tokens) == 4
    np.testing.assert_array_equal(trace.tokens.key_K[:2], token_keys([1, 2], "adapter-a"))


def test_unknown_ids_fall_back_to_labels(tmp_path: Path) -> None:
    """Rows whose ids nobody knows, and those before a gap, are keyed by request or label and position."""
    rank = Rank(tmp_path)
    rank.open("x", request="step7-p2")
    rank.open("y", [5, 6])
    rows = [("x", 3), ("x", 4), ("y", 0), ("y", 1), ("y", 2)]
    rank.add(Q, values(8, count=5), rows).commit()
    trace = stitched(tmp_path)
    np.testing.assert_array_equal(trace.tokens.labelled_K, [True, True, False, False, True])
    np.testing.assert_array_equal(trace.tokens.key_K[:2], label_keys("step7-p2", np.array([3, 4])))
    np.testing.assert_array_equal(trace.tokens.key_K[4:], label_keys("y", np.array([2])))
    assert trace.tokens.previous_K.tolist() == [-1, 0, -1, 2, 3]
    assert trace.sequences[0].token.tolist() == [-1, -1, -1, 0, 1]


def test_rows_about_the_next_token_are_keyed_by_it(tmp_path: Path) -> None:
    """Row t of a next-token boundary belongs to token t + 1, also where that token was never forwarded or its id is unknown."""
    rank = Rank(tmp_path).ids({"s0": IDS["s0"], "s1": IDS["s1"][:3]})
    forwarded = [("s0", position) for position in range(6)]
    rank.add(Q, values(8, count=6), forwarded)
    scores = values(1, count=7)
    rank.add("scorer.logprobs", scores, [*forwarded, ("s1", 2)], fields={"rows": RowScope.NEXT}).commit()
    trace = stitched(tmp_path)
    keys = np.concatenate([token_keys(IDS["s0"])[1:], label_keys("s1", np.array([3]))])
    np.testing.assert_array_equal(trace.tokens.key_K[trace.boundaries["scorer.logprobs"].token_R], keys)
    assert_holds(trace.boundaries["scorer.logprobs"], scores)
    assert len(trace.boundaries[Q]) == 6
    assert trace.sequences[0].token.tolist() == list(range(7))


def test_s71_declarations_become_keys(tmp_path: Path) -> None:
    """Rows declared never computed are listed by reason, boundary and key; next-token boundaries by the next token's key."""
    rank = Rank(tmp_path).ids()
    rank.add(Q, values(8, count=11), [row for row in ROWS if row != ("s0", 6)])
    rank.declare("scorer.logprobs", rows=RowScope.NEXT)
    declared = (
        NotComputed(sequence="s0", positions=((6, 7),), reason="last sampled token"),
        NotComputed(sequence="s1", positions=((0, 2),), boundaries=("lm_head",), reason="logits not requested"),
        NotComputed(sequence="never", positions=((0, 1),), reason="cache hit"),
    )
    rank.commit(not_computed=declared)
    trace = stitched(tmp_path)
    np.testing.assert_array_equal(trace.not_computed["last sampled token"][""], token_keys(IDS["s0"])[6:])
    np.testing.assert_array_equal(trace.declared("scorer.logprobs")["last sampled token"], label_keys("s0", np.array([7])))
    assert sorted(trace.declared("lm_head")) == ["cache hit", "last sampled token", "logits not requested"]
    np.testing.assert_array_equal(trace.declared("lm_head")["logits not requested"], np.sort(token_keys(IDS["s1"])[:2]))
    np.testing.assert_array_equal(trace.declared("lm_head")["cache hit"], label_keys("never", np.array([0])))


def test_contradictory_ids_make_the_side_unreadable(tmp_path: Path) -> None:
    """Two ranks that say different ids of one position are a finding that names the sequence, the position and both ids."""
    ranks = tensor_parallel(tmp_path, 2)
    ranks[1].open("s1", [21, 22, 99])
    for rank in ranks:
        rank.add(Q, values(8))
    commit_all(ranks)
    (finding,) = stitched(tmp_path).findings
    assert (finding.code, finding.kind, finding.request, finding.position) == (FindingCode.IDS_CONTRADICT, Kind.UNREADABLE, "s1", 2)
    assert "99" in finding.text
    assert "23" in finding.text


def test_s27_partial_sums_add_by_sketch_and_keep_their_own_digests(tmp_path: Path) -> None:
    """Partial sums keep one digest per coordinate; the sketch is that of the sum."""
    whole = np.round(values(32) * 16) / 16
    ranks = tensor_parallel(tmp_path, 2)
    for share, rank in zip((0.75, 0.25), ranks, strict=True):
        rank.add(OUT, (whole * share).astype(np.float32), partial="tp")
    commit_all(ranks)
    trace = stitched(tmp_path)
    boundary = trace.boundaries[OUT]
    assert (boundary.partial_axis, len(boundary.parts), boundary.copies) == ("tp", 2, 1)
    for part, share in zip(boundary.parts, (0.75, 0.25), strict=True):
        np.testing.assert_array_equal(part.digest_R2, fingerprint_rows((whole * share).astype(np.float32), "float32").digest_N2)
    statistics = boundary.load_statistics()
    expected = fingerprint_rows(whole.astype(np.float32), "float32").sketch_N16
    assert statistics is not None
    assert expected is not None
    np.testing.assert_allclose(statistics.sketch_R16, expected, atol=1e-5)
    np.testing.assert_allclose(statistics.sum_squares_R, np.square(expected.astype(np.float64)).sum(axis=1), rtol=1e-4)
    assert trace.findings == ()


def test_a_partial_sum_over_an_axis_of_size_one_is_whole(tmp_path: Path) -> None:
    """With one coordinate there is nothing to add up, and the digest counts."""
    whole = values(32)
    (rank,) = tensor_parallel(tmp_path, 1)
    rank.add(OUT, whole, partial="tp").commit()
    boundary = stitched(tmp_path).boundaries[OUT]
    assert boundary.partial_axis == ""
    assert_holds(boundary, whole)


def test_a_partial_sum_over_an_unknown_axis_is_refused(tmp_path: Path) -> None:
    """A block that names an axis its mesh lacks is a malformed trace."""
    Rank(tmp_path).ids().add(OUT, values(8), partial="tp").commit()
    with pytest.raises(TraceFormatError) as caught:
        stitched(tmp_path)
    assert caught.value.code is Code.MANIFEST_INVALID


def test_a_position_that_no_sequence_has_is_refused(tmp_path: Path) -> None:
    """A position of two thousand millions is refused instead of allocating a table for it."""
    Rank(tmp_path).add(OUT, values(8, count=1), [("s0", (1 << 31) - 1)]).commit()
    with pytest.raises(TraceFormatError) as caught:
        stitched(tmp_path)
    assert caught.value.code is Code.SEGMENT_INVALID


def test_micro_batches_are_one_boundary_and_shared_layers_have_one_per_use(tmp_path: Path) -> None:
    """A second call within a forward joins where its rows are others, and is a later use where they are the same."""
    whole, again = values(8), values(8, 1)
    rank = Rank(tmp_path).ids()
    rank.add("embedding", whole)
    for name, first, second in ((Q, range(7), range(7, 12)), (OUT, range(12), range(12))):
        rank.add(name, whole, take=first, fields={"inputs": ("embedding",)})
        rank.add(name, again if name == OUT else whole, take=second, occurrence=1)
    rank.add("final_norm", whole).commit()
    trace = stitched(tmp_path)
    assert list(trace.boundaries) == ["embedding", Q, OUT, f"{OUT}#2", "final_norm"]
    assert_holds(trace.boundaries[Q], whole)
    assert_holds(trace.boundaries[OUT], whole)
    assert_holds(trace.boundaries[f"{OUT}#2"], again)
    assert trace.boundaries[f"{OUT}#2"].info.inputs == (OUT,)
    assert [trace.boundaries[name].executions for name in (Q, OUT, f"{OUT}#2")] == [2, 1, 1]
    assert trace.findings == ()


def test_segments_of_ranks_need_not_be_cut_alike(tmp_path: Path) -> None:
    """Ranks that flush at different moments still join row by row."""
    whole = values(32)
    ranks = tensor_parallel(tmp_path, 2)
    for index, rank in enumerate(ranks):
        for step in range(12):
            rank.add(Q, whole, take=[step], spans=((16 * index, 16 * index + 16),), forward=step)
            if step in ((2, 7) if index else (5,)):
                rank.writer.flush()
    commit_all(ranks)
    trace = stitched(tmp_path)
    assert_holds(trace.boundaries[Q], whole)
    assert trace.findings == ()


def test_a_boundary_without_rows_is_listed_with_its_executions(tmp_path: Path) -> None:
    """A forward without rows is an execution, and its boundary an empty one."""
    Rank(tmp_path).add(Q, values(8)[:0], []).commit()
    trace = stitched(tmp_path)
    boundary = trace.boundaries[Q]
    assert (len(boundary), boundary.executions, boundary.width) == (0, 1, 8)
    assert boundary.load_statistics() is None
    assert len(trace.tokens) == 0


def test_rows_of_another_width_are_left_out_and_said(tmp_path: Path) -> None:
    """Rows that are wider than most are not joined, and a finding counts them."""
    ranks = tensor_parallel(tmp_path, 2)
    ranks[0].add("lm_head", values(40))
    ranks[1].add("lm_head", values(48), take=range(3))
    commit_all(ranks)
    trace = stitched(tmp_path)
    assert_holds(trace.boundaries["lm_head"], values(40))
    (finding,) = trace.findings
    assert (finding.code, finding.kind, finding.rows, finding.ranks) == (FindingCode.WIDTH_DIFFERS, Kind.ABSENCE, 3, (1,))


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """A random grid: rows in chunks, columns in interleaved slices, a few copies, any order, any segments."""
    width = draw(st.integers(1, 70))
    cuts = sorted(draw(st.sets(st.integers(1, width - 1), max_size=6))) if width > 1 else []
    pieces = list(zip([0, *cuts], [*cuts, width], strict=True))
    slices_count = draw(st.integers(1, min(4, len(pieces))))
    owner = [*range(slices_count), *draw(st.lists(st.integers(0, slices_count - 1), min_size=len(pieces), max_size=len(pieces)))]
    owned = [[piece for piece, own in zip(pieces, owner, strict=False) if own == number] for number in range(slices_count)]
    slices = [tuple(draw(st.permutations(mine))) for mine in owned]
    rows = draw(st.permutations(range(len(ROWS))))
    row_cuts = sorted(draw(st.sets(st.integers(1, len(ROWS) - 1), max_size=3)))
    chunks = [list(rows[start:stop]) for start, stop in zip([0, *row_cuts], [*row_cuts, len(ROWS)], strict=True)]
    ranks = [(spans, chunk) for spans in slices for chunk in chunks]
    copies = draw(st.lists(st.integers(0, len(ranks) - 1), max_size=3))
    ranks += [(ranks[copy][0], list(draw(st.permutations(ranks[copy][1])))) for copy in copies]
    return {
        "width": width,
        "dtype": draw(st.sampled_from(["float32", "float16", "int32", "uint8"])),
        "ranks": draw(st.permutations(ranks)),
        "flushes": draw(st.sets(st.integers(0, 11))),
        "whole_blocks": draw(st.booleans()),
        "padding": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 99)),
    }


@given(layouts())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_grid_of_any_tensor_stitches_to_the_whole(layout: dict[str, Any]) -> None:
    """However rows and columns are cut, copied and ordered over ranks and segments, the result is that of the whole tensor."""
    random = np.random.default_rng(layout["seed"])
    dtype = np.dtype(layout["dtype"])
    whole = (random.standard_normal((len(ROWS), layout["width"])) * 50).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trace"
        ranks = [Rank(out, index, len(layout["ranks"])) for index in range(len(layout["ranks"]))]
        knows_ids = int(random.integers(len(ranks)))
        for index, (rank, (spans, chunk)) in enumerate(zip(ranks, layout["ranks"], strict=True)):
            if index == knows_ids:
                rank.ids()
            for step, taken in enumerate([chunk] if layout["whole_blocks"] else [[row] for row in chunk]):
                rank.add(Q, whole, take=taken, spans=spans, dtype=dtype.name, forward=step, padding=layout["padding"])
                if step in layout["flushes"]:
                    rank.writer.flush()
            rank.commit()
        for reverse in (False, True):
            trace = stitched(out, reverse=reverse)
            assert trace.findings == ()
            boundary = trace.boundaries[Q]
            order = np.argsort([ROWS.index((trace.sequences[s].label, int(p))) for s, p in _places(trace)])
            assert sorted(boundary.token_R.tolist()) == list(range(len(ROWS)))
            assert_holds(boundary, whole[np.argsort(order)], dtype.name)


def _places(trace: Any) -> list[tuple[int, int]]:
    return list(zip(trace.tokens.sequence_K.tolist(), trace.tokens.position_K.tolist(), strict=True))
