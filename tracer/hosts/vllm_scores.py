"""Scores A and B of a vLLM engine: what it reported while it generated, and prefill replays of the same tokens.

vLLM returns raw log probabilities of sampled tokens (``logprobs=0``) and of prompt tokens (``prompt_logprobs=0``); a replay is a
prompt with one token generated and dropped. ``logprobs_mode`` of the engine says what A is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from tracer.errors import Code, ScoreError
from tracer.format.score_records import (
    PolicySegment,
    Score,
    ScoreDefinition,
    ScoreInfo,
    ScoreKind,
    ScoreName,
    ScoreRecord,
    make_score,
)

__all__ = ["collect_vllm"]

_PASSES = (ScoreName.B0, ScoreName.B1)
_NEUTRAL = {
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}


def collect_vllm(
    llm: Any,
    prompts: Sequence[Sequence[int]] | Sequence[ScoreRecord],
    *,
    sampling: Any = None,
    requests: Sequence[str] | None = None,
    repeats: int = 2,
    argmax: bool = False,
    info: ScoreInfo | None = None,
) -> list[ScoreRecord]:
    """Generate once (A), then score the saved tokens again as prompts (B0, B1), the prefix cache emptied before each pass.

    ``prompts``: token ids, never text; or records that hold the tokens already, which are then only replayed. ``sampling``: a
    ``vllm.SamplingParams`` for the generation; its ``n`` samples of a prompt become requests of one group. ``requests``: names of
    the prompts. ``argmax``: keep the most likely token at each place of a replay. ``info``: policy, worker, model digest and so on;
    the definition is what the engine says it is. Records have no mask of their own: every response token counts.

    Raises ScoreError (scores-collect) where the engine returns other tokens, leaves one out, cannot empty its cache, or
    reports logits instead of log probabilities; HostError never.
    """
    config = llm.llm_engine.vllm_config.model_config
    mode = str(getattr(config.logprobs_mode, "value", config.logprobs_mode))
    if "logits" in mode:
        raise _refused("the engine reports logits, not log probabilities", "logprobs_mode raw_logprobs or processed_logprobs", mode)
    given: list[Any] = list(prompts)
    found = msgspec.structs.replace(info or ScoreInfo(), source=(info and info.source) or f"vLLM, {config.dtype}, {mode}")
    records: list[ScoreRecord] = (
        given if given and isinstance(given[0], ScoreRecord) else _generate(llm, given, sampling, requests, mode, found)
    )
    for name in _PASSES[:repeats]:
        records = _replay(llm, records, name, argmax, found, int(config.max_model_len))
    return records


def _generate(
    llm: Any, prompts: Iterable[Sequence[int]], sampling: Any, requests: Sequence[str] | None, mode: str, info: ScoreInfo
) -> list[ScoreRecord]:
    from vllm import SamplingParams

    params = sampling.clone() if sampling is not None else SamplingParams(max_tokens=64)
    params.logprobs = params.logprobs or 0
    listed = [list(map(int, ids)) for ids in prompts]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in listed], params, use_tqdm=False)
    records = []
    for number, (ids, output) in enumerate(zip(listed, outputs, strict=True)):
        label = requests[number] if requests is not None else str(number)
        for sample, completion in enumerate(output.outputs):
            name = label if len(output.outputs) == 1 else f"{label}-s{sample}"
            tokens = list(completion.token_ids)
            values = [_logprob(step, token, f"request {name}, A") for step, token in zip(completion.logprobs, tokens, strict=True)]
            policies = tuple(
                PolicySegment(start=int(span.start), version=str(span.version))
                for span in getattr(completion, "weight_versions", None) or ()
            )
            own = msgspec.structs.replace(info, definition=_definition(params, mode), policies=policies or info.policies)
            records.append(
                ScoreRecord(
                    request=name,
                    ids=np.array(ids + tokens, np.int64),
                    prompt_length=len(ids),
                    scores={ScoreName.A: make_score(values, own)},
                    group=label,
                )
            )
    return records


def _definition(params: Any, mode: str) -> ScoreDefinition:
    """What A is: raw, or after temperature and filters, as the engine was built."""
    if mode.startswith("raw"):
        return ScoreDefinition(kind=ScoreKind.RAW)
    settings = {name: getattr(params, name) for name, neutral in _NEUTRAL.items() if getattr(params, name) not in neutral}
    kind = ScoreKind.PROCESSED if settings else ScoreKind.TEMPERATURE
    return ScoreDefinition(kind=kind, temperature=float(params.temperature), settings=settings)


def _replay(llm: Any, records: Sequence[ScoreRecord], name: ScoreName, argmax: bool, info: ScoreInfo, longest: int) -> list[ScoreRecord]:
    from vllm import SamplingParams

    if too_long := next((record for record in records if len(record.ids) >= longest), None):
        raise _refused(
            f"request {too_long.request} fills the engine's context, so that no token can follow it",
            f"fewer than {longest} tokens",
            len(too_long.ids),
        )
    if llm.reset_prefix_cache() is False:
        raise _refused("the engine could not empty its prefix cache", "no request that is still running", "refused")
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1 if argmax else 0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": record.ids.tolist()} for record in records], params, use_tqdm=False)
    own = msgspec.structs.replace(info, definition=ScoreDefinition(kind=ScoreKind.RAW))
    return [
        record.with_scores({name: _replayed(record, output, name, argmax, own)}) for record, output in zip(records, outputs, strict=True)
    ]


def _replayed(record: ScoreRecord, output: Any, name: ScoreName, argmax: bool, info: ScoreInfo) -> Score:
    where = f"request {record.request}, {name.value}"
    if list(output.prompt_token_ids) != record.ids.tolist():
        raise _refused(
            "the engine scored other tokens than those that were sent", f"{len(record.ids)} ids", len(output.prompt_token_ids), where
        )
    if output.num_cached_tokens:
        raise _refused("the engine took a part of the replay from its cache", "0 cached tokens", output.num_cached_tokens, where)
    steps = output.prompt_logprobs or ()
    if len(steps) != len(record.ids):
        raise _refused("the engine left scores out", f"{len(record.ids)} of them", len(steps), where)
    response = range(record.prompt_length, len(record.ids))
    values = [_logprob(steps[at], int(record.ids[at]), where) for at in response]
    likely = [max(steps[at], key=lambda token: steps[at][token].logprob) for at in response] if argmax else None
    return make_score(values, info, likely)


def _logprob(step: Any, token: int, where: str) -> float:
    if step is None or token not in step:
        raise _refused("the engine returned no score of a token", f"token {token}", "none" if step is None else str(list(step)), where)
    return float(step[token].logprob)


def _refused(what: str, expected: object, found: object, where: str = "") -> ScoreError:
    return ScoreError(Code.SCORES_COLLECT, what, where=where, expected=str(expected), found=str(found))
