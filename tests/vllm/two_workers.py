"""Tensor parallelism over two workers, the engine core in a third process. Arguments: CHECKPOINT FOLDER.

FOLDER holds ``one``, the trace of one worker with the inputs of its blocks."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import tracer
from tests.vllm.engines import SETTINGS, generate, whole
from tracer.cli.main import main as run_command


def main_command(arguments: list[str]) -> None:
    """A command of ``tracer`` in this process; its exit code is of no interest."""
    with contextlib.suppress(SystemExit):
        run_command(arguments)


def main() -> None:
    from vllm import LLM

    checkpoint, folder = sys.argv[1], Path(sys.argv[2])
    llm = LLM(**tracer.vllm_options(), model=checkpoint, dtype="float32", tensor_parallel_size=2, **SETTINGS)
    with tracer.trace(llm, out=folder / "two", level=2, strict=True) as t:
        t.requests(["0", "1", "2"])
        generate(llm, prompt_logprobs=1)
    try:
        with tracer.trace(llm, out=folder / "two", level=2, strict=True):
            pass
    except tracer.TracerError as error:
        print("refused", error.code.value)
    main_command(["diff", str(folder / "one"), str(folder / "two"), "--plan", str(folder / "plan.json")])
    with tracer.trace(llm, out=folder / "planned", level=2, plan=folder / "plan.json", strict=True):
        generate(llm, prompt_logprobs=1)
    tokens = whole(generate(llm))
    runs: dict[str, dict[str, Any]] = {
        "against": {"against": folder / "one"},
        "fed": {"feed": folder / "one"},
        "pinned": {"pin": {"*.moe.topk_ids": folder / "one"}},
        "nudged": {"perturb_ulps": 1},
    }
    for name, options in runs.items():
        with tracer.trace(llm, out=folder / name, level=2, strict=True, **options):
            generate(llm, [ids[:-1] for ids in tokens], 1, prompt_logprobs=1)
    try:
        with tracer.trace(llm, out=folder / "halfway", level=2, feed=folder / "one"):
            generate(llm, [[*ids[:-1], 7] for ids in tokens], 1)
    except tracer.TracerError as error:
        print("halfway", error.code.value, error.what)
    print("still", whole(generate(llm)) == tokens)
    llm.collective_rpc("tracer_start", kwargs={"out": str(folder / "steps"), "steps": 2})
    generate(llm)
    print("steps", *(answer["forwards"] for answer in llm.collective_rpc("tracer_stop")))


if __name__ == "__main__":
    main()
