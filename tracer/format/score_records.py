"""Everything a score file holds, written once: score format 1.

A score is a log probability, in nats, of a token that is already there, given the tokens before it. One saved batch of
tokens is scored several times; each pass over it has a name:

| name | the pass |
|---|---|
| ``A`` | the rollout engine while it generated: the first response token from prefill, later ones from decode |
| ``B0``, ``B1`` | the rollout engine again, twice, with the saved tokens as a prompt; its cache is emptied before each pass |
| ``C0``, ``C1`` | the frozen trainer, twice, with the same tokens, before the optimizer steps |

A file is a safetensors file. Its metadata key ``tracer.scores`` holds a ``ScoresHeader`` as JSON, which lists the records in
the order of the columns. ``T`` all tokens, ``P`` prompt tokens, ``R`` response tokens (``T = P + R`` in every record), ``L``
rows of full logits, ``V`` columns of the vocabulary; every column is the concatenation over the records that have it.

| tensor | dtype, shape | meaning |
|---|---|---|
| ``ids`` | int64 (T,) | token ids: the prompt, then the response |
| ``positions`` | int32 (T,) | position ids as the models were given them |
| ``mask`` | uint8 (R,) | 1 where the response token counts (loss mask), else 0 |
| ``A``, ``B0``, ``B1``, ``C0``, ``C1`` | float16, bfloat16, float32, float64 (R,) | in the dtype they came in; may be absent |
| ``A.argmax`` and so on | int64 (R,) | the most likely token at the same place, where it was kept |
| ``logits.rows`` | int32 (L,) | index in the response of the token that a row of logits predicts |
| ``logits`` | float32 (L, V) | full raw logits, for the refits |

Entry ``r`` of a score belongs to response token ``r``: the token ``ids[P + r]``, predicted by the logits at ``P + r - 1``.
The shift by one is done once, by whoever makes the record; nobody shifts again.
What is masked keeps its place and may be any number.

History
1   first format
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.errors import Code, ScoreError
from tracer.format.schema import Record

__all__ = [
    "SCORES_METADATA_KEY",
    "SCORES_VERSION",
    "SCORE_DTYPES",
    "Logits",
    "LogitsHeader",
    "PolicySegment",
    "RecordHeader",
    "Score",
    "ScoreDefinition",
    "ScoreInfo",
    "ScoreKind",
    "ScoreName",
    "ScoreRecord",
    "ScoresHeader",
    "make_score",
]

SCORES_VERSION = 1
SCORES_METADATA_KEY = "tracer.scores"
SCORE_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
"""torch's name without the prefix -> safetensors dtype."""
MOST_NATS = {"float64": 1e-6, "float32": 1e-4, "float16": 2**-4, "bfloat16": 2**-4}
"""A log probability may be this much above 0 by rounding in its dtype."""

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_Count = Annotated[int, msgspec.Meta(ge=0)]


class ScoreName(str, Enum):
    """The passes, in the order they are made."""

    A = "A"
    B0 = "B0"
    B1 = "B1"
    C0 = "C0"
    C1 = "C1"

    @property
    def side(self) -> str:
        """A, B or C."""
        return self.value[0]


class ScoreKind(str, Enum):
    """What was done to the logits before the log softmax."""

    RAW = "raw"
    """Nothing: temperature 1, no filter, no penalty."""
    TEMPERATURE = "temperature"
    """Divided by a temperature, nothing else."""
    PROCESSED = "processed"
    """Penalties, top-k, top-p or a bias as well; ``settings`` has them."""
    UNKNOWN = "unknown"


class ScoreDefinition(Record, frozen=True, kw_only=True):
    """What the numbers are log probabilities of."""

    kind: ScoreKind = ScoreKind.UNKNOWN
    temperature: float = 1.0
    settings: dict[str, float | int | str | bool] = {}  # noqa: RUF012 - msgspec copies it
    """Of a processed score: top_k, top_p, min_p, repetition_penalty and so on."""

    def text(self) -> str:
        """``raw``, ``temperature 0.7``, ``processed (top_k=20)``."""
        if self.kind is ScoreKind.TEMPERATURE:
            return f"temperature {self.temperature:g}"
        settings = {**({"temperature": self.temperature} if self.temperature != 1 else {}), **self.settings}
        more = ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))
        return f"{self.kind.value} ({more})" if more else self.kind.value

    def meaning(self) -> tuple[object, ...] | None:
        """Equal for definitions that mean the same; None where it is unknown."""
        if self.kind is ScoreKind.UNKNOWN:
            return None
        if self.kind is not ScoreKind.PROCESSED and self.temperature == 1:
            return (ScoreKind.RAW,)
        return (self.kind, self.temperature, *sorted(self.settings.items()))


class PolicySegment(Record, frozen=True, kw_only=True):
    """From this response token on, the scores come from this version of the weights."""

    start: _Count
    version: str


class ScoreInfo(Record, frozen=True, kw_only=True):
    """Where one score of one request comes from. What nobody said is empty, which means unknown."""

    definition: ScoreDefinition = ScoreDefinition()
    policies: tuple[PolicySegment, ...] = ()
    """By ascending start, the first at 0; empty where the version is unknown."""
    worker: str = ""
    """The replica or rank that computed it."""
    adapter: str = ""
    model: str = ""
    """A digest of the weights that computed it; equal digests, equal weights."""
    source: str = ""
    """For people: engine, version, dtype, how it was asked."""


class LogitsHeader(Record, frozen=True, kw_only=True):
    """The full logits of a record."""

    of: ScoreName
    """The pass whose logits they are."""
    rows: _Count


class RecordHeader(Record, frozen=True, kw_only=True):
    """One request of a file. Its part of every column follows that of the record before."""

    request: str
    group: str = ""
    """Requests of one prompt."""
    tokens: _Count
    """Length of prompt and response."""
    prompt_length: _Count
    scores: dict[ScoreName, _Count] = {}  # noqa: RUF012 - msgspec copies it
    """Score -> its entry in ``ScoresHeader.infos``."""
    argmax: tuple[ScoreName, ...] = ()
    """Scores whose most likely tokens were kept."""
    logits: LogitsHeader | None = None


class ScoresHeader(Record, frozen=True, kw_only=True):
    """What a score file says about itself, in its safetensors metadata."""

    format: int
    records: tuple[RecordHeader, ...]
    infos: tuple[ScoreInfo, ...] = ()
    """Every distinct ``ScoreInfo`` of the file once."""
    columns: _Count = 0
    """Vocabulary columns of the full logits, 0 where there are none."""


_UNKNOWN = ScoreInfo()


@dataclass(frozen=True, eq=False, slots=True)
class Score:
    """One pass over one request. ``value_R``: float64, exactly the numbers that were handed over; ``dtype``: the dtype
    they were handed over in. ``argmax_R``: int64, the most likely token at each place, None where it was not kept."""

    value_R: F64
    dtype: str
    info: ScoreInfo = _UNKNOWN
    argmax_R: I64 | None = None


@dataclass(frozen=True, eq=False)
class Logits:
    """Full raw logits of some response tokens. ``row_L``: int64 indices in the response; ``value_LV``: float32."""

    of: ScoreName
    row_L: I64
    value_LV: F32


@dataclass(frozen=True, eq=False)
class ScoreRecord:
    """One request: its tokens, which of them count, and any of its scores.

    ``ids``: int64 (T,), prompt and response. ``mask``: bool (R,), by default all of the response. ``positions``: int64
    (T,), by default 0, 1, 2 and so on. ``scores``: by name; plain numbers (list, numpy, torch on any device) become a
    ``Score`` with ``info``. Arrays are kept, not copied, where they have the right dtype already.

    Raises ScoreError (scores-invalid) where lengths, names or dtypes do not fit.
    """

    request: str
    ids: I64
    prompt_length: int
    scores: Mapping[ScoreName, Score] = field(default_factory=dict)
    mask: Mask = None  # type: ignore[assignment]  # filled in
    positions: I64 = None  # type: ignore[assignment]  # filled in
    group: str = ""
    logits: Logits | None = None
    info: ScoreInfo = field(default=_UNKNOWN, repr=False)
    """Of scores that are given as plain numbers."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "ids", _integers(self.ids, self.request, "ids"))
        response = len(self.ids) - self.prompt_length
        if self.prompt_length < 1 or response < 0:
            raise _unfit(
                self.request, "prompt_length", f"1 to {len(self.ids)}: the first token of a sequence has no score", self.prompt_length
            )
        scores = {}
        for name, given in self.scores.items():
            if name not in ScoreName.__members__:
                raise _unfit(self.request, "scores", ", ".join(ScoreName.__members__), name)
            score = given if isinstance(given, Score) else make_score(given, self.info)
            lengths = {name: score.value_R.shape} | ({} if score.argmax_R is None else {f"{name}.argmax": score.argmax_R.shape})
            for what, shape in lengths.items():
                if shape != (response,):
                    raise _unfit(self.request, str(what), f"({response},): one per response token", shape)
            starts = [segment.start for segment in score.info.policies]
            if starts and (starts[0] != 0 or starts != sorted(set(starts))):
                raise _unfit(self.request, f"policies of {name}", "ascending starts from 0 on", starts)
            scores[ScoreName(name)] = score
        set_field(self, "scores", scores)
        mask = np.ones(response, np.bool_) if self.mask is None else _flags(self.mask)
        positions = np.arange(len(self.ids)) if self.positions is None else _integers(self.positions, self.request, "positions")
        for what, shape, length in (("mask", mask.shape, response), ("positions", positions.shape, len(self.ids))):
            if shape != (length,):
                raise _unfit(self.request, what, f"({length},)", shape)
        set_field(self, "mask", mask)
        set_field(self, "positions", positions)
        logits = self.logits
        if logits is not None and (
            logits.value_LV.ndim != 2
            or logits.row_L.shape != logits.value_LV.shape[:1]
            or not np.array_equal(logits.row_L, np.unique(logits.row_L))
            or (len(logits.row_L) and not 0 <= logits.row_L[0] <= logits.row_L[-1] < response)
        ):
            raise _unfit(
                self.request, "logits", f"one row each for ascending tokens of the response, below {response}", logits.value_LV.shape
            )

    @classmethod
    def of_checked(cls, **fields: Any) -> ScoreRecord:
        """A record of fields that were checked as a whole already; all of them must be given, in their final form."""
        record = object.__new__(cls)
        record.__dict__.update(fields)
        return record

    @property
    def response(self) -> I64:
        """Ids of the response, int64 (R,)."""
        return self.ids[self.prompt_length :]

    def with_scores(self, scores: Mapping[ScoreName, Score], logits: Logits | None = None) -> ScoreRecord:
        """The same request with more scores; one of the same name is exchanged."""
        return replace(self, scores={**self.scores, **scores}, logits=self.logits if logits is None else logits)


def make_score(values: Any, info: ScoreInfo = _UNKNOWN, argmax: Any = None) -> Score:
    """A ``Score`` from a list, a numpy array or a torch tensor on any device.

    The dtype is that of the array. Plain Python numbers have none: they become float32 where that loses nothing, as with
    numbers that came out of a float32 tensor, else float64. None stands for a missing number and becomes NaN.
    Raises ScoreError (scores-invalid) for anything that is not a vector of floats.
    """
    if isinstance(values, Sequence):
        values = np.array([np.nan if value is None else value for value in values], np.float64)
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        exact = np.array_equal(narrow.astype(np.float64), values, equal_nan=True)
        value_R, dtype = values, "float32" if exact else "float64"
    else:
        value_R, dtype = _plain(values)
    if dtype not in SCORE_DTYPES or value_R.ndim != 1:
        raise ScoreError(
            Code.SCORES_INVALID,
            "scores are a vector of floats",
            expected=f"one axis, dtype {', '.join(SCORE_DTYPES)}",
            found=f"{dtype} {value_R.shape}",
        )
    return Score(value_R.astype(np.float64, copy=False), dtype, info, None if argmax is None else _integers(argmax, "", "argmax"))


def _plain(values: Any) -> tuple[npt.NDArray[Any], str]:
    """As a numpy array (floats of a tensor as float64), and the name of its dtype."""
    if hasattr(values, "detach"):  # a torch tensor, without importing torch
        dtype = str(values.dtype).rpartition(".")[2]
        plain = values.detach().cpu()
        return (plain.double() if plain.is_floating_point() else plain).numpy(), dtype
    array = np.asarray(values)
    return array, array.dtype.name


def _flags(values: Any) -> Mask:
    return (values if isinstance(values, np.ndarray) else _plain(values)[0]).astype(np.bool_, copy=False)


def _integers(values: Any, request: str, what: str) -> I64:
    array = values if isinstance(values, np.ndarray) else _plain(values)[0]
    if array.size and array.dtype.kind not in "iu":
        raise _unfit(request, what, "integers", array.dtype.name)
    array = array.astype(np.int64, copy=False)
    if array.ndim != 1 or (array.size and array.min() < 0):
        raise _unfit(request, what, "one axis, nothing below 0", f"{array.shape}, least {array.min() if array.size else ''}")
    return array


def _unfit(request: str, what: str, expected: object, found: object) -> ScoreError:
    return ScoreError(
        Code.SCORES_INVALID, f"the record does not fit together: {what}", where=request, expected=str(expected), found=str(found)
    )
