"""Tests of ``tracer.scores.sequence_patterns``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.score_cases import make_batch
from tracer.format.score_records import PolicySegment, ScoreInfo, ScoreName, ScoreRecord, make_score
from tracer.scores.aligning import align_records
from tracer.scores.metrics import compare_pair
from tracer.scores.results import Thresholds
from tracer.scores.sequence_patterns import check_sibling_scores, find_patterns

MARKS = Thresholds(pass_mark=0.01, tail_mark=1.0)


def run(flags: list[bool]) -> int:
    """Longest run of True, the slow way."""
    return max((len(part) for part in "".join("x" if flag else " " for flag in flags).split()), default=0)


@given(st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=6).filter(lambda rows: any(rows)))
def test_runs_stay_inside_requests(rows: list[list[bool]]) -> None:
    """Counts, first and longest run of every request are those of its own tokens, for any lengths, empty ones too."""
    records = [
        ScoreRecord(
            request=f"r{q}",
            ids=np.arange(len(row) + 1),
            prompt_length=1,
            scores={ScoreName.A: make_score([-1.0 - 2.0 * flag for flag in row]), ScoreName.B0: make_score([-1.0] * len(row))},
        )
        for q, row in enumerate(rows)
    ]
    table = align_records(records)
    patterns, hidden = find_patterns(table, compare_pair(table, ScoreName.A, ScoreName.B0, MARKS), 0.5)
    assert hidden == 0
    found = {pattern.request: pattern for pattern in patterns}
    assert set(found) == {f"r{q}" for q, row in enumerate(rows) if row}
    for q, row in enumerate(rows):
        if row:
            pattern = found[f"r{q}"]
            first = row.index(True) if any(row) else None
            assert (pattern.differing, pattern.first, pattern.longest_run, pattern.tokens) == (sum(row), first, run(row), len(row))


def test_the_worst_come_first() -> None:
    """Requests with most differing tokens come first, with their group and lengths; masked tokens do not count."""
    batch = make_batch(4, 20, 32, noise=0.0)
    batch.scores["A"] = batch.scores["A"].copy()
    batch.scores["A"][2, 5:9] -= 1
    batch.scores["A"][1, :] -= 1
    batch.mask[1, 3:] = False
    table = align_records(batch.records())
    patterns, _ = find_patterns(table, compare_pair(table, ScoreName.A, ScoreName.B0, MARKS), 0.5)
    assert [(p.request, p.group, p.differing, p.first, p.longest_run, p.tokens, p.response_length) for p in patterns[:2]] == [
        ("r2", "g1", 4, 5, 4, 20, 20),
        ("r1", "g0", 3, 0, 3, 3, 20),
    ]


def family(*responses: list[int], prompt: tuple[int, ...] = (1, 2)) -> list[ScoreRecord]:
    """Siblings whose scores are a function of the prefix."""
    made = []
    for q, response in enumerate(responses):
        values = [-1.0 - (hash(tuple(response[: n + 1])) % 1000) / 1000 for n in range(len(response))]
        made.append(
            ScoreRecord(
                request=f"s{q}", ids=np.array([*prompt, *response]), prompt_length=2, scores={ScoreName.A: make_score(np.array(values))}
            )
        )
    return made


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=2, max_size=6))
def test_equal_prefixes_with_equal_scores_agree(responses: list[list[int]]) -> None:
    """Scores that depend on the prefix alone never disagree, whatever siblings there are."""
    assert all(check.differing == 0 for check in check_sibling_scores(align_records(family(*responses))))


def test_a_sibling_that_disagrees_is_found() -> None:
    """One changed score inside a shared prefix is named with both requests; what is not shared, or another prompt, is not compared."""
    records = family([5, 6, 7], [5, 6, 8, 9], [4]) + [replace(record, request="x") for record in family([5, 6, 7], prompt=(1, 3))]
    values = records[1].scores[ScoreName.A].value_R.copy()
    values[1:] -= 0.5
    records[1] = records[1].with_scores({ScoreName.A: make_score(values)})
    (check,) = check_sibling_scores(align_records(records))
    assert (check.pairs, check.tokens, check.differing, check.largest) == (1, 2, 1, 0.5)
    assert check.worst is not None
    assert ({check.worst.request, check.sibling}, check.worst.response_index) == ({"s0", "s1"}, 1)


def test_other_policies_are_no_siblings() -> None:
    """Two responses sampled by other versions of the weights are not held against each other."""
    records = family([5, 6, 7], [5, 6, 8])
    scores = [
        replace(record.scores[ScoreName.A], info=ScoreInfo(policies=(PolicySegment(start=0, version=str(q)),)))
        for q, record in enumerate(records)
    ]
    table = align_records([record.with_scores({ScoreName.A: score}) for record, score in zip(records, scores, strict=True)])
    assert check_sibling_scores(table) == ()
