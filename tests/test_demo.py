"""``tracer demo``: every fault it can plant is found where the demo says, by the public commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli_runs import run_tracer
from tracer.errors import UsageError
from tracer.hosts.demo_model import FAULTS, build_pair, find_fault

FAULTY = [name for name in FAULTS if name != "none"]


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_changes_the_model(name: str) -> None:
    """Every fault changes the logits of side B, so that there is something to find."""
    pair = build_pair(find_fault(name))
    real = pair.inputs_a["attention_mask"].bool()
    logits = [model(**inputs).logits[real] for model, inputs in ((pair.a, pair.inputs_a), (pair.b, pair.inputs_b))]
    assert not torch.equal(*logits)


def test_without_a_fault_both_sides_are_bitwise_equal() -> None:
    """The two models are built bitwise equal, so that the fault is the only difference."""
    pair = build_pair(find_fault("none"))
    assert torch.equal(pair.a(**pair.inputs_a).logits, pair.b(**pair.inputs_b).logits)


def test_an_unknown_fault_is_refused_with_the_names_there_are() -> None:
    """A name that is no fault raises bad-argument and lists the faults."""
    with pytest.raises(UsageError, match="attention-scale") as caught:
        find_fault("gremlins")
    assert caught.value.code.value == "bad-argument"


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_the_demo_finds_what_it_plants(name: str, level: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At every level the diff names the first place where that level can see the fault, and the demo ends with 0."""
    assert run_tracer("demo", "--fault", name, "--level", str(level), "--out", tmp_path / "demo") == 0
    printed = capsys.readouterr()
    assert "That is where level" in printed.out or name == "none"
    assert printed.err == ""


def test_the_demo_leaves_traces_that_the_commands_it_names_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command the demo suggests runs on the traces it left."""
    assert run_tracer("demo", "--fault", "stale-expert", "--out", tmp_path / "demo") == 0
    suggested = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  tracer ")]
    assert len(suggested) >= 3
    endings = {words[1]: run_tracer(*words[1:]) for words in suggested}
    assert endings == {"diff": 1, "show": 0, "weights": 1, "demo": 0}


def test_the_demo_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that holds an earlier demo is refused."""
    assert run_tracer("demo", "--fault", "none", "--level", "0", "--out", tmp_path / "demo") == 0
    assert run_tracer("demo", "--fault", "none", "--level", "0", "--out", tmp_path / "demo") == 2
    assert "[out-in-use]" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--fault", "gremlins"), ("--level", "3")])
def test_the_demo_refuses_what_it_does_not_know(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown fault or level ends with exit code 2 and a typed error."""
    assert run_tracer("demo", *options) == 2
    assert "[bad-argument]" in capsys.readouterr().err


def test_the_demo_without_transformers_says_how_to_get_it() -> None:
    """Where transformers is missing the demo ends with host-missing-package and the line that installs it."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'transformers': raise ImportError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from tracer.cli.main import main\n"
        "main(['demo'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert "[host-missing-package]" in run.stderr
    assert "pip install" in run.stderr
