"""Score C: the frozen trainer scores saved tokens. One request per forward, no padding, so that nothing has to be undone.

How a framework is called and what its logits look like is its own file's business (``Forward``); the shift by one, the check of
it, repeats and what is kept besides are here, once.

Shape suffixes: T tokens, R response tokens, V columns of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from tracer.errors import Code, ScoreError
from tracer.format.score_records import Logits, Score, ScoreDefinition, ScoreInfo, ScoreKind, ScoreName, ScoreRecord

__all__ = ["Forward", "collect_trainer"]

_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_COARSE_TOLERANCE = 0.1
_PASSES = (ScoreName.C0, ScoreName.C1)


class Forward(Protocol):
    """One framework's way to logits of one request."""

    def logits(self, ids_T: Any, position_T: Any, response: int) -> torch.Tensor:
        """(R + 1, V): logits at the last prompt token and at every response token; perhaps this process's columns only."""

    def scores(self, logits_RV: torch.Tensor, ids_R: Any) -> Any:
        """float32 (R,) on the host: log probabilities over the whole vocabulary; row r predicts ``ids_R[r]``."""

    def whole(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """The same rows with all columns of the vocabulary."""


def collect_trainer(
    model: Any,
    records: ScoreRecord | Iterable[ScoreRecord],
    *,
    repeats: int = 2,
    logits: int = 0,
    argmax: bool = False,
    info: ScoreInfo | None = None,
    vocabulary: int | None = None,
) -> list[ScoreRecord]:
    """Score the saved tokens of ``records`` with the trainer's model, ``repeats`` times; returns them with C0 (and C1).

    ``model``: a transformers model, or one of Megatron-core (itself, in its wrappers, or in the list that Megatron makes); under
    tensor parallelism every process makes the same call. ``logits``: keep the full logits of so many response tokens of each
    request, evenly spread, for the refits. ``argmax``: keep the most likely token at each place. ``info``: policy, model digest
    and so on; the definition is raw, whatever it says. ``vocabulary``: number of tokens, where the model has more columns than
    that: padding columns are left out of the normaliser.
    The model scores in evaluation mode without gradients, and every module gets its own mode back, also after an error. It
    should hold still: call this before the optimizer steps. Logits that are cut over the vocabulary are normalised over all of it.

    The shift by one (logits at j predict token j + 1) is done here, once, and checked on the first request: exchanging its last
    token must leave the logits before it alone and change the logits at it.

    Raises ScoreError (scores-collect) where that check fails or the model returns no logits of these tokens.
    """
    given = [records] if isinstance(records, ScoreRecord) else list(records)
    if not 1 <= repeats <= len(_PASSES):
        raise ScoreError(Code.SCORES_COLLECT, "C is scored once or twice", expected="repeats=1 or 2", found=str(repeats))
    outer = model[0] if isinstance(model, (list, tuple)) else model
    forward = _forward_of(outer, vocabulary)
    where = _raw_info(info, outer)
    with _frozen(outer):
        if checked := next((record for record in given if len(record.response)), None):
            _check_shift(forward, checked, next(outer.parameters()).dtype)
        return [_score(forward, record, where, _PASSES[:repeats], logits, argmax) for record in given]


def _forward_of(model: Any, vocabulary: int | None) -> Forward:
    """The file of the framework whose model it is, by the package of its innermost class."""
    inner = model
    while type(inner).__module__.startswith(("megatron.", "torch.nn.parallel")) and hasattr(inner, "module"):
        inner = inner.module
    if any(found.__module__.startswith("megatron.") for found in type(inner).__mro__):
        from tracer.hosts.megatron_scores import MegatronForward

        return MegatronForward(model, inner, vocabulary)
    from tracer.hosts.transformers_scores import TransformersForward

    return TransformersForward(model, vocabulary)


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


def _score(forward: Forward, record: ScoreRecord, info: ScoreInfo, passes: Iterable[ScoreName], keep: int, argmax: bool) -> ScoreRecord:
    scores: dict[ScoreName, Score] = {}
    kept: Logits | None = None
    for name in passes:
        if not len(record.response):
            scores[name] = Score(np.empty(0), "float32", info, np.empty(0, np.int64) if argmax else None)
            continue
        logits_RV = forward.logits(record.ids, record.positions, len(record.response))[:-1]  # shifted by one, once
        value_R = forward.scores(logits_RV, record.response)
        whole = forward.whole(logits_RV) if argmax or (keep and kept is None) else logits_RV
        likely = whole.argmax(dim=-1).cpu().numpy() if argmax else None
        scores[name] = Score(value_R.astype(np.float64), "float32", info, likely)
        if keep and kept is None:
            row_L = np.unique(np.linspace(0, len(value_R) - 1, min(keep, len(value_R))).round().astype(np.int64))
            kept = Logits(name, row_L, whole[torch.from_numpy(row_L).to(whole.device)].float().cpu().numpy())
    return record.with_scores(scores, kept)


def _check_shift(forward: Forward, record: ScoreRecord, dtype: torch.dtype) -> None:
    """Exchange the last token: the logits before it must stay, those at it must not."""
    other = next(token for token in (*record.ids.tolist(), 0, 1) if token != record.ids[-1])
    changed = np.append(record.ids[:-1], other)
    rows = [forward.logits(ids, record.positions, 1) for ids in (record.ids, changed)]
    ids_2 = np.array([record.ids[-1], record.ids[-1]])
    before, after = (forward.scores(found, ids_2) for found in rows)
    tolerance = _TOLERANCE.get(dtype, _COARSE_TOLERANCE)
    if not abs(before[0] - after[0]) <= tolerance or before[1] == after[1]:
        raise ScoreError(
            Code.SCORES_COLLECT,
            "the logits at a token do not predict the token after it",
            where=f"request {record.request}, last token exchanged",
            expected="logits before it that stay, and logits at it that change",
            found=f"score before it {before[0]:.6g} and {after[0]:.6g}, at it {before[1]:.6g} and {after[1]:.6g}",
            remedy="score with a causal language model whose logits are in input order",
        )
