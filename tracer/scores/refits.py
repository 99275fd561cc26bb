"""Causes that explain a difference: each is fitted on half of the tokens and tested on the other half.

From scores alone: missing values filled with zero, a constant offset or factor, scores moved by one token, chunks in another order,
fixed places that are wrong in every request, a renormalisation over a kept set (by its sign). With full logits of some rows
(``full_logit_refits``) the rest.

A refit matches where what remains on the test half is within the limit of the pair, and is less than a third of what was
there. A handful of tokens fits anything, so fewer than eight in the test half match nothing.
Shape suffixes: N response tokens of all requests, M the valid ones, Q requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracer.format.score_records import ScoreName
from tracer.scores.aligning import ScoreTable
from tracer.scores.results import Refit, RefitKind

__all__ = ["FEWEST", "REDUCTION", "best_refit", "by_sign", "halves", "score_refits"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

REDUCTION = 3
FEWEST = 8
_PARTS = (2, 3, 4, 6, 8)
_CHUNK_TOKENS = 50_000
_EVERY_REQUEST = 0.8
_SHARE_OF_PLACES = 0.25
_PLACES_SHOWN = 8
_SIGN_SHARE = 0.01
_ORDER = list(RefitKind)
_NEARLY = 1.5
_NOTHING_LEFT = 0.01
"""Of what there was before: less than that is no reason to prefer one cause to another."""


@dataclass(frozen=True, eq=False)
class _Task:
    """``x`` is what a refit would explain, ``y`` the reference. ``d_M``: x - y on the valid tokens ``at_M``; ``fit_M``: the half that
    causes are fitted on."""

    table: ScoreTable
    x: ScoreName
    y: ScoreName
    limit: float
    at_M: I64
    d_M: F64
    fit_M: Mask

    def result(
        self, kind: RefitKind, parameter: str, before: float, after: float, tokens: int, text: str, matched: bool | None = None
    ) -> Refit:
        fits = after <= self.limit and after * REDUCTION <= before if matched is None else matched
        return Refit(
            kind=kind,
            score=self.x,
            reference=self.y.value,
            parameter=parameter,
            before=before,
            after=after,
            tokens=tokens,
            matched=fits and tokens >= FEWEST,
            text=text,
        )


def score_refits(table: ScoreTable, x: ScoreName, y: ScoreName, limit: float) -> list[Refit]:
    """Every cause that scores alone can show, tried on score ``x`` against ``y``; matched or not."""
    at_M = np.flatnonzero(table.valid_N)
    d_N = table.values[x] - table.values[y]
    task = _Task(table, x, y, limit, at_M, d_N if len(at_M) == len(d_N) else d_N[at_M], halves(table, at_M))
    tried = (_missing, _offset, _factor, _moved, _chunks, _places, _kept_set)
    return [refit for attempt in tried for refit in attempt(task)]


def best_refit(refits: list[Refit]) -> Refit | None:
    """The matched refit that leaves least; of nearly equal ones the simplest kind, in the order of ``RefitKind``."""
    matched = [refit for refit in refits if refit.matched]
    matched = [refit for refit in matched if not by_sign(refit)] or matched  # a sign leaves nothing to measure
    if not matched:
        return None
    least = min(refit.after for refit in matched)
    near = [refit for refit in matched if refit.after <= _NEARLY * least + _NOTHING_LEFT * refit.before]
    return min(near, key=lambda refit: (_ORDER.index(refit.kind), refit.after))


def by_sign(refit: Refit) -> bool:
    """A kept set without full logits: what shows it is the sign of the difference alone."""
    return refit.kind is RefitKind.KEPT_SET and refit.reference in ScoreName.__members__


def halves(table: ScoreTable, at_M: I64) -> Mask:
    """Which tokens a cause is fitted on; the others test it. Alternating by request too, so that no place falls into one half."""
    fitted: Mask = ((table.request_N[at_M] ^ table.index_N[at_M]) & 1) == 0
    return fitted


def _mean(values: F64) -> float:
    return float(np.abs(values).mean()) if len(values) else 0.0


def _missing(task: _Task) -> Iterator[Refit]:
    """Exact zeros where the reference is clearly negative. Nothing is fitted, so all tokens are tested."""
    reference_M = task.table.values[task.y][task.at_M]
    zero_M = (task.table.values[task.x][task.at_M] == 0) & (reference_M < -5 * task.limit)
    count = int(np.count_nonzero(zero_M))
    if count:
        first = int(task.at_M[np.argmax(zero_M)])
        where = f"{task.table.requests[task.table.request_N[first]]}:{task.table.index_N[first]}"
        after = _mean(task.d_M[~zero_M])
        yield task.result(
            RefitKind.MISSING,
            f"{count} token{'s' * (count != 1)}, first {where}",
            _mean(task.d_M),
            after,
            len(zero_M),
            f"{task.x.value} is exactly 0 at {count} valid tokens where {task.y.value} is not: missing scores were filled with 0",
            matched=after <= task.limit,
        )


def _offset(task: _Task) -> Iterator[Refit]:
    """x = y + offset, on all tokens or on all but the first of each response."""
    index_M = task.table.index_N[task.at_M]
    later_M = index_M > 0
    fit_M = task.fit_M
    chosen = task.d_M[fit_M & later_M] if (fit_M & later_M).any() else task.d_M[fit_M]
    offset = float(np.median(chosen))
    first = task.d_M[~later_M]
    start = int(bool(len(first)) and later_M.any() and _mean(first) < _mean(first - offset))
    after_M = task.d_M - offset * (index_M >= start)
    which = "from response token 1 on" if start else "on every token"
    yield task.result(
        RefitKind.OFFSET,
        f"{offset:+.4g} nats {which}",
        _mean(task.d_M[~fit_M]),
        _mean(after_M[~fit_M]),
        int(np.count_nonzero(~fit_M)),
        f"{task.x.value} is {task.y.value} {offset:+.4g} nats {which}",
    )


def _factor(task: _Task) -> Iterator[Refit]:
    """x = factor * y: a log probability was scaled after it was made. A temperature scales logits, and leaves no such thing."""
    y_M = task.table.values[task.y][task.at_M]
    x_M, fit_M = y_M + task.d_M, task.fit_M
    squares = float(y_M[fit_M] @ y_M[fit_M])
    if squares:
        factor = float(x_M[fit_M] @ y_M[fit_M]) / squares
        yield task.result(
            RefitKind.FACTOR,
            f"{factor:.3g} times",
            _mean(task.d_M[~fit_M]),
            _mean((x_M - factor * y_M)[~fit_M]),
            int(np.count_nonzero(~fit_M)),
            f"{task.x.value} is {factor:.3g} times {task.y.value} at every token: a temperature scales logits, not scores",
        )


def _moved(task: _Task) -> Iterator[Refit]:
    """x of a token is y of its neighbour: the array was shifted after it was computed."""
    table = task.table
    x_N, y_N = table.values[task.x], table.values[task.y]
    ends_N = table.index_N == 0
    found = []
    for step in (1, -1):
        here, there = (slice(None, -1), slice(1, None)) if step > 0 else (slice(1, None), slice(None, -1))
        usable = table.valid_N[here] & ~ends_N[1:] & np.isfinite(y_N[there])
        half = ((table.request_N[here] ^ table.index_N[here]) & 1) == 0
        moved, stayed = np.abs(x_N[here] - y_N[there]), np.abs(x_N[here] - y_N[here])
        fit, test = usable & half, usable & ~half
        if fit.any() and test.any():
            found.append(
                (float(moved[fit].mean()), step, float(stayed[test].mean()), float(moved[test].mean()), int(np.count_nonzero(test)))
            )
    if found:
        _, step, before, after, tokens = min(found, key=lambda entry: entry[0])
        neighbour = "next" if step > 0 else "previous"
        yield task.result(
            RefitKind.SHIFT,
            f"{step:+d} token",
            before,
            after,
            tokens,
            f"{task.x.value} of a token is {task.y.value} of the {neighbour} token: the scores were shifted once too often, or not at all",
        )


def _chunks(task: _Task) -> Iterator[Refit]:
    """Responses cut into equal chunks come back in one other order (context parallelism that was not undone)."""
    table = task.table
    best: tuple[float, float, tuple[int, ...], int] | None = None
    for parts in _PARTS:
        blocks: list[tuple[F64, F64]] = []
        taken = 0
        for length in np.unique(table.length_Q).tolist():
            if length < 2 * parts or length % parts or taken > _CHUNK_TOKENS:
                continue
            start_K = table.start_Q[table.length_Q == length][: max(1, (_CHUNK_TOKENS - taken) // length)]
            at_KL = start_K[:, None] + np.arange(length)
            at_KL = at_KL[table.valid_N[at_KL].all(axis=1)]
            taken += at_KL.size
            if len(at_KL):
                shape = (len(at_KL), parts, length // parts)
                blocks.append((table.values[task.x][at_KL].reshape(shape), table.values[task.y][at_KL].reshape(shape)))
        if not blocks:
            continue
        tokens = sum(block[0].size for block in blocks) // parts
        cost_PP = np.zeros((2, parts, parts))
        for x_KPS, y_KPS in blocks:
            for half in (0, 1):
                for p in range(parts):
                    cost_PP[half, p] += np.abs(x_KPS[:, p, None, half::2] - y_KPS[:, :, half::2]).sum(axis=(0, 2))
        order = tuple(cost_PP[0].argmin(axis=1).tolist())
        if sorted(order) != list(range(parts)) or order == tuple(range(parts)):
            continue
        after = float(sum(cost_PP[1, p, order[p]] for p in range(parts))) / max(tokens * parts // 2, 1)
        before = float(np.trace(cost_PP[1])) / max(tokens * parts // 2, 1)
        if best is None or after * _NEARLY < best[0]:  # finer cuts of the same order are no better
            best = (after, before, order, tokens * parts // 2)
    if best is not None:
        after, before, order, tokens = best
        yield task.result(
            RefitKind.CHUNKS,
            f"chunks [{', '.join(map(str, order))}]",
            before,
            after,
            tokens,
            f"{task.x.value} is {task.y.value} with {len(order)} equal chunks of the response in the order {list(order)}: never put back",
        )


def _places(task: _Task) -> Iterator[Refit]:
    """The same few places are wrong in every request, all others agree. Fitted on every other request."""
    table = task.table
    absolute_M = np.abs(task.d_M)
    bad_M = absolute_M > max(5 * task.limit, 10 * float(np.median(absolute_M)))
    request_M = table.request_N[task.at_M]
    fit_M = request_M % 2 == 0
    if len(table.requests) < 4 or not bad_M[fit_M].any():
        return
    found = []
    for what, place_M in (("of the sequence", table.position_N[task.at_M]), ("of the response", table.index_N[task.at_M])):
        size = int(place_M.max()) + 1
        seen = np.bincount(place_M[fit_M], minlength=size)
        wrong = np.bincount(place_M[fit_M & bad_M], minlength=size)
        places = np.flatnonzero((wrong >= _EVERY_REQUEST * seen) & (wrong >= 2))
        if not len(places) or len(places) > max(1, _SHARE_OF_PLACES * np.count_nonzero(seen)):
            continue
        inside_M = np.isin(place_M, places)
        test_M = ~fit_M
        also = _share(bad_M[test_M & inside_M]) >= _EVERY_REQUEST
        found.append((_mean(task.d_M[test_M & ~inside_M]), what, places, int(np.count_nonzero(test_M)), also))
    if found:
        after, what, places, tokens, also = min(found, key=lambda entry: entry[0])
        named = ", ".join(map(str, places[:_PLACES_SHOWN].tolist())) + (" ..." if len(places) > _PLACES_SHOWN else "")
        before = _mean(task.d_M[~fit_M])
        yield task.result(
            RefitKind.PLACES,
            f"tokens {named} {what}",
            before,
            after,
            tokens,
            f"{task.x.value} is wrong at tokens {named} {what} in every request and right elsewhere: an edge of chunks, pages or turns",
            matched=also and after <= task.limit and after * REDUCTION <= before,
        )


def _share(chosen: Mask) -> float:
    return float(chosen.mean()) if len(chosen) else 0.0


def _kept_set(task: _Task) -> Iterator[Refit]:
    """x above y at every token, by varying amounts: probabilities that were divided by the mass of a kept set.

    Scores alone show the sign and no more; full logits name the set. ``after``: mean amount by which the sign is broken."""
    d = task.d_M[~task.fit_M]
    if task.x is not ScoreName.A or not len(d):
        return
    broken = float(np.maximum(-d, 0).mean())
    spread = _mean(d - np.median(d))
    scaled = any(refit.matched for refit in _factor(task))
    one_sided = _share(d < -task.limit) <= _SIGN_SHARE and float(d.mean()) > 2 * task.limit and spread > task.limit and not scaled
    yield task.result(
        RefitKind.KEPT_SET,
        f"{task.x.value} - {task.y.value} from {float(d.min()):.3g} to {float(d.max()):.3g} nats",
        _mean(d),
        broken,
        len(d),
        f"{task.x.value} is above {task.y.value} at every token, by varying amounts: renormalised over a kept set, by its sign",
        matched=one_sided and broken <= task.limit,
    )
