"""Reading a call: against what the library's own mask code does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.host_driver import HostDriver, cache_argument, dynamic_cache
from tests.tiny_models import make_ids, make_model
from tracer import diff_traces, trace
from tracer.hosts.transformers_inputs import InputReader, logit_rows
from tracer.hosts.transformers_taps import cache_length
from tracer.read.findings import BoundaryOutcome
from tracer.record.host import Rows


def attention_support(model: Any, call: dict[str, Any]) -> torch.Tensor:
    """First key that every row really gets weight from, in layer 0, as eager attention shows: (B, S), K where none."""
    with torch.no_grad():
        weights = model(**call, output_attentions=True).attentions[0][:, 0] > 0
    return torch.where(weights.any(-1), weights.to(torch.uint8).argmax(-1), weights.shape[-1])


def calls() -> dict[str, dict[str, Any]]:
    ids = make_ids(2, 6)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]])
    left = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    block = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).tril().bool().expand(2, 1, 6, 6)  # type: ignore[no-untyped-call]
    added = torch.zeros(2, 1, 6, 6).masked_fill(~block, torch.finfo(torch.float32).min)
    return {
        "plain": {"input_ids": ids},
        "left": {"input_ids": ids, "attention_mask": left},
        "right": {"input_ids": ids, "attention_mask": left.flip(1)},
        "packed": {"input_ids": ids, "position_ids": packed, "use_cache": False},
        "packed, cache": {"input_ids": ids, "position_ids": packed},
        "packed, mask": {"input_ids": ids, "position_ids": packed, "attention_mask": torch.ones(2, 6), "use_cache": False},
        "jump": {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 7, 8, 9]]), "use_cache": False},
        "prepared": {"input_ids": ids, "attention_mask": added},
        "prepared per kind": {"input_ids": ids, "attention_mask": {"full_attention": added}},
    }


@pytest.mark.parametrize("case", calls())
def test_visible_slots_are_the_models(case: str) -> None:
    """For every kind of call, the first visible key is the first that gets attention weight in the model."""
    model = make_model("qwen3")
    call = calls()[case]
    with HostDriver(model) as driver:
        support_BS = attention_support(model, call)
    rows, visible = driver.forward().rows, driver.given("visible_from")
    token = {(s, p): n % 6 for n, (s, p) in enumerate(zip(rows.sequence_N.tolist(), rows.position_N.tolist(), strict=True))}
    for n, (sequence, position) in enumerate(zip(rows.sequence_N.tolist(), rows.position_N.tolist(), strict=True)):
        if sequence >= 0:
            first_slot = token[sequence, position] - position
            assert first_slot + visible[n] == support_BS[n // 6, n % 6], (case, n)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_default_cache_is_foreseen(gradients: bool, checkpointing: bool) -> None:
    """Whether the model makes itself a cache, in training under checkpointing too, is what its output shows."""
    model = make_model("qwen3").train()
    if checkpointing:
        model.model.gradient_checkpointing = True
    with torch.set_grad_enabled(gradients):
        foreseen = InputReader(model)._makes_cache({})
        for module in model.modules():
            if module is not model.model and hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False
        output = model(make_ids(1, 2))
    assert (output.get(cache_argument(model)) is not None) is foreseen


def test_flash_attention_keeps_documents_apart_by_positions() -> None:
    """Where the attention function gets positions instead of a mask, restarts count despite a mask of ones and a cache."""
    model = make_model("qwen3")
    model.config._attn_implementation = "flash_attention_2"
    reader = InputReader(model)
    position_BSP = np.array([[0, 1, 0, 1, 2]])[..., None]
    for mask in (None, torch.ones(1, 5)):
        slots = reader._document_slots({"attention_mask": mask}, None, position_BSP, (1, 5, 0))
        assert slots is not None
        assert slots.tolist() == [[0, 0, 2, 2, 2]]
    assert reader._document_slots({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, None, position_BSP, (1, 5, 0)) is None
    cu_seqlens = torch.tensor([0, 3, 5])
    named = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 3, "max_length_k": 3}
    slots = reader._document_slots(named, None, np.arange(5).reshape(1, 5, 1), (1, 5, 0))
    assert slots is not None
    assert slots.tolist() == [[0, 0, 0, 3, 3]]


def unseen_masks() -> dict[str, tuple[Any, str]]:
    """Masks that no first visible position tells, and what is said of them."""
    causal = torch.ones(6, 6).tril().bool().expand(2, 1, 6, 6)
    lowest = torch.finfo(torch.float32).min
    hole, ahead, heads = causal.clone(), causal.clone(), causal.repeat(1, 2, 1, 1)
    hole[0, 0, 5, 2] = False
    ahead[0, 0, 1, 3] = True
    heads[0, 1, 5, 0] = False
    biased = torch.zeros(2, 1, 6, 6).masked_fill(~causal, lowest)
    biased[1, 0, 4, 1] = -0.5
    shown = {"hole": hole, "ahead": ahead, "heads": heads}
    added = {name: torch.zeros(mask.shape).masked_fill(~mask, lowest) for name, mask in shown.items()}
    return {
        "hole": (added["hole"], "a run of tokens"),
        "ahead": (added["ahead"], "a run of tokens"),
        "heads": (added["heads"], "not the same for all heads"),
        "biased": (biased, "adds to the scores"),
        "bool, added by eager attention": (causal, "adds to the scores"),
        "another type": (object(), "of type object cannot be read"),
        "another shape": (torch.ones(2, 6, 6), "of type Tensor cannot be read"),
    }


@pytest.mark.parametrize("case", unseen_masks())
def test_a_mask_that_cannot_be_told_is_not_told(case: str) -> None:
    """A mask that hides or adds more than a beginning is no input.visible_from: the reason stands for it, its tokens count as real."""
    mask, why = unseen_masks()[case]
    model = make_model("qwen3")
    seen = InputReader(model)._read_mask(mask, (2, 6, 0), None)
    assert seen.token_BS.all()
    assert why in seen.unseen


@pytest.mark.parametrize("mask", [[1], [1, 0, 1, 1]], ids=["narrower than the cache", "a hole in the cache"])
def test_a_decode_mask_that_hides_what_the_cache_holds_is_not_told(mask: list[int]) -> None:
    """A decode mask that hides tokens of the cache, or the row itself (the library pads narrow masks on the right), is not told."""
    model = make_model("qwen3")
    name, cache = cache_argument(model), dynamic_cache(model)
    with HostDriver(model) as driver, torch.no_grad():
        model(make_ids(1, 3), **{name: cache})
        model(make_ids(1, 1), attention_mask=torch.tensor([mask]), **{name: cache})
    assert driver.given("visible_from", 0) == [0, 0, 0]
    told = driver.forward()
    assert "input.visible_from" not in told.inputs
    assert "a run of tokens" in told.unseen["input.visible_from"]
    assert [note.code for note in driver.registry.notes] == ["mask-unreadable"]


def test_the_diff_does_not_claim_what_a_mask_hides(tmp_path: Path) -> None:
    """Two sides with other 4-D masks differ, and the line says that the mask was not seen; no absence is made of it."""
    model, ids = make_model("qwen3"), make_ids(1, 6)
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), torch.finfo(torch.float32).min)
    for name, hidden in (("a", False), ("b", True)):
        mask[0, 0, 5, 2] = torch.finfo(torch.float32).min if hidden else 0.0
        with trace(model, out=tmp_path / name, level=2, strict=True), torch.no_grad():
            model(ids, attention_mask=mask.clone(), use_cache=False)
    result = diff_traces(tmp_path / "a", tmp_path / "b")
    assert (result.exit, result.first and result.first.boundary) == (1, "layers.0.attn.core")
    assert "inputs and weights identical, mask not seen on B" in result.headline
    assert result.next_step
    same = diff_traces(tmp_path / "b", tmp_path / "b")
    assert same.exit == 0
    mask_line = next(boundary for boundary in result.boundaries if boundary.name == "input.visible_from")
    assert mask_line.outcome is BoundaryOutcome.NOT_OBSERVABLE
    assert "a run of tokens" in mask_line.text


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (2, [[0, 0, 1, 1]] * 2),
        (torch.tensor([0, 3]), [[1, 0, 0, 1]] * 2),
        (torch.tensor([[0, 1], [2, 3]]), [[1, 1, 0, 0], [0, 0, 1, 1]]),
        (torch.tensor([[True, False, False, False], [False, True, True, False]]), [[1, 0, 0, 0], [0, 1, 1, 0]]),
    ],
    ids=["last", "columns", "columns per row", "mask"],
)
def test_logit_rows(keep: Any, kept: list[list[int]]) -> None:
    """Every form of ``logits_to_keep`` the library takes gives the kept columns and their rows in order."""
    rows = Rows(np.repeat([0, 1], 4), np.tile(np.arange(4), 2))
    kept_BS, chosen = logit_rows(keep, rows, 2, 4)
    assert kept_BS.tolist() == np.array(kept, bool).tolist()
    assert chosen is not None
    assert list(zip(chosen.sequence_N.tolist(), chosen.position_N.tolist(), strict=True)) == [
        (b, s) for b in range(2) for s in range(4) if kept[b][s]
    ]


def test_length_of_a_static_cache_is_what_it_holds() -> None:
    """A preallocated cache is as long as the tokens in it."""
    model = make_model("qwen3")
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    assert cache_length(cache, None) == 0
    with torch.no_grad():
        model(make_ids(2, 3), **{cache_argument(model): cache})
    assert cache_length(cache, None) == 3
    assert cache_length(None, None) == 0
