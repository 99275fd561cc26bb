"""Floors of a real tiny model: repeats, another batch layout, a perturbed run, a tolerance in ulps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests.planters import tiny
from tests.planters.faults import norm_variant
from tests.planters.inputs import Inputs, one
from tracer import Tolerance
from tracer.errors import TracerError
from tracer.read.findings import DiffResult, Verdict

CORE, NORM = "layers.0.attn.core", "layers.0.attn.norm"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Float32 traces: ``a``, ``again``, ``alone`` (one sequence at a time), ``nudged``, ``b`` (sdpa), ``wrong`` (sdpa with a fault)."""
    folder, ids = tmp_path_factory.mktemp("floors"), tiny.ids(2, 24)

    def record(
        name: str, inputs: Inputs | None = None, attention: str = "eager", change: Callable[[Any], Any] | None = None, **options: Any
    ) -> None:
        model = tiny.make("qwen3", attn_implementation=attention)
        if change is not None:
            change(model)
        with tracer.trace(model, out=folder / name, level=2, **options):
            (inputs or one(ids)).run(model)

    def scale(model: Any) -> None:
        tiny.attn(model, 2).scaling *= 1.01

    record("a")
    record("again")
    record("alone", Inputs([{"input_ids": ids[:1]}, {"input_ids": ids[1:]}]))
    record("nudged", perturb_ulps=2)
    record("b", attention="sdpa")
    record("wrong", attention="sdpa", change=scale)
    return folder


def floors(result: DiffResult) -> dict[str, float]:
    """Floor of every boundary that has one."""
    return {found.name: found.floor for found in result.boundaries if found.floor is not None}


def test_a_side_that_repeats_itself_has_a_floor_of_zero(traces: Path) -> None:
    """Repeated bit for bit: every floor is 0, so the first above it is the first bitwise difference, and the line says so."""
    result = tracer.diff_traces(traces / "a", traces / "b", floor_a=traces / "again")
    found = floors(result)
    assert len(found) == result.counts.boundaries_compared
    assert set(found.values()) == {0.0}
    assert result.first == result.first_bitwise
    assert result.first is not None
    assert result.first.boundary == CORE
    assert "above the floor; first bitwise here too" in result.headline


def test_a_perturbed_run_is_a_floor_for_stacks_that_never_agree(traces: Path) -> None:
    """The embedding nudged by two ulps: every value boundary gets a floor, another attention kernel is within it, a wrong scale is not."""
    same = tracer.diff_traces(traces / "a", traces / "b", floor_a=traces / "nudged")
    found = floors(same)
    assert all(value > 0 for name, value in found.items() if not name.startswith("input."))
    assert same.verdict is Verdict.SAME, same.headline
    assert f"within the given floor from {CORE} on" in same.headline
    wrong = tracer.diff_traces(traces / "a", traces / "wrong", floor_a=traces / "nudged")
    assert wrong.first is not None
    assert wrong.first_bitwise is not None
    assert (wrong.first.boundary, wrong.first_bitwise.boundary) == ("layers.2.attn.core", CORE)
    assert f"first bitwise at {CORE}" in wrong.headline
    assert "all earlier boundaries identical or within floor" in wrong.headline


def test_another_batch_layout_is_a_floor(traces: Path) -> None:
    """The same tokens one sequence at a time pair by key; floors of several runs join by the largest."""
    alone = tracer.diff_traces(traces / "a", traces / "b", floor_a=traces / "alone")
    assert len(floors(alone)) == alone.counts.boundaries_compared
    both = floors(tracer.diff_traces(traces / "a", traces / "b", floor_a=[traces / "alone", traces / "nudged"]))
    nudged = floors(tracer.diff_traces(traces / "a", traces / "b", floor_a=traces / "nudged"))
    assert both == {name: max(value, floors(alone)[name]) for name, value in nudged.items()}


def test_ulps_where_the_floor_is_zero(tmp_path: Path) -> None:
    """With dumps a boundary whose elements are off by one ulp is within a tolerance of one; what was not dumped stays above,
    and without dumps the tolerance is refused."""
    x = one(tiny.ids(2, 24))
    for name, variant in (("a", False), ("b", True)):
        model = tiny.make("qwen3", torch.bfloat16)
        if variant:
            norm_variant(model, lambda name: name.endswith("0.input_layernorm"))
        with tracer.trace(model, out=tmp_path / name, level=2, dump=NORM):
            x.run(model)
    plain = tracer.diff_traces(tmp_path / "a", tmp_path / "b")
    assert plain.first is not None
    assert plain.first.boundary == NORM
    assert [(line.boundary, line.ulps) for line in plain.dumps] == [(NORM, 1.0)]
    allowed = tracer.diff_traces(tmp_path / "a", tmp_path / "b", tolerance=Tolerance(ulps=1))
    assert allowed.first is not None
    assert allowed.first_bitwise is not None
    assert (allowed.first.boundary, allowed.first_bitwise.boundary) == ("layers.0.attn.q", NORM)
    with pytest.raises(TracerError, match="needs the raw values"):
        tracer.diff_traces(tmp_path / "a", _without_dumps(tmp_path), tolerance=Tolerance(ulps=1))


def _without_dumps(folder: Path) -> Path:
    model = tiny.make("qwen3", torch.bfloat16)
    with tracer.trace(model, out=folder / "plain", level=2):
        one(tiny.ids(2, 24)).run(model)
    return folder / "plain"
