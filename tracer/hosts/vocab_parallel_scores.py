"""Scores where the vocabulary is cut over processes: one global normaliser, made of every process's share.

A log-sum-exp over the local columns alone is the classic mistake: every score then comes out too high, by an amount that depends
on the shard. Here each process gives the largest of its logits, the sum of ``exp(logit - largest)`` and the label's logit where it
has it; the shares of all processes make the score (``tracer.format.score_shares``).

Shape suffixes: R rows, V columns held here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tracer.errors import Code, ScoreError
from tracer.format.score_shares import join_shares
from tracer.record.next_token import score_rows

__all__ = ["score_vocab_parallel"]

Gather = Callable[[torch.Tensor], list[torch.Tensor]]


def score_vocab_parallel(
    logits_RV: torch.Tensor,
    ids_R: torch.Tensor,
    *,
    first_column: int,
    vocabulary: int | None = None,
    group: Any = None,
    gather: Gather | None = None,
) -> torch.Tensor:
    """float32 (R,) on the logits' device: log probabilities of ``ids_R`` over the whole vocabulary. A collective: every process
    of ``group`` calls it with the same ids and its own columns.

    ``logits_RV``: this process's columns, any float dtype, from column ``first_column`` of the vocabulary on; row r predicts
    ``ids_R[r]``, so the caller has shifted already. ``vocabulary``: tokens, where there are more columns than that; what pads them is
    left out. ``gather``: another way to bring the shares together, (R, 2) int64 of each.
    Raises ScoreError (scores-collect) where a label lies in no process's columns, or in several.
    """
    ids = ids_R.detach().cpu().numpy().astype(np.int64)
    if vocabulary is not None:
        logits_RV = logits_RV[:, : max(vocabulary - first_column, 0)]
    span = (first_column, first_column + logits_RV.shape[1])
    share_R2 = score_rows(logits_RV.detach(), np.arange(len(ids)), ids, span)
    parts = (gather or (lambda part: _all_gather(part, group, logits_RV.device)))(share_R2)
    score_R = join_shares(torch.cat(list(parts), dim=1).numpy())
    if np.isnan(score_R).any():
        row = int(np.isnan(score_R).argmax())
        raise ScoreError(
            Code.SCORES_COLLECT,
            "a label lies in no process's columns of the vocabulary, or in several",
            where=f"row {row}",
            expected="every column of the vocabulary held once",
            found=f"id {ids[row]}; columns {span[0]} to {span[1] - 1} here",
            remedy="check first_column and the group: they are those of the tensor-parallel ranks",
        )
    return torch.from_numpy(score_R).to(logits_RV.device)


def _all_gather(share_R2: torch.Tensor, group: Any, device: torch.device) -> list[torch.Tensor]:
    here = share_R2.to(device)
    parts = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, here, group=group)
    return [part.cpu() for part in parts]
