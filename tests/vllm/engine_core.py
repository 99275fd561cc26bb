"""The engine core in a process of its own, with and without the extension. Arguments: CHECKPOINT OUT."""

import sys

import tracer
from tests.vllm.engines import SETTINGS, generate


def main() -> None:
    from vllm import LLM

    checkpoint, out = sys.argv[1:]
    settings = {"model": checkpoint, "dtype": "float32", **SETTINGS}
    llm = LLM(**tracer.vllm_options(), **settings)
    with tracer.trace(llm, out=out, level=1, strict=True):
        generate(llm)
    bare = LLM(enforce_eager=True, **settings)
    try:
        tracer.trace(bare, out=f"{out}-bare")
    except tracer.TracerError as error:
        print("refused", error.code.value, error)


if __name__ == "__main__":
    main()
