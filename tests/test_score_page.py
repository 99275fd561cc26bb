"""Tests of ``tracer.reports.score_page``: what it says, and what it looks like in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.browser import look_at
from tests.score_cases import make_batch
from tests.test_update_check import logits, sides
from tracer.errors import ScoreError
from tracer.reports.page import write_page
from tracer.reports.score_page import refusal_page, score_page, update_page
from tracer.scores.decision import QUESTIONS
from tracer.scores.results import ScoreResult
from tracer.scores.score_comparison import compare_scores
from tracer.scores.update_check import check_update


def offset_result(requests: int, *, mark: str = "") -> ScoreResult:
    """A has an offset; some tokens are masked, one request has none that count. ``mark``: put into every name."""
    batch = make_batch(requests, 24, 32)
    batch.scores["A"] = batch.scores["A"] - 0.1 * (np.arange(24) > 0)
    batch.mask[0, 5:9] = False
    batch.mask[1] = False
    records = [replace(record, request=record.request + mark, group=record.group + mark) for record in batch.records(logits=requests < 10)]
    return compare_scores(records, log={"run": "nightly" + mark})


def taken(page: str) -> list[str]:
    """What the page marks as the way that was taken."""
    return [" ".join(found.split()) for found in re.findall(r'<div class="exit taken">(.*?)</div>', page, flags=re.DOTALL)]


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(("requests", "dark"), [(3, True), (5000, False)], ids=["3-dark", "5000-light"])
def test_the_page_in_a_browser(requests: int, dark: bool, tmp_path: Path) -> None:
    """Decision, pairs, charts and tables are visible in light and dark; nothing overlaps or sticks out, nothing is fetched."""
    result = offset_result(requests)
    page = tmp_path / "scores.html"
    write_page(score_page(result), str(page))
    seen = look_at(page, dark=dark).measured
    assert (seen["errors"], seen["fetched"], seen["overlaps"], seen["stacked"]) == ([], [], [], [])
    assert seen["wide"] <= 0
    for text in (result.headline, "(taken)", "Does each side repeat itself?", "not asked", "request r1", "Not compared, not proven"):
        assert text in seen["shown"], text
    assert set(seen["charts"]) == {"chart-distribution", "chart-positions"}
    assert all(chart["points"] > 10 for chart in seen["charts"].values())
    assert seen["focusable"] >= 12
    assert (sum(int(part) for part in re.findall(r"\d+", seen["back"])[:3]) < 150) is dark
    assert page.stat().st_size < 15_000_000


def test_every_branch_is_drawn_with_one_way_out() -> None:
    """Whatever the branch, all questions stand on the page and exactly one exit is marked, in words."""
    ways = {}
    for name in ("honest", "offset", "stale", "noisy", "no trainer"):
        batch = make_batch(8, 40, 32, repeat=0.05 if name == "noisy" else 0.0)
        generator = np.random.default_rng(1)
        if name == "offset":
            batch.scores["A"] = batch.scores["A"] - 0.1
        if name == "stale":
            batch.scores["C0"] = batch.scores["C1"] = np.minimum(batch.scores["C0"] + generator.standard_normal((8, 40)), -1e-6)
        if name == "no trainer":
            batch.scores = {score: values for score, values in batch.scores.items() if score[0] == "B"}
        result = batch.compare()
        page = score_page(result)
        assert all(question.text in page for question in QUESTIONS)
        (ways[name],) = taken(page)
        assert result.decision.branch.value in ways[name]
    assert len(set(ways.values())) == len(ways)


def test_names_are_data() -> None:
    """Markup in the name of a request, a group or a run is shown as text."""
    page = score_page(offset_result(3, mark="<img src=x onerror=alert(1)>"))
    assert "<img" not in page.partition('<script type="application/json"')[0]
    assert "&lt;img src=x" in page


def test_a_refusal_says_why() -> None:
    """A refused comparison makes a page with the code, the reason and what to do, and no number."""
    batch = make_batch(2, 10, 16)
    batch.mask[:] = False
    with pytest.raises(ScoreError) as refused:
        batch.compare()
    page = refusal_page(refused.value)
    for text in ("REFUSED", "scores-empty-mask", refused.value.what, "next"):
        assert text in page
    assert len(page) < 60_000


def test_an_update_has_a_page() -> None:
    """Outcome, evidence, both gaps and the worst tokens of an update check are on its page."""
    batch, old, new = logits()
    page = update_page(check_update(sides(batch, old, old, "6"), sides(batch, old, new, "7")))
    for text in ("Update skipped", "before", "after", "Worst tokens after the update", "not given"):
        assert text in page
