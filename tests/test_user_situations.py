"""What users do with a transformers model while it is traced: each leaves the run as it was and the trace right, or says why not."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import tracer
from tests.small_model import SmallHost, SmallModel, small_map
from tests.tiny_models import make_config, make_ids, make_model
from tracer.errors import CaptureError, Code, MapError
from tracer.format.schema import BoundaryStatus, Manifest
from tracer.format.store_read import read_shard
from tracer.read.diff import diff_traces
from tracer.read.floor import Tolerance
from tracer.record.capture import Trace

IDS = make_ids(2, 7)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of one forward of ``model`` over ``IDS``."""
    return record(model, tmp_path_factory.mktemp("plain") / "trace", lambda: model(IDS))[0]


def record(model: Any, out: Path, run: Callable[[], Any], **options: Any) -> tuple[Path, Any]:
    """The trace of a run, and what the run gave."""
    with torch.no_grad(), tracer.trace(model, out=out, level=2, **options):
        return out, run()


def manifest_of(trace: Path) -> Manifest:
    manifest = read_shard(trace / "shard-00000").manifest
    assert manifest is not None
    return manifest


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in what a model returned, caches left out."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# ------------------------------------------------------------------------------------------- ways to call a model


CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]] = {
    "inference mode": (torch.inference_mode, lambda model: {"input_ids": IDS}),
    "with gradients": (torch.enable_grad, lambda model: {"input_ids": IDS}),
    "hidden states": (nullcontext, lambda model: {"input_ids": IDS, "output_hidden_states": True, "output_attentions": True}),
    "a tuple": (nullcontext, lambda model: {"input_ids": IDS, "return_dict": False}),
    "a tuple with a loss": (nullcontext, lambda model: {"input_ids": IDS, "labels": IDS, "return_dict": False}),
    "labels": (nullcontext, lambda model: {"input_ids": IDS, "labels": IDS, "use_cache": False}),
    "last logits": (nullcontext, lambda model: {"input_ids": IDS, "logits_to_keep": 2}),
    "chosen logits": (nullcontext, lambda model: {"input_ids": IDS, "logits_to_keep": torch.tensor([1, 3])}),
    "embeddings": (nullcontext, lambda model: {"inputs_embeds": model.get_input_embeddings()(IDS)}),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_way_to_call_gives_the_same_rows(call: str, model: Any, plain: Path, tmp_path: Path) -> None:
    """Outputs are bitwise those of an untraced call, and every row is that of a plain call, whatever was asked for besides."""
    context, arguments = CALLS[call]
    with torch.no_grad(), context():
        wanted = tensors(model(**arguments(model)))
        with tracer.trace(model, out=tmp_path / "trace", level=2, strict=True):
            seen = tensors(model(**arguments(model)))
    assert all(torch.equal(one, other) for one, other in zip(wanted, seen, strict=True))
    tolerance = Tolerance(1e-5) if "logits" in call else None  # fewer rows, other kernels
    assert diff_traces(plain, tmp_path / "trace", tolerance=tolerance).exit == 0


@pytest.mark.parametrize("how", ["float16", "autocast"])
def test_low_precision_is_recorded_as_it_is(how: str, tmp_path: Path) -> None:
    """A model in half precision, and one under autocast, compute the same bits and are recorded in the dtypes they have."""
    model = make_model("llama", torch.float16 if how == "float16" else torch.float32, num_hidden_layers=1)
    dtype = torch.float16 if how == "float16" else torch.bfloat16
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        wanted = model(IDS).logits
        _, seen = record(model, tmp_path / "trace", lambda: model(IDS).logits, strict=True)
    assert torch.equal(wanted, seen)
    recorded = {boundary.name: boundary.dtype for boundary in manifest_of(tmp_path / "trace").boundaries}
    assert recorded["layers.0.attn.q"] == str(dtype).removeprefix("torch.")


def test_shared_parts_and_nested_traces(tmp_path: Path) -> None:
    """Tied embeddings, a shared parameter and a shared module leave every boundary recorded; a trace inside a trace records the same."""
    model = make_model("llama", tie_word_embeddings=True)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.layers[2].self_attn.q_proj.weight = model.model.layers[3].self_attn.q_proj.weight
    with torch.no_grad():
        wanted = model(IDS).logits
        with tracer.trace(model, out=tmp_path / "outer", level=2), tracer.trace(model, out=tmp_path / "inner", level=2):
            assert torch.equal(model(IDS).logits, wanted)
    assert {boundary.status for boundary in manifest_of(tmp_path / "outer").boundaries} == {BoundaryStatus.RECORDED}
    assert diff_traces(tmp_path / "outer", tmp_path / "inner").exit == 0


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_an_empty_batch_is_the_models_own_business(shape: tuple[int, int], model: Any, tmp_path: Path) -> None:
    """What the model says of a batch without tokens is what the user sees, and the trace says that this forward raised it."""
    with pytest.raises(RuntimeError, match="reshape"):
        record(model, tmp_path / "trace", lambda: model(torch.zeros(shape, dtype=torch.int64)), strict=True)
    assert manifest_of(tmp_path / "trace").incomplete_reason.startswith("forward 0 raised RuntimeError: cannot reshape")


def test_training_with_dropout_under_checkpointing(tmp_path: Path) -> None:
    """Dropout, both kinds of checkpointing: losses and gradients are those of a plain step, every recomputed row is the first one's."""

    def step(reentrant: bool, out: Path | None) -> list[torch.Tensor]:
        model = make_model("llama", num_hidden_layers=2, attention_dropout=0.2).train().requires_grad_(True)
        for layer in model.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = lambda *arguments, **more: torch.utils.checkpoint.checkpoint(
                *arguments, use_reentrant=reentrant, **more
            )
        torch.manual_seed(1)
        with nullcontext() if out is None else tracer.trace(model, out=out, strict=True):
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    for reentrant in (False, True):
        out = tmp_path / str(reentrant)
        assert all(torch.equal(one, other) for one, other in zip(step(reentrant, None), step(reentrant, out), strict=True))
        boundary = next(boundary for boundary in manifest_of(out).boundaries if boundary.name == "layers.1.attn.out")
        assert (boundary.executions, boundary.recomputed) == (1, 1)
        assert diff_traces(out, out).exit == 0


GENERATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "greedy": ("llama", {}, {}),
    "sliding windows in a static cache": ("gemma2", {}, {"cache_implementation": "static"}),
    "one window for all": ("mistral", {"sliding_window": 4}, {}),
    "beams": ("llama", {}, {"num_beams": 3, "num_return_sequences": 2}),
    "drafts from the prompt": ("llama", {}, {"prompt_lookup_num_tokens": 2}),
    "drafts of a small model": ("llama", {}, {"assistant_model": None}),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # the library's own about generation arguments
@pytest.mark.parametrize("kind", GENERATIONS)
def test_generation_of_any_kind_agrees_with_plain_forwards(kind: str, tmp_path: Path) -> None:
    """Tokens are those of an untraced run, and every row that ended up in a sequence is that sequence's own, run at once."""
    family, changes, arguments = GENERATIONS[kind]
    model = make_model(family, num_hidden_layers=2, **changes)
    ids = make_ids(2, 12)
    if "drafts" in kind:
        ids = ids[:1].repeat(1, 2)
    if "assistant_model" in arguments:
        arguments = {"assistant_model": make_model(family, num_hidden_layers=1)}

    def generate() -> torch.Tensor:
        found: torch.Tensor = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, **arguments)
        return found

    wanted = generate()
    with tracer.trace(model, out=tmp_path / "generated", level=2, strict=True):
        seen = generate()
    assert torch.equal(wanted, seen)
    record(model, tmp_path / "forwards", lambda: [model(row[None, :-1], use_cache=False) for row in seen])
    result = diff_traces(tmp_path / "generated", tmp_path / "forwards", tolerance=Tolerance(1e-4))
    counts = result.counts
    tried_besides = counts.tokens_a > counts.tokens_matched
    assert not tried_besides or arguments.keys() & {"num_beams", "prompt_lookup_num_tokens", "assistant_model"}
    assert counts.tokens_b == counts.tokens_matched
    assert result.exit == (2 if tried_besides else 0), result.findings


# ------------------------------------------------------------------------------------------- other models


def test_a_class_of_the_users_own_has_its_parents_map(model: Any, plain: Path, tmp_path: Path) -> None:
    """A subclass of a known class is traced with ``map="auto"`` like its parent, under its own name."""

    class MyLlama(type(model)):  # type: ignore[misc]
        pass

    mine = MyLlama(make_config("llama", num_hidden_layers=2)).eval()
    mine.load_state_dict(model.state_dict())
    record(mine, tmp_path / "trace", lambda: mine(IDS))
    assert manifest_of(tmp_path / "trace").map.root_class == "MyLlama"
    assert diff_traces(plain, tmp_path / "trace").exit == 0


def _forward_patched(model: Any) -> None:
    forward = model.forward
    model.forward = lambda *args, **kwargs: _scaled(forward(*args, **kwargs))


def _scaled(output: Any) -> Any:
    output.logits = output.logits * 1.5
    return output


class ScaledLogits(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A user's own class that scales what it returns."""

    def forward(self, input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return _scaled(super().forward(input_ids, **kwargs))


BEHIND_THE_PROJECTION: dict[str, Callable[[Any], Any]] = {
    "a subclass": lambda model: setattr(model, "__class__", ScaledLogits),
    "a patched forward": _forward_patched,
    "a hook of the model": lambda model: model.register_forward_hook(lambda module, args, output: _scaled(output)),
    "a hook of the projection": lambda model: model.lm_head.register_forward_hook(lambda module, args, output: output * 1.5),
}


@pytest.mark.parametrize("how", BEHIND_THE_PROJECTION)
def test_what_happens_to_logits_behind_the_projection_is_seen(how: str, plain: Path, tmp_path: Path) -> None:
    """Logits are those that the model returns, whoever changes them after the projection."""
    changed = make_model("llama", num_hidden_layers=2)
    BEHIND_THE_PROJECTION[how](changed)
    record(changed, tmp_path / "changed", lambda: changed(IDS))
    result = diff_traces(plain, tmp_path / "changed")
    assert result.exit == 1
    assert result.first is not None
    assert result.first.boundary == "lm_head"


def test_a_hook_added_to_the_model_inside_the_trace_is_seen_too(plain: Path, tmp_path: Path) -> None:
    """What a hook returns that is registered after the trace began is what the trace holds."""
    changed = make_model("llama", num_hidden_layers=2)
    with torch.no_grad(), tracer.trace(changed, out=tmp_path / "changed", level=2, strict=True):
        BEHIND_THE_PROJECTION["a hook of the model"](changed)
        changed(IDS)
    result = diff_traces(plain, tmp_path / "changed")
    assert result.exit == 1
    assert result.first is not None
    assert result.first.boundary == "lm_head"


def test_the_map_of_another_class_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """A map that would resolve and mean something else is a typed error with the fitting map; nothing is made or hooked."""
    model = make_model("mistral", num_hidden_layers=1)
    with pytest.raises(MapError) as caught:
        record(model, tmp_path / "trace", lambda: None, map="llama")
    assert (caught.value.code, caught.value.expected, caught.value.found) == (Code.MAP_UNFIT, "LlamaForCausalLM", "MistralForCausalLM")
    assert 'map="mistral"' in caught.value.remedy
    assert not (tmp_path / "trace").exists()
    assert not any(module._forward_hooks for module in model.modules())


# ------------------------------------------------------------------------------------------- compiled models


@contextmanager
def compiled(how: str, model: Any) -> Iterator[None]:
    """``model`` with something of it compiled."""
    layer = model.model.layers[0]
    kind, forward = type(layer), type(layer).forward
    match how:
        case "a layer replaced":
            model.model.layers[0] = torch.compile(layer, backend="eager", fullgraph=True)
        case "the layer's class":
            kind.forward = torch.compile(forward, backend="eager")
        case "the model in place":
            model.compile(backend="eager")
    try:
        yield
    finally:
        kind.forward = forward
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize("how", ["a layer replaced", "the layer's class", "the model in place"])
def test_warm_compiled_regions_prove_nothing_and_say_so(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was compiled and run before is vacuous with cause and remedy, what runs is bitwise the same, and the remedy works."""
    model = make_model("llama", num_hidden_layers=1)
    record(model, tmp_path / "plain", lambda: model(IDS, use_cache=False))
    with torch.no_grad(), compiled(how, model):
        wanted = model(IDS, use_cache=False).logits
        _, seen = record(model, tmp_path / "compiled", lambda: model(IDS, use_cache=False).logits)
        with torch.compiler.set_stance("force_eager"):
            record(model, tmp_path / "eager", lambda: model(IDS, use_cache=False))
    assert torch.equal(wanted, seen)
    boundaries = {boundary.name: boundary for boundary in manifest_of(tmp_path / "compiled").boundaries}
    silent = [boundary for name, boundary in boundaries.items() if ".attn." in name or (how == "the model in place" and "lm_head" in name)]
    for boundary in silent:
        assert boundary.status is BoundaryStatus.VACUOUS
        assert "is compiled: a compiled region runs only the hooks it was compiled with" in boundary.reason
        assert 'set_stance("force_eager")' in boundary.reason
    assert "proves nothing at" in capsys.readouterr().err
    assert diff_traces(tmp_path / "plain", tmp_path / "compiled").exit == 2
    assert diff_traces(tmp_path / "plain", tmp_path / "eager").exit == 0


# ------------------------------------------------------------------------------------------- where nothing can be written


def test_a_folder_that_cannot_be_made_is_refused_on_entry(tmp_path: Path) -> None:
    """Where the system refuses the folder, entering raises write-failed before a hook is on."""
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    if os.access(folder, os.W_OK):  # nothing is read-only to root but what the kernel makes
        folder = Path("/proc/self")
    model = SmallModel()
    with pytest.raises(CaptureError) as caught, tracer.trace(model, map=small_map(tmp_path), host=SmallHost(model), out=folder / "trace"):
        raise AssertionError("entered")
    assert caught.value.code is Code.WRITE_FAILED
    assert caught.value.remedy
    assert not any(module._forward_hooks for module in model.modules())


def test_a_full_disk_on_entry_and_later(tmp_path: Path) -> None:
    """A disk that fills up on entry is a typed error and leaves no folder; one that fills up later costs the trace, not the run."""
    ids = torch.tensor([[11, 12, 13]])
    small_map(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told: dict[str, Any] = {}
        try:
            model = SmallModel()
            plain = model(ids)["logits"]
            resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))  # every larger file fails in write(2), as on a full disk
            options: dict[str, Any] = {"map": str(tmp_path / "small.yaml"), "host": SmallHost(model)}
            try:
                tracer.trace(model, out=tmp_path / "entry", weights="rows", **options).__enter__()
            except CaptureError as error:
                told["entry"] = [error.code.value, (tmp_path / "entry").exists()]
            with tracer.trace(model, out=tmp_path / "later", **options) as t:
                told["same"] = torch.equal(model(ids)["logits"], plain)
            assert isinstance(t, Trace)
            told["later"] = [t.incomplete, (tmp_path / "later" / "shard-00000" / "manifest.json").exists()]
        except BaseException as error:
            told["error"] = repr(error)
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    told = json.loads(os.read(reading, 1 << 16))
    os.close(reading)
    assert told["entry"] == ["write-failed", False]
    assert told["same"]
    assert "write-failed" in told["later"][0]
    assert not told["later"][1]
