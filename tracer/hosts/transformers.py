"""The transformers host: any causal language model of the library, plain or wrapped, in one process.

Works with 5.16 to 5.24. What a call says about its rows is read in ``transformers_inputs``, sequences are followed through
caches in ``transformers_sequences``, what happens between modules is seen by ``transformers_taps``.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from tracer.errors import Code, HostError, MapError
from tracer.format.schema import Axis, NotComputed, Span
from tracer.hosts.transformers_conditions import model_conditions
from tracer.hosts.transformers_inputs import InputReader, logit_rows
from tracer.hosts.transformers_sequences import CacheHistory, Labelled, SequenceTracker
from tracer.hosts.transformers_taps import ATTENTION, GENERATE, CacheWatch, cache_length
from tracer.record.boundaries import Source
from tracer.record.host import Forward, HostParameter, Mesh, Placement, Rows, SkippedForward, TapSink
from tracer.record.tokens import SequenceRegistry

__all__ = ["TransformersHost", "claims", "create"]

BoolArray = npt.NDArray[np.bool_]

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
"""Where torch.compile, FSDP1, checkpoint_wrapper and DDP keep what they wrap."""

_DATA_AXES = {"dp", "ddp", "fsdp", "dp_replicate", "dp_shard", "efsdp"}
"""Mesh axes whose processes run whole sequences of their own."""

_CACHE_NAMES = ("cache", "past_key_values")


def claims(model: Any) -> bool:
    """Whether ``model`` is a transformers model, wrappers looked through. Imports nothing."""
    return isinstance(model, torch.nn.Module) and _is_library_model(_unwrap(model))


def create(model: torch.nn.Module, mesh: Mesh | None) -> TransformersHost:
    """The host of ``model``. Raises HostError (host-unknown, host-unsupported)."""
    import transformers  # noqa: F401  its absence is find_host's error

    if not claims(model):
        raise HostError(
            Code.HOST_UNKNOWN,
            f"the transformers host does not know {type(model).__name__}",
            expected="a PreTrainedModel, wrapped or not",
            found=f"{type(model).__module__}.{type(model).__qualname__}",
            remedy="pass the transformers model itself",
        )
    return TransformersHost(model, mesh)


@dataclass(frozen=True)
class _State:
    """What ``Forward.state`` carries from the start of a forward to its end."""

    labelled: Labelled
    cache: Any
    logit_rows: Rows | None
    """Rows of the logits, None where all rows have some."""
    kept_BS: BoolArray


class TransformersHost:
    """One transformers model in this process; implements ``tracer.record.host.Host``."""

    name = "transformers"
    environment_prefixes = ("TRANSFORMERS_", "ACCELERATE_", "FSDP_", "PEFT_", "KERNELS_")

    def __init__(self, model: torch.nn.Module, mesh: Mesh | None = None) -> None:
        self._outer = model
        self._model = cast("Any", _unwrap(model))
        self._modules, self._wrappers = _walk(model)
        _refuse_sharded(self._model, self._modules)
        self._mesh = mesh or _process_mesh()
        if any(axis.size > 1 and axis.name not in _DATA_AXES for axis in self._mesh.axes):
            raise _unsupported("the mesh given has an axis that shards the model", str([axis.name for axis in self._mesh.axes]))
        scope = ",".join(f"{axis.name}={axis.index}" for axis in self._mesh.axes if axis.size > 1 and axis.name in _DATA_AXES)
        self._tracker = SequenceTracker(scope)
        self._caches = CacheWatch()
        self._inputs = InputReader(self._model)
        self._signature = inspect.signature(type(self._model).forward)
        head = self._model.get_output_embeddings()
        self._logit_modules = {path for path, module in self._modules.items() if module is head}
        self._registry: SequenceRegistry | None = None
        self._forwards = 0
        self._past = 0

    # what there is

    def root(self) -> torch.nn.Module:
        """The model itself; where it was given compiled, the compiled wrapper, whose own hooks always fire."""
        for wrapper in self._wrappers.get("", ()):
            if hasattr(wrapper, "_orig_mod"):
                return wrapper
        return self._model  # type: ignore[no-any-return]

    def root_class(self) -> str:
        return _class_name(self._model)

    def modules(self) -> Mapping[str, torch.nn.Module]:
        return self._modules

    def mesh(self) -> Mesh:
        return self._mesh

    def parameters(self) -> Iterator[HostParameter]:
        flattened = self._inside("_fsdp_wrapped_module")
        for path, module in self._modules.items():
            named = [(False, *item) for item in module._parameters.items()] + [(True, *item) for item in module._buffers.items()]
            for buffer, name, tensor in named:
                if tensor is not None:
                    yield _host_parameter(f"{path}.{name}" if path else name, tensor, buffer, path in flattened)

    def conditions(self) -> dict[str, Any]:
        return model_conditions(self._model, self._modules, _class_name(self._model))

    def compiled_reason(self, module_path: str) -> str:
        remedy = 'run the traced call under torch.compiler.set_stance("force_eager"), or trace the model uncompiled'
        parts = module_path.split(".") if module_path else []
        for path in [".".join(parts[:n]) for n in range(len(parts), -1, -1)]:
            module = self._modules.get(path)
            compiled = any(hasattr(wrapper, "_orig_mod") for wrapper in self._wrappers.get(path, ()))
            if module is not None and not compiled:
                compiled = module._compiled_call_impl is not None or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
            if compiled:
                return f"{path or 'the model'} is compiled: a compiled region runs only the hooks it was compiled with; {remedy}"
        return ""

    # one forward

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sequences: SequenceRegistry) -> Forward | SkippedForward:
        """Label the rows of a call. Raises HostError (host-unsupported) for calls whose rows cannot be known."""
        try:
            given = dict(self._signature.bind(self._model, *args, **kwargs).arguments)
        except TypeError:
            return SkippedForward("the call does not fit the model's forward")
        given.update(given.pop("kwargs", {}))
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        shown = ids if ids is not None else embeds
        if not isinstance(shown, torch.Tensor) or shown.ndim < 2:
            return SkippedForward("no input_ids and no inputs_embeds")
        cache = next((given[name] for name in _CACHE_NAMES if given.get(name) is not None), None)
        if type(cache).__name__ == "PagedAttentionCache":
            raise _unsupported("continuous batching keeps the rows of many requests in one paged cache", type(cache).__name__)
        history = self._caches.history(cache)
        batch, columns, past = shown.shape[0], shown.shape[1], cache_length(cache, history)
        if history is None and past == 0 and cache is not None:
            history = CacheHistory.empty(batch)
        call, position_N = self._inputs.read(self._forwards, given, cache, (batch, columns, past), sequences)
        labelled = self._tracker.label(call, history, sequences)
        self._registry = sequences
        self._forwards += 1
        self._past = past
        kept_BS, rows_with_logits = logit_rows(given.get("logits_to_keep"), labelled.rows, batch, columns)
        return Forward(
            rows=labelled.rows,
            ids_N=None if call.ids_BS is None else call.ids_BS.reshape(-1),
            inputs={"input.positions": position_N, "input.visible_from": labelled.visible_from_N},
            skipped=labelled.skipped,
            state=_State(labelled, cache, rows_with_logits, kept_BS),
        )

    def finish_forward(self, forward: Forward, output: Any) -> None:
        state: _State = forward.state
        self._tracker.note_logits(state.labelled, state.kept_BS)
        cache = state.cache if state.cache is not None else _cache_of(output)
        if cache is not None:
            self._caches.keep(cache, state.labelled.history)

    def leaf_rows(self, forward: Forward, source: Source, row_shape: tuple[int, ...]) -> Rows | None:
        state: _State = forward.state
        count = int(np.prod(row_shape))
        logits = source.module in self._logit_modules or (source.module == "" and "logits" in source.leaf)
        rows = state.logit_rows if logits and state.logit_rows is not None else forward.rows
        return rows if count == len(rows) else None

    def placement(self, source: Source, columns: int, leaf: torch.Tensor) -> Placement:
        return Placement(width=columns)

    def local_columns(self, boundary: str) -> int | None:
        """Columns of q, k and v, for models that project them in one piece."""
        config = self._model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        if heads is None:
            return None
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        if boundary.endswith(".attn.q"):
            return int(heads * size)
        if boundary.endswith((".attn.k", ".attn.v")):
            return int((getattr(config, "num_key_value_heads", None) or heads) * size)
        return None

    @contextlib.contextmanager
    def taps(self, sources: Iterable[Source], sink: TapSink) -> Iterator[None]:
        """Tap ``attention``: leaves q, k, v (this call's tokens only) and output of the modules in ``sources``. Caches and
        ``generate`` are followed while this context is open, so it is entered also where nothing is tapped."""
        listeners: dict[torch.nn.Module, Callable[..., None]] = {}
        for source in sources:
            if not source.tap:
                continue
            if source.tap != "attention" or source.module not in self._modules:
                raise MapError(
                    Code.MAP_UNFIT,
                    f"the transformers host has no tap {source.tap!r} on module {source.module!r}",
                    where=source.boundary,
                    expected="tap: attention, on an attention module of the model",
                )
            listeners[self._modules[source.module]] = self._listener(source.module, sink)
        model = {self._model: self._generated}
        self._caches.open()
        ATTENTION.add(listeners)
        GENERATE.add(model)
        try:
            yield
        finally:
            GENERATE.remove(model)
            ATTENTION.remove(listeners)
            self._caches.close()

    def not_computed(self) -> Iterable[NotComputed]:
        return self._tracker.not_computed()

    def _listener(self, path: str, sink: TapSink) -> Callable[[str, torch.Tensor], None]:
        columns = 0

        def listen(leaf: str, tensor: torch.Tensor) -> None:
            nonlocal columns
            if leaf == "q":
                columns = tensor.shape[2]
            elif leaf in ("k", "v"):  # what the cache gave back: this call's tokens end it, or lie inside a static one
                held = tensor.shape[2]
                start = self._past if held >= self._past + columns else held - columns
                tensor = tensor[:, :, start : start + columns]
            sink(path, leaf, tensor)

        return listen

    def _generated(self, result: Any) -> None:
        """``generate`` returned: the tokens it sampled last are known now, though no forward ran them."""
        sequences = result if isinstance(result, torch.Tensor) else result["sequences"]
        if self._registry is not None and sequences.ndim == 2:
            self._tracker.note_returned(sequences.detach().cpu().numpy(), self._registry)

    def _inside(self, attribute: str) -> set[str]:
        """Paths at or below a wrapper of the kind that has ``attribute``."""
        tops = [path for path, wrappers in self._wrappers.items() if any(hasattr(wrapper, attribute) for wrapper in wrappers)]
        return {path for path in self._modules for top in tops if path == top or not top or path.startswith(f"{top}.")}


def _is_library_model(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """What ``module`` wraps, None where it is no wrapper."""
    for attribute in _WRAPPED:
        inner = module._modules.get(attribute)
        if inner is not None and (attribute != "module" or type(module).__name__ in ("DistributedDataParallel", "DataParallel")):
            return inner
    return None


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def _walk(root: torch.nn.Module) -> tuple[dict[str, torch.nn.Module], dict[str, list[torch.nn.Module]]]:
    """Modules by clean path, shared ones under every name, and the wrappers that stood in front of each, outermost first."""
    modules: dict[str, torch.nn.Module] = {}
    wrappers: dict[str, list[torch.nn.Module]] = {}

    def visit(module: torch.nn.Module, path: str, above: tuple[torch.nn.Module, ...]) -> None:
        while (inner := _wrapped(module)) is not None:
            wrappers.setdefault(path, []).append(module)
            module = inner
        if module in above:
            return
        modules[path] = module
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}.{name}" if path else name, (*above, module))

    visit(root, "", ())
    return modules, wrappers


def _class_name(module: torch.nn.Module) -> str:
    """Class name as the library has it: FSDP2 makes a subclass of its own, ``FSDP<Class>``."""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers.") or not kind.__name__.startswith("FSDP")]
    return kinds[0].__name__


def _unsupported(what: str, found: str) -> HostError:
    return HostError(
        Code.HOST_UNSUPPORTED,
        f"the transformers host cannot record this run: {what}",
        found=found,
        remedy="sharded models and continuous batching are not supported yet; run the model in one process, or data-parallel only",
    )


def _refuse_sharded(model: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise HostError (host-unsupported) where this process computes only a part of the model."""
    if any(type(module).__name__ == "PipelineIdentityLayer" for module in modules.values()):
        raise _unsupported("its layers are spread over pipeline stages", "PipelineIdentityLayer")
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        names = mesh.mesh_dim_names or ("fsdp",)
        cut = [
            f"{axis}={mesh.size(i)}"
            for i, (axis, placement) in enumerate(zip(names, parameter.placements, strict=True))  # type: ignore[attr-defined]
            if axis not in _DATA_AXES and mesh.size(i) > 1 and not placement.is_replicate()
        ]
        if cut:
            raise _unsupported(f"parameter {name} is sharded over {', '.join(cut)}", str(parameter.placements))  # type: ignore[attr-defined]
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise _unsupported("the model is tensor-parallel", f"tp={model._tp_size}")


def _process_mesh() -> Mesh:
    """Every process of a process group runs whole sequences of its own: one data-parallel axis."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or torch.distributed.get_world_size() == 1:
        return Mesh()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Mesh(rank=rank, world_size=size, axes=(Axis(name="dp", index=rank, size=size),))


def _host_parameter(name: str, tensor: torch.Tensor, buffer: bool, flattened: bool) -> HostParameter:
    shape = tuple(tensor.shape)
    if flattened:
        return HostParameter(name, None, shape, buffer=buffer, unknown="FSDP1 keeps it flattened and sharded between forwards")
    if tensor.device.type == "meta":
        return HostParameter(name, None, shape, buffer=buffer, unknown="offloaded: its values are not in memory")
    held: Any = tensor.detach()
    if hasattr(held, "placements"):
        spans, unknown = _held_spans(held)
        return HostParameter(name, None if unknown else held.to_local(), shape, spans, buffer, unknown)
    if type(held) not in (torch.Tensor, torch.nn.Parameter):
        return HostParameter(name, None, shape, buffer=buffer, unknown=f"stored as {type(held).__name__}")
    return HostParameter(name, held, shape, buffer=buffer)


def _held_spans(tensor: Any) -> tuple[tuple[tuple[Span, ...], ...], str]:
    """Spans per dimension that this process holds of a DTensor; a reason where they cannot be told."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(type(placement) not in (Replicate, Shard) for placement in tensor.placements):
        return (), f"placed as {tensor.placements}"
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(
        () if size == whole else ((offset, offset + size),) for size, offset, whole in zip(sizes, offsets, tensor.shape, strict=True)
    ), ""


def _cache_of(output: Any) -> Any:
    """The cache in a model's output, whatever its form."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return next((value for value in values if hasattr(value, "get_seq_length")), None)


