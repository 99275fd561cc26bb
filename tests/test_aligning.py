"""Tests of ``tracer.scores.aligning``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.score_cases import make_batch
from tracer.errors import Code, ScoreError
from tracer.format.score_records import PolicySegment, ScoreDefinition, ScoreInfo, ScoreKind, ScoreName, ScoreRecord, make_score
from tracer.scores.aligning import align_records, place_text

Records = list[ScoreRecord]


def records() -> Records:
    return make_batch(3, 6, 32).records()


def test_one_table_in_record_order() -> None:
    """All response tokens lie in one table, requests in their order, positions counted over prompt and response."""
    made = records()
    made[1] = replace(made[1], mask=np.array([True, False, True, True, True, True]))
    table = align_records(made)
    assert len(table) == 18
    assert table.requests == ("r0", "r1", "r2")
    assert (table.request_N[7], table.index_N[7], table.position_N[7], table.token_N[7]) == (1, 1, 9, made[1].ids[9])
    assert np.flatnonzero(table.masked_N).tolist() == [7]
    assert place_text(table, 7) == "request r1, response token 1 (token 9 of the sequence)"
    np.testing.assert_array_equal(table.values[ScoreName.A][6:12], made[1].scores[ScoreName.A].value_R)


def test_files_of_both_sides_are_joined() -> None:
    """Records of one request from two files bring other scores; order and number of files do not matter."""
    made = records()
    rollout = [replace(record, scores={name: record.scores[name] for name in (ScoreName.A, ScoreName.B0)}) for record in made]
    trainer = [replace(record, scores={ScoreName.C0: record.scores[ScoreName.C0]}) for record in reversed(made)]
    table = align_records([*rollout, *trainer])
    whole = align_records(made)
    for name in (ScoreName.A, ScoreName.B0, ScoreName.C0):
        np.testing.assert_array_equal(table.values[name], whole.values[name])


def change(**fields: Any) -> Callable[[Records], Records]:
    """Request r1 scored by the trainer in a record of its own, with these fields."""

    def changed(made: Records) -> Records:
        parted = [replace(record, scores={ScoreName.A: record.scores[ScoreName.A]}) for record in made]
        others = [replace(record, scores={ScoreName.C0: record.scores[ScoreName.C0]}) for record in made]
        others[1] = replace(others[1], **fields)
        return [*parted, *others]

    return changed


def value(number: float, **more: Any) -> Callable[[Records], Records]:
    """One number of A."""

    def changed(made: Records) -> Records:
        values = made[1].scores[ScoreName.A].value_R.copy()
        values[2] = number
        made[1] = replace(made[1].with_scores({ScoreName.A: make_score(values.astype(np.float32))}), **more)
        return made

    return changed


def info(first: ScoreInfo, second: ScoreInfo) -> Callable[[Records], Records]:
    """Other infos of A and C0."""

    def changed(made: Records) -> Records:
        return [
            record.with_scores(
                {name: replace(record.scores[name], info=given) for name, given in ((ScoreName.A, first), (ScoreName.C0, second))}
            )
            for record in made
        ]

    return changed


def defined(kind: ScoreKind, temperature: float = 1.0) -> ScoreInfo:
    return ScoreInfo(definition=ScoreDefinition(kind=kind, temperature=temperature))


def versions(*segments: tuple[int, str]) -> ScoreInfo:
    return ScoreInfo(policies=tuple(PolicySegment(start=start, version=version) for start, version in segments))


REFUSALS: dict[str, tuple[Callable[[Records], Records], Code]] = {
    "nothing": (lambda made: [], Code.SCORES_NOTHING),
    "no scores": (lambda made: [replace(record, scores={}) for record in made], Code.SCORES_NOTHING),
    "twice": (lambda made: [*made, made[0]], Code.SCORES_TWICE),
    "requests": (
        lambda made: [made[0].with_scores({}), replace(made[1], scores={ScoreName.A: made[1].scores[ScoreName.A]})],
        Code.SCORES_REQUESTS,
    ),
    "ids": (change(ids=np.arange(14)), Code.SCORES_IDS),
    "position ids": (change(positions=np.arange(14) + 1), Code.SCORES_IDS),
    "masks": (change(mask=np.arange(6) > 0), Code.SCORES_MASKS),
    "empty mask": (lambda made: [replace(record, mask=np.zeros(6, np.bool_)) for record in made], Code.SCORES_EMPTY_MASK),
    "nan": (value(np.nan), Code.SCORES_NONFINITE),
    "-inf": (value(-np.inf), Code.SCORES_NONFINITE),
    "positive": (value(0.01), Code.SCORES_POSITIVE),
    "policies": (info(versions((0, "6"), (4, "7")), versions((0, "6"))), Code.SCORES_POLICIES),
    "definitions": (info(defined(ScoreKind.TEMPERATURE, 0.8), defined(ScoreKind.RAW)), Code.SCORES_DEFINITIONS),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_may_not_be_compared_is_refused(name: str) -> None:
    """Each reason has a code of its own, and says where and what was found."""
    spoil, code = REFUSALS[name]
    with pytest.raises(ScoreError) as refused:
        align_records(spoil(records()))
    assert refused.value.code is code
    assert refused.value.found or refused.value.remedy


ACCEPTED: dict[str, Callable[[Records], Records]] = {
    "masked nan": value(np.nan, mask=np.arange(6) != 2),
    "masked positive": value(5.0, mask=np.arange(6) != 2),
    "rounded above 0": value(5e-5),
    "same versions": info(versions((0, "6"), (4, "7")), versions((0, "6"), (4, "7"), (9, "8"))),
    "one unknown version": info(versions((0, "6")), ScoreInfo()),
    "temperature 1 is raw": info(defined(ScoreKind.TEMPERATURE), defined(ScoreKind.RAW)),
    "one unknown definition": info(defined(ScoreKind.RAW), ScoreInfo()),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_may_be_compared(name: str) -> None:
    """Masked tokens may hold anything, and what is unknown contradicts nothing."""
    assert align_records(ACCEPTED[name](records())).valid_N.any()


def test_tokens_of_one_policy() -> None:
    """policy= keeps the tokens that one version sampled, counts the others, and needs A."""
    made = info(versions((0, "6"), (4, "7")), versions((0, "7")))(records())
    table = align_records(made, policy="7")
    assert (int(table.valid_N.sum()), table.other_policy) == (6, 12)
    assert set(table.index_N[table.valid_N].tolist()) == {4, 5}
    with pytest.raises(ScoreError) as refused:
        align_records(made, policy="8")
    assert refused.value.code is Code.SCORES_EMPTY_MASK
    with pytest.raises(ScoreError) as lacking:
        align_records([replace(record, scores={ScoreName.C0: record.scores[ScoreName.C0]}) for record in made], policy="7")
    assert lacking.value.code is Code.SCORES_POLICIES
