"""Score comparisons as views: the same blocks as every other report."""

from __future__ import annotations

from collections.abc import Sequence

from tracer.reports.view import Block, Facts, Headline, Items, Table
from tracer.scores.results import (
    PairResult,
    PairStatus,
    Refit,
    ScoreResult,
    ScoreSummary,
    ScoreVerdict,
    SiblingCheck,
    TokenPlace,
    UpdateResult,
)

__all__ = [
    "pairs_table",
    "places_table",
    "refits_table",
    "requests_table",
    "score_facts",
    "siblings_list",
    "slices_table",
    "update_facts",
    "update_table",
    "view_scores",
    "view_update",
    "worst_table",
]

_TONES = {ScoreVerdict.AGREE: "good", ScoreVerdict.DIFFERENT: "bad", ScoreVerdict.COULD_NOT_TELL: "open"}
_WORST, _SEQUENCES, _LINES = 5, 5, 8


def view_scores(result: ScoreResult, *, everything: bool = False) -> list[Block]:
    """A comparison: headline, decision with its path, the pairs, worst tokens, error by position, requests, siblings.

    ``everything``: every position, request, token and refit instead of the telling ones.
    """
    decision = result.decision
    blocks: list[Block] = [Headline(result.headline, _TONES[result.verdict]), Facts(score_facts(result))]
    path = tuple(f"{step.question} {step.answer}" + (f" [{step.numbers}]" if step.numbers else "") for step in decision.path)
    blocks.append(Items("decision", path))
    blocks.append(pairs_table((*result.repeats, *result.pairs)))
    decisive = max(result.pairs, key=lambda pair: pair.logprob_mae, default=None)
    if decisive is not None and decisive.worst:
        blocks.append(worst_table(decisive, len(decisive.worst) if everything else _WORST))
        blocks.append(places_table(decisive, everything=everything))
    if any(everything or pattern.differing for pattern in result.sequences):
        blocks.append(requests_table(result, everything=everything))
    if any(everything or part.apart for part in result.slices):
        blocks.append(slices_table(result, everything=everything))
    if result.siblings:
        blocks.append(siblings_list(result))
    refits = [refit for refit in result.refits if everything or refit.matched]
    if refits:
        blocks.append(refits_table(refits))
    if decision.next_step:
        blocks.append(Facts((("next", decision.next_step),)))
    if result.log_lines:
        blocks.append(Items("log", result.log_lines))
    return blocks


def score_facts(result: ScoreResult) -> tuple[tuple[str, str], ...]:
    """What was compared, each score in a few words, the class, evidence and what it does not prove."""
    decision = result.decision
    facts = [("compared", _counts(result)), *((score.score.value, _summary(score)) for score in result.scores)]
    facts += [("class", decision.klass.value)]
    return tuple(facts + _lines("evidence", decision.evidence) + _lines("not proven", decision.not_proven))


def requests_table(result: ScoreResult, *, everything: bool) -> Table:
    """Requests that differ (``everything``: all that are listed), worst first."""
    differing = [pattern for pattern in result.sequences if everything or pattern.differing]
    rows = tuple(
        (
            pattern.request,
            pattern.group,
            pattern.worker,
            f"{pattern.differing} of {pattern.tokens}",
            "" if pattern.first is None else str(pattern.first),
            str(pattern.longest_run),
            f"{pattern.prompt_length}+{pattern.response_length}",
            f"{pattern.logprob_mae:.3g}",
            f"{pattern.largest:.3g}",
        )
        for pattern in (differing if everything else differing[:_SEQUENCES])
    )
    columns = ("request", "group", "worker", "differ", "first", "longest run", "lengths", "logprob_mae", "largest")
    left = len(differing) - len(rows) + result.sequences_not_shown
    return Table(columns, rows, rest=f"and {left} more requests" + ("" if everything else " (--all)") if left else "")


def slices_table(result: ScoreResult, *, everything: bool = True) -> Table:
    """Workers and groups (without ``everything``: those that are apart), worst first."""
    shown = [part for part in result.slices if everything or part.apart]
    rows = tuple(
        (
            f"{part.kind} {part.name}",
            "" if part.kind == "group" else part.score.value,
            str(part.requests),
            str(part.tokens),
            f"{part.logprob_mae:.3g}",
            f"{part.elsewhere:.3g}",
            f"{part.signed_mean:+.3g}",
            f"{part.largest:.3g}",
            "yes" if part.apart else "no",
        )
        for part in shown
    )
    columns = ("part", "score", "requests", "tokens", "logprob_mae", "elsewhere", "signed mean", "largest", "apart")
    marked = frozenset(number for number, part in enumerate(shown) if part.apart)
    left = len(result.slices) - len(shown) + result.slices_not_shown
    return Table(columns, rows, marked, f"and {left} more workers and groups" if left else "")


def siblings_list(result: ScoreResult) -> Items:
    """Shared prefixes, per score."""
    return Items("siblings: equal prefixes must be scored alike", tuple(_sibling(check) for check in result.siblings))


def refits_table(refits: Sequence[Refit]) -> Table:
    """Causes that were tried."""
    rows = tuple(
        (
            refit.kind.value,
            refit.score.value,
            refit.reference,
            refit.parameter,
            f"{refit.before:.3g}",
            f"{refit.after:.3g}",
            "yes" if refit.matched else "no",
        )
        for refit in refits
    )
    marked = frozenset(number for number, refit in enumerate(refits) if refit.matched)
    return Table(("cause tried", "score", "against", "found", "before", "after", "explains it"), rows, marked)


def _lines(label: str, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(label if number == 0 else "", text) for number, text in enumerate(texts)]


def _counts(result: ScoreResult) -> str:
    counts = result.counts
    text = f"{counts.tokens} tokens of {counts.requests} request{'s' * (counts.requests != 1)}"
    parts = [f"{counts.masked} masked" if counts.masked else "", f"{counts.other_policy} of other policies" if counts.other_policy else ""]
    if counts.without_tokens:
        parts.append(f"no valid token in {', '.join(counts.without_tokens[:3])}" + (" ..." if len(counts.without_tokens) > 3 else ""))
    marks = f"pass mark {result.thresholds.pass_mark:g}, tail mark {result.thresholds.tail_mark:g} nats"
    return "; ".join([text, *filter(None, parts), marks])


def _summary(score: ScoreSummary) -> str:
    parts = [", ".join(score.definitions), score.dtype]
    for label, texts in (("policy", score.policies), ("worker", score.workers), ("adapter", score.adapters), ("model", score.models)):
        if texts:
            parts.append(f"{label} {', '.join(texts[:3])}" + (f" and {len(texts) - 3} more" if len(texts) > 3 else ""))
    return "; ".join([*parts, f"mean {score.mean:.4g}", *score.sources[:1]])


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def pairs_table(pairs: tuple[PairResult, ...]) -> Table:
    """All numbers of pairs and repeats."""
    columns = (
        "pair",
        "status",
        "logprob_mae",
        "signed mean",
        "p95",
        "p99",
        "max",
        "first token",
        "bits differ",
        "probability_mae",
        "k3",
        "noise",
        "note",
    )
    rows = []
    for pair in pairs:
        notes = [*pair.hidden, "one sign" if pair.biased else "", f"{pair.far} far off" if pair.far else ""]
        notes.append(f"exp(d) overflows at {pair.k3_overflow} tokens" if pair.k3_overflow else "")
        notes.append(f"exp(d) overflows float32 at {pair.k3_overflow_float32}" if pair.k3_overflow_float32 and not pair.k3_overflow else "")
        notes.append(f"masked {_number(pair.masked.logprob_mae, 3)}" if pair.masked.logprob_mae else "")
        rows.append(
            (
                pair.name,
                pair.status.value,
                _number(pair.logprob_mae),
                f"{pair.signed_mean:+.3g}",
                _number(pair.p95, 3),
                _number(pair.p99, 3),
                _number(pair.largest, 3),
                _number(pair.first_token.logprob_mae, 3),
                "other dtypes" if pair.bitwise_differing is None else f"{pair.bitwise_differing} of {pair.tokens}",
                _number(pair.probability_mae, 3),
                "overflow" if pair.k3 is None else _number(pair.k3, 3),
                _number(pair.noise, 3),
                "; ".join(filter(None, notes)),
            )
        )
    marked = frozenset(number for number, pair in enumerate(pairs) if pair.status is PairStatus.APART)
    return Table(columns, tuple(rows), marked)


def _place(place: TokenPlace) -> tuple[str, ...]:
    numbers = (f"{place.x:.6g}", f"{place.y:.6g}", f"{place.difference:+.4g}")
    return (place.request, str(place.response_index), str(place.position), str(place.token), *numbers)


def worst_table(pair: PairResult, most: int) -> Table:
    """The tokens that are furthest apart."""
    columns = ("request", "response token", "position", "id", pair.x.value, pair.y.value, f"{pair.x.value} - {pair.y.value}")
    return Table(columns, tuple(_place(place) for place in pair.worst[:most]))


def places_table(pair: PairResult, *, everything: bool) -> Table:
    """Error by place in the response: the first places and the worst ones."""
    shown = list(pair.positions)
    if not everything and len(shown) > _LINES:
        worst = sorted(shown, key=lambda part: -part.logprob_mae)[: _LINES - 2]
        shown = [part for part in shown if part in shown[:2] or part in worst]
    rows = tuple(
        (
            str(part.start) if part.stop == part.start + 1 else f"{part.start} to {part.stop - 1}",
            str(part.tokens),
            f"{part.logprob_mae:.3g}",
            f"{part.signed_mean:+.3g}",
            f"{part.largest:.3g}",
        )
        for part in shown
    )
    left = len(pair.positions) - len(rows)
    columns = (f"response token ({pair.name})", "tokens", "logprob_mae", "signed mean", "max")
    return Table(columns, rows, rest=f"and {left} more places (--all)" if left else "")


def _sibling(check: SiblingCheck) -> str:
    text = f"{check.score.value}: {check.tokens} shared tokens of {check.pairs} neighbours, "
    if not check.differing:
        return text + "all equal"
    text += f"{check.differing} differ, logprob_mae {check.logprob_mae:.3g}, largest {check.largest:.3g}"
    if check.worst is not None:
        text += f" at response token {check.worst.response_index} of {check.worst.request} and {check.sibling}"
    return text


def view_update(result: UpdateResult) -> list[Block]:
    """What became of a weight update."""
    blocks: list[Block] = [Headline(result.headline, _TONES[result.verdict]), Facts(update_facts(result)), update_table(result)]
    return [*blocks, Facts((("next", result.next_step),))]


def update_facts(result: UpdateResult) -> tuple[tuple[str, str], ...]:
    """Evidence, what is not proven, and the fixed tokens of each side."""
    facts = _lines("evidence", result.evidence) + _lines("not proven", result.not_proven)
    for side in result.oracle:
        argmax = "" if side.argmax_changed is None else f", most likely token changed at {side.argmax_changed}"
        facts.append((f"tokens of {side.side}", f"largest change {side.largest:.4g} of {side.tokens} tokens{argmax}"))
    if None not in result.argmax_apart:
        facts.append(("B against C", f"another most likely token at {result.argmax_apart[0]} before, {result.argmax_apart[1]} after"))
    return tuple(facts)


def update_table(result: UpdateResult) -> Table:
    """B-C before and after."""
    pairs = [(when, pair) for when, pair in (("before", result.before), ("after", result.after)) if pair is not None]
    rows = tuple(
        (
            when,
            pair.status.value,
            _number(pair.logprob_mae),
            f"{pair.signed_mean:+.3g}",
            _number(pair.p99, 3),
            _number(pair.largest, 3),
            _number(pair.noise, 3),
        )
        for when, pair in pairs
    )
    return Table(("B-C", "status", "logprob_mae", "signed mean", "p99", "max", "noise"), rows)
