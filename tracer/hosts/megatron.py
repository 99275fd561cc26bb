"""The Megatron-core host: a ``GPTModel``, plain or wrapped, on any mesh of tensor, sequence, expert, data and pipeline parallelism.

Written against 0.16. What a call says about its rows is read in ``megatron_rows``, which part of a row or parameter this process
holds in ``megatron_layout`` and ``megatron_parameters``; ``megatron_taps`` shows what no module does. No collective is called.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tracer.errors import Code, HostError, MapError
from tracer.format.schema import Axis, NotComputed
from tracer.hosts.megatron_conditions import model_conditions
from tracer.hosts.megatron_layout import Heads, contiguous, gate_up
from tracer.hosts.megatron_parameters import ParameterReader
from tracer.hosts.megatron_rows import RowOrder, RowReader, unsupported
from tracer.hosts.megatron_taps import TAPS
from tracer.record.boundaries import Source
from tracer.record.host import Forward, HostParameter, Mesh, Placement, Rows, SkippedForward, TapSink
from tracer.record.map_entries import ROW_AXES, layout_axes
from tracer.record.tokens import SequenceRegistry

__all__ = ["MegatronHost", "OtherStage", "claims", "create"]

_WRAPPERS = ("DistributedDataParallel", "Float16Module", "TorchFullyShardedDataParallel")
_STAGED = ("embedding", "decoder.final_layernorm", "output_layer")
"""Modules that only the first or the last pipeline stage has."""


class OtherStage(torch.nn.Module):
    """Stands where another pipeline stage has a module; it is never called."""


def claims(model: Any) -> bool:
    """Whether ``model`` is a Megatron-core GPT model, wrappers looked through. Imports nothing."""
    return _is_gpt(_unwrap(model))


def create(model: Any, mesh: Mesh | None) -> MegatronHost:
    """The host of ``model``. Raises HostError (host-unknown, host-unsupported)."""
    import megatron.core  # noqa: F401  its absence is find_host's error

    if not claims(model):
        raise HostError(
            Code.HOST_UNKNOWN,
            f"the megatron host does not know {type(model).__name__}",
            expected="a megatron-core GPTModel, wrapped or not, or a list with one",
            found=f"{type(model).__module__}.{type(model).__qualname__}",
            remedy="pass the GPTModel itself; a virtual pipeline has several chunks and is not supported",
        )
    return MegatronHost(model, mesh)


class MegatronHost:
    """One GPT model chunk in this process; implements ``tracer.record.host.Host``."""

    name = "megatron"

    def __init__(self, model: Any, mesh: Mesh | None = None, *, vocabulary: int | None = None) -> None:
        """``vocabulary``: number of tokens, where the model's own (padded) size is larger; padding columns are dropped then."""
        self._model = _unwrap(model)
        self._config = config = self._model.config
        self._mesh = mesh or _process_mesh(bool(config.num_moe_experts))
        self._tp = self._place("tp")
        self._sequence_parallel = bool(config.sequence_parallel) and self._tp[1] > 1
        groups = config.num_query_groups or config.num_attention_heads
        self._heads = Heads(config.num_attention_heads, groups, config.kv_channels)
        self._padded = int(self._model.vocab_size)
        self._vocabulary = vocabulary or self._padded
        self._modules, self._other_stages = _walk(self._model, config.num_layers, self._place("pp")[1])
        self._signature = inspect.signature(type(self._model).forward)
        dp = self._place("dp")
        scope = f"dp={dp[0]}" if dp[1] > 1 else ""
        rotary = getattr(self._model, "position_embedding_type", "") in ("rope", "yarn")
        self._reader = RowReader(scope, rotary, self._place("cp"))
        self._forwards = 0

    # what there is

    def root(self) -> torch.nn.Module:
        return self._model  # type: ignore[no-any-return]

    def root_class(self) -> str:
        """The class, with what tells one family from another: ``GPTModel[moe,qk_norm]``."""
        config, model = self._config, self._model
        bias = bool(config.add_bias_linear)
        features = {
            "bias": bias,
            "layernorm": config.normalization != "RMSNorm",
            "mla": bool(getattr(config, "multi_latent_attention", False)),
            "moe": bool(config.num_moe_experts),
            "mtp": bool(getattr(config, "mtp_num_layers", None)),
            "no_gate": not config.gated_linear_unit,
            "no_rope": getattr(model, "position_embedding_type", "") != "rope",
            "qk_norm": bool(config.qk_layernorm),
            "qkv_bias": bool(config.add_qkv_bias) and not bias,
            "shared_expert": bool(getattr(config, "moe_shared_expert_intermediate_size", None)),
        }
        told = ",".join(name for name, present in features.items() if present)
        return type(model).__name__ + (f"[{told}]" if told else "")

    def modules(self) -> Mapping[str, torch.nn.Module]:
        return self._modules | self._other_stages

    def mesh(self) -> Mesh:
        return self._mesh

    def parameters(self) -> Iterator[HostParameter]:
        model = self._model
        tied = None
        if getattr(model, "share_embeddings_and_output_weights", False) and model.post_process and model.pre_process:
            tied = model.shared_embedding_or_output_weight()
        return ParameterReader(self._config, self._heads, self._mesh, self._vocabulary).read(self._modules, tied)

    def conditions(self) -> dict[str, Any]:
        return model_conditions(self._model, self._modules, {axis.name: axis.size for axis in self._mesh.axes}, self._vocabulary)

    def compiled_reason(self, module_path: str) -> str:
        module = self._modules.get(module_path)
        if module is not None and module._compiled_call_impl is not None:
            return f"{module_path or 'the model'} is compiled: a compiled region runs only the hooks it was compiled with"
        if getattr(self._config, "enable_cuda_graph", False) or getattr(self._config, "cuda_graph_impl", "none") != "none":
            return "CUDA graphs replay layers without their hooks; trace with cuda_graph_impl='none'"
        return ""

    # one forward

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sequences: SequenceRegistry) -> Forward | SkippedForward:
        """Label the rows of a call. Raises HostError (host-unsupported) for calls whose rows cannot be known."""
        try:
            given = self._signature.bind(self._model, *args, **kwargs).arguments
        except TypeError:
            return SkippedForward("the call does not fit the model's forward")
        if given.get("inference_context") is not None or given.get("inference_params") is not None:
            raise unsupported("generation keeps rows in an inference context", "inference_context")
        shape = self._shape(given)
        if shape is None:
            return SkippedForward("no input_ids, and no input of the stage before")
        number, self._forwards = self._forwards, self._forwards + 1
        return self._reader.read(number, given, shape, sequences)

    def _shape(self, given: Mapping[str, Any]) -> tuple[int, int] | None:
        """Batch rows and columns of a call, as this context-parallel process is given them."""
        ids = given.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            return ids.shape[0], ids.shape[1]
        hidden = given.get("decoder_input")
        if hidden is None:
            hidden = getattr(self._model.decoder, "input_tensor", None)
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3:
            return None
        return hidden.shape[1], hidden.shape[0] * (self._tp[1] if self._sequence_parallel else 1)

    def finish_forward(self, forward: Forward, output: Any) -> None:
        pass

    def leaf_rows(self, forward: Forward, source: Source, row_shape: tuple[int, ...]) -> Rows | None:
        order: RowOrder = forward.state
        axes = _row_axes(source.layout)
        cut = self._sequence_parallel and dict(source.shard).get("tp", "") in ROW_AXES
        rows = order.ordered(axes[0] != "b", self._tp if cut else (0, 1))
        return rows if len(rows) == math.prod(row_shape) else None

    def placement(self, source: Source, columns: int, leaf: torch.Tensor) -> Placement:
        rank, size = self._tp
        axis = dict(source.shard).get("tp", "")
        if source.boundary == "lm_head" or source.derived == "logprobs":
            if columns == self._padded:
                return Placement(self._vocabulary, ((0, self._vocabulary),))
            start, stop = (min(edge, self._vocabulary) for edge in contiguous(self._padded, rank, size))
            return Placement(self._vocabulary, ((start, stop),), axis="tp")
        name = source.boundary.split(".", 2)[-1]
        if not axis or axis in ROW_AXES or size == 1:
            return Placement(columns)
        if name in ("attn.k", "attn.v", "attn.k_norm", "attn.k_rope"):
            return Placement(self._heads.key, (self._heads.key_span(rank, size),))
        if name == "mlp.gate_up" and self._config.gated_linear_unit:
            width = columns // 2 * size
            return Placement(2 * width, gate_up(width, rank, size))
        return Placement(columns * size, (contiguous(columns * size, rank, size),))

    def local_columns(self, boundary: str) -> int | None:
        """Rows of q, k and v in the packed projection."""
        if boundary.endswith(".attn.q"):
            return self._heads.query
        return self._heads.key if boundary.endswith((".attn.k", ".attn.v")) else None

    @contextlib.contextmanager
    def taps(self, sources: Iterable[Source], sink: TapSink) -> Iterator[None]:
        """Taps ``attention`` and ``router``, see ``megatron_taps``."""
        wanted: dict[tuple[str, str], list[str]] = {}
        for source in sources:
            if source.tap not in TAPS or source.module not in self._modules:
                raise MapError(
                    Code.MAP_UNFIT,
                    f"the megatron host has no tap {source.tap!r} on module {source.module!r}",
                    where=source.boundary,
                    expected=f"tap: {' or '.join(TAPS)}, on a module of the model",
                )
            wanted.setdefault((source.tap, source.module), []).append(source.leaf)
        with contextlib.ExitStack() as stack:
            for (tap, path), leaves in wanted.items():
                stack.enter_context(TAPS[tap](self._modules[path], path, leaves, sink))
            yield

    def not_computed(self) -> Iterable[NotComputed]:
        return ()

    def _place(self, axis: str) -> tuple[int, int]:
        found = self._mesh.axis(axis)
        return (0, 1) if found is None else (found.index, found.size)


def _is_gpt(model: Any) -> bool:
    return any(kind.__name__ == "GPTModel" and kind.__module__.startswith("megatron.core.") for kind in type(model).__mro__)


def _unwrap(model: Any) -> Any:
    """The model inside wrappers; of a list of chunks, as Megatron's training code keeps it, the only one."""
    if isinstance(model, list | tuple) and len(model) == 1:
        model = model[0]
    while not _is_gpt(model) and type(model).__name__ in _WRAPPERS and hasattr(model, "module"):
        model = model.module
    return model


def _walk(model: Any, layers: int, stages: int) -> tuple[dict[str, torch.nn.Module], dict[str, torch.nn.Module]]:
    """Modules by path, layers numbered over the whole model, and stand-ins for what other pipeline stages have."""
    numbers = {f"decoder.layers.{n}": f"decoder.layers.{layer.layer_number - 1}" for n, layer in enumerate(model.decoder.layers)}
    modules: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        layer = ".".join(path.split(".")[:3])
        modules[numbers[layer] + path[len(layer) :] if layer in numbers else path] = module
    if stages == 1:
        return modules, {}
    expected = [*_STAGED, *(f"decoder.layers.{n}" for n in range(layers))]
    return modules, {path: OtherStage() for path in expected if path not in modules}


def _process_mesh(experts: bool) -> Mesh:
    """This process among all, from Megatron's process groups. ``experts``: expert axes too, a grid of their own."""
    from megatron.core import parallel_state as groups

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Mesh()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not groups.model_parallel_is_initialized():
        return Mesh(rank, world)
    places = [
        ("pp", groups.get_pipeline_model_parallel_rank(), groups.get_pipeline_model_parallel_world_size()),
        ("dp", groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()),
        ("cp", groups.get_context_parallel_rank(), groups.get_context_parallel_world_size()),
        ("tp", groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()),
    ]
    if experts:
        places += [
            ("ep", groups.get_expert_model_parallel_rank(), groups.get_expert_model_parallel_world_size()),
            ("etp", groups.get_expert_tensor_parallel_rank(), groups.get_expert_tensor_parallel_world_size()),
        ]
    return Mesh(rank, world, tuple(Axis(name=name, index=index, size=size) for name, index, size in places))


def _row_axes(layout: str) -> list[str]:
    return [axis for dimension in layout_axes(layout) or () for axis in dimension if axis in ROW_AXES]
