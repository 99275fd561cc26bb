"""Records every case of ``CASES``: ``python worker.py FOLDER``.

A case is ``family:layout``, in a world of so many processes, and writes ``FOLDER/WORLD/family-layout``; the worlds are forked
one after the other by this process, which imported everything once. The world of one process saves the models,
and is what the others are held against. What a case raises is written to ``FOLDER/WORLD/family-layout.rankN`` and ends that case only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch._dynamo
import torch.distributed as dist
from accelerate.big_modeling import _attach_context_parallel_hooks  # type: ignore[import-untyped]
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import tracer.hosts.transformers
from tests.ranks import run_world
from tests.tiny_models import make_ids, make_model
from tracer import TracerError, diff_traces, open_trace, trace
from tracer.format.dumps import DumpPlan, PlanWeight, write_plan
from tracer.read.dump_plans import make_dump_plan

IMPORTED = (torch._dynamo, LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, tracer.hosts.transformers)
"""What every process would import at its first use."""
ROOT = Path(sys.argv[1]) if __name__ == "__main__" else Path()
MODELS = ROOT / "models"
IDS = make_ids(4, 16, seed=5) % 250

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 2}),
    "llama": ("llama", {"num_hidden_layers": 2}),
    "uneven": ("qwen3", {"intermediate_size": 126, "vocab_size": 250, "num_key_value_heads": 4, "num_hidden_layers": 2}),
}
"""Name -> family of ``tiny_models``, and what is changed of its config."""

ONE = ("qwen3:whole", "qwen3_moe:whole", "qwen3_moe:whole_each", "llama:whole", "llama:whole_short", "uneven:whole")
TWO = (
    "qwen3:tp", "qwen3_moe:tp", "llama:tp", "qwen3_moe:tp_ep", "qwen3_moe:tp_ep_grad",
    "qwen3:torch_tp", "qwen3_moe:torch_tp", "llama:torch_tp",
    "qwen3:torch_sp", "llama:torch_sp", "llama:torch_sp_dtensor", "llama:torch_sp_dtensor_short", "llama:torch_loss",
    "qwen3:hf_fsdp", "qwen3_moe:hf_fsdp", "llama:hf_fsdp", "qwen3:fsdp", "qwen3_moe:fsdp_each", "llama:fsdp",
    "qwen3:fsdp_ckpt", "qwen3_moe:fsdp_ckpt_each", "llama:fsdp_ckpt", "qwen3_moe:fsdp_ckpt_reentrant_same", "llama:fsdp_ckpt_reentrant",
    "qwen3:fsdp_ckpt_wrapper", "qwen3:ddp", "llama:ddp", "qwen3:pp", "qwen3_moe:pp", "llama:pp", "qwen3:cp", "qwen3_moe:cp", "llama:cp",
    "llama:head_tp", "llama:head_tp_by_hand", "llama:torch_tp_model",
    "qwen3_moe:evidence_tp", "qwen3_moe:evidence_tp_ep", "llama:evidence_torch_sp_dtensor", "llama:evidence_fsdp", "llama:evidence_pp",
    "llama:evidence_cp",
    "qwen3:tp_levels", "qwen3:tp_outs", "qwen3:off", "qwen3:tp_counted", "llama:fsdp_counted", "llama:killed",
)  # fmt: skip
FOUR = (
    "uneven:tp", "qwen3:fsdp_tp", "qwen3_moe:fsdp_tp", "llama:fsdp_tp",
    "qwen3:torch_fsdp_tp", "qwen3_moe:torch_fsdp_tp_each", "llama:torch_fsdp_tp", "llama:torch_fsdp_tp_permuted",
    "qwen3_moe:fsdp_tp_ep", "qwen3_moe:fsdp_tp_ep2", "qwen3_moe:fsdp_ep", "qwen3:pp", "llama:cp",
)  # fmt: skip
CASES = {1: ONE, 2: TWO, 4: FOUR}
BLOCK_INPUTS = ["embedding", "layers.*.residual"]


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def rank() -> int:
    return int(os.environ["RANK"])


def config(layout: str) -> DistributedConfig:
    """A layout of the library's own."""
    given: dict[str, dict[str, Any]] = {
        "tp": {"tp_size": world(), "tp_plan": "auto"},
        "tp_ep": {"tp_size": world(), "ep_size": world(), "tp_plan": "auto"},
        "hf_fsdp": {"fsdp_size": world()},
        "fsdp_tp": {"fsdp_size": world() // 2, "tp_size": 2, "tp_plan": "auto"},
        "fsdp_ep": {"fsdp_size": world(), "ep_size": world()},
        "fsdp_tp_ep": {"fsdp_size": world() // 2, "tp_size": 2, "ep_size": world(), "tp_plan": "auto"},
        "fsdp_tp_ep2": {"fsdp_size": world() // 2, "tp_size": 2, "ep_size": 2, "tp_plan": "auto"},
        "pp": {"pp_size": world()},
    }
    return DistributedConfig(**given[re.sub("_(grad|levels|outs)$", "", layout)])


def load(family: str, **more: Any) -> Any:
    settings = {"dtype": torch.float32, "attn_implementation": "eager", **more}
    model: Any = AutoModelForCausalLM.from_pretrained(MODELS / family, **settings)
    model.eval()
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"
    return model


def torch_plan(model: Any, sequence: bool, local: bool = True) -> dict[str, Any]:
    """Tensor parallelism of a decoder as a user of torch would write it; ``sequence``: the residual stream is cut by tokens.
    Experts stay whole on every process."""
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=local),
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        plan["model.norm"] = SequenceParallel(use_local_output=local)
    experts = hasattr(model.model.layers[0].mlp, "experts")
    for layer in range(model.config.num_hidden_layers):
        at = f"model.layers.{layer}."
        if sequence:
            given, wanted = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
            plan[at + "input_layernorm"] = SequenceParallel(use_local_output=local)
            plan[at + "post_attention_layernorm"] = SequenceParallel(use_local_output=local)
            kwargs: dict[str, Any] = {"input_kwarg_layouts": given, "desired_input_kwarg_layouts": wanted}
            plan[at + "self_attn"] = PrepareModuleInput(**kwargs, use_local_output=local)
            plan[at + "mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=local)
        mlp = ((), ()) if experts else (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", *mlp[0]):
            plan[at + name] = ColwiseParallel()
        for name in ("self_attn.o_proj", *mlp[1]):
            plan[at + name] = RowwiseParallel(output_layouts=stream, use_local_output=local)
    return plan


def names_of(ids: torch.Tensor) -> list[str]:
    return [f"p{int(row[0])}" for row in ids]


def own_rows(index: int, size: int) -> torch.Tensor:
    """The requests of one data-parallel process."""
    step = len(IDS) // size
    return IDS[index * step : (index + 1) * step]


def collectives() -> int:
    """Collectives that all process groups have run so far, from whichever thread."""
    groups: Iterable[Any] = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def forward(
    model: Any,
    out: Path,
    ids: torch.Tensor = IDS,
    *,
    level: int = 2,
    grad: bool = False,
    each: bool = False,
    between: Any = None,
    dump: Any = None,
    **arguments: Any,
) -> None:
    """One traced forward, or one for each request; with a backward where asked. ``between``: gives the loss of an output.
    Neither the beginning of a trace nor its end runs a collective."""
    before = collectives()
    with trace(model, out=out, strict=True, level=level, dump=dump) as t:
        assert collectives() == before, "entering a trace ran a collective"
        for rows in [ids[n : n + 1] for n in range(len(ids))] if each else [ids]:
            t.requests(names_of(rows))
            with torch.set_grad_enabled(grad):
                output = model(input_ids=rows, use_cache=False, **arguments)
                if grad:
                    loss = between(output, rows) if between is not None else output.logits.float().square().mean()
                    loss.backward()
        before = collectives()
    assert collectives() == before, "leaving a trace ran a collective"


def whole(family: str, layout: str, out: Path) -> None:
    """One process, which saves the model first; ``each``: one forward for every request; ``short``: an odd number of tokens."""
    if not (MODELS / family).exists():
        name, changes = FAMILIES[family]
        make_model(name, **changes).save_pretrained(MODELS / family)
    forward(load(family), out, IDS[:, :15] if "short" in layout else IDS, each="each" in layout, dump=BLOCK_INPUTS)


def library(family: str, layout: str, out: Path) -> None:
    """``grad``: with gradients, under which experts get their tokens by all-to-all. ``levels``: the processes record other levels.
    ``outs``: they record into other folders."""
    level = 2 - rank() if "levels" in layout else 2
    out = out.with_name(f"{out.name}-{rank()}") if "outs" in layout and rank() else out
    forward(load(family, distributed_config=config(layout)), out, level=level, grad="grad" in layout)


def parallelized(family: str, layout: str, out: Path) -> None:
    """``parallelize_module`` with logits cut over the vocabulary, without and with sequence parallelism; ``loss``: and a
    loss over the cut logits. ``model``: the axis has a name of its own, and the processes stand in another order on it."""
    model = load(family)
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("tp",))
    if "model" in layout:
        mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("model",))
    ids = IDS[:, :15] if "short" in layout else IDS
    sequence = "sp" in layout
    plan = torch_plan(model, sequence, local="dtensor" not in layout)
    if "model" in layout:
        del plan["model.embed_tokens"]  # torch looks ids up by coordinate in a table it cut by group rank: other values
    parallelize_module(model, mesh, plan)
    columns = ids.shape[1]
    mask = torch.full((1, 1, columns, columns), torch.finfo(torch.float32).min).triu(1)
    given: dict[str, Any] = {"position_ids": torch.arange(columns)[None], "attention_mask": mask}
    if "loss" not in layout:
        forward(model, out, ids, **given)
        return
    with loss_parallel():
        forward(
            model,
            out,
            grad=True,
            between=lambda output, ids: torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten().roll(-1)),
            **given,
        )


def head_only(family: str, layout: str, out: Path) -> None:
    """Only the vocabulary is cut, so that logits are bitwise those of one process. ``by_hand``: the user scores every token
    on the process that has its column, and normalises over that process's columns alone, which is wrong."""
    model = load(family)
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    with trace(model, out=out, strict=True, level=2) as t, torch.no_grad():
        names = names_of(IDS)
        t.requests(names)
        logits = model(input_ids=IDS, use_cache=False).logits.to_local()
        for b, name in enumerate(names if layout == "head_tp_by_hand" else ()):
            start = rank() * logits.shape[-1]
            target = IDS[b, 1:] - start
            own = ((target >= 0) & (target < logits.shape[-1])).nonzero()[:, 0]
            scores = logits[b, own].float().log_softmax(-1).gather(1, target[own, None])[:, 0]
            t.record("scorer.logprobs", scores, sequence=name, positions=own.numpy())


def shard_fully(model: Any, mesh: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp(family: str, layout: str, out: Path) -> None:
    """FSDP2 with other requests on every process, or the same; ``ckpt``: activations recomputed in backward, by the library
    (``reentrant`` or not) or by torch's wrapper."""
    model = load(family)
    if "ckpt" in layout:
        model.train()
    if "wrapper" in layout:
        apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.model.layers))
    elif "ckpt" in layout:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": "reentrant" in layout})
    shard_fully(model, init_device_mesh("cpu", (world(),), mesh_dim_names=("replicas",)))
    rows = IDS if "same" in layout else own_rows(rank(), world())
    forward(model, out, rows, grad="ckpt" in layout, each="each" in layout)


def ddp(family: str, layout: str, out: Path) -> None:
    model = load(family)
    model.requires_grad_(True)
    forward(DistributedDataParallel(model), out, own_rows(rank(), world()))


def composed(family: str, layout: str, out: Path) -> None:
    """FSDP2 over tensor parallelism, both by torch, requests cut over the data axis; ``permuted``: neighbours share no model."""
    mesh = init_device_mesh("cpu", (world() // 2, 2), mesh_dim_names=("dp", "tp"))
    if "permuted" in layout:
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    model = load(family)
    parallelize_module(model, mesh["tp"], torch_plan(model, sequence=False))
    shard_fully(model, mesh["dp"])
    forward(model, out, own_rows(mesh.get_local_rank("dp"), world() // 2), each="each" in layout)


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


def context(family: str, layout: str, out: Path) -> None:
    """Ring attention over tokens in head-tail order."""
    ring_on_cpu()
    model = load(family, attn_implementation="sdpa")
    _attach_context_parallel_hooks(model)
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("cp",))
    ids = IDS.clone()
    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1).contiguous()
    with trace(model, out=out, strict=True, level=2, mesh={"cp": (mesh.get_local_rank("cp"), world())}) as t, torch.no_grad():
        t.requests(names_of(IDS))
        with context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
            model(input_ids=ids, position_ids=positions, use_cache=False)


def off(family: str, layout: str, out: Path) -> None:
    """Tensor parallelism in which one process computes a replicated norm a little differently."""
    model = load(family, distributed_config=config("tp"))
    if rank() == 1:
        model.model.layers[1].input_layernorm.register_forward_hook(lambda module, args, output: output * 1.001)
    forward(model, out)


def counted(family: str, layout: str, out: Path) -> None:
    """The collectives of a plain forward, and of a traced one, are written beside the trace."""
    model = load(family, **({"distributed_config": config("tp")} if "tp" in layout else {}))
    if "fsdp" in layout:
        shard_fully(model, init_device_mesh("cpu", (world(),), mesh_dim_names=("fsdp",)))
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)  # FSDP sets itself up
        counts = [collectives()]
        model(input_ids=IDS, use_cache=False)
        counts.append(collectives())
        forward(model, out)
        counts.append(collectives())
    out.with_suffix(f".rank{rank()}.json").write_text(json.dumps([counts[1] - counts[0], counts[2] - counts[1]]))


def killed(family: str, layout: str, out: Path) -> None:
    """Process 1 is killed inside the trace, after process 0 has committed. Nothing can run after this case."""
    model = load(family, distributed_config=config("tp"))
    with trace(model, out=out, level=2), torch.no_grad():
        model(input_ids=IDS, use_cache=False)
        while rank() == 1:
            if (out / "shard-00000" / "manifest.json").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)


def evidence(family: str, layout: str, out: Path) -> None:
    """A plan of the difference from one process, then a run under it and runs held to that one process, each in a folder beside
    ``out``; errors that entering raises are written to ``out-NAME.rankN.json``. ``fsdp``: also a run in which process 1 is fed
    tokens that the other side does not have, after which both go on."""
    kind = layout.removeprefix("evidence_")
    model = load(family, **({"distributed_config": config(kind)} if kind in ("tp", "tp_ep", "pp") else {}))
    one, ids, mesh = ROOT / "1" / f"{family}-whole", IDS, None
    given: dict[str, Any] = {"use_cache": False}
    if kind == "torch_sp_dtensor":
        parallelize_module(model, init_device_mesh("cpu", (world(),), mesh_dim_names=("tp",)), torch_plan(model, True, local=False))
        columns = ids.shape[1]
        given["position_ids"] = torch.arange(columns)[None]
        given["attention_mask"] = torch.full((1, 1, columns, columns), torch.finfo(torch.float32).min).triu(1)
    if kind == "fsdp":
        shard_fully(model, init_device_mesh("cpu", (world(),), mesh_dim_names=("replicas",)))
        ids = own_rows(rank(), world())
    if kind == "cp":
        mesh = {"cp": (rank(), world())}

    def run(name: str, rows: torch.Tensor = ids, strict: bool = True, **options: Any) -> None:
        try:
            with trace(model, out=f"{out}-{name}", strict=strict, level=2, mesh=mesh, **options) as t, torch.no_grad():
                t.requests(names_of(rows))
                model(input_ids=rows, **given)
        except TracerError as error:
            Path(f"{out}-{name}.rank{rank()}.json").write_text(json.dumps([error.code.value, error.what, error.found, error.remedy]))
        dist.barrier()

    run("fed", feed=one)
    if kind == "cp":
        return
    run("pinned" if "moe" in family else "nudged", **({"pin": {"*.moe.topk_ids": one}} if "moe" in family else {"perturb_ulps": 1}))
    run("free")
    plan, shared = Path(f"{out}.plan"), ROOT / "2" / "llama-evidence_torch_sp_dtensor.plan"
    if rank() == 0 and kind in ("fsdp", "pp"):  # nothing differs there: another layout's plan, for the layer of the last stage
        plan.write_text(shared.read_text().replace("layers.0.", "layers.1."))
    elif rank() == 0:
        a, b = open_trace(one), open_trace(f"{out}-free")
        found = make_dump_plan(a, b, diff_traces(a, b))
        assert isinstance(found, DumpPlan), found
        weights = [a.weights[f"layers.0.attn.{name}.weight"] for name in ("q", "out")]  # cut by rows, and by columns
        asked = [PlanWeight(name=weight.name, rows=tuple(range(weight.rows)), whole_a="".join(weight.digest)) for weight in weights]
        write_plan(msgspec.structs.replace(found, weights=tuple(asked)), plan)
    dist.barrier()
    run("planned", plan=plan)
    run("against", against=one)
    if kind == "fsdp":
        run("refused", ids + rank(), strict=False, feed=one)


LAYOUTS: dict[str, Callable[[str, str, Path], None]] = {
    "whole": whole,
    "evidence": evidence,
    "torch_fsdp": composed,
    "torch": parallelized,
    "head": head_only,
    "fsdp_counted": counted,
    "tp_counted": counted,
    "fsdp_tp": library,
    "fsdp_ep": library,
    "fsdp": fsdp,
    "ddp": ddp,
    "cp": context,
    "off": off,
    "killed": killed,
    "": library,
}
"""Beginning of a layout's name -> what records it; the first that fits."""


def record(cases: Iterable[str]) -> None:
    """Record cases in one process of the world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in cases:
        family, _, layout = case.partition(":")
        out = ROOT / str(world()) / f"{family}-{layout}"
        try:
            next(run for name, run in LAYOUTS.items() if layout.startswith(name))(family, layout, out)
        except Exception:
            out.with_suffix(f".rank{rank()}").write_text(traceback.format_exc())
        if layout == "killed":
            return
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    for size, cases in CASES.items():
        (ROOT / str(size)).mkdir(parents=True)
        status = run_world(size, lambda: record(cases))  # noqa: B023
        if any(code not in (0, signal.SIGKILL) for code in status):
            sys.exit(f"a process of the world of {size} failed: {status}")


if __name__ == "__main__":
    main()
