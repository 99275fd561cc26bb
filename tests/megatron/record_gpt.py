"""torchrun script: record tiny Megatron models under the layouts that its one argument, a JSON list, describes.

Keys of an object: ``out``; ``gpt``: arguments of ``make_gpt``; ``weights``: of ``random_hf_weights``; ``load``: of ``load_hf``; ``lengths``:
tokens per sequence, the same for all; ``vocabulary``; ``level``; ``weights_mode``; ``labels``: pass labels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.megatron.cpu_megatron import run_on_cpu

run_on_cpu()

from tests.megatron.tiny_gpt import load_hf, make_gpt, random_hf_weights  # noqa: E402
from tracer import trace  # noqa: E402
from tracer.hosts.megatron import MegatronHost  # noqa: E402


def batch(data_rank: int = 0) -> torch.Tensor:
    """Token ids, (2, 12)."""
    return torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(11 + data_rank))


def call(ids: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of one forward."""
    size = ids.shape[1]
    return {
        "input_ids": ids,
        "position_ids": torch.arange(size)[None].expand(ids.shape),
        "attention_mask": torch.triu(torch.ones(size, size, dtype=torch.bool), 1)[None, None],
    }


def record(given: dict[str, Any]) -> None:
    """One trace."""
    model = make_gpt(**given.get("gpt", {}))
    load_hf(model, random_hf_weights(**given.get("weights", {})), **given.get("load", {}))
    host = MegatronHost(model, vocabulary=given["vocabulary"]) if "vocabulary" in given else None
    options = {"level": given.get("level", 2), "weights": given.get("weights_mode", "digest")}
    with torch.no_grad(), trace(model, host=host, out=given["out"], strict=True, **options) as recording:
        recording.requests(["p0", "p1"])
        model(**call(batch()))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for given in json.loads(sys.argv[1]):
        record(given)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
