"""Hosts: one module per framework, loaded when it is asked for.

A host module has two functions: ``claims(model) -> bool``, which must not import the framework, and
``create(model, mesh) -> Host``. One whose models may live in other processes also has
``processes(model) -> Processes | None``.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import operator
from collections.abc import Mapping
from typing import Any, cast

from tracer.errors import Code, HostError, UsageError
from tracer.format.schema import Axis
from tracer.record.host import Host, Mesh
from tracer.record.map_draft import MapDraft
from tracer.record.remote import Processes

__all__ = ["HOST_NAMES", "find_host", "find_processes", "suggest_map"]

_MODULES = {"transformers": "tracer.hosts.transformers", "megatron": "tracer.hosts.megatron", "vllm": "tracer.hosts.vllm"}

_PROTOCOL = {name for name in {**vars(Host), **Host.__annotations__} if not name.startswith("_")}

HOST_NAMES = tuple(sorted(_MODULES))
"""Hosts that come with the package."""


def find_host(
    model: Any,
    host: str | Host | None = None,
    mesh: Mapping[str, tuple[int, int]] | Mesh | None = None,
) -> Host:
    """The host that runs ``model``: ``host`` itself, the one of that name, or the first that claims the model.

    ``mesh`` overrides what the host would find out: axis name -> (this process's index, size), outermost axis first.
    Raises HostError (host-unknown, host-missing-package, host-unsupported) and UsageError (bad-argument).
    """
    if host is not None and not isinstance(host, str):
        if lacking := sorted(name for name in _PROTOCOL if not hasattr(host, name)):
            raise HostError(
                Code.HOST_UNKNOWN,
                "host= is no host",
                expected=f"one of {', '.join(HOST_NAMES)}, or an object that implements tracer.record.host.Host",
                found=f"{type(host).__name__} without {', '.join(lacking)}",
            )
        return host
    placed = _mesh(mesh)
    if isinstance(host, str):
        if host not in _MODULES:
            raise HostError(
                Code.HOST_UNKNOWN,
                f"there is no host called {host!r}",
                expected=", ".join(HOST_NAMES),
                found=host,
                remedy="leave host= out, or pass an object that implements tracer.record.host.Host",
            )
        return _create(host, model, placed)
    for name in _MODULES:
        if _load(name).claims(model):
            return _create(name, model, placed)
    inside = _claimed_inside(model)
    raise HostError(
        Code.HOST_UNKNOWN,
        f"no host claims a {type(model).__module__}.{type(model).__qualname__}",
        expected="a transformers model or a megatron-core GPTModel, wrapped or not, or a vLLM engine, worker or loaded model",
        found=f"{type(model).__module__}.{type(model).__qualname__}",
        remedy=f"pass what is inside it: {', or '.join(inside)}; it is recorded when the wrapper calls it"
        if inside
        else "pass the model itself, or host= an object that implements tracer.record.host.Host",
    )


def _claimed_inside(model: Any) -> list[str]:
    """Modules inside of ``model`` that a host claims, as ``.path (a Class)``, outermost only."""
    named = model.named_modules() if hasattr(model, "named_modules") else ()
    found: dict[str, str] = {}
    for path, module in named:
        inner = any(path.startswith(f"{outer}.") for outer in found)
        if path and not inner and any(_load(name).claims(module) for name in _MODULES):
            found[path] = f".{path} (a {type(module).__name__})"
    return list(found.values())[:4]


def find_processes(model: Any, host: str | Host | None = None) -> Processes | None:
    """The processes that hold ``model``, where it is only the handle of an engine that runs elsewhere; None where it is in
    this process (or is nobody's: ``find_host`` says so). Raises HostError (host-unsupported)."""
    names = _MODULES if host is None else [host] if isinstance(host, str) and host in _MODULES else []
    for name in names:
        look = getattr(_load(name), "processes", None)
        if look is not None and (found := look(model)) is not None:
            return cast("Processes", found)
    return None


def suggest_map(model: Any, family: str = "") -> MapDraft:
    """A boundary map for the class of ``model``, drafted from one tiny forward: ``draft.text`` is YAML with the evidence for every
    guess, ``draft.missing`` what was not found, ``draft.save(path)`` writes a new file. The model is not changed.

    ``family``: name of the map; by default the model's type. Raises HostError (host-unknown; host-unsupported: a host that cannot
    run a forward by itself), MapError map-unfit (no stack of layers is seen), UsageError bad-argument (dropout is active)."""
    for name in _MODULES:
        if _load(name).claims(model):
            if importlib.util.find_spec(f"tracer.hosts.{name}_suggest") is None:
                raise HostError(
                    Code.HOST_UNSUPPORTED,
                    f"a map cannot be suggested for host {name}: it runs no forward by itself",
                    found=type(model).__name__,
                    remedy="suggest one for the same model in transformers, and add a section for this host by hand",
                )
            return cast("MapDraft", importlib.import_module(f"tracer.hosts.{name}_suggest").suggest_map(model, family))
    find_host(model)
    raise AssertionError("a host claims what no host claims")


def _load(name: str) -> Any:
    return importlib.import_module(_MODULES[name])


def _create(name: str, model: Any, mesh: Mesh | None) -> Host:
    try:
        return cast("Host", _load(name).create(model, mesh))
    except ImportError as error:
        raise HostError(
            Code.HOST_MISSING_PACKAGE,
            f"the {name} host needs a package that cannot be imported: {error}",
            remedy=f"install it: pip install 'boundary-tracer[{name}]'",
        ) from error


def _mesh(mesh: Mapping[str, tuple[int, int]] | Mesh | None) -> Mesh | None:
    """The user's mesh as a ``Mesh``; ranks count row-major over the axes in the order given."""
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    try:
        told = {str(name): (operator.index(index), operator.index(size)) for name, (index, size) in mesh.items()}
    except (AttributeError, TypeError, ValueError):
        raise UsageError(
            Code.BAD_ARGUMENT, "mesh= is no mesh", expected='axis -> (index, size): {"tp": (0, 2)}', found=repr(mesh)
        ) from None
    axes = tuple(Axis(name=name, index=index, size=size) for name, (index, size) in told.items())
    for axis in axes:
        if not 0 <= axis.index < axis.size:
            raise UsageError(
                Code.BAD_ARGUMENT,
                f"mesh axis {axis.name!r} has no such coordinate",
                expected=f"0 <= index < {axis.size}",
                found=str(axis.index),
            )
    rank = 0
    for axis in axes:
        rank = rank * axis.size + axis.index
    return Mesh(rank=rank, world_size=math.prod(axis.size for axis in axes), axes=axes)
