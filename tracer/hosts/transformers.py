"""The transformers host: any causal language model of the library, plain, wrapped or sharded over processes.

Works with 5.16 to 5.24. What a call says about its rows is read in ``transformers_inputs``, sequences are followed through
caches in ``transformers_sequences``, what happens between modules is seen by ``transformers_taps``; where columns lie under
tensor parallelism is known by ``transformers_placement``, where this process stands by ``torch_sharding``.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from tracer.errors import Code, HostError, MapError
from tracer.format.schema import NotComputed, Span
from tracer.hosts.torch_sharding import chunk, data_axes, find_mesh, held_spans
from tracer.hosts.transformers_conditions import model_conditions
from tracer.hosts.transformers_inputs import InputReader, logit_rows
from tracer.hosts.transformers_placement import Placer, attention_columns
from tracer.hosts.transformers_sequences import CacheHistory, Labelled, SequenceTracker
from tracer.hosts.transformers_taps import ATTENTION, GENERATE, CacheWatch, ModuleListeners, cache_length, convolutions
from tracer.record.boundaries import Source
from tracer.record.host import Forward, HostParameter, Mesh, Placement, Rows, SkippedForward, TapSink
from tracer.record.map_entries import ROW_AXES, layout_axes
from tracer.record.tokens import SequenceRegistry

__all__ = ["TransformersHost", "claims", "create"]

BoolArray = npt.NDArray[np.bool_]

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
"""Where torch.compile, FSDP1, checkpoint_wrapper and DDP keep what they wrap."""

_ADAPTED = ("base_model", "model")
"""Where PEFT keeps the model: its own model holds a tuner, which holds the library's."""

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
    config: Any = cast("Any", _unwrap(model)).config
    if getattr(config, "is_encoder_decoder", False):
        raise HostError(
            Code.HOST_UNSUPPORTED,
            "encoder-decoder models are not covered: a token of the decoder depends on a second sequence, which a token key cannot say",
            found=type(_unwrap(model)).__name__,
            remedy="trace a decoder-only model",
        )
    # accelerate keeps what it offloads on the meta device between calls, and has a hook there
    if all(parameter.is_meta for parameter in model.parameters()) and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise _without_values()
    return TransformersHost(model, mesh)


@dataclass(frozen=True)
class _State:
    """What ``Forward.state`` carries from the start of a forward to its end."""

    labelled: Labelled
    cache: Any
    logit_rows: Rows | None
    """Rows of the logits, None where all rows have some."""
    kept_BS: BoolArray
    split_rows: dict[tuple[int, ...], Rows]
    """Rows of leaves that hold a part of the sequence axis, by the sizes of their row axes."""


class TransformersHost:
    """One transformers model in this process; implements ``tracer.record.host.Host``."""

    name = "transformers"
    environment_prefixes = ("TRANSFORMERS_", "ACCELERATE_", "FSDP_", "PEFT_", "KERNELS_")

    def __init__(self, model: torch.nn.Module, mesh: Mesh | None = None) -> None:
        self._outer = model
        self._model = cast("Any", _unwrap(model))
        self._modules, self._wrappers = _walk(model)
        self._mesh = mesh or find_mesh(self._model, _library_meshes(self._model))
        data = data_axes(self._model)
        scope = ",".join(f"{axis.name}={axis.index}" for axis in self._mesh.axes if axis.size > 1 and axis.name in data - {"efsdp"})
        self._tracker = SequenceTracker(scope)
        self._whole_sequences = all(axis.size == 1 for axis in self._mesh.axes if axis.name == "cp")
        self._placer = Placer(self._model.config.get_text_config(), self._mesh, self._modules, data)
        self._parts: dict[str, tuple[tuple[Span, ...], ...]] = {}
        self._caches = CacheWatch()
        self._inputs = InputReader(self._model)
        self._signature = _forward_signature(type(self._model))
        self._others = next((name for name, given in self._signature.parameters.items() if given.kind is given.VAR_KEYWORD), "")
        head = self._model.get_output_embeddings()
        self._logit_modules = {path for path, module in self._modules.items() if module is head}
        self._registry: SequenceRegistry | None = None
        self._forwards = 0
        self._past = self._columns = 0

    # what there is

    def root(self) -> torch.nn.Module:
        """The model itself; where it was given compiled, the compiled wrapper, whose own hooks always fire."""
        for wrapper in self._wrappers.get("", ()):
            if hasattr(wrapper, "_orig_mod"):
                return wrapper
        return self._model  # type: ignore[no-any-return]

    def root_class(self) -> str:
        return _library_class(self._model).__name__

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
                    owner = self._adapted_path(path)
                    parameter = _host_parameter(f"{owner}.{name}" if owner else name, tensor, buffer, path in flattened)
                    if parameter.tensor is None or parameter.tensor.numel() or not tensor.numel():
                        yield self._same_part(parameter)
            if "_packed_params" in module._modules and "weight" not in module._parameters:
                shape = (int(module.out_features), int(module.in_features))  # type: ignore[arg-type]
                yield HostParameter(f"{path}.weight", None, shape, unknown="packed by its quantized operator")

    def _adapted_path(self, path: str) -> str:
        """Path of a module as it is without an adapter around it."""
        outer, _, own = path.rpartition(".")
        return outer if own == "base_layer" and _is_adapter(self._modules[outer]) else path

    def _same_part(self, parameter: HostParameter) -> HostParameter:
        """The part that was shown the first time, where FSDP has gathered the whole since and not let it go yet."""
        spans = self._parts.setdefault(parameter.parameter, parameter.spans)
        if any(parameter.spans) or not any(spans) or parameter.tensor is None:
            return parameter
        tensor = parameter.tensor
        for dim, held in enumerate(spans):
            if held:
                tensor = torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in held], dim)
        return replace(parameter, tensor=tensor, spans=spans)

    def conditions(self) -> dict[str, Any]:
        return model_conditions(self._model, self._modules, self.root_class())

    def compiled_reason(self, module_path: str) -> str:
        remedy = 'run the traced call under torch.compiler.set_stance("force_eager"), or trace the model uncompiled'
        parts = module_path.split(".") if module_path else []
        for path in [".".join(parts[:n]) for n in range(len(parts), -1, -1)]:
            module = self._modules.get(path)
            compiled = any(hasattr(wrapper, "_orig_mod") for wrapper in self._wrappers.get(path, ()))
            if module is not None and not compiled:
                compiled = module._compiled_call_impl is not None or _is_compiled(module.forward)
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
        given.update(given.pop(self._others, {}))
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        shown = ids if ids is not None else embeds
        if not isinstance(shown, torch.Tensor) or shown.ndim < 2:
            return SkippedForward("no input_ids and no inputs_embeds")
        if shown.device.type == "meta":
            raise _without_values()
        cache = next((given[name] for name in _CACHE_NAMES if given.get(name) is not None), None)
        if type(cache).__name__ == "PagedAttentionCache":
            raise _unsupported("continuous batching keeps the rows of many requests in one paged cache", type(cache).__name__)
        history = self._caches.history(cache)
        batch, columns, past = shown.shape[0], shown.shape[1], cache_length(cache, history)
        if history is None and past == 0 and cache is not None:
            history = CacheHistory.empty(batch)
        call, position_N = self._inputs.read(self._forwards, given, cache, (batch, columns, past), history, sequences)
        if self._whole_sequences:
            labelled = self._tracker.label(call, history, sequences)
        elif past or not call.positions_given:
            found = "a cache" if past else "none given"
            raise _unsupported("under context parallelism only position_ids say which tokens these are", found)
        else:
            labelled = self._tracker.label_by_position(call, sequences)
        self._registry = sequences
        self._forwards += 1
        self._past, self._columns = past, columns
        kept_BS, rows_with_logits = logit_rows(given.get("logits_to_keep"), labelled.rows, batch, columns)
        return Forward(
            rows=labelled.rows,
            ids_N=None if call.ids_BS is None else call.ids_BS.reshape(-1),
            inputs={"input.positions": position_N, **({} if call.mask_unseen else {"input.visible_from": labelled.visible_from_N})},
            unseen={"input.visible_from": call.mask_unseen} if call.mask_unseen else {},
            skipped=labelled.skipped,
            state=_State(labelled, cache, rows_with_logits, kept_BS, {}),
        )

    def finish_forward(self, forward: Forward, output: Any) -> None:
        state: _State = forward.state
        self._tracker.note_logits(state.labelled, state.kept_BS)
        cache = state.cache if state.cache is not None else _cache_of(output)
        if cache is not None:
            self._caches.keep(cache, state.labelled.history)

    def leaf_rows(self, forward: Forward, source: Source, row_shape: tuple[int, ...]) -> Rows | None:
        state: _State = forward.state
        count = math.prod(row_shape) // _experts(source.layout, row_shape)
        logits = source.module in self._logit_modules or (source.module == "" and "logits" in source.leaf)
        rows = state.logit_rows if logits and state.logit_rows is not None else forward.rows
        return rows if count == len(rows) else self._split_rows(rows, state, row_shape)

    def _split_rows(self, rows: Rows, state: _State, row_shape: tuple[int, ...]) -> Rows | None:
        """Rows of a leaf whose sequence axis is cut over an axis of the mesh (sequence parallelism), None for any other."""
        batch, columns = state.kept_BS.shape
        for axis in self._mesh.axes if len(row_shape) == 2 and len(rows) == batch * columns else ():
            start, stop = chunk(columns, axis.size, axis.index)
            if axis.name in ("tp", "sp") and row_shape == (batch, stop - start):
                if row_shape not in state.split_rows:
                    whole = (array.reshape(batch, columns) for array in (rows.sequence_N, rows.position_N))
                    state.split_rows[row_shape] = Rows(*(array_BS[:, start:stop].reshape(-1) for array_BS in whole))
                return state.split_rows[row_shape]
        return None

    def placement(self, source: Source, columns: int, leaf: torch.Tensor) -> Placement:
        return self._placer.place(source, columns, leaf)

    def local_columns(self, boundary: str) -> int | None:
        """Columns of q, k and v, for models that project them in one piece."""
        name = boundary.rpartition(".attn.")[2]
        return attention_columns(self._model.config.get_text_config(), f"attn.{name}") if name in ("q", "k", "v") else None

    @contextlib.contextmanager
    def taps(self, sources: Iterable[Source], sink: TapSink) -> Iterator[None]:
        """Tap ``attention``: leaves q, k, v (this call's tokens only) and output of the modules in ``sources``. Tap
        ``convolution``: the output of a linear attention's. Caches and ``generate`` are followed while this context is open, so
        it is entered also where nothing is tapped."""
        heard: dict[ModuleListeners, dict[torch.nn.Module, Callable[..., None]]] = {}
        for source in sources:
            if not source.tap:
                continue
            module = self._modules.get(source.module)
            places = self._tap_places(source.tap, module)
            if module is None or not places:
                raise MapError(
                    Code.MAP_UNFIT,
                    f"the transformers host has no tap {source.tap!r} on module {source.module!r}",
                    where=source.boundary,
                    expected="tap: attention on an attention module of the model, convolution on a linear attention",
                )
            for place in places:
                heard.setdefault(place, {})[module] = self._listener(source.module, sink)
        heard[GENERATE] = {self._model: self._generated}
        self._caches.open()
        for place, listeners in heard.items():
            place.add(listeners)
        try:
            yield
        finally:
            for place, listeners in reversed(heard.items()):
                place.remove(listeners)
            self._caches.close()

    def _tap_places(self, tap: str, module: torch.nn.Module | None) -> tuple[ModuleListeners, ...]:
        """What to listen to for a tap on a module; nothing where there is no such tap."""
        if tap == "convolution" and module is not None:
            return convolutions(_library_class(module).__module__)
        return (ATTENTION,) if tap == "attention" else ()

    def not_computed(self) -> Iterable[NotComputed]:
        return self._tracker.not_computed()

    def _listener(self, path: str, sink: TapSink) -> Callable[[str, torch.Tensor], None]:
        columns = 0

        def listen(leaf: str, tensor: torch.Tensor) -> None:
            nonlocal columns
            if tensor.dim() == 3:  # of a convolution: what a cache kept stands before this call's tokens
                tensor = tensor[:, :, -self._columns :]
            elif leaf == "q":
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


def _forward_signature(kind: type) -> inspect.Signature:
    """Of a model's forward: of the nearest class whose own names its arguments, instead of only passing them on (``*args, **kwargs``)."""
    signatures = [inspect.signature(base.__dict__["forward"]) for base in kind.__mro__ if "forward" in base.__dict__]
    passed_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [each for each in signatures if any(given.kind not in passed_on for given in list(each.parameters.values())[1:])]
    return (named or signatures)[0]


def _is_library_model(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def _is_adapter(module: torch.nn.Module) -> bool:
    """Whether a module is PEFT's: its model, a tuner, or a layer that wraps one of the library's."""
    return any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def _wrapped(module: torch.nn.Module) -> torch.nn.Module | None:
    """What ``module`` wraps, None where it is no wrapper."""
    for attribute in _ADAPTED if _is_adapter(module) else ():
        if attribute in module._modules:
            return module._modules[attribute]
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


def _library_class(module: torch.nn.Module) -> type:
    """Class as the library has it: FSDP2 makes a subclass of its own, ``FSDP<Class>``."""
    return next(
        kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers.") or not kind.__name__.startswith("FSDP")
    )


def _experts(layout: str, row_shape: tuple[int, ...]) -> int:
    """Rows per token of a leaf: as many as its expert axis says, else one."""
    axes = [axis for dimension in layout_axes(layout) or () for axis in dimension if axis in ROW_AXES]
    return max(row_shape[axes.index("e")], 1) if "e" in axes and len(axes) == len(row_shape) else 1


def _is_compiled(function: Any) -> bool:
    """Whether ``torch.compile`` made it, be it the module's own or its class's (``torch.compiler.disable`` leaves the same mark)."""
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def _unsupported(what: str, found: str) -> HostError:
    return HostError(
        Code.HOST_UNSUPPORTED,
        f"the transformers host cannot record this run: {what}",
        found=found,
        remedy="run whole batches through the model itself, with position_ids and without a cache under context parallelism",
    )


def _without_values() -> HostError:
    return HostError(
        Code.HOST_UNSUPPORTED,
        "a model on the meta device computes no values",
        found="parameters or inputs on the meta device",
        remedy="trace it once its weights are loaded; `tracer map check` needs no weights",
    )


def _library_meshes(model: Any) -> list[Any]:
    """The device meshes the library laid the model out on: one for the dense parts, one for experts."""
    meshes = [getattr(model, "_device_mesh", None)]
    manager = getattr(model, "_mesh_manager", None)
    if manager is not None:
        meshes += [manager.get_mesh(name) for name in ("tp", "ep")]
    return [mesh for mesh in meshes if mesh is not None]


def _host_parameter(name: str, tensor: torch.Tensor, buffer: bool, flattened: bool) -> HostParameter:
    shape = tuple(tensor.shape)
    if flattened:
        return HostParameter(name, None, shape, buffer=buffer, unknown="FSDP1 keeps it flattened and sharded between forwards")
    if tensor.device.type == "meta":
        return HostParameter(name, None, shape, buffer=buffer, unknown="offloaded: its values are not in memory")
    held: Any = tensor.detach()
    if hasattr(held, "placements"):
        spans, unknown = held_spans(held)
        return HostParameter(name, None if unknown else held.to_local(), shape, spans, buffer, unknown)
    if type(held) not in (torch.Tensor, torch.nn.Parameter):
        return HostParameter(name, None, shape, buffer=buffer, unknown=f"stored as {type(held).__name__}")
    return HostParameter(name, held, shape, buffer=buffer)


def _cache_of(output: Any) -> Any:
    """The cache in a model's output, whatever its form."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return next((value for value in values if hasattr(value, "get_seq_length")), None)
