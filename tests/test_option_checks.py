"""What the user gives a trace (``tracer.record.option_checks``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tracer
from tests.small_model import SmallHost, SmallModel, read_back, small_map
from tracer.errors import Code, ScoreError, UsageError
from tracer.record.option_checks import (
    check_by_hand,
    position_filter,
    read_boundaries,
    read_level,
    read_tokens,
    rows_by_hand,
    weights_mode,
)

REFUSED: list[tuple[str, Any]] = [
    *(("tokens", value) for value in (5, "x", True, [1.5], [], [-1], slice("a"), slice(0, 5, 0), slice(3, 3), slice(-4, None))),
    *(("level", value) for value in ("1", 7, -1, 1.0, True, None)),
    *(("boundaries", value) for value in (5, [], [1], [""])),
    *(("weights", value) for value in ("x", 5, ["digest"])),
    *(("sequences", value) for value in (5, "x", [1.5], [[2], 3])),
    *(("map", value) for value in (5, None)),
    *(("dump", value) for value in (5, [], [1])),
    *(("max_dump_bytes", value) for value in (-1, "1", 0.5)),
    *(("perturb_ulps", value) for value in (-1, "1", 0.5)),
    *(("pin", value) for value in (5, {}, {1: "x"})),
    *((name, value) for name in ("plan", "against", "feed") for value in ("", 5)),
    *(("out", value) for value in ("", 5, b"x", "a\0b")),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{name}={value!r}" for name, value in REFUSED])
def test_what_makes_no_sense_is_refused_before_any_hook(name: str, value: Any) -> None:
    """A wrong argument is a typed error of the call itself: its name, what would work, what was given; no hook is on."""
    model = SmallModel()
    with pytest.raises(UsageError) as caught:
        tracer.trace(model, host=SmallHost(model), **{name: value})
    assert caught.value.code is Code.BAD_ARGUMENT
    assert name in caught.value.what
    assert caught.value.expected
    assert caught.value.found == repr(value)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_file_in_the_way_is_refused_on_entry(tmp_path: Path) -> None:
    """``out=`` at or below an existing file is a typed error that names it, and the file stays as it is."""
    model = SmallModel()
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="is no folder") as caught, tracer.trace(
            model, map=small_map(tmp_path), host=SmallHost(model), out=out
        ):
            raise AssertionError("entered")
        assert caught.value.code is Code.BAD_ARGUMENT
        assert caught.value.where == str(out)
    assert (tmp_path / "file").read_text() == "mine"
    assert not any(module._forward_hooks for module in model.modules())


def test_what_makes_sense_is_made_plain() -> None:
    """One glob is a list of one, and every way to say a weights mode is one word."""
    assert (read_boundaries(None), read_boundaries("a"), read_boundaries(iter(["a", "b"])), read_level(0)) == (None, ("a",), ("a", "b"), 0)
    assert [weights_mode(mode) for mode in (None, False, True, "rows")] == ["none", "none", "digest", "rows"]


@pytest.mark.parametrize(("tokens", "kept"), [(slice(1, 6, 2), [1, 3, 5]), (slice(4, None), [4, 5, 6]), (range(2), [0, 1]), (None, None)])
def test_positions_are_chosen(tokens: Any, kept: list[int] | None) -> None:
    """Slices and lists choose the positions that indexing would."""
    chosen = position_filter(read_tokens(tokens))
    assert (None if chosen is None else np.flatnonzero(chosen(np.arange(7))).tolist()) == kept


def test_rows_by_hand_have_positions() -> None:
    """Rows count from 0 unless positions of any integer kind are given."""
    assert rows_by_hand([0.5, 1.0], None)[1].tolist() == [0, 1]
    assert rows_by_hand(np.zeros((2, 3)), torch.tensor([4, 2], dtype=torch.int32))[1].tolist() == [4, 2]
    assert rows_by_hand(torch.zeros(0), [])[1].tolist() == []


@pytest.mark.parametrize(
    "give",
    [
        lambda t: t.record("x", "abc"),
        lambda t: t.record("x", [[1.0], [1.0, 2.0]]),
        lambda t: t.record("x", 1.0),
        lambda t: t.record("", [1.0]),
        lambda t: t.record(5, [1.0]),
        lambda t: t.record("../x", [1.0]),
        lambda t: t.record("a\ud800", [1.0]),
        lambda t: t.record("x", [1.0] * 4),
        lambda t: t.policy("a\ud800"),
        lambda t: t.requests(["a\ud800"]),
        lambda t: t.record("x", [1.0], positions=[0.5]),
        lambda t: t.record("x", [1.0], positions=["a"]),
        lambda t: t.record("x", [1.0], positions=[1, 2]),
        lambda t: t.record("x", [1.0], sequence=5),
        lambda t: t.requests(["p0", "p0"]),
        lambda t: t.requests("p0"),
    ],
)
def test_misuse_while_recording_is_refused(give: Callable[[Any], None], tmp_path: Path) -> None:
    """A call of the user's that makes no sense is a typed error at that call; what is recorded before and after stays."""
    model = SmallModel()
    ids = torch.tensor([[11, 12, 13]])
    with torch.no_grad(), tracer.trace(model, map=small_map(tmp_path), host=SmallHost(model), out=tmp_path / "trace") as t:
        model(ids)
        with pytest.raises(UsageError) as caught:
            give(t)
        model(ids)
    assert (caught.value.code, bool(caught.value.expected), bool(caught.value.found)) == (Code.BAD_ARGUMENT, True, True)
    manifest = read_back(tmp_path / "trace").manifest
    assert (manifest.complete, manifest.counts.forwards) == (True, 2)


@pytest.mark.parametrize(("scores", "good"), [([0.5], False), ([-1, 1e-3], False), ([-1, 1e-5], True), ([float("nan")], True), ([], True)])
def test_log_probabilities_are_not_above_0(scores: list[float], good: bool) -> None:
    """``scorer.logprobs`` above 0 by more than rounding has the code that reading gives it; other boundaries may hold anything."""
    values = torch.tensor(scores)
    check_by_hand("my.scores", values, np.arange(len(scores)), 0)
    if good:
        check_by_hand("scorer.logprobs", values, np.arange(len(scores)), 0)
        return
    with pytest.raises(ScoreError) as caught:
        check_by_hand("scorer.logprobs", values, np.arange(len(scores)), 0)
    assert caught.value.code is Code.SCORES_POSITIVE
