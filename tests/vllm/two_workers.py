"""Tensor parallelism over two workers, the engine core in a third process. Arguments: CHECKPOINT FOLDER."""

import sys
from pathlib import Path

import tracer
from tests.vllm.engines import SETTINGS, generate


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
    llm.collective_rpc("tracer_start", kwargs={"out": str(folder / "steps"), "steps": 2})
    generate(llm)
    print("steps", *(answer["forwards"] for answer in llm.collective_rpc("tracer_stop")))


if __name__ == "__main__":
    main()
