"""Which forward a recomputation under activation checkpointing belongs to.

Backward runs modules again, possibly after other forwards have begun (several micro-batches outstanding), and in an
autograd thread of its own on CUDA. Three ways to tell, the first that knows wins:

1. Non-reentrant checkpointing (torch's default) runs each region under saved-tensor hooks that know the region's
   frame, the same object in both passes.
2. Reentrant checkpointing keeps the region's inputs alive in between: a module input whose storage is still the one
   seen in a first pass. What was freed in between is told apart from what a later tensor put at the same address.
3. Else the region identified last in this backward, else the only forward of which this module has not been recomputed.

Where none of them knows, the recomputation is not attributed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["RecomputeFinder", "in_backward"]

F = TypeVar("F")
_StorageReference: Any = StorageWeakRef

_REMEMBERED_INPUTS = 4096


def in_backward() -> bool:
    """True inside an autograd backward: a module that runs there is recomputed (or called by a user's own backward)."""
    return bool(torch._C._current_graph_task_id() != -1)


class RecomputeFinder(Generic[F]):
    """Remembers first passes of forwards ``F``, and finds them again from inside a backward."""

    def __init__(self) -> None:
        self._frames: WeakKeyDictionary[Any, F] = WeakKeyDictionary()
        self._inputs: OrderedDict[int, tuple[Any, F | None]] = OrderedDict()
        """By address; without a forward where several used the same living storage (a mask)."""
        self._region: tuple[int, F] | None = None

    def note_first_pass(self, forward: F, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """A module runs in ``forward``, which began with gradients enabled, with these inputs. Whether it seems to run inside
        a checkpointed region; only then is ``forward`` kept."""
        frame = _checkpoint_frame("frame")
        if frame is not None:
            self._frames[frame] = forward
            return True
        if not torch.is_grad_enabled():
            for storage in _storages(args, kwargs):
                seen = self._inputs.pop(storage.data_ptr(), None)
                shared = seen is not None and seen[1] is not forward and not seen[0].expired()
                self._inputs[storage.data_ptr()] = (_StorageReference(storage), None if shared else forward)
            while len(self._inputs) > _REMEMBERED_INPUTS:
                self._inputs.popitem(last=False)
            return True
        return False

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> F | None:
        """The forward that a module running inside a backward belongs to, None where ways 1 and 2 and the region do
        not know."""
        task = torch._C._current_graph_task_id()
        frame = _checkpoint_frame("target_frame_ref")
        if frame is not None and frame in self._frames:
            self._region = (task, self._frames[frame])
        else:
            for storage in _storages(args, kwargs):
                seen = self._inputs.get(storage.data_ptr())
                if seen is not None and seen[1] is not None and not seen[0].expired():
                    self._region = (task, seen[1])
                    break
        return self._region[1] if self._region is not None and self._region[0] == task else None


def _checkpoint_frame(variable: str) -> Any:
    """The frame object of the innermost non-reentrant checkpoint region, found as the ``variable`` that its pack hook
    closes over (torch 2.9 to 2.13: ``frame`` in the first pass, ``target_frame_ref`` when recomputing), else None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if not hooks:
        return None
    function: Any = hooks[0]
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and variable in code.co_freevars:
            value: Any = function.__closure__[code.co_freevars.index(variable)].cell_contents
            return value() if variable.endswith("_ref") else value
        function = getattr(function, "__wrapped__", None)
    return None


def _storages(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.UntypedStorage]:
    """Storages of the plain float tensors among a module's own arguments."""
    return [
        value.untyped_storage()
        for value in (*args, *kwargs.values())
        if type(value) is torch.Tensor and value.is_floating_point() and not value.is_meta and value.data_ptr()
    ]
