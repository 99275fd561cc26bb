"""The ``tracer`` command: help, errors, exit codes, and what it must not load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.cli_runs import run_tracer
from tests.trace_files import edit_manifest, write_shard
from tracer.cli import main as command_line
from tracer.cli.main import COMMANDS
from tracer.reports.result_json import Failure


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """``tracer --help`` names every command with a line of its own."""
    assert run_tracer("--help") == 0
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in out


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not command.group])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``tracer COMMAND --help`` gives its line, its exit codes and its options."""
    assert run_tracer(name, "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert COMMANDS[name].help in out
    assert "xit code" in out


@pytest.mark.parametrize("arguments", [["nonsense"], ["diff"], ["diff", "a"], ["diff", "a", "b", "--nonsense"], ["show", "a", "b"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that cannot be parsed ends with 2 and says why on standard error."""
    assert run_tracer(*arguments) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("command", ["diff", "weights", "show", "verify", "siblings"])
def test_what_is_no_trace_is_2_without_traceback(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is no trace gives the error's code and remedy, and no traceback."""
    arguments = [tmp_path, tmp_path] if command in ("diff", "weights") else [tmp_path]
    assert run_tracer(command, *arguments) == 2
    err = capsys.readouterr().err
    assert "[not-a-trace]" in err
    assert "Traceback" not in err


def test_s40_s41_an_altered_trace_is_2_and_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped byte and an unknown format are refused by name."""
    good, bad = write_shard(tmp_path / "good"), write_shard(tmp_path / "bad")
    segment = bad / "segment-000000.safetensors"
    raw = bytearray(segment.read_bytes())
    raw[-1] ^= 1
    segment.write_bytes(raw)
    assert run_tracer("diff", good.parent, bad.parent) == 2
    assert "segment-000000.safetensors" in capsys.readouterr().err
    edit_manifest(bad, lambda content: content.update(format=2))
    assert run_tracer("diff", good.parent, bad.parent) == 2
    assert "[format-unsupported]" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["diff", "weights", "siblings", "show", "verify"])
def test_an_error_is_json_too(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that ends in an error writes it to ``--json`` FILE or standard output, in place of an earlier result, as strict JSON."""
    traces = [tmp_path / "nowhere"] * (2 if command in ("diff", "weights") else 1)
    (tmp_path / "out.json").write_text('{"exit": 0}')
    assert run_tracer(command, *traces, "--json", tmp_path / "out.json") == 2
    written = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Failure, strict=True)
    assert (written.exit, written.verdict, written.error.code, written.error.where) == (2, "could not tell", "not-a-trace", str(traces[0]))
    assert written.error.expected
    capsys.readouterr()
    assert run_tracer(command, *traces, "--json=-") == 2
    captured = capsys.readouterr()
    assert msgspec.json.decode(captured.out, type=Failure) == written
    assert "[not-a-trace]" in captured.err


def test_a_command_line_that_cannot_be_read_is_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing arguments and unknown options end up in the JSON; a JSON file that cannot be written is no second error."""
    for arguments, what in ((["diff", "a", "--json", "-"], "B"), (["show", "a", "--nonsense", "--json", "-"], "--nonsense")):
        assert run_tracer(*arguments) == 2
        failure = msgspec.json.decode(capsys.readouterr().out, type=Failure)
        assert failure.error.code == "bad-argument"
        assert what in failure.error.what
    write_shard(tmp_path / "t")
    assert run_tracer("show", tmp_path / "t", "--json", tmp_path / "missing/out.json") == 2
    assert capsys.readouterr().err.count("tracer: [") == 1


def test_our_own_bug_is_2_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An unexpected exception ends with 2 and one line; ``TRACER_DEBUG`` shows where it came from."""

    def broken(chosen: str = "") -> object:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(command_line, "build_app", broken)
    assert run_tracer("show", tmp_path) == 2
    assert "[internal] RuntimeError: unexpected" in capsys.readouterr().err
    monkeypatch.setenv("TRACER_DEBUG", "1")
    with pytest.raises(RuntimeError):
        command_line.main(["show", str(tmp_path)])


def test_an_interrupt_is_2_and_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while reading ends with 2, and no JSON file is left behind, not even half of one."""
    write_shard(tmp_path / "t")
    code = """
import sys
import tracer.read.diff as diff
def stopped(*args, **keywords):
    raise KeyboardInterrupt
diff.find_causes = diff.pair_sides = stopped
from tracer.cli.main import main
main(["diff", sys.argv[1], sys.argv[1], "--json", sys.argv[2]])
"""
    run = python(code, str(tmp_path / "t"), str(tmp_path / "out.json"))
    assert run.returncode == 2
    assert "interrupted" in run.stderr
    assert "Traceback" not in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_closed_pipe_keeps_the_exit_code(tmp_path: Path) -> None:
    """A reader that stops early (``| head``) neither shows an error nor changes the exit code."""
    write_shard(tmp_path / "t")
    code = "import sys; from tracer.cli.main import main; main(sys.argv[1:])"
    shell = f'{{ "{sys.executable}" -c "{code}" show {tmp_path / "t"} --all; echo "code $?" >&2; }} | true'
    run = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert "code 0" in run.stderr
    assert "Traceback" not in run.stderr
    assert "Broken" not in run.stderr


def test_help_loads_neither_numbers_nor_tables() -> None:
    """``tracer --help`` imports no command, no numpy, no rich, no torch."""
    code = """
import sys
from tracer.cli.main import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {"numpy", "torch", "rich", "msgspec", "yaml"} & set(sys.modules)
commands = {name for name in sys.modules if name.startswith("tracer.cli.cmd_")}
print(sorted(heavy | commands), file=sys.stderr)
"""
    assert python(code).stderr.strip() == "[]"


def test_the_module_runs_like_the_script(tmp_path: Path) -> None:
    """``python -m tracer`` is the same command."""
    run = subprocess.run([sys.executable, "-m", "tracer", "--version"], capture_output=True, text=True, check=False)
    assert run.stdout.startswith("tracer ")
