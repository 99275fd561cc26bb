"""How a difference lies in each request, and whether requests that share a prefix are scored alike.

Same policy, same prompt, same response so far, same definition: the score of the next token is one number. So siblings (several
responses to one prompt) are a repeat that costs nothing: over the response prefix that two of them share, every score must be
equal. Sorted by their ids, siblings need only be compared with their neighbours: any two share no more than the neighbours
between them do.

Shape suffixes: N response tokens of all requests, Q requests, K tokens compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.format.score_records import ScoreName
from tracer.scores.aligning import ScoreTable
from tracer.scores.metrics import token_place
from tracer.scores.results import PairResult, SequencePattern, SiblingCheck, SliceResult

__all__ = ["check_sibling_scores", "find_patterns", "find_slices", "sum_by_request"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_MOST_SEQUENCES = 200
_MOST_SLICES = 20
_FEWEST_TOKENS = 64
_TIMES_ELSEWHERE = 3


def find_patterns(table: ScoreTable, pair: PairResult, limit: float) -> tuple[tuple[SequencePattern, ...], int]:
    """Patterns of the requests that differ most in this pair, worst first, and how many requests are not shown.

    ``limit``: nats beyond which a token counts as differing."""
    counts = len(table.requests)
    d_N = np.where(table.valid_N, np.abs(table.values[pair.x] - table.values[pair.y]), 0.0)
    far_N = d_N > limit
    by_request = {"minlength": counts}
    valid_Q = np.bincount(table.request_N[table.valid_N], **by_request)
    far_Q = np.bincount(table.request_N[far_N], **by_request)
    total_Q = np.bincount(table.request_N, weights=d_N, **by_request)
    largest_Q, longest_Q = np.zeros(counts), np.zeros(counts, np.int64)
    first_Q = np.full(counts, len(table))
    np.maximum.at(largest_Q, table.request_N, d_N)
    np.maximum.at(longest_Q, table.request_N, _run_lengths(far_N, table))
    np.minimum.at(first_Q, table.request_N[far_N], table.index_N[far_N])
    order = np.lexsort((-largest_Q, -far_Q))
    shown = order[:_MOST_SEQUENCES]
    patterns = tuple(
        SequencePattern(
            request=table.requests[q],
            group=table.records[q].group,
            worker=table.infos[pair.x][q].worker,
            tokens=int(valid_Q[q]),
            response_length=int(table.length_Q[q]),
            prompt_length=table.records[q].prompt_length,
            differing=int(far_Q[q]),
            first=int(first_Q[q]) if far_Q[q] else None,
            longest_run=int(longest_Q[q]),
            logprob_mae=float(total_Q[q] / max(valid_Q[q], 1)),
            largest=float(largest_Q[q]),
        )
        for q in shown.tolist()
        if valid_Q[q]
    )
    return patterns, int(np.count_nonzero(valid_Q)) - len(patterns)


def find_slices(
    table: ScoreTable, pair: PairResult, limit: float, *, repeats: Iterable[PairResult] = (), groups: bool = True
) -> tuple[tuple[SliceResult, ...], int]:
    """The pair by worker of either score, and by group, worst first; and how many are not shown.

    ``limit``: the logprob_mae beyond which the pair would be apart; a slice must be beyond twice its own part of the ``repeats``
    as well. A slice of a few tokens is never apart."""
    count = len(table.requests)
    kinds = [("worker", name, [info.worker for info in table.infos[name]]) for name in (pair.x, pair.y)]
    if groups:
        kinds.append(("group", pair.x, [record.group for record in table.records]))
    several = [entry for entry in kinds if 1 < len(set(entry[2])) < count or (entry[0] == "worker" and len(set(entry[2])) > 1)]
    if not several:
        return (), 0
    d_N = table.difference(pair.x, pair.y)
    absolute_N = np.abs(d_N)
    valid_Q, total_Q, signed_Q = (sum_by_request(table, values) for values in (table.valid_N, absolute_N, d_N))
    largest_Q = np.zeros(count)
    np.maximum.at(largest_Q, table.request_N, absolute_N)
    noise_Q = np.zeros(count)
    for repeat in repeats:
        noise_Q = np.maximum(noise_Q, sum_by_request(table, np.abs(table.difference(repeat.x, repeat.y))))
    found: list[SliceResult] = []
    hidden = 0
    for kind, score, names in several:
        number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
        slice_Q = np.array([number_of[name] for name in names])
        tokens_S, requests_S, sum_S, signed_S, noise_S = (
            np.bincount(slice_Q, weights=weights, minlength=len(number_of))
            for weights in (valid_Q, valid_Q > 0, total_Q, signed_Q, noise_Q)
        )
        mae_S = sum_S / np.maximum(tokens_S, 1)
        beyond_S = (mae_S > limit) & (sum_S > 2 * noise_S) & (tokens_S >= _FEWEST_TOKENS)
        apart_S, elsewhere = _apart_from_others(beyond_S, tokens_S, sum_S, limit)
        order = [number for number in np.lexsort((-mae_S, ~apart_S)).tolist() if tokens_S[number]]
        hidden += len(order) - len(order[:_MOST_SLICES])
        named = list(number_of)
        for number in order[:_MOST_SLICES]:
            found.append(
                SliceResult(
                    kind=kind,
                    score=score,
                    name=named[number] or "unnamed",
                    requests=int(requests_S[number]),
                    tokens=int(tokens_S[number]),
                    logprob_mae=float(mae_S[number]),
                    elsewhere=elsewhere,
                    signed_mean=float(signed_S[number] / tokens_S[number]),
                    largest=float(largest_Q[slice_Q == number].max()),
                    apart=bool(apart_S[number]),
                )
            )
    return tuple(found), hidden


def sum_by_request(table: ScoreTable, values_N: npt.NDArray[np.generic]) -> F64:
    """float64 (Q,)."""
    return np.bincount(table.request_N, weights=values_N, minlength=len(table.requests)).astype(np.float64, copy=False)


def _apart_from_others(beyond_S: Mask, tokens_S: npt.NDArray[Any], sum_S: npt.NDArray[Any], limit: float) -> tuple[Mask, float]:
    """Which slices are apart while all others together are not; and the logprob_mae of those others."""
    others = float(tokens_S[~beyond_S].sum())
    elsewhere = float(sum_S[~beyond_S].sum()) / others if others else float("inf")
    if elsewhere > limit:
        return np.zeros(len(sum_S), np.bool_), float(sum_S.sum() / max(tokens_S.sum(), 1))
    return beyond_S & (sum_S > _TIMES_ELSEWHERE * elsewhere * tokens_S), elsewhere


def _run_lengths(far_N: Mask, table: ScoreTable) -> I64:
    """Length of the run of true values that ends at each token; runs do not cross requests."""
    total_N = np.cumsum(far_N)
    before_N = np.where(far_N, 0, total_N)
    starts = table.start_Q[table.length_Q > 0]
    before_N[starts] = total_N[starts] - far_N[starts]
    lengths: I64 = total_N - np.maximum.accumulate(before_N)
    return lengths


def check_sibling_scores(table: ScoreTable) -> tuple[SiblingCheck, ...]:
    """Every score over the response prefixes that siblings share; empty where no two requests have a prompt in common."""
    families: dict[bytes, list[int]] = {}
    for q, record in enumerate(table.records):
        families.setdefault(record.ids[: record.prompt_length].tobytes(), []).append(q)
    links = []
    for members in families.values():
        if len(members) < 2:
            continue
        members.sort(key=lambda q: table.records[q].response.astype(">i8").tobytes())
        for a, b in pairwise(members):
            shared = _shared(table.records[a].response, table.records[b].response)
            if shared:
                links.append((a, b, shared))
    return tuple(check for name in table.values if (check := _check(table, name, links)) is not None)


def _shared(a: I64, b: I64) -> int:
    """Length of the common prefix."""
    least = min(len(a), len(b))
    different = a[:least] != b[:least]
    return int(np.argmax(different)) if different.any() else least


def _check(table: ScoreTable, name: ScoreName, links: list[tuple[int, int, int]]) -> SiblingCheck | None:
    infos = table.infos[name]
    same = [
        (a, b, n)
        for a, b, n in links
        if infos[a] is infos[b] or (infos[a].policies, infos[a].adapter) == (infos[b].policies, infos[b].adapter)
    ]
    if not same:
        return None
    a_L, b_L, length_L = np.array(same, np.int64).T
    offset_K = np.arange(int(length_L.sum())) - np.repeat(np.cumsum(length_L) - length_L, length_L)
    a_K, b_K = (np.repeat(table.start_Q[side_L], length_L) + offset_K for side_L in (a_L, b_L))
    both = table.valid_N[a_K] & table.valid_N[b_K]
    a_K, b_K = a_K[both], b_K[both]
    if not len(a_K):
        return None
    x_K, y_K = table.values[name][a_K], table.values[name][b_K]
    d_K = np.abs(x_K - y_K)
    worst = int(d_K.argmax())
    place = token_place(table, int(a_K[worst]), name, name)
    return SiblingCheck(
        score=name,
        pairs=len(same),
        tokens=len(a_K),
        differing=int(np.count_nonzero(x_K.view(np.int64) != y_K.view(np.int64))),
        logprob_mae=float(d_K.mean()),
        largest=float(d_K[worst]),
        worst=None
        if d_K[worst] == 0
        else type(place)(
            request=place.request,
            response_index=place.response_index,
            position=place.position,
            token=place.token,
            x=float(x_K[worst]),
            y=float(y_K[worst]),
            difference=float(x_K[worst] - y_K[worst]),
        ),
        sibling="" if d_K[worst] == 0 else table.requests[int(table.request_N[b_K[worst]])],
    )
