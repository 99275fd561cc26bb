"""The transformers host on tiny real models: rows of every kind of call, modules, parameters, compiled models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.host_driver import HostDriver, cache_argument, dynamic_cache
from tests.tiny_models import class_name, make_ids, make_model
from tracer.errors import Code, HostError, MapError
from tracer.hosts import find_host
from tracer.record.boundaries import Source
from tracer.record.host import Forward, SkippedForward


@pytest.fixture(scope="module")
def model() -> Any:
    made = make_model("qwen3")
    made.generation_config.eos_token_id = None
    return made


def run(model: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


def left_padded(rows: list[torch.Tensor], positions: bool = True) -> dict[str, torch.Tensor]:
    columns = max(len(row) for row in rows)
    ids, mask = torch.zeros(2, len(rows), columns, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, columns - len(row) :] = row
        mask[i, columns - len(row) :] = 1
    call = {"input_ids": ids, "attention_mask": mask}
    return {**call, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions else call


def packed(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids.reshape(1, -1), "position_ids": torch.arange(ids.shape[1]).repeat(len(ids))[None]}


# ------------------------------------------------------------------------------------------------ rows of one call


def test_padding_on_any_side_is_no_row(model: Any) -> None:
    """Rows are numbered by token inside their sequence, whatever side the padding is on, and padding is counted."""
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    with HostDriver(model) as driver:
        run(model, make_ids(3, 4), attention_mask=mask)
    assert driver.rows() == [None, ("f0.r0.d0", 0), ("f0.r0.d0", 1), None, None, None, ("f0.r1.d0", 0), ("f0.r1.d0", 1)] + [
        ("f0.r2.d0", n) for n in range(4)
    ]
    assert driver.forward().skipped == {"padding": 4}
    assert driver.given("visible_from") == [0] * 12
    assert driver.ids("f0.r0.d0") == make_ids(3, 4)[0, 1:3].tolist()


def test_positions_are_the_models_own(model: Any) -> None:
    """F01: without position ids the model counts from the left edge, and ``input.positions`` says so."""
    rows = [make_ids()[0, :6], make_ids()[1, :4]]
    with HostDriver(model) as driver:
        run(model, **left_padded(rows))
        run(model, **left_padded(rows, positions=False))
    assert driver.given("positions", 0)[8:] == [0, 1, 2, 3]
    assert driver.given("positions", 1)[8:] == [2, 3, 4, 5]
    assert [row[1] for row in driver.rows(1)[8:] if row] == [0, 1, 2, 3]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("extra", "apart"),
    [
        ({"use_cache": False}, True),
        ({"use_cache": False, "attention_mask": torch.ones(1, 8, dtype=torch.long)}, False),
        ({}, False),
    ],
    ids=["no mask", "mask of ones", "cache by default"],
)
def test_packed_documents_see_each_other_unless_kept_apart(attention: str, extra: dict[str, Any], apart: bool) -> None:
    """F04: restarting positions make documents; ``input.visible_from`` agrees with what the model's output depends on."""
    model = make_model("qwen3", attention=attention)
    call = packed(make_ids(2, 4))
    other = {**call, "input_ids": call["input_ids"].clone()}
    other["input_ids"][0, 1] += 1
    with HostDriver(model) as driver:
        first = run(model, **call, **extra).logits
        second = run(model, **other, **extra).logits
    assert driver.rows(0)[4] == ("f0.r0.d1", 0)
    assert driver.given("visible_from") == [0] * 4 + ([0] * 4 if apart else [-4] * 4)
    assert torch.equal(first[0, 4:], second[0, 4:]) is apart
    assert {driver.registry[n].row for n in range(2)} == {"0/0"}


def test_positions_that_run_on_make_one_document(model: Any) -> None:
    """F05: a packed row whose positions do not restart is one sequence, in the same batch row as the two it should be."""
    with HostDriver(model) as driver:
        run(model, make_ids(1, 8), position_ids=torch.arange(8)[None])
    assert driver.rows() == [("f0.r0.d0", n) for n in range(8)]


@pytest.mark.parametrize(
    ("positions", "documents"),
    [
        ([1, 2, 3, 1, 2], 2),  # restart elsewhere than at 0
        ([0, 0, 1, 2, 0], 3),  # a document of one token
        ([0, 1, 5, 6, 7], 1),  # a jump is a wrong position, no document
        ([5, 5, 5, 5, 5], 1),  # so is standing still
    ],
)
def test_documents_begin_where_positions_restart(model: Any, positions: list[int], documents: int) -> None:
    """A document begins where a position falls or is 0, and nowhere else."""
    with HostDriver(model) as driver:
        run(model, make_ids(1, 5), position_ids=torch.tensor([positions]), use_cache=False)
    assert len(driver.registry) == documents


def test_documents_from_the_user_and_from_cu_seqlens(model: Any) -> None:
    """``sequences=`` and flash-attention keywords say where documents begin; they alone keep nothing apart in eager attention."""
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    with HostDriver(model) as driver:
        run(model, make_ids(1, 8), cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=5, max_length_k=5)
        driver.registry.give_lengths([[2, 4]])
        run(model, make_ids(1, 8), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0]]))
    assert [row and row[0] for row in driver.rows(0)] == ["f0.r0.d0"] * 3 + ["f0.r0.d1"] * 5
    assert driver.given("visible_from", 0) == [0] * 3 + [-3] * 5
    assert [row and row[0] for row in driver.rows(1)] == [None] + ["f1.r0.d0"] * 2 + ["f1.r0.d1"] * 4 + [None]


def test_prepared_masks_are_read() -> None:
    """A 4-D mask gives padding and documents: its diagonal and its first visible key."""
    model = make_model("qwen3", attention="sdpa")
    block = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2), torch.zeros(1, 1)).tril()  # type: ignore[no-untyped-call]
    float_mask = torch.zeros(1, 1, 6, 6).masked_fill(block == 0, torch.finfo(torch.float32).min)
    with HostDriver(model) as driver:
        for mask in (block.bool()[None, None], float_mask):
            run(model, make_ids(1, 6), attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 0, 1, 0]]))
    for number in (0, 1):
        assert [row and row[0] for row in driver.rows(number)] == [f"f{number}.r0.d0"] * 3 + [f"f{number}.r0.d1"] * 2 + [None]
        assert driver.given("visible_from", number) == [0] * 6


def test_embeddings_have_no_ids(model: Any) -> None:
    """A call with ``inputs_embeds`` labels its rows and knows no ids, also when ids follow later."""
    name = cache_argument(model)
    with HostDriver(model) as driver:
        output = run(model, inputs_embeds=model.get_input_embeddings()(make_ids(1, 3)), use_cache=True)
        run(model, make_ids(1, 1), **{name: output[1] if isinstance(output, tuple) else output[name]})
    assert driver.forward(0).ids_N is None
    assert driver.rows(1) == [("f0.r0.d0", 3)]
    assert driver.ids("f0.r0.d0") == []


def test_float_context_salts_the_sequences(model: Any) -> None:
    """Further float arguments condition the rows, so equal ids with other pixels get another salt."""
    host = find_host(model)
    driver = HostDriver(model)
    for pixels in (torch.zeros(2), torch.ones(2)):
        host.begin_forward((make_ids(1, 2),), {"pixel_values": pixels}, driver.registry)
    assert driver.registry[0].salt != driver.registry[1].salt
    assert driver.registry[0].salt


def test_call_that_fits_no_signature_is_skipped(model: Any) -> None:
    """A call the model itself will refuse is skipped, not an error of ours."""
    assert isinstance(find_host(model).begin_forward((), {}, HostDriver(model).registry), SkippedForward)


def test_requests_name_sequences_in_batch_order(model: Any) -> None:
    """Names go to new sequences in batch order, document order inside a packed row; later steps keep them."""
    name = cache_argument(model)
    cache = dynamic_cache(model)
    with HostDriver(model) as driver:
        driver.registry.name_requests(["a", "b"])
        run(model, make_ids(2, 3), **{name: cache})
        run(model, make_ids(2, 1), **{name: cache})
        driver.registry.name_requests(["c", "d"])
        run(model, **packed(make_ids(2, 3)))
    assert [driver.registry[n].request for n in range(4)] == ["a", "b", "c", "d"]


# ------------------------------------------------------------------------------------------------ caches


@pytest.mark.parametrize("sizes", [[5, 1, 1, 1], [3, 4, 1], [8]])
def test_chunks_and_steps_continue_their_sequences(model: Any, sizes: list[int]) -> None:
    """F67: the same tokens in any chunks are the same (sequence, position) rows with the same ids."""
    ids, name, cache, start = make_ids(2, 8), cache_argument(model), dynamic_cache(model), 0
    with HostDriver(model) as driver:
        for size in sizes:
            run(model, ids[:, start : start + size], **{name: cache})
            start += size
    seen = [row for number in range(len(sizes)) for row in driver.rows(number)]
    assert sorted(seen, key=str) == sorted([(f"f0.r{b}.d0", n) for b in range(2) for n in range(8)], key=str)
    assert [driver.ids(label) for label in driver.labels()] == ids.tolist()


def test_shared_decode_position_is_shown(model: Any) -> None:
    """F03: a padded batch decoded with one position for all rows keeps its row positions and shows the given ones."""
    name, cache = cache_argument(model), dynamic_cache(model)
    call = left_padded([make_ids()[0, :6], make_ids()[1, :4]])
    mask = torch.cat([call["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    with HostDriver(model) as driver:
        run(model, **call, **{name: cache})
        run(model, make_ids(2, 1), attention_mask=mask, position_ids=torch.tensor([[6], [6]]), **{name: cache})
    assert driver.rows(1) == [("f0.r0.d0", 6), ("f0.r1.d0", 4)]
    assert driver.given("positions", 1) == [6, 6]
    assert driver.given("visible_from", 1) == [0, 0]


def test_padding_that_a_later_mask_uncovers_is_shown(model: Any) -> None:
    """A decode mask of ones over a left-padded cache lets the row see padding: ``visible_from`` is negative by as much."""
    name, cache = cache_argument(model), dynamic_cache(model)
    with HostDriver(model) as driver:
        run(model, **left_padded([make_ids()[0, :6], make_ids()[1, :4]]), **{name: cache})
        run(model, make_ids(2, 1), attention_mask=torch.ones(2, 7, dtype=torch.long), **{name: cache})
    assert driver.given("visible_from", 1) == [0, -2]


def test_cache_with_unseen_tokens_starts_in_the_middle(model: Any) -> None:
    """A cache filled before the trace gives sequences that start late, and a note says so once."""
    name, cache = cache_argument(model), dynamic_cache(model)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    run(model, make_ids(2, 3), attention_mask=mask[:, :3], **{name: cache})
    with HostDriver(model) as driver:
        run(model, make_ids(2, 1), attention_mask=mask, **{name: cache})
        run(model, make_ids(2, 1), **{name: cache})
    assert driver.rows(0) == [("f0.r0.d0", 2), ("f0.r1.d0", 3)]
    assert driver.rows(1) == [("f0.r0.d0", 3), ("f0.r1.d0", 4)]
    assert [driver.registry[n].start for n in range(2)] == [2, 3]
    assert [note.code for note in driver.registry.notes] == ["cache-unseen"]


def test_copied_cropped_and_reset_caches_are_followed(model: Any) -> None:
    """Copies of a prefix cache share its sequence until their tokens differ; crop goes back; reset begins anew."""
    name, cache = cache_argument(model), dynamic_cache(model)
    ids = make_ids(1, 8)
    with HostDriver(model) as driver:
        run(model, ids[:, :4], **{name: cache})
        for tail in ([5, 6], [5, 7], [5, 6]):
            run(model, torch.tensor([tail]), **{name: copy.deepcopy(cache)})
        cache.crop(-2)
        run(model, ids[:, 2:4], **{name: cache})
        cache.crop(-1)
        run(model, torch.tensor([[9]]), **{name: cache})
    assert [driver.rows(n)[0] for n in range(1, 4)] == [("f0.r0.d0", 4), ("f2.r0.d0", 4), ("f0.r0.d0", 4)]
    assert driver.rows(4) == [("f0.r0.d0", 2), ("f0.r0.d0", 3)]
    assert driver.rows(5) == [("f5.r0.d0", 3)]
    assert driver.ids("f5.r0.d0") == [*ids[0, :3].tolist(), 9]
    assert driver.ids("f2.r0.d0") == [*ids[0, :4].tolist(), 5, 7]
    assert not [key for key in vars(cache) if "tracer" in key]


def test_cache_edits_move_the_sequences(model: Any) -> None:
    """Repeat, select and reorder of a cache carry the histories of its rows along; a shared prefix forks."""
    name, cache = cache_argument(model), dynamic_cache(model)
    with HostDriver(model) as driver:
        run(model, make_ids(2, 3), **{name: cache})
        cache.batch_repeat_interleave(2)
        run(model, torch.tensor([[3], [4], [5], [6]]), **{name: cache})
        cache.batch_select_indices(torch.tensor([1, 2]))
        run(model, torch.tensor([[7], [8]]), **{name: cache})
        cache.reorder_cache(torch.tensor([1, 0]))
        run(model, torch.tensor([[9], [10]]), **{name: cache})
    assert [row and row[0] for row in driver.rows(1)] == ["f0.r0.d0", "f1.r1.d0", "f0.r1.d0", "f1.r3.d0"]
    assert driver.rows(2) == [("f1.r1.d0", 4), ("f0.r1.d0", 4)]
    assert driver.rows(3) == [("f0.r1.d0", 5), ("f1.r1.d0", 5)]
    assert driver.ids("f1.r1.d0") == [*make_ids(2, 3)[0].tolist(), 4, 7, 10]


# ------------------------------------------------------------------------------------------------ generate


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"prefill_chunk_size": 2},
    ],
    ids=str,
)
def test_generate_adds_a_row_per_token(model: Any, options: dict[str, Any]) -> None:
    """Every token that ``generate`` returns is known, the last sampled one too, and all but that one are rows."""
    prompts = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask = (prompts != 0).long()
    if "prefill_chunk_size" in options:
        prompts, mask = prompts[:, 2:], mask[:, 2:]
    torch.manual_seed(0)
    with HostDriver(model) as driver:
        returned = model.generate(prompts, attention_mask=mask, max_new_tokens=3, **{"do_sample": False, **options})
    known = {tuple(driver.ids(label)) for label in driver.labels()}
    for row in returned.tolist():
        assert tuple(token for token in row if token) in known
    every = {(label, position) for number in range(len(driver.forwards)) for label, position in filter(None, driver.rows(number))}
    for label in driver.labels():
        assert (label, len(driver.ids(label)) - 1) not in every or "num_beams" in options or options.get("use_cache") is False
    for number in range(len(driver.forwards)):
        recorded = [row for row in driver.rows(number) if row]
        assert len(recorded) == len(set(recorded))
        assert set(driver.given("visible_from", number)) == {0}


def test_generate_declares_what_it_does_not_compute(model: Any) -> None:
    """Prompt rows without logits and the last sampled token are declared, each with its reason."""
    prompts = torch.tensor([[0, 5, 6], [7, 8, 9]])
    with HostDriver(model) as driver:
        model.generate(prompts, attention_mask=(prompts != 0).long(), max_new_tokens=2, do_sample=False)
    declared = {(entry.sequence, entry.reason): (entry.positions, entry.boundaries) for entry in driver.host.not_computed()}
    logits = ("lm_head.raw", "lm_head", "scorer.logprobs")
    assert declared == {
        ("f0.r0.d0", "logits not requested"): (((0, 1),), logits),
        ("f0.r1.d0", "logits not requested"): (((0, 2),), logits),
        ("f0.r0.d0", "last sampled token"): (((3, 4),), ()),
        ("f0.r1.d0", "last sampled token"): (((4, 5),), ()),
    }


def test_rows_after_the_end_of_a_sampled_sequence_are_skipped(model: Any) -> None:
    """What ``generate`` feeds behind an end token, while other rows go on, is counted and not recorded."""
    prompts = torch.tensor([[3, 4], [5, 6]])
    mask = torch.ones_like(prompts)
    end = int(model.generate(prompts, attention_mask=mask, max_new_tokens=2, do_sample=False)[0, 3])
    with HostDriver(model) as driver:
        returned = model.generate(prompts, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=end, pad_token_id=0)
    assert returned[0, 4:].eq(0).all()
    assert driver.rows(2) == [("f0.r0.d0", 3), ("f0.r1.d0", 3)]
    assert driver.rows(3) == [None, ("f0.r1.d0", 4)]
    assert driver.forward(3).skipped == {"after the end of a sampled sequence": 1}
    assert driver.ids("f0.r0.d0") == returned[0, :4].tolist()


def test_generate_that_compiles_is_refused_at_once(model: Any) -> None:
    """Where ``generate`` will decode compiled, the prefill is refused with the remedy; forced eager, every step is seen."""
    from transformers.generation.configuration_utils import CompileConfig

    settings: Any = CompileConfig(backend="eager", fullgraph=False)
    settings._compile_all_devices = True  # compile on the CPU too
    static = {"cache_implementation": "static", "compile_config": settings, "max_new_tokens": 3, "do_sample": False}
    prompts = make_ids(2, 4)
    mask = torch.ones_like(prompts)
    with pytest.raises(HostError) as caught, HostDriver(model):
        model.generate(prompts, attention_mask=mask, **static)
    assert caught.value.code is Code.HOST_UNSUPPORTED
    assert "disable_compile=True" in caught.value.remedy
    with torch.compiler.set_stance("force_eager"), HostDriver(model) as driver:
        model.generate(prompts, attention_mask=mask, **static)
    assert len(driver.forwards) == 3
    del model._compiled_call
    torch._dynamo.reset()


@pytest.mark.parametrize("keyword", [True, False])
def test_a_forward_that_passes_everything_on(keyword: bool, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass whose forward takes ``*a, **k`` is read by the names of the class that it derives from."""

    class Passing(type(model)):  # type: ignore[misc]
        def forward(self, *a: Any, **k: Any) -> Any:
            return super().forward(*a, **k)

    monkeypatch.setattr(model, "__class__", Passing)
    with HostDriver(model) as driver:
        model(input_ids=make_ids(1, 4)) if keyword else model(make_ids(1, 4))
    assert driver.rows() == [("f0.r0.d0", position) for position in range(4)]


# ------------------------------------------------------------------------------------------------ logits


@pytest.mark.parametrize("keep", [0, 1, 3, torch.tensor([1, 3]), torch.tensor([3, 1])], ids=str)
def test_rows_of_the_logits_are_the_kept_ones(model: Any, keep: Any) -> None:
    """``logits_to_keep`` decides the rows of the head's output; each has the logits that a full run has at that row."""
    ids = make_ids(2, 4)
    full = run(model, ids).logits.reshape(8, -1)
    with HostDriver(model) as driver:
        logits = run(model, ids, logits_to_keep=keep).logits
    for source in (Source("lm_head", "lm_head"), Source("lm_head", "", leaf="output.logits")):
        rows = driver.host.leaf_rows(driver.forward(), source, tuple(logits.shape[:2]))
        assert rows is not None
        where = torch.tensor(rows.sequence_N * 4 + rows.position_N)
        torch.testing.assert_close(full[where], logits.reshape(len(where), -1))
    assert driver.host.leaf_rows(driver.forward(), Source("final_norm", "model.norm"), (2, 4)) is driver.forward().rows
    assert driver.host.leaf_rows(driver.forward(), Source("layers.0.moe.x", "model.layers.0.mlp"), (8,)) is driver.forward().rows
    assert driver.host.leaf_rows(driver.forward(), Source("final_norm", "model.norm"), (2, 5)) is None


def test_rows_computed_elsewhere_are_not_declared(model: Any) -> None:
    """A row whose logits were left out once and computed another time is not declared missing."""
    name, cache = cache_argument(model), dynamic_cache(model)
    ids = make_ids(1, 4)
    with HostDriver(model) as driver:
        run(model, ids, logits_to_keep=1, **{name: cache})
        cache.crop(-3)
        run(model, ids[:, 1:], **{name: cache})
    assert [(entry.positions, entry.reason) for entry in driver.host.not_computed()] == [(((0, 1),), "logits not requested")]


# ------------------------------------------------------------------------------------------------ modules, parameters, wrappers


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma2", "mixtral"])
def test_modules_and_parameters_have_the_models_names(family: str) -> None:
    """Paths are ``named_modules``; parameters and all buffers come once per name, tied ones under every name."""
    model = make_model(family, tie_word_embeddings=True)
    host = find_host(model)
    assert dict(host.modules()) == dict(model.named_modules(remove_duplicate=False))
    assert host.root_class() == class_name(family)
    found = {entry.parameter: entry for entry in host.parameters()}
    expected = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert found.keys() == expected.keys()
    assert all(entry.tensor is not None and entry.shape == tuple(expected[name].shape) for name, entry in found.items())
    tied = found["lm_head.weight"].tensor, found["model.embed_tokens.weight"].tensor
    assert tied[0] is not None
    assert tied[1] is not None
    assert tied[0].data_ptr() == tied[1].data_ptr()
    assert found["model.rotary_emb.inv_freq"].buffer


def test_wrappers_are_looked_through() -> None:
    """torch.compile, checkpoint wrappers and a model inside both keep the plain paths and class."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = make_model("qwen3")
    plain = dict(model.named_modules())
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    model.model.layers[2] = torch.compile(model.model.layers[2], backend="eager")
    compiled = torch.compile(model, backend="eager")
    for wrapped in (model, compiled):
        host = find_host(wrapped)
        assert dict(host.modules()) == plain
        assert host.root_class() == "Qwen3ForCausalLM"
    assert host.root() is compiled
    assert {entry.parameter for entry in host.parameters()} == {name for name, _ in make_model("qwen3").named_parameters()} | {
        name for name, _ in make_model("qwen3").named_buffers()
    }


def test_compiled_regions_are_named_with_a_remedy() -> None:
    """Why hooks may stay silent is said for every module inside a compiled region, and for no other."""
    model = make_model("qwen3")
    assert find_host(model).compiled_reason("model.layers.0") == ""
    model.model.layers[2].compile(backend="eager")
    model.model.layers[1].mlp.forward = torch.compile(model.model.layers[1].mlp.forward, backend="eager")
    host = find_host(model)
    assert "model.layers.2 is compiled" in host.compiled_reason("model.layers.2.mlp.down_proj")
    assert "model.layers.1.mlp is compiled" in host.compiled_reason("model.layers.1.mlp.act_fn")
    assert "force_eager" in host.compiled_reason("model.layers.2")
    assert host.compiled_reason("model.layers.0") == host.compiled_reason("model.layers.1") == ""
    assert "the model is compiled" in find_host(torch.compile(make_model("qwen3"), backend="eager")).compiled_reason("model.norm")


def test_columns_of_packed_projections_come_from_the_config(model: Any) -> None:
    """Columns of q, k and v are heads times head size; other boundaries are left to the map."""
    host = find_host(model)
    assert [host.local_columns(f"layers.0.attn.{part}") for part in "qkv"] == [64, 32, 32]
    assert host.local_columns("layers.0.mlp.gate_up") is None


def test_axes_of_whole_sequences_give_them_a_scope(model: Any) -> None:
    """A data-parallel coordinate of the mesh given is the scope of this process's sequences; a tensor-parallel one is none."""
    for mesh, scope in (({"dp": (1, 2)}, "dp=1"), ({"dp": (0, 2), "tp": (1, 2)}, "dp=0"), ({"tp": (1, 2)}, "")):
        driver = HostDriver(model)
        find_host(model, mesh=mesh).begin_forward((make_ids(1, 2),), {}, driver.registry)
        assert driver.registry[0].scope == scope


def test_context_parallel_rows_are_where_their_position_ids_say(model: Any) -> None:
    """Under a ``cp`` axis every batch row is one sequence, rows stand at their position ids, ids are recorded there, and rows
    whose next token another process has are declared to have no score here."""
    driver, host = HostDriver(model), find_host(model, mesh={"cp": (0, 2)})
    ids, positions = make_ids(1, 4), torch.tensor([[0, 1, 6, 7]])
    forward = host.begin_forward((ids,), {"position_ids": positions, "use_cache": False}, driver.registry)
    assert isinstance(forward, Forward)
    assert forward.rows.position_N.tolist() == [0, 1, 6, 7]
    assert driver.registry.look_up(forward.rows.sequence_N, forward.rows.position_N)[0].tolist() == ids[0].tolist()
    declared = list(host.not_computed())
    assert [(entry.positions, entry.boundaries) for entry in declared] == [(((1, 2), (7, 8)), ("scorer.logprobs",))]


def test_context_parallel_calls_without_positions_are_refused(model: Any) -> None:
    """Under a ``cp`` axis a call that does not say its positions, or has a cache, cannot be labelled and is refused."""
    driver, host = HostDriver(model), find_host(model, mesh={"cp": (0, 2)})
    with pytest.raises(HostError, match="position_ids") as caught:
        host.begin_forward((make_ids(1, 4),), {}, driver.registry)
    assert caught.value.code is Code.HOST_UNSUPPORTED


def test_leaves_with_a_part_of_the_sequence_have_those_rows(model: Any) -> None:
    """Under sequence parallelism a leaf with this process's part of the tokens is labelled with them; any other number of
    rows stays unexplained."""
    driver, host = HostDriver(model), find_host(model, mesh={"tp": (1, 2)})
    forward = host.begin_forward((make_ids(2, 5),), {}, driver.registry)
    assert isinstance(forward, Forward)
    rows = host.leaf_rows(forward, Source("layers.0.attn.norm", "model.layers.0.input_layernorm"), (2, 2))
    assert rows is not None
    assert rows.position_N.tolist() == [3, 4, 3, 4]
    assert rows is host.leaf_rows(forward, Source("embedding", "model.layers.0"), (2, 2))
    assert host.leaf_rows(forward, Source("embedding", "model.layers.0"), (2, 4)) is None


def test_unknown_tap_is_refused(model: Any) -> None:
    """A map that asks for a tap the host does not have is told so before anything is hooked."""
    with (
        pytest.raises(MapError),
        find_host(model).taps([Source("x", "model.layers.0.self_attn", tap="rope")], lambda path, leaf, tensor: None),
    ):
        pass


# ------------------------------------------------------------------------------------------------ several processes


@pytest.fixture
def second_of_two() -> Iterator[None]:
    """This process as rank 1 of a process group of two that never communicates."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def shard_parameter(model: Any, axis: str, path: str, name: str) -> None:
    """Replace a parameter by its second half, as this process of a mesh with one axis would hold it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    module = model.get_submodule(path)
    half = getattr(module, name).data.chunk(2)[1]
    setattr(module, name, torch.nn.Parameter(DTensor.from_local(half, mesh, [Shard(0)], run_check=False), requires_grad=False))


@pytest.mark.usefixtures("second_of_two")
def test_data_parallel_processes_have_a_scope_and_their_part_of_the_weights() -> None:
    """In a process group every process is one data-parallel coordinate; a parameter sharded over it says which rows it holds."""
    model = make_model("qwen3")
    shard_parameter(model, "fsdp", "model.layers.0.mlp.up_proj", "weight")
    host = find_host(model)
    assert (host.mesh().rank, host.mesh().world_size) == (1, 2)
    driver = HostDriver(model)
    host.begin_forward((make_ids(1, 2),), {}, driver.registry)
    assert driver.registry[0].scope == "fsdp=1"
    held = {entry.parameter: entry for entry in host.parameters()}["model.layers.0.mlp.up_proj.weight"]
    assert held.shape == (128, 64)
    assert held.spans == (((64, 128),), ())
    assert held.tensor is not None
    assert torch.equal(held.tensor, make_model("qwen3").model.layers[0].mlp.up_proj.weight[64:])


@pytest.mark.usefixtures("second_of_two")
def test_a_weight_gathered_since_shows_the_part_it_showed_first() -> None:
    """FSDP may hold the whole of a parameter when the trace ends: what is fingerprinted then is the part it had at the start."""
    model = make_model("qwen3")
    shard_parameter(model, "fsdp", "model.layers.0.mlp.up_proj", "weight")
    host, name = find_host(model), "model.layers.0.mlp.up_proj.weight"
    before = {entry.parameter: entry for entry in host.parameters()}[name]
    model.model.layers[0].mlp.up_proj.weight = make_model("qwen3").model.layers[0].mlp.up_proj.weight
    after = {entry.parameter: entry for entry in host.parameters()}[name]
    assert after.spans == before.spans == (((64, 128),), ())
    assert after.tensor is not None
    assert before.tensor is not None
    assert torch.equal(after.tensor, before.tensor)
