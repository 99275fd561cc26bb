"""Log probabilities of the tokens that were fed next: ``scorer.logprobs``, derived from the logits.

Row t is the log softmax of the logits at t, taken at token t + 1, in float32, over all columns. Tokens known already
(prefill, training) are scored at once; the last row of a sequence waits, as a copy, until the next call (chunk, decode
step) tells its next token. Rows never mix: a block of rows is normalised row by row, so batch, padding and packing
leave every bit alone. Where the columns are cut over processes, what comes out is this process's share of each score
(``tracer.format.score_shares``), with a normaliser of its own columns only: stitching makes the score of all shares.

Shape suffixes: N rows of one call, V columns of the vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from tracer.format.schema import Span
from tracer.format.score_shares import pack_shares
from tracer.record.host import IntArray, Rows
from tracer.record.tokens import SequenceRegistry

__all__ = ["NextTokenScores", "ScoredRows", "score_rows"]

_BLOCK_BYTES = 1 << 20
"""Logits normalised at a time, as float32: they stay in the cache."""
_WAITING_BYTES = 512 << 20


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Scores ready to be recorded, all of one forward. ``score_N``: float32 (N,) on the logits' device; or, where
    columns are cut over processes, this process's shares of them, int64 (N, 2)."""

    score_N: torch.Tensor
    sequence_N: IntArray
    position_N: IntArray
    forward: int


@dataclass(frozen=True, eq=False)
class _Waiting:
    logits_V: torch.Tensor
    forward: int


class NextTokenScores:
    """Scores rows as their next token becomes known."""

    def __init__(self, registry: SequenceRegistry) -> None:
        self._registry = registry
        self._waiting: OrderedDict[tuple[int, int], _Waiting] = OrderedDict()
        self._waiting_bytes = 0
        self._span: Span | None = None
        self.dropped = 0
        """Rows given up because too many waited for a token that did not come."""

    def score(self, logits_NV: torch.Tensor, rows: Rows, forward: int, span: Span | None = None) -> ScoredRows | None:
        """Scores of the rows whose next token is known; the last row of each sequence may wait for its own.

        ``logits_NV``: plain, any float dtype, read before this returns. ``span``: the columns of the vocabulary they are, None
        for all; the same at every call. None where not even the ids of these rows are known in this process."""
        self._span = span
        kept_N = np.flatnonzero(rows.sequence_N >= 0)
        sequence_N, position_N = rows.sequence_N[kept_N], rows.position_N[kept_N]
        id_N, known_N = self._registry.look_up(sequence_N, position_N + 1)
        ready_N = np.flatnonzero(known_N)
        late_N = np.flatnonzero(~known_N)
        own_known_N = self._registry.look_up(sequence_N[late_N], position_N[late_N])[1]
        if len(kept_N) and not len(ready_N) and not own_known_N.any():
            return None
        last: dict[int, int] = {}
        for n in late_N[own_known_N].tolist():
            sequence = int(sequence_N[n])
            if sequence not in last or position_N[n] > position_N[last[sequence]]:
                last[sequence] = n
        for sequence, n in last.items():
            self._keep((sequence, int(position_N[n])), _Waiting(logits_NV[int(kept_N[n])].clone(), forward))
        score_N = score_rows(logits_NV, kept_N[ready_N], id_N[ready_N], span)
        return ScoredRows(score_N, sequence_N[ready_N], position_N[ready_N], forward)

    def score_waiting(self) -> list[ScoredRows]:
        """Scores of the rows whose next token has become known since; by forward."""
        if not self._waiting:
            return []
        place_N2 = np.array(list(self._waiting), np.int64).reshape(-1, 2)
        id_N, known_N = self._registry.look_up(place_N2[:, 0], place_N2[:, 1] + 1)
        by_forward: dict[int, list[int]] = {}
        for n in np.flatnonzero(known_N).tolist():
            by_forward.setdefault(self._waiting[(int(place_N2[n, 0]), int(place_N2[n, 1]))].forward, []).append(n)
        scored = []
        for forward, chosen in by_forward.items():
            logits_NV = torch.stack([self._take((int(place_N2[n, 0]), int(place_N2[n, 1]))).logits_V for n in chosen])
            score_N = score_rows(logits_NV, np.arange(len(chosen)), id_N[chosen], self._span)
            scored.append(ScoredRows(score_N, place_N2[chosen, 0], place_N2[chosen, 1], forward))
        return scored

    def _keep(self, place: tuple[int, int], waiting: _Waiting) -> None:
        if place in self._waiting:
            self._take(place)
        self._waiting[place] = waiting
        self._waiting_bytes += waiting.logits_V.nbytes
        while self._waiting_bytes > _WAITING_BYTES and len(self._waiting) > 1:
            self._take(next(iter(self._waiting)))
            self.dropped += 1

    def _take(self, place: tuple[int, int]) -> _Waiting:
        waiting = self._waiting.pop(place)
        self._waiting_bytes -= waiting.logits_V.nbytes
        return waiting


def score_rows(logits_NV: torch.Tensor, row_M: IntArray, id_M: IntArray, span: Span | None = None) -> torch.Tensor:
    """float32 (M,): log softmax of row ``row_M[m]`` at column ``id_M[m]``. An id outside the vocabulary scores NaN.

    ``span``: the columns are only these of the vocabulary; then the shares of the scores, int64 (M, 2)."""
    if span is not None:
        return _share_rows(logits_NV, row_M, id_M, span)
    columns = logits_NV.shape[1]
    score_M = torch.empty(len(row_M), dtype=torch.float32, device=logits_NV.device)
    block = max(1, _BLOCK_BYTES // max(4 * columns, 1))
    outside_M = (id_M < 0) | (id_M >= columns)
    index_M = torch.from_numpy(np.where(outside_M, 0, id_M)).to(logits_NV.device)
    place_M = torch.from_numpy(np.ascontiguousarray(row_M)).to(logits_NV.device)
    contiguous = bool(len(row_M)) and bool((np.diff(row_M) == 1).all())
    for start in range(0, len(row_M), block):
        stop = min(start + block, len(row_M))
        first = int(row_M[start])
        rows = logits_NV[first : first + stop - start] if contiguous else logits_NV.index_select(0, place_M[start:stop])
        normal = torch.log_softmax(rows.to(torch.float32), dim=-1)
        score_M[start:stop] = normal.gather(1, index_M[start:stop, None])[:, 0]
    if outside_M.any():
        score_M[torch.from_numpy(outside_M).to(logits_NV.device)] = float("nan")
    return score_M


def _share_rows(logits_NV: torch.Tensor, row_M: IntArray, id_M: IntArray, span: Span) -> torch.Tensor:
    """int64 (M, 2) on the host: this process's share of every score, as ``pack_shares`` lays it out. A process whose columns all
    pad the vocabulary has none, and an empty share."""
    if not logits_NV.shape[1]:
        none_M = np.zeros(len(row_M), np.float32)
        return torch.from_numpy(pack_shares(none_M - np.inf, none_M, none_M, np.zeros(len(row_M), np.bool_)))
    block = max(1, _BLOCK_BYTES // max(4 * logits_NV.shape[1], 1))
    held_M = (id_M >= span[0]) & (id_M < span[1])
    index_M = torch.from_numpy(np.where(held_M, id_M - span[0], 0)).to(logits_NV.device)
    place_M = torch.from_numpy(np.ascontiguousarray(row_M)).to(logits_NV.device)
    parts = []
    for start in range(0, len(row_M), block):
        rows = logits_NV.index_select(0, place_M[start : start + block]).to(torch.float32)
        largest = rows.amax(dim=1)
        shifted = rows - torch.where(largest.isinf(), 0.0, largest)[:, None]
        logit = rows.gather(1, index_M[start : start + block, None])[:, 0]
        parts.append(torch.stack([largest, shifted.exp().sum(dim=1), logit], dim=1))
    share_M3 = torch.cat(parts).cpu().numpy() if parts else np.zeros((0, 3), np.float32)
    return torch.from_numpy(pack_shares(share_M3[:, 0], share_M3[:, 1], share_M3[:, 2], held_M))
