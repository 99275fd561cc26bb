"""What tracing costs: traced against plain forward in one process, interleaved, medians; and the bytes it writes.

Prints one Markdown row per case for ``docs/explanation/performance.md``. The model is a random Qwen3-MoE in
float32 on the CPU: hidden 1024, 8 layers, vocabulary 32768, 8 experts of 768 with 2 per token, 512 tokens.

A prefill is timed twice: the forward alone, and ``with trace(...)`` as a whole (hooks on, forward, hooks off, commit),
both without the weight fingerprint, which is taken once per trace and timed apart.

Under ``torchrun --nproc-per-node 2 tools/bench_overhead.py --threads 1`` the model is cut by the library's tensor parallelism, and the
first process prints what it saw. Hold it against one process with as many threads as there are processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from tracer import trace
from tracer.format.schema import MANIFEST_NAME, Manifest, shard_name

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
HEADER = "| case | plain ms | traced ms | forward | with commit | bytes per token and boundary |\n|---|---|---|---|---|---|"


def build_model() -> Any:
    """The benchmark model, float32, on the CPU."""
    torch.manual_seed(0)
    config_class: Any = transformers.Qwen3MoeConfig
    config = config_class(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=3072,
        moe_intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model: Any = transformers.Qwen3MoeForCausalLM(config)
    return model.eval().requires_grad_(False)


def cut_model(saved: Path) -> Any:
    """The benchmark model under tensor parallelism over all processes; the first one saves it for them."""
    if RANK == 0:
        build_model().save_pretrained(saved)
    dist.barrier()
    layout: Any = DistributedConfig(tp_size=WORLD, tp_plan="auto")
    model: Any = transformers.Qwen3MoeForCausalLM.from_pretrained(saved, distributed_config=layout, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """One temporary folder for all processes."""
    with tempfile.TemporaryDirectory() as own:
        name = [own]
        if WORLD > 1:
            dist.broadcast_object_list(name)
        yield Path(name[0])
        meet()


def meet() -> None:
    """Wait for the other processes."""
    if WORLD > 1:
        dist.barrier()


class Clock:
    """Collects seconds under names and gives their medians. ``cpu``: processor time of all threads instead of the wall's,
    for a machine that is busy with other things; with one torch thread it is what the wall would show on an idle one."""

    def __init__(self, cpu: bool) -> None:
        self.now = time.process_time if cpu else time.perf_counter
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.seconds.setdefault(name, []).append(self.now() - start)

    def median_ms(self, name: str) -> float:
        return 1000 * statistics.median(self.seconds[name])


def read_manifest(out: Path) -> Manifest:
    """The manifest of a one-process trace."""
    return msgspec.json.decode((out / shard_name(0) / MANIFEST_NAME).read_bytes(), type=Manifest)


def bytes_per_cell(out: Path) -> float:
    """Bytes of segments per (token, boundary) fingerprint of a trace."""
    manifest = read_manifest(out)
    return sum(segment.size_bytes for segment in manifest.segments) / sum(segment.fingerprints for segment in manifest.segments)


@contextlib.contextmanager
def tracing(model: Any, level: int, out: Path) -> Iterator[None]:
    """A trace without weights in ``out``, which is emptied first; says nothing."""
    if RANK == 0:
        shutil.rmtree(out, ignore_errors=True)
    meet()
    with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None), trace(model, out=out, level=level, weights=False, strict=True):
        yield


def prefill(model: Any, tokens: int) -> Callable[[], None]:
    """One forward of one sequence."""
    input_ids = torch.randint(0, 32768, (1, tokens), generator=torch.Generator().manual_seed(1))
    return lambda: model(input_ids=input_ids, use_cache=False)


def decode(model: Any, tokens: int, steps: int) -> Callable[[], None]:
    """A prefill, then greedy decode steps with a cache; the prefill is part of what is timed."""
    input_ids = torch.randint(0, 32768, (1, tokens), generator=torch.Generator().manual_seed(1))
    return lambda: model.generate(input_ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=0)


def measure(name: str, model: Any, run: Callable[[], None], level: int, rounds: int, out: Path, cpu: bool) -> str:
    """One row: plain and traced runs take turns, so that a slow minute of the machine hits both."""
    clock = Clock(cpu)
    run()
    for _ in range(rounds):
        meet()
        with clock.time("plain"):
            run()
        with clock.time("whole"), tracing(model, level, out), clock.time("traced"):
            run()
    plain, traced, whole = (clock.median_ms(key) for key in ("plain", "traced", "whole"))
    times = f"{plain:.0f} | {traced:.0f} | {traced / plain:.2f} | {whole / plain:.2f}"
    meet()
    row = f"| {name}, level {level} | {times} | {bytes_per_cell(out):.0f} |"
    meet()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds per case (medians over these)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--steps", type=int, default=32, help="decode steps after a prefill of 64 tokens; 0 for none")
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves torch's default")
    parser.add_argument("--cpu", action="store_true", help="measure processor time, for a busy machine; use with --threads 1")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if WORLD > 1:
        dist.init_process_group("gloo")
    say = print if RANK == 0 else lambda *ignored, **more: None
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    clock = "processor time" if options.cpu else "wall clock"
    say(f"{versions}, {WORLD} processes, {torch.get_num_threads()} threads each, {options.rounds} rounds, {clock}\n")
    say(HEADER)
    with shared_folder() as folder, torch.no_grad():
        out = folder / "trace"
        model = build_model() if WORLD == 1 else cut_model(folder / "model")
        cases = [(f"prefill of {options.tokens}", prefill(model, options.tokens), options.rounds)]
        if options.steps:
            cases.append((f"64 + {options.steps} decode steps", decode(model, 64, options.steps), max(3, options.rounds // 3)))
        for name, run, rounds in cases:
            for level in options.levels:
                say(measure(name, model, run, level, rounds, out, options.cpu), flush=True)
        if WORLD > 1:
            return
        shutil.rmtree(out)
        start = time.perf_counter()
        with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None), trace(model, out=out, level=0, strict=True):
            pass
        count = sum(parameter.nbytes for parameter in model.parameters())
        print(f"\nweights: {count / 2**30:.2f} GiB fingerprinted in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
