"""Models whose linear layers are not plain any more: LoRA, int8 and fp8; and models that are refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tracer
from tests.tiny_models import make_ids, make_model
from tracer.errors import Code, HostError
from tracer.hosts import find_host
from tracer.read.logical import LogicalTrace

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def with_lora(rank: int = 4) -> Any:
    """A tiny Qwen3 with LoRA on three of its projections, not merged."""
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(make_model("qwen3"), config).eval()


def traced(model: Any, folder: Path) -> LogicalTrace:
    """A level 2 trace of one forward that equals, bit for bit, the same forward without it."""
    with torch.no_grad():
        plain = model(input_ids=make_ids(), use_cache=False).logits
        with tracer.trace(model, out=folder, level=2, strict=True):
            assert torch.equal(model(input_ids=make_ids(), use_cache=False).logits, plain)
    trace = tracer.open_trace(folder)
    assert {boundary.status.value for boundary in trace.manifest.boundaries} == {"recorded"}
    return trace


def test_lora_is_looked_through(tmp_path: Path) -> None:
    """A LoRA model has the plain one's map and names: a boundary is the adapted projection, its weights are the base's and the
    adapter's, and the adapter's rank scale and state are run conditions."""
    model = with_lora()
    trace = traced(model, tmp_path / "t")
    plain = traced(make_model("qwen3"), tmp_path / "plain")
    assert set(trace.boundaries) == set(plain.boundaries)
    assert trace.weights["layers.0.attn.q.weight"].digest == plain.weights["layers.0.attn.q.weight"].digest
    q = next(boundary for boundary in trace.manifest.boundaries if boundary.name == "layers.0.attn.q")
    assert set(q.weights) == {f"layers.0.attn.q.{name}" for name in ("weight", "lora_A.default.weight", "lora_B.default.weight")}
    assert not [name for name in trace.weights if name.startswith("other.")]
    assert find_host(model).conditions()["adapters"] == {"default": {"layers": 12, "merged": 0, "scaling": [2.0]}}
    result = tracer.diff_traces(tmp_path / "plain", tmp_path / "t")
    assert result.exit == 1
    assert result.first is not None
    assert result.first.boundary in ("layers.0.attn.q", "layers.0.attn.q.lora_A.default.weight")


def test_a_merged_adapter_is_the_plain_model(tmp_path: Path) -> None:
    """Merged and unloaded, the model has plain weights again: they differ from the base's, and activations agree up to rounding."""
    traced(with_lora(), tmp_path / "apart")
    merged = traced(with_lora().merge_and_unload(), tmp_path / "merged")
    assert not [name for name in merged.weights if "lora" in name]
    result = tracer.diff_traces(tmp_path / "apart", tmp_path / "merged", tolerance=tracer.Tolerance(relative=1e-4))
    assert {finding.boundary for finding in result.findings if finding.code == "weight-differs"} >= {"layers.0.attn.q.weight"}
    assert not [found.name for found in result.boundaries if found.rows_above_floor]


def test_generate_of_an_adapted_model_is_followed(tmp_path: Path) -> None:
    """``generate`` of the wrapper runs the model inside, whose sequences are recorded as ever."""
    model = with_lora()
    with torch.no_grad(), tracer.trace(model, out=tmp_path / "t", level=0, strict=True):
        model.generate(input_ids=make_ids(1, 5), max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    (sequence,) = tracer.open_trace(tmp_path / "t").sequences
    assert len(sequence.ids) == 8


def test_int8_linears_trace_and_their_weights_are_unknown(tmp_path: Path) -> None:
    """Dynamically quantized linears show their activations; their packed weights are listed as unknown with the reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(make_model("qwen3"), {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
    trace = traced(model, tmp_path / "t")
    assert trace.weights["layers.0.attn.q.weight"].unknown == "packed by its quantized operator"
    assert not trace.weights["embedding.weight"].unknown


class Fp8Linear(nn.Module):
    """A linear layer whose weight is stored as float8 with one scale, as fp8 checkpoints ship it."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        scale = plain.weight.abs().amax() / 448
        self.weight = nn.Parameter((plain.weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale.reshape(1, 1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.weight_scale_inv)


def test_fp8_weights_and_their_scales_have_names(tmp_path: Path) -> None:
    """An fp8 weight keeps its name, its scale is named beside it, and both belong to the boundary they make."""
    model = make_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.q_proj = Fp8Linear(layer.self_attn.q_proj)
    trace = traced(model, tmp_path / "t")
    assert trace.weights["layers.1.attn.q.weight"].dtype == "float8_e4m3fn"
    q = next(boundary for boundary in trace.manifest.boundaries if boundary.name == "layers.1.attn.q")
    assert set(q.weights) == {"layers.1.attn.q.weight", "layers.1.attn.q.weight_scale_inv"}


def test_encoder_decoders_are_refused() -> None:
    """An encoder-decoder model is refused in words, before anything is hooked."""
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    with pytest.raises(HostError, match="second sequence") as caught:
        find_host(transformers.T5ForConditionalGeneration(config))
    assert caught.value.code is Code.HOST_UNSUPPORTED
