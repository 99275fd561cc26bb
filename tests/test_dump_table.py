"""The table of dumps: numbers that people compare tensors by, over matched rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.material import dumped, dumps_of
from tests.sides import Side
from tracer.format.dumps import DumpPlan, PlanBoundary, PlanSide
from tracer.read.dump_table import dump_kinds, dump_lines, dump_ulps
from tracer.read.findings import DumpLine
from tracer.read.pairing import pair_sides

NAME = "layers.1.attn.out"


def line_of(a: Side, b: Side, name: str = NAME, rows_b: tuple[str, ...] = ()) -> DumpLine:
    """The line of one boundary."""
    x, y = a.trace(), b.trace()
    return dump_lines(dumps_of(a, x, name), dumps_of(b, y, name, rows=rows_b), pair_sides(x, y).tokens)[0]


def test_the_figures_are_those_of_numpy() -> None:
    """Max abs, mean abs, relative L2, cosine, ulps, and the first element that differs, over matched rows only."""
    a, b = Side(), Side()
    b.change(NAME, "s0:2", "s1:1", by=0.25, column=7)
    line = line_of(a, b)
    x, y = (side.values[NAME].rows.astype(np.float64) for side in (a, b))
    assert (line.rows, line.columns, line.rows_differing) == (12, 32, 2)
    assert line.max_abs == pytest.approx(np.abs(y - x).max())
    assert line.mae == pytest.approx(np.abs(y - x).mean())
    assert line.relative_l2 == pytest.approx(np.linalg.norm(y - x) / max(np.linalg.norm(x), np.linalg.norm(y)))
    assert line.cosine == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y))
    assert (line.first_request, line.first_position, line.first_column) == ("s0", 2, 7)
    assert line.b_above == 1.0
    assert line_of(a, b, rows_b=("s0:2", "s0:3")).rows == 2
    assert line.log_softmax is None


def test_zero_norms_and_nonfinite_values() -> None:
    """A ratio of nothing is undefined, never 0, and a value that is not finite counts in its share and nowhere else."""
    a, b = Side(), Side()
    for side in (a, b):
        side.values[NAME].rows[:] = 0
    line = line_of(a, b)
    assert (line.relative_l2, line.cosine, line.max_abs, line.b_above) == (None, None, 0.0, None)
    b.values[NAME].rows[3, 4] = np.inf
    line = line_of(a, b)
    assert line.finite_b == pytest.approx(1 - 1 / 384)
    assert (line.finite_a, line.max_abs, line.rows_differing, line.first_column) == (1.0, 0.0, 1, 4)


def test_logits_are_compared_as_distributions() -> None:
    """The same number added to all logits changes no distribution; another largest one changes the argmax."""
    a, b = Side(), Side()
    b.values["lm_head"].rows = b.values["lm_head"].rows + np.float32(3)
    line = line_of(a, b, "lm_head")
    assert line.log_softmax == pytest.approx(0, abs=1e-5)
    assert line.argmax_differs == 0
    b.values["lm_head"].rows[2, 39] += 100
    line = line_of(a, b, "lm_head")
    assert line.argmax_differs == 1
    assert line.total_variation == pytest.approx(1, abs=0.1)


def test_ulps_are_counted_per_row() -> None:
    """The largest difference of each row in ulps of the dtype, by token."""
    a, b = Side(), Side()
    rows = b.values[NAME].rows
    rows[2, 7] = np.nextafter(rows[2, 7], np.float32(9), dtype=np.float32)
    x, y = a.trace(), b.trace()
    found = dump_ulps(dumped(a, x, NAME), dumped(b, y, NAME), pair_sides(x, y).tokens)
    assert found[2, -1] == pytest.approx(1.0)
    assert sum(found.values()) == pytest.approx(1.0)
    rows[3, 1] = np.nan
    y = b.trace()
    assert dump_ulps(dumped(a, x, NAME), dumped(b, y, NAME), pair_sides(x, y).tokens)[3, -1] == np.inf


def test_the_plan_gives_the_roles() -> None:
    """What a plan asked for is output or input; other dumps were asked for by name."""
    side = Side()
    trace = side.trace()
    own = PlanSide(run_id="r", host="playback")
    plan = DumpPlan(format=1, boundaries=(PlanBoundary(boundary=NAME, output=True, keys=(), differing=0),), max_bytes=1, a=own, b=own)
    dumps = dumps_of(side, trace, NAME, "embedding")
    lines = dump_lines(replace(dumps, plan=plan), dumps, pair_sides(trace, trace).tokens)
    assert {line.boundary: line.role for line in lines} == {"embedding": "asked for", NAME: "output"}


def test_kinds_of_nonfinite_values_are_told_per_row() -> None:
    """NaN, inf and -inf are kinds of their own, by place; payloads of NaN and finite values do not count."""
    a, b = Side(), Side()
    for row, (value_a, value_b) in enumerate(
        [(np.inf, np.inf), (np.inf, -np.inf), (np.nan, np.inf), (np.nan, np.nan), (1.0, 2.0), (1.0, np.nan)]
    ):
        a.values[NAME].rows[row, 7], b.values[NAME].rows[row, 7] = value_a, value_b
    a.values[NAME].rows[0, 3] = 1.5
    b.values[NAME].rows[3:4].view(np.uint32)[0, 7] ^= 1
    x, y = a.trace(), b.trace()
    found = dump_kinds(dumped(a, x, NAME), dumped(b, y, NAME), pair_sides(x, y).tokens)
    assert [found[row, -1] for row in range(6)] == [True, False, False, True, True, False]
