"""Views as text: coloured and folded to the width on a terminal, plain and whole everywhere else.

Nothing is said by colour alone. The package that draws tables is loaded only for a terminal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from tracer.reports.view import Block, Facts, Headline, Items, Table

__all__ = ["print_view", "render_plain"]

_STYLES = {"good": "bold green", "bad": "bold red", "open": "bold yellow"}


def print_view(blocks: Sequence[Block], file: TextIO | None = None) -> None:
    """Write a view. A reader that has gone away (``| head``) is no error."""
    out = sys.stdout if file is None else file
    try:
        if out.isatty() and os.environ.get("TERM") != "dumb":
            _print_rich(blocks, out)
        else:
            out.write(render_plain(blocks))
            out.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until exit, so that the final flush has somewhere to go


def render_plain(blocks: Sequence[Block]) -> str:
    """A view as plain text: no colour, no folding, columns padded with spaces."""
    return "\n".join(_plain(block) for block in blocks)


def _plain(block: Block) -> str:
    match block:
        case Headline(text=text):
            return f"{text}\n"
        case Facts(lines=lines):
            width = max((len(label) for label, _ in lines), default=0)
            return "".join(f"{label:<{width}}  {text}\n" for label, text in lines)
        case Items(title=title, items=items):
            return f"{title}\n" + "".join(f"  {item}\n" for item in items)
        case Table():
            return _plain_table(block)


def _plain_table(table: Table) -> str:
    used = [at for at, column in enumerate(table.columns) if any(row[at] for row in table.rows)]
    widths = [max(len(table.columns[at]), *(len(row[at]) for row in table.rows)) for at in used]
    lines = []
    for row in (table.columns, *table.rows):
        lines.append("  ".join(f"{row[at]:<{width}}" for at, width in zip(used, widths, strict=True)).rstrip())
    return "\n".join(lines) + "\n" + (f"{table.rest}\n" if table.rest else "")


def _print_rich(blocks: Sequence[Block], out: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=out, highlight=False)
    for number, block in enumerate(blocks):
        if number:
            console.print()
        match block:
            case Headline(text=text, tone=tone):
                console.print(Text(text, style=_STYLES[tone]))
            case Facts(lines=lines):
                grid = RichTable.grid(padding=(0, 2))
                grid.add_column(style="bold", no_wrap=True)
                grid.add_column(overflow="fold")
                for label, text in lines:
                    grid.add_row(Text(label), Text(text))
                console.print(grid)
            case Items(title=title, items=items):
                console.print(Text(title, style="bold"))
                for item in items:
                    console.print(Text(f"  {item}"), soft_wrap=False)
            case Table(columns=columns, rows=rows, marked=marked, rest=rest):
                used = [at for at in range(len(columns)) if any(row[at] for row in rows)]
                drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
                for at in used:
                    drawn.add_column(
                        Text(columns[at]), overflow="fold", no_wrap=columns[at] in ("", "outcome", "differ", "distance", "floor")
                    )
                for line, row in enumerate(rows):
                    drawn.add_row(*(Text(row[at]) for at in used), style="bold" if line in marked else None)
                console.print(drawn)
                if rest:
                    console.print(Text(rest, style="dim"))
