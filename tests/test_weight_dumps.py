"""Tests of ``tracer.record.weight_dumps``: rows of weights, from recording to the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tracer
from tests.small_model import MAP, SmallHost, SmallModel, small_map
from tests.test_dumping import IDS
from tracer.format.dumps import DumpPlan, read_plan, write_plan
from tracer.read.dump_plans import make_dump_plan
from tracer.read.dumped import Dumps, read_dumps
from tracer.read.findings import Class, FindingCode, Shape

NAME = "layers.1.attn.out.weight"
NAMED = MAP.replace('["layers.{layer}.attn.norm"], mixes', '["layers.{layer}.attn.norm"], weights: ["layers.{layer}.attn.out.*"], mixes')
NAMED += "    weights:\n      layers.{layer}.attn.out.weight: layers.{layer}.attn.out.weight\n"


def record(folder: Path, name: str, model: SmallModel | None = None, **options: Any) -> Path:
    """Trace one forward of the small model with a map that names the weights of attention."""
    folder.mkdir(exist_ok=True)
    model = model or SmallModel()
    host = SmallHost(model)
    with torch.no_grad(), tracer.trace(model, map=small_map(folder, NAMED), out=folder / name, host=host, level=2, strict=True, **options):
        model(IDS)
    return folder / name


def scaled(row: int, factor: float) -> SmallModel:
    """The small model with one row of a weight of layer 1 scaled."""
    model = SmallModel()
    with torch.no_grad():
        model.get_parameter("layers.1.attn.out.weight")[row] *= factor
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sides ``a`` and ``b``, the same with every row of their weights, and plans of both pairs."""
    made = tmp_path_factory.mktemp("weights")
    for suffix, mode in (("", "digest"), ("-rows", "rows")):
        sides = [record(made, f"a{suffix}", weights=mode), record(made, f"b{suffix}", scaled(3, 1.5), weights=mode)]
        a, b = (tracer.open_trace(side) for side in sides)
        plan = make_dump_plan(a, b, tracer.diff_traces(a, b))
        assert isinstance(plan, DumpPlan)
        write_plan(plan, made / f"plan{suffix}.json")
    return made


def notes(path: Path, code: str) -> list[str]:
    return [entry.text for entry in tracer.open_trace(path).manifest.notes if entry.code == code]


def test_a_plan_names_the_first_weight_that_differs(folder: Path) -> None:
    """With every row recorded those that differ and a few neighbours, else all rows; and what is computed with the weight."""
    (whole,) = read_plan(folder / "plan.json").weights
    (rows,) = read_plan(folder / "plan-rows.json").weights
    assert (whole.name, len(whole.rows), whole.differing, whole.digests_a) == (NAME, 16, None, ())
    assert (rows.name, rows.differing, 3 in rows.rows, len(rows.rows)) == (NAME, 1, True, 9)
    assert len(rows.digests_a) == len(rows.digests_b) == 9
    assert read_plan(folder / "plan.json").boundaries[0].boundary == "layers.1.attn.out"


@pytest.mark.parametrize("suffix", ["", "-rows"])
def test_planned_rows_are_saved_checked_and_explained(folder: Path, tmp_path: Path, suffix: str) -> None:
    """Both sides save the rows; the report says what they were held against, shows them in the table, and names the ratio."""
    plan, mode = folder / f"plan{suffix}.json", "rows" if suffix else "digest"
    a = record(tmp_path, "a", weights=mode, plan=plan)
    b = record(tmp_path, "b", scaled(3, 1.5), weights=mode, plan=plan)
    held = read_dumps(a).weights[NAME]
    np.testing.assert_array_equal(held.raw_RB.view(np.float32), SmallModel().get_parameter(NAME).detach().numpy()[held.row_R])
    result = tracer.diff_traces(a, b)
    told = [finding.text for finding in result.findings if finding.boundary == NAME and finding.code is FindingCode.NOTE]
    how = "each has the digest recorded for its row" if suffix else "together they have the digest recorded of the whole weight"
    assert len(told) == 2
    assert all(how in text and "and the whole weight that of run" in text for text in told)
    line = result.dumps[0]
    assert (line.boundary, line.role, line.rows_differing, line.first_position) == (NAME, "weight", 1, 3)
    assert result.classification is not None
    assert result.classification.klass is Class.WEIGHT
    found = next(entry for entry in result.explanations if entry.boundary == NAME)
    assert (found.shape, found.source) == (Shape.CONSTANT_RATIO, "dumps")
    assert found.parameters["ratio"] == pytest.approx(1.5)


def test_another_weight_than_planned_is_not_reproducible(folder: Path, tmp_path: Path) -> None:
    """A second run with yet another weight is told apart from the first by the digest of the whole."""
    a = record(tmp_path, "a", plan=folder / "plan.json")
    b = record(tmp_path, "b", scaled(3, 1.7), plan=folder / "plan.json")
    found = [finding for finding in tracer.diff_traces(a, b).findings if finding.code is FindingCode.NOT_REPRODUCIBLE]
    assert any(finding.boundary == NAME and "not what run" in finding.text for finding in found)


def against(folder: Path, tmp_path: Path, name: str, model: SmallModel | None = None, **options: Any) -> Dumps:
    return read_dumps(record(tmp_path, "b", model or scaled(3, 1.5), against=folder / name, **options))


def test_against_saves_the_first_weight_that_differs(folder: Path, tmp_path: Path) -> None:
    """In one run: all rows where the other trace has one digest, the differing ones where it has every row; nothing where none differs."""
    assert len(against(folder, tmp_path, "a").weights[NAME]) == 16
    assert f"the weight {NAME} differs, saved" in notes(tmp_path / "b", "against")[0]
    rows = against(folder, tmp_path / "rows", "a-rows").weights[NAME].row_R.tolist()
    assert 3 in rows
    assert len(rows) == 5
    assert not against(folder, tmp_path / "same", "a", SmallModel()).weights


def test_the_cap_holds(folder: Path, tmp_path: Path) -> None:
    """Rows of weights count against the cap with everything else, and what it leaves out is counted."""
    held = against(folder, tmp_path, "a", max_dump_bytes=130)
    assert len(held.weights[NAME]) == 2
    assert (held.left_out or {})[NAME] == 14
