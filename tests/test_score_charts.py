"""Tests of ``tracer.reports.score_charts``."""

from __future__ import annotations

import numpy as np

from tests.score_cases import make_batch
from tracer.reports.score_charts import distribution_chart, position_chart


def test_equal_scores_have_nothing_to_draw() -> None:
    """No drawing where every difference is 0."""
    result = make_batch(2, 10, 16, noise=0.0).compare()
    assert distribution_chart(result) is None
    assert position_chart(result) is None


def test_every_token_is_in_the_distribution() -> None:
    """The shares of each pair add up to all valid tokens, exact zeros among them; lines differ in dash and marker."""
    chart = distribution_chart(make_batch().compare())
    assert chart is not None
    assert [round(sum(line["y"]), 6) for line in chart.data] == [100.0] * len(chart.data)
    looks = {(line["line"]["dash"], line["marker"]["symbol"]) for line in chart.data}
    assert len(looks) == len(chart.data)


def test_the_first_token_stands_apart() -> None:
    """The first response token is a point of its own beside the line of the later ones; errors of 0 leave a gap."""
    batch = make_batch(noise=0.0)
    batch.scores["A"] = batch.scores["A"] - 0.1 * (np.arange(48) > 0) * (np.arange(48) != 3)
    batch.scores["A"][:, 0] -= 0.5
    chart = position_chart(batch.compare())
    assert chart is not None
    line, first = chart.data[:2]
    assert (line["name"], first["name"], first["x"]) == ("A-B", "A-B, first token", ["first"])
    assert abs(first["y"][0] - 0.5) < 1e-6
    assert "first" not in line["x"]
    assert line["y"][line["x"].index("3")] is None
