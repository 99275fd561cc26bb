"""Tests of ``tracer.reports.score_view``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.score_cases import make_batch
from tests.test_update_check import logits, sides
from tracer.format.score_records import ScoreInfo, ScoreName, make_score
from tracer.reports.score_view import view_scores, view_update
from tracer.reports.terminal import render_plain
from tracer.scores.score_comparison import compare_scores
from tracer.scores.update_check import check_update


def test_a_report_says_everything_that_was_found() -> None:
    """Overflow, other dtypes, masked tokens, far tokens, workers, siblings and refits all reach the text."""
    batch = make_batch(6, 30, 32)
    batch.ids[1] = batch.ids[0]
    batch.scores["A"] = batch.scores["A"].copy()
    batch.scores["A"][2, 4] = -1500.0
    batch.mask[:, 20] = False
    batch.info = {"A": ScoreInfo(worker="replica 3", model="d1", adapter="lora", source="engine 1")}
    records = [record.with_scores({ScoreName.C0: make_score(record.scores[ScoreName.C0].value_R)}) for record in batch.records()]
    text = render_plain(view_scores(compare_scores(records), everything=True))
    for said in (
        "exp(d) overflows at 1 tokens",
        "overflow",
        "other dtypes",
        "6 masked",
        "1 far off",
        "worker replica 3; adapter lora; model d1",
        "engine 1",
        "siblings: equal prefixes",
        "cause tried",
        "not proven",
        "Does each side repeat itself?",
    ):
        assert said in text, said
    short = render_plain(view_scores(compare_scores(records)))
    assert len(short) < len(text)
    assert "(--all)" in short
    assert "(--all)" not in text


def test_agreement_is_a_short_report() -> None:
    """Scores that are all equal list no worst token and no refit."""
    text = render_plain(view_scores(make_batch(noise=0.0).compare()))
    assert text.startswith("Scores agree, bit for bit")
    for absent in ("response token", "cause tried", "class  numerical"):
        assert absent not in text


def test_siblings_that_disagree() -> None:
    """A sibling whose shared prefix is scored otherwise is named with its partner."""
    batch = make_batch(2, 10, 32, noise=0.0)
    batch.ids[1] = batch.ids[0]
    for name in batch.scores:
        batch.scores[name] = np.repeat(batch.scores[name][:1], 2, axis=0)
    batch.scores["A"][1, 3] -= 0.25
    text = render_plain(view_scores(batch.compare()))
    assert "A: 10 shared tokens of 1 neighbours, 1 differ" in text
    assert "at response token 3 of r0 and r1" in text


def test_an_update() -> None:
    """The report on an update has both gaps, the oracle and what was not given."""
    batch, old, new = logits()
    text = render_plain(view_update(check_update(sides(batch, old, old, "6"), sides(batch, old, new, "7"))))
    for said in ("Update skipped", "before", "after", "most likely token changed at 0", "not given", "next"):
        assert said in text, said
    bare = [
        [
            replace(record, scores={name: replace(score, argmax_R=None) for name, score in record.scores.items()})
            for record in sides(batch, old, part, "6")
        ]
        for part in (old, new)
    ]
    assert "most likely" not in render_plain(view_update(check_update(*bare)))
