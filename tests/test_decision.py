"""Tests of ``tracer.scores.decision``: cases whose right branch is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.score_cases import F64, ToyBatch, log_softmax, make_batch
from tracer.format.score_records import ScoreInfo, ScoreName, ScoreRecord, make_score
from tracer.scores.decision import suspect_of
from tracer.scores.results import Branch, LogClass, RefitKind, ScoreResult
from tracer.scores.score_comparison import compare_scores


def offset_from_second(batch: ToyBatch) -> None:
    batch.scores["A"] = batch.scores["A"] - 0.1 * (np.arange(48) > 0)


def both_c(batch: ToyBatch, change: Callable[[F64], F64]) -> None:
    batch.scores["C0"] = batch.scores["C1"] = change(batch.scores["C0"])


def stale(batch: ToyBatch) -> None:
    """The rollout engine kept other weights: A and B agree, C is another model, and everything repeats itself."""
    other = make_batch(seed=7)
    fresh = batch.logits + 0.7 * other.logits
    batch.logits = fresh
    both_c(batch, lambda _: batch.pick(log_softmax(fresh)))


def temperature(batch: ToyBatch, t: float) -> None:
    batch.scores["A"] = batch.pick(log_softmax(batch.logits / t))


def labels(batch: ToyBatch) -> None:
    full = log_softmax(batch.logits)
    both_c(batch, lambda _: np.take_along_axis(full, np.roll(batch.response, -1, axis=1)[..., None], axis=-1)[..., 0])


def top_k(batch: ToyBatch) -> None:
    """Everything is sampled from the top 20 and A renormalised over them."""
    kept = np.partition(batch.logits, -20, axis=-1)[..., -20:-19]
    batch.ids[:, batch.prompt :] = np.where(batch.pick(batch.logits) < kept[..., 0], batch.logits.argmax(axis=-1), batch.response)
    clean = batch.pick(log_softmax(batch.logits))
    batch.scores = dict.fromkeys(batch.scores, clean)
    batch.scores["A"] = batch.pick(log_softmax(np.where(batch.logits < kept, -np.inf, batch.logits)))


def zeros(batch: ToyBatch) -> None:
    batch.scores["A"] = batch.scores["A"].copy()
    batch.scores["A"][3, 5:9] = 0.0


def padding(batch: ToyBatch) -> None:
    both_c(batch, lambda _: batch.pick(log_softmax(np.concatenate([batch.logits, np.zeros((*batch.logits.shape[:2], 64))], axis=-1))))


def masked_rows(batch: ToyBatch) -> None:
    """Nonsense, as padding holds it, where the mask leaves tokens out."""
    batch.mask[:, 40:] = False
    batch.mask[5] = False
    for number, name in enumerate(batch.scores):
        batch.scores[name] = np.where(batch.mask, batch.scores[name], 10.0 * number)


def unrepeatable(batch: ToyBatch) -> None:
    """B differs from itself by as much as from the others."""
    rng = np.random.default_rng(5)
    for name in ("A", "B0", "B1"):
        batch.scores[name] = np.minimum(batch.scores[name] + 0.05 * rng.standard_normal((16, 48)), -1e-6)


def replay(batch: ToyBatch) -> None:
    rng = np.random.default_rng(6)
    batch.scores["B0"] = batch.scores["B1"] = np.minimum(batch.scores["B0"] - rng.random((16, 48)), -1e-6)


def decode(batch: ToyBatch) -> None:
    """Decode drifts from the second token on, without any rule."""
    rng = np.random.default_rng(6)
    batch.scores["A"] = np.minimum(batch.scores["A"] + (np.arange(48) > 0) * 0.2 * rng.standard_normal((16, 48)), -1e-6)


def drifted(batch: ToyBatch) -> None:
    """C is off without a rule, as a kernel or a slightly older model would be."""
    rng = np.random.default_rng(6)
    both_c(batch, lambda c: np.minimum(c + 0.1 * rng.standard_normal(c.shape), -1e-6))


def same_weights(batch: ToyBatch) -> None:
    drifted(batch)
    batch.info = {name: ScoreInfo(model="d1") for name in batch.scores}


def other_weights(batch: ToyBatch) -> None:
    drifted(batch)
    batch.info = {name: ScoreInfo(model="d1" if name[0] == "C" else "d0") for name in batch.scores}


def everything(batch: ToyBatch) -> None:
    decode(batch)
    rng = np.random.default_rng(8)
    both_c(batch, lambda c: np.minimum(c + 0.2 * rng.standard_normal(c.shape), -1e-6))


CASES: dict[str, tuple[Callable[[ToyBatch], None], bool, Branch, str, RefitKind | None, LogClass]] = {
    "honest": (lambda batch: None, True, Branch.AGREE, "", None, LogClass.NUMERICAL),
    "constant offset on A from the second token": (offset_from_second, False, Branch.GENERATION, "A", RefitKind.OFFSET, LogClass.DEFECT),
    "constant offset on C": (lambda batch: both_c(batch, lambda c: c - 0.1), False, Branch.SCORING, "C", RefitKind.OFFSET, LogClass.DEFECT),
    "stale weights": (stale, False, Branch.WEIGHTS, "C", None, LogClass.UNKNOWN),
    "stale weights, full logits of C": (stale, True, Branch.WEIGHTS, "C", None, LogClass.UNKNOWN),
    "temperature 0.8 on A": (lambda batch: temperature(batch, 0.8), True, Branch.SCORING, "A", RefitKind.TEMPERATURE, LogClass.DEFECT),
    "temperature 0.9 on A": (lambda batch: temperature(batch, 0.9), True, Branch.SCORING, "A", RefitKind.TEMPERATURE, LogClass.DEFECT),
    "top-k renormalisation of A": (top_k, False, Branch.SCORING, "A", RefitKind.KEPT_SET, LogClass.DEFECT),
    "top-k renormalisation of A, full logits": (top_k, True, Branch.SCORING, "A", RefitKind.KEPT_SET, LogClass.DEFECT),
    "labels shifted by one": (labels, True, Branch.SCORING, "C", RefitKind.LABELS, LogClass.DEFECT),
    "scores shifted by one": (
        lambda batch: both_c(batch, lambda c: np.roll(c, 1, 1)),
        False,
        Branch.SCORING,
        "C",
        RefitKind.SHIFT,
        LogClass.DEFECT,
    ),
    "zero-filled missing scores": (zeros, False, Branch.GENERATION, "A", RefitKind.MISSING, LogClass.DEFECT),
    "padding columns in the vocabulary": (padding, True, Branch.SCORING, "C", RefitKind.EXTRA_MASS, LogClass.DEFECT),
    "masked rows": (masked_rows, False, Branch.AGREE, "", None, LogClass.NUMERICAL),
    "a floor as large as the gap": (unrepeatable, False, Branch.REPEATS, "B", None, LogClass.UNKNOWN),
    "the replay alone": (replay, False, Branch.SCORING, "B", None, LogClass.UNKNOWN),
    "decode drifts": (decode, False, Branch.GENERATION, "A", None, LogClass.UNKNOWN),
    "C off, weights unknown": (drifted, False, Branch.WEIGHTS, "C", None, LogClass.UNKNOWN),
    "C off, weights equal": (same_weights, False, Branch.SCORING, "C", None, LogClass.UNKNOWN),
    "C off, weights differ": (other_weights, False, Branch.WEIGHTS, "C", None, LogClass.DEFECT),
    "two differences": (everything, False, Branch.GENERATION, "", None, LogClass.UNKNOWN),
}


@pytest.mark.parametrize("name", CASES)
def test_the_branch_is_the_right_one(name: str) -> None:
    """Branch, side, cause and class of a case with a known answer; every decision has a reason, a path and one next step."""
    spoil, logits, branch, side, cause, klass = CASES[name]
    batch = make_batch()
    spoil(batch)
    result = batch.compare(logits=logits)
    decision = result.decision
    assert (decision.branch, decision.side, decision.cause, decision.klass) == (branch, side, cause, klass), (
        result.headline,
        result.refits,
    )
    assert result.exit == (0 if branch is Branch.AGREE else 1)
    assert decision.evidence
    assert decision.next_step
    assert decision.path[0].question == "Does each side repeat itself?"
    assert decision.path[-1].answer.startswith(branch.value)
    if branch not in (Branch.AGREE, Branch.REPEATS):
        assert branch.value in result.headline


def only(batch: ToyBatch, *names: str) -> ScoreResult:
    """With these scores alone."""
    batch.scores = {name: batch.scores[name] for name in names}
    return batch.compare()


def test_without_b_the_half_cannot_be_told() -> None:
    """A and C alone: a difference is proven, but not on which half; agreement stands, and says what was not looked at."""
    batch = make_batch()
    drifted(batch)
    result = only(batch, "A", "C0")
    assert (result.exit, result.decision.branch) == (1, Branch.UNDECIDED)
    assert any("without B" in text for text in result.decision.not_proven)
    honest = only(make_batch(), "A", "C0")
    assert honest.exit == 0
    assert any("anything about B" in text for text in honest.decision.not_proven)


def test_two_sides_are_enough_for_their_half() -> None:
    """A and B alone decide generation, B and C alone decide the engines; what was scored once is not proven to repeat itself."""
    batch = make_batch()
    decode(batch)
    result = only(batch, "A", "B0")
    assert (result.decision.branch, result.decision.side) == (Branch.GENERATION, "A")
    assert any("B repeats itself" in text for text in result.decision.not_proven)
    batch = make_batch()
    drifted(batch)
    assert only(batch, "B0", "C0").decision.branch is Branch.WEIGHTS


def test_repeats_alone_prove_nothing_about_the_other_side() -> None:
    """Only B0 and B1: could not tell, exit 2."""
    result = only(make_batch(), "B0", "B1")
    assert (result.exit, result.decision.branch, result.pairs) == (2, Branch.UNDECIDED, ())


def published(ab: float, bc: float, ac: float, b_repeat: float | None, *, offset_a: float = 0.0, offset_c: float = 0.0) -> ScoreResult:
    """A run with about these logprob_mae, as published; C repeats itself exactly. Each score has noise of its own."""
    rng = np.random.default_rng(0)
    squares = {"A": ab**2 + ac**2 - bc**2, "B0": ab**2 + bc**2 - ac**2, "C0": bc**2 + ac**2 - ab**2}
    clean = -1.5 - 0.5 * rng.random(4096)
    columns = {name: clean + np.sqrt(max(square, 0) / 2 * np.pi / 2) * rng.standard_normal(4096) for name, square in squares.items()}
    if b_repeat is not None:
        columns["B1"] = columns["B0"] + b_repeat * np.sqrt(np.pi / 2) * rng.standard_normal(4096)
    columns["A"] += offset_a * (np.arange(4096) % 512 > 0)
    columns["C0"] += offset_c
    columns["C1"] = columns["C0"]
    records = [
        ScoreRecord(
            request=str(q),
            ids=np.arange(513),
            prompt_length=1,
            scores={ScoreName(name): make_score(values[512 * q : 512 * q + 512]) for name, values in columns.items()},
        )
        for q in range(8)
    ]
    return compare_scores(records)


@pytest.mark.parametrize(
    ("result", "branch", "cause"),
    [
        (lambda: published(0.009756, 0.009218, 0.009337, None), Branch.AGREE, None),
        (lambda: published(0.0079, 0.009306, 0.0093, 0.008069, offset_a=-0.1), Branch.GENERATION, RefitKind.OFFSET),
        (lambda: published(0.006772, 0.008432, 0.007703, 0.008069), Branch.AGREE, None),
        (lambda: published(0.008086, 0.0085, 0.0085, 0.008341, offset_c=-0.1), Branch.SCORING, RefitKind.OFFSET),
        (lambda: published(0.006334, 0.007119, 0.007712, 0.008341), Branch.AGREE, None),
        (lambda: published(0.0, 0.0095, 0.0095, 0.0), Branch.AGREE, None),
        (lambda: published(0.0, 0.012223, 0.012223, 0.0), Branch.UNDECIDED, None),
        (lambda: published(0.016305, 0.015165, 0.014710, 0.017180), Branch.REPEATS, None),
        (lambda: published(0.007984, 0.008799, 0.008446, 0.008333), Branch.AGREE, None),
    ],
    ids=[
        "clean",
        "case 1",
        "case 1 fixed",
        "case 2",
        "case 2 fixed",
        "case 3, before",
        "case 3, after",
        "prefill not deterministic",
        "deterministic",
    ],
)
def test_published_runs(result: Callable[[], ScoreResult], branch: Branch, cause: RefitKind | None) -> None:
    """Runs with published numbers get the published answer."""
    found = result()
    assert (found.decision.branch, found.decision.cause) == (branch, cause), found.headline


def token(**values: float) -> ScoreResult:
    """One saved token."""
    return compare_scores(
        ScoreRecord(request="r", ids=np.array([1, 2]), prompt_length=1, scores={ScoreName(n): make_score([v]) for n, v in values.items()})
    )


def test_one_published_token() -> None:
    """The gap of the corrupted run's token is that of B's repeats, so the answer is the repeats, not A or C."""
    found = token(A=-0.6760863423347473, B0=-0.6931847333908081, B1=-1.1369221210479736, C0=-1.1369222402572632, C1=-1.1369222402572632)
    gaps = {pair.name: pair.signed_mean for pair in (*found.pairs, *found.repeats)}
    assert gaps == pytest.approx({"A-B": 0.017098, "B-C": 0.443738, "A-C": 0.460836, "B0-B1": 0.443737, "C0-C1": 0.0}, abs=1e-6)
    assert (found.decision.branch, found.decision.side) == (Branch.REPEATS, "B")


def test_the_skipped_update_of_a_published_run() -> None:
    """Exact repeats and A = B with C many nats away: weights or update."""
    found = token(A=-11.931213379, B0=-11.931213379, B1=-11.931213379, C0=-27.088520050, C1=-27.088520050)
    assert (found.decision.branch, found.pairs[0].status.value, found.repeats[0].logprob_mae) == (Branch.WEIGHTS, "identical", 0)


def test_the_suspect_is_the_score_that_stands_apart() -> None:
    """With three pairs the suspect is the score outside the smallest gap; with equal gaps there is none."""
    result = make_batch().compare()
    pairs = {pair.name: pair for pair in result.pairs}
    assert suspect_of(pairs) == ""
    apart = published(0.0079, 0.009306, 0.0093, 0.008069, offset_a=-0.1)
    assert suspect_of({pair.name: pair for pair in apart.pairs}) == "A"
    batch = make_batch()
    everything(batch)
    assert suspect_of({pair.name: pair for pair in batch.compare().pairs}) == ""


def test_an_adapter_is_part_of_the_weights() -> None:
    """Equal base weights with other adapters are other weights."""
    batch = make_batch()
    same_weights(batch)
    batch.info = {name: replace_adapter(info, name) for name, info in batch.info.items()}
    assert batch.compare().decision.branch is Branch.WEIGHTS


def replace_adapter(info: ScoreInfo, name: str) -> ScoreInfo:
    return ScoreInfo(model=info.model, adapter="lora-1" if name[0] == "C" else "")


def test_a_copy_proves_nothing() -> None:
    """Where A and C are equal bit for bit and B is not, the report says that a copy would look the same."""
    batch = make_batch()
    batch.scores["C0"] = batch.scores["C1"] = batch.scores["A"]
    for names in (("A", "B0", "B1", "C0", "C1"), ("A", "C0")):
        copied = replace(batch, scores={name: batch.scores[name] for name in names})
        assert any("as a copy would be" in text for text in copied.compare().decision.not_proven)
    assert not any("copy" in text for text in make_batch(noise=0.0).compare().decision.not_proven)


@pytest.mark.parametrize("seed", range(3))
def test_a_few_far_tokens_of_the_trainer_are_no_update(seed: int) -> None:
    """Where three tokens are far off and all others agree, the answer is a discrete choice on the way, and what it may be else."""
    batch = make_batch(seed=seed)
    wrong = batch.scores["C0"].copy()
    wrong[[1, 4, 9], [3, 30, 17]] -= [1.2, 1.6, 2.5]
    both_c(batch, lambda scores: wrong)
    decision = batch.compare().decision
    assert (decision.branch, decision.side, decision.cause) == (Branch.SCORING, "C", None)
    assert "moe.topk_ids" in decision.next_step
    assert any("stale expert" in text for text in decision.not_proven)
