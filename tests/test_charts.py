"""What a page draws, as figures."""

from __future__ import annotations

from tests.sides import Side
from tracer.read.diff import diff_traces
from tracer.reports.charts import distance_curve, token_map_chart


def test_equal_sides_have_nothing_to_draw() -> None:
    """No map and no curve without a difference."""
    result = diff_traces(Side().trace(), Side().trace())
    assert token_map_chart(result) is None
    assert distance_curve(result) is None


def test_the_map_marks_what_differs_and_its_root() -> None:
    """A cell per differing boundary and column, a cross at the causal root, grey where nothing was compared."""
    b = Side()
    b.carry_on("layers.2.attn.out", "s0:5")
    result = diff_traces(Side().trace(), b.trace())
    chart = token_map_chart(result)
    assert chart is not None
    unseen, cells, hatched, roots = chart.data
    names = cells["y"]
    filled = {names[at] for at, line in enumerate(cells["z"]) if any(value is not None for value in line)}
    assert filled == {boundary.name for boundary in result.boundaries if boundary.rows_differing}
    assert (roots["x"], roots["y"]) == (["s0:5"], ["layers.2.attn.out"])
    assert unseen["z"][names.index("scorer.logprobs")][0] == 1
    assert "scorer.logprobs" in hatched["y"]
    assert "One column per token" in chart.caption


def test_the_curve_shows_the_floor_and_the_first() -> None:
    """One point per differing boundary, the stated floor as a line, a star at the first divergence."""
    a, b, again = Side(), Side(), Side()
    b.carry_on("layers.2.attn.out", "s0:5", by=0.1)
    again.change("layers.3.attn.out", "s0:1", by=1e-5)
    result = diff_traces(a.trace(), b.trace(), floor_a=again.trace())
    chart = distance_curve(result)
    assert chart is not None
    named = {line["name"]: line for line in chart.data}
    assert set(named) == {"largest distance", "floor", "first divergence"}
    compared = [boundary.name for boundary in result.boundaries if boundary.rows_compared]
    assert named["first divergence"]["x"] == [compared.index("layers.2.attn.out")]
    assert max(value for value in named["floor"]["y"] if value) > 0
