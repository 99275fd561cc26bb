"""What Megatron's modules do not show by themselves: q, k, v at the attention core, and the router's logits and choice.

``attention``, on a core attention module: leaves q, k, v, (S, B, heads, d), as it is given them, after norm and rotary
positions. ``router``, on a router: leaves ``logits`` (S, B, E), before any balancing, ``ids`` (T, K) int64, ascending, and
``weights`` (T, K), the weights of those experts. Nothing here raises into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tracer.record.host import TapSink

__all__ = ["TAPS", "attention_tap", "router_tap"]

_ATTENTION = ("query", "key", "value")

GatingListener = Callable[[torch.Tensor], None]


@contextmanager
def attention_tap(module: torch.nn.Module, path: str, leaves: Sequence[str], sink: TapSink) -> Iterator[None]:
    """Show q, k, v of every call of a core attention module. Packed ones, (T, heads, d), are shown as (T, 1, heads, d)."""

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = {**dict(zip(_ATTENTION, args, strict=False)), **{name: kwargs[name] for name in _ATTENTION if name in kwargs}}
        for leaf, name in zip("qkv", _ATTENTION, strict=True):
            tensor = given.get(name)
            if leaf in leaves and isinstance(tensor, torch.Tensor):
                sink(path, leaf, tensor.unsqueeze(1) if tensor.dim() == 3 else tensor)

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def router_tap(module: torch.nn.Module, path: str, leaves: Sequence[str], sink: TapSink) -> Iterator[None]:
    """Show the logits of a router's gate, then what it chose."""

    def after(router: Any, args: Any, output: Any) -> None:
        if not ("ids" in leaves or "weights" in leaves) or not isinstance(output, tuple) or len(output) < 2:
            return
        weights_TE, chosen_TE = output[0].detach(), output[1].detach()
        # one bool per expert and token, K of them true: ascending ids without waiting for the device
        ids_TK = chosen_TE.to(torch.uint8).topk(router.topk, dim=-1, sorted=False).indices.sort(dim=-1).values
        if "ids" in leaves:
            sink(path, "ids", ids_TK)
        if "weights" in leaves:
            sink(path, "weights", weights_TE.gather(1, ids_TK))

    with ExitStack() as stack:
        if "logits" in leaves:
            stack.enter_context(_gate_watched(module, lambda logits: sink(path, "logits", logits)))
        stack.callback(module.register_forward_hook(after).remove)
        yield


TAPS = {"attention": attention_tap, "router": router_tap}
"""Tap by the name that maps use."""


_listeners: dict[torch.nn.Module, list[GatingListener]] = {}


@contextmanager
def _gate_watched(router: Any, listener: GatingListener) -> Iterator[None]:
    """``listener`` hears of every result of ``router.gating``, a method that no module hook sees. Several may listen."""
    if router not in _listeners:
        _listeners[router] = []
        original = router.gating

        def gating(*args: Any, **kwargs: Any) -> Any:
            logits = original(*args, **kwargs)
            for listen in tuple(_listeners.get(router, ())):
                listen(logits)
            return logits

        router.gating = gating
    _listeners[router].append(listener)
    try:
        yield
    finally:
        _listeners[router].remove(listener)
        if not _listeners[router]:
            del _listeners[router]
            del router.gating
