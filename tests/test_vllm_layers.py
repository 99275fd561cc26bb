"""Which part of the whole a worker holds; no engine is needed to say. tests/vllm stitches real workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracer.hosts.vllm_layers import as_in_checkpoint, cut_evenly, experts_parallelism, heads_of, host_parameter, merged_spans
from tracer.record.host import HostParameter

WHOLE = {"tp_rank": 0, "tp_size": 1}


class ColumnParallelLinear:
    """What is read of such a layer; subclasses stand for the packed ones."""

    def __init__(self, rank: int, size: int, inputs: int, output_sizes: list[int]) -> None:
        self.tp_rank, self.tp_size, self.input_size = rank, size, inputs
        self.output_size, self.output_sizes = sum(output_sizes), output_sizes


class RowParallelLinear:
    """What is read of such a layer."""

    def __init__(self, rank: int, size: int, inputs: int, outputs: int) -> None:
        self.tp_rank, self.tp_size, self.input_size, self.output_size = rank, size, inputs, outputs


def packed(rank: int, size: int, queries: int, keys: int, width: int) -> Any:
    """A packed projection of one rank, heads cut as the engine cuts them."""
    replicas = max(size // keys, 1)
    return SimpleNamespace(
        tp_rank=rank, tp_size=size, head_size=width, num_heads=queries // size, total_num_heads=queries,
        num_kv_heads=max(keys // size, 1), total_num_kv_heads=keys, num_kv_head_replicas=replicas,
    )  # fmt: skip


@given(keys=st.sampled_from([1, 2, 4, 8]), size=st.sampled_from([1, 2, 4, 8]), width=st.integers(1, 4))
def test_heads_of_all_ranks_cover_the_whole(keys: int, size: int, width: int) -> None:
    """Query heads of all ranks lie side by side; key and value heads too, repeated where there are fewer than ranks."""
    queries = 8
    ranks = [heads_of(packed(rank, size, queries, keys, width)) for rank in range(size)]
    for name, heads in (("q", queries), ("k", keys), ("v_norm", keys)):
        spans = [one.of(f"layers.0.attn.{name}") for one in ranks]
        assert {whole for whole, _ in spans} == {heads * width}
        held = [column for _, (start, stop) in spans for column in range(start, stop)]
        assert set(held) == set(range(heads * width))
        assert len(held) == max(heads, size) * width
    one = heads_of(packed(0, 1, queries, keys, width)).placement("layers.0.attn.q")
    assert (one.width, one.spans) == (queries * width, ())


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3), parts=st.integers(1, 4))
def test_packed_pieces_are_cut_one_by_one(sizes: list[int], parts: int) -> None:
    """Every rank holds its part of each piece, and all ranks together each column once."""
    sizes = [size * parts for size in sizes]
    held = [column for part in range(parts) for start, stop in merged_spans(sizes, part, parts) for column in range(start, stop)]
    assert sorted(held) == list(range(sum(sizes)))
    assert cut_evenly(sizes[0], 0, parts) == (merged_spans(sizes, 0, parts)[0],)


def test_parameters_know_their_part() -> None:
    """Packed outputs, cut inputs and whole parameters have the shape of the whole and the spans held."""
    gate_up = host_parameter("mlp.gate_up_proj", "weight", ColumnParallelLinear(1, 2, 3, [4, 4]), torch.zeros(4, 3), False, "", WHOLE)
    assert (gate_up.shape, gate_up.spans, gate_up.sizes) == ((8, 3), (((2, 4), (6, 8)), ()), (4, 4))
    down = host_parameter("mlp.down_proj", "weight", RowParallelLinear(1, 2, 4, 3), torch.zeros(3, 2), False, "", WHOLE)
    assert (down.shape, down.spans) == ((3, 4), ((), ((2, 4),)))
    norm = host_parameter("norm", "weight", SimpleNamespace(), torch.zeros(3), False, "", WHOLE)
    assert (norm.parameter, norm.shape, norm.spans, norm.unknown) == ("norm.weight", (3,), (), "")


def test_a_repacked_parameter_is_unknown() -> None:
    """A parameter without the shape that its layer says has no readable bytes, and says why."""
    layer = ColumnParallelLinear(0, 1, 3, [8])
    repacked = host_parameter("proj", "weight", layer, torch.zeros(0), False, "", WHOLE)
    assert repacked.tensor is None
    assert repacked.unknown == "the engine repacked it when loading: held as [0], not [8, 3]"


def test_vocabulary_padding_is_left_out() -> None:
    """Rows that only fill a rank's part of the vocabulary up are no part of the weight."""
    indices = SimpleNamespace(org_vocab_start_index=6, org_vocab_end_index=10)
    module = SimpleNamespace(org_vocab_size=10, embedding_dim=2, shard_indices=indices, num_embeddings_per_partition=6)
    held = host_parameter("lm_head", "weight", module, torch.ones(6, 2), False, "", WHOLE)
    assert (held.shape, held.spans) == ((10, 2), (((6, 10),), ()))
    assert held.tensor is not None
    assert held.tensor.shape == (4, 2)


@pytest.mark.parametrize("whole_experts", [True, False])
def test_experts_are_cut_by_number_or_by_width(whole_experts: bool) -> None:
    """Under expert parallelism a rank holds some experts whole, in its own order; else all of them cut by intermediate size."""
    rank, size = 1, 2
    table = torch.tensor([-1, 1, -1, 0]) if whole_experts else None
    parallel = SimpleNamespace(tp_rank=0 if whole_experts else rank, tp_size=1 if whole_experts else size)
    module = SimpleNamespace(
        global_num_experts=4, local_num_experts=2 if whole_experts else 4, hidden_size=3, _expert_map=table,
        intermediate_size_per_partition=4 if whole_experts else 2, moe_config=SimpleNamespace(moe_parallel_config=parallel),
    )  # fmt: skip
    experts = experts_parallelism(module)
    local = (2, 8, 3) if whole_experts else (4, 4, 3)
    gate_up = host_parameter("experts", "w13_weight", module, torch.zeros(local), False, "", experts)
    assert (gate_up.shape, gate_up.sizes, gate_up.unknown) == ((4, 8, 3), (4, 4), "")
    assert gate_up.spans == ((((3, 4), (1, 2)), (), ()) if whole_experts else ((), ((2, 4), (6, 8)), ()))
    down = host_parameter("experts", "w2_weight", module, torch.zeros((local[0], 3, local[1] // 2)), False, "", experts)
    assert down.spans == ((((3, 4), (1, 2)), (), ()) if whole_experts else ((), (), ((2, 4),)))


@given(keys=st.sampled_from([1, 2, 4]), size=st.sampled_from([1, 2]), pairs=st.integers(1, 3))
def test_reordered_heads_are_counted_as_the_checkpoint_does(keys: int, size: int, pairs: int) -> None:
    """Where loading put even rows of a head before odd ones, rows and columns of q and k say where they stood; v is as ever."""
    queries, width = 4, 2 * pairs
    wholes = [torch.arange(heads * width) for heads in (queries, keys, keys)]
    whole = torch.cat([rows + 1000 * n for n, rows in enumerate(wholes)])
    seen: set[int] = set()
    for rank in range(size):
        heads = heads_of(layer := packed(rank, size, queries, keys, width), paired=True)
        held = [rows[start:stop] for rows, (_, (start, stop)) in zip(wholes, (heads.query, heads.key, heads.value), strict=True)]
        q, k = (rows.view(-1, pairs, 2).transpose(1, 2).reshape(-1) for rows in held[:2])
        rows = torch.cat([q, k + 1000, held[2] + 2000])
        layer.weight = rows[:, None]
        given = HostParameter("qkv_proj.weight", layer.weight, (len(whole), 1), (((0, 0),), ()), sizes=(1, 1, 1))
        spans = as_in_checkpoint(given, heads).spans
        places = [place for start, stop in spans[0] for place in range(start, stop)]
        assert whole[places].tolist() == rows.tolist()
        assert spans[1] == ()
        seen.update(places)
        columns = [column for start, stop in heads.placement("layers.0.attn.q_rope").spans for column in range(start, stop)]
        assert wholes[0][columns].tolist() == q.tolist()
        assert heads.placement("layers.0.attn.core").width == queries * width
        assert heads.held("layers.0.attn.k") == len(k)
    assert seen == set(range(len(whole)))
    assert as_in_checkpoint(given, heads_of(layer)) is given


class GptOssRoutedExperts(SimpleNamespace):
    """What is read of such a layer."""


def test_sinks_and_alternating_experts_know_their_part() -> None:
    """Attention sinks are cut by heads; experts whose gate and up rows alternate are cut in one piece, their biases too."""
    attention = SimpleNamespace(qkv_proj=packed(1, 2, 4, 4, 8))
    sinks = host_parameter("attn", "sinks", attention, torch.zeros(2), False, "", WHOLE)
    assert (sinks.shape, sinks.spans) == ((4,), (((2, 4),),))
    experts = {"tp_rank": 1, "tp_size": 2}
    sizes = {"global_num_experts": 4, "local_num_experts": 4, "hidden_size": 3, "intermediate_size_per_partition": 2}
    module = GptOssRoutedExperts(**sizes, _expert_map=None)
    weight = host_parameter("experts", "w13_weight", module, torch.zeros(4, 4, 3), False, "", experts)
    bias = host_parameter("experts", "w13_bias", module, torch.zeros(4, 4), False, "", experts)
    assert (weight.shape, weight.spans, weight.sizes) == ((4, 8, 3), ((), ((4, 8),), ()), ())
    assert (bias.shape, bias.spans) == ((4, 8), ((), ((4, 8),)))
    assert host_parameter("experts", "w2_bias", module, torch.zeros(4, 3), False, "", experts).shape == (4, 3)
