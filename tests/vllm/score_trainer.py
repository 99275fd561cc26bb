"""The trainer's scores of saved tokens: healthy, after an update that the engine has not got, and with a temperature.

Arguments: CHECKPOINT RECORDS OUT for each engine; OUT is a folder that gets a score file of each.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tracer.format.score_file import read_scores, write_scores
from tracer.hosts.trainer_scores import collect_trainer


def score(checkpoint: str, records: str, out: Path) -> None:
    """Write ``healthy``, ``stale`` and ``temperature`` into ``out``; all with the full logits that the trainer has."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", attn_implementation="eager")
    bare = [replace(record, scores={}) for record in read_scores(records)]
    healthy = collect_trainer(model, bare, argmax=True, logits=64)
    write_scores(out / "healthy.safetensors", healthy)
    forward = model.forward

    def warm(**call: Any) -> Any:
        output = forward(**call)
        output.logits = output.logits / 0.8
        return output

    model.forward = warm  # only the scores: what the trainer shows as its logits stays raw
    divided = collect_trainer(model, bare)
    write_scores(out / "temperature.safetensors", [replace(a, scores=b.scores) for a, b in zip(healthy, divided, strict=True)])
    model.forward = forward
    with torch.no_grad():
        for parameter in model.parameters():  # what one large step does
            parameter.add_(0.05 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).to(parameter))
    write_scores(out / "stale.safetensors", collect_trainer(model, bare, logits=64))


def main() -> None:
    given = sys.argv[1:]
    for checkpoint, records, out in zip(given[::3], given[1::3], given[2::3], strict=True):
        score(checkpoint, records, Path(out))


main()
