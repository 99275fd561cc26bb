"""Tests of ``tracer.record.against``: bytes at the first difference, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests.small_model import SmallModel
from tests.test_dumping import record
from tracer.errors import UsageError
from tracer.read.dumped import Dumps, read_dumps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the other side's trace, ``a``."""
    made = tmp_path_factory.mktemp("against")
    record(made, "a", level=2)
    return made


def changed(part: str) -> SmallModel:
    """The small model with one weight of layer 1 changed."""
    model = SmallModel()
    with torch.no_grad():
        weight = model.get_parameter(f"layers.1.{part}.weight")
        weight[0, 0] += 1.0
    return model


def against(folder: Path, name: str, model: SmallModel, **options: Any) -> Dumps:
    """Record a model against the other side."""
    return read_dumps(record(folder, name, model, against=folder / "a", **options))


def note(dumps: Dumps, code: str) -> str:
    """What the recorder noted under a code; of a weight that differs it notes first."""
    return "; ".join(entry.text for entry in dumps.trace.manifest.notes if entry.code == code)


def test_the_first_boundary_that_differs_is_saved_with_its_inputs(folder: Path) -> None:
    """The rows that differ and those of the inputs, whole prefixes where tokens are mixed; nothing later, nothing earlier."""
    dumps = against(folder, "b", changed("attn.out"), level=2)
    assert list(dumps.boundaries) == ["layers.1.attn.norm", "layers.1.attn.out"]
    assert {len(found) for found in dumps.boundaries.values()} == {8}
    assert "first differs at layers.1.attn.out, saved" in note(dumps, "against")
    left = "before that, layers.0.mlp.gate_up could not be judged while running (this process holds a part of its columns)"
    assert note(dumps, "against-left") == f"{left}: use tracer diff A B --plan FILE"
    assert dumps.why == f"against {tracer.open_trace(folder / 'a').manifest.run_id}"


def test_inputs_that_were_not_recorded_are_replaced_by_theirs(folder: Path) -> None:
    """At a coarser level the nearest recorded ancestors are saved with the boundary."""
    dumps = against(folder, "coarse", changed("mlp.down"), level=0)
    assert list(dumps.boundaries) == ["layers.0.residual", "layers.1.residual"]


def test_sides_that_agree_save_nothing(folder: Path) -> None:
    """Without a difference there is no dump, and the note says so."""
    dumps = against(folder, "same", SmallModel())
    assert not dumps
    assert "nothing that could be judged differs" in note(dumps, "against")


def test_unknown_ids_are_left_to_a_plan(folder: Path) -> None:
    """Where token ids are not known in the process nothing can be held against the other side, and that is said."""
    dumps = against(folder, "unknown", changed("attn.out"), ids_known=False)
    assert not dumps.boundaries
    assert "token ids are not known in this process" in note(dumps, "against-left")


def test_a_trace_that_is_not_whole_is_refused(folder: Path) -> None:
    """Nothing is held against half a trace."""
    broken = record(folder, "broken")
    (broken / "shard-00000" / "manifest.json").unlink()
    with pytest.raises(UsageError, match="not whole"):
        against(folder, "c", SmallModel()) if False else tracer.trace(SmallModel(), against=broken)
