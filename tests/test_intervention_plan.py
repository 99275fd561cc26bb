"""Tests of ``tracer.record.intervention_plan``: what is changed where, and what a host cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests.small_model import MAP, SmallHost, SmallModel, small_map
from tests.test_dumping import IDS, record
from tracer.errors import Code, TracerError
from tracer.format.reference import Reference
from tracer.record.intervention_plan import needed_boundaries
from tracer.record.options import TraceOptions

EMBEDDING = "embedding: {module: embed, layout: b s c}"


def refusal(folder: Path, text: str, **options: Any) -> TracerError:
    """How entering a trace of the small model with this map is refused."""
    model = SmallModel()
    with (
        pytest.raises(TracerError) as caught,
        tracer.trace(model, map=small_map(folder, text), out=folder / "x", host=SmallHost(model), **options),
    ):
        pass
    assert not (folder / "x").exists()
    return caught.value


def test_interventions_record_what_they_change() -> None:
    """The boundaries that an intervention changes are recorded whatever the level."""
    reference = Reference("r", {}, lambda name: None)
    options = TraceOptions(perturb_ulps=1, feed=reference, pin={"*.moe.topk_ids": reference})
    assert needed_boundaries(options) == ("embedding", "embedding", "layers.*.residual", "*.moe.topk_ids")
    assert needed_boundaries(TraceOptions()) == ()


@pytest.mark.parametrize(
    "binding", ["embedding: {not_observable: fused}", "embedding: {parts: [{module: embed}, {module: embed}], layout: b s c}"]
)
def test_what_the_host_cannot_show_is_not_changed(binding: str, tmp_path: Path) -> None:
    """A boundary that is hidden, or taken in pieces, is refused before the run: never left alone in silence."""
    text = MAP.replace(EMBEDDING, binding)
    error = refusal(tmp_path, text, perturb_ulps=1)
    assert (error.code, "embedding cannot be changed" in error.what) == (Code.INTERVENTION_REFUSED, True)
    feed = record(tmp_path, "a", dump=["embedding", "layers.*.residual"])
    assert refusal(tmp_path, text, feed=feed).code is Code.INTERVENTION_REFUSED


def test_rows_that_are_no_view_are_refused_in_the_forward(tmp_path: Path) -> None:
    """A layout that reorders columns cannot be written through: it is raised on leaving and the trace is incomplete."""
    model = SmallModel()
    text = MAP.replace(EMBEDDING, "embedding: {module: embed, layout: b c s}")
    with (
        pytest.raises(TracerError, match="no view"),
        torch.no_grad(),
        tracer.trace(model, map=small_map(tmp_path, text), out=tmp_path / "a", host=SmallHost(model), perturb_ulps=1),
    ):
        model(IDS[:, :6])


def test_negative_steps_are_refused(tmp_path: Path) -> None:
    """perturb_ulps counts units."""
    assert refusal(tmp_path, MAP, perturb_ulps=-1).code is Code.BAD_ARGUMENT
