"""Vision-language models: the language part traces, with text alone and with an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests.tiny_models import make_ids, make_vision_language
from tracer.format.fingerprint import fingerprint_rows

NAMES = ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Gemma3"]
VISION = {"Gemma3": {"model.vision_tower", "model.multi_modal_projector"}}


def image_call(name: str, image: float) -> dict[str, Any]:
    """Two sequences, the first with an image of four tokens."""
    ids = make_ids(2, 13).clamp(max=499)
    ids[0, 3:7] = 500
    kinds = (ids == 500).long()
    if name == "Gemma3":
        return {"input_ids": ids, "pixel_values": torch.full((1, 3, 16, 16), image), "token_type_ids": kinds, "use_cache": False}
    pixels = {"pixel_values": torch.full((16, 96), image), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return {"input_ids": ids, **pixels, "mm_token_type_ids": kinds, "use_cache": False}


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


@pytest.mark.parametrize("name", NAMES)
def test_the_language_part_traces(name: str, tmp_path: Path) -> None:
    """Every boundary is recorded with an image in the batch, logits are bitwise those without the tracer, the residual is the sum
    that our own hooks see, and the vision part's weights are kept under their own names."""
    model, seen = make_vision_language(name), dict[str, torch.Tensor]()
    layer = model.model.language_model.layers[0]
    after = layer.pre_feedforward_layernorm if name == "Gemma3" else layer.post_attention_layernorm
    added = layer.post_attention_layernorm if name == "Gemma3" else layer.self_attn
    call = image_call(name, 0.5)
    with torch.no_grad():
        plain = model(**call).logits
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(before=first(args, kwargs).clone()), with_kwargs=True),
            after.register_forward_pre_hook(lambda _, args: seen.update(residual=args[0].clone())),
            added.register_forward_hook(lambda _, args, out: seen.update(added=(out[0] if isinstance(out, tuple) else out).clone())),
        ]
        with tracer.trace(model, out=tmp_path / "t", level=2, strict=True):
            traced = model(**call).logits
        for hook in hooks:
            hook.remove()
    assert torch.equal(plain, traced)
    assert torch.equal(seen["before"] + seen["added"], seen["residual"])
    trace = tracer.open_trace(tmp_path / "t")
    assert {boundary.status.value for boundary in trace.manifest.boundaries} == {"recorded"}
    digests = fingerprint_rows(seen["residual"].flatten(0, 1).numpy(), "float32").digest_N2
    assert (trace.boundaries["layers.0.attn.residual"].digest_R2 == digests).all()
    others = {weight.name.removeprefix("other.") for weight in trace.weights.values() if weight.name.startswith("other.")}
    assert {".".join(path.split(".")[:2]) for path in others} == VISION.get(name, {"model.visual"})
    embedding = next(boundary for boundary in trace.manifest.boundaries if boundary.name == "embedding")
    assert {f"other.{path}" for path in others} < set(embedding.weights)


def test_pixels_are_part_of_the_key(tmp_path: Path) -> None:
    """The same ids with another image are other tokens: nothing of them is compared, and that is said."""
    model = make_vision_language("Qwen2_5_VL")
    for side, image in (("a", 0.5), ("b", 0.25), ("c", 0.5)):
        with torch.no_grad(), tracer.trace(model, out=tmp_path / side, strict=True):
            model(**image_call("Qwen2_5_VL", image))
    assert tracer.diff_traces(tmp_path / "a", tmp_path / "c").exit == 0
    assert tracer.diff_traces(tmp_path / "a", tmp_path / "b").exit != 0
