"""``tracer weights A B``: weights by name."""

from __future__ import annotations

from typing import Annotated

import typer

from tracer.cli.progress import progress_bar

__all__ = ["weights"]


def weights(
    a: Annotated[str, typer.Argument(metavar="A", help="Trace folder of one side.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Trace folder of the other side.")],
    everything: Annotated[bool, typer.Option("--all", help="Identical weights too.")] = False,
    json: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the whole result as JSON; - for standard output.")] = "",
) -> None:
    """Compare the weights of two traces by name.

    Rows are named where both sides were recorded with weights="rows". Exit code 0: same. 1: different. 2: could not tell.
    """
    from tracer.read.weight_report import diff_weights

    with progress_bar() as report:
        result = diff_weights(a, b, progress=report)
    if json:
        from tracer.reports.result_json import write_result

        write_result(result, json)
    if json != "-":
        from tracer.reports.terminal import print_view
        from tracer.reports.view import view_weights

        print_view(view_weights(result, everything=everything))
    raise typer.Exit(result.exit)
