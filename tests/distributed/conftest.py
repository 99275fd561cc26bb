"""Sharded runs of tiny real models, launched once for all tests, and the single-process traces they are held against."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.tiny_models import make_ids, make_model
from tracer import diff_traces, trace
from tracer.read.findings import DiffResult

WORKER = Path(__file__).with_name("worker.py")

TWO = (
    "qwen3:tp", "qwen3_moe:tp", "llama:tp", "qwen3_moe:tp_ep", "qwen3:torch_tp", "llama:torch_tp", "llama:torch_sp",
    "llama:torch_sp_dtensor", "llama:cp", "qwen3:hf_fsdp", "qwen3:pp", "qwen3_moe:pp", "llama:fsdp", "qwen3_moe:fsdp_same",
    "qwen3_moe:fsdp_ckpt_same", "llama:fsdp_ckpt_reentrant", "qwen3:fsdp_ckpt_wrapper", "llama:ddp", "llama:head_tp",
    "llama:head_tp_by_hand", "qwen3:off", "llama:killed",
)  # fmt: skip
FOUR = (
    "qwen3:fsdp_tp", "qwen3_moe:fsdp_tp_ep", "qwen3_moe:fsdp_ep", "llama:torch_fsdp_tp", "qwen3:pp", "uneven:tp", "llama:cp",
)  # fmt: skip


@dataclass(frozen=True)
class Runs:
    """``models``: saved models, their ids and single-process traces ``whole-<family>``. ``traces``: by number of processes."""

    models: Path
    traces: dict[int, Path]

    def path(self, case: str, world: int) -> Path:
        return self.traces[world] / case.replace(":", "-")

    def against_one_process(self, case: str, world: int) -> DiffResult:
        """The diff of the single-process trace and a sharded one. A case that raised fails the test with its traceback."""
        path = self.path(case, world)
        for rank in range(world):
            raised = path.with_suffix(f".rank{rank}")
            assert not raised.exists(), raised.read_text()
        return diff_traces(self.models / f"whole-{case.partition(':')[0]}", path)


def _single_process(models: Path, family: str, ids: torch.Tensor, **changes: Any) -> None:
    make_model(family if family != "uneven" else "qwen3", **changes).save_pretrained(models / family)
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model: Any = AutoModelForCausalLM.from_pretrained(models / family, **settings)
    model.eval()
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"
    with trace(model, out=models / f"whole-{family}", level=2, strict=True) as t, torch.no_grad():
        t.requests([f"p{int(row[0])}" for row in ids])
        model(input_ids=ids, use_cache=False)


def launch(world: int, *arguments: str | Path) -> None:
    """Run the worker in ``world`` processes; what a case raised is found beside its trace."""
    root = WORKER.parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(WORKER)]
    subprocess.run([*command, *map(str, arguments)], env=environment, capture_output=True, timeout=480, check=False)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every case, run once."""
    root = tmp_path_factory.mktemp("sharded")
    models = root / "models"
    models.mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ids = make_ids(4, 16, seed=5) % 250
    save_file({"ids": ids}, models / "ids.safetensors")
    for family in ("qwen3", "qwen3_moe", "llama"):
        _single_process(models, family, ids)
    _single_process(models, "uneven", ids, intermediate_size=126, vocab_size=250, num_key_value_heads=4)
    torch.set_num_threads(threads)
    traces = {world: root / str(world) for world in (2, 4)}
    for world, cases in ((2, TWO), (4, FOUR)):
        traces[world].mkdir()
        launch(world, models, traces[world], *cases)
    return Runs(models, traces)
