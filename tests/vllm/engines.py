"""Real engines on tiny checkpoints, and the trainer's side of the pair in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tracer

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = [list(range(5 + 3 * n, 5 + 3 * n + length)) for n, length in enumerate((7, 13, 4))]
SETTINGS = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,  # of the cache; small engines start faster, and many fit in one process
    "enable_prefix_caching": False,
    "seed": 0,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",  # eager engines need no compiler for their small helpers
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.05,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": []},
    "Qwen3": {},
    "Llama": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 128, "layer_types": ["full_attention", "full_attention"]},
}
FAMILIES = tuple(_OF_FAMILY)

_SHARED: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64}
_SHARED |= {"norm_topk_prob": True}
_DEEPSEEK: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64}
_DEEPSEEK |= {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
_ALSO: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Mistral": {},
    "GPT2": {},
    "Gemma3Text": {"query_pre_attn_scalar": 32, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": None},
    "Qwen2Moe": _SHARED,
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
    "Glm4Moe": {**_DEEPSEEK, "use_qk_norm": True, "n_group": 1, "topk_group": 1},
    # the CPU's latent attention has one size
    "DeepseekV3": {
        **_DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 2, "topk_group": 1,
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": None,
    },
    "Llama4Text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 128, "no_rope_layers": [1, 0],
    },
    "Qwen3Next": {
        **_SHARED, "num_experts": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
OTHERS = {family: "bfloat16" if family == "Qwen3Next" else "float32" for family in _ALSO}
"""Families that are run once, and in which dtype."""
SETTINGS_OF = {"DeepseekV3": {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}}
"""vLLM 0.32's rotary kernel for the CPU leaves most rows of a query of three dimensions as they are."""


def write_checkpoint(folder: Path, family: str, dtype: str) -> Path:
    """A checkpoint with random weights; norms and router are not trivial."""
    import transformers

    tied = family in ("Gemma2", "Gemma3Text", "GPT2")
    settings = {**_SMALL, **_OF_FAMILY.get(family, _ALSO.get(family, {})), "tie_word_embeddings": tied}
    if family == "GPT2":
        settings = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
    kept = {name: value for name, value in settings.items() if value is not None}
    config = getattr(transformers, f"{family}Config")(**kept)
    torch.manual_seed(0)
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, name)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 1 or "_proj_bias" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif "experts." in name and family == "GptOss":  # else left at what the library reserves
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
            elif ("lm_head" in name and not tied) or name.endswith(("gate.weight", "router.weight")):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder)
    return folder


def generate(llm: Any, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 4, **settings: Any) -> list[Any]:
    """Greedy continuations of token prompts."""
    from vllm import SamplingParams

    given = {"temperature": 0, "logprobs": 1, **settings}
    sampling = SamplingParams(max_tokens=tokens, detokenize=False, ignore_eos=True, **given)
    return list(llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling, use_tqdm=False))


def whole(outputs: Sequence[Any]) -> list[list[int]]:
    """Prompt and sampled tokens of every request."""
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def logprobs(outputs: Sequence[Any]) -> list[list[float]]:
    """What the engine itself reports for the sampled tokens."""
    return [
        [step[token].logprob for step, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)]
        for output in outputs
    ]


class Trainer:
    """transformers in another process, one for all pairs; it starts while the engine does."""

    def __init__(self, log: Path) -> None:
        """``log``: file for what the process says."""
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.trainer"],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def trace(self, checkpoint: Path, dtype: str, tokens: Sequence[Sequence[int]], out: Path, *faults: str, **options: Any) -> Path:
        """Trace transformers on these tokens into ``out``. ``options``: more arguments of ``tracer.trace``, as plain data."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"checkpoint": str(checkpoint), "dtype": dtype, "tokens": list(tokens), "out": str(out), "faults": faults, "options": options}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n", self._log.read_text()[-6000:]
        return out

    def stop(self) -> None:
        self._process.communicate(timeout=60)


def run_script(name: str, *arguments: str, **environment: str) -> str:
    """Output of a script beside this file."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parent / name), *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    return run.stdout


def statuses(trace: Path, status: str) -> set[str]:
    """Boundaries of a trace's first shard with that status."""
    manifest = json.loads((trace / "shard-00000" / "manifest.json").read_text())
    return {boundary["name"] for boundary in manifest["boundaries"] if boundary.get("status", "recorded") == status}


def keys(trace: Path) -> set[int]:
    """Token keys of the rows that a trace has at its embedding."""
    logical = tracer.open_trace(trace)
    return set(logical.tokens.key_K[logical.boundaries["embedding"].token_R].tolist())
