"""``tracer controls``: which setting moves which boundary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command()
def run(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML: a command and its variants; see tracer controls template.")],
    out: Annotated[str, typer.Option("--out", metavar="FOLDER", help="A new folder for all runs.")] = "controls",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and the budget, and run nothing.")] = False,
    json: Annotated[str, typer.Option("--json", metavar="FILE", help="The result as JSON; - for standard output.")] = "",
    html: Annotated[str, typer.Option("--html", metavar="FILE", help="Write a page: the variants and every run.")] = "",
) -> None:
    """Run a command and its variants, each in a process and a folder of its own, and compare every variant with the base.

    Exit code 0: no variant moves the target. 1: some do. 2: a run failed, or of some variant nothing is known.
    """
    from tracer.sessions.controls import load_controls, preview, run_controls

    controls = load_controls(file)
    for line in preview(controls):
        typer.echo(line, err=True)
    if dry_run:
        raise typer.Exit(0)
    result = run_controls(controls, Path(out), lambda text: typer.echo(f"running {text}", err=True))
    if json:
        from tracer.reports.result_json import write_result

        write_result(result, json)
    if html:
        from tracer.reports.page import write_page
        from tracer.reports.session_view import controls_page
        from tracer.sessions.archive import Archive

        write_page(controls_page(result, Archive(Path(out))), html)
    if json != "-":
        from tracer.reports.session_view import view_controls
        from tracer.reports.terminal import print_view

        print_view(view_controls(result, out))
    raise typer.Exit(result.exit)


@app.command()
def template(name: Annotated[str, typer.Argument(metavar="NAME", help="Which one; without it their names.")] = "") -> None:
    """Print a ready-made file of controls to edit: tracer controls template inference-alone > controls.yaml."""
    from tracer.errors import Code, UsageError
    from tracer.sessions.controls import TEMPLATES, template_names

    names = template_names()
    if not name:
        typer.echo("\n".join(names))
        return
    if name not in names:
        raise UsageError(Code.BAD_ARGUMENT, "there is no such template", expected=", ".join(names), found=name)
    typer.echo((TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8"), nl=False)
