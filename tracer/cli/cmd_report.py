"""``tracer report RESULT.json --html FILE``: the page of a comparison made earlier, perhaps elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["report"]


def report(
    result: Annotated[str, typer.Argument(metavar="RESULT.json", help="What tracer diff --json wrote.")],
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="The page to write.")],
) -> None:
    """Turn the JSON of a comparison into a page.

    The page is one file that needs no network. Exit code 0: it was written; the verdict is in it.
    """
    from tracer.reports.page import diff_page, write_page
    from tracer.reports.result_json import read_result

    write_page(diff_page(read_result(result)), html)
    typer.echo(f"Page written to {html}")
