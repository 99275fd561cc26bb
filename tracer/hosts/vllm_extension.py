"""What vLLM mixes into every worker: traces that start and end by remote call.

``LLM(**tracer.vllm_options(), ...)`` names ``TracerWorkerExtension``; ``collective_rpc("tracer_start", kwargs={...})``
calls it in every worker of a running engine, with plain data only. Importing this module starts watching weights load
(``vllm_loading``); no module has a hook until a trace starts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tracer.errors import Code, UsageError
from tracer.format.dumps import read_plan
from tracer.hosts.vllm import create
from tracer.hosts.vllm_loading import watch_loading
from tracer.record.capture import Trace
from tracer.record.dumping import MAX_DUMP_BYTES
from tracer.record.options import TraceOptions
from tracer.record.remote import TraceServer

__all__ = ["TracerWorkerExtension"]

watch_loading()


class TracerWorkerExtension:
    """Methods for ``collective_rpc``. All names begin with ``tracer_``: they stand beside the worker's own."""

    model_runner: Any
    _tracer_server: TraceServer | None = None
    _tracer_steps: _Steps | None = None

    def tracer_answer(self, method: str, message: str) -> str:
        """One call of the driver's ``with trace(llm)``."""
        facade: Any = sys.modules["tracer"]  # joins recording and reading; no layer below may import it
        server = self._tracer_server = self._tracer_server or TraceServer(facade.open_reference)
        host = create(self.model_runner, None) if method == "start" else None
        return server.answer(method, message.encode(), host).decode()

    def tracer_start(
        self,
        out: str | None = None,
        map: str = "auto",
        level: int = 1,
        boundaries: list[str] | None = None,
        tokens: list[int] | None = None,
        weights: str | bool | None = "digest",
        steps: int | None = None,
        dump: list[str] | None = None,
        max_dump_bytes: int = MAX_DUMP_BYTES,
        plan: str | None = None,
        against: str | None = None,
        feed: str | None = None,
        pin: dict[str, str] | None = None,
        perturb_ulps: int = 0,
    ) -> str:
        """Record from the next step on, ``steps`` steps (None: until ``tracer_stop``). The arguments are those of
        ``tracer.trace`` (``TRACER_PLAN`` is not looked at). Returns the trace's folder. Raises what ``trace`` raises."""
        if self._tracer_steps is not None and self._tracer_steps.running:
            raise UsageError(Code.BAD_ARGUMENT, "this worker is recording already", remedy="call tracer_stop first")
        facade: Any = sys.modules["tracer"]
        options = TraceOptions(
            map=map,
            out=out,
            level=level,
            boundaries=boundaries,
            tokens=tokens,
            weights=weights,
            dump=dump,
            max_dump_bytes=max_dump_bytes,
            plan=None if plan is None else read_plan(plan),
            against=None if against is None else facade.open_reference(against, values=False),
            feed=None if feed is None else facade.open_reference(feed, values=True),
            pin=None if pin is None else {glob: facade.open_reference(path, values=False) for glob, path in pin.items()},
            perturb_ulps=perturb_ulps,
        )
        trace = Trace(create(self.model_runner, None), options, facade.__version__)
        self._tracer_steps = _Steps(trace, self.model_runner, steps)
        return str(trace.path)

    def tracer_stop(self) -> dict[str, Any]:
        """End the trace, if its steps have not ended it. Returns ``out``, ``forwards`` and why it is incomplete, or ""."""
        if self._tracer_steps is None:
            raise UsageError(Code.BAD_ARGUMENT, "this worker is not recording", remedy="call tracer_start first")
        ended, self._tracer_steps = self._tracer_steps, None
        ended.end()
        return {"out": str(ended.out), "forwards": ended.trace.forwards, "incomplete": ended.trace.incomplete}


class _Steps:
    """A trace that ends by itself before the first step too many."""

    def __init__(self, trace: Trace, runner: Any, steps: int | None) -> None:
        """Enters the trace. ``runner``: its ``execute_model`` is one step."""
        if steps is not None and steps < 1:
            raise UsageError(Code.BAD_ARGUMENT, "steps must be at least 1", found=str(steps))
        self.trace = trace.__enter__()
        self.out: Path = trace.path
        self._runner = runner
        self._limit = steps
        self.running = True
        if steps is not None:
            self._execute = runner.execute_model
            runner.execute_model = self._step

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if self._limit is not None and self.trace.forwards >= self._limit:
            execute = self._execute
            self.end()
            return execute(*args, **kwargs)
        return self._execute(*args, **kwargs)

    def end(self) -> None:
        """Idempotent."""
        if not self.running:
            return
        self.running = False
        if self._limit is not None:
            del self._runner.execute_model
        self.trace.stop()
