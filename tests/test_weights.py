"""Weight fingerprints: names, rows, splitting, sharding, and whether weights changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_models import FAMILIES, make_model
from tracer.errors import Code, MapError
from tracer.format.fingerprint import digest_of_rows
from tracer.format.schema import MapIdentity, Span, Weight
from tracer.hosts import find_host
from tracer.record.boundaries import Plan, WeightRule, resolve
from tracer.record.boundary_maps import map_for_root_class
from tracer.record.fingerprint_tensors import fingerprint_tensor
from tracer.record.host import HostParameter
from tracer.record.weights import WeightSnapshot, fingerprint_weights, weights_changed


def plan_of(model: Any) -> Plan:
    host = find_host(model)
    classes = {path: type(module).__name__ for path, module in host.modules().items()}
    return resolve(map_for_root_class(host.root_class(), "transformers"), "transformers", classes)


def snapshot(model: Any, mode: str = "digest") -> WeightSnapshot:
    return fingerprint_weights(find_host(model), plan_of(model), mode)


def by_name(weights: WeightSnapshot) -> dict[str, Weight]:
    assert len(set(weights.names)) == len(weights.names)
    return {weight.name: weight for weight in weights.weights}


@dataclass
class Holder:
    """A host that only holds parameters."""

    held: list[HostParameter]
    columns: Mapping[str, int] = field(default_factory=dict)

    def parameters(self) -> Iterator[HostParameter]:
        return iter(self.held)

    def local_columns(self, boundary: str) -> int | None:
        return self.columns.get(boundary)


def rules(*given: WeightRule) -> Plan:
    identity = MapIdentity(family="x", host="x", root_class="X", digest="")
    return Plan(identity, "x.yaml", 1, (), (), given, (), 0)


def expected(rows: torch.Tensor) -> tuple[str, str]:
    """Digest of a whole matrix, straight from the definition."""
    digests = fingerprint_tensor(rows.contiguous(), width=rows.shape[1]).resolve().digest_N2
    first, second = digest_of_rows(digests, np.arange(len(rows)))
    return f"{first:016x}", f"{second:016x}"


# ------------------------------------------------------------------------------------------------ real models


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_and_buffer_is_named_once(family: str) -> None:
    """Each element of the model is in exactly one weight; the map leaves no parameter without a semantic name."""
    model = make_model(family, torch.bfloat16)
    weights = snapshot(model).weights
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in held.items():
        assert sum(weight.rows * weight.columns for weight in weights if weight.parameter == name) == tensor.numel()
    assert not [weight.name for weight in weights if weight.unknown or weight.digest == ("", "")]
    assert not [weight.name for weight in weights if weight.name.startswith("other.") and not weight.buffer]


def test_stacked_experts_are_taken_apart() -> None:
    """Expert e's gate, up and down are the digests of their own slices of the fused parameters."""
    model = make_model("qwen3_moe")
    found = by_name(snapshot(model))
    experts = model.model.layers[2].mlp.experts
    for e in (0, 5):
        gate, up = experts.gate_up_proj[e].chunk(2)
        for name, rows in (("gate", gate), ("up", up), ("down", experts.down_proj[e])):
            weight = found[f"layers.2.moe.experts.{e}.{name}.weight"]
            assert weight.digest == expected(rows)
            assert (weight.rows, weight.columns) == tuple(rows.shape)


def test_transposed_storage_is_turned_and_packed_rows_are_split() -> None:
    """A packed (in, out) projection gives q, k and v as output rows; its bias is split by elements."""
    model = make_model("gpt2")
    found = by_name(snapshot(model))
    packed = model.transformer.h[1].attn.c_attn
    for name, rows, bias in zip("qkv", packed.weight.t().split(64), packed.bias.split(64), strict=True):
        assert found[f"layers.1.attn.{name}.weight"].digest == expected(rows)
        assert found[f"layers.1.attn.{name}.bias"].digest == expected(bias[None])


def test_same_values_in_other_storage_have_the_same_digests() -> None:
    """Float32 and a permuted memory layout aside, only the values count: a strided copy of every weight changes nothing."""
    model, other = make_model("qwen3"), make_model("qwen3")
    for parameter in other.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    assert [weight.digest for weight in snapshot(model).weights] == [weight.digest for weight in snapshot(other).weights]


def test_tied_weights_are_listed_under_every_name() -> None:
    """A tied head has its own entry with the embedding's digest and, with rows, the same lines."""
    rows = snapshot(make_model("qwen3", tie_word_embeddings=True), "rows")
    found = by_name(rows)
    assert found["lm_head.weight"].digest == found["embedding.weight"].digest
    assert found["lm_head.weight"].start == found["embedding.weight"].start


def test_rows_add_up_to_the_digest() -> None:
    """With ``rows`` every weight's lines, weighted by row number, sum to the digest that ``digest`` gives."""
    model = make_model("qwen3_moe", torch.bfloat16)
    rows, digests = snapshot(model, "rows"), by_name(snapshot(model))
    lines = np.concatenate([part.digest_N2 for part in rows.parts])
    for weight in rows.weights:
        first, second = digest_of_rows(lines[weight.start : weight.start + weight.rows], np.arange(weight.rows))
        assert (f"{first:016x}", f"{second:016x}") == weight.digest == digests[weight.name].digest
    assert all(part.sketch_N16 is not None for part in rows.parts)


@pytest.mark.parametrize(
    ("family", "plant", "changed"),
    [
        ("qwen3", lambda model: model.model.rotary_emb.inv_freq.zero_(), {"rope.inv_freq"}),
        ("qwen3_moe", lambda model: model.model.layers[2].mlp.gate.weight.data.zero_(), {"layers.2.moe.router.weight"}),
        ("qwen2_moe", lambda model: model.model.layers[2].self_attn.q_proj.bias.data.zero_(), {"layers.2.attn.q.bias"}),
        ("gemma2", lambda model: model.model.layers[1].input_layernorm.weight.data.add_(1), {"layers.1.attn.norm.weight"}),
    ],
    ids=["F10", "F14", "F15", "F16"],
)
def test_planted_weight_faults_differ_in_their_weight_only(family: str, plant: Any, changed: set[str]) -> None:
    """A planted weight or buffer fault changes exactly the digest it should, and the trace's end notices it."""
    model = make_model(family)
    before = snapshot(model)
    plant(model)
    after = by_name(snapshot(model))
    assert {weight.name for weight in before.weights if after[weight.name].digest != weight.digest} == changed
    weights, verdict = weights_changed(before, find_host(model), plan_of(model))
    assert verdict == "changed"
    assert {weight.name for weight in weights if weight.after} == changed
    assert {weight.after for weight in weights if weight.after} == {after[name].digest for name in changed}


def test_unchanged_weights_are_equal_and_unrecorded_ones_unknown() -> None:
    """Nothing changed is ``equal``; without fingerprints nothing can be said."""
    model = make_model("qwen3")
    host, plan = find_host(model), plan_of(model)
    before = snapshot(model)
    assert weights_changed(before, host, plan) == (before.weights, "equal")
    assert weights_changed(fingerprint_weights(host, plan, "none"), host, plan) == ((), "unknown")


# ------------------------------------------------------------------------------------------------ held parts


@given(st.data())
def test_shards_add_up_to_the_whole(data: st.DataObject) -> None:
    """For any cut of rows or columns of any dtype, in any number of spans, the shards' digests sum to the whole digest."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.complex64]))
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 90))
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 100 + columns)).mul(50).to(dtype)
    axis = data.draw(st.sampled_from([0, 1]))
    size = whole.shape[axis]
    owner = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    total = np.zeros(2, np.uint64)
    for part in range(3):
        held = [n for n in range(size) if owner[n] == part]
        spans: tuple[Span, ...] = tuple((n, n + 1) for n in held)
        if not held:
            continue
        both = ((spans, ()), ((), spans))[axis]
        local = (
            whole.index_select(axis, torch.tensor(held))
            if dtype != torch.float8_e4m3fn
            else whole.float().index_select(axis, torch.tensor(held)).to(dtype)
        )
        taken = fingerprint_weights(Holder([HostParameter("w", local, tuple(whole.shape), both)]), rules())  # type: ignore[arg-type]
        weight = taken.weights[0]
        assert (weight.rows, weight.columns) == (rows, columns)
        assert (weight.row_spans, weight.column_spans) == both
        with np.errstate(over="ignore"):
            total += np.array([int(lane, 16) for lane in weight.digest], np.uint64)
    single = fingerprint_weights(Holder([HostParameter("w", whole, tuple(whole.shape))]), rules())  # type: ignore[arg-type]
    assert tuple(f"{int(lane):016x}" for lane in total) == single.weights[0].digest


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_rows_held_in_pieces_are_split_by_name(ranks: int, transpose: bool) -> None:
    """Each rank holds its slice of gate and of up: both names get the rows they own, whatever the storage."""
    whole = torch.randn(24, 5)
    plan = rules(WeightRule("w", ("gate.weight", "up.weight"), transpose))
    total: dict[str, np.ndarray[Any, Any]] = {name: np.zeros(2, np.uint64) for name in ("gate.weight", "up.weight")}
    step = 12 // ranks
    for rank in range(ranks):
        spans: tuple[Span, ...] = ((rank * step, (rank + 1) * step), (12 + rank * step, 12 + (rank + 1) * step))
        local = torch.cat([whole[start:stop] for start, stop in spans])
        stored = HostParameter("w", local, (24, 5), (spans, ()))
        if transpose:
            stored = HostParameter("w", local.t(), (5, 24), ((), spans))
        for weight in fingerprint_weights(Holder([stored]), plan).weights:  # type: ignore[arg-type]
            assert weight.row_spans == ((rank * step, (rank + 1) * step),)
            with np.errstate(over="ignore"):
                total[weight.name] += np.array([int(lane, 16) for lane in weight.digest], np.uint64)
    for name, rows in (("gate.weight", whole[:12]), ("up.weight", whole[12:])):
        assert tuple(f"{int(lane):016x}" for lane in total[name]) == expected(rows)


def test_unequal_parts_follow_shares_or_the_host() -> None:
    """q, k and v of one packed parameter have the sizes the rule's shares or the host give."""
    whole = torch.randn(8, 3)
    names = ("a.q.weight", "a.k.weight", "a.v.weight")
    held = [HostParameter("w", whole, (8, 3))]
    by_shares = fingerprint_weights(Holder(held), rules(WeightRule("w", names, shares=(2, 1, 1))))  # type: ignore[arg-type]
    by_host = fingerprint_weights(Holder(held, {"a.q": 4, "a.k": 2, "a.v": 2}), rules(WeightRule("w", names)))  # type: ignore[arg-type]
    assert by_shares.weights == by_host.weights
    assert [weight.rows for weight in by_shares.weights] == [4, 2, 2]
    assert by_shares.weights[1].digest == expected(whole[4:6])


@pytest.mark.parametrize(
    "rule", [WeightRule("w", ("a", "b", "c")), WeightRule("b", ("e.{expert}.x",))], ids=["uneven parts", "no expert dimension"]
)
def test_rule_that_does_not_fit_is_refused(rule: WeightRule) -> None:
    """A split that leaves a remainder, or experts in a vector, is an error that names the parameter."""
    held = [HostParameter("w", torch.zeros(8, 3), (8, 3)), HostParameter("b", torch.zeros(8), (8,))]
    with pytest.raises(MapError) as caught:
        fingerprint_weights(Holder(held), rules(rule))  # type: ignore[arg-type]
    assert caught.value.code is Code.MAP_UNFIT
    assert rule.parameter in caught.value.what


def test_unreadable_weights_say_why() -> None:
    """What the host cannot give, or no fingerprint is defined for, is listed with its reason and never has a digest."""
    held = [
        HostParameter("gone", None, (4, 2), unknown="repacked"),
        HostParameter("sparse", torch.eye(3).to_sparse(), (3, 3)),
        HostParameter("inner", torch.zeros(2, 2, 2), (2, 2, 4), ((), (), ((0, 2),))),
    ]
    host = Holder(held)
    taken = fingerprint_weights(host, rules())  # type: ignore[arg-type]
    assert all(weight.unknown and weight.digest == ("", "") for weight in taken.weights)
    assert taken.weights[0].unknown == "repacked"
    assert weights_changed(taken, host, rules())[1] == "unknown"  # type: ignore[arg-type]


def test_scalars_vectors_and_kernels_are_matrices() -> None:
    """A scalar is one by one, a vector one row, a convolution kernel one row per output channel."""
    held = [HostParameter(name, tensor, tuple(tensor.shape)) for name, tensor in
            {"s": torch.tensor(2.0), "v": torch.ones(3), "k": torch.ones(4, 2, 3)}.items()]  # fmt: skip
    taken = fingerprint_weights(Holder(held), rules())  # type: ignore[arg-type]
    shapes = [(weight.name, weight.rows, weight.columns) for weight in taken.weights]
    assert shapes == [("other.s", 1, 1), ("other.v", 1, 3), ("other.k", 4, 6)]
