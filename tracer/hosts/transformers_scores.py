"""How a transformers model is called for scores: one request, without padding or cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tracer.errors import Code, ScoreError
from tracer.hosts.torch_sharding import chunk
from tracer.hosts.vocab_parallel_scores import score_vocab_parallel
from tracer.record.next_token import score_rows

__all__ = ["TransformersForward"]


class TransformersForward:
    """``model``: takes ``input_ids`` and returns ``logits``. Shape suffixes: T tokens, R response tokens, V columns."""

    def __init__(self, model: Any, vocabulary: int | None = None) -> None:
        self._model = model
        self._vocabulary = vocabulary

    def logits(self, ids_T: Any, position_T: Any, response: int) -> torch.Tensor:
        """(R + 1, V), all columns, or a DTensor whose columns are cut."""
        model = self._model
        device = next(model.parameters()).device
        call: dict[str, Any] = {"input_ids": torch.tensor(ids_T)[None].to(device), "use_cache": False}
        if not np.array_equal(position_T, np.arange(len(ids_T))):
            call["position_ids"] = torch.tensor(position_T)[None].to(device)
        forward = getattr(model, "module", model).forward
        if "logits_to_keep" in inspect.signature(forward).parameters:
            call["logits_to_keep"] = response + 1
        output = model(**call)
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        if logits is None or logits.dim() != 3 or logits.shape[1] not in (len(ids_T), response + 1):
            raise ScoreError(
                Code.SCORES_COLLECT,
                "the model returned no logits of these tokens",
                expected=f"logits (1, {len(ids_T)} or {response + 1}, vocabulary)",
                found="none" if logits is None else str(tuple(logits.shape)),
            )
        found: torch.Tensor = logits[0, logits.shape[1] - response - 1 :]
        return found

    def scores(self, logits_RV: torch.Tensor, ids_R: Any) -> Any:
        """float32 (R,) on the host, over the whole vocabulary."""
        placed: Any = logits_RV
        axis = _cut_axis(logits_RV)
        if axis is not None:
            mesh = placed.device_mesh
            first = chunk(placed.shape[1], mesh.size(axis), mesh.get_local_rank(axis))[0]
            labels = torch.tensor(ids_R)
            found = score_vocab_parallel(
                placed.to_local(), labels, first_column=first, vocabulary=self._vocabulary, group=mesh.get_group(axis)
            )
            return found.cpu().numpy()
        return score_rows(self.whole(logits_RV), np.arange(len(ids_R)), np.asarray(ids_R)).cpu().numpy()

    def whole(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """All columns, padding columns cut off."""
        whole: torch.Tensor = logits_RV.full_tensor() if hasattr(logits_RV, "full_tensor") else logits_RV
        return whole[:, : self._vocabulary]


def _cut_axis(logits_RV: torch.Tensor) -> int | None:
    """The mesh axis that cuts the vocabulary of a DTensor, where that is all that is cut."""
    placements = getattr(logits_RV, "placements", ())
    cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    return cut[0] if len(cut) == 1 and getattr(placements[cut[0]], "dim", None) in (1, -1) else None
