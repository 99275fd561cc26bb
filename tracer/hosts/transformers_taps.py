"""What transformers does outside modules: the attention function, convolutions, results of ``generate``, edits of caches.

All are seen by replacing a method on a *class* (``AttentionInterface.get_interface``, ``Cache.reorder_cache`` ...), or a
function of a modeling file, while a trace is open; the last trace to close puts the originals back. Nothing is set on model,
config or functions, so no attention or mask choice changes, copies of a cache stay independent, and a call is told apart by
the module it is for.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tracer.hosts.transformers_sequences import CacheHistory

__all__ = ["ATTENTION", "GENERATE", "CacheWatch", "ModuleListeners", "cache_length", "convolutions"]

_LOCK = threading.RLock()


class ModuleListeners:
    """Who listens to which module, and a class method that is replaced while anyone does. ``add`` and ``remove`` in pairs."""

    def __init__(self, owner: Callable[[], Any], name: str, follow: Callable[[ModuleListeners, Callable[..., Any]], Callable[..., Any]]):
        """``owner()``: the class, or modeling file, whose ``name`` becomes ``follow(self, original)``."""
        self._owner, self._name, self._follow = owner, name, follow
        self._original: Callable[..., Any] | None = None
        self._listeners: Mapping[Any, tuple[Callable[..., None], ...]] = {}  # replaced whole, never edited: readers take no lock

    def of(self, module: Any) -> tuple[Callable[..., None], ...]:
        """Listeners to one module, the first to come first."""
        return self._listeners.get(module, ()) if isinstance(module, torch.nn.Module) else ()

    def add(self, listeners: Mapping[torch.nn.Module, Callable[..., None]]) -> None:
        """These listeners hear of their modules until ``remove``."""
        with _LOCK:
            merged = dict(self._listeners)
            for module, listener in listeners.items():
                merged[module] = (*merged.get(module, ()), listener)
            self._listeners = merged
            if merged and self._original is None:
                self._original = vars(self._owner())[self._name]
                setattr(self._owner(), self._name, functools.wraps(self._original)(self._follow(self, self._original)))

    def remove(self, listeners: Mapping[torch.nn.Module, Callable[..., None]]) -> None:
        """Undo ``add``."""
        with _LOCK:
            merged = dict(self._listeners)
            for module, listener in listeners.items():
                left = tuple(other for other in merged.get(module, ()) if other is not listener)
                merged.pop(module, None)
                if left:
                    merged[module] = left
            self._listeners = merged
            if not merged and self._original is not None:
                setattr(self._owner(), self._name, self._original)
                self._original = None


def _attention_interface() -> type:
    from transformers.modeling_utils import AttentionInterface

    return AttentionInterface


def _generation_mixin() -> type:
    from transformers import GenerationMixin

    return GenerationMixin


def _follow_attention(heard: ModuleListeners, original: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = original(self, *args, **kwargs)
        # a compiled region would bake the tap in; what it runs stays as it was, and its boundaries count as vacuous
        if torch.compiler.is_compiling():
            return function

        @functools.wraps(function)
        def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            listeners = heard.of(module)
            for listener in listeners:
                for leaf, tensor in (("q", query), ("k", key), ("v", value)):
                    listener(leaf, tensor)
            result = function(module, query, key, value, *args, **kwargs)
            for listener in listeners:
                listener("output", result[0] if isinstance(result, tuple) else result)
            return result

        return attention

    return get_interface


def _follow_generate(heard: ModuleListeners, original: Callable[..., Any]) -> Callable[..., Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for listener in heard.of(self):
            try:
                listener(result)
            except Exception:  # never the run's problem: the last sampled tokens stay unknown, their rows match by label
                continue
        return result

    return generate


def _follow_convolution(heard: ModuleListeners, original: Callable[..., Any]) -> Callable[..., Any]:
    def convolution(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            for listener in heard.of(sys._getframe(1).f_locals.get("self")):
                listener("output", result)
        return result

    return convolution


@functools.cache
def convolutions(modeling_file: str) -> tuple[ModuleListeners, ...]:
    """Of a modeling file whose linear attention calls its convolution as a function: ``listener(leaf, tensor)`` hears what
    comes out, (B, channels, columns); earlier columns, out of a cache, stand first. Empty where the file has none."""
    names = ("causal_conv1d_fn", "causal_conv1d_update")  # prefill, one decoded token
    file = sys.modules[modeling_file]
    return tuple(ModuleListeners(lambda: file, name, _follow_convolution) for name in names if name in vars(file))


ATTENTION = ModuleListeners(_attention_interface, "get_interface", _follow_attention)
"""``listener(leaf, tensor)``: q (B, heads, S, d), k and v (B, key heads, K, d) before, output (B, S, heads, d) after the
attention function ran for the module. Tensors are the model's own and must not be changed or kept."""

GENERATE = ModuleListeners(_generation_mixin, "generate", _follow_generate)
"""``listener(result)``: what ``generate`` of the model returned. Not to be changed or kept."""


class _Histories(dict[int, CacheHistory]):
    """Histories of one cache by watch, kept on the cache itself so that they live, and are deep-copied, with it."""

    def __deepcopy__(self, memo: Any) -> _Histories:
        return _Histories({key: history.copy() for key, history in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, ())


_ATTRIBUTE = "_tracer_histories"

_EDITS: dict[str, Callable[[CacheHistory, Any], None]] = {
    "reorder_cache": lambda history, index: history.select(_numpy(index)),
    "batch_select_indices": lambda history, index: history.select(_numpy(index)),
    "batch_repeat_interleave": lambda history, repeats: history.repeat(repeats),
}


class CacheWatch:
    """The histories of the caches one host has met. ``open`` before use, ``close`` leaves no trace on any cache."""

    _patched: dict[tuple[type, str], Any] = {}  # noqa: RUF012  shared by all open watches
    _open_watches = 0
    _inside = threading.local()

    def __init__(self) -> None:
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

    def open(self) -> None:
        from transformers.cache_utils import Cache

        with _LOCK:
            CacheWatch._open_watches += 1
            self._patch(Cache)

    def close(self) -> None:
        for cache in list(self._caches):
            histories = getattr(cache, _ATTRIBUTE, {})
            histories.pop(id(self), None)
            if not histories and hasattr(cache, _ATTRIBUTE):
                delattr(cache, _ATTRIBUTE)
        self._caches.clear()
        with _LOCK:
            CacheWatch._open_watches -= 1
            if not CacheWatch._open_watches:
                for (kind, name), original in CacheWatch._patched.items():
                    setattr(kind, name, original)
                CacheWatch._patched.clear()

    def history(self, cache: Any) -> CacheHistory | None:
        """Whose tokens ``cache`` holds, None if this watch never saw it."""
        histories = getattr(cache, _ATTRIBUTE, None)
        return histories.get(id(self)) if histories else None

    def keep(self, cache: Any, history: CacheHistory) -> None:
        """``cache`` now has this history."""
        try:
            self._caches.add(cache)
            if not hasattr(cache, _ATTRIBUTE):
                setattr(cache, _ATTRIBUTE, _Histories())
        except (AttributeError, TypeError):  # a cache of the user's own that takes neither: its next call starts mid-sequence
            return
        getattr(cache, _ATTRIBUTE)[id(self)] = history
        with _LOCK:
            if CacheWatch._open_watches:
                self._patch(type(cache))

    @classmethod
    def _patch(cls, kind: type) -> None:
        """Follow the edits of every class in ``kind``'s ancestry that defines some."""
        for owner in kind.__mro__:
            for name, edit in _EDITS.items():
                if name in vars(owner) and (owner, name) not in cls._patched:
                    original = vars(owner)[name]
                    cls._patched[owner, name] = original
                    setattr(owner, name, cls._following(original, edit))

    @classmethod
    def _following(cls, original: Callable[..., Any], edit: Callable[[CacheHistory, Any], None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            inside = cls._inside.__dict__.setdefault("caches", set())
            if id(self) in inside:  # the method of a subclass called its parent's
                return original(self, *args, **kwargs)
            inside.add(id(self))
            try:
                result = original(self, *args, **kwargs)
            finally:
                inside.discard(id(self))
            histories = getattr(self, _ATTRIBUTE, {})
            for key, history in list(histories.items()):
                try:
                    edit(history, [*args, *kwargs.values()][0])
                except Exception:  # never the run's problem: without a history its rows start mid-sequence, and say so
                    del histories[key]
            return result

        return method


def _numpy(index: Any) -> Any:
    return index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)


def cache_length(cache: Any, history: CacheHistory | None) -> int:
    """Slots per batch row that a cache holds, padding included; as its history says where the cache cannot tell."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except ValueError:  # only linear-attention layers: they keep a state, and do not count what went in
        return history.length if history else 0
