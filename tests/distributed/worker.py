"""Runs traced cases in every process of one launch: ``torchrun worker.py MODELS TRACES CASE ...``.

A case is ``family:layout``. ``MODELS`` holds saved models by family and ``ids.safetensors``; every case writes ``TRACES/family-layout``.
What a case raises is written to ``TRACES/family-layout.rank`` and ends that case only.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from tracer import trace

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
LEVEL = 2

CONFIGS: dict[str, dict[str, Any]] = {
    "tp": {"tp_size": WORLD, "tp_plan": "auto"},
    "tp_ep": {"tp_size": WORLD, "ep_size": WORLD, "tp_plan": "auto"},
    "hf_fsdp": {"fsdp_size": WORLD},
    "fsdp_tp": {"fsdp_size": WORLD // 2, "tp_size": 2, "tp_plan": "auto"},
    "fsdp_ep": {"fsdp_size": WORLD, "ep_size": WORLD},
    "fsdp_tp_ep": {"fsdp_size": WORLD // 2, "tp_size": 2, "ep_size": WORLD, "tp_plan": "auto"},
    "pp": {"pp_size": WORLD},
}
"""Layouts of the library's own."""


def load(models: Path, family: str, **more: Any) -> Any:
    settings = {"dtype": torch.float32, "attn_implementation": "eager", **more}
    model: Any = AutoModelForCausalLM.from_pretrained(models / family, **settings)
    model.eval()
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"
    return model


def torch_plan(layers: int, sequence: bool, local: bool = True) -> dict[str, Any]:
    """Tensor parallelism of a decoder as a user of torch would write it; ``sequence``: the residual stream is cut by tokens."""
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=local),
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan["model.norm"] = SequenceParallel(use_local_output=local)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        if sequence:
            given, wanted = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
            plan[at + "input_layernorm"] = SequenceParallel(use_local_output=local)
            plan[at + "post_attention_layernorm"] = SequenceParallel(use_local_output=local)
            kwargs: dict[str, Any] = {"input_kwarg_layouts": given, "desired_input_kwarg_layouts": wanted}
            plan[at + "self_attn"] = PrepareModuleInput(**kwargs, use_local_output=local)
            plan[at + "mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=local)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[at + name] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[at + name] = RowwiseParallel(output_layouts=stream, use_local_output=local)
    return plan


def names_of(ids: torch.Tensor) -> list[str]:
    return [f"p{int(row[0])}" for row in ids]


def forward(model: Any, ids: torch.Tensor, out: Path, grad: bool = False, **arguments: Any) -> None:
    """One traced forward, with gradients and a backward where asked."""
    with trace(model, out=out, strict=True, level=LEVEL) as t:
        t.requests(names_of(ids))
        with torch.set_grad_enabled(grad):
            output = model(input_ids=ids, use_cache=False, **arguments)
            if grad:
                output.logits.float().square().mean().backward()


def library(family: str, layout: str, models: Path, out: Path, ids: torch.Tensor) -> None:
    model = load(models, family, distributed_config=DistributedConfig(**CONFIGS[layout]))
    forward(model, ids, out)


def parallelized(family: str, layout: str, models: Path, out: Path, ids: torch.Tensor) -> None:
    """``parallelize_module`` with loss-parallel logits, without and with sequence parallelism."""
    model = load(models, family)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    sequence = layout != "torch_tp"
    parallelize_module(model, mesh, torch_plan(model.config.num_hidden_layers, sequence, local=layout != "torch_sp_dtensor"))
    columns = ids.shape[1]
    mask = torch.full((1, 1, columns, columns), torch.finfo(torch.float32).min).triu(1)
    forward(model, ids, out, position_ids=torch.arange(columns)[None], attention_mask=mask)


def head_only(family: str, layout: str, models: Path, out: Path, ids: torch.Tensor) -> None:
    """Only the vocabulary is cut, so that logits are bitwise those of one process. ``by_hand``: the user scores every token
    on the process that has its column, and normalises over that process's columns alone, which is wrong."""
    model = load(models, family)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    with trace(model, out=out, strict=True, level=LEVEL) as t, torch.no_grad():
        names = names_of(ids)
        t.requests(names)
        logits = model(input_ids=ids, use_cache=False).logits.to_local()
        for b, name in enumerate(names if layout == "head_tp_by_hand" else ()):
            start = RANK * logits.shape[-1]
            target = ids[b, 1:] - start
            own = ((target >= 0) & (target < logits.shape[-1])).nonzero()[:, 0]
            scores = logits[b, own].float().log_softmax(-1).gather(1, target[own, None])[:, 0]
            t.record("scorer.logprobs", scores, sequence=name, positions=own.numpy())


def own_rows(ids: torch.Tensor, index: int, size: int) -> torch.Tensor:
    """The requests of one data-parallel process."""
    step = len(ids) // size
    return ids[index * step : (index + 1) * step]


def fsdp(family: str, layout: str, models: Path, out: Path, ids: torch.Tensor) -> None:
    """FSDP2 with other requests on every process, or the same; ``ckpt``: activations recomputed in backward, by the library
    (``reentrant`` or not) or by torch's wrapper."""
    model = load(models, family)
    if "ckpt" in layout:
        model.train()
    if "wrapper" in layout:
        apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.model.layers))
    elif "ckpt" in layout:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": "reentrant" in layout})
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = ids if "same" in layout else own_rows(ids, RANK, WORLD)
    forward(model, rows, out, grad="ckpt" in layout)


def ddp(family: str, layout: str, models: Path, out: Path, ids: torch.Tensor) -> None:
    model = load(models, family)
    model.requires_grad_(True)
    forward(DistributedDataParallel(model), own_rows(ids, RANK, WORLD), out)


def composed(family: str, layout: str, models: Path, out: Path, ids: torch.Tensor) -> None:
    """FSDP2 over tensor parallelism, both by torch, requests cut over the data axis."""
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    model = load(models, family)
    parallelize_module(model, mesh["tp"], torch_plan(model.config.num_hidden_layers, sequence=False))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    forward(model, own_rows(ids, mesh.get_local_rank("dp"), WORLD // 2), out)


def ring_on_cpu() -> None:
    """A handler for the attention operator of the CPU, which torch's ring attention has none for."""
    import torch.distributed.tensor.experimental._context_parallel._attention as ring
    from torch.distributed.tensor import DTensor

    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend(q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None, scale: Any = None) -> Any:
        query, key, value = (tensor.to_local() for tensor in (q, k, v))
        done = ring._templated_ring_attention(
            q.device_mesh.get_group(), 2, operator, query=query, key=key, value=value,
            is_causal=is_causal, dropout_p=dropout_p, attn_mask=None, scale=scale,
        )[:2]  # fmt: skip
        return tuple(DTensor.from_local(tensor, q.device_mesh, q.placements, run_check=False) for tensor in done)

    operators: dict[Any, Any] = ring.custom_ops
    operators[operator.default] = lambda op, args, kwargs: attend(*args, **kwargs)


def context(family: str, layout: str, models: Path, out: Path, ids: torch.Tensor) -> None:
    """Ring attention over tokens in head-tail order."""
    from accelerate.big_modeling import _attach_context_parallel_hooks  # type: ignore[import-untyped]
    from torch.distributed.tensor.experimental import context_parallel

    ring_on_cpu()
    model = load(models, family, attn_implementation="sdpa")
    _attach_context_parallel_hooks(model)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    ids = ids.clone()
    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1).contiguous()
    names = names_of(ids)
    placed = {"cp": (mesh.get_local_rank("cp"), WORLD)}
    with trace(model, out=out, strict=True, level=LEVEL, mesh=placed) as t, torch.no_grad():
        t.requests(names)
        with context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
            model(input_ids=ids, position_ids=positions, use_cache=False)


def off(family: str, layout: str, models: Path, out: Path, ids: torch.Tensor) -> None:
    """Tensor parallelism in which one process computes a replicated norm a little differently."""
    model = load(models, family, distributed_config=DistributedConfig(**CONFIGS["tp"]))
    if RANK == 1:
        model.model.layers[1].input_layernorm.register_forward_hook(lambda module, args, output: output * 1.001)
    forward(model, ids, out)


def killed(family: str, layout: str, models: Path, out: Path, ids: torch.Tensor) -> None:
    """Process 1 dies inside the trace, after process 0 has committed. Nothing can run after this case."""
    model = load(models, family, distributed_config=DistributedConfig(**CONFIGS["tp"]))
    with trace(model, out=out, level=LEVEL), torch.no_grad():
        model(input_ids=ids, use_cache=False)
        while RANK == 1:
            if (out / "shard-00000" / "manifest.json").exists():
                os._exit(9)
            time.sleep(0.05)


CASES: dict[str, Callable[[str, str, Path, Path, torch.Tensor], None]] = {
    **dict.fromkeys(CONFIGS, library),
    "torch_tp": parallelized,
    "torch_sp": parallelized,
    "torch_sp_dtensor": parallelized,
    "head_tp": head_only,
    "head_tp_by_hand": head_only,
    "fsdp": fsdp,
    "fsdp_same": fsdp,
    "fsdp_ckpt_same": fsdp,
    "fsdp_ckpt_reentrant": fsdp,
    "fsdp_ckpt_wrapper": fsdp,
    "ddp": ddp,
    "torch_fsdp_tp": composed,
    "cp": context,
    "off": off,
    "killed": killed,
}


def main() -> None:
    models, traces = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ids = load_file(models / "ids.safetensors")["ids"]
    for case in sys.argv[3:]:
        family, layout = case.split(":")
        out = traces / f"{family}-{layout}"
        try:
            CASES[layout](family, layout, models, out, ids)
        except Exception:
            out.with_suffix(f".rank{RANK}").write_text(traceback.format_exc())
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
