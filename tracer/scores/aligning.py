"""Records of one batch as one flat table, or a refusal with the reason.

Everything that would make a number meaningless is refused here, each with its own code, before anything is averaged:
other requests, ids, positions or masks; no valid token; numbers that are not finite or no log probabilities; other
policies; other definitions. Nothing is intersected, cut or filled in silently.

Shape suffixes: Q requests, N response tokens of all requests in record order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracer.errors import Code, ScoreError
from tracer.format.score_records import MOST_NATS, Logits, Score, ScoreInfo, ScoreName, ScoreRecord

__all__ = ["ScoreTable", "align_records", "place_text", "some_of"]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_SHOWN = 5


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """The response tokens of all requests, one after the other.

    ``valid_N``: counts in every metric. ``masked_N``: left out by the mask. ``request_N``: which request; ``index_N``: index
    in its response; ``position_N``: index in prompt and response; ``token_N``: token id. ``start_Q``: first token of each
    request; ``length_Q``. ``values``: score -> float64 (N,), ``dtypes``: score -> dtype as recorded. ``infos``: score ->
    its ``ScoreInfo`` per request. ``argmax``: score -> int64 (N,), where every request kept it. ``logits``: per request.
    """

    requests: tuple[str, ...]
    records: tuple[ScoreRecord, ...]
    valid_N: Mask
    masked_N: Mask
    request_N: I64
    index_N: I64
    position_N: I64
    token_N: I64
    start_Q: I64
    length_Q: I64
    values: Mapping[ScoreName, F64]
    dtypes: Mapping[ScoreName, str]
    infos: Mapping[ScoreName, Sequence[ScoreInfo]]
    argmax: Mapping[ScoreName, I64]
    logits: Sequence[Logits | None]
    other_policy: int = 0

    def __len__(self) -> int:
        return len(self.valid_N)

    def difference(self, x: ScoreName, y: ScoreName) -> F64:
        """x - y, float64 (N,); 0 where the mask leaves a token out."""
        found: F64 = self.values[x] - self.values[y]
        return found if self.valid_N.all() else np.where(self.valid_N, found, 0.0)


def align_records(records: Iterable[ScoreRecord], *, policy: str = "") -> ScoreTable:
    """One table of all records. Records of one request, from several files, are joined: each brings other scores.

    ``policy``: keep only tokens that this version of the weights sampled (by A); everything else is left out and counted.
    Raises ScoreError: scores-nothing, scores-twice, scores-requests, scores-ids, scores-masks, scores-empty-mask,
    scores-nonfinite, scores-positive, scores-policies, scores-definitions.
    """
    joined = _joined(records)
    names = tuple(joined)
    bases = tuple(found[0] for found in joined.values())
    length_Q = np.array([len(base.response) for base in bases], np.int64)
    start_Q = np.concatenate([[0], np.cumsum(length_Q)[:-1]])
    request_N = np.repeat(np.arange(len(bases)), length_Q)
    index_N = np.arange(len(request_N)) - np.repeat(start_Q, length_Q)
    mask_N = np.concatenate([base.mask for base in bases])
    scores, values, infos, dtypes = _scores(joined), {}, {}, {}
    for name, kept in scores.items():
        values[name] = np.concatenate([score.value_R for score in kept])
        infos[name] = [score.info for score in kept]
        found = sorted({score.dtype for score in kept})
        dtypes[name] = found[0] if len(found) == 1 else "mixed"
    versions = _versions(infos, length_Q)
    valid_N = mask_N & (_of_policy(policy, versions) if policy else True)
    table = ScoreTable(
        requests=names,
        records=bases,
        valid_N=valid_N,
        masked_N=~mask_N,
        request_N=request_N,
        index_N=index_N,
        position_N=index_N + np.repeat(np.array([base.prompt_length for base in bases], np.int64), length_Q),
        token_N=np.concatenate([base.response for base in bases]),
        start_Q=start_Q,
        length_Q=length_Q,
        values=values,
        dtypes=dtypes,
        infos=infos,
        argmax={
            name: np.concatenate([score.argmax_R for score in kept if score.argmax_R is not None])
            for name, kept in scores.items()
            if all(score.argmax_R is not None for score in kept)
        },
        logits=[next((record.logits for record in found if record.logits is not None), None) for found in joined.values()],
        other_policy=int(mask_N.sum() - valid_N.sum()),
    )
    if not valid_N.any():
        raise ScoreError(
            Code.SCORES_EMPTY_MASK,
            "no response token is valid, so there is nothing to compare",
            found=f"{len(mask_N)} response tokens, {int(mask_N.sum())} unmasked" + (f", none of them of policy {policy}" if policy else ""),
            remedy="save a batch with a response mask that keeps something",
        )
    _refuse_numbers(table)
    _refuse_policies(table, versions)
    _refuse_definitions(table)
    return table


def _joined(records: Iterable[ScoreRecord]) -> dict[str, list[ScoreRecord]]:
    """Request -> its records. They are the same tokens under the same mask, and each score comes once."""
    joined: dict[str, list[ScoreRecord]] = {}
    for record in records:
        joined.setdefault(record.request, []).append(record)
    if not joined:
        raise ScoreError(Code.SCORES_NOTHING, "there are no records", remedy="give records of one saved batch")
    for request, found in joined.items():
        first = found[0]
        seen: set[ScoreName] = set()
        for record in found:
            twice = seen & set(record.scores)
            if twice or (record is not first and not record.scores):
                raise ScoreError(
                    Code.SCORES_TWICE,
                    "a score of one request is given twice",
                    where=f"request {request}",
                    expected="each of A, B0, B1, C0, C1 at most once",
                    found=", ".join(sorted(twice)) or "a second record without scores",
                    remedy="name the repeat B1 or C1, or leave one of the files out",
                )
            seen |= set(record.scores)
            if record is not first:
                _same_tokens(first, record)
    return joined


def _same_tokens(first: ScoreRecord, other: ScoreRecord) -> None:
    where = f"request {first.request}, {'+'.join(first.scores)} against {'+'.join(other.scores)}"
    for what, a, b in (("ids", first.ids, other.ids), ("position ids", first.positions, other.positions)):
        if first.prompt_length != other.prompt_length or not np.array_equal(a, b):
            raise ScoreError(
                Code.SCORES_IDS,
                f"the sides scored other tokens: {what} differ",
                where=where,
                expected=f"{len(a)} of them, prompt {first.prompt_length}",
                found=f"{len(b)} of them, prompt {other.prompt_length}; first difference at {_first_difference(a, b)}",
                remedy="score the saved ids themselves, never text",
            )
    if not np.array_equal(first.mask, other.mask):
        raise ScoreError(
            Code.SCORES_MASKS,
            "the sides count other tokens: masks differ",
            where=where,
            expected=f"{int(first.mask.sum())} valid of {len(first.response)}",
            found=f"{int(other.mask.sum())}, first difference at response token {_first_difference(first.mask, other.mask)}",
            remedy="apply one loss mask to all scores, after they were taken",
        )


def _first_difference(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> int:
    least = min(len(a), len(b))
    different = np.flatnonzero(a[:least] != b[:least])
    return int(different[0]) if len(different) else least


def _scores(joined: Mapping[str, Sequence[ScoreRecord]]) -> dict[ScoreName, list[Score]]:
    """Score -> one ``Score`` per request. A score is there for all requests or for none."""
    by_request = [{name: score for record in found for name, score in record.scores.items()} for found in joined.values()]
    names = [name for name in ScoreName if any(name in found for found in by_request)]
    for name in names:
        without = [request for request, found in zip(joined, by_request, strict=True) if name not in found]
        if without:
            raise ScoreError(
                Code.SCORES_REQUESTS,
                f"score {name.value} is missing for some requests",
                expected=f"all {len(by_request)} requests",
                found=f"{len(by_request) - len(without)}; missing for {some_of(without)}",
                remedy="score the whole saved batch on every side, or leave the score out for all",
            )
    if not names:
        raise ScoreError(Code.SCORES_NOTHING, "the records hold no scores", remedy="score the saved tokens at least twice")
    return {name: [found[name] for found in by_request] for name in names}


def some_of(names: Sequence[str]) -> str:
    """The first few of them."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _refuse_numbers(table: ScoreTable) -> None:
    """Valid tokens have finite log probabilities; masked ones may hold anything."""
    for name, value_N in table.values.items():
        wrong = np.flatnonzero(table.valid_N & ~np.isfinite(value_N))
        if len(wrong):
            raise ScoreError(
                Code.SCORES_NONFINITE,
                f"score {name.value} is not finite at {len(wrong)} of {int(table.valid_N.sum())} valid tokens",
                where=place_text(table, int(wrong[0])),
                expected="a log probability",
                found=str(value_N[wrong[0]]),
                remedy="-inf: a filter removed the token that was scored; NaN: missing, or computed from non-finite logits",
            )
        limit = MOST_NATS.get(table.dtypes[name], 2**-4)
        wrong = np.flatnonzero(table.valid_N & (value_N > limit))
        if len(wrong):
            raise ScoreError(
                Code.SCORES_POSITIVE,
                f"score {name.value} is above 0 at {len(wrong)} valid tokens, so it is no log probability",
                where=place_text(table, int(wrong[0])),
                expected="0 or less",
                found=f"{value_N[wrong[0]]:.6g}",
                remedy="a probability, a logit or a negative log-likelihood was stored, or the normaliser lacks columns",
            )


def place_text(table: ScoreTable, n: int) -> str:
    """``request r, response token 3 (token 11)``."""
    return f"request {table.requests[table.request_N[n]]}, response token {table.index_N[n]} (token {table.position_N[n]} of the sequence)"


@dataclass(frozen=True, eq=False)
class _Versions:
    """Version of the weights per token: ``code_N`` int64 (N,) points into ``texts``; 0 is the empty text, unknown."""

    texts: list[str]
    code_N: I64


def _versions(scores: Mapping[ScoreName, Sequence[ScoreInfo]], length_Q: I64) -> dict[ScoreName, _Versions]:
    codes: dict[str, int] = {"": 0}
    texts = [""]

    def code(version: str) -> int:
        if version not in codes:
            codes[version] = len(texts)
            texts.append(version)
        return codes[version]

    found = {}
    for name, infos in scores.items():
        if all(len(info.policies) <= 1 for info in infos):
            code_Q = [code(info.policies[0].version) if info.policies else 0 for info in infos]
            found[name] = _Versions(texts, np.repeat(np.array(code_Q, np.int64), length_Q))
            continue
        code_S: list[int] = []
        length_S: list[int] = []
        for info, length in zip(infos, length_Q.tolist(), strict=True):
            segments = [(segment.start, segment.version) for segment in info.policies if segment.start < length] or [(0, "")]
            stops = [start for start, _ in segments[1:]] + [length]
            code_S += [code(version) for _, version in segments]
            length_S += [stop - start for (start, _), stop in zip(segments, stops, strict=True)]
        found[name] = _Versions(texts, np.repeat(np.array(code_S, np.int64), length_S))
    return found


def _of_policy(policy: str, versions: Mapping[ScoreName, _Versions]) -> Mask:
    sampled = versions.get(ScoreName.A)
    if sampled is None:
        raise ScoreError(
            Code.SCORES_POLICIES,
            "policy= chooses by the version that sampled a token, and A is not there",
            expected="records with score A and its policy versions",
            found=", ".join(name.value for name in versions),
        )
    wanted = sampled.texts.index(policy) if policy in sampled.texts else -1
    return np.asarray(sampled.code_N == wanted, np.bool_)


def _refuse_policies(table: ScoreTable, versions: Mapping[ScoreName, _Versions]) -> None:
    """Where two scores both name their version, it is the same at every valid token."""
    names = list(versions)
    for at, x in enumerate(names):
        for y in names[at + 1 :]:
            x_N, y_N = versions[x].code_N, versions[y].code_N
            wrong = np.flatnonzero(table.valid_N & (x_N != y_N) & (x_N > 0) & (y_N > 0))
            if len(wrong):
                texts, n = versions[x].texts, wrong[0]
                raise ScoreError(
                    Code.SCORES_POLICIES,
                    f"{x.value} and {y.value} come from other versions of the weights at {len(wrong)} of {int(table.valid_N.sum())} tokens",
                    where=place_text(table, int(n)),
                    expected=f"policy {texts[x_N[n]]}, as in {x.value}",
                    found=f"policy {texts[y_N[n]]} in {y.value}",
                    remedy="score with the weights that sampled, or give policy= to keep the tokens of one version",
                )


def _refuse_definitions(table: ScoreTable) -> None:
    """Where two scores both say what they are, they are the same thing."""
    meanings: dict[int, tuple[object, ...] | None] = {}

    def meaning(info: ScoreInfo) -> tuple[object, ...] | None:
        """Records share few infos, so each is looked at once."""
        if id(info) not in meanings:
            meanings[id(info)] = info.definition.meaning()
        return meanings[id(info)]

    seen: set[tuple[int, ...]] = set()
    for q, found in enumerate(zip(*table.infos.values(), strict=True)):
        known = tuple(map(id, found))
        if known in seen:
            continue
        seen.add(known)
        if len({text for info in found if (text := meaning(info))}) > 1:
            raise ScoreError(
                Code.SCORES_DEFINITIONS,
                "the scores are log probabilities of different things",
                where=f"request {table.requests[q]}",
                expected="one definition for all scores; raw is the one to have",
                found=", ".join(
                    f"{name.value} {info.definition.text()}" for name, info in zip(table.infos, found, strict=True) if meaning(info)
                ),
                remedy="collect raw scores on every side; one divided by a temperature cannot be turned back",
            )
