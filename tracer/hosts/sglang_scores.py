"""Scores A and B of an SGLang server, over its native HTTP API: ``/generate`` and ``/flush_cache``. Standard library only.

An answer's ``meta_info`` has ``output_token_logprobs`` and ``input_token_logprobs``: lists of ``[logprob, token id, text]``; the
entry at ``logprob_start_len`` has no logprob, because nothing precedes it. Scores of the input are raw. Scores of what was
generated come after the temperature, unless the server was started to return original ones.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tracer.errors import Code, ScoreError, UsageError
from tracer.format.score_records import PolicySegment, ScoreDefinition, ScoreInfo, ScoreKind, ScoreName, ScoreRecord, make_score

__all__ = ["collect_sglang"]

_PASSES = (ScoreName.B0, ScoreName.B1)
_NEUTRAL = {
    "top_k": (-1, 1 << 30),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}


def collect_sglang(
    url: str,
    prompts: Sequence[Sequence[int]] | Sequence[ScoreRecord],
    *,
    sampling: Mapping[str, Any] | None = None,
    reset_cache: bool | Callable[[], object] = True,
    original_logprobs: bool = False,
    requests: Sequence[str] | None = None,
    repeats: int = 2,
    info: ScoreInfo | None = None,
    timeout_s: float = 600.0,
) -> list[ScoreRecord]:
    """Generate once (A), then score the saved tokens again as input (B0, B1).

    ``url``: ``http://host:port`` of the server. ``prompts``: token ids, never text; or records that hold the tokens already, which
    are then only replayed. ``sampling``: the server's ``sampling_params``. ``reset_cache``: post ``/flush_cache`` before each
    replay, or your own way to do it (behind a router, every replica); False leaves the cache alone. ``original_logprobs``: the
    server returns scores from before the temperature. Requests go one after the other, so that nothing shares their batch.

    Raises ScoreError (scores-collect) where the server cannot be reached, refuses, or returns other tokens; UsageError
    (bad-argument) where ``url`` is none.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(Code.BAD_ARGUMENT, "url is the address of the server", expected="http://host:port", found=url)
    server = _Server(url.rstrip("/"), timeout_s)
    given: list[Any] = list(prompts)
    found = msgspec.structs.replace(info or ScoreInfo(), source=(info and info.source) or "SGLang, native API")
    if given and isinstance(given[0], ScoreRecord):
        records: list[ScoreRecord] = given
    else:
        definition = _definition(sampling or {}, original_logprobs)
        labels = requests if requests is not None else [str(number) for number in range(len(given))]
        records = [
            server.generate(label, [int(token) for token in ids], dict(sampling or {}), definition, found)
            for label, ids in zip(labels, given, strict=True)
        ]
    for name in _PASSES[:repeats]:
        if callable(reset_cache):
            reset_cache()
        elif reset_cache:
            server.post("/flush_cache", None)
        records = [server.replay(record, name, found) for record in records]
    return records


def _definition(sampling: Mapping[str, Any], original: bool) -> ScoreDefinition:
    """What the server says of the tokens it generated."""
    settings = {name: sampling[name] for name, neutral in _NEUTRAL.items() if name in sampling and sampling[name] not in neutral}
    penalties = {name: value for name, value in settings.items() if name.endswith("penalty")}
    if original:
        return ScoreDefinition(kind=ScoreKind.RAW)
    if penalties:
        return ScoreDefinition(kind=ScoreKind.PROCESSED, temperature=float(sampling.get("temperature", 1.0)), settings=penalties)
    return ScoreDefinition(kind=ScoreKind.TEMPERATURE, temperature=float(sampling.get("temperature", 1.0)))


class _Server:
    """The few calls that are needed."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s

    def post(self, path: str, content: Mapping[str, Any] | None) -> bytes:
        request = urllib.request.Request(
            self._url + path,
            data=b"" if content is None else json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(300).decode(errors="replace").strip()
            raise _refused(f"the server refused {path}", "status 200", f"{error.code} {text}", self._url) from error
        except (urllib.error.URLError, OSError) as error:
            raise _refused("the server cannot be reached", "an answer", getattr(error, "reason", error), self._url) from error

    def _meta(self, ids: Sequence[int], sampling: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        content = {"input_ids": list(ids), "sampling_params": dict(sampling), "return_logprob": True, "logprob_start_len": 0}
        raw = self.post("/generate", content)
        try:
            meta = json.loads(raw)["meta_info"]
        except (ValueError, KeyError, TypeError) as error:
            raise _refused(
                "the server's answer is not that of /generate", "meta_info", raw[:100].decode(errors="replace"), where
            ) from error
        if not isinstance(meta, dict):
            raise _refused("the server's answer is not that of /generate", "an object meta_info", type(meta).__name__, where)
        return meta

    def generate(
        self, label: str, prompt: list[int], sampling: Mapping[str, Any], definition: ScoreDefinition, info: ScoreInfo
    ) -> ScoreRecord:
        where = f"request {label}, A"
        meta = self._meta(prompt, sampling, where)
        values, tokens = _entries(meta, "output_token_logprobs", where)
        version = meta.get("weight_version")
        policies = (PolicySegment(start=0, version=str(version)),) if version not in (None, "default") else info.policies
        own = msgspec.structs.replace(info, definition=definition, policies=policies)
        ids = np.array([*prompt, *tokens], np.int64)
        return ScoreRecord(request=label, ids=ids, prompt_length=len(prompt), scores={ScoreName.A: make_score(values, own)}, group=label)

    def replay(self, record: ScoreRecord, name: ScoreName, info: ScoreInfo) -> ScoreRecord:
        where = f"request {record.request}, {name.value}"
        meta = self._meta(record.ids.tolist(), {"max_new_tokens": 1, "temperature": 0}, where)
        values, tokens = _entries(meta, "input_token_logprobs", where)
        if tokens != record.ids.tolist():
            raise _refused(
                "the server scored other tokens than those that were sent", f"{len(record.ids)} ids", f"{len(tokens)} ids", where
            )
        own = msgspec.structs.replace(info, definition=ScoreDefinition(kind=ScoreKind.RAW))
        return record.with_scores({name: make_score(values[record.prompt_length :], own)})


def _entries(meta: Mapping[str, Any], key: str, where: str) -> tuple[list[float | None], list[int]]:
    """Values and ids of ``[logprob, token id, text]``."""
    try:
        entries = [(entry[0] if entry[0] is None else float(entry[0]), int(entry[1])) for entry in meta[key]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _refused(
            "the server returned no scores", f"meta_info.{key} of [logprob, token id, text]", f"{type(error).__name__}: {error}", where
        ) from error
    return [value for value, _ in entries], [token for _, token in entries]


def _refused(what: str, expected: object, found: object, where: str = "") -> ScoreError:
    return ScoreError(Code.SCORES_COLLECT, what, where=where, expected=str(expected), found=str(found))
