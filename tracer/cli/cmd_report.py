"""``tracer report RESULT.json --html FILE``: the page of a comparison made earlier, perhaps elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["report"]


def report(
    result: Annotated[str, typer.Argument(metavar="RESULT.json", help="What tracer diff or tracer scores wrote with --json.")],
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="The page to write.")],
) -> None:
    """Turn the JSON of a comparison into a page.

    The page is one file that needs no network. Exit code 0: it was written; the verdict is in it.
    """
    from tracer.reports.page import diff_page, write_page
    from tracer.reports.result_json import read_result
    from tracer.reports.score_page import score_page, update_page
    from tracer.scores.results import ScoreResult, UpdateResult

    match read_result(result):
        case ScoreResult() as scores:
            page = score_page(scores)
        case UpdateResult() as update:
            page = update_page(update)
        case differences:
            page = diff_page(differences)
    write_page(page, html)
    typer.echo(f"Page written to {html}")
