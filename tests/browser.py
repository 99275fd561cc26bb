"""A page in a real browser: what it looks like, and what a script in it can measure.

Chromium runs without a window and without a network. A copy of the page gets one more script, which writes what it
measured to the console while the picture is taken: one start of the browser for both.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PROBE = """
<script>
addEventListener("load", () => setTimeout(() => {
  const box = node => { const r = node.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const overlaps = [];
  for (const axis of document.querySelectorAll(".yaxislayer-above, .xaxislayer-above, .legend, .infolayer")) {
    const labels = [...axis.querySelectorAll("text")].filter(
      node => node.textContent.trim() && !node.getAttribute("transform")?.includes("rotate"));
    for (let i = 1; i < labels.length; i++) {
      const [a, b] = [box(labels[i - 1]), box(labels[i])];
      if (Math.min(a[2], b[2]) - Math.max(a[0], b[0]) > 1 && Math.min(a[3], b[3]) - Math.max(a[1], b[1]) > 2)
        overlaps.push(labels[i - 1].textContent + " / " + labels[i].textContent);
    }
  }
  const charts = {};
  for (const chart of document.querySelectorAll(".chart"))
    charts[chart.id] = {width: chart.clientWidth, height: chart.clientHeight, images: chart.querySelectorAll(".hm image").length,
      points: chart.querySelectorAll(".scatterlayer .point").length, text: [...chart.querySelectorAll("text")].map(t => t.textContent)};
  const folded = node => node.tagName !== "SUMMARY" && node.closest("details:not([open])");
  const blocks = [...document.querySelectorAll("h1, h2, p, dl, .chart, .scroll, ul, summary")].filter(
    node => node.offsetParent !== null && !folded(node));
  const stacked = [];
  for (let i = 1; i < blocks.length; i++)
    if (!blocks[i - 1].contains(blocks[i]) && box(blocks[i])[1] < box(blocks[i - 1])[3] - 1)
      stacked.push(blocks[i - 1].tagName + " over " + blocks[i].tagName);
  const result = {overlaps, stacked, charts, wide: document.documentElement.scrollWidth - innerWidth,
    back: getComputedStyle(document.body).backgroundColor, text: getComputedStyle(document.body).color,
    focusable: document.querySelectorAll("a[href], summary, [tabindex='0']").length,
    shown: document.body.innerText, fetched: performance.getEntriesByType("resource").map(e => e.name), errors: window.probeErrors};
  console.log("probe:" + btoa(unescape(encodeURIComponent(JSON.stringify(result)))) + ":");
}, 300));
</script>
"""
_FIRST = '<script>window.probeErrors = []; addEventListener("error", e => window.probeErrors.push(e.message));</script>'


@dataclass(frozen=True)
class Look:
    """What the probe measured, and the screenshot."""

    measured: dict[str, Any]
    picture: bytes


def browser() -> str:
    """The browser's command; without one the test is skipped, and says what to install (in CI a skip is a failure)."""
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium found: install the distribution's package, for example apt-get install chromium")


def look_at(page: Path, *, dark: bool = False, width: int = 1400, height: int = 2400) -> Look:
    """Open a page and measure it."""
    text = page.read_text(encoding="utf-8")
    probed = page.with_name(f"probed-{page.name}")
    probed.write_text(text.replace("<head>", f"<head>{_FIRST}", 1).replace("</body>", f"{_PROBE}</body>"), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    picture = page.with_suffix(f".{'dark' if dark else 'light'}.png")
    common = [
        browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage", scheme,
        f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},{height}", "--virtual-time-budget=8000",
    ]  # fmt: skip
    done = subprocess.run(
        [*common, "--enable-logging=stderr", f"--screenshot={picture}", probed.as_uri()], capture_output=True, text=True, timeout=180
    )
    found = re.search(r"probe:([\w+/=]+):", done.stderr)
    assert found is not None, done.stderr[-2000:]
    return Look(json.loads(base64.b64decode(found[1])), picture.read_bytes())
