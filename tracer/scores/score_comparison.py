"""``compare_scores``: from records of one saved batch to the branch to open."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import msgspec
import numpy as np

from tracer.errors import Code, ScoreError, UsageError
from tracer.format.score_file import read_scores
from tracer.format.score_records import ScoreName, ScoreRecord
from tracer.scores.aligning import ScoreTable, align_records
from tracer.scores.decision import decide_branch, suspect_of
from tracer.scores.full_logit_refits import gather_logits, logit_refits
from tracer.scores.hidden_parts import hidden_parts
from tracer.scores.metrics import compare_pair, limit_of
from tracer.scores.refits import score_refits
from tracer.scores.results import (
    Branch,
    Decision,
    PairResult,
    PairStatus,
    Refit,
    ScoreCounts,
    ScoreResult,
    ScoreSummary,
    ScoreVerdict,
    Thresholds,
)
from tracer.scores.sequence_patterns import check_sibling_scores, find_patterns, find_slices

__all__ = ["compare_scores"]

PASS_MARK = 0.01
TAIL_MARK = 1.0
_THREADS = 2
_DIFFERING = 5
"""A token counts as differing beyond so many times the limit of its pair."""

Records = Iterable[ScoreRecord] | str | os.PathLike[str]


def compare_scores(
    *records: Records | ScoreRecord,
    pass_mark: float = PASS_MARK,
    tail_mark: float = TAIL_MARK,
    policy: str = "",
    log: Mapping[str, str] | None = None,
) -> ScoreResult:
    """Compare the scores A, B and C of one saved batch, and say which half of the system to open.

    ``records``: ``ScoreRecord``s, or paths of score files, or folders of them; several are joined by request, so that each side
    may bring a file of its own. ``pass_mark``: logprob_mae in nats that agrees; choose it from your noise and what your
    objective bears. ``tail_mark``: nats beyond which a single token is far off. ``policy``: only tokens that this version
    sampled. ``log``: fields of the ``[mismatch]`` lines (run, step ...); None writes none.

    Raises ScoreError with the reason why nothing may be compared, UsageError (bad-argument).
    """
    for what, mark in (("pass_mark", pass_mark), ("tail_mark", tail_mark)):
        if not 0 < mark < float("inf"):
            raise UsageError(Code.BAD_ARGUMENT, f"{what} is a positive number of nats", found=str(mark))
    table = align_records(chain.from_iterable(_given(entry) for entry in records), policy=policy)
    thresholds = Thresholds(pass_mark=pass_mark, tail_mark=tail_mark)
    chosen = _one_per_side(table)
    with ThreadPoolExecutor(_THREADS) as pool:  # numpy lets go of the interpreter
        siblings = pool.submit(check_sibling_scores, table)
        passes = [(x, y) for x, y in ((ScoreName.B0, ScoreName.B1), (ScoreName.C0, ScoreName.C1)) if {x, y} <= set(table.values)]
        repeats = {
            pair.x.side: pair for pair in pool.map(lambda names: compare_pair(table, names[0], names[1], thresholds, repeat=True), passes)
        }
        sides = [(chosen[x], chosen[y]) for x, y in ("AB", "BC", "AC") if {x, y} <= set(chosen)]
        pairs = {pair.name: pair for pair in pool.map(lambda names: _pair(table, names[0], names[1], thresholds, repeats), sides)}
    if not pairs and not repeats:
        raise ScoreError(
            Code.SCORES_NOTHING,
            "there is one score, and nothing to compare it with",
            expected="two of A, B0, B1, C0, C1",
            found=", ".join(name.value for name in table.values),
            remedy="score the saved tokens again, or add the file of the other side",
        )
    refits = _refits(table, chosen, pairs, thresholds)
    summaries = {name.value: _summary(table, name) for name in table.values}
    decisive = max(pairs.values(), key=lambda pair: pair.logprob_mae, default=None)
    limit = limit_of(decisive.noise if decisive else None, thresholds)
    slices, slices_hidden = find_slices(table, decisive, limit, repeats=repeats.values()) if decisive else ((), 0)
    decision = decide_branch(pairs, repeats, refits, summaries, thresholds, slices)
    verdict = _verdict(decision, pairs)
    patterns, hidden = find_patterns(table, decisive, _DIFFERING * limit) if decisive else ((), 0)
    return ScoreResult(
        exit=verdict.exit_code,
        verdict=verdict,
        headline=_headline(decision, verdict, pairs, repeats),
        decision=decision,
        counts=_counts(table),
        thresholds=thresholds,
        scores=tuple(summaries.values()),
        repeats=tuple(repeats.values()),
        pairs=tuple(pairs.values()),
        refits=tuple(refits),
        sequences=patterns,
        sequences_not_shown=hidden,
        slices=slices,
        slices_not_shown=slices_hidden,
        siblings=siblings.result(),
        log_lines=() if log is None else _log_lines(decision, pairs, repeats, log),
    )


def _given(entry: Records | ScoreRecord) -> Iterable[ScoreRecord]:
    if isinstance(entry, ScoreRecord):
        return (entry,)
    return read_scores(entry) if isinstance(entry, (str, os.PathLike)) else entry


def _one_per_side(table: ScoreTable) -> dict[str, ScoreName]:
    """The pass that stands for each side: the first one that there is."""
    chosen: dict[str, ScoreName] = {}
    for name in sorted(table.values):
        chosen.setdefault(name.side, name)
    return chosen


def _pair(table: ScoreTable, x: ScoreName, y: ScoreName, thresholds: Thresholds, repeats: Mapping[str, PairResult]) -> PairResult:
    """A repeat of B is noise of A too: they are one engine. A part that is apart makes its pair apart: no mean hides it."""
    involved = [repeats[side] for side in {"B" if name is ScoreName.A else name.side for name in (x, y)} if side in repeats]
    noise = max((pair.logprob_mae for pair in involved), default=None)
    pair = compare_pair(table, x, y, thresholds, noise=noise, tail_noise=max((pair.largest for pair in involved), default=0.0))
    if pair.status not in (PairStatus.AGREE, PairStatus.UNCLEAR):
        return pair
    hidden = hidden_parts(table, pair, involved, limit_of(noise, thresholds))
    return msgspec.structs.replace(pair, hidden=hidden, status=PairStatus.APART if hidden else pair.status)


def _refits(table: ScoreTable, chosen: Mapping[str, ScoreName], pairs: Mapping[str, PairResult], thresholds: Thresholds) -> list[Refit]:
    """Refits of the score that stands alone; where none does, of both sides of every pair that is apart."""
    apart = [pair for pair in pairs.values() if pair.status is PairStatus.APART]
    suspect = suspect_of(pairs)
    if suspect:
        apart = sorted((pair for pair in apart if suspect in pair.name), key=lambda pair: pair.name == "A-C")[:1]
        tasks = [(chosen[suspect], pair.y if pair.x is chosen[suspect] else pair.x, limit_of(pair.noise, thresholds)) for pair in apart]
    else:
        tasks = [(x, y, limit_of(pair.noise, thresholds)) for pair in apart for x, y in ((pair.x, pair.y), (pair.y, pair.x))]
    refits = [refit for x, y, limit in tasks for refit in score_refits(table, x, y, limit)]
    logits = gather_logits(table) if tasks else None
    if logits is not None:
        limits = {x: limit for x, _, limit in tasks}
        refits += [refit for x, limit in limits.items() for refit in logit_refits(table, logits, x, limit)]
    return refits


def _summary(table: ScoreTable, name: ScoreName) -> ScoreSummary:
    infos = list({id(info): info for info in table.infos[name]}.values())

    def texts(found: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({text for text in found if text}))

    return ScoreSummary(
        score=name,
        dtype=table.dtypes[name],
        definitions=texts(info.definition.text() for info in infos),
        policies=texts(segment.version for info in infos for segment in info.policies),
        workers=texts(info.worker for info in infos),
        models=texts(info.model for info in infos),
        adapters=texts(info.adapter for info in infos),
        sources=texts(info.source for info in infos),
        mean=float(table.values[name][table.valid_N].mean()),
    )


def _counts(table: ScoreTable) -> ScoreCounts:
    valid_Q = np.bincount(table.request_N[table.valid_N], minlength=len(table.requests))
    without = [table.requests[q] for q in np.flatnonzero(valid_Q == 0).tolist()]
    return ScoreCounts(
        requests=len(table.requests),
        tokens=int(table.valid_N.sum()),
        masked=int(table.masked_N.sum()),
        other_policy=table.other_policy,
        without_tokens=tuple(without[:20]),
        groups=len({record.group for record in table.records if record.group}),
    )


def _verdict(decision: Decision, pairs: Mapping[str, PairResult]) -> ScoreVerdict:
    if decision.branch is Branch.AGREE:
        return ScoreVerdict.AGREE
    if decision.branch is Branch.UNDECIDED and not any(pair.status is PairStatus.APART for pair in pairs.values()):
        return ScoreVerdict.COULD_NOT_TELL
    return ScoreVerdict.DIFFERENT


def _headline(decision: Decision, verdict: ScoreVerdict, pairs: Mapping[str, PairResult], repeats: Mapping[str, PairResult]) -> str:
    compared = [*repeats.values(), *pairs.values()]
    numbers = ", ".join(
        f"{pair.name} {'identical' if pair.status is PairStatus.IDENTICAL else f'{pair.logprob_mae:.4g}'}" for pair in compared
    )
    tokens = f"{compared[0].tokens} tokens" if compared else ""
    match decision.branch:
        case Branch.AGREE:
            same = all(pair.status is PairStatus.IDENTICAL for pair in pairs.values())
            return f"Scores agree{', bit for bit' if same else ''}: {numbers} nats over {tokens}"
        case Branch.UNDECIDED:
            what = "Scores differ, and which half cannot be told" if verdict is ScoreVerdict.DIFFERENT else "Could not tell"
            return f"{what}: {numbers} nats over {tokens}"
        case _:
            cause = f": {decision.cause.value}" if decision.cause else ""
            side = f" ({decision.side})" if decision.side else ""
            return f"Look first at: {decision.branch.value}{side}{cause}; {numbers} nats over {tokens}"


def _log_lines(
    decision: Decision, pairs: Mapping[str, PairResult], repeats: Mapping[str, PairResult], log: Mapping[str, str]
) -> tuple[str, ...]:
    """One line per metric and pair, in the words of the field."""
    given = {"run": "unknown", "step": "unknown", "policy": "unknown", "input": "unknown"} | dict(log)
    lines = []
    for pair in (*pairs.values(), *repeats.values()):
        phase = {"A": "decode"}.get(pair.x.side, "prefill")
        fields = given | {
            "phase": phase,
            "rank": log.get("rank", "all"),
            "repeat": pair.name if pair.noise is None and pair.x.side == pair.y.side else "none",
            "scope": "fixed-input",
            "intervention": log.get("intervention", "none"),
        }
        metrics: Sequence[tuple[str, float | None]] = (
            ("logprob_mae", pair.logprob_mae),
            ("probability_mae", pair.probability_mae),
            ("k3", pair.k3),
        )
        for metric, value in metrics:
            last = {
                "metric": metric,
                "value": "overflow" if value is None else f"{value:.9g}",
                "reference": f"{pair.x.value}-{pair.y.value}",
                "self_repeat": "unknown" if pair.noise is None else f"{pair.noise:.9g}",
                "report": log.get("report", "none"),
                "classification": decision.klass.value,
            }
            lines.append("[mismatch] " + " ".join(f"{name}={_field(text)}" for name, text in (fields | last).items()))
    return tuple(lines)


def _field(text: object) -> str:
    """A value without spaces, so that the line splits at them."""
    return "_".join(str(text).split()) or "unknown"
