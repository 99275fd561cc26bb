"""The vLLM host: the model inside one worker, traced where it runs.

An engine that lives in this process is traced here; one whose workers are other processes is traced in each of them, by
way of the worker extension (``vllm_extension``, ``vllm_driver``). What a step's rows are is read in ``vllm_rows``, what
part of the whole a worker holds in ``vllm_layers``. Written for vLLM 0.32 and its V1 model runner.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tracer.errors import Code, HostError, MapError
from tracer.format.schema import Axis, NotComputed
from tracer.hosts.vllm_conditions import engine_conditions
from tracer.hosts.vllm_driver import EngineWorkers, engine_workers, worker_of
from tracer.hosts.vllm_layers import Heads, as_in_checkpoint, cut_evenly, experts_parallelism, heads_of, host_parameter, merged_spans
from tracer.hosts.vllm_loading import LoadedWeights, loaded_weights
from tracer.hosts.vllm_rows import RequestTracker, padding_of, read_batch
from tracer.record.boundaries import Source
from tracer.record.host import Forward, HostParameter, Mesh, Placement, Rows, SkippedForward, TapSink
from tracer.record.tokens import SequenceRegistry

__all__ = ["VllmHost", "claims", "create", "processes"]

_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
"""Modules that define a ``GPUModelRunner``: V1, V2."""

_ROUTER_LEAVES = ("ids", "weights", "scaled_weights")

_DUMMY = "dummy, warm-up or profiling run of the engine"


def claims(model: Any) -> bool:
    """Whether ``model`` is a vLLM engine, worker, model runner, or a model that one of this process's runners runs."""
    if "vllm" not in sys.modules:
        return False
    if any(kind.__module__.split(".")[0] == "vllm" for kind in type(model).__mro__):
        return True
    return isinstance(model, torch.nn.Module) and _runner_of_module(model) is not None


def processes(model: Any) -> EngineWorkers | None:
    """The worker processes of an engine that is only steered from here; None where the model is in this process.

    Raises HostError (host-unsupported) where the workers were started without the extension."""
    return engine_workers(model) if claims(model) else None


def create(model: Any, mesh: Mesh | None) -> VllmHost:
    """The host of a model in this process. Raises HostError (host-unknown, host-unsupported)."""
    import vllm  # noqa: F401  its absence is find_host's error

    runner = _runner_of(model)
    if runner is None:
        raise HostError(
            Code.HOST_UNKNOWN,
            f"the vllm host finds no model runner for a {type(model).__name__} in this process",
            expected="an LLM, a worker, a model runner, or the module that a runner of this process runs",
            found=f"{type(model).__module__}.{type(model).__qualname__}",
            remedy="pass the LLM itself",
        )
    _refuse(runner)
    return VllmHost(runner, mesh)


@dataclass
class _State:
    """What ``Forward.state`` carries. ``output``: storage, first element and row stride of what the root returned."""

    ends_R: Rows
    """The last row of every request: what the engine samples from."""
    output: tuple[int, int, int] | None = None
    logit_input: tuple[int, int, int] | None = None
    """The same of what the logits were last computed from."""


class VllmHost:
    """One worker's model; implements ``tracer.record.host.Host``."""

    name = "vllm"

    def __init__(self, runner: Any, mesh: Mesh | None = None) -> None:
        """``runner``: the V1 model runner that has loaded the model."""
        self._runner = runner
        self._model: torch.nn.Module = runner.get_model()
        self._config = runner.vllm_config
        self._modules = dict(self._model.named_modules(remove_duplicate=False))
        self._mesh = mesh or _worker_mesh(self._config)
        data = self._config.parallel_config.data_parallel_rank
        scope = f"dp={data}" if self._config.parallel_config.data_parallel_size > 1 else ""
        self._tracker = RequestTracker(scope, tuple(runner.requests))
        self._registry: SequenceRegistry | None = None
        paired = hasattr(self._model, "permute_qk_weight_for_rotary")
        packed = {path: module for path, module in self._modules.items() if hasattr(module, "num_kv_head_replicas")}
        self._heads: dict[str, Heads] = {path.rpartition(".")[0]: heads_of(module, paired) for path, module in packed.items()}
        self._dummy = 0
        self._current: _State | None = None

    # what there is

    def root(self) -> torch.nn.Module:
        return self._model

    def root_class(self) -> str:
        return type(self._model).__name__

    def modules(self) -> Mapping[str, torch.nn.Module]:
        return self._modules

    def mesh(self) -> Mesh:
        return self._mesh

    def parameters(self) -> Iterator[HostParameter]:
        loaded = loaded_weights(self._model)
        first: dict[int, str] = {}
        again: set[str] = set()
        for path, module in self._modules.items():
            if _named_again(first, module, path) or path.rpartition(".")[0] in again:
                again.add(path)
                continue
            named = [(False, *item) for item in module._parameters.items()] + [(True, *item) for item in module._buffers.items()]
            for buffer, name, tensor in named:
                if tensor is not None and not _named_again(first, tensor, path):
                    yield self._parameter(path, name, module, tensor, buffer, loaded)
        yield from self._tied_head(loaded)

    def _tied_head(self, loaded: LoadedWeights | None) -> Iterator[HostParameter]:
        """The output projection of a model that has no module for it and projects with its embedding (Gemma)."""
        if not self._config.model_config.hf_text_config.tie_word_embeddings or any(path.endswith("lm_head") for path in self._modules):
            return
        for path, module in self._modules.items():
            if type(module).__name__ == "VocabParallelEmbedding":
                tied = self._parameter(path, "weight", module, module._parameters["weight"], False, loaded)
                yield replace(tied, parameter="lm_head.weight")

    def _parameter(
        self, path: str, name: str, module: torch.nn.Module, tensor: torch.Tensor, buffer: bool, loaded: LoadedWeights | None
    ) -> HostParameter:
        experts = experts_parallelism(module)
        plain = host_parameter(path, name, module, tensor, buffer, "", experts)
        if hasattr(module, "num_kv_head_replicas"):
            plain = as_in_checkpoint(plain, self._heads[path.rpartition(".")[0]])
        if loaded is not None:
            return loaded.as_loaded(plain, tensor)
        if name in ("w13_weight", "w2_weight") and not plain.unknown:
            reason = "the engine may have reordered it when loading, which nothing watched; build it with tracer.vllm_options()"
            return host_parameter(path, name, module, tensor, buffer, reason, experts)
        return plain

    def conditions(self) -> dict[str, Any]:
        return engine_conditions(self._runner, self._modules)

    def compiled_reason(self, module_path: str) -> str:
        compilation = self._config.compilation_config
        mode, graphs = getattr(compilation.mode, "name", "NONE"), getattr(compilation.cudagraph_mode, "name", "NONE")
        if (mode, graphs) == ("NONE", "NONE"):
            return ""
        return (
            f"vLLM compiled the model (mode {mode}, graphs {graphs}): no hook runs in a compiled or replayed region; "
            "build the engine eagerly: LLM(**tracer.vllm_options(), ...) or enforce_eager=True"
        )

    def keeps_state(self) -> tuple[str, str] | None:
        """A prefix cache keeps keys and values from one request to the next; also implements ``KeepsState``."""
        if not self._config.cache_config.enable_prefix_caching:
            return None
        return "enable_prefix_caching=True", "build the engine with enable_prefix_caching=False for the diagnosis"

    # one forward

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sequences: SequenceRegistry) -> Forward | SkippedForward:
        """Label the rows of a step, as the runner's batch says. Raises CaptureError where call and batch do not agree."""
        self._registry = sequences
        self._current = None
        if self._dummy or not _has_attention_metadata():
            return SkippedForward(_DUMMY)
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(positions, torch.Tensor):
            return SkippedForward("the call has no positions")
        batch = read_batch(self._runner)
        rows = self._tracker.label(batch, positions.shape[-1], self._runner.requests, sequences)
        ids_N = None
        if isinstance(input_ids, torch.Tensor) and not any(state.prompt_token_ids is None for state in self._runner.requests.values()):
            ids_N = input_ids.detach().cpu().numpy().astype(np.int64)
            sequences.record_rows(rows, ids_N)
        ends_R = batch.start_R1[1:] - 1
        self._current = _State(Rows(rows.sequence_N[ends_R], rows.position_N[ends_R]))
        padding = padding_of(rows)
        return Forward(
            rows=rows,
            ids_N=ids_N,
            inputs={"input.visible_from": np.zeros(len(rows), np.int64)},
            skipped={"padding": padding} if padding else {},
            state=self._current,
        )

    def finish_forward(self, forward: Forward, output: Any) -> None:
        state: _State = forward.state
        state.output = _place(output) if isinstance(output, torch.Tensor) and output.dim() == 2 else None

    def leaf_rows(self, forward: Forward, source: Source, row_shape: tuple[int, ...]) -> Rows | None:
        count = int(np.prod(row_shape))
        if not source.after_root:
            return forward.rows if count == len(forward.rows) else None
        rows = self._logit_rows(forward, count)
        if rows is not None:
            self._tracker.note_logits(rows)
        return rows

    def _logit_rows(self, forward: Forward, count: int) -> Rows | None:
        """Rows that logits were just computed of: a slice of the root's output (prompt logprobs), or a copy of the rows the
        engine samples from."""
        state: _State = forward.state
        given, output = state.logit_input, state.output
        if given is not None and output is not None and given[0] == output[0]:
            first, left = divmod(given[1] - output[1], max(output[2], 1))
            if left == 0 and first >= 0 and first + count <= len(forward.rows):
                return Rows(forward.rows.sequence_N[first : first + count], forward.rows.position_N[first : first + count])
            return None
        return state.ends_R if count == len(state.ends_R) else None

    def placement(self, source: Source, columns: int, leaf: torch.Tensor) -> Placement:
        axis = self._mesh.axis("tp")
        heads = self._heads_above(source) if "tp" in dict(source.shard) else None
        if heads is not None and heads.paired:
            return heads.placement(source.boundary)
        if axis is None or axis.size == 1 or "tp" in source.replicated:
            return Placement(width=columns)
        if source.partial == "tp":
            return Placement(width=columns, partial="tp")
        if "tp" not in dict(source.shard):
            raise MapError(
                Code.MAP_AXIS,
                f"the map does not say what tensor parallelism does to {source.boundary}",
                where=source.boundary,
                expected="tp under shard, replicated or partial",
            )
        module: Any = self._modules[source.module]
        if heads is not None and heads.held(source.boundary) == columns:
            return heads.placement(source.boundary)
        sizes = getattr(module, "output_sizes", None)
        if sizes is not None and source.leaf.startswith("output") and sum(sizes) == columns * axis.size:
            return Placement(sum(sizes), merged_spans(sizes, axis.index, axis.size))
        return Placement(columns * axis.size, cut_evenly(columns * axis.size, axis.index, axis.size))

    def _heads_above(self, source: Source) -> Heads | None:
        """Heads of the attention layer that the source belongs to."""
        path = source.module
        while path and path not in self._heads:
            path = path.rpartition(".")[0]
        return self._heads.get(path)

    def local_columns(self, boundary: str) -> int | None:
        """Columns of q, k and v, or of their latents, held here."""
        layer, _, name = boundary.rpartition(".attn.")
        index = layer.rpartition(".")[2]
        if name in ("q_latent", "kv_latent"):
            end = f".{index}.self_attn.fused_qkv_a_proj"
            fused: Any = next((module for path, module in self._modules.items() if path.endswith(end)), None)
            return None if fused is None else int(fused.output_sizes[name == "kv_latent"])
        if name not in ("q", "k", "v", "q_gate"):
            return None
        heads = next((heads for path, heads in self._heads.items() if path.split(".")[-2:-1] == [index]), None)
        if heads is None:
            return None
        return heads.held(boundary)

    @contextlib.contextmanager
    def taps(self, sources: Iterable[Source], sink: TapSink) -> Iterator[None]:
        """Tap ``router``: leaves ids and weights that the experts' router chose, and scaled_weights: times what the experts' sum is
        scaled by afterwards. Dummy runs are told apart, and what logits are computed from is noted, for as long as this context
        is open, so it is entered also where nothing is tapped."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._learn_last_ids)
            stack.enter_context(_replaced(self._runner, "_dummy_run", self._counting_dummies))
            for module in self._modules.values():
                if type(module).__name__ == "LogitsProcessor":
                    stack.callback(module.register_forward_pre_hook(self._logits_begin, with_kwargs=True).remove)
            for path in dict.fromkeys(source.module for source in sources if source.tap):
                stack.enter_context(self._router_tap(path, [source for source in sources if source.module == path and source.tap], sink))
            yield

    def _router_tap(self, path: str, sources: list[Source], sink: TapSink) -> contextlib.AbstractContextManager[None]:
        experts: Any = self._modules[path]
        router = getattr(experts, "router", None)
        wrong = next((source for source in sources if source.tap != "router" or source.leaf not in _ROUTER_LEAVES), None)
        if wrong is not None or router is None or not hasattr(router, "_select_experts"):
            found = wrong or sources[0]
            raise MapError(
                Code.MAP_UNFIT,
                f"the vllm host has no tap {found.tap!r} with leaf {found.leaf!r} on module {path!r}",
                where=found.boundary,
                expected=f"tap: router with leaf {', '.join(_ROUTER_LEAVES)}, on a mixture's experts",
            )

        def watching(choose: Callable[..., Any]) -> Callable[..., Any]:
            def chosen(*args: Any, **kwargs: Any) -> Any:
                weights, ids = choose(*args, **kwargs)
                sink(path, "ids", ids)
                sink(path, "weights", weights)
                sink(path, "scaled_weights", weights * getattr(experts, "routed_scaling_factor", 1.0))
                return weights, ids

            return chosen

        return _replaced(router, "_select_experts", watching)

    def not_computed(self) -> Iterable[NotComputed]:
        return self._tracker.not_computed()

    # hooks of the host's own

    def _counting_dummies(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def dummy(*args: Any, **kwargs: Any) -> Any:
            self._dummy += 1
            try:
                return run(*args, **kwargs)
            finally:
                self._dummy -= 1

        return dummy

    def _logits_begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("hidden_states", args[1] if len(args) > 1 else None)
        if self._current is not None:
            self._current.logit_input = _place(given) if isinstance(given, torch.Tensor) else None

    def _learn_last_ids(self) -> None:
        """The trace ends: tokens sampled since the last step began are known by now."""
        if self._registry is not None:
            self._tracker.learn_ids(self._registry)


def _named_again(first: dict[int, str], held: object, path: str) -> bool:
    """Whether a module or tensor has an earlier name inside the same block: mlp.gate is mlp.experts.gate too. ``first``: the path
    of every one so far, kept up here."""
    earlier = first.setdefault(id(held), path)
    block = earlier.rpartition(".")[0]
    return earlier != path and bool(block) and path.startswith(f"{block}.")


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Storage, first element and row stride."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.stride(0)


@contextlib.contextmanager
def _replaced(holder: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A method of one object, wrapped while the context is open. Wrappers put on meanwhile stay above this one."""
    before = holder.__dict__.get(name)
    wrapper = wrap(getattr(holder, name))
    setattr(holder, name, wrapper)
    try:
        yield
    finally:
        if holder.__dict__.get(name) is wrapper:
            if before is None:
                delattr(holder, name)
            else:
                setattr(holder, name, before)


def _has_attention_metadata() -> bool:
    """Dummy forwards run without any."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return is_forward_context_available() and bool(get_forward_context().attn_metadata)


def _runner_of(model: Any) -> Any:
    """The model runner behind an engine, worker, runner or module of this process; None where there is none."""
    if isinstance(model, torch.nn.Module):
        return _runner_of_module(model)
    worker = worker_of(model)
    runner = getattr(worker if worker is not None else model, "model_runner", model)
    return runner if hasattr(runner, "get_model") and hasattr(runner, "vllm_config") else None


def _runner_of_module(module: torch.nn.Module) -> Any:
    """The runner that runs this very module; looked for among all objects of the process, which takes a moment."""
    kinds = tuple(kind for name in _RUNNERS if (kind := getattr(sys.modules.get(name), "GPUModelRunner", None)) is not None)
    if not kinds:
        return None
    frozen = gc.get_freeze_count() > 0  # the engine freezes what it has made, which hides it from the search
    if frozen:
        gc.unfreeze()
    try:
        candidates = [found for found in gc.get_objects() if issubclass(type(found), kinds)]
        return next((runner for runner in candidates if hasattr(runner, "model") and runner.get_model() is module), None)
    finally:
        if frozen:
            gc.collect()
            gc.freeze()


def _refuse(runner: Any) -> None:
    """Raise HostError (host-unsupported) where the rows of a step could not be told, or the model is not a decoder's."""
    config = runner.vllm_config
    what = remedy = ""
    if not hasattr(runner, "input_batch"):
        what, remedy = "it runs Model Runner V2, whose batch state this host does not read yet", "set VLLM_USE_V2_MODEL_RUNNER=0"
    elif config.speculative_config is not None:
        what, remedy = "speculative decoding runs tokens that are thrown away again", "trace the engine without speculative_config"
    elif config.parallel_config.decode_context_parallel_size > 1 or getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        what, remedy = "context parallelism spreads the rows of a request over workers", "trace the engine without context parallelism"
    elif getattr(config.parallel_config, "enable_eplb", False):
        what, remedy = "expert load balancing renumbers experts while it runs", "trace the engine without enable_eplb"
    if what:
        text = f"the vllm host cannot record this engine: {what}"
        raise HostError(Code.HOST_UNSUPPORTED, text, found=type(runner).__name__, remedy=remedy)


def _worker_mesh(config: Any) -> Mesh:
    """Pipeline and tensor parallelism of one engine; data-parallel engines are runs of their own."""
    if config.parallel_config.world_size == 1:
        return Mesh()
    from vllm.distributed import get_pp_group, get_tp_group

    tensor, pipeline = get_tp_group(), get_pp_group()
    axes = tuple(
        Axis(name=name, index=group.rank_in_group, size=group.world_size)
        for name, group in (("pp", pipeline), ("tp", tensor))
        if group.world_size > 1
    )
    rank = pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group
    return Mesh(rank=rank, world_size=pipeline.world_size * tensor.world_size, axes=axes)
