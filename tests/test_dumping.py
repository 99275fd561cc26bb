"""Tests of ``tracer.record.dumping``: real models, real hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tracer
from tests.small_model import SmallHost, SmallModel, small_map
from tracer.errors import Code, UsageError
from tracer.format.dumps import DumpPlan, PlanBoundary, PlanSide, write_plan
from tracer.format.token_keys import token_keys
from tracer.read.dumped import read_dumps

IDS = torch.tensor([[3, 7, 1, 30, 8, 2], [3, 7, 9, 4, 11, 12]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def record(
    folder: Path, name: str, model: torch.nn.Module | None = None, *, ids: torch.Tensor = IDS, ids_known: bool = True, **options: Any
) -> Path:
    """Trace one masked forward of the small model; its output is the same with and without."""
    model = model or SmallModel()
    mask = MASK[:, : ids.shape[1]]
    host = SmallHost(model, ids_known=ids_known)
    with torch.no_grad():
        plain = model(ids)["logits"]
        with tracer.trace(model, map=small_map(folder), out=folder / name, host=host, strict=True, **options) as t:
            t.requests(["x", "y"])
            assert torch.equal(model(ids, mask=mask)["logits"], plain)
    return folder / name


def test_nothing_is_saved_unless_asked_for(tmp_path: Path) -> None:
    """A trace without dump= has no dumps, in its folder or its manifest."""
    out = record(tmp_path, "plain")
    assert not (out / "dumps").exists()
    assert tracer.open_trace(out).manifest.dumps == ()
    assert not read_dumps(out)


def test_whole_boundaries_are_saved_by_glob(tmp_path: Path) -> None:
    """dump= saves every recorded row of a boundary, above the level too; ``layers.*.`` means any layer and nothing inside it."""
    model = SmallModel()
    seen: dict[str, torch.Tensor] = {}
    handle = model.layer(1).register_forward_hook(lambda module, args, output: seen.update(residual=output))
    dumps = read_dumps(record(tmp_path, "a", model, level=0, dump=["embedding", "layers.*.residual", "layers.1.mlp.gate_up", "scorer.*"]))
    handle.remove()
    assert list(dumps.boundaries) == ["embedding", "layers.0.residual", "layers.1.mlp.gate_up", "layers.1.residual", "scorer.logprobs"]
    assert (dumps.why, dumps.left_out, dumps.findings) == ("dump=embedding,layers.*.residual,layers.1.mlp.gate_up,scorer.*", {}, ())
    residual = dumps.boundaries["layers.1.residual"]
    assert [residual.label(row) for row in range(len(residual))] == [("x", n) for n in range(6)] + [("y", n) for n in (2, 3)]
    np.testing.assert_array_equal(residual.float32_RC[:6], seen["residual"][0].numpy())
    np.testing.assert_array_equal(residual.key_R[:6], token_keys(IDS[0]))
    gate_up = dumps.boundaries["layers.1.mlp.gate_up"]
    assert gate_up.float32_RC.shape == (8, 64)
    assert not gate_up.altered_R.any()
    assert dumps.boundaries["scorer.logprobs"].label(0) == ("x", 0)


def test_the_cap_bounds_what_is_saved_and_says_what_it_left_out(tmp_path: Path) -> None:
    """Rows beyond max_dump_bytes are counted per boundary, in the dump, the manifest's notes and the comparison."""
    row = 16 * 4
    out = record(tmp_path, "capped", dump="layers.*.residual", max_dump_bytes=12 * row + 3)
    dumps = read_dumps(out)
    assert {name: len(found.raw_RB) for name, found in dumps.boundaries.items()} == {"layers.0.residual": 8, "layers.1.residual": 2}
    assert dumps.left_out == {"layers.1.residual": 8}
    assert [note.code for note in dumps.trace.manifest.notes] == ["dump-capped"]
    result = tracer.diff_traces(record(tmp_path, "other"), out)
    assert result.exit == 0
    assert "8 rows of layers.1.residual left out" in next(f.text for f in result.findings if f.code.value == "dump-capped")


@pytest.mark.parametrize("options", [{"dump": "layers.*.nothing"}, {"max_dump_bytes": -1}])
def test_what_makes_no_sense_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """A glob that matches nothing recorded and a negative cap are usage errors, and leave no folder."""
    with pytest.raises(UsageError) as caught:
        record(tmp_path, "bad", **options)
    assert caught.value.code is Code.BAD_ARGUMENT
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("ids_known", [True, False])
def test_a_plan_saves_its_rows_by_key_or_by_place(ids_known: bool, tmp_path: Path) -> None:
    """Rows of a plan are found by token key; where this process does not know the ids, by sequence label and position."""
    keys = tuple(f"{key:016x}" for key in token_keys(IDS[1]).tolist()[2:4])
    asked = PlanBoundary(boundary="layers.0.mlp.gate_up", output=True, keys=keys, differing=2, places_b=((0, 2), (0, 3)))
    side = PlanSide(run_id="r", host="small", sequences=(("", "b1.r1"),))
    write_plan(
        DumpPlan(format=1, boundaries=(asked,), max_bytes=1 << 20, a=PlanSide(run_id="q", host="small"), b=side), tmp_path / "plan.json"
    )
    out = record(tmp_path, "planned", level=0, ids_known=ids_known, plan=tmp_path / "plan.json")
    dumped = read_dumps(out).boundaries["layers.0.mlp.gate_up"]
    assert [dumped.label(row) for row in range(len(dumped))] == [("y", 2), ("y", 3)]


def test_the_environment_names_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRACER_PLAN overrides plan=, for scripts that nobody edits; a plan that is not there is refused at once."""
    side = PlanSide(run_id="r", host="small")
    write_plan(DumpPlan(format=1, boundaries=(), max_bytes=1, a=side, b=side), tmp_path / "plan.json")
    monkeypatch.setenv("TRACER_PLAN", str(tmp_path / "plan.json"))
    dumps = read_dumps(record(tmp_path, "out", plan="elsewhere.json"))
    assert (dumps.why, dumps.plan is not None) == ("plan", True)
    monkeypatch.setenv("TRACER_PLAN", str(tmp_path / "none.json"))
    with pytest.raises(UsageError):
        tracer.trace(SmallModel(), host=SmallHost(SmallModel()))
