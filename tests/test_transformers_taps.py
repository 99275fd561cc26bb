"""The attention and convolution taps and the watch over caches: what they see, and that they leave nothing behind."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from tests.host_driver import HostDriver, cache_argument, dynamic_cache
from tests.tiny_models import FAMILIES, make_ids, make_model
from tracer.hosts import find_host
from tracer.record.boundaries import Source


def attention_paths(model: Any) -> list[str]:
    return [path for path, _ in model.named_modules() if path.endswith((".self_attn", ".attn"))]


def tap_all(model: Any) -> list[Source]:
    return [Source(f"layers.{n}.attn.q_rope", path, tap="attention", leaf="q") for n, path in enumerate(attention_paths(model))]


def run(model: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, "eager") for family in FAMILIES if family != "qwen3_next"), ("qwen3", "sdpa"), ("deepseek_v3", "sdpa"), ("gpt2", "sdpa")],
)
def test_tap_sees_every_attention_call_and_changes_nothing(family: str, attention: str) -> None:
    """q, k, v and output of every layer are seen; logits and config are bitwise what they are without the tap."""
    model = make_model(family, attention=attention)
    ids = make_ids(2, 12)
    plain = run(model, ids).logits
    before = copy.deepcopy(model.config.to_dict())
    original = AttentionInterface.get_interface
    with HostDriver(model, tap_all(model)) as driver:
        traced = run(model, ids).logits
    assert torch.equal(plain, traced)
    assert model.config.to_dict() == before
    assert model.config._attn_implementation == attention
    assert AttentionInterface.get_interface is original
    seen = [(path, leaf) for path, leaf, _ in driver.tapped]
    assert seen == [(path, leaf) for path in attention_paths(model) for leaf in ("q", "k", "v", "output")]
    for _, leaf, tensor in driver.tapped:
        rows = (tensor.shape[0], tensor.shape[1 if leaf == "output" else 2])
        assert rows == (2, 12)


def test_the_convolution_tap_sees_prefill_and_steps() -> None:
    """What leaves a linear attention's convolution is seen for this call's columns only, in a prefill, a chunk behind a cache and a
    decoded token, bitwise what one prefill gives; the modeling file is as before."""
    model = make_model("qwen3_next")
    file = sys.modules[type(model).__module__]
    before, name, cache, ids = dict(vars(file)), cache_argument(model), dynamic_cache(model), make_ids(2, 12)
    sources = [Source("layers.0.linear_attn.conv", "model.layers.0.linear_attn", tap="convolution", leaf="output")]
    with HostDriver(model, sources) as driver:
        run(model, ids, use_cache=False)
        for start, stop in ((0, 6), (6, 11), (11, 12)):
            run(model, ids[:, start:stop], **{name: cache})
    (_, _, whole), *pieces = driver.tapped
    assert [piece.shape[2] for _, _, piece in pieces] == [6, 5, 1]
    torch.testing.assert_close(torch.cat([piece for _, _, piece in pieces], 2), whole, rtol=1e-5, atol=1e-6)
    assert vars(file) == before


def test_output_of_the_tap_is_the_input_of_the_projection() -> None:
    """The tapped output, heads flattened, is bitwise what o_proj gets; k repeats q's rotation of the same call."""
    model = make_model("qwen3")
    inputs: dict[str, torch.Tensor] = {}
    for path in attention_paths(model):
        model.get_submodule(path).o_proj.register_forward_pre_hook(lambda module, args, path=path: inputs.update({path: args[0]}))
    with HostDriver(model, tap_all(model)) as driver:
        run(model, make_ids())
    for path, leaf, tensor in driver.tapped:
        if leaf == "output":
            assert torch.equal(tensor.flatten(2), inputs[path])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_keys_are_those_of_this_call(family: str, static: bool) -> None:
    """With any cache, sliding windows included, k and v have the rows of this call only, equal to one whole call's."""
    model = make_model(family)
    ids, name = make_ids(2, 14), cache_argument(model)
    with HostDriver(model, tap_all(model)) as whole:
        run(model, ids, use_cache=False)
    cache = transformers.StaticCache(config=model.config, max_cache_len=20) if static else dynamic_cache(model)
    with HostDriver(model, tap_all(model)) as steps:
        start = 0
        for size in (5, 4, 1, 1, 2, 1):
            run(model, ids[:, start : start + size], **{name: cache})
            start += size
    for path in attention_paths(model):
        for leaf in ("k", "v"):
            joined = torch.cat([tensor for at, of, tensor in steps.tapped if (at, of) == (path, leaf)], dim=2)
            expected = next(tensor for at, of, tensor in whole.tapped if (at, of) == (path, leaf))
            torch.testing.assert_close(joined, expected, atol=1e-4, rtol=1e-4)


def test_replaced_attention_forward_is_seen() -> None:
    """An attention forward replaced on the instance, as planted faults do it, is tapped like the library's own."""
    model = make_model("qwen3")
    module = model.model.layers[1].self_attn
    modeling = sys.modules[type(module).__module__]

    def forward(hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        heads = (*hidden_states.shape[:-1], -1, module.head_dim)
        q, k, v = (p(hidden_states).view(heads).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
        function = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, modeling.eager_attention_forward)
        out, weights = function(module, 2 * q, k, v, attention_mask, scaling=module.scaling)
        return module.o_proj(out.flatten(2)), weights

    module.forward = functools.wraps(type(module).forward)(forward)
    with HostDriver(model, tap_all(model)) as driver:
        run(model, make_ids(), use_cache=False)
    assert len(driver.tapped) == 16


def test_taps_see_their_own_model_only() -> None:
    """Traces of two models, and two traces of one model, each see the calls of their own, in any order of closing."""
    one, other = make_model("qwen3"), make_model("llama")
    original = AttentionInterface.get_interface
    with HostDriver(one, tap_all(one)) as outer:
        with HostDriver(one, tap_all(one)[:1]) as inner, HostDriver(other, tap_all(other)) as elsewhere:
            run(one, make_ids())
            run(other, make_ids())
        run(one, make_ids())
    run(one, make_ids())
    assert (len(outer.tapped), len(inner.tapped), len(elsewhere.tapped)) == (32, 4, 16)
    assert AttentionInterface.get_interface is original


def test_threads_do_not_mix() -> None:
    """Two models traced in two threads at once each see their own calls, all of them."""
    models = [make_model("qwen3"), make_model("llama")]
    counts = [0, 0]

    def work(n: int) -> None:
        for _ in range(5):
            with HostDriver(models[n], tap_all(models[n])) as driver:
                run(models[n], make_ids())
            counts[n] += len(driver.tapped)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [80, 80]


def test_tap_is_removed_on_an_exception() -> None:
    """An exception inside the model leaves neither tap nor cache watch behind."""
    model = make_model("qwen3")
    originals = AttentionInterface.get_interface, Cache.reorder_cache, Cache.batch_repeat_interleave
    during = []

    def fail(*args: Any) -> None:
        during.append(AttentionInterface.get_interface)
        raise RuntimeError("planted")

    model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"), HostDriver(model, tap_all(model)):
        run(model, make_ids())
    assert during[0] is not originals[0]
    assert (AttentionInterface.get_interface, Cache.reorder_cache, Cache.batch_repeat_interleave) == originals


@pytest.mark.parametrize("late", [False, True])
def test_compiled_model_runs_with_the_tap(late: bool) -> None:
    """A model compiled around the tap, before or after it goes on, gives the same logits and is not broken by its removal."""
    torch._dynamo.reset()
    model = make_model("qwen3")
    ids = make_ids()
    plain = run(model, ids).logits
    compiled = torch.compile(model, backend="eager")
    if late:
        run(compiled, ids)
    host = find_host(compiled)
    with host.taps(tap_all(model), lambda path, leaf, tensor: None):
        assert torch.equal(run(compiled, ids).logits, plain)
    assert torch.equal(run(compiled, ids).logits, plain)
    torch._dynamo.reset()


def test_gradients_are_the_same_with_the_tap() -> None:
    """Training with the tap on, under activation checkpointing too, gives bitwise the same gradients."""

    def gradients(tapped: bool, checkpointed: bool) -> list[torch.Tensor]:
        model = make_model("qwen3").train()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        with HostDriver(model, tap_all(model) if tapped else []):
            model(make_ids(), labels=make_ids(), use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for checkpointed in (False, True):
        for ours, plain in zip(gradients(True, checkpointed), gradients(False, checkpointed), strict=True):
            assert torch.equal(ours, plain)


def test_caches_stay_ordinary_objects() -> None:
    """While traced, a cache can be copied and pickled, its methods are not on the instance, and afterwards nothing is left."""
    model = make_model("qwen3")
    name, cache = cache_argument(model), dynamic_cache(model)
    with HostDriver(model):
        run(model, make_ids(2, 3), **{name: cache})
        clone = copy.deepcopy(cache)
        clone.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(clone.layers[0].keys, cache.layers[0].keys[[1, 0]])
        assert not torch.equal(clone.layers[0].keys, cache.layers[0].keys)
        restored = pickle.loads(pickle.dumps(cache))
        assert restored.get_seq_length() == 3
    assert not [key for key in vars(cache) if "tracer" in key]


def test_overriding_cache_class_is_followed_once() -> None:
    """A cache class with its own reorder, calling its parent's, moves the history once."""

    class Own(transformers.DynamicCache):
        def reorder_cache(self, beam_idx: Any) -> None:
            super().reorder_cache(beam_idx)

    original = Own.reorder_cache
    model = make_model("qwen3")
    name, cache = cache_argument(model), Own(config=model.config)
    with HostDriver(model) as driver:
        run(model, make_ids(2, 3), **{name: cache})
        cache.reorder_cache(torch.tensor([1, 0]))
        run(model, make_ids(2, 1), **{name: cache})
    assert driver.rows(1) == [("f0.r1.d0", 3), ("f0.r0.d0", 3)]
    assert Own.reorder_cache is original
