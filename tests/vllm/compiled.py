"""A compiled engine, traced all the same. Arguments: CHECKPOINT OUT.

The graph is run as it was captured: it is what keeps hooks from running, and generated code would only take longer."""

import sys

import tracer
from tests.vllm.engines import SETTINGS, generate


def main() -> None:
    from vllm import LLM

    checkpoint, out = sys.argv[1:]
    options = {**tracer.vllm_options(), **SETTINGS, "enforce_eager": False, "compilation_config": {"backend": "eager"}}
    llm = LLM(**options, model=checkpoint, dtype="float32")
    with tracer.trace(llm, out=out, level=1):
        generate(llm, prompt_logprobs=1)


if __name__ == "__main__":
    main()
