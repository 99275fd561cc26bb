"""Records tiny Megatron models under the layouts that its one argument describes: a JSON object of lists, by size of the world.

Keys of a layout: ``out``; ``gpt``: arguments of ``make_gpt``; ``weights``: of ``random_hf_weights``; ``load``: of ``load_hf``;
``trace``: of ``trace``; ``vocabulary``: of the host; ``data``: data-parallel ranks whose batches one process runs, one forward
each; ``router_seed``: of noise on the routers; ``plan_of``: two traces beside ``out`` whose difference is the plan, ``plan_layer``:
moved to that layer; ``refused``: entering raises, and the error is written to ``out.rankN``; options of ``trace`` that name other
traces name those beside ``out``; ``wrap``: put Megatron's own wrapper around the model; ``train``: with gradients, and a
backward pass; ``scores``: record log probabilities by hand, from the model's own ``loss`` or from the ``shard`` of the logits alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.megatron.cpu_megatron import run_on_cpu
from tests.ranks import run_world

run_on_cpu()

from tests.megatron.tiny_gpt import HIDDEN, batch, call, load_hf, make_gpt, random_hf_weights  # noqa: E402
from tracer import ScoreRecord, TracerError, collect_trainer, diff_traces, open_trace, trace, write_scores  # noqa: E402
from tracer.errors import ScoreError  # noqa: E402
from tracer.format.dumps import DumpPlan, write_plan  # noqa: E402
from tracer.hosts.megatron import MegatronHost  # noqa: E402
from tracer.read.dump_plans import make_dump_plan  # noqa: E402


def record(given: dict[str, Any]) -> None:
    """One trace."""
    from megatron.core import parallel_state as groups

    model: Any = make_gpt(**given.get("gpt", {}))
    load_hf(model, random_hf_weights(**given.get("weights", {})), **given.get("load", {}))
    if "router_seed" in given:
        noise = torch.Generator().manual_seed(given["router_seed"])
        for layer in model.decoder.layers:
            layer.mlp.router.weight.data += 0.05 * torch.randn(layer.mlp.router.weight.shape, generator=noise)
    host = MegatronHost(model, vocabulary=given["vocabulary"]) if "vocabulary" in given else None
    if given.get("wrap"):
        model = [wrapped(model)]
    if "collect" in given:
        collect(model, given)
        return
    outer = model[0] if isinstance(model, list) else model
    outer.train(given.get("train", False))
    options = {"level": 2, **given.get("trace", {}), **others(given)}
    if given.get("refused"):
        try:
            trace(model, host=host, out=given["out"], strict=True, **options).__enter__()
        except TracerError as error:
            Path(f"{given['out']}.rank{dist.get_rank()}").write_text(f"{error.code.value}: {error.what}; {error.found}")
        return
    with torch.set_grad_enabled(given.get("train", False)), trace(model, host=host, out=given["out"], strict=True, **options) as t:
        for rank in given.get("data", [groups.get_data_parallel_rank()]):
            t.requests([f"d{rank}p0", f"d{rank}p1"])
            arguments = call(batch(rank))
            if "scores" in given:
                arguments["labels"] = torch.nn.functional.pad(arguments["input_ids"][:, 1:], (0, 1))
            output = pipelined(outer, arguments)
            if given.get("train"):
                output.float().square().mean().backward()
            if given.get("scores") == "shard":
                arguments["labels"] = None
                output = per_shard_loss(outer, batch(rank))
            for n in range(2 if "scores" in given else 0):
                t.record("scorer.logprobs", -output[n, :-1], sequence=f"d{rank}p{n}")


def collect(model: Any, given: dict[str, Any]) -> None:
    """Scores of two requests of other lengths, written by the first process; the refusal under pipeline parallelism."""
    records = [ScoreRecord(request=f"p{n}", ids=ids[: 12 - 3 * n].numpy(), prompt_length=4 + n) for n, ids in enumerate(batch())]
    try:
        scored = collect_trainer(model, records, logits=2, argmax=True, **given["collect"])
    except ScoreError as error:
        Path(f"{given['out']}-{dist.get_rank()}.txt").write_text(str(error))
        return
    if dist.get_rank() == 0:
        write_scores(given["out"], scored)


def others(given: dict[str, Any]) -> dict[str, Any]:
    """Options that name other traces, with their folders; the plan is made by process 0."""
    folder, options = Path(given["out"]).parent, given.get("trace", {})
    found: dict[str, Any] = {name: folder / options[name] for name in ("feed", "against") if name in options}
    if "pin" in options:
        found["pin"] = {glob: folder / name for glob, name in options["pin"].items()}
    if "plan_of" in given:
        found["plan"] = Path(f"{given['out']}.plan")
        if dist.get_rank() == 0:
            a, b = (open_trace(folder / name) for name in given["plan_of"])
            plan = make_dump_plan(a, b, diff_traces(a, b))
            assert isinstance(plan, DumpPlan), plan
            write_plan(plan, found["plan"])
            if "plan_layer" in given:
                found["plan"].write_text(found["plan"].read_text().replace("layers.0.", f"layers.{given['plan_layer']}."))
        dist.barrier()
    return found


def pipelined(model: Any, arguments: dict[str, Any]) -> Any:
    """One forward over all pipeline stages; later ones get their input from the one before and know no ids."""
    from megatron.core import parallel_state as groups

    if not groups.is_pipeline_first_stage():
        hidden = torch.empty(12, 2, HIDDEN)
        dist.recv(hidden, groups.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
        arguments = {**arguments, "input_ids": None, "position_ids": None}
    output = model(**arguments)
    if not groups.is_pipeline_last_stage():
        dist.send(output.contiguous(), groups.get_pipeline_model_parallel_next_rank())
    return output


def per_shard_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What a scorer gets that forgets the other processes: the log softmax over its own columns, (B, S)."""
    from megatron.core import parallel_state as groups

    shard: list[torch.Tensor] = []
    hook = model.output_layer.register_forward_hook(lambda module, args, output: shard.append(output[0].transpose(0, 1)))
    model.forward(**call(ids))
    hook.remove()
    columns = shard[0].shape[-1]
    local = torch.nn.functional.pad(ids[:, 1:], (0, 1)) - groups.get_tensor_model_parallel_rank() * columns
    normal = torch.log_softmax(shard[0].float(), -1)
    return -normal.gather(2, local.clamp(0, columns - 1)[..., None])[..., 0]


def wrapped(model: Any) -> Any:
    """Megatron's data-parallel wrapper around its mixed-precision one."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    model.config.bf16 = True
    inner = Float16Module(model.config, model)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), inner)


def record_all(layouts: list[dict[str, Any]]) -> None:
    """In one process of a world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for given in layouts:
        record(given)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    for size, layouts in json.loads(sys.argv[1]).items():
        if any(run_world(int(size), lambda: record_all(layouts))):  # noqa: B023
            sys.exit(f"a process of the world of {size} failed")


if __name__ == "__main__":
    main()
