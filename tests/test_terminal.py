"""Views as text."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from tests.sides import Side
from tests.trace_files import write_shard
from tracer.errors import Code, UsageError
from tracer.read.diff import diff_traces
from tracer.read.inventory import take_inventory
from tracer.read.load import verify_trace
from tracer.read.siblings import check_siblings
from tracer.read.weight_report import diff_weights
from tracer.reports.terminal import print_view, render_plain
from tracer.reports.view import (
    Block,
    Facts,
    Headline,
    Items,
    Table,
    view_diff,
    view_inventory,
    view_siblings,
    view_verify,
    view_weights,
)

BLOCKS: list[Block] = [
    Headline("First divergence: layers.2.attn.out", "bad"),
    Facts((("class", "unlocalized"), ("", "second line"))),
    Table(("", "boundary", "empty"), (("first", "layers.2.attn.out", ""), ("", "x", "")), frozenset({0}), "not shown: 3"),
    Items("findings", ("one", "two")),
]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


class Closed(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str, /) -> int:
        """Refused."""
        raise BrokenPipeError


def test_plain_text_is_whole_and_aligned() -> None:
    """Plain text has no escape codes, drops empty columns, and pads the others."""
    assert render_plain(BLOCKS) == (
        "First divergence: layers.2.attn.out\n"
        "\n"
        "class  unlocalized\n"
        "       second line\n"
        "\n"
        "       boundary\n"
        "first  layers.2.attn.out\n"
        "       x\n"
        "not shown: 3\n"
        "\n"
        "findings\n"
        "  one\n"
        "  two\n"
    )


def test_anything_but_a_terminal_gets_plain_text() -> None:
    """A pipe or file gets exactly the plain text."""
    out = io.StringIO()
    print_view(BLOCKS, out)
    assert out.getvalue() == render_plain(BLOCKS)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_is_never_overrun(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal no line is wider than it, nothing is cut off, and every word of the plain text is there."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    b = Side()
    b.carry_on("layers.2.attn.out", "s0:5")
    blocks = view_diff(diff_traces(Side().trace(), b.trace()))
    out = Terminal()
    print_view(blocks, out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert "correctnesserror" in "".join(text.split())
    assert "layers.2.attn.out" in "".join(text.split())


HOSTILE = "s0\x1b[2J\r\u202enot\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_names_cannot_steer_the_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters and marks that turn the direction of writing, in names that come from a trace, are written out."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    a, b = Side(), Side()
    for side in (a, b):
        side.requests = {"s0": HOSTILE}
        side.path = f"traces/{HOSTILE}"
    b.carry_on("layers.2.attn.out", "s0:5")
    out = Terminal() if terminal else io.StringIO()
    print_view(view_diff(diff_traces(a.trace(), b.trace())), out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert not set("\x1b\r\u202e") & set(text)
    assert "request s0\\x1b[2J\\r\\u202enot\\n, token 5" in text
    assert "\x1b" not in str(UsageError(Code.BAD_ARGUMENT, "odd", where=HOSTILE))


@pytest.mark.parametrize("width", [40, 50, 60, 75])
def test_narrow_tables_lose_nothing(width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a narrow terminal every word of every report is there, no line is wider, and what continues is indented."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    b = Side(moe=True)
    b.carry_on("layers.2.attn.out", "s0:5")
    b.drop("layers.1.moe.combine", reason="its module was never called")
    b.set_weight("lm_head.weight", 1)
    write_shard(tmp_path / "t", world_size=2, conditions={"model": {"config": {"rope_theta": 10000}}})
    a = Side(moe=True).trace()
    views = (
        view_diff(diff_traces(a, b.trace(), floor_a=Side(moe=True).trace()), everything=True),
        view_weights(diff_weights(a, b.trace()), everything=True),
        view_inventory(take_inventory(str(tmp_path / "t")), everything=True),
        view_verify(verify_trace(tmp_path / "t")),
        view_siblings(check_siblings(a)),
    )
    for blocks in views:
        out = Terminal()
        print_view(blocks, out)
        text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
        assert max(len(line) for line in text.splitlines()) <= width
        assert "…" not in text
        whole = "".join(text.split())
        for block in blocks:
            for row in block.rows if isinstance(block, Table) else ():
                for cell in row:
                    assert "".join(cell.split()) in whole


def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that cannot draw gets plain text."""
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    print_view(BLOCKS, out)
    assert out.getvalue() == render_plain(BLOCKS)


def test_a_reader_that_went_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed pipe ends the output quietly, so that the exit code stays that of the verdict."""
    import sys

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    print_view(BLOCKS, Closed())
    sys.stdout.close()
