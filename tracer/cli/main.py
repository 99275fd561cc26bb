"""The ``tracer`` command. Each subcommand is a module of its own, loaded only when it is the one that was asked for.

Exit codes: 0 good or same, 1 proven different, 2 anything else. No traceback for what can go wrong on purpose;
``TRACER_DEBUG=1`` shows one for our own bugs.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

import typer

from tracer.errors import Code, InternalError, TracerError, UsageError

__all__ = ["COMMANDS", "Command", "build_app", "main"]

_TROUBLE = 2


@dataclass(frozen=True)
class Command:
    """A subcommand: where it lives, and its line in the help. ``group``: it has subcommands of its own."""

    module: str
    attribute: str
    help: str
    group: bool = False


COMMANDS = {
    "demo": Command("tracer.cli.cmd_demo", "demo", "Trace a tiny model twice, the second time with a fault, and find the fault."),
    "diff": Command("tracer.cli.cmd_diff", "diff", "Compare two traces: where do they part first, and in what way?"),
    "show": Command("tracer.cli.cmd_show", "show", "What a trace holds: boundaries, counts, conditions. Works on unfinished traces."),
    "verify": Command("tracer.cli.cmd_verify", "verify", "Check every file, checksum and count of a trace."),
    "weights": Command("tracer.cli.cmd_weights", "weights", "Compare the weights of two traces by name."),
    "siblings": Command("tracer.cli.cmd_siblings", "siblings", "Check one trace against itself: do equal prefixes give equal values?"),
    "scores": Command(
        "tracer.cli.cmd_scores", "app", "Compare log probabilities of saved tokens: which half of the system to open first?", group=True
    ),
    "bisect": Command("tracer.cli.cmd_bisect", "app", "Narrow a divergence down step by step, to its bytes.", group=True),
    "controls": Command("tracer.cli.cmd_controls", "app", "Run variants of a command: which setting moves which boundary?", group=True),
    "report": Command("tracer.cli.cmd_report", "report", "Turn the JSON of a comparison into a page."),
    "map": Command("tracer.cli.cmd_map", "app", "Boundary maps: list, show, and check one against a model's config.", group=True),
}


def build_app(chosen: str = "") -> typer.Typer:
    """The command line, with the code of ``chosen`` loaded and all other commands as names with a line of help."""
    app = typer.Typer(
        name="tracer",
        help="Find the first place where two runs of the same weights part.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, command in COMMANDS.items():
        if name == chosen:
            code = getattr(importlib.import_module(command.module), command.attribute)
            if command.group:
                app.add_typer(code, name=name, help=command.help)
            else:
                app.command(name, help=f"{command.help}\n\n{_details(code)}".strip())(code)
        elif find_spec(command.module) is not None:
            app.command(name, help=command.help)(_unloaded)
    return app


def _details(code: object) -> str:
    """What a command's docstring says beyond its first line."""
    return (getattr(code, "__doc__", None) or "").partition("\n\n")[2]


def _unloaded() -> None:
    raise InternalError(Code.INTERNAL, "a command ran that was not loaded")


def _version(wanted: bool) -> None:
    if wanted:
        from tracer import __version__

        typer.echo(f"tracer {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", callback=_version, is_eager=True),
) -> None:
    """Options of ``tracer`` itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. ``arguments``: default ``sys.argv[1:]``."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nothing here multiplies matrices; starting threads costs more than all reading
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of a trace may hold what this terminal cannot show
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    code = _run(arguments)
    sys.exit(code if code in (0, 1) else _TROUBLE)


def _run(arguments: list[str]) -> int:
    chosen = next((argument for argument in arguments if not argument.startswith("-")), "")
    try:
        returned = build_app(chosen)(arguments, prog_name="tracer", standalone_mode=False)
    except TracerError as error:
        return _fail(arguments, error)
    except KeyboardInterrupt:
        return _say("interrupted; nothing was written")
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # the parser's own, whichever click typer brings
            error.show()
            _write_failure(arguments, UsageError(Code.BAD_ARGUMENT, str(getattr(error, "format_message", error.__str__)())))
            return _TROUBLE
        if type(error).__name__ == "Abort":
            return _say("interrupted; nothing was written")
        if os.environ.get("TRACER_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}"
        return _fail(arguments, InternalError(Code.INTERNAL, what, remedy="run again with TRACER_DEBUG=1 and report it"))
    if returned == 130:
        return _say("interrupted; nothing was written")
    return returned if isinstance(returned, int) else 0


def _fail(arguments: Sequence[str], error: TracerError) -> int:
    _write_failure(arguments, error)
    return _say(str(error))


def _say(text: str) -> int:
    print(f"tracer: {text}", file=sys.stderr)
    return _TROUBLE


def _write_failure(arguments: Sequence[str], error: TracerError) -> None:
    """What a command that ends in an error leaves at ``--json``: the error, in place of a result of an earlier run too."""
    target = next((argument.partition("=")[2] for argument in arguments if argument.startswith("--json=")), "")
    if "--json" in arguments[:-1]:
        target = arguments[arguments.index("--json") + 1]
    if target:
        from tracer.reports.result_json import failure_of, write_result

        with suppress(UsageError):  # the file that cannot be written may be what went wrong
            write_result(failure_of(error), target)


if __name__ == "__main__":
    main()
