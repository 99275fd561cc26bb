"""What transformers does between modules: the attention function, and edits of key-value caches.

Both are seen by replacing a method on a *class* (``AttentionInterface.get_interface``, ``Cache.reorder_cache`` ...)
while a trace is open; the last trace to close puts the originals back. Nothing is set on model, config or functions, so
no attention or mask choice changes, copies of a cache stay independent, and a call is told apart by the module it is for.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tracer.hosts.transformers_sequences import CacheHistory

__all__ = ["AttentionListener", "AttentionTaps", "CacheWatch", "cache_length"]

AttentionListener = Callable[[str, torch.Tensor], None]
"""``listener(leaf, tensor)``: q (B, heads, S, d), k and v (B, key heads, K, d) before, output (B, S, heads, d) after the
attention function ran. Tensors are the model's own and must not be changed or kept."""

_LOCK = threading.RLock()


class AttentionTaps:
    """Calls of the attention function for given modules. Use ``add`` and ``remove`` in pairs."""

    _listeners: Mapping[torch.nn.Module, tuple[AttentionListener, ...]] = {}  # replaced whole, never edited: readers take no lock
    _original: Callable[..., Any] | None = None

    @classmethod
    def add(cls, listeners: Mapping[torch.nn.Module, AttentionListener]) -> None:
        """Every attention call for one of these modules is shown to its listener until ``remove``."""
        with _LOCK:
            merged = dict(cls._listeners)
            for module, listener in listeners.items():
                merged[module] = (*merged.get(module, ()), listener)
            cls._listeners = merged
            if merged and cls._original is None:
                cls._install()

    @classmethod
    def remove(cls, listeners: Mapping[torch.nn.Module, AttentionListener]) -> None:
        """Undo ``add``."""
        with _LOCK:
            merged = dict(cls._listeners)
            for module, listener in listeners.items():
                left = tuple(other for other in merged.get(module, ()) if other is not listener)
                merged.pop(module, None)
                if left:
                    merged[module] = left
            cls._listeners = merged
            if not merged and cls._original is not None:
                from transformers.modeling_utils import AttentionInterface

                AttentionInterface.get_interface = cls._original  # type: ignore[method-assign]
                cls._original = None

    @classmethod
    def _install(cls) -> None:
        from transformers.modeling_utils import AttentionInterface

        original = AttentionInterface.get_interface
        cls._original = original

        @functools.wraps(original)
        def get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
            function = original(self, *args, **kwargs)
            # a compiled region would bake the tap in; what it runs stays as it was, and its boundaries count as vacuous
            return function if torch.compiler.is_compiling() else _tapped(function)

        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]


def _tapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(module, query, key, value, ...)`` that shows its tensors to the module's listeners."""

    @functools.wraps(function)
    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = AttentionTaps._listeners.get(module, ()) if isinstance(module, torch.nn.Module) else ()
        for listener in listeners:
            for leaf, tensor in (("q", query), ("k", key), ("v", value)):
                listener(leaf, tensor)
        result = function(module, query, key, value, *args, **kwargs)
        for listener in listeners:
            listener("output", result[0] if isinstance(result, tuple) else result)
        return result

    return attention


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
