"""Scenarios S65 to S70: capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tracer
from tests.expectations import expect_could_not_tell, expect_different, expect_disagreement, expect_same
from tests.playback import POINTS, Full, L, Leaf, PlaybackModel, Point, Rank, Stage, batch, write_map
from tracer.errors import MapError
from tracer.read.findings import FindingCode, Side
from tracer.record.boundaries import resolve
from tracer.record.boundary_maps import load_boundary_map


@dataclass
class Output:
    """A model-output class."""

    hidden: torch.Tensor


def bind(leaf: str) -> Mapping[str, dict[str, Any]]:
    return {L + "attn.out": {"module": L + "attn_out", "leaf": leaf, "layout": "b s c"}}


@pytest.mark.parametrize(
    ("leaf", "wrap"),
    [
        ("output.hidden", lambda tensor: {"hidden": tensor, "cache": None}),
        ("output.hidden", lambda tensor: Output(tensor)),
        ("output", lambda tensor: tensor),
    ],
    ids=["dict", "attribute", "bare"],
)
def test_s65_containers(leaf: str, wrap: Callable[[torch.Tensor], Any], full: Full, plain: Path, tmp_path: Path) -> None:
    """The leaf may be a value of a dict, an attribute of an output class, or the tensor itself."""

    def pack(name: str, tensor: torch.Tensor) -> Any:
        return wrap(tensor) if name.endswith("attn.out") else tensor

    b = Stage(tmp_path).play("b", full, Rank(batch(full)), bindings=bind(leaf), wrap=pack)
    expect_same(tracer.diff_traces(plain, b), rows=12)


def test_s66_changed_in_place_after_the_hook(full: Full, plain: Path, tmp_path: Path) -> None:
    """What the hook saw is recorded, whatever the next module does to the buffer."""

    class Spoiled(PlaybackModel):
        def run(self, step: str, x: Any) -> Any:
            result = super().run(step, x)
            leaf = self.get_submodule(step)
            if isinstance(leaf, Leaf):
                leaf.prepared[leaf.calls - 1].add_(1)
            return result

    expect_same(tracer.diff_traces(plain, Stage(tmp_path).play("b", full, Rank(batch(full)), model=Spoiled)), rows=12)


@pytest.mark.parametrize("leaf", ["output[2]", "output[1]"], ids=["a", "b"])
def test_s67_tuples(leaf: str, full: Full, tmp_path: Path) -> None:
    """A tuple's third item equals the bare tensor elsewhere; a leaf that is None is vacuous and says so."""
    stage = Stage(tmp_path)

    def pack(name: str, tensor: torch.Tensor) -> Any:
        return (torch.zeros(3), None, tensor) if name.endswith("attn.out") else tensor

    a = stage.play("a", full, Rank(batch(full)))
    b = stage.play("b", full, Rank(batch(full)), bindings=bind(leaf), wrap=pack)
    result = tracer.diff_traces(a, b)
    if leaf == "output[2]":
        expect_same(result, rows=12)
    else:
        findings = expect_could_not_tell(result, FindingCode.VACUOUS)
        assert {finding.boundary for finding in findings} == {f"layers.{n}.attn.out" for n in range(4)}
        assert "leaf is None" in findings[0].text


def test_s68_names_are_data(tmp_path: Path) -> None:
    """Boundary names with slashes, dots and spaces, or of 300 characters, never become paths and are shown in full."""
    odd, long = "weird / ../.. name", "x" * 300
    a = Full(points=[POINTS[0], Point(odd, 8, ("embedding",)), Point(long, 32, ("embedding",))])
    b = a.copy().nudge(long, ("s1", 2))
    stage = Stage(tmp_path / "inside")
    (tmp_path / "inside").mkdir()
    result = tracer.diff_traces(stage.plain("a", a), stage.plain("b", b))
    expect_different(result, long, "s1", 2)
    assert [entry.name for entry in result.boundaries][-2:] == [odd, long]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside"]
    assert {path.name for path in (tmp_path / "inside").iterdir()} == {"a", "b", "a-0.yaml", "b-0.yaml"}


class Replay(torch.autograd.Function):
    """Returns a prepared tensor, with a backward that needs what the forward saved (so that checkpointing recomputes)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return prepared.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x), None


class GradLeaf(Leaf):
    """A leaf on the autograd path."""

    def forward(self, x: Any = None) -> Any:
        self.calls += 1
        prepared = self.prepared[(self.calls - 1) % len(self.prepared)]
        apply: Any = Replay.apply
        return apply(x, prepared) if prepared.is_floating_point() else prepared


class Checkpointed(PlaybackModel):
    """Layer 1 runs under activation checkpointing, and the forward is followed by a backward."""

    def __init__(self, full: Full) -> None:
        super().__init__(full)
        for module in list(self.modules()):
            if isinstance(module, Leaf):
                module.__class__ = GradLeaf

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = torch.zeros(2, requires_grad=True)
        carried = x * 1

        def layer(carried: torch.Tensor) -> torch.Tensor:
            total = carried
            for leaf in self.get_submodule("layers.1").children():
                out = leaf(carried)
                if out.is_floating_point():
                    total = total + out.float().sum() * 0
            return total

        for step in self.steps:
            if step == "layers.1":
                carried = checkpoint(layer, carried, use_reentrant=False)
            elif step.startswith("layers."):
                for leaf in self.get_submodule(step).children():
                    leaf(carried)
            else:
                self.get_submodule(step)(carried)
        return carried.sum()


@pytest.mark.parametrize("off", [False, True], ids=["a", "b"])
def test_s69_activation_checkpointing(off: bool, full: Full, plain: Path, tmp_path: Path) -> None:
    """Recomputed rows are counted apart and checked against the first pass."""
    stage = Stage(tmp_path)

    def change(model: PlaybackModel, rank: Rank) -> None:
        if off:
            leaf = model.leaf("layers.1.mlp.out")
            second = leaf.prepared[0].clone()
            second[1, 1].view(torch.int16)[17] += 1
            leaf.prepared.append(second)

    class Driver(Stage):
        def drive(self, model: PlaybackModel, full: Full, rank: Rank) -> None:
            grid = rank.grids[0]
            tokens = torch.tensor([[0 if row is None else full.ids[row[0]][row[1]] for row in line] for line in grid])
            positions = torch.tensor([[0 if row is None else row[1] for row in line] for line in grid])
            model(input_ids=tokens, position_ids=positions).backward()

    b = Driver(stage.folder).play("b", full, Rank(batch(full)), model=Checkpointed, prepare=change)
    result = tracer.diff_traces(plain, b)
    trace = tracer.open_trace(b)
    recomputed = trace.boundaries["layers.1.attn.out"]
    assert (recomputed.executions, recomputed.recomputed) == (1, 1)
    assert trace.boundaries["layers.2.attn.out"].recomputed == 0
    if off:
        expect_disagreement(result, FindingCode.RECOMPUTE_DISAGREES, Side.B, "layers.1.mlp.out", "s1", 1)
    else:
        expect_same(result, rows=12)


@pytest.mark.parametrize(
    ("binding", "key"),
    [
        ({"module": "embedding", "layout": "b s c", "colour": "red"}, "colour"),
        ({"module": "embedding", "layout": "b s c", "shard": {"tp": "c"}, "replicated": ["tp"]}, "tp"),
        ({"module": "embedding", "layout": "b s c", "shard": {"cp": "c"}, "order": {"c": "zigzag"}}, "order"),
    ],
    ids=["unknown_key", "sharded_and_replicated", "zigzag_columns"],
)
def test_s70_refused_maps(binding: dict[str, Any], key: str, full: Full, tmp_path: Path) -> None:
    """A map that contradicts itself is refused before anything runs, by file, key, expected and found."""
    path = write_map(tmp_path / "bad.yaml", full, {}, {"embedding": binding}, {})
    with pytest.raises(MapError) as caught:
        load_boundary_map(str(path))
    assert "bad.yaml" in caught.value.where + str(caught.value)
    assert key in str(caught.value)
    assert caught.value.expected
    assert caught.value.found


def test_s70_selector_without_module(full: Full, tmp_path: Path) -> None:
    """A selector that matches no module is listed with its reason and counted."""
    path = write_map(tmp_path / "map.yaml", full, {}, {"final_norm": {"module": "no_such", "layout": "b s c"}}, {})
    names = {name: type(module).__name__ for name, module in PlaybackModel(full).named_modules()}
    plan = resolve(load_boundary_map(str(path)), "playback", names, level=2, boundaries=None)
    assert [name for name, _ in plan.unresolved] == ["final_norm"]
    assert "no_such" in dict(plan.unresolved)["final_norm"]
    assert f"{plan.bound - 1} of {plan.bound} boundaries resolved" in plan.summary
