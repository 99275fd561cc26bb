"""What one run's trace proves."""

from __future__ import annotations

from pathlib import Path

import torch

import tracer
from tests.tiny_models import make_ids, make_model
from tracer.sessions.frozen import look_at, moved_boundaries


def test_a_good_trace_has_weights_and_no_problem(tmp_path: Path) -> None:
    """Two traces of the same model hold the same weights and move nothing, whatever the batch order; other weights show."""
    model, ids = make_model("qwen3", torch.float32), make_ids(2, 12)
    for name, batch in (("a", ids), ("b", ids.flip(0))):
        with torch.no_grad(), tracer.trace(model, out=tmp_path / name) as t:
            t.policy("7")
            model(batch)
    a, b = look_at(tmp_path / "a"), look_at(tmp_path / "b")
    assert (a.problem, a.policy) == ("", "7")
    assert a.weights
    assert a.weights == b.weights
    assert a.trace is not None
    assert b.trace is not None
    assert moved_boundaries(a.trace, b.trace) == []
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with torch.no_grad(), tracer.trace(model, out=tmp_path / "c"):
        model(ids)
    c = look_at(tmp_path / "c")
    assert c.weights != a.weights
    assert c.trace is not None
    assert "lm_head" in moved_boundaries(a.trace, c.trace)


def test_an_optimizer_step_is_a_problem(tmp_path: Path) -> None:
    """A side whose optimizer stepped while it was traced is not frozen, and is told so."""
    model = make_model("qwen3", torch.float32).requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tracer.trace(model, out=tmp_path / "a"):
        model(make_ids(1, 8)).logits.sum().backward()
        optimizer.step()
    found = look_at(tmp_path / "a")
    assert "an optimizer stepped" in found.problem or "weights changed" in found.problem


def test_what_is_no_trace_is_a_problem(tmp_path: Path) -> None:
    """No folder and an empty folder are problems in words."""
    assert "wrote no trace" in look_at(tmp_path / "none").problem
    (tmp_path / "empty").mkdir()
    assert look_at(tmp_path / "empty").problem
