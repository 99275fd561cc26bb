"""The documentation runs: every Python block and every console command of the pages listed here, in order, in a fresh folder.

A ``python`` block is run as a script; one (or a ``yaml`` block) whose first line is a comment with a file's name is saved under
that name, for the commands that follow. In a ``console`` block every line that starts with ``$ `` is run by bash and the lines under
it are what it must print (``...`` stands for anything; ``$ echo $?`` shows the exit code of the command before it).
A block directly under ``<!-- not executed: REASON -->`` is skipped.

The pages speak of the reader's own model in ``my-model``: here that is a tiny random Qwen3-MoE. The README's commands start
like anybody's; those of the other pages are started by ``warm.py``, which has torch and transformers imported already.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_model
from tests.warm import WarmPython

ROOT = Path(__file__).resolve().parent.parent
OWN_TEST = {
    "docs/how-to/bisect-sharded.md", "docs/how-to/bisect-vllm.md", "docs/how-to/trace-megatron.md",
    "docs/tutorial/trainer-against-rollout.md",
}  # fmt: skip
"""Pages that another test runs, on a model of their own."""

FOUND = sorted(str(path.relative_to(ROOT)) for door in ("tutorial", "how-to") for path in (ROOT / "docs" / door).glob("*.md"))
PAGES = ["README.md", *(page for page in FOUND if page not in OWN_TEST)]

COMMANDS = Path(sys.executable).parent
"""This environment's, started like anybody's."""
IMPORTED = ("torch._dynamo", "transformers.models.qwen3_moe.modeling_qwen3_moe", "torch.distributed.run", "tracer.hosts.transformers")

pytestmark = [pytest.mark.host, pytest.mark.slow]


@dataclass
class Block:
    """One fenced block of a page."""

    line: int
    language: str
    text: str
    skipped: bool


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    pattern = r"(?P<skip><!-- not executed: .+? -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```"
    return [
        Block(text[: match.start()].count("\n") + 1, match["language"], match["text"], bool(match["skip"]))
        for match in re.finditer(pattern, text, flags=re.MULTILINE | re.DOTALL)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reader's folder: their model lies in it."""
    make_model("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "my-model")
    return tmp_path


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a ``python`` that has imported what the pages import."""
    python = WarmPython(tmp_path_factory.mktemp("warm") / "python", IMPORTED)
    yield python.bin
    python.close()


def run(command: list[str], folder: Path, commands: Path = COMMANDS) -> subprocess.CompletedProcess[str]:
    """Run as a reader would, with ``commands`` and then this environment's first on the path."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), str(COMMANDS), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "160",
    }
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(["env", *command], cwd=folder, env=environment, text=True, timeout=300, **both)  # type: ignore[call-overload,no-any-return]


def run_console(block: Block, folder: Path, where: str, commands: Path = COMMANDS) -> None:
    """Run every command of a console block and compare what it prints with what the page shows."""
    status = 0
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        done = run(["bash", "-c", f"(exit {status}); {command}"], folder, commands)
        status = done.returncode
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if wanted.strip() and not doctest.OutputChecker().check_output(wanted, done.stdout, flags):
            pytest.fail(f"{where}: `{command}` printed\n{done.stdout}\nthe page shows\n{wanted}")
        if not wanted.strip():
            assert status in (0, 1), f"{where}: `{command}` ended with {status}\n{done.stdout}"


def run_page(page: str, folder: Path, commands: Path = COMMANDS) -> None:
    """Run every block of a page that is not marked as not executed."""
    for block in blocks(ROOT / page):
        where = f"{page}:{block.line}"
        if block.skipped:
            continue
        match block.language:
            case "python" | "yaml" if named := re.match(r"# (\w+\.(?:py|yaml))\n", block.text):
                (folder / named[1]).write_text(block.text)
            case "python":
                done = run(["python", "-c", block.text], folder, commands)
                assert done.returncode == 0, f"{where}\n{done.stdout}"
            case "console":
                run_console(block, folder, where, commands)
            case _:
                continue


def test_every_block_of_the_readme_runs(folder: Path) -> None:
    """Everything the README tells the reader to run does run, and prints what it shows."""
    run_page("README.md", folder)


@pytest.mark.newest
@pytest.mark.parametrize("page", PAGES[1:])
def test_every_block_of_the_page_runs(page: str, folder: Path, commands: Path) -> None:
    """Everything a page tells the reader to run does run, and prints what the page shows."""
    run_page(page, folder, commands)


def test_pages_with_a_test_of_their_own_have_it() -> None:
    """A page that is not run here is named by another test."""
    others = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    assert {page for page in OWN_TEST if Path(page).name not in others} == set()


def test_the_readme_has_something_to_run() -> None:
    """The README holds executed Python and executed commands, so that the test above is no empty one."""
    languages = {block.language for block in blocks(ROOT / "README.md") if not block.skipped}
    assert {"python", "console"} <= languages


def test_make_targets_of_the_readme_exist() -> None:
    """Every make target that a page names exists."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    targets = set(re.findall(r"^(?:\$ )?make ([a-z-]+)|`make ([a-z-]+)`", text, flags=re.MULTILINE))
    targets = {name for pair in targets for name in pair if name}
    assert {"demo", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)} == set()


def test_every_call_of_trace_in_prose_works(folder: Path, commands: Path) -> None:
    """Every ``trace(model, ...)`` that a page mentions in passing records a forward."""
    calls = sorted({call for page in PAGES for call in re.findall(r"`(trace\(model[^`]*\))`", (ROOT / page).read_text())})
    assert calls
    code = "import torch; from transformers import AutoModelForCausalLM; from tracer import trace\n"
    code += 'model = AutoModelForCausalLM.from_pretrained("my-model")\n'
    for number, call in enumerate(calls):
        code += f"with torch.no_grad(), {call.removesuffix(')')}, out='prose/{number}'): model(input_ids=torch.arange(20, 40)[None])\n"
    done = run(["python", "-c", code], folder, commands)
    assert done.returncode == 0, done.stdout
    assert len(list((folder / "prose").glob("*/shard-00000/manifest.json"))) == len(calls)
