"""What tracing costs a vLLM engine: prefill of 512 tokens on the CPU, plain against traced, interleaved, medians.

Run with the vLLM environment: ``.venv-vllm/bin/python tools/bench_vllm.py``. The aim at level 1 is 1.15. Times are processor
time with ``--cpu`` (for a machine that is busy with other things), else the wall's. ``quartiles`` are those of the ratios of
neighbouring runs. The commit and the weights, which are taken once per trace, are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
}.items():
    os.environ.setdefault(_name, _value)

TOKENS = 512


def write_checkpoint(folder: Path, layers: int) -> None:
    """A random Qwen3-MoE, hidden 1024."""
    import torch
    import transformers

    torch.manual_seed(0)
    config_class: Any = transformers.Qwen3MoeConfig
    config = config_class(
        vocab_size=32768, hidden_size=1024, intermediate_size=3072, moe_intermediate_size=768, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        tie_word_embeddings=False, dtype=torch.float32,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--cpu", action="store_true")
    chosen = parser.parse_args()
    clock = time.process_time if chosen.cpu else time.perf_counter

    from vllm import LLM, SamplingParams

    import tracer

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "model", chosen.layers)
        llm = LLM(
            **tracer.vllm_options(), model=f"{folder}/model", dtype="float32", skip_tokenizer_init=True, max_model_len=1024,
            max_num_batched_tokens=1024, max_num_seqs=2, enable_prefix_caching=False, seed=0,
        )  # fmt: skip
        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)

        def prefill() -> float:
            start = clock()
            llm.generate([{"prompt_token_ids": list(range(3, 3 + TOKENS))}], sampling, use_tqdm=False)
            return clock() - start

        prefill()
        print("| level | plain ms | traced ms | ratio | quartiles |\n|---|---|---|---|---|")
        for level in (1, 2):
            plain: list[float] = []
            traced: list[float] = []
            for run in range(chosen.runs):
                plain.append(prefill())
                with tracer.trace(llm, out=f"{folder}/trace-{level}-{run}", level=level, weights=False):
                    traced.append(prefill())
            a, b = statistics.median(plain), statistics.median(traced)
            low, _, high = statistics.quantiles(y / x for x, y in zip(plain, traced, strict=True))
            print(f"| {level} | {1000 * a:.0f} | {1000 * b:.0f} | {b / a:.3f} | {low:.2f} to {high:.2f} |")


if __name__ == "__main__":
    main()
