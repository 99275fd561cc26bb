"""Score C: the frozen trainer scores saved tokens. One request per forward, no padding, so that nothing has to be undone.

Shape suffixes: T tokens, R response tokens, V columns of the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from tracer.errors import Code, ScoreError
from tracer.format.score_records import Logits, Score, ScoreDefinition, ScoreInfo, ScoreKind, ScoreName, ScoreRecord
from tracer.hosts.torch_sharding import chunk
from tracer.hosts.vocab_parallel_scores import score_vocab_parallel
from tracer.record.next_token import score_rows

__all__ = ["collect_trainer"]

_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_COARSE_TOLERANCE = 0.1
_PASSES = (ScoreName.C0, ScoreName.C1)


def collect_trainer(
    model: Any,
    records: ScoreRecord | Iterable[ScoreRecord],
    *,
    repeats: int = 2,
    logits: int = 0,
    argmax: bool = False,
    info: ScoreInfo | None = None,
) -> list[ScoreRecord]:
    """Score the saved tokens of ``records`` with a transformers model, ``repeats`` times; returns them with C0 (and C1).

    ``logits``: keep the full logits of so many response tokens of each request, evenly spread, for the refits. ``argmax``: keep
    the most likely token at each place. ``info``: policy, model digest and so on; the definition is raw, whatever it says.
    The model scores in evaluation mode without gradients, and every module gets its own mode back, also after an error. It
    should hold still: call this before the optimizer steps. Logits that are cut over the vocabulary are normalised over all of it.

    The shift by one (logits at j predict token j + 1) is done here, once, and checked on the first request: exchanging its last
    token must leave the logits before it alone and change the logits at it.

    Raises ScoreError (scores-collect) where that check fails or the model returns no logits of these tokens.
    """
    given = [records] if isinstance(records, ScoreRecord) else list(records)
    if not 1 <= repeats <= len(_PASSES):
        raise ScoreError(Code.SCORES_COLLECT, "C is scored once or twice", expected="repeats=1 or 2", found=str(repeats))
    where = _raw_info(info, model)
    with _frozen(model):
        if checked := next((record for record in given if len(record.response)), None):
            _check_shift(model, checked)
        return [_score(model, record, where, _PASSES[:repeats], logits, argmax) for record in given]


def _raw_info(info: ScoreInfo | None, model: Any) -> ScoreInfo:
    """The caller's info as raw scores of this model."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    found = info or ScoreInfo()
    source = found.source or f"{type(model).__name__}, {dtype}, one request per forward"
    return msgspec.structs.replace(found, definition=ScoreDefinition(kind=ScoreKind.RAW), source=source)


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Evaluation mode, no gradients; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _score(model: Any, record: ScoreRecord, info: ScoreInfo, passes: Iterable[ScoreName], keep: int, argmax: bool) -> ScoreRecord:
    scores: dict[ScoreName, Score] = {}
    kept: Logits | None = None
    for name in passes:
        if not len(record.response):
            scores[name] = Score(np.empty(0), "float32", info, np.empty(0, np.int64) if argmax else None)
            continue
        logits_RV = _logits_from_prompt(model, record.ids, record.positions, len(record.response))[:-1]  # shifted by one, once
        value_R = _scores_of(logits_RV, record.response)
        whole = _whole(logits_RV) if argmax or (keep and kept is None) else logits_RV
        likely = whole.argmax(dim=-1).cpu().numpy() if argmax else None
        scores[name] = Score(value_R.astype(np.float64), "float32", info, likely)
        if keep and kept is None:
            row_L = np.unique(np.linspace(0, len(value_R) - 1, min(keep, len(value_R))).round().astype(np.int64))
            kept = Logits(name, row_L, whole[torch.from_numpy(row_L).to(whole.device)].float().cpu().numpy())
    return record.with_scores(scores, kept)


def _logits_from_prompt(model: Any, ids_T: Any, position_T: Any, response: int) -> torch.Tensor:
    """(R + 1, V): logits at the last prompt token and at every response token."""
    device = next(model.parameters()).device
    call: dict[str, Any] = {"input_ids": torch.from_numpy(np.ascontiguousarray(ids_T))[None].to(device), "use_cache": False}
    if not np.array_equal(position_T, np.arange(len(ids_T))):
        call["position_ids"] = torch.from_numpy(np.ascontiguousarray(position_T))[None].to(device)
    forward = getattr(model, "module", model).forward
    if "logits_to_keep" in inspect.signature(forward).parameters:
        call["logits_to_keep"] = response + 1
    output = model(**call)
    logits = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", None)
    if logits is None or logits.dim() != 3 or logits.shape[1] not in (len(ids_T), response + 1):
        raise ScoreError(
            Code.SCORES_COLLECT,
            "the model returned no logits of these tokens",
            expected=f"logits (1, {len(ids_T)} or {response + 1}, vocabulary)",
            found="none" if logits is None else str(tuple(logits.shape)),
        )
    found: torch.Tensor = logits[0, logits.shape[1] - response - 1 :]
    return found


def _scores_of(logits_RV: torch.Tensor, ids_R: Any) -> Any:
    """float32 (R,) on the host, over the whole vocabulary."""
    placed: Any = logits_RV
    axis = _cut_axis(logits_RV)
    if axis is not None:
        mesh = placed.device_mesh
        first = chunk(placed.shape[1], mesh.size(axis), mesh.get_local_rank(axis))[0]
        labels = torch.from_numpy(np.ascontiguousarray(ids_R))
        return score_vocab_parallel(placed.to_local(), labels, first_column=first, group=mesh.get_group(axis)).cpu().numpy()
    return score_rows(_whole(logits_RV), np.arange(len(ids_R)), np.asarray(ids_R)).cpu().numpy()


def _cut_axis(logits_RV: torch.Tensor) -> int | None:
    """The mesh axis that cuts the vocabulary of a DTensor, where that is all that is cut."""
    placements = getattr(logits_RV, "placements", ())
    cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    return cut[0] if len(cut) == 1 and getattr(placements[cut[0]], "dim", None) in (1, -1) else None


def _whole(logits_RV: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = logits_RV.full_tensor() if hasattr(logits_RV, "full_tensor") else logits_RV
    return whole


def _check_shift(model: Any, record: ScoreRecord) -> None:
    """Exchange the last token: the logits before it must stay, those at it must not."""
    other = next(token for token in (*record.ids.tolist(), 0, 1) if token != record.ids[-1])
    changed = np.append(record.ids[:-1], other)
    rows = [_logits_from_prompt(model, ids, record.positions, 1) for ids in (record.ids, changed)]
    ids_2 = np.array([record.ids[-1], record.ids[-1]])
    before, after = (_scores_of(found, ids_2) for found in rows)
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, _COARSE_TOLERANCE)
    if not abs(before[0] - after[0]) <= tolerance or before[1] == after[1]:
        raise ScoreError(
            Code.SCORES_COLLECT,
            "the logits at a token do not predict the token after it",
            where=f"request {record.request}, last token exchanged",
            expected="logits before it that stay, and logits at it that change",
            found=f"score before it {before[0]:.6g} and {after[0]:.6g}, at it {before[1]:.6g} and {after[1]:.6g}",
            remedy="score with a causal language model whose logits are in input order",
        )
