"""From numbers to the half of the system that is to be opened.

Repeats come first: a gap of the size of what a side differs from itself says nothing. Then the pattern: A - B compares
generation with prefill inside the rollout engine, B - C compares the engines, and A - C is their sum token by token. The score
that stands apart from two that agree is the one to look at. A cause that a refit names beats the pattern.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tracer.scores.metrics import limit_of
from tracer.scores.refits import best_refit, by_sign
from tracer.scores.results import (
    Branch,
    Decision,
    DecisionStep,
    LogClass,
    PairResult,
    PairStatus,
    Refit,
    RefitKind,
    ScoreSummary,
    SliceResult,
    Thresholds,
)

__all__ = ["LAST", "QUESTIONS", "Question", "decide_branch", "suspect_of"]

_CLEARLY_SMALLER = 0.5
_FEW_SHARE = 0.02
_DEFINITION = {
    RefitKind.FACTOR,
    RefitKind.LABELS,
    RefitKind.OWN_LOGITS,
    RefitKind.TEMPERATURE,
    RefitKind.KEPT_SET,
    RefitKind.SHARD,
    RefitKind.EXTRA_MASS,
}
"""How a score was computed, whoever computed it."""

_WHO = {"A": "generation", "B": "the rollout engine's replay", "C": "the trainer"}
_NEXT = {
    Branch.REPEATS: "Make that side repeat itself on fixed tokens (cache emptied, batch of one, deterministic kernels), then compare again",
    Branch.SCORING: "Take full logits of the worst tokens on both sides: if they agree, the fault is in extraction (target, normaliser)",
    Branch.WEIGHTS: "Compare the resident weights by name (trace both sides, `tracer weights`), then follow export, transfer, installation",
    Branch.AGREE: "Nothing to open; repeat on fresh samples after the next update",
    Branch.UNDECIDED: "Score the same saved tokens on the side that is missing, each side twice",
}


@dataclass(frozen=True)
class Question:
    """A question of the decision. ``exits``: when it is the last one, and the branch it then leads to; else the next is asked."""

    text: str
    exits: tuple[tuple[str, Branch], ...]


_REPEATS = Question(
    "Does each side repeat itself?",
    (("no, and no gap is larger than that", Branch.REPEATS), ("only one side was scored", Branch.UNDECIDED)),
)
_GAPS = Question("Which gaps are more than noise?", (("none", Branch.AGREE), ("between the pass mark and twice it", Branch.UNDECIDED)))
_ALONE = Question("Which score stands alone?", ())
_CAUSE = Question(
    "Does a known cause explain it?",
    (
        ("yes, how a score is made; or no, and B alone", Branch.SCORING),
        ("yes, in what A kept; or no, and A or none alone", Branch.GENERATION),
        ("no, and there is one pair", Branch.UNDECIDED),
    ),
)
_FIRST = Question("Is the first response token like the others?", (("A stands alone, whatever the answer", Branch.GENERATION),))
_FEW = Question("Is it a few tokens while all others agree?", (("yes: a discrete choice, as of an expert", Branch.SCORING),))
_WEIGHTS = Question("Are the weights the same?", (("yes, by digest", Branch.SCORING), ("no, or nobody knows", Branch.WEIGHTS)))
QUESTIONS = (_REPEATS, _GAPS, _ALONE, _CAUSE, _FIRST, _FEW, _WEIGHTS)
"""In the order they are asked. The fifth is asked of A, the last two of C."""
LAST = "Where to look first?"
"""The step that ends every path: its answer is the branch."""


@dataclass(frozen=True)
class _Evidence:
    pairs: Mapping[str, PairResult]
    repeats: Mapping[str, PairResult]
    refits: Sequence[Refit]
    summaries: Mapping[str, ScoreSummary]
    thresholds: Thresholds
    slices: Sequence[SliceResult]


def suspect_of(pairs: Mapping[str, PairResult]) -> str:
    """The score that stands apart: A, B or C; empty where none does, or where it cannot be told."""
    apart = {name for name, pair in pairs.items() if pair.status is PairStatus.APART}
    if not apart:
        return ""
    if len(pairs) < 3:
        return {frozenset({"A-B"}): "A", frozenset({"B-C"}): "C"}.get(frozenset(pairs), "")
    if len(apart) == 2:
        return next(iter(set.intersection(*(set(name.split("-")) for name in apart))))
    least, *others = sorted(pairs, key=lambda name: pairs[name].logprob_mae)
    if least in apart and pairs[least].logprob_mae > _CLEARLY_SMALLER * min(pairs[name].logprob_mae for name in others):
        return ""
    return next(iter({"A", "B", "C"} - set(least.split("-"))))


def decide_branch(
    pairs: Mapping[str, PairResult],
    repeats: Mapping[str, PairResult],
    refits: Sequence[Refit],
    summaries: Mapping[str, ScoreSummary],
    thresholds: Thresholds,
    slices: Sequence[SliceResult] = (),
) -> Decision:
    """The branch, with evidence, what is not proven, one next step and the path of questions that led there.

    ``pairs``: ``A-B``, ``B-C``, ``A-C`` as far as there are scores. ``repeats``: ``B`` and ``C`` as far as there are two passes.
    ``refits``: those of the suspect. ``summaries``: score name -> what it is. ``slices``: workers and groups of the widest pair.
    """
    found = _Evidence(pairs, repeats, refits, summaries, thresholds, slices)
    path = [_repeats_step(found)]
    unstable = [side for side, pair in repeats.items() if pair.logprob_mae > thresholds.pass_mark]
    apart = [name for name, pair in pairs.items() if pair.status is PairStatus.APART]
    if unstable and not apart:
        side = max(unstable, key=lambda name: repeats[name].logprob_mae)
        return _decision(
            Branch.REPEATS,
            path,
            side=side,
            evidence=[f"{name} differs from itself by {repeats[name].logprob_mae:.3g} nats on the same tokens" for name in unstable]
            + [f"{pair.name} is {pair.logprob_mae:.3g}, less than twice that" for pair in pairs.values()],
            not_proven=["that the sides agree once they repeat themselves, or that they do not"],
        )
    if not pairs:
        return _decision(
            Branch.UNDECIDED, path, evidence=["only repeats of one side were given"], not_proven=["anything about the other side"]
        )
    path.append(_gaps_step(found))
    if not apart:
        return _small(found, path)
    return _apart(found, path, apart)


def _repeats_step(found: _Evidence) -> DecisionStep:
    numbers = ", ".join(f"{pair.name} {_gap(pair)}" for pair in found.repeats.values())
    if not found.repeats:
        return DecisionStep(question=_REPEATS.text, answer="unknown: nothing was scored twice")
    worst = max(pair.logprob_mae for pair in found.repeats.values())
    once = _scored_once(found)
    answer = "no" if worst > found.thresholds.pass_mark else "yes" if worst == 0 else "within the pass mark"
    return DecisionStep(question=_REPEATS.text, answer=answer + (f"; {', '.join(once)} was scored once" if once else ""), numbers=numbers)


def _gap(pair: PairResult) -> str:
    return "identical" if pair.status is PairStatus.IDENTICAL else f"{pair.logprob_mae:.4g}"


def _gaps_step(found: _Evidence) -> DecisionStep:
    numbers = ", ".join(f"{pair.name} {_gap(pair)} ({pair.status.value})" for pair in found.pairs.values())
    apart = [pair.name for pair in found.pairs.values() if pair.status is PairStatus.APART]
    return DecisionStep(question=_GAPS.text, answer=", ".join(apart) if apart else "none", numbers=numbers)


def _small(found: _Evidence, path: list[DecisionStep]) -> Decision:
    """No pair is apart."""
    unclear = [pair for pair in found.pairs.values() if pair.status is PairStatus.UNCLEAR]
    if unclear:
        return _decision(
            Branch.UNDECIDED,
            path,
            evidence=[
                f"{pair.name} is {pair.logprob_mae:.4g}: above the pass mark {found.thresholds.pass_mark:g}, less than twice it"
                for pair in unclear
            ],
            not_proven=["that the sides agree, or that they do not: one batch does not separate the two at this size"],
            next_step="Score more tokens, or set --pass-mark to what your objective bears",
        )
    noise = [pair.noise for pair in found.pairs.values()]
    if all(pair.status is PairStatus.IDENTICAL for pair in found.pairs.values()):
        return _decision(
            Branch.AGREE,
            path,
            evidence=["every compared token has the same score on all sides"],
            not_proven=_missing_sides(found) + _copied(found),
        )
    covered = all(known is not None and pair.logprob_mae <= 2 * known for pair, known in zip(found.pairs.values(), noise, strict=True))
    limit = (
        "twice the noise of the repeats" if covered else f"the pass mark of {found.thresholds.pass_mark:g}, which was given, not measured"
    )
    return _decision(
        Branch.AGREE,
        path,
        klass=LogClass.NUMERICAL,
        evidence=[f"{pair.name} is {_gap(pair)}, within {limit}" for pair in found.pairs.values()],
        not_proven=[
            "a small systematic difference below the noise (a temperature of 0.9 can hide there)",
            *_missing_sides(found),
            *_copied(found),
        ],
    )


def _missing_sides(found: _Evidence) -> list[str]:
    absent = sorted({"A", "B", "C"} - {name[0] for name in found.summaries})
    return [f"anything about {side}: it was not given" for side in absent]


def _apart(found: _Evidence, path: list[DecisionStep], apart: list[str]) -> Decision:
    suspect = suspect_of(found.pairs)
    refit = best_refit(list(found.refits))
    if len(found.pairs) == 1:
        where = f"only {apart[0]} is there"
    elif suspect:
        rest = " and ".join(sorted({"A", "B", "C"} - {suspect}))
        where = f"{suspect} ({_WHO[suspect]}); {rest} agree with one another better"
    else:
        where = "none: all three pairs are apart"
    path.append(DecisionStep(question=_ALONE.text, answer=where))
    tried = ", ".join(dict.fromkeys(attempt.kind.value for attempt in found.refits))
    answer = f"{refit.kind.value}: {refit.parameter}" if refit else "no"
    path.append(DecisionStep(question=_CAUSE.text, answer=answer, numbers=f"tried: {tried}" if tried else ""))
    evidence = [_gap_sentence(found.pairs[name]) for name in apart] + _where(found)
    not_proven = _missing_sides(found) + _unknowns(found) + _copied(found)
    if refit is not None:
        return _named(found, path, refit, evidence, not_proven)
    if not suspect:
        if len(found.pairs) == 1:
            return _decision(
                Branch.UNDECIDED,
                path,
                evidence=evidence,
                not_proven=["which half: without B, generation and the engines cannot be separated", *not_proven],
            )
        return _decision(
            Branch.GENERATION,
            path,
            evidence=evidence,
            not_proven=["a single cause: generation differs from its replay, and the engines differ as well", *not_proven],
            next_step="Two differences stack. Open generation first (A-B, inside one engine), fix it, and compare again",
        )
    if suspect == "A":
        return _generation(found, path, evidence, not_proven)
    if suspect == "B":
        return _decision(
            Branch.SCORING,
            path,
            side="B",
            evidence=[*evidence, "generation and the trainer agree; the replay alone differs"],
            not_proven=["that production is affected: the replay is a probe (prefill, cache, prompt scores)", *not_proven],
            next_step="Check the replay: cache emptied, ids sent as ids, prompt scores aligned with tokens, nothing else in the batch",
        )
    return _trainer(found, path, evidence, not_proven)


def _gap_sentence(pair: PairResult) -> str:
    parts = [
        f"{pair.name} is {pair.logprob_mae:.4g} nats (signed mean {pair.signed_mean:+.4g}, p99 {pair.p99:.4g}, largest {pair.largest:.4g})"
    ]
    if pair.noise is not None:
        parts.append(f"noise of its sides {pair.noise:.4g}")
    if pair.biased:
        parts.append("of one sign in the mean")
    if pair.hidden:
        parts.append(f"apart in a part alone: {'; '.join(pair.hidden)}")
    if pair.far and pair.logprob_mae < 0.1:
        parts.append(f"{pair.far} of {pair.tokens} tokens are far off while the others agree")
    return ", ".join(parts)


def _where(found: _Evidence) -> list[str]:
    """Workers or groups that alone are apart."""
    lines = []
    for kind in dict.fromkeys((part.score, part.kind) for part in found.slices):
        parts = [part for part in found.slices if (part.score, part.kind) == kind and part.apart]
        if parts:
            names = ", ".join(f"{part.name} ({part.logprob_mae:.3g})" for part in parts[:3]) + (" ..." if len(parts) > 3 else "")
            lines.append(f"of the {kind[1]}s of {kind[0].value} only these are apart: {names}; the others {parts[0].elsewhere:.3g}")
    return lines


def _unknowns(found: _Evidence) -> list[str]:
    unknown = sorted(name for name, summary in found.summaries.items() if "unknown" in summary.definitions)
    lines = [f"that all scores have one definition: it is unknown for {', '.join(unknown)}"] if unknown else []
    return lines + [f"that {side} repeats itself: it was scored once" for side in _scored_once(found)]


def _copied(found: _Evidence) -> list[str]:
    """A trainer may have been set to take the rollout's scores as its own."""
    a_c, a_b = found.pairs.get("A-C"), found.pairs.get("A-B")
    if a_c is None or a_c.status is not PairStatus.IDENTICAL or (a_b is not None and a_b.status is PairStatus.IDENTICAL):
        return []
    return ["that A and C were computed apart: they are equal bit for bit, as a copy would be"]


def _scored_once(found: _Evidence) -> list[str]:
    """Sides that can be scored twice and were not."""
    return sorted({"B", "C"} & {name[0] for name in found.summaries} - set(found.repeats))


def _named(found: _Evidence, path: list[DecisionStep], refit: Refit, evidence: list[str], not_proven: list[str]) -> Decision:
    """A refit names the cause."""
    side = refit.score.side
    branch = Branch.SCORING if refit.kind in _DEFINITION or side != "A" else Branch.GENERATION
    others = [attempt for attempt in found.refits if attempt.matched and attempt.kind not in (refit.kind, RefitKind.OWN_LOGITS)]
    measured = [] if by_sign(refit) or refit.kind is RefitKind.OWN_LOGITS else [_measured(refit)]
    return _decision(
        branch,
        path,
        side=side,
        cause=refit.kind,
        klass=LogClass.DEFECT,
        evidence=[refit.text, *measured, *evidence],
        not_proven=[f"that nothing else fits: {other.kind.value} ({other.parameter}) leaves {other.after:.3g}" for other in others]
        + not_proven,
        next_step=f"Correct how {_name_of(refit)} is computed or stored ({refit.kind.value}), and compare the same tokens again",
    )


def _measured(refit: Refit) -> str:
    return f"that leaves {refit.after:.3g} of {refit.before:.3g} nats on {refit.tokens} tokens which it was not fitted on"


def _name_of(refit: Refit) -> str:
    return f"{refit.score.value} of {_WHO[refit.score.side]}"


def _generation(found: _Evidence, path: list[DecisionStep], evidence: list[str], not_proven: list[str]) -> Decision:
    pair = found.pairs.get("A-B") or found.pairs["A-C"]
    first, later = pair.first_token.logprob_mae, pair.later_tokens.logprob_mae
    limit = limit_of(pair.noise, found.thresholds)
    if first is not None and later is not None:
        if first <= limit < later:
            answer = "the first agrees, later ones do not: decode, or the bookkeeping of generated tokens"
        elif later <= limit < first:
            answer = "only the first differs: the hand-over from prefill to decode"
        else:
            answer = "both differ"
        path.append(DecisionStep(question=_FIRST.text, answer=answer, numbers=f"first {first:.4g}, later {later:.4g}"))
        evidence.append(f"first response token {first:.4g}, later ones {later:.4g}: {answer}")
    return _decision(
        Branch.GENERATION,
        path,
        side="A",
        evidence=[*evidence, "the replay and the trainer do not share the difference"],
        not_proven=["which of decode and bookkeeping (index, first token, definition of the score)", *not_proven],
        next_step="Print ids and scores of one request side by side, A and B0; if they line up, trace prefill against decode of the engine",
    )


def _trainer(found: _Evidence, path: list[DecisionStep], evidence: list[str], not_proven: list[str]) -> Decision:
    """C stands alone and nothing names the cause: weights, unless they are known to be equal."""
    pair = found.pairs.get("B-C") or found.pairs["A-C"]
    if _few_far(pair, found.thresholds):
        path.append(DecisionStep(question=_FEW.text, answer=f"yes, {pair.far} of {pair.tokens}"))
        return _decision(
            Branch.SCORING,
            path,
            side="C",
            evidence=[*evidence, "other weights would move every token a little; here a few are far off and all others agree"],
            not_proven=["that all weights are equal: one stale expert looks like this too", *not_proven],
            next_step="Trace the worst tokens on both sides, and look first at discrete choices (`moe.topk_ids`)",
        )
    path.append(DecisionStep(question=_FEW.text, answer="no"))
    models = {side: _of_side(found, side, "models") for side in "BC"}
    adapters = {side: _of_side(found, side, "adapters") for side in "BC"}
    if models["B"] and models["C"]:
        equal = models["B"] == models["C"]
        path.append(DecisionStep(question=_WEIGHTS.text, answer="yes, by digest" if equal else "no, by digest"))
        if equal and adapters["B"] == adapters["C"]:
            return _decision(
                Branch.SCORING,
                path,
                side="C",
                evidence=[*evidence, "the weights of B and C have equal digests"],
                not_proven=["which of extraction and forward pass: no full logits, or they name nothing", *not_proven],
            )
        return _decision(
            Branch.WEIGHTS,
            path,
            side="C",
            klass=LogClass.DEFECT,
            evidence=[*evidence, f"weights: B {', '.join(models['B'])}, C {', '.join(models['C'])}"],
            not_proven=["that the weights explain all of it", *not_proven],
        )
    path.append(
        DecisionStep(
            question=_WEIGHTS.text,
            answer="unknown: no digest was given for " + (" and ".join(side for side in "BC" if not models[side])),
        )
    )
    return _decision(
        Branch.WEIGHTS,
        path,
        side="C",
        evidence=[*evidence, "the rollout engine agrees with itself, the trainer differs from it, and no known way of scoring explains it"],
        not_proven=["that the weights differ: no digests were given; extraction and kernels are not excluded", *not_proven],
    )


def _few_far(pair: PairResult, thresholds: Thresholds) -> bool:
    """Without its far tokens the pair would agree."""
    rest = pair.tokens - len(pair.worst)
    if pair.biased or pair.hidden or not 0 < pair.far <= min(len(pair.worst), max(1, _FEW_SHARE * pair.tokens)) or not rest:
        return False
    return (pair.logprob_mae * pair.tokens - sum(abs(place.difference) for place in pair.worst)) / rest <= limit_of(pair.noise, thresholds)


def _of_side(found: _Evidence, side: str, what: str) -> tuple[str, ...]:
    return tuple(sorted({text for name, summary in found.summaries.items() if name[0] == side for text in getattr(summary, what)}))


def _decision(
    branch: Branch,
    path: list[DecisionStep],
    *,
    side: str = "",
    cause: RefitKind | None = None,
    klass: LogClass = LogClass.UNKNOWN,
    evidence: Sequence[str] = (),
    not_proven: Sequence[str] = (),
    next_step: str = "",
) -> Decision:
    return Decision(
        branch=branch,
        side=side,
        cause=cause,
        klass=klass,
        evidence=tuple(evidence),
        not_proven=tuple(dict.fromkeys(not_proven)),
        next_step=next_step or _NEXT.get(branch, ""),
        path=(*path, DecisionStep(question=LAST, answer=branch.value + (f" ({side})" if side else ""))),
    )
