"""Choices, taps and orders inside one forward (``tracer.record.recording``); the rest is seen through ``test_capture``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tracer
from tests.small_model import Recorded, SmallHost, read_back
from tracer.errors import MapError
from tracer.format.fingerprint import fingerprint_rows
from tracer.format.schema import BoundaryStatus
from tracer.record.boundaries import Source
from tracer.record.host import TapSink

MAP = """
family: router
boundaries:
  input.ids: {{level: 0}}
  moe.logits: {{level: 1, from: [input.ids]}}
  moe.topk_weights: {{level: 1, from: [moe.logits]}}
  moe.topk_ids: {{level: 1, from: [moe.logits], discrete: true, scores: moe.logits}}
  moe.expert_out: {{level: 2, from: [moe.topk_ids], rows: experts}}
  core: {{level: 2, from: [moe.expert_out]}}
hosts:
  small:
    bindings:
      input.ids: {{derived: host}}
      moe.logits: {{module: router, leaf: "output[0]", layout: t e2}}
      moe.topk_weights: {{module: {weights}, layout: t k, canonical_order: moe.topk_ids}}
      moe.topk_ids: {{module: router, leaf: "output[2]", layout: t k, canonical_order: moe.topk_ids}}
      moe.expert_out: {{module: experts, layout: t e c, canonical_order: moe.topk_ids}}
      core: {{module: experts, tap: core, leaf: q, layout: b s c}}
"""

IDS = torch.tensor([[11, 12, 13]])
CHOICE = torch.tensor([[5, 2], [1, 3], [7, 0]])
WEIGHTS = torch.tensor([[0.5, 0.25], [0.125, 0.75], [0.625, 0.375]])
EXPERT_OUT = torch.arange(24.0).reshape(3, 2, 4)


class Router(nn.Module):
    """Gives logits, weights and ids, the slots of every token in the order ``slots``."""

    slots = torch.tensor([0, 1])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.zeros(3, 8), WEIGHTS[:, self.slots], CHOICE[:, self.slots]


class Experts(nn.Module):
    slots = torch.tensor([0, 1])
    sink: TapSink | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sink is not None:
            self.sink("experts", "q", torch.ones(1, 3, 4))
            self.sink("experts", "unknown", torch.ones(1, 3, 4))
        return EXPERT_OUT[:, self.slots]


class Weigh(nn.Module):
    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return weights


class Model(nn.Module):
    """``early``: another module shows the weights before the router shows the ids."""

    def __init__(self, slots: list[int], early: bool = False, late: bool = True) -> None:
        super().__init__()
        self.router, self.experts, self.weigh = Router(), Experts(), Weigh()
        self.router.slots = self.experts.slots = torch.tensor(slots)
        self.early, self.late = early, late

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.early:
            weights = WEIGHTS[:, self.router.slots]
            self.weigh(weights)
            weights.fill_(0)
        if self.late:
            self.router(input_ids)
        out: torch.Tensor = self.experts(input_ids)
        return out


class TappedHost(SmallHost):
    """Shows the experts' ``q`` through a function tap."""

    @contextmanager
    def taps(self, sources: Iterable[Source], sink: TapSink) -> Iterator[None]:
        assert {source.tap for source in sources} <= {"core"}
        self.model.experts.sink = sink  # type: ignore[union-attr]
        yield
        self.model.experts.sink = None  # type: ignore[union-attr]


def record(folder: Path, model: Model, weights: str = 'router, leaf: "output[1]"') -> Recorded:
    folder.mkdir(exist_ok=True)
    (folder / "router.yaml").write_text(MAP.format(weights=weights))
    with tracer.trace(model, map=str(folder / "router.yaml"), host=TappedHost(model), out=folder / "trace", level=2, strict=True):
        model(IDS)
    return read_back(folder / "trace")


def test_slots_in_any_order_are_one_choice(tmp_path: Path) -> None:
    """Ids ascend, weights go with them, and expert rows are keyed by their expert: the order of slots leaves no mark."""
    a, b = record(tmp_path / "a", Model([0, 1])), record(tmp_path / "b", Model([1, 0]))
    assert a.rows == b.rows
    assert a.at("moe.topk_ids")["b1.r0", 0] == (2, 5)
    expected = fingerprint_rows(np.array([[0.25, 0.5]], np.float32), "float32").digest_N2[0]
    assert a.at("moe.topk_weights")["b1.r0", 0] == tuple(int(lane) for lane in expected)
    out = fingerprint_rows(EXPERT_OUT.reshape(6, 4).numpy(), "float32").digest_N2
    assert a.rows["moe.expert_out"]["b1.r0", 1, 0, 3] == tuple(int(lane) for lane in out[3])


def test_weights_may_be_shown_before_their_ids(tmp_path: Path) -> None:
    """What comes before its ids waits as a copy, whatever happens to the buffer meanwhile."""
    early = record(tmp_path / "a", Model([1, 0], early=True), weights="weigh")
    assert early.rows == record(tmp_path / "b", Model([0, 1])).rows
    assert {boundary.status for boundary in early.manifest.boundaries} == {BoundaryStatus.RECORDED}


def test_weights_whose_ids_never_come_are_vacuous(tmp_path: Path) -> None:
    """Without ids there is no order: the boundary says what was missing."""
    recorded = record(tmp_path, Model([0, 1], early=True, late=False), weights="weigh")
    boundary = recorded.boundary("moe.topk_weights")
    assert boundary.status is BoundaryStatus.VACUOUS
    assert boundary.reason.startswith("[capture-failed] its ids were not shown in this forward; moe.topk_ids")
    assert recorded.boundary("moe.topk_ids").reason == "0 executions"


def test_taps_are_recorded_like_modules(tmp_path: Path) -> None:
    """What a tap shows is recorded where the map binds it; other leaves are ignored, calls outside a forward counted."""
    model = Model([0, 1])
    recorded = record(tmp_path, model)
    assert recorded.boundary("core").row_count == 3
    assert recorded.boundary("core").source == "experts core tap q"
    assert model.experts.sink is None


def test_a_choice_of_another_shape_cannot_order(tmp_path: Path) -> None:
    """Weights with other columns than the ids are refused by name."""

    class Wide(Weigh):
        def forward(self, weights: torch.Tensor) -> torch.Tensor:
            return torch.zeros(3, 5)

    model = Model([0, 1], early=True)
    model.weigh = Wide()
    recorded = record(tmp_path, model, weights="weigh")
    assert "moe.topk_weights cannot be ordered by moe.topk_ids" in recorded.boundary("moe.topk_weights").reason


def test_the_map_is_checked_before_anything_runs(tmp_path: Path) -> None:
    """A binding without a module of the model is refused with every reason."""
    with pytest.raises(MapError, match="no module nowhere"):
        record(tmp_path, Model([0, 1]), weights="nowhere")
