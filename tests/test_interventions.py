"""Tests of ``tracer.record.interventions``: what they change, that nothing else changes, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tracer
from tests.playback import Full, Rank, Stage, cut, padded, tensor_parallel
from tests.small_model import MAP, SmallHost, SmallModel, small_map
from tests.test_dumping import IDS, record
from tests.tiny_models import make_ids, make_model
from tracer.errors import Code, UsageError
from tracer.format.schema import Axis
from tracer.record.interventions import nudge_values

BLOCK_INPUTS = ["embedding", "layers.*.residual"]


# ---------------------------------------------------------------- nudge


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_nudge_is_one_step_of_the_dtype(dtype: torch.dtype) -> None:
    """Every finite value moves to its neighbour on one side; zero, the largest value and what is not finite are in order too."""
    largest = torch.finfo(dtype).max
    values = torch.tensor([1.0, -1.0, 0.0, -0.0, largest, -largest, 1e-3, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    for away in (True, False):
        moved = nudge_values(values, torch.full(values.shape, away), 1)
        assert torch.equal(moved[7:9], values[7:9])
        assert moved[9].isnan()
        outwards = torch.tensor([away, away, True, True, False, False, away])
        wanted = torch.where(outwards, values[:7].sign() * torch.inf, torch.zeros(7, dtype=dtype))
        wanted[2:4] = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
        expected = torch.nextafter(values[:7].double(), wanted.double()) if dtype is torch.float64 else _next(values[:7], wanted)
        assert torch.equal(moved[:7].view(torch.uint8), expected.to(dtype).view(torch.uint8))
    with pytest.raises(UsageError) as caught:
        nudge_values(torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), 1)
    assert caught.value.code is Code.INTERVENTION_REFUSED


def _next(values: torch.Tensor, towards: torch.Tensor) -> torch.Tensor:
    """``nextafter`` for narrow floats, by their bits."""
    if values.dtype is torch.float32:
        return torch.nextafter(values, towards)
    bits = values.view(torch.int16)
    return torch.where(towards.abs() > values.abs(), bits + 1, bits - 1).view(values.dtype)


def test_a_nudge_follows_the_token_and_not_the_batch(tmp_path: Path) -> None:
    """The same prefix is nudged alike in another batch order; every row moves; the trace holds what was computed with."""
    sides = []
    for name, ids in (("a", IDS), ("b", IDS.flip(0))):
        model = SmallModel()
        with torch.no_grad(), tracer.trace(model, map=small_map(tmp_path), out=tmp_path / name, host=SmallHost(model), perturb_ulps=1) as t:
            nudged = model(ids)["logits"]
            assert not torch.equal(nudged, SmallModel()(ids)["logits"])
        sides.append(t.path)
    result = tracer.diff_traces(*sides)
    assert (result.exit, result.counts.rows_differing) == (2, 0)
    assert next(f.text for f in result.findings if f.code.value == "intervention").startswith(
        "INTERVENTION: A was recorded with perturb_ulps=1"
    )
    plain = record(tmp_path, "plain", ids=IDS)
    embedding = next(entry for entry in tracer.diff_traces(plain, sides[0]).boundaries if entry.name == "embedding")
    assert embedding.rows_differing == embedding.rows_compared == 8
    assert embedding.distance is not None
    assert 0 < (embedding.distance.largest or 0) < 1e-6


def test_a_nudge_does_not_need_token_ids(tmp_path: Path) -> None:
    """Sequences whose ids are unknown are nudged by name and position."""
    model = SmallModel()
    plain = model(IDS)["logits"]
    with (
        torch.no_grad(),
        tracer.trace(model, map=small_map(tmp_path), out=tmp_path / "a", host=SmallHost(model, ids_known=False), perturb_ulps=2),
    ):
        nudged = model(IDS)["logits"]
    assert 0 < (nudged - plain).abs().max() < 1e-4


# ---------------------------------------------------------------- feed


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with side ``a``, its block inputs dumped."""
    folder = tmp_path_factory.mktemp("fed")
    record(folder, "a", dump=BLOCK_INPUTS)
    return folder


def test_every_block_shows_its_own_error(fed: Path) -> None:
    """Fed with the other side's inputs, a block that computes the same gives the same bits, whatever went wrong before it; several faults
    are several roots."""
    model = SmallModel(layers=2)
    with torch.no_grad():
        for layer in (0, 1):
            model.layer(layer).mlp.down.bias.add_(0.5)
    with torch.no_grad(), tracer.trace(model, map=small_map(fed), out=fed / "b", host=SmallHost(model), weights=False, feed=fed / "a") as t:
        model(IDS[:, :4])  # the first four tokens of both, in one batch without padding
    result = tracer.diff_traces(fed / "a", t.path)
    assert [root.place.boundary for root in result.roots] == ["layers.0.mlp.out", "layers.1.mlp.out"]
    assert "[under INTERVENTION]" in result.headline
    manifest = tracer.open_trace(t.path).manifest
    assert manifest.interventions == (f"feed={tracer.open_trace(fed / 'a').manifest.run_id}",)
    assert sorted(manifest.replaced) == ["embedding", "layers.0.residual", "layers.1.residual"]
    equal = {entry.name for entry in result.boundaries if entry.rows_compared and not entry.rows_differing}
    assert {"embedding", "layers.0.attn.out", "layers.1.attn.out"} <= equal


def test_what_follows_is_computed_from_the_fed_values(fed: Path) -> None:
    """A side whose embedding is broken computes everything behind it as the other side did, bit for bit."""
    model = SmallModel()
    with torch.no_grad():
        wanted = SmallModel()(IDS)["logits"]
        model.embed.weight += 1.0
        with tracer.trace(model, map=small_map(fed), out=fed / "c", host=SmallHost(model), feed=fed / "a"):
            found = model(IDS, mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]))["logits"]
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1, :4], wanted[1, :4])


def test_another_dtype_is_cast_and_the_trace_says_so(fed: Path) -> None:
    """Values of a wider dtype are rounded to this side's."""
    model = SmallModel().to(torch.bfloat16)
    with torch.no_grad(), tracer.trace(model, map=small_map(fed), out=fed / "d", host=SmallHost(model), weights=False, feed=fed / "a") as t:
        model(IDS[:1])
    assert tracer.open_trace(t.path).manifest.interventions[0].endswith("(cast from float32)")


def refused(model: torch.nn.Module, host: SmallHost, folder: Path, ids: torch.Tensor = IDS, **options: Any) -> UsageError:
    """The refusal of a run; an incomplete trace is left where a forward had begun, and none where it had not."""
    with pytest.raises(UsageError) as caught, torch.no_grad(), tracer.trace(model, map=small_map(folder), host=host, **options):
        model(ids)
    assert caught.value.code is Code.INTERVENTION_REFUSED
    return caught.value


def test_feeding_refuses_what_it_cannot_do_right(fed: Path, tmp_path: Path) -> None:
    """Unknown ids, tokens the other side lacks, a trace without values, and split sequences are refused with one code."""
    model, feed = SmallModel(), fed / "a"
    out = tmp_path / "x"
    error = refused(model, SmallHost(model, ids_known=False), tmp_path, feed=feed, out=out)
    assert "token ids of its rows are not known" in error.what
    assert tracer.open_trace(out).findings[0].code.value == "trace-incomplete"
    assert "does not have all of its tokens" in refused(model, SmallHost(model), tmp_path, IDS + 1, feed=feed, out=tmp_path / "y").what
    assert "has none of embedding" in refused(model, SmallHost(model), tmp_path, feed=record(tmp_path, "plain"), out=tmp_path / "z").what
    split = SmallHost(model, axes=(Axis(name="cp", index=0, size=2),), world_size=2)
    assert refused(model, split, tmp_path, feed=feed, out=tmp_path / "w").found == "cp=2"
    assert not (tmp_path / "w").exists()
    wider = SmallModel(width=32)
    assert "width" in refused(wider, SmallHost(wider), tmp_path, feed=feed, out=tmp_path / "v").what


def test_sharded_columns_cannot_be_fed(full: Full, tmp_path: Path) -> None:
    """Processes that hold parts of a block's columns refuse before the run where the map tells. Where only the host does, no forward
    raises, for others may wait in a collective: every process says why on leaving, and the trace is incomplete."""
    stage = Stage(tmp_path)
    a = stage.play("a", full, Rank([padded(full, ["s0"])]), dump=BLOCK_INPUTS)
    halves = tensor_parallel([padded(full, ["s0"])], 2, lambda r: {"residual": cut((16 * r, 16 * r + 16), width=32)})
    bindings = {"layers.{layer}.residual": {"module": "layers.{layer}.residual", "layout": "b s c", "shard": {"tp": "c"}}}
    with pytest.raises(UsageError) as caught:
        stage.play("b", full, halves, bindings=bindings, feed=a)
    assert caught.value.code is Code.INTERVENTION_REFUSED
    assert not (tmp_path / "b").exists()
    halves = tensor_parallel([padded(full, ["s0"])], 2, lambda r: {"residual": cut((16 * r, 16 * r + 16), width=32)})
    found = tracer.open_trace(stage.play("c", full, halves, feed=a)).findings
    assert [finding.code.value for finding in found[:2]] == ["trace-incomplete"] * 2
    assert "this process holds a part of its values" in found[0].text


def test_rows_the_other_side_never_computed_keep_their_own(tmp_path: Path) -> None:
    """A last token that the other side declares never computed is left alone and counted; one that later tokens read is refused."""
    record(tmp_path, "a", dump=BLOCK_INPUTS, tokens=range(5))
    model = SmallModel()
    with torch.no_grad(), tracer.trace(model, map=small_map(tmp_path), out=tmp_path / "b", host=SmallHost(model), feed=tmp_path / "a") as t:
        model(IDS[:1])
    assert tracer.open_trace(t.path).manifest.interventions[0].endswith("(1 rows that the other side never computed keep their own)")
    record(tmp_path, "gap", dump=BLOCK_INPUTS, tokens=[0, 1, 3, 4, 5])
    error = refused(model, SmallHost(model), tmp_path, IDS[:1], feed=tmp_path / "gap", out=tmp_path / "c")
    assert "later ones read them" in error.what


def test_recompute_under_checkpointing_is_refused(fed: Path, tmp_path: Path) -> None:
    """A forward that runs again in the backward would start from other values: it raises instead."""
    model = SmallModel()

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        x = model.embed(input_ids)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return model.head(x)  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign, assignment]
    entering = MAP.replace("embedding: {module: embed, layout", 'embedding: {module: layers.0, leaf: "input[0]", layout')
    with (
        pytest.raises(UsageError, match="recomputes"),
        tracer.trace(model, map=small_map(tmp_path, entering), out=tmp_path / "b", host=SmallHost(model), feed=fed / "a"),
    ):
        model(IDS[:1]).sum().backward()


# ---------------------------------------------------------------- pin

ROUTED = ["qwen3_moe", "olmoe", "deepseek_v3"]
"""Softmax and normalised, softmax alone, sigmoid with groups and a correction bias. The other families route like the first two."""


@pytest.mark.parametrize("family", ROUTED)
def test_a_pinned_router_chooses_as_the_other_side(family: str, tmp_path: Path) -> None:
    """The other side's experts are used with weights of this side's own scores; tokens that chose alike keep every bit."""
    a, b = (make_model(family, num_hidden_layers=2) for _ in range(2))
    routers = [module for module in b.modules() if type(module).__name__.lower().endswith(("topkrouter", "toprouter"))]
    assert routers
    with torch.no_grad():
        routers[-1].weight += 0.1 * torch.randn(routers[-1].weight.shape, generator=torch.Generator().manual_seed(0))
    ids, names = make_ids(), "*.moe.topk_ids"
    with torch.no_grad():
        plain = a(ids).logits
        with tracer.trace(a, out=tmp_path / "a", weights=False, strict=True):
            a(ids)
        with tracer.trace(a, out=tmp_path / "self", weights=False, pin={names: tmp_path / "a"}, strict=True):
            assert torch.equal(a(ids).logits, plain)
        with tracer.trace(b, out=tmp_path / "b", weights=False, strict=True):
            b(ids)
        with tracer.trace(b, out=tmp_path / "pinned", weights=False, pin={names: tmp_path / "a"}, strict=True) as t:
            b(ids)
    free, pinned = tracer.diff_traces(tmp_path / "a", tmp_path / "b"), tracer.diff_traces(tmp_path / "a", t.path)
    flipped = [entry for entry in free.boundaries if entry.name.endswith("topk_ids") and entry.rows_differing]
    assert flipped
    assert not [entry for entry in pinned.boundaries if entry.name.endswith("topk_ids") and entry.rows_differing]
    assert pinned.exit == 1
    told = tracer.open_trace(t.path).manifest.interventions[0]
    assert told.startswith(f"pin {names}=")
    assert f"({flipped[0].rows_differing} choices changed)" in told
    weights_b, weights_p = (_weights(path, flipped[0].name) for path in (tmp_path / "b", t.path))
    alike = (_ids(tmp_path / "a", flipped[0].name) == _ids(tmp_path / "b", flipped[0].name)).all(axis=1)
    assert 0 < alike.sum() < len(alike)
    np.testing.assert_array_equal(weights_b[alike], weights_p[alike])
    assert (weights_b[~alike] != weights_p[~alike]).any()


def _ids(path: Path, name: str) -> Any:
    return tracer.open_trace(path).boundaries[name].load_values()


def _weights(path: Path, name: str) -> Any:
    return tracer.open_trace(path).boundaries[name.replace("topk_ids", "topk_weights")].digest_R2


def test_pinning_refuses_what_it_cannot_do_right(tmp_path: Path) -> None:
    """A router without torch.topk, a boundary that is no choice, one that is not recorded, and another token are refused."""
    model, ids = make_model("mixtral", num_hidden_layers=1), make_ids()
    with torch.no_grad(), tracer.trace(model, out=tmp_path / "a", weights=False, strict=True):
        model(ids)

    def refusal(name: str, glob: str = "*.moe.topk_ids", tokens: torch.Tensor = ids) -> str:
        with pytest.raises(UsageError) as caught, torch.no_grad(), tracer.trace(model, out=tmp_path / name, pin={glob: tmp_path / "a"}):
            model(tokens)
        assert caught.value.code is Code.INTERVENTION_REFUSED
        return caught.value.what

    assert "no choice" in refusal("b", "*.moe.topk_weights")
    assert "matches no boundary" in refusal("c", "*.nothing")
    assert "does not have all" in refusal("d", tokens=ids + 1)
    router = model.model.layers[0].mlp.gate

    def sorting(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        found = logits.softmax(-1).sort(dim=-1, descending=True)
        return logits, found.values[:, :2], found.indices[:, :2]

    router.forward = sorting
    assert "runs no torch.topk" in refusal("e")


def test_an_intervention_that_never_happens_makes_the_trace_incomplete(fed: Path, tmp_path: Path) -> None:
    """A block that the run never enters was not fed, and the run is not the one that was asked for."""
    model = SmallModel()

    def forward(input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": model.head(model.layer(0)(model.embed(input_ids)))}

    model.forward = forward  # type: ignore[method-assign, assignment]
    with torch.no_grad(), tracer.trace(model, map=small_map(tmp_path), out=tmp_path / "b", host=SmallHost(model), feed=fed / "a") as t:
        model(IDS[:1])
    assert "the intervention never reached layers.1.residual" in tracer.open_trace(t.path).findings[0].text
