"""Pages: what they show, looked at in a real browser, and what they never do."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

import pytest

from tests.browser import Look, look_at
from tests.sides import Side, catalogue
from tracer.errors import Code, UsageError
from tracer.read.diff import diff_traces
from tracer.read.findings import DiffResult
from tracer.reports import page as page_module
from tracer.reports.page import diff_page, write_page


def some_result(layers: int = 4, *, request: str = "") -> DiffResult:
    """A comparison with one difference that is carried on, and one boundary that B lacks."""
    sides = [Side(boundaries=catalogue(layers)) for _ in range(2)]
    for side in sides:
        side.requests = {"s0": request} if request else {}
    sides[1].carry_on(f"layers.{layers // 2}.attn.out", "s0:5")
    sides[1].drop("layers.1.attn.q", reason="compiled region")
    return diff_traces(sides[0].trace(), sides[1].trace())


def size_of(picture: bytes) -> tuple[int, int]:
    """Width and height of a PNG, from its header."""
    width, height = struct.unpack(">II", picture[16:24])
    return int(width), int(height)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(("layers", "dark"), [(4, False), (4, True), (94, False)], ids=["4-light", "4-dark", "94-light"])
def test_the_page_in_a_browser(layers: int, dark: bool, tmp_path: Path) -> None:
    """Verdict, map, curve and tables are visible, nothing overlaps or sticks out, and nothing is fetched."""
    result = some_result(layers)
    page = tmp_path / "diff.html"
    write_page(diff_page(result), str(page))
    look: Look = look_at(page, dark=dark)
    seen = look.measured
    assert seen["errors"] == []
    assert seen["fetched"] == []
    assert seen["overlaps"] == []
    assert seen["stacked"] == []
    assert seen["wide"] <= 0
    assert result.headline in seen["shown"]
    assert "DIFFERENT" in seen["shown"]
    assert "compiled region" in seen["shown"]
    assert seen["charts"]["chart-map"]["images"] >= 1
    assert "causal root" in seen["charts"]["chart-map"]["text"]
    assert seen["charts"]["chart-curve"]["points"] >= sum(found.distance is not None for found in result.boundaries)
    assert seen["focusable"] >= 8
    back = [int(part) for part in re.findall(r"\d+", seen["back"])[:3]]
    assert (sum(back) < 150) is dark
    assert size_of(look.picture) == (1400, 2400)
    assert len(set(look.picture)) > 100  # no blank sheet
    assert page.stat().st_size < 15_000_000


def test_names_are_data() -> None:
    """A request's name with markup in it is shown as text, in the page and in the drawings."""
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    page = diff_page(some_result(request=evil))
    body, _, figures = page.partition('<script type="application/json" id="figures">')
    figures = figures.partition("</script>")[0]
    assert "<img" not in body
    assert "alert(2)</script" not in page
    assert "&lt;img src=x" in body
    assert "<" not in figures
    assert "&lt;img src=x" in figures  # the drawing library reads markup in labels


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
