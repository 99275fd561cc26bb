"""``tracer verify DIR``: every file of a trace."""

from __future__ import annotations

from typing import Annotated

import typer

from tracer.cli.progress import progress_bar

__all__ = ["verify"]


def verify(
    trace: Annotated[str, typer.Argument(metavar="DIR", help="Trace folder.")],
    json: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the whole result as JSON; - for standard output.")] = "",
) -> None:
    """Check every file, checksum and count of a trace.

    Exit code 0: whole and unaltered. 2: anything else.
    """
    from tracer.read.load import verify_trace

    with progress_bar() as report:
        result = verify_trace(trace, progress=None if report is None else lambda done, total: report("hashing", done, total))
    if json:
        from tracer.reports.result_json import write_result

        write_result(result, json)
    if json != "-":
        from tracer.reports.terminal import print_view
        from tracer.reports.view import view_verify

        print_view(view_verify(result))
    raise typer.Exit(0 if result.good else 2)
