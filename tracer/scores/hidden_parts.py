"""What a mean over all tokens hides: the first response tokens, some places, one worker or one request that are apart alone.

A part counts where it is beyond the limit of the pair, beyond twice what the repeats differ by in the same part, and several
times as far off as everything else, and all that without its largest token: noise is spread over all parts, a fault often is
not, and a single far token is no pattern.

Shape suffixes: Q requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from tracer.scores.aligning import ScoreTable
from tracer.scores.results import PairResult, PositionBin
from tracer.scores.sequence_patterns import find_slices, sum_by_request

__all__ = ["hidden_parts"]

_FEWEST_FIRST, _FEWEST_AT_PLACES, _FEWEST_OF_REQUEST = 8, 32, 32
_TIMES, _TIMES_OF_REQUEST = 3, 10
"""How many times as far off as everything else. Requests are many, so that one of them is far off by chance more easily."""


def hidden_parts(table: ScoreTable, pair: PairResult, repeats: Iterable[PairResult], limit: float) -> tuple[str, ...]:
    """Each part that is apart although its pair may not be, in words.

    ``repeats``: of the sides involved. ``limit``: the logprob_mae beyond which the pair would be apart."""
    known = list(repeats)
    return (
        *_first(pair, known, limit),
        *_places(pair, known, limit),
        *_workers(table, pair, known, limit),
        *_requests(table, pair, known, limit),
    )


def _first(pair: PairResult, repeats: list[PairResult], limit: float) -> Iterator[str]:
    later = pair.later_tokens.logprob_mae
    first = next((part for part in pair.positions if part.start == 0), None)
    if later is None or first is None or first.tokens < _FEWEST_FIRST:
        return
    if _trimmed(first) > max(limit, 2 * _noise_at(repeats, 0), _TIMES * later):
        yield f"first response tokens {first.logprob_mae:.3g}, later ones {later:.3g}"


def _places(pair: PairResult, repeats: list[PairResult], limit: float) -> Iterator[str]:
    """Bins of places beyond the first token."""
    many = [part for part in pair.positions if part.start and part.tokens >= _FEWEST_AT_PLACES]
    wide = [part for part in many if _trimmed(part) > max(limit, 2 * _noise_at(repeats, part.start))]
    tokens = pair.tokens - sum(part.tokens for part in wide)
    if not wide or not tokens:
        return
    elsewhere = (pair.logprob_mae * pair.tokens - sum(part.logprob_mae * part.tokens for part in wide)) / tokens
    told = [part for part in wide if elsewhere <= limit and _trimmed(part) > _TIMES * elsewhere]
    if told:
        worst = max(told, key=lambda part: part.logprob_mae)
        where = f"token {worst.start}" if worst.stop == worst.start + 1 else f"tokens {worst.start} to {worst.stop - 1}"
        yield f"response {where} {worst.logprob_mae:.3g}, elsewhere {elsewhere:.3g}"


def _trimmed(part: PositionBin) -> float:
    """logprob_mae without the largest token."""
    return (part.logprob_mae * part.tokens - part.largest) / max(part.tokens - 1, 1)


def _noise_at(repeats: list[PairResult], start: int) -> float:
    return max((part.logprob_mae for repeat in repeats for part in repeat.positions if part.start == start), default=0.0)


def _workers(table: ScoreTable, pair: PairResult, repeats: list[PairResult], limit: float) -> Iterator[str]:
    for part in find_slices(table, pair, limit, repeats=repeats, groups=False)[0]:
        if part.apart:
            yield f"worker {part.name} of {part.score.value} {part.logprob_mae:.3g}, elsewhere {part.elsewhere:.3g}"


def _requests(table: ScoreTable, pair: PairResult, repeats: list[PairResult], limit: float) -> Iterator[str]:
    tokens_Q = sum_by_request(table, table.valid_N)
    absolute_N = np.abs(table.difference(pair.x, pair.y))
    largest_Q = np.zeros(len(tokens_Q))
    np.maximum.at(largest_Q, table.request_N, absolute_N)
    total_Q = sum_by_request(table, absolute_N) - largest_Q
    noise_Q = np.max([sum_by_request(table, np.abs(table.difference(repeat.x, repeat.y))) for repeat in repeats] or [0 * total_Q], axis=0)
    wide_Q = (total_Q > limit * tokens_Q) & (total_Q > 2 * noise_Q) & (tokens_Q >= _FEWEST_OF_REQUEST)
    others = tokens_Q[~wide_Q].sum()
    if not others or not wide_Q.any():
        return
    elsewhere = float(total_Q[~wide_Q].sum() / others)
    told_Q = wide_Q & (total_Q > _TIMES_OF_REQUEST * elsewhere * tokens_Q)
    if elsewhere <= limit and told_Q.any():
        mae_Q = np.where(told_Q, total_Q / np.maximum(tokens_Q, 1), 0.0)
        worst = int(mae_Q.argmax())
        more = f" and {int(told_Q.sum()) - 1} more" if told_Q.sum() > 1 else ""
        yield f"request {table.requests[worst]} {mae_Q[worst]:.3g}{more}, elsewhere {elsewhere:.3g}"
