"""An engine whose core is another process, built without the worker extension. Arguments: CHECKPOINT OUT."""

import sys

import tracer
from tests.vllm.engines import SETTINGS


def main() -> None:
    from vllm import LLM

    checkpoint, out = sys.argv[1:]
    llm = LLM(enforce_eager=True, model=checkpoint, dtype="float32", **SETTINGS)
    try:
        tracer.trace(llm, out=out)
    except tracer.TracerError as error:
        print("refused", error.code.value, error)


if __name__ == "__main__":
    main()
