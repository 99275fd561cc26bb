"""Recomputation under activation checkpointing finds its forward (``tracer.record.recompute``)."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests.small_model import Recorded, SmallHost, SmallModel, read_back, small_map
from tests.tiny_models import make_ids, make_model
from tracer.format.schema import BoundaryStatus
from tracer.record.recompute import RecomputeFinder, in_backward

KINDS = ("reentrant", "non-reentrant")
IDS = [torch.tensor([[11 + n, 12, 13 + n, 14]]) for n in range(4)]


def record(folder: Path, model: SmallModel, order: list[int], level: int = 2) -> Recorded:
    """Forward all micro-batches, then backward in this order."""
    with tracer.trace(model, map=small_map(folder), host=SmallHost(model), out=folder / "trace", level=level, strict=True):
        losses = [model(ids)["logits"].square().sum() for ids in IDS]
        for n in order:
            losses[n].backward()
    return read_back(folder / "trace")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
def test_outstanding_micro_batches_are_told_apart(kind: str, order: list[int], tmp_path: Path) -> None:
    """With four forwards outstanding every recomputed row lands in its own forward and equals the first pass."""
    model = SmallModel().checkpoint_layers(kind)
    recorded = record(tmp_path, model, order)
    for name in ("layers.0.attn.out", "layers.1.attn.out", "layers.1.mlp.gate_up"):
        assert recorded.again[name] == recorded.rows[name]
    boundary = recorded.boundary("layers.0.attn.out")
    assert (boundary.executions, boundary.recomputed, boundary.row_count) == (4, 4, 16)
    assert {boundary.status for boundary in recorded.manifest.boundaries} == {BoundaryStatus.RECORDED}
    assert recorded.manifest.notes == ()


def test_an_early_stop_is_no_finding(tmp_path: Path) -> None:
    """Modules that the recomputation does not reach again are recorded once, and nothing is said about it."""
    model = SmallModel().checkpoint_layers("non-reentrant")
    recorded = record(tmp_path, model, [0, 1, 2, 3])
    assert recorded.boundary("layers.0.mlp.out").recomputed < 4
    assert recorded.manifest.complete


@pytest.mark.parametrize("kind", KINDS)
def test_training_step_by_step_needs_no_help(kind: str, tmp_path: Path) -> None:
    """Forward, backward, forward, backward: the only forward not recomputed yet is the one, at any level."""
    model = SmallModel().checkpoint_layers(kind)
    with tracer.trace(model, map=small_map(tmp_path), host=SmallHost(model), out=tmp_path / "trace", level=1, strict=True):
        for ids in IDS:
            model(ids)["logits"].square().sum().backward()
    recorded = read_back(tmp_path / "trace")
    assert recorded.again["layers.1.attn.out"] == recorded.rows["layers.1.attn.out"]
    assert recorded.manifest.notes == ()


def test_what_cannot_be_attributed_is_not_recorded(tmp_path: Path) -> None:
    """Where only modules inside the regions are watched and several forwards are outstanding, nothing is guessed."""
    model = SmallModel().checkpoint_layers("reentrant")
    recorded = record(tmp_path, model, [2, 0, 3, 1], level=1)
    right = recorded.rows["layers.1.attn.out"]
    for key, value in recorded.again.get("layers.1.attn.out", {}).items():
        assert right[key] == value
    notes = {note.code: note.text for note in recorded.manifest.notes}
    again = len(recorded.again.get("layers.1.attn.out", {}))
    assert again == 16 or "recompute-unattributed" in notes


def test_a_second_backward_recomputes_again(tmp_path: Path) -> None:
    """Two backwards through one graph are two recomputations of the same use of the module."""
    model = SmallModel().checkpoint_layers("non-reentrant")
    with tracer.trace(model, map=small_map(tmp_path), host=SmallHost(model), out=tmp_path / "trace", level=2, strict=True):
        loss = model(IDS[0])["logits"].square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    recorded = read_back(tmp_path / "trace")
    assert recorded.boundary("layers.0.attn.out").recomputed == 2
    assert {block.occurrence for block in recorded.blocks} == {0}
    assert recorded.again["layers.0.attn.out"] == recorded.rows["layers.0.attn.out"]


def test_a_recomputation_that_differs_is_kept(tmp_path: Path) -> None:
    """Recomputed rows that are not those of the first pass are recorded as they are, for the reader to find."""
    model = SmallModel().checkpoint_layers("non-reentrant")

    def off(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * 1.5 if in_backward() else None

    handle = model.layer(1).mlp.up.register_forward_hook(off)
    recorded = record(tmp_path, model, [0, 1, 2, 3])
    handle.remove()
    assert recorded.again["layers.1.mlp.gate_up"] != recorded.rows["layers.1.mlp.gate_up"]
    assert recorded.again["layers.0.mlp.gate_up"] == recorded.rows["layers.0.mlp.gate_up"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_library_models_checkpoint_too(reentrant: bool, tmp_path: Path) -> None:
    """A transformers model under its own gradient checkpointing is recorded with its recomputation."""
    model = make_model("qwen3_moe").train().requires_grad_(True)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with tracer.trace(model, out=tmp_path / "trace", level=2, strict=True):
        for seed in range(2):
            model(input_ids=make_ids(2, 7, seed=seed), use_cache=False).logits.float().square().mean().backward()
    recorded = read_back(tmp_path / "trace")
    for name in ("layers.1.attn.q", "layers.1.attn.q_rope", "layers.1.attn.out", "layers.2.attn.norm"):
        assert recorded.again[name] == recorded.rows[name]


def test_a_mask_shared_by_forwards_tells_nothing() -> None:
    """A living tensor that two forwards were given names neither of them."""
    finder: RecomputeFinder[str] = RecomputeFinder()
    mask, hidden = torch.zeros(2), torch.zeros(2)
    with torch.no_grad():
        finder.note_first_pass("a", (mask,), {})
        finder.note_first_pass("b", (mask,), {"hidden": hidden})
    assert finder.find((mask,), {}) is None
    assert finder.find((mask,), {"hidden": hidden}) == "b"


def test_memory_used_again_tells_nothing() -> None:
    """What was freed since is not mistaken for a new tensor at the same address."""
    finder: RecomputeFinder[str] = RecomputeFinder()
    with torch.no_grad():
        hidden = torch.zeros(1 << 16)
        address = hidden.data_ptr()
        finder.note_first_pass("a", (hidden,), {})
        del hidden
        kept = [torch.zeros(1 << 16) for _ in range(8)]
    again = next((tensor for tensor in kept if tensor.data_ptr() == address), None)
    assert again is None or finder.find((again,), {}) is None


def test_an_ordinary_forward_is_not_kept(tmp_path: Path) -> None:
    """Without checkpointed regions nothing of a training forward outlives it."""
    kept: list[Any] = []

    class Remembering(SmallHost):
        def begin_forward(self, *arguments: Any) -> Any:
            forward = super().begin_forward(*arguments)
            kept.append(weakref.ref(forward))
            return forward

    model = SmallModel()
    with tracer.trace(model, map=small_map(tmp_path), host=Remembering(model), out=tmp_path / "trace", level=2, strict=True):
        for ids in IDS:
            model(ids)["logits"].square().sum().backward()
        gc.collect()
        assert [reference() for reference in kept[:-1]] == [None] * 3
