"""How a Megatron-core model is called for scores: one request, its vocabulary cut over the tensor-parallel processes.

Every process holds columns of the logits; the normaliser is made of all of them (``vocab_parallel_scores``). A sequence-parallel
model needs lengths that divide: the request is then padded behind its end, where a causal model cannot see it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tracer.errors import Code, ScoreError
from tracer.hosts.vocab_parallel_scores import score_vocab_parallel
from tracer.record.next_token import score_rows

__all__ = ["MegatronForward"]


class MegatronForward:
    """``model``: as it is called, in its wrappers. ``inner``: the GPT model itself. ``vocabulary``: tokens, where the model has
    more columns than that. Shape suffixes: T tokens, R response tokens, V columns.

    Raises ScoreError (scores-collect) under pipeline or context parallelism: no process then has logits of a whole request."""

    def __init__(self, model: Any, inner: Any, vocabulary: int | None = None) -> None:
        from megatron.core import parallel_state as groups

        for what, size in (
            ("pipeline", groups.get_pipeline_model_parallel_world_size()),
            ("context", groups.get_context_parallel_world_size()),
        ):
            if size > 1:
                raise ScoreError(
                    Code.SCORES_COLLECT,
                    f"a Megatron model under {what} parallelism is not scored: no process has the logits of a whole request",
                    expected=f"{what} parallel size 1",
                    found=str(size),
                    remedy="run your own forward step, and give its logits to tracer.hosts.vocab_parallel_scores",
                )
        self._model = model
        self._group = groups.get_tensor_model_parallel_group()
        self._size = groups.get_tensor_model_parallel_world_size()
        self._rank = groups.get_tensor_model_parallel_rank()
        self._multiple = self._size if inner.config.sequence_parallel else 1
        self._padded = int(inner.vocab_size)
        self._vocabulary = vocabulary or self._padded

    def logits(self, ids_T: Any, position_T: Any, response: int) -> torch.Tensor:
        """(R + 1, V): the columns of this process."""
        device = next(self._model.parameters()).device
        whole = -(-len(ids_T) // self._multiple) * self._multiple
        ids, positions = (np.pad(np.asarray(found), (0, whole - len(ids_T)), mode="edge") for found in (ids_T, position_T))
        output = self._model(
            input_ids=torch.tensor(ids)[None].to(device),
            position_ids=torch.tensor(positions)[None].to(device),
            attention_mask=torch.triu(torch.ones(whole, whole, dtype=torch.bool, device=device), 1)[None, None],
        )
        if not isinstance(output, torch.Tensor) or output.dim() != 3 or output.shape[:2] != (1, whole):
            raise ScoreError(
                Code.SCORES_COLLECT,
                "the model returned no logits of these tokens",
                expected=f"logits (1, {whole}, vocabulary)",
                found=str(tuple(output.shape)) if isinstance(output, torch.Tensor) else type(output).__name__,
            )
        return output[0, len(ids_T) - response - 1 : len(ids_T)]

    def scores(self, logits_RV: torch.Tensor, ids_R: Any) -> Any:
        """float32 (R,) on the host, over the whole vocabulary."""
        if not self._cut(logits_RV):
            return score_rows(self.whole(logits_RV), np.arange(len(ids_R)), np.asarray(ids_R)).cpu().numpy()
        first, labels = self._rank * logits_RV.shape[1], torch.tensor(ids_R)
        found = score_vocab_parallel(logits_RV, labels, first_column=first, vocabulary=self._vocabulary, group=self._group)
        return found.cpu().numpy()

    def whole(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """All columns, those of every process in order, padding columns cut off. A collective where they are cut."""
        if not self._cut(logits_RV):
            return logits_RV[:, : self._vocabulary]
        parts = [torch.empty_like(logits_RV) for _ in range(self._size)]
        dist.all_gather(parts, logits_RV.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)[:, : self._vocabulary]

    def _cut(self, logits_RV: torch.Tensor) -> bool:
        """A model may have been built to return all columns to everybody."""
        return self._size > 1 and logits_RV.shape[1] < self._padded
