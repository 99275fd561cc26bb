"""Did a weight update arrive? The same saved tokens, scored before and after it, on both sides.

Before: A, B and C of the old weights. After: B and C again, with the new ones. Where the trainer's scores moved and the rollout
engine's did not, the update never arrived; weight fingerprints of both sides, before and after, tell a skipped update from a
partial one. On tokens fixed once and for all (the oracle) the most likely token is compared as well.

Shape suffixes: M valid tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tracer.errors import Code, ScoreError
from tracer.format.score_file import read_scores
from tracer.format.score_records import ScoreName, ScoreRecord
from tracer.scores.aligning import ScoreTable, align_records, some_of
from tracer.scores.metrics import compare_pair
from tracer.scores.results import OracleSide, PairResult, PairStatus, ScoreVerdict, Thresholds, UpdateOutcome, UpdateResult, UpdateSide

__all__ = ["UpdateWeights", "check_update"]

Records = Iterable[ScoreRecord] | str | os.PathLike[str]
Digests = Mapping[str, str]

_SHOWN = 20


@dataclass(frozen=True)
class UpdateWeights:
    """Weight name -> digest, of the rollout engine (b) and the trainer (c), before and after; None where it is unknown.

    Names are compared inside one side, and between the sides where both have them (``tracer weights`` gives the same name to the
    same weight in every framework)."""

    b_before: Digests | None = None
    b_after: Digests | None = None
    c_before: Digests | None = None
    c_after: Digests | None = None


def check_update(
    before: Records,
    after: Records,
    *,
    weights: UpdateWeights = UpdateWeights(),
    pass_mark: float = 0.01,
    tail_mark: float = 1.0,
) -> UpdateResult:
    """Compare the scores of one saved batch before and after a weight update.

    ``before`` and ``after`` hold B0 and C0 of the same requests and tokens (B1, C1 give the noise). Nothing is compared between
    policies here but a side with itself, so other policy versions are expected.
    Raises ScoreError as ``compare_scores`` does; scores-ids and scores-requests where the two batches are not one.
    """
    old, new = (align_records(read_scores(found) if isinstance(found, (str, os.PathLike)) else found) for found in (before, after))
    _same_batch(old, new)
    thresholds = Thresholds(pass_mark=pass_mark, tail_mark=tail_mark)
    gaps = tuple(_engines(table, thresholds) for table in (old, new))
    sides = tuple(_side(side, old, new, weights) for side in "BC")
    outcome, evidence = _outcome(gaps, {side.side: side for side in sides}, weights)
    verdict = _VERDICTS[outcome]
    unknown = [
        f"{name} weights {when}" for name in "BC" for when in ("before", "after") if getattr(weights, f"{name.lower()}_{when}") is None
    ]
    return UpdateResult(
        exit=verdict.exit_code,
        verdict=verdict,
        headline=_headline(outcome, gaps, sides),
        outcome=outcome,
        sides=sides,
        oracle=tuple(found for side in "BC" if (found := _oracle(side, old, new)) is not None),
        argmax_apart=(_argmax_apart(old), _argmax_apart(new)),
        before=gaps[0],
        after=gaps[1],
        evidence=evidence,
        not_proven=(f"anything by fingerprint about {', '.join(unknown)}: not given",) if unknown else (),
        next_step=_NEXT[outcome],
    )


_VERDICTS = {
    UpdateOutcome.APPLIED: ScoreVerdict.AGREE,
    UpdateOutcome.SKIPPED: ScoreVerdict.DIFFERENT,
    UpdateOutcome.PARTIAL: ScoreVerdict.DIFFERENT,
    UpdateOutcome.WRONG: ScoreVerdict.DIFFERENT,
    UpdateOutcome.NOTHING_MOVED: ScoreVerdict.COULD_NOT_TELL,
    UpdateOutcome.COULD_NOT_TELL: ScoreVerdict.COULD_NOT_TELL,
}
_NEXT = {
    UpdateOutcome.APPLIED: "Nothing to open",
    UpdateOutcome.SKIPPED: "Follow the update: was it exported, transferred, installed, and was the engine told to use it",
    UpdateOutcome.PARTIAL: "Look at how these weights reach the engine: packed, sharded, quantized, tied, adapter",
    UpdateOutcome.WRONG: "Compare the resident weights by name (`tracer weights`): what was installed is not what the trainer has",
    UpdateOutcome.NOTHING_MOVED: "Check that the optimizer stepped, and that the files are from either side of the update",
    UpdateOutcome.COULD_NOT_TELL: "Score B and C on both sides of the update, each twice",
}


def _same_batch(old: ScoreTable, new: ScoreTable) -> None:
    if old.requests != new.requests:
        raise ScoreError(
            Code.SCORES_REQUESTS,
            "before and after the update other requests were scored",
            expected=some_of(old.requests),
            found=some_of(new.requests),
            remedy="score one saved batch on both sides of the update, in one order",
        )
    for a, b in zip(old.records, new.records, strict=True):
        if a.prompt_length != b.prompt_length or not np.array_equal(a.ids, b.ids):
            raise ScoreError(Code.SCORES_IDS, "before and after the update other tokens were scored", where=f"request {a.request}")
    if not np.array_equal(old.valid_N, new.valid_N):
        raise ScoreError(Code.SCORES_MASKS, "before and after the update other tokens count")
    for table, when in ((old, "before"), (new, "after")):
        lacking = [name.value for name in (ScoreName.B0, ScoreName.C0) if name not in table.values]
        if lacking:
            raise ScoreError(
                Code.SCORES_REQUESTS,
                f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing {when} the update",
                expected="B0 and C0 on both sides of the update",
                found=", ".join(name.value for name in table.values),
            )


def _noise(table: ScoreTable, side: str) -> float | None:
    first, second = ScoreName[f"{side}0"], ScoreName[f"{side}1"]
    if second not in table.values:
        return None
    return float(np.abs(table.values[first] - table.values[second])[table.valid_N].mean())


def _engines(table: ScoreTable, thresholds: Thresholds) -> PairResult:
    noise = [found for side in "BC" if (found := _noise(table, side)) is not None]
    return compare_pair(table, ScoreName.B0, ScoreName.C0, thresholds, noise=max(noise, default=None))


def _side(side: str, old: ScoreTable, new: ScoreTable, weights: UpdateWeights) -> UpdateSide:
    name = ScoreName[f"{side}0"]
    d_M = np.abs(new.values[name] - old.values[name])[old.valid_N]
    noise = [found for table in (old, new) if (found := _noise(table, side)) is not None]
    mae = float(d_M.mean())
    before, after = getattr(weights, f"{side.lower()}_before"), getattr(weights, f"{side.lower()}_after")
    shared = sorted(set(before) & set(after)) if before is not None and after is not None else []
    changed = [weight for weight in shared if before[weight] != after[weight]]
    expected = _changed(weights.c_before, weights.c_after) if side == "B" else set()
    left = sorted(expected & set(shared) - set(changed))
    return UpdateSide(
        side=side,
        moved=mae > 2 * max(noise, default=0.0),
        logprob_mae=mae,
        noise=max(noise, default=None),
        weights_compared=len(shared),
        weights_changed=len(changed),
        unchanged=tuple(left[:_SHOWN]),
    )


def _changed(before: Digests | None, after: Digests | None) -> set[str]:
    if before is None or after is None:
        return set()
    return {name for name in set(before) & set(after) if before[name] != after[name]}


def _outcome(
    gaps: tuple[PairResult, ...], sides: Mapping[str, UpdateSide], weights: UpdateWeights
) -> tuple[UpdateOutcome, tuple[str, ...]]:
    """What became of the update, and what shows it. Fingerprints outweigh scores: they see every weight."""
    b, c = sides["B"], sides["C"]
    evidence = [
        f"{side.side}'s scores moved by {side.logprob_mae:.4g} nats" + ("" if side.moved else ", no more than its noise") for side in (b, c)
    ]
    expected, got = _changed(weights.c_before, weights.c_after), _changed(weights.b_before, weights.b_after)
    if c.weights_compared:
        evidence.append(f"{c.weights_changed} of {c.weights_compared} weights of the trainer changed")
    if b.weights_compared:
        evidence.append(f"{b.weights_changed} of {b.weights_compared} weights of the rollout engine changed")
    if expected and b.weights_compared:
        arrived = expected & got
        if not arrived:
            return UpdateOutcome.SKIPPED, tuple(evidence)
        if b.unchanged:
            evidence.append(f"changed in the trainer and not in the engine: {some_of(b.unchanged)}")
            return UpdateOutcome.PARTIAL, tuple(evidence)
    apart = _apart_by_name(weights)
    if apart:
        evidence.append(f"after the update both sides hold other bytes of {some_of(apart)}")
    after_apart = gaps[1].status is PairStatus.APART
    if c.moved and not b.moved:
        return UpdateOutcome.SKIPPED, tuple(evidence)
    if b.moved and not c.moved:
        return UpdateOutcome.WRONG, (*evidence, "the rollout engine moved and the trainer did not")
    if not b.moved and not c.moved:
        return UpdateOutcome.NOTHING_MOVED, tuple(evidence)
    if after_apart and gaps[0].status is not PairStatus.APART:
        text = f"both sides moved, yet B-C is {gaps[1].logprob_mae:.4g} after the update and was {gaps[0].logprob_mae:.4g} before"
        return (UpdateOutcome.WRONG if apart else UpdateOutcome.PARTIAL), (*evidence, text)
    if after_apart:
        return UpdateOutcome.COULD_NOT_TELL, (*evidence, "B-C was apart before the update already")
    return UpdateOutcome.APPLIED, (*evidence, f"B-C is {gaps[1].logprob_mae:.4g} after the update, {gaps[0].logprob_mae:.4g} before")


def _apart_by_name(weights: UpdateWeights) -> list[str]:
    """Weights of which the two sides hold other bytes after the update, where they held the same ones before."""
    b, c = weights.b_after, weights.c_after
    if b is None or c is None or weights.b_before is None or weights.c_before is None:
        return []
    comparable = {name for name in set(weights.b_before) & set(weights.c_before) if weights.b_before[name] == weights.c_before[name]}
    return sorted(name for name in comparable & set(b) & set(c) if b[name] != c[name])


def _headline(outcome: UpdateOutcome, gaps: tuple[PairResult, ...], sides: tuple[UpdateSide, ...]) -> str:
    moved = ", ".join(f"{side.side} moved by {side.logprob_mae:.4g}" if side.moved else f"{side.side} did not move" for side in sides)
    before, after = (f"{pair.logprob_mae:.4g}" for pair in gaps)
    return f"Update {outcome.value}: {moved}; B-C {before} before, {after} after, over {gaps[0].tokens} tokens"


def _oracle(side: str, old: ScoreTable, new: ScoreTable) -> OracleSide | None:
    name = ScoreName[f"{side}0"]
    valid = old.valid_N
    changed = None
    if name in old.argmax and name in new.argmax:
        changed = int(np.count_nonzero((old.argmax[name] != new.argmax[name])[valid]))
    return OracleSide(
        side=side, tokens=int(valid.sum()), argmax_changed=changed, largest=float(np.abs(new.values[name] - old.values[name])[valid].max())
    )


def _argmax_apart(table: ScoreTable) -> int | None:
    if ScoreName.B0 not in table.argmax or ScoreName.C0 not in table.argmax:
        return None
    return int(np.count_nonzero((table.argmax[ScoreName.B0] != table.argmax[ScoreName.C0])[table.valid_N]))
