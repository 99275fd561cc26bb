"""Tests of ``tracer.scores.importers``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tracer.errors import Code, ScoreError
from tracer.format.score_records import PolicySegment, ScoreDefinition, ScoreInfo, ScoreKind, ScoreName, ScoreRecord, make_score
from tracer.scores.importers import import_areal, import_engine_json, import_pairs, import_slime, import_trl, import_verl

RAW = ScoreInfo(definition=ScoreDefinition(kind=ScoreKind.RAW))
IDS = [[11, 12, 13, 21, 22, 23], [14, 15, 24, 25]]
PROMPTS = [3, 2]
A = [[-0.5, -0.25, -1.5], [-2.0, -0.125]]
C = [[-0.5, -0.5, -1.5], [-2.0, -0.25]]


def scores(records: list[ScoreRecord], name: ScoreName) -> list[list[float]]:
    return [record.scores[name].value_R.tolist() for record in records]


def masks(records: list[ScoreRecord]) -> list[list[bool]]:
    return [record.mask.tolist() for record in records if record.mask is not None]


def left(rows: list[list[Any]], width: int, fill: Any) -> list[list[Any]]:
    return [[fill] * (width - len(row)) + row for row in rows]


def right(rows: list[list[Any]], width: int, fill: Any) -> list[list[Any]]:
    return [row + [fill] * (width - len(row)) for row in rows]


def padded() -> tuple[torch.Tensor, ...]:
    """Prompts, their mask, responses, theirs, A and C, padded to 4 and 5, scores bfloat16."""
    prompts, responses = [row[:n] for row, n in zip(IDS, PROMPTS, strict=True)], [row[n:] for row, n in zip(IDS, PROMPTS, strict=True)]
    held, seen = right([[1] * len(row) for row in responses], 5, 0), left([[1] * n for n in PROMPTS], 4, 0)
    numbers = [torch.tensor(right(rows, 5, 0.0), dtype=torch.bfloat16) for rows in (A, C)]
    return torch.tensor(left(prompts, 4, 0)), torch.tensor(seen), torch.tensor(right(responses, 5, 9)), torch.tensor(held), *numbers


def check(records: list[ScoreRecord]) -> None:
    """The two requests above, without padding."""
    assert [record.ids.tolist() for record in records] == IDS
    assert [record.prompt_length for record in records] == PROMPTS
    assert (scores(records, ScoreName.A), scores(records, ScoreName.C0)) == (A, C)


def test_verl() -> None:
    """A verl batch loses its padding on both ends; the response mask says what counts, and the uid is the group."""
    prompts, seen, responses, held, a, c = padded()
    batch = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": torch.cat([seen, held], dim=1),
        "rollout_log_probs": a,
        "old_log_probs": c,
    }
    check(import_verl(batch))
    mask = held.clone()
    mask[0, 1] = 0  # a tool wrote it
    records = import_verl({**batch, "response_mask": mask, "uid": np.array(["p0", "p0"], object)}, {"A": RAW})
    check(records)
    assert masks(records) == [[True, False, True], [True, True]]
    assert [(record.request, record.group) for record in records] == [("0", "p0"), ("1", "p0")]
    assert (records[0].scores[ScoreName.A].info, records[0].scores[ScoreName.A].dtype) == (RAW, "bfloat16")
    assert records[0].scores[ScoreName.C0].info == ScoreInfo()


def test_trl() -> None:
    """A TRL batch loses its padding; tool tokens stay and do not count."""
    prompts, seen, responses, held, a, c = padded()
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": seen,
        "completion_ids": responses,
        "completion_mask": held,
        "sampling_per_token_logps": a,
        "old_per_token_logps": c,
    }
    check(import_trl(batch))
    tool = torch.ones_like(held)
    tool[0, 0] = 0
    records = import_trl({**batch, "tool_mask": tool})
    check(records)
    assert masks(records) == [[False, True, True], [True, True]]


def test_areal() -> None:
    """An AReaL row holds prompt and response; the engine's scores lie at their tokens, the trainer's one earlier; versions are segments."""
    tokens, attention, loss = (torch.zeros(2, 7, dtype=torch.int64) for _ in range(3))
    a, c = torch.zeros(2, 7), torch.zeros(2, 7)
    versions = torch.full((2, 7), -1)
    for n, (ids, prompt) in enumerate(zip(IDS, PROMPTS, strict=True)):
        tokens[n, : len(ids)], attention[n, : len(ids)] = torch.tensor(ids), 1
        loss[n, prompt : len(ids)] = 1
        a[n, prompt : len(ids)] = torch.tensor(A[n])
        c[n, prompt - 1 : len(ids) - 1] = torch.tensor(C[n])
        versions[n, prompt : len(ids)] = 4
    versions[0, PROMPTS[0] + 2] = 5
    batch = {"input_ids": tokens, "attention_mask": attention, "loss_mask": loss, "logprobs": a, "prox_logp": c, "versions": versions}
    records = import_areal(batch)
    check(records)
    assert [(part.start, part.version) for part in records[0].scores[ScoreName.A].info.policies] == [(0, "4"), (2, "5")]
    assert [(part.start, part.version) for part in records[1].scores[ScoreName.A].info.policies] == [(0, "4")]
    loss[0, PROMPTS[0] + 1] = 0  # a tool wrote it
    assert masks(import_areal(batch)) == [[True, False, True], [True, True]]
    for wrong in ({"advantages": a}, {"attention_mask": attention.flip(1)}):
        with pytest.raises(ScoreError) as refused:
            import_areal({**batch, **wrong})
        assert refused.value.code is Code.SCORES_IMPORT


def test_a_batch_names_the_policy_of_a_whole_sample() -> None:
    """slime's weight versions and verl's version span become A's policy where they are one number; what the caller says stands."""
    batch = {"tokens": IDS, "response_lengths": [3, 2], "rollout_log_probs": A, "weight_versions": [["7", "7"], ["7", "8"]]}
    first, second = (record.scores[ScoreName.A].info.policies for record in import_slime(batch))
    assert ([part.version for part in first], second) == (["7"], ())
    told = ScoreInfo(policies=(PolicySegment(start=0, version="9"),))
    assert import_slime(batch, {"A": told})[0].scores[ScoreName.A].info == told
    prompts, seen, responses, held, a, _ = padded()
    verl = {"prompts": prompts, "responses": responses, "attention_mask": torch.cat([seen, held], dim=1), "rollout_log_probs": a}
    records = import_verl({**verl, "param_version_start": np.array([3, 3]), "param_version_end": np.array([3, 4])})
    assert [[part.version for part in record.scores[ScoreName.A].info.policies] for record in records] == [["3"], []]


def test_slime() -> None:
    """slime's lists have no padding; the sample's index is the request."""
    batch = {
        "tokens": IDS,
        "response_lengths": [3, 2],
        "loss_masks": [[1, 0, 1], [1, 1]],
        "rollout_log_probs": A,
        "log_probs": [torch.tensor(row) for row in C],
        "sample_indices": [40, 41],
    }
    records = import_slime(batch)
    check(records)
    assert masks(records) == [[True, False, True], [True, True]]
    assert [record.request for record in records] == ["40", "41"]
    with pytest.raises(ScoreError) as refused:
        import_slime({**batch, "rollout_log_probs": None, "log_probs": None})
    assert refused.value.code is Code.SCORES_IMPORT


def base() -> list[ScoreRecord]:
    return [
        ScoreRecord(request=f"r{n}", ids=np.array(ids), prompt_length=PROMPTS[n], scores={ScoreName.A: make_score(A[n])}, group="g")
        for n, ids in enumerate(IDS)
    ]


def test_pairs() -> None:
    """``{request: (logprobs, mask)}`` covers responses or whole sequences; tokens come from the records of the same requests."""
    whole = {f"r{n}": (torch.tensor([0.0] * PROMPTS[n] + C[n]), torch.tensor([0] * PROMPTS[n] + [1] * len(C[n]))) for n in (1, 0)}
    short = {f"r{n}": (C[n], [1] * len(C[n])) for n in (1, 0)}
    for batch in (whole, short):
        records = import_pairs(batch, "C0", base())
        assert [record.request for record in records] == ["r1", "r0"]
        assert scores(records, ScoreName.C0) == C[::-1]
        assert all(all(mask) for mask in masks(records))
    for wrong, code in (
        ({"r0": short["r0"]}, Code.SCORES_REQUESTS),
        ({**short, "r1": ([0.0], [1])}, Code.SCORES_IMPORT),
        ({**short, "r1": 3}, Code.SCORES_IMPORT),
    ):
        with pytest.raises(ScoreError) as refused:
            import_pairs(wrong, "C0", base())
        assert refused.value.code is code


def native(n: int, *, generated: bool) -> dict[str, Any]:
    """A native ``/generate`` answer: the prompt with a generated response, or a replay of both."""
    ids, values = IDS[n], [None, *[-1.0] * (PROMPTS[n] - 1), *A[n]]
    triples = [[value, token, None] for value, token in zip(values, ids, strict=True)]
    cut = PROMPTS[n] if generated else len(ids)
    return {
        "text": "",
        "meta_info": {"id": f"x{n}", "weight_version": "7", "input_token_logprobs": triples[:cut], "output_token_logprobs": triples[cut:]},
    }


def completion(n: int, *, generated: bool) -> dict[str, Any]:
    """A completions answer with token ids."""
    prompt = IDS[n][: PROMPTS[n]] if generated else IDS[n]
    values = [-1.0] * (PROMPTS[n] - 1) + A[n]
    entries = [
        None,
        *({str(token): {"logprob": value, "rank": 1}, "3": {"logprob": -0.01}} for token, value in zip(prompt[1:], values, strict=False)),
    ]
    choice = {
        "prompt_token_ids": prompt,
        "token_ids": IDS[n][len(prompt) :],
        "logprobs": {"token_logprobs": A[n]},
        "prompt_logprobs": entries,
    }
    return {"id": f"x{n}", "choices": [choice]}


@pytest.mark.parametrize("answer", [native, completion])
def test_engine_json(answer: Any) -> None:
    """A's tokens and scores come out of what the engine generated; B's out of the scores of the input, at the response's end."""
    generated = import_engine_json([answer(n, generated=True) for n in (0, 1)], "A")
    assert [record.ids.tolist() for record in generated] == IDS
    assert [record.prompt_length for record in generated] == PROMPTS
    assert scores(generated, ScoreName.A) == A
    replayed = import_engine_json([answer(n, generated=False) for n in (0, 1)], "B0", {"B0": RAW}, base=generated)
    assert scores(replayed, ScoreName.B0) == A
    assert replayed[0].scores[ScoreName.B0].info == RAW


@pytest.mark.parametrize("answer", [native, completion])
def test_engine_json_of_other_tokens(answer: Any) -> None:
    """A replay of other ids, of fewer requests, or one without scores is refused with its code."""
    generated = import_engine_json([answer(n, generated=True) for n in (0, 1)], "A")
    swapped = [answer(n, generated=False) for n in (1, 0)]
    with pytest.raises(ScoreError) as refused:
        import_engine_json(swapped, "B0", base=generated)
    assert refused.value.code is Code.SCORES_IDS
    for answers, known in (
        (swapped[:1], generated),
        (swapped, []),
        ([{"choices": [{}]}, {"choices": [{}]}], generated),
        ([{"meta_info": {}}] * 2, generated),
    ):
        with pytest.raises(ScoreError) as lacking:
            import_engine_json(answers, "B0", base=known)
        assert lacking.value.code is Code.SCORES_IMPORT


@pytest.mark.parametrize(
    ("importer", "batch"),
    [(import_verl, {"prompts": [[1]]}), (import_trl, {"prompt_ids": [[1]]}), (import_slime, {"tokens": [[1, 2]]})],
)
def test_a_missing_field_is_named(importer: Any, batch: dict[str, Any]) -> None:
    """A batch that lacks a field is refused, naming the field."""
    with pytest.raises(ScoreError) as refused:
        importer(batch)
    assert refused.value.code is Code.SCORES_IMPORT
    assert refused.value.expected
