"""How a difference lies in each request, and whether requests that share a prefix are scored alike.

Same policy, same prompt, same response so far, same definition: the score of the next token is one number. So siblings (several
responses to one prompt) are a repeat that costs nothing: over the response prefix that two of them share, every score must be
equal. Sorted by their ids, siblings need only be compared with their neighbours: any two share no more than the neighbours
between them do.

Shape suffixes: N response tokens of all requests, Q requests, K tokens compared.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tracer.format.score_records import ScoreName
from tracer.scores.aligning import ScoreTable
from tracer.scores.metrics import token_place
from tracer.scores.results import PairResult, SequencePattern, SiblingCheck

__all__ = ["check_sibling_scores", "find_patterns"]

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_MOST_SEQUENCES = 200


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
    same = [(a, b, n) for a, b, n in links if (infos[a].policies, infos[a].adapter) == (infos[b].policies, infos[b].adapter)]
    if not same:
        return None
    a_K = np.concatenate([table.start_Q[a] + np.arange(n) for a, _, n in same])
    b_K = np.concatenate([table.start_Q[b] + np.arange(n) for _, b, n in same])
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
