"""Engines built without the worker extension, in this process and in another. Arguments: CHECKPOINT OUT."""

import os
import sys

import tracer
from tests.vllm.engines import SETTINGS, generate


def main() -> None:
    from vllm import LLM

    checkpoint, out = sys.argv[1:]
    settings = {**SETTINGS, "model": checkpoint, "dtype": "float32", "enforce_eager": True}
    here = LLM(**settings)
    with tracer.trace(here, out=out, level=0, strict=True):
        generate(here)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    elsewhere = LLM(**settings)
    try:
        tracer.trace(elsewhere, out=f"{out}-elsewhere")
    except tracer.TracerError as error:
        print("refused", error.code.value, error)


if __name__ == "__main__":
    main()
