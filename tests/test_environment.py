"""Run conditions: plain, quick, repeatable, and free of secrets."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import make_model
from tracer.hosts import find_host
from tracer.record import environment
from tracer.record.environment import code_revision, environment_variables, run_conditions


@pytest.fixture(scope="module")
def host() -> Any:
    return find_host(make_model("qwen3"))


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script in a repository of its own."""
    path = tmp_path / "repository" / "inner" / "train.py"
    path.parent.mkdir(parents=True)
    path.write_text("print()\n")
    git(tmp_path / "repository", "init", "-q")
    git(tmp_path / "repository", "add", ".")
    git(tmp_path / "repository", "commit", "-q", "-m", "x")
    return path


def test_conditions_are_strict_json_and_repeat(host: Any) -> None:
    """Conditions survive strict JSON, and a second look in the same process finds the same."""
    conditions = run_conditions(host)
    assert json.loads(json.dumps(conditions, allow_nan=False)) == conditions == run_conditions(host)
    assert conditions["packages"]["torch"] == str(torch.__version__)
    assert conditions["model"]["model_class"] == "Qwen3ForCausalLM"
    assert conditions["threads"]["torch"] == torch.get_num_threads()


def test_switches_that_change_bits_show(host: Any) -> None:
    """Deterministic algorithms, matmul precision, autocast and threads are seen as they are at that moment."""
    before = run_conditions(host)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            inside = run_conditions(host)["torch"]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precision)
    assert (inside["float32_matmul_precision"], inside["deterministic_algorithms"]) == ("medium", True)
    assert inside["autocast"]["cpu"] == "bfloat16"
    assert before["torch"]["autocast"]["cpu"] is False


def test_conditions_are_quick(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git the conditions take well under 50 milliseconds."""
    monkeypatch.setenv("PATH", "")
    run_conditions(host)
    best = min(_timed(host) for _ in range(5))
    assert best < 0.05


def _timed(host: Any) -> float:
    start = time.perf_counter()
    run_conditions(host)
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------ secrets


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("OMP_NUM_THREADS", True),
        ("CUBLAS_WORKSPACE_CONFIG", True),
        ("NVIDIA_TF32_OVERRIDE", True),
        ("PYTORCH_CUDA_ALLOC_CONF", True),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", True),
        ("VLLM_ATTENTION_BACKEND", True),
        ("VLLM_MAX_NUM_BATCHED_TOKENS", True),
        ("NCCL_ALGO", True),
        ("VLLM_API_KEY", False),
        ("NCCL_SECRET", False),
        ("TORCH_HUB_TOKEN", False),
        ("PYTORCH_PASSWORD", False),
        ("NVIDIA_CREDENTIAL_FILE", False),
        ("HOME", False),
        ("TORCHINDUCTOR_CACHE_DIR", False),
        ("MY_DATABASE", False),
    ],
)
def test_environment_variables_come_by_an_allow_list_without_secrets(name: str, kept: bool) -> None:
    """Variables that can change numbers, a host's own too, are kept; what is not listed, or looks like a secret, is not there."""
    assert environment_variables({name: "1"}, ["VLLM_"]) == ({name: "1"} if kept else {})


def test_no_secret_of_the_environment_reaches_the_conditions(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment and command line hold, no secret value is anywhere in the conditions."""
    secret = "s3cr3t" * 4
    for name in ("VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "NCCL_TOKEN", "GIT_PASSWORD"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setattr("sys.argv", ["run.py", "--password", secret, f"--auth={secret}"])
    assert secret not in json.dumps(run_conditions(host))


# ------------------------------------------------------------------------------------------------ code


def test_revision_is_that_of_the_script(script: Path) -> None:
    """A clean repository gives its revision; a change, staged or not, or a new file, makes it dirty with a digest of its own."""
    clean = code_revision(script)
    assert clean == {"revision": git(script.parent, "rev-parse", "HEAD"), "dirty": False, "changes": ""}
    script.write_text("print(1)\n")
    first = code_revision(script)
    script.write_text("print(2)\n")
    second = code_revision(script)
    script.write_text("print()\n")
    (script.parent / "new.py").write_text("")
    third = code_revision(script)
    assert all(found["dirty"] and found["revision"] == clean["revision"] for found in (first, second, third))
    assert len({found["changes"] for found in (clean, first, second, third)}) == 4


def test_revision_is_unknown_outside_a_repository_and_without_git(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No repository, or no git, is ``unknown``, never an error."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    unknown = {"revision": "unknown", "dirty": "unknown", "changes": "unknown"}
    (tmp_path / "alone.py").write_text("")
    assert code_revision(tmp_path / "alone.py") == unknown
    monkeypatch.setenv("PATH", "")
    assert code_revision(script) == unknown


def test_slow_git_is_given_up(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git that hangs costs the time limit once and leaves the revision unknown."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(environment, "_GIT_SECONDS", 0.2)
    start = time.perf_counter()
    assert code_revision(script)["revision"] == "unknown"
    assert time.perf_counter() - start < 5


def test_image_digest_comes_from_the_environment(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container image is what the environment says, else unknown."""
    assert run_conditions(host)["image"] == "unknown"
    monkeypatch.setenv("TRACER_IMAGE_DIGEST", "sha256:1")
    assert run_conditions(host)["image"] == "sha256:1"
