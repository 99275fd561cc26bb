"""Tests of ``tracer.hosts.vocab_parallel_scores``."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tracer.errors import Code, ScoreError
from tracer.hosts.vocab_parallel_scores import score_vocab_parallel


class Meeting:
    """All-gather between threads that play processes."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def gather(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = part
        self.barrier.wait()
        return self.parts


def score(logits: torch.Tensor, ids: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    """Every rank's scores, columns cut at ``cuts``."""
    edges = [0, *cuts, logits.shape[1]]
    meeting = Meeting(len(edges) - 1)

    def process(rank: int) -> torch.Tensor:
        local = logits[:, edges[rank] : edges[rank + 1]]
        return score_vocab_parallel(local, ids, first_column=edges[rank], gather=lambda part: meeting.gather(rank, part))

    with ThreadPoolExecutor(len(edges) - 1) as pool:
        return list(pool.map(process, range(len(edges) - 1)))


@pytest.mark.parametrize("cuts", [[50], [10, 20, 90], []], ids=str)
def test_the_normaliser_is_global(cuts: list[int]) -> None:
    """However the vocabulary is cut, every process has the scores over all of it, and not those of its own columns."""
    generator = torch.Generator().manual_seed(0)
    logits, ids = 5 * torch.randn(40, 100, generator=generator), torch.randint(0, 100, (40,), generator=generator)
    whole = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    for found in score(logits, ids, cuts):
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


def test_a_label_outside_is_refused() -> None:
    """A label in nobody's columns is an error on every process, not a number."""
    with pytest.raises(ScoreError) as refused:
        score_vocab_parallel(torch.zeros(2, 8), torch.tensor([3, 9]), first_column=0, gather=lambda part: [part])
    assert refused.value.code is Code.SCORES_COLLECT
