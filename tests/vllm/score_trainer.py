"""The trainer's scores of saved tokens. Arguments: CHECKPOINT RECORDS OUT."""

import sys
from dataclasses import replace
from typing import Any

from transformers import AutoModelForCausalLM

from tracer.format.score_file import read_scores, write_scores
from tracer.hosts.trainer_scores import collect_trainer


def main() -> None:
    checkpoint, records, out = sys.argv[1:]
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    bare = [replace(record, scores={}) for record in read_scores(records)]
    write_scores(out, collect_trainer(model, bare, argmax=True))


main()
