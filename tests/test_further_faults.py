"""Faults that nothing was tuned on: a few of them, each with its place, class and explanation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fault_runs import run_fault
from tests.planters.further import FURTHER


@pytest.mark.parametrize("name", ["N01", "N08", "N10", "N13"])
def test_what_nothing_was_tuned_on_is_explained_too(name: str, tmp_path: Path) -> None:
    """Another pairing in a deep layer, one expert of 32, a gate without its sigmoid, and weights on an int8 grid per row."""
    run = run_fault(FURTHER[name], tmp_path)
    assert run.place_right, run.first.headline
    assert run.tokens_right, run.entry
    assert run.class_right, run.last.classification
    assert re.search(FURTHER[name].says, run.said, re.DOTALL), run.said
