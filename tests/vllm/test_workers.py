"""Engines whose workers are other processes: each scenario is a script of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tracer
from tests.vllm.conftest import Build, Checkpoint, Pair
from tests.vllm.engines import FAMILIES, OTHERS, generate, run_script
from tracer.read.dumped import read_dumps
from tracer.read.weight_report import diff_weights
from tracer.record.boundary_maps import map_for_root_class


def test_tensor_parallel_workers(engine: Build, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Two workers behind an engine core of its own record one trace: it equals that of one worker up to the attention core,
    bitwise. A running engine is traced for two steps by remote call, and a second start into the same folder is refused. Plans,
    ``against``, ``feed``, ``pin`` and nudges work in the workers; a refusal in a step leaves the engine working."""
    with tracer.trace(engine(), out=tmp_path / "one", level=2, strict=True, dump=["embedding", "layers.*.residual"]):
        generate(engine(), prompt_logprobs=1)
    output = run_script(
        "two_workers.py",
        str(checkpoint("Qwen3Moe", "float32")),
        str(tmp_path),
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
    assert "refused out-in-use" in output
    assert "steps 2 2" in output
    result = tracer.diff_traces(tmp_path / "one", tmp_path / "two")
    assert result.first is not None
    assert result.first.boundary == "layers.0.attn.out"
    assert not [finding for finding in result.findings if finding.code in ("weight-differs", "weight-unknown", "replicas-disagree")]
    assert {sequence.name for sequence in tracer.open_trace(tmp_path / "two").sequences} == {"0", "1", "2"}
    assert len(tracer.open_trace(tmp_path / "steps").sequences) in (1, 2, 3)
    assert "halfway intervention-refused" in output
    assert "does not have all of its tokens" in output
    assert "still True" in output
    check_evidence(tmp_path, engine())


def check_evidence(folder: Path, llm: Any) -> None:
    """What the workers saved and changed, against one worker."""
    with tracer.trace(llm, out=folder / "one-planned", level=2, plan=folder / "plan.json", strict=True):
        generate(llm, prompt_logprobs=1)
    table = tracer.diff_traces(folder / "one-planned", folder / "planned").dumps
    assert [(line.boundary, line.role, line.rows_differing > 0) for line in table] == [
        ("layers.0.attn.core", "input", False),
        ("layers.0.attn.out", "output", True),
    ]
    saved = read_dumps(tracer.open_trace(folder / "against"))
    assert "layers.0.attn.out" in saved.boundaries
    fed = tracer.diff_traces(folder / "one", folder / "fed")
    roots = {root.place.boundary for root in fed.roots}
    assert {"layers.0.attn.out", "layers.1.attn.out"} <= roots
    assert "INTERVENTION" in fed.headline
    pinned = tracer.open_trace(folder / "pinned").manifests
    assert [manifest.interventions[0].split("=")[0] for manifest in pinned] == ["pin *.moe.topk_ids"] * 2
    nudged = {entry.name: entry for entry in tracer.diff_traces(folder / "two", folder / "nudged").boundaries}
    assert nudged["embedding"].rows_differing == nudged["embedding"].rows_compared


def test_an_engine_without_the_extension(pair: Pair, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without the extension an engine in this process is traced, and weights that it repacked are unknown, never equal; one in
    another process is refused with a code and the line to write."""
    output = run_script("without_extension.py", str(checkpoint("Qwen3Moe", "float32")), str(tmp_path / "t"))
    assert "refused host-unsupported" in output
    assert "LLM(**tracer.vllm_options()" in output
    assert not (tmp_path / "t-elsewhere").exists()
    result = diff_weights(pair("Qwen3Moe", "float32")[0], tmp_path / "t")
    states = {weight.name: weight.state for weight in result.weights}
    repacked = ("attn.q.weight", "attn.out.weight", "experts.3.gate.weight", "experts.3.down.weight")
    assert {states[f"layers.0.{'moe.' if name.startswith('experts') else ''}{name}"] for name in repacked} == {"unknown"}
    assert states["embedding.weight"] == states["layers.0.attn.norm.weight"] == "identical"


def test_a_compiled_engine_is_vacuous(engine: Build, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """In a compiled engine the boundaries inside the graph are vacuous, with the reason and the remedy, and no verdict passes;
    what does run is right."""
    run_script("compiled.py", str(checkpoint("Qwen3", "float32")), str(tmp_path / "compiled"), TORCHDYNAMO_DISABLE="0")
    logical = tracer.open_trace(tmp_path / "compiled")
    assert "layers.0.attn.out" not in logical.boundaries
    text = (tmp_path / "compiled/shard-00000/manifest.json").read_text()
    assert "vLLM compiled the model" in text
    assert "tracer.vllm_options()" in text
    assert tracer.diff_traces(tmp_path / "compiled", tmp_path / "compiled").exit == 2
    with tracer.trace(engine("Qwen3"), out=tmp_path / "eager", level=1, strict=True):
        generate(engine("Qwen3"), prompt_logprobs=1)
    result = tracer.diff_traces(tmp_path / "eager", tmp_path / "compiled", tolerance=tracer.Tolerance(relative=1e-4))
    assert result.exit == 2
    assert "vacuous" in result.headline
    seen = {boundary.name: boundary.outcome for boundary in result.boundaries if boundary.rows_compared}
    assert seen["lm_head"] in ("identical", "within floor")


def test_maps_fit_the_engines_own_classes(checkpoint: Checkpoint) -> None:
    """`tracer map check --host vllm` finds the map of every class of the installed engine and resolves it, from a config
    alone."""
    dtypes = {**dict.fromkeys(FAMILIES, "float32"), **{family: OTHERS[family] for family in ("GPT2", "GptOss", "DeepseekV3")}}
    output = run_script("check_maps.py", *(str(checkpoint(family, dtype) / "config.json") for family, dtype in dtypes.items()))
    assert output.count("exit 0\n") == len(dtypes), output
    for family in dtypes:
        root = "GPT2LMHeadModel" if family == "GPT2" else f"{family.removesuffix('Text')}ForCausalLM"
        assert f"map {map_for_root_class(root, 'vllm').family}, host vllm, model {root}" in output
