"""Tests of ``tracer.record.replay`` and the facade's ``replay_operator``, on a real model's dump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tracer
from tests.small_model import MAP, SmallHost, SmallModel, small_map
from tests.test_dumping import IDS
from tracer.errors import Code, UsageError
from tracer.format.reference import ReferenceRows
from tracer.record.replay import ReplayResult, replay_rows


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with layer 1 dumped; its map binds the MLP's input too."""
    folder, model = tmp_path_factory.mktemp("replay"), SmallModel()
    text = MAP.replace(
        "  layers.{layer}.mlp.gate_up: {level",
        '  layers.{layer}.mlp.in: {level: 2, from: ["layers.{layer}.attn.out"]}\n  layers.{layer}.mlp.gate_up: {level',
    ).replace('from: ["layers.{layer}.mlp.gate_up"]', 'from: ["layers.{layer}.mlp.in"]')
    text = text.replace(
        "      layers.{layer}.mlp.out:",
        '      layers.{layer}.mlp.in: {module: "layers.{layer}.mlp", leaf: "input[0]", layout: b s c}\n      layers.{layer}.mlp.out:',
    )
    with torch.no_grad(), tracer.trace(model, map=small_map(folder, text), out=folder / "a", host=SmallHost(model), dump="layers.1.*") as t:
        model(IDS)
    return t.path


def replay(module: nn.Module, dump: Path, boundary: str = "layers.1.mlp.out", **more: Any) -> ReplayResult:
    return tracer.replay_operator(module, dump, boundary, **more)


def test_the_module_that_was_dumped_gives_the_dumped_bits(dump: Path) -> None:
    """A module on the inputs it had gives what it gave, with or without a batch axis, and says that it was run on purpose."""
    mlp = SmallModel().layer(1).mlp
    for batched in (True, False):
        found = replay(mlp, dump, batched=batched)
        assert (found.rows, found.rows_equal, found.relative_error, found.cast) == (10, 10, 0.0, "")
    assert str(found).startswith("INTERVENTION: layers.1.mlp.out from layers.1.mlp.in of run ")
    assert found.intervention.startswith("replay_operator layers.1.mlp.out=")


def test_another_module_shows_its_own_error(dump: Path) -> None:
    """A fault in the module alone is seen with its size; another dtype is cast, compared by value and named."""
    mlp = SmallModel().layer(1).mlp
    with torch.no_grad():
        mlp.down.weight.mul_(1.25)
        mlp.down.bias.mul_(1.25)
    found = replay(mlp, dump, inputs=["layers.1.mlp.in"])
    assert found.rows_equal == 0
    assert found.relative_error == pytest.approx(0.25, rel=1e-5)
    rounded = replay(SmallModel().layer(1).mlp.bfloat16(), dump)
    assert (rounded.cast, rounded.dtype, rounded.dumped_dtype, rounded.rows_equal) == ("bfloat16", "bfloat16", "float32", 0)
    assert 0 < (rounded.relative_error or 0) < 0.05
    assert "bfloat16 where float32 was dumped" in str(rounded)


def test_what_cannot_be_replayed_is_refused(dump: Path) -> None:
    """Boundaries that were not dumped or mix tokens, inputs that were not dumped, and a module of another shape are refused."""
    layer = SmallModel().layer(1)
    for module, boundary, inputs, what in (
        (layer.mlp, "layers.0.mlp.out", None, "was not dumped"),
        (layer.attn, "layers.1.attn.out", None, "not computed row by row"),
        (layer.mlp, "layers.1.mlp.out", ["embedding"], "were not dumped"),
        (layer.mlp.gate, "layers.1.mlp.out", None, "does not compute"),
    ):
        with pytest.raises(UsageError, match=what) as caught:
            replay(module, dump, boundary, inputs=inputs)
        assert caught.value.code is Code.INTERVENTION_REFUSED


def test_zero_norms_and_missing_rows_are_told() -> None:
    """A relative error over zeros is undefined, never 0; nothing in common is refused."""
    zeros = np.zeros((2, 8), np.uint8)
    rows = ReferenceRows("float32", 2, np.array([1, 2], np.uint64), None, None, zeros)
    found = replay_rows(nn.Hardtanh(1.0, 2.0), "y", rows, {"x": rows}, run="r")
    assert (found.rows_equal, found.relative_error, found.largest_error) == (0, None, 1.0)
    assert "undefined" in str(found)
    other = ReferenceRows("float32", 2, np.array([3], np.uint64), None, None, zeros[:1])
    with pytest.raises(UsageError, match="no rows"):
        replay_rows(nn.Identity(), "y", rows, {"x": other}, run="r")


def test_a_part_of_an_operator_is_refused(dump: Path) -> None:
    """A module whose parameters are cut over processes gives a part of its rows: refused, with what to do."""
    module = torch.nn.Linear(16, 16)
    module.tp_size = 2  # type: ignore[assignment]
    with pytest.raises(UsageError, match="cut over processes") as caught:
        tracer.replay_operator(module, dump, "layers.1.mlp.out")
    assert caught.value.code is Code.INTERVENTION_REFUSED
    assert "one process" in caught.value.remedy
