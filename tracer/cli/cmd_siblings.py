"""``tracer siblings DIR``: one trace against itself."""

from __future__ import annotations

from typing import Annotated

import typer

from tracer.cli.progress import progress_bar

__all__ = ["siblings"]


def siblings(
    trace: Annotated[str, typer.Argument(metavar="DIR", help="Trace folder.")],
    json: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the whole result as JSON; - for standard output.")] = "",
) -> None:
    """Check one trace against itself: do equal prefixes give equal values?

    Siblings of one prompt, recomputed prefixes and repeated forwards must agree bitwise; where they do not, the size is
    that side's own noise. Exit code 0: they agree. 1: they do not. 2: nothing was seen twice, or the trace is incomplete.
    """
    from tracer.read.siblings import check_siblings

    with progress_bar() as report:
        result = check_siblings(trace, progress=report)
    if json:
        from tracer.reports.result_json import write_result

        write_result(result, json)
    if json != "-":
        from tracer.reports.terminal import print_view
        from tracer.reports.view import view_siblings

        print_view(view_siblings(result))
    raise typer.Exit(result.exit)
