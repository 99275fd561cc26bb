"""Pages: what they show, looked at in a real browser, and what they never do."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

import msgspec
import pytest

from tests.browser import Look, look_at
from tests.sides import Side, catalogue
from tracer.errors import Code, UsageError, visible
from tracer.read.diff import diff_traces
from tracer.read.findings import DiffResult, DumpLine
from tracer.reports import page as page_module
from tracer.reports.charts import token_map_chart
from tracer.reports.page import diff_page, write_page


def some_result(layers: int = 4, *, request: str = "") -> DiffResult:
    """A comparison with one difference that is carried on, a flipped choice, one boundary that B lacks, another setting, and values."""
    sides = [Side(boundaries=catalogue(layers, moe=True)) for _ in range(2)]
    for side, kernel in zip(sides, ("eager", f"sdpa {request}"), strict=True):
        side.requests = {"s0": request} if request else {}
        side.conditions = {"mode": "eval", "attention": kernel}
    sides[1].carry_on(f"layers.{layers // 2}.attn.out", "s0:5")
    flipped = sides[1].values[f"layers.{layers // 2}.moe.topk_ids"]
    flipped.rows = flipped.rows.copy()
    flipped.rows[5] = sorted({0, 1, 2, 3} - set(flipped.rows[5].tolist()))[:2]
    sides[1].drop("layers.1.attn.q", reason="compiled region")
    values = DumpLine(
        boundary=f"layers.{layers // 2}.attn.out", role="output", rows=8, columns=32, dtype_a="bfloat16", dtype_b="bfloat16", max_abs=1e-3,
        mae=1e-5, relative_l2=1e-4, cosine=0.999, ulps=2.0, rows_differing=1, finite_a=1.0, finite_b=1.0, first_request=request or "s0",
        first_position=5, first_column=17,
    )  # fmt: skip
    return msgspec.structs.replace(diff_traces(sides[0].trace(), sides[1].trace()), dumps=(values,))


HOSTILE = "</script><img src=x onerror=window.probeErrors.push('ran')>\"' \u202edesrever\u202c " + "long_name_" * 20


def size_of(picture: bytes) -> tuple[int, int]:
    """Width and height of a PNG, from its header."""
    width, height = struct.unpack(">II", picture[16:24])
    return int(width), int(height)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(
    ("layers", "dark", "request_name", "width"),
    [(4, False, HOSTILE, 1400), (4, True, "", 700), (94, False, "", 1400), (94, True, "", 1400)],
    ids=["4-light-hostile", "4-dark-narrow", "94-light", "94-dark"],
)
def test_the_page_in_a_browser(layers: int, dark: bool, request_name: str, width: int, tmp_path: Path) -> None:
    """Verdict, map, curve, flips, values, settings and absences are visible, also with hostile names and on a narrow screen; nothing
    overlaps or sticks out, nothing runs, and nothing is fetched."""
    result = some_result(layers, request=request_name)
    page = tmp_path / "diff.html"
    write_page(diff_page(result), str(page))
    look: Look = look_at(page, dark=dark, width=width)
    seen = look.measured
    assert seen["errors"] == []
    assert seen["fetched"] == []
    assert seen["overlaps"] == []
    assert seen["stacked"] == []
    assert seen["wide"] <= 0
    assert visible(result.headline) in seen["shown"]
    for wanted in ("Routing flips", "A chose", "relative L2", "Not compared", "setting", "eager"):
        assert wanted in seen["shown"]
    assert "DIFFERENT" in seen["shown"]
    assert "compiled region" in seen["shown"]
    assert seen["charts"]["chart-map"]["images"] >= 1
    assert "causal root" in seen["charts"]["chart-map"]["text"]
    assert seen["charts"]["chart-curve"]["points"] >= sum(found.distance is not None for found in result.boundaries)
    assert seen["focusable"] >= 8
    back = [int(part) for part in re.findall(r"\d+", seen["back"])[:3]]
    assert (sum(back) < 150) is dark
    assert size_of(look.picture) == (width, 2400)
    assert len(set(look.picture)) > 100  # no blank sheet
    assert page.stat().st_size < 15_000_000


def test_names_are_data() -> None:
    """A request's name with markup in it is shown as text, in the page and in the drawings."""
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\u202e"
    page = diff_page(some_result(request=evil))
    body, _, figures = page.partition('<script type="application/json" id="figures">')
    figures = figures.partition("</script>")[0]
    assert "<img" not in body
    assert "alert(2)</script" not in page
    assert "&lt;img src=x" in body
    assert "<" not in figures
    assert "\u202e" not in page  # what turns the direction of writing is shown as \\u202e
    assert "&lt;img src=x" in figures  # the drawing library reads markup in labels


def test_long_names_stay_apart() -> None:
    """Names that are long and alike at both ends are short on the axes, and still one place each."""
    names = [f"{'a' * 40}{number}{'b' * 40}" for number in range(2)]
    sides = [Side({name: range(20 * at, 20 * at + 5) for at, name in enumerate(names)}) for _ in range(2)]
    sides[1].change("layers.1.attn.out", f"{names[1]}:3")
    chart = token_map_chart(diff_traces(sides[0].trace(), sides[1].trace()))
    assert chart is not None
    labels = chart.data[0]["x"]
    assert len(set(labels)) == len(labels)
    assert max(map(len, labels)) < 50


def test_nothing_to_draw() -> None:
    """Equal sides make a page without drawings, and without the library that draws."""
    page = diff_page(diff_traces(Side().trace(), Side().trace()))
    assert len(page) < 60_000
    assert "SAME" in page


def test_absences_are_listed() -> None:
    """What was not compared stands on the page with its reason."""
    page = diff_page(some_result())
    assert "Not compared" in page
    assert "layers.1.attn.q" in page.partition("Not compared")[2]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the error says what to install."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page_module._drawing_library.cache_clear()
    with pytest.raises(UsageError) as error:
        diff_page(some_result())
    assert error.value.code is Code.EXTRA_MISSING
    assert "boundary-tracer[report]" in error.value.remedy
    page_module._drawing_library.cache_clear()
