"""A compiled engine, traced all the same. Arguments: CHECKPOINT OUT."""

import sys

import tracer
from tests.vllm.engines import SETTINGS, generate


def main() -> None:
    from vllm import LLM

    checkpoint, out = sys.argv[1:]
    options = {**tracer.vllm_options(), "enforce_eager": False}
    llm = LLM(**options, model=checkpoint, dtype="float32", **SETTINGS)
    with tracer.trace(llm, out=out, level=1):
        generate(llm)


if __name__ == "__main__":
    main()
