"""The trainer's side: transformers on given tokens, traced. Arguments: CHECKPOINT DTYPE TOKENS(json) OUT [expert-scale]."""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import tracer


def main() -> None:
    checkpoint, dtype, tokens, out, *faults = sys.argv[1:]
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        if "stale-expert" in faults:  # a weight update that the rollout engine has not got
            model.model.layers[1].mlp.experts.down_proj[5].mul_(1.01)
        if "scale" in faults:
            model.model.layers[1].post_attention_layernorm.weight.mul_(1.25)
        with tracer.trace(model, out=out, level=2, strict=True):
            for sequence in json.loads(tokens):
                model(input_ids=torch.tensor([sequence]), use_cache=False)


main()
