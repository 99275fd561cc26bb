"""Tests of ``tracer.hosts.transformers_scores`` on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import make_ids, make_model
from tracer.errors import Code, ScoreError
from tracer.format.score_records import ScoreInfo, ScoreKind, ScoreName, ScoreRecord, make_score
from tracer.hosts.trainer_scores import collect_trainer
from tracer.scores.score_comparison import compare_scores


def records(lengths: tuple[tuple[int, int], ...] = ((4, 8), (7, 5))) -> list[ScoreRecord]:
    """Requests of random tokens: lengths of prompt and response."""
    return [ScoreRecord(request=f"r{q}", ids=make_ids(1, p + r, seed=q)[0].numpy(), prompt_length=p) for q, (p, r) in enumerate(lengths)]


def by_hand(model: Any, record: ScoreRecord) -> torch.Tensor:
    """float32 scores of the response from the logits of the whole sequence."""
    with torch.no_grad():
        logits = model(torch.from_numpy(record.ids)[None], use_cache=False).logits[0].float()
    scores: torch.Tensor = logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(record.ids[1:])[:, None])[:, 0]
    return scores[record.prompt_length - 1 :]


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", torch.float32), ("gemma2", torch.float32), ("qwen3_moe", torch.bfloat16)])
def test_scores_are_those_of_the_model(family: str, dtype: torch.dtype) -> None:
    """C0 and C1 are the log softmax of the logits one place before each response token, and repeat bit for bit."""
    model = make_model(family, dtype)
    for record in collect_trainer(model, records()):
        c0, c1 = record.scores[ScoreName.C0], record.scores[ScoreName.C1]
        np.testing.assert_allclose(c0.value_R, by_hand(model, record).numpy(), atol=1e-4 if dtype == torch.float32 else 0.05)
        assert np.array_equal(c0.value_R, c1.value_R)
        assert (c0.dtype, c0.info.definition.kind, str(dtype)[6:] in c0.info.source) == ("float32", ScoreKind.RAW, True)


def test_every_module_gets_its_mode_back() -> None:
    """Scoring is done in evaluation mode; afterwards, also after an error, every module is as it was, and no gradient was made."""
    model = make_model("qwen3", attention_dropout=0.5)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    first = collect_trainer(model, records())
    assert [module.training for module in model.modules()] == modes
    assert np.array_equal(first[0].scores[ScoreName.C0].value_R, first[0].scores[ScoreName.C1].value_R)
    with pytest.raises(IndexError):
        collect_trainer(model, ScoreRecord(request="r", ids=np.array([1, 99999]), prompt_length=1))
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()


def broken(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A model that returns its logits otherwise."""
    model = make_model("qwen3")
    forward = model.forward

    def changed(input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        output = forward(input_ids=input_ids, use_cache=use_cache)
        output.logits = change(output.logits)
        return output

    model.forward = changed
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z.roll(1, 1),
        lambda z: z.roll(-1, 1),
        lambda z: z.flip(1),
        lambda z: z - z.mean(dim=1, keepdim=True),
        lambda z: z[:, 2:],
        lambda z: z[0],
    ],
    ids=["late", "early", "reversed", "not causal", "shorter", "no batch"],
)
def test_a_wrong_shift_is_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Logits that are a token off in either direction, reversed, that see later tokens, or that are not there are refused."""
    with pytest.raises(ScoreError) as refused:
        collect_trainer(broken(change), records())
    assert refused.value.code is Code.SCORES_COLLECT


def test_what_is_kept_besides() -> None:
    """Full logits of some tokens and the most likely tokens on request; other scores, positions and the mask stay."""
    model = make_model("qwen3")
    given = records()[0].with_scores({ScoreName.A: make_score([-1.0] * 8)})
    (record,) = collect_trainer(model, given, logits=3, argmax=True, repeats=1, info=ScoreInfo(model="d", source="mine"))
    assert set(record.scores) == {ScoreName.A, ScoreName.C0}
    score = record.scores[ScoreName.C0]
    assert (score.info.model, score.info.source, score.info.definition.kind) == ("d", "mine", ScoreKind.RAW)
    assert record.logits is not None
    assert (record.logits.of, record.logits.row_L.tolist(), record.logits.value_LV.shape) == (ScoreName.C0, [0, 4, 7], (3, 512))
    assert score.argmax_R is not None
    np.testing.assert_array_equal(record.logits.value_LV.argmax(-1), score.argmax_R[record.logits.row_L])
    shifted = torch.from_numpy(record.logits.value_LV).log_softmax(-1)[range(3), record.response[[0, 4, 7]]]
    np.testing.assert_allclose(shifted, score.value_R[[0, 4, 7]], atol=1e-5)


def test_position_ids_are_those_of_the_record() -> None:
    """Positions other than 0, 1, 2 reach the model."""
    model = make_model("gpt2")
    (plain,) = collect_trainer(model, records()[:1])
    moved = ScoreRecord(request="r0", ids=plain.ids, prompt_length=4, positions=np.arange(12) + 5)
    (other,) = collect_trainer(model, moved)
    assert np.abs(plain.scores[ScoreName.C0].value_R - other.scores[ScoreName.C0].value_R).max() > 1e-3


def test_requests_without_a_response() -> None:
    """A request without a response has no score to take and stops nobody."""
    made = collect_trainer(make_model("qwen3"), records(((4, 0), (3, 2))), argmax=True)
    assert [len(record.scores[ScoreName.C0].value_R) for record in made] == [0, 2]
    with pytest.raises(ScoreError) as refused:
        collect_trainer(make_model("qwen3"), made, repeats=3)
    assert refused.value.code is Code.SCORES_COLLECT


def test_logits_cut_over_the_vocabulary() -> None:
    """Logits that come back sharded over the vocabulary are scored through the global normaliser, with the same result."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    plain = collect_trainer(make_model("qwen3"), records())
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        cut = collect_trainer(broken(lambda z: DTensor.from_local(z, mesh, [Shard(2)])), records(), logits=2, argmax=True)
    finally:
        dist.destroy_process_group()
    for a, b in zip(plain, cut, strict=True):
        np.testing.assert_allclose(a.scores[ScoreName.C0].value_R, b.scores[ScoreName.C0].value_R, atol=1e-5)
        assert b.logits is not None
        assert b.logits.value_LV.shape == (2, 512)


def test_a_full_round() -> None:
    """Two attention implementations of one model as engine and trainer: scored, compared, agreed."""
    engine = [
        record.with_scores({ScoreName.B0: record.scores[ScoreName.C0], ScoreName.B1: record.scores[ScoreName.C1]})
        for record in collect_trainer(make_model("qwen3", attention="sdpa"), records())
    ]
    result = compare_scores(collect_trainer(make_model("qwen3"), engine))
    assert (result.exit, result.pairs[0].name) == (0, "B-C")
