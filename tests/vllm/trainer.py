"""The trainer's side, a process of its own: the engine changes torch's settings in its process.

Every line of standard input is a job, every line of standard output says that one is done.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import tracer


def main() -> None:
    for line in sys.stdin:
        record(**json.loads(line))
        print("done", flush=True)


def record(checkpoint: str, dtype: str, tokens: list[list[int]], out: str, faults: list[str], options: dict[str, Any]) -> None:
    """Trace transformers on given tokens, everything, faults planted before. ``options``: more arguments of ``trace``."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        if "stale-expert" in faults:  # a weight update that the rollout engine has not got
            model.model.layers[1].mlp.experts.down_proj[5].mul_(1.01)
        if "router" in faults:  # other experts for some tokens
            router = model.model.layers[0].mlp.gate
            router.weight += 0.05 * torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(2)).to(router.weight.dtype)
        if "scale" in faults:  # no weight, no buffer: a number in the code
            model.model.layers[1].self_attn.scaling *= 1.25
        with tracer.trace(model, out=out, **{"level": 2, "weights": "rows", "strict": True, **options}):
            for sequence in tokens:
                model(input_ids=torch.tensor([sequence]), use_cache=False)


if __name__ == "__main__":
    main()
