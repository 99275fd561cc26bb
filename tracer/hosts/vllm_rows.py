"""Which token of which request every row of a vLLM step is, from the engine's own batch state.

A step mixes whole prompts, chunks of prompts and single decoded tokens; its requests stand in another order every time,
and a preempted one runs its tokens again. So every step is read anew: request ids, where each one's rows begin, and how
many of its tokens were computed before. Token ids come from the call itself and from what the engine knows of a request.

Shape suffixes: R requests of a step, T tokens it schedules, N rows of the call (T, then padding).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tracer.format.schema import NotComputed, Span
from tracer.record.host import IntArray, Rows
from tracer.record.tokens import SequenceRegistry

__all__ = ["Batch", "RequestTracker", "padding_of", "read_batch"]

LOGIT_BOUNDARIES = ("lm_head.raw", "lm_head", "scorer.logprobs")
"""What is not computed for a row whose logits nobody asked for."""

_NEVER, _RAN, _LOGITS = 0, 1, 2
_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
"""What the engine appends to a request's id to make it unique."""


@dataclass(frozen=True)
class Batch:
    """One step. ``start_R1``: first row of every request and the end of the last. ``computed_R``: tokens before it."""

    requests: tuple[str, ...]
    start_R1: IntArray
    computed_R: IntArray


def read_batch(runner: Any) -> Batch:
    """The step that the V1 model runner is about to run. Its arrays are reused by the next step, so they are copied."""
    batch = runner.input_batch
    count = batch.num_reqs
    return Batch(
        tuple(batch.req_ids[:count]),
        runner.query_start_loc.np[: count + 1].astype(np.int64),
        batch.num_computed_tokens_cpu[:count].astype(np.int64),
    )


@dataclass(eq=False)
class _Request:
    """One request of the engine, as long as its trace is open."""

    sequence: int
    label: str
    state: Any
    """The engine's own record, None once the request has ended."""
    prompt: int
    """Tokens of the prompt."""
    entered: int
    """Tokens computed before its first step of this trace."""
    earlier: bool
    """It ran before the trace began."""
    known: int = 0
    """Ids given to the registry so far, from position 0 on."""
    ran: bytearray = field(default_factory=bytearray)
    """Per position: never run, run, run with logits."""

    def mark(self, start: int, stop: int, state: int) -> None:
        self.ran.extend(bytes(max(stop - len(self.ran), 0)))
        part = np.frombuffer(self.ran, np.uint8)[start:stop]
        np.maximum(part, state, out=part)

    def spans(self, state: int, stop: int) -> list[Span]:
        """Ascending spans of the positions below ``stop`` in exactly that state."""
        held_T = np.zeros(stop, np.uint8)
        held_T[: min(stop, len(self.ran))] = np.frombuffer(bytes(self.ran), np.uint8)[:stop]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], held_T == state, [False]]).astype(np.int8)))
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


class RequestTracker:
    """Opens a sequence per request and follows it from step to step."""

    def __init__(self, scope: str = "", running: Iterable[str] = ()) -> None:
        """``scope``: data-parallel coordinate. ``running``: requests the engine has as the trace begins."""
        self.scope = scope
        self._running = frozenset(running)
        self._requests: dict[str, _Request] = {}

    def label(self, batch: Batch, rows: int, states: Mapping[str, Any], registry: SequenceRegistry) -> Rows:
        """Rows of a step whose call has ``rows`` rows; what is beyond the scheduled tokens is padding, -1.
        ``states``: the engine's requests by id."""
        sequence_N, position_N = np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
        self._name_new([name for name in batch.requests if name not in self._requests], batch, states, registry)
        for n, name in enumerate(batch.requests):
            request = self._requests[name]
            request.state = states[name]
            start, stop, first = int(batch.start_R1[n]), int(batch.start_R1[n + 1]), int(batch.computed_R[n])
            sequence_N[start:stop] = request.sequence
            position_N[start:stop] = np.arange(first, first + stop - start)
            request.mark(first, first + stop - start, _RAN)
        self.learn_ids(registry)
        for name, request in self._requests.items():
            if name not in states:
                request.state = None
        return Rows(sequence_N, position_N)

    def learn_ids(self, registry: SequenceRegistry) -> None:
        """Tell the registry every token id that the engine has come to know: prompts at once, sampled tokens after them."""
        for request in self._requests.values():
            state = request.state
            if state is None or state.prompt_token_ids is None or getattr(state, "prompt_is_token_ids", None) is not None:
                continue
            after = max(request.known - request.prompt, 0)
            sampled = list(state.output_token_ids[after:])
            whole = next((n for n, token in enumerate(sampled) if token < 0), len(sampled))  # placeholders of async scheduling
            ids = [*state.prompt_token_ids[request.known :], *sampled[:whole]]
            registry.record_ids(request.sequence, request.known, ids)
            request.known += len(ids)

    def note_logits(self, rows: Rows) -> None:
        """Logits were computed for these rows."""
        by_sequence = {request.sequence: request for request in self._requests.values()}
        for sequence, position in zip(rows.sequence_N.tolist(), rows.position_N.tolist(), strict=True):
            if sequence >= 0:
                by_sequence[sequence].mark(position, position + 1, _LOGITS)

    def not_computed(self) -> Iterable[NotComputed]:
        """Tokens that no step of this trace ran, and rows whose logits nobody asked for."""
        for request in self._requests.values():
            last = max(request.known, len(request.ran))
            before: list[Span] = []
            after: list[Span] = []
            for start, stop in request.spans(_NEVER, last):
                before += [(start, min(stop, request.entered))] if start < request.entered else []
                after += [(max(start, request.entered), stop)] if stop > request.entered else []
            sampled = [(last - 1, last)] if after and after[-1][1] == last and last > request.prompt else []
            if sampled:
                start, stop = after.pop()
                after += [(start, stop - 1)] if start < stop - 1 else []
            reasons = {
                "computed before the trace began" if request.earlier else "prefix cache hit": before,
                "not run before the trace ended": after,
                "last sampled token": sampled,
            }
            for reason, spans in reasons.items():
                if spans:
                    yield NotComputed(sequence=request.label, scope=self.scope, positions=tuple(spans), reason=reason)
            if unasked := request.spans(_RAN, last):
                yield NotComputed(
                    sequence=request.label,
                    scope=self.scope,
                    positions=tuple(unasked),
                    boundaries=LOGIT_BOUNDARIES,
                    reason="logits not requested",
                )

    def _name_new(self, new: list[str], batch: Batch, states: Mapping[str, Any], registry: SequenceRegistry) -> None:
        """Open the sequences of requests seen for the first time, in batch order. The user's names wait for their requests,
        which may come over several steps."""
        for name, given in zip(new, registry.take_first_requests(len(new)), strict=True):
            state = states[name]
            label = _SUFFIX.sub("", name)
            if registry.index(label, self.scope) is not None:
                label = name
            sequence = registry.open(label, request=given, scope=self.scope, salt=_salt(state))
            entered = int(batch.computed_R[batch.requests.index(name)])
            self._requests[name] = _Request(sequence, label, state, state.num_prompt_tokens, entered, name in self._running)


def _salt(state: Any) -> str:
    """What conditions a request besides its tokens: adapter and multimodal inputs."""
    adapter = getattr(state, "lora_request", None)
    parts = [f"lora:{adapter.lora_name}"] if adapter is not None else []
    parts += [f"mm:{feature.identifier}" for feature in getattr(state, "mm_features", None) or ()]
    return " ".join(parts)


def padding_of(rows: Rows) -> int:
    """Rows that belong to no request."""
    return int((rows.sequence_N < 0).sum())
