"""The driver's side of a vLLM engine: the options it is built with, and the way to its workers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from tracer.errors import Code, HostError

__all__ = ["EngineWorkers", "engine_workers", "vllm_options", "worker_of"]

EXTENSION = "tracer.hosts.vllm_extension.TracerWorkerExtension"

_REMEDY = "build the engine with LLM(**tracer.vllm_options(), ...)"


def vllm_options() -> dict[str, Any]:
    """Keyword arguments for ``LLM``: ``LLM(**tracer.vllm_options(), model=...)``.

    Adds the worker extension, which starts and ends traces inside the workers and does nothing until then but watch the
    weights load, and eager mode, without which hooks do not run."""
    return {"worker_extension_cls": EXTENSION, "enforce_eager": True}


class EngineWorkers:
    """The workers of one engine, by its own remote calls; implements ``tracer.record.remote.Processes``."""

    name = "vllm"

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def call(self, method: str, message: bytes) -> Sequence[bytes]:
        answers = self._engine.collective_rpc("tracer_answer", args=(method, message.decode()))
        return [answer.encode() for answer in answers]


def engine_workers(model: Any) -> EngineWorkers | None:
    """The workers of an ``LLM`` or ``LLMEngine`` that run in other processes; None for whatever runs in this one.

    Raises HostError (host-unsupported) for an engine without the extension, and for an asynchronous one."""
    if not hasattr(model, "collective_rpc") or hasattr(model, "model_runner") or worker_of(model) is not None:
        return None
    if inspect.iscoroutinefunction(model.collective_rpc):
        raise HostError(
            Code.HOST_UNSUPPORTED,
            "an asynchronous engine cannot be traced by a `with` block",
            found=type(model).__name__,
            remedy='await engine.collective_rpc("tracer_start", kwargs={"out": ...}), and "tracer_stop" later',
        )
    config = getattr(getattr(model, "llm_engine", model), "vllm_config", None)
    extension = getattr(getattr(config, "parallel_config", None), "worker_extension_cls", "")
    if extension != EXTENSION:
        raise HostError(
            Code.HOST_UNSUPPORTED,
            "this engine's workers are other processes and have no tracer in them",
            expected=f"worker_extension_cls={EXTENSION!r}",
            found=f"worker_extension_cls={extension!r}",
            remedy=_REMEDY,
        )
    return EngineWorkers(model)


def worker_of(model: Any) -> Any:
    """The only worker of an ``LLM`` or ``LLMEngine`` whose core and worker run in this process; None otherwise."""
    engine = getattr(model, "llm_engine", model)
    driver = getattr(getattr(engine, "model_executor", None), "driver_worker", None)
    worker = getattr(driver, "worker", None)
    parallel = engine.vllm_config.parallel_config if worker is not None else None
    return worker if parallel is not None and parallel.world_size == 1 and hasattr(worker, "model_runner") else None
