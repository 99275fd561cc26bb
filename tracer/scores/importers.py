"""Batches of trainers and answers of engines as score records.

Each importer takes plain data (mappings of lists, numpy arrays or torch tensors) that somebody loaded already; files are
opened elsewhere. Nothing is guessed: a field that is absent is named, and what a batch does not say stays unknown.
What is known about the scores beyond the batch (definition, policy, worker ...) is given as a ``ScoreInfo``.

Shape suffixes: B requests, T padded tokens, R padded response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.errors import Code, ScoreError
from tracer.format.score_records import PolicySegment, ScoreInfo, ScoreName, ScoreRecord, make_score

__all__ = [
    "IMPORTERS",
    "import_areal",
    "import_engine_json",
    "import_pairs",
    "import_slime",
    "import_trl",
    "import_verl",
]

Infos = Mapping[str, ScoreInfo]
_NO_INFO = ScoreInfo()
_NO_INFOS: Infos = MappingProxyType({})


def import_pairs(batch: Mapping[str, Any], name: str, base: Iterable[ScoreRecord], infos: Infos = _NO_INFOS) -> list[ScoreRecord]:
    """``{request: (logprobs, mask)}``: one score of requests whose tokens are known from ``base``.

    Both sequences may cover the response alone or the whole sequence (then the prompt's part is dropped; entry t belongs to
    token t). Tokens come from the record of the same request; without ``base`` there is nothing to say what was scored.
    Raises ScoreError (scores-import, scores-requests).
    """
    known = {record.request: record for record in base}
    if set(map(str, batch)) != set(known):
        raise ScoreError(
            Code.SCORES_REQUESTS,
            f"the file of {name} and the records have other requests",
            expected=_some(set(known) - set(map(str, batch))) or "the requests of the records",
            found=_some(set(map(str, batch)) - set(known)) or "fewer requests",
            remedy="score the same saved batch",
        )
    records = []
    for request, pair in batch.items():
        record = known[str(request)]
        response, whole = len(record.response), len(record.ids)
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise _lacks(f"request {request}", "(logprobs, mask)", type(pair).__name__)
        values, mask = _row(pair[0]), _row(pair[1])
        if len(values) not in (response, whole) or len(mask) not in (response, whole):
            raise _lacks(f"request {request}", f"{response} or {whole} numbers", f"{len(values)} and {len(mask)}")
        values, mask = values[len(values) - response :], mask[len(mask) - response :]
        records.append(
            ScoreRecord(
                request=record.request,
                ids=record.ids,
                prompt_length=record.prompt_length,
                mask=np.asarray(_numbers(mask), np.bool_),
                positions=record.positions,
                group=record.group,
                scores={ScoreName(name): make_score(values, infos.get(name, _NO_INFO))},
            )
        )
    return records


def import_verl(batch: Mapping[str, Any], infos: Infos = _NO_INFOS) -> list[ScoreRecord]:
    """verl's batch as a mapping: ``prompts`` (B, P) left-padded, ``responses`` (B, R) right-padded, ``attention_mask``
    (B, P + R), ``response_mask`` (B, R); ``rollout_log_probs`` is A, ``old_log_probs`` is C0. ``uid`` is the group.

    Without ``response_mask`` the attention mask says which response tokens count. Where ``param_version_start`` and
    ``param_version_end`` of a sample are one number, it is A's policy.
    """
    prompts, responses, attention = (_field(batch, key) for key in ("prompts", "responses", "attention_mask"))
    width = len(_row(prompts[0]))
    given = {ScoreName.A: batch.get("rollout_log_probs"), ScoreName.C0: batch.get("old_log_probs")}
    names = _requests(batch, len(prompts), ("request_id", "uid"))
    records = []
    for n, request in enumerate(names):
        seen = np.asarray(_numbers(_row(attention[n])), np.bool_)
        mask = _field(batch, "response_mask")[n] if "response_mask" in batch else attention[n][width:]
        groups = batch.get("uid")
        spans = [batch[key][n] for key in ("param_version_start", "param_version_end") if batch.get(key) is not None]
        records.append(
            _padded(
                request,
                prompts[n],
                seen[:width],
                responses[n],
                seen[width:],
                mask,
                _of_row(given, n),
                _sampled_by(infos, spans if len(spans) == 2 else ()),
                "" if groups is None else str(groups[n]),
            )
        )
    return records


def import_trl(batch: Mapping[str, Any], infos: Infos = _NO_INFOS) -> list[ScoreRecord]:
    """TRL's batch: ``prompt_ids`` (B, P) and ``prompt_mask`` left-padded, ``completion_ids`` (B, R) and ``completion_mask``;
    ``sampling_per_token_logps`` is A, ``old_per_token_logps`` is C0. Where there is a ``tool_mask``, what a tool wrote does not count.
    """
    prompts, prompt_mask, completions, completion_mask = (
        _field(batch, key) for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    )
    given = {ScoreName.A: batch.get("sampling_per_token_logps"), ScoreName.C0: batch.get("old_per_token_logps")}
    records = []
    for n, request in enumerate(_requests(batch, len(prompts), ("request_id",))):
        held = np.asarray(_numbers(_row(completion_mask[n])), np.bool_)
        counts = held & np.asarray(_numbers(_row(batch["tool_mask"][n])), np.bool_) if batch.get("tool_mask") is not None else held
        seen = np.asarray(_numbers(_row(prompt_mask[n])), np.bool_)
        records.append(_padded(request, prompts[n], seen, completions[n], held, counts, _of_row(given, n), infos, ""))
    return records


def import_slime(batch: Mapping[str, Any], infos: Infos = _NO_INFOS) -> list[ScoreRecord]:
    """slime's rollout data: lists per sample without padding. ``tokens`` whole sequences, ``response_lengths``,
    ``loss_masks`` over the response; ``rollout_log_probs`` is A, ``log_probs`` is C0. ``sample_indices`` names the samples.
    Where all ``weight_versions`` of a sample are one, it is A's policy.
    """
    tokens, lengths = _field(batch, "tokens"), _field(batch, "response_lengths")
    given = {ScoreName.A: batch.get("rollout_log_probs"), ScoreName.C0: batch.get("log_probs")}
    records = []
    for n, request in enumerate(_requests(batch, len(tokens), ("sample_indices",))):
        ids, length = _numbers(_row(tokens[n])), int(lengths[n])
        mask = np.ones(length) if batch.get("loss_masks") is None else _numbers(_row(batch["loss_masks"][n]))
        versions = batch["weight_versions"][n] if batch.get("weight_versions") is not None else ()
        own = _sampled_by(infos, _row(versions) if versions is not None else ())
        records.append(_record(request, ids, len(ids) - length, np.asarray(mask, np.bool_), _of_row(given, n), own, ""))
    return records


def import_areal(batch: Mapping[str, Any], infos: Infos = _NO_INFOS) -> list[ScoreRecord]:
    """AReaL's rollout batch: ``input_ids``, ``attention_mask``, ``loss_mask`` (B, T), right-padded, prompt and response in one row.

    ``logprobs`` is A: entry t belongs to token t, zeros where the engine sampled nothing. ``prox_logp`` is C0: entry t belongs to
    token t + 1. ``versions`` (B, T) are the policies of A, below 0 where nothing was sampled. The prompt ends where the mask
    first counts. A batch that holds ``advantages`` is refused: by then AReaL has moved its masks and scores by one token, and may
    have put the trainer's scores in place of the engine's.
    """
    if batch.get("advantages") is not None:
        raise _lacks("the batch", "a batch from before compute_advantages, which moves and exchanges scores", "advantages")
    ids, attention, loss = (_field(batch, key) for key in ("input_ids", "attention_mask", "loss_mask"))
    a_BT, c_BT, versions_BT = batch.get("logprobs"), batch.get("prox_logp"), batch.get("versions")
    records = []
    for n, request in enumerate(_requests(batch, len(ids), ("request_id", "task_id"))):
        held = np.asarray(_numbers(_row(attention[n])), np.bool_)
        length = int(np.count_nonzero(held))
        counts = np.asarray(_numbers(_row(loss[n])), np.bool_)[:length]
        if not held[:length].all():
            raise _lacks(f"request {request}", "padding on the right only", "a hole, or padding on the left, in attention_mask")
        prompt = int(np.argmax(counts)) if counts.any() else length
        given = {ScoreName.A: None if a_BT is None else [a_BT[n][prompt:length]]}
        given[ScoreName.C0] = None if c_BT is None or not prompt else [c_BT[n][prompt - 1 : length - 1]]
        own = dict(infos)
        if versions_BT is not None and not infos.get("A", _NO_INFO).policies:
            own["A"] = msgspec.structs.replace(infos.get("A", _NO_INFO), policies=_segments(_numbers(_row(versions_BT[n]))[prompt:length]))
        records.append(_record(request, _numbers(_row(ids[n]))[:length], prompt, counts[prompt:], _of_row(given, 0), own, ""))
    return records


def _segments(version_R: npt.NDArray[Any]) -> tuple[PolicySegment, ...]:
    """One segment per run of equal versions; what nobody sampled (below 0) continues the run before it."""
    found: list[PolicySegment] = []
    for start, version in enumerate(version_R.tolist()):
        if version >= 0 and (not found or found[-1].version != str(version)):
            found.append(PolicySegment(start=start if found else 0, version=str(version)))
    return tuple(found)


def _sampled_by(infos: Infos, versions: Sequence[Any]) -> Infos:
    """``infos`` with A's policy, where the batch names one for the whole sample and the caller named none."""
    named = {str(_item(version)) for version in versions}
    known = infos.get("A", _NO_INFO)
    if len(named) != 1 or known.policies:
        return infos
    return {**infos, "A": msgspec.structs.replace(known, policies=(PolicySegment(start=0, version=named.pop()),))}


def import_engine_json(
    answers: Sequence[Mapping[str, Any]], name: str, infos: Infos = _NO_INFOS, *, base: Iterable[ScoreRecord] = ()
) -> list[ScoreRecord]:
    """What an engine's HTTP server answered, one JSON object per request, as it came.

    Two shapes are known. ``meta_info`` with ``input_token_logprobs`` and ``output_token_logprobs``: lists of ``[logprob, token
    id, text]``, the native ``/generate`` of SGLang, asked with ``logprob_start_len=0``. ``prompt_logprobs`` (a list of null or ``{token id:
    {"logprob": ...}}``) with ``prompt_token_ids`` in ``choices[0]`` or beside it: the completions of vLLM. For A the answer
    must hold generated tokens; for B0 and B1 the scores of the input, whose tokens are those of ``base``.

    Raises ScoreError (scores-import), also where the ids that came back are not those of ``base``.
    """
    known = list(base)
    if known and len(known) != len(answers):
        raise _lacks("answers", f"{len(known)}, one per record", str(len(answers)))
    records = []
    for n, answer in enumerate(answers):
        record = known[n] if known else None
        meta = answer.get("meta_info")
        read = _native_answer if isinstance(meta, Mapping) else _completion_answer
        records.append(read(answer, name, record, infos.get(name, _NO_INFO), str(n)))
    return records


def _native_answer(answer: Mapping[str, Any], name: str, record: ScoreRecord | None, info: ScoreInfo, number: str) -> ScoreRecord:
    meta = answer["meta_info"]
    request = record.request if record else str(meta.get("id", number))
    read = _triples(meta, "input_token_logprobs", request)
    ids, values = [token for _, token in read], [value for value, _ in read]
    if record is None:
        output = _triples(meta, "output_token_logprobs", request)
        prompt = len(ids)
        if name == "A":
            ids, values = ids + [token for _, token in output], [value for value, _ in output]
        if info == _NO_INFO and meta.get("weight_version"):
            info = ScoreInfo(policies=(PolicySegment(start=0, version=str(meta["weight_version"])),))
        if name != "A":
            raise _lacks(f"request {request}", "records with the tokens that were scored", "a replay without its records")
        return _record(request, ids, prompt, None, {ScoreName.A: values}, {name: info}, "")
    return _replayed(record, ids, values, name, info)


def _completion_answer(answer: Mapping[str, Any], name: str, record: ScoreRecord | None, info: ScoreInfo, number: str) -> ScoreRecord:
    choice = answer["choices"][0] if answer.get("choices") else answer
    request = record.request if record else str(answer.get("id", number))
    prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    if prompt is None:
        raise _lacks(f"request {request}", "prompt_token_ids (ask with return_token_ids)", ", ".join(choice))
    if record is None:
        output = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        if output is None or logprobs is None or name != "A":
            raise _lacks(f"request {request}", "token_ids and logprobs.token_logprobs of what was generated", ", ".join(choice))
        return _record(request, [*prompt, *output], len(prompt), None, {ScoreName.A: logprobs}, {name: info}, "")
    entries = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
    if entries is None or len(entries) != len(prompt):
        raise _lacks(f"request {request}", "prompt_logprobs, one per prompt token", "none" if entries is None else str(len(entries)))
    values = []
    for token, entry in zip(prompt, entries, strict=True):
        found = None if entry is None else entry.get(str(token), entry.get(token))
        values.append(None if found is None else found["logprob"] if isinstance(found, Mapping) else found)
    return _replayed(record, prompt, values, name, info)


def _replayed(record: ScoreRecord, ids: Sequence[int], values: Sequence[float | None], name: str, info: ScoreInfo) -> ScoreRecord:
    """A replay of a record; the engine may have scored a suffix that holds the whole response."""
    expected = record.ids[len(record.ids) - len(ids) :] if len(ids) <= len(record.ids) else record.ids
    if not np.array_equal(np.asarray(ids), expected) or len(ids) <= len(record.response):
        raise ScoreError(
            Code.SCORES_IDS,
            "the engine scored other tokens than those that were sent",
            where=f"request {record.request}, score {name}",
            expected=f"{len(expected)} ids: {_some(expected[:8])} ...",
            found=f"{len(ids)} ids: {_some(ids[:8])} ...",
            remedy="send token ids, not text; text is tokenized anew",
        )
    return _record(
        record.request,
        record.ids,
        record.prompt_length,
        record.mask,
        {ScoreName(name): list(values[len(values) - len(record.response) :])},
        {name: info},
        record.group,
        record.positions,
    )


def _triples(meta: Mapping[str, Any], key: str, request: str) -> list[tuple[float | None, int]]:
    try:
        return [(None if entry[0] is None else float(entry[0]), int(entry[1])) for entry in meta[key]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _lacks(f"request {request}", f"meta_info.{key} of [logprob, token id, text]", f"{type(error).__name__}: {error}") from error


def _padded(
    request: str,
    prompt: Any,
    prompt_held: Any,
    response: Any,
    held: Any,
    counts: Any,
    scores: Mapping[ScoreName, Any],
    infos: Infos,
    group: str,
) -> ScoreRecord:
    """One row of a padded batch: padding goes, the last held response token ends it, holes in between are masked."""
    prompt_ids = np.asarray(_numbers(_row(prompt)))[np.asarray(prompt_held)]
    length = int(np.flatnonzero(held)[-1]) + 1 if np.any(held) else 0
    response_ids, mask = np.asarray(_numbers(_row(response)))[:length], np.asarray(_numbers(_row(counts)), np.bool_)[:length]
    cut = {name: values[:length] for name, values in scores.items()}
    return _record(request, np.concatenate([prompt_ids, response_ids]).astype(np.int64), len(prompt_ids), mask, cut, infos, group)


def _record(
    request: str,
    ids: Any,
    prompt_length: int,
    mask: Any,
    scores: Mapping[ScoreName, Any],
    infos: Infos,
    group: str,
    positions: Any = None,
) -> ScoreRecord:
    try:
        return ScoreRecord(
            request=request,
            ids=np.asarray(ids, np.int64),
            prompt_length=prompt_length,
            mask=mask,
            positions=positions,
            group=group,
            scores={name: make_score(values, infos.get(name.value, _NO_INFO)) for name, values in scores.items()},
        )
    except ScoreError as error:
        raise ScoreError(
            Code.SCORES_IMPORT,
            f"request {request} of the batch does not fit together",
            expected=error.expected,
            found=error.found,
            remedy=error.what,
        ) from error


def _field(batch: Mapping[str, Any], key: str) -> Any:
    if batch.get(key) is None:
        raise _lacks("the batch", key, ", ".join(map(str, batch)))
    return batch[key]


def _of_row(given: Mapping[ScoreName, Any], n: int) -> dict[ScoreName, Any]:
    found = {name: values[n] for name, values in given.items() if values is not None}
    if not found:
        raise _lacks("the batch", "log probabilities of the rollout or of the trainer", "neither")
    return found


def _requests(batch: Mapping[str, Any], count: int, keys: Iterable[str]) -> list[str]:
    """Names of the requests: a field of the batch whose values are distinct, else their numbers."""
    for key in keys:
        if batch.get(key) is not None and len(batch[key]) == count:
            names = [str(_item(value)) for value in batch[key]]
            if len(set(names)) == count:
                return names
    return [str(n) for n in range(count)]


def _item(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _row(values: Any) -> Any:
    """One row, still in its own dtype."""
    return values if hasattr(values, "__len__") else [values]


def _numbers(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values.detach().cpu().tolist() if hasattr(values, "detach") else values)


def _lacks(where: str, expected: str, found: str) -> ScoreError:
    return ScoreError(Code.SCORES_IMPORT, "the batch cannot be read as score records", where=where, expected=expected, found=found)


def _some(values: Iterable[Any]) -> str:
    shown = [str(_item(value)) for value in values]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


IMPORTERS: dict[str, Callable[..., list[ScoreRecord]]] = {
    "verl": import_verl,
    "slime": import_slime,
    "trl": import_trl,
    "areal": import_areal,
}
"""Whole batches by the name of who makes them."""
