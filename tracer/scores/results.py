"""What a comparison of scores says: frozen structs that are also the JSON of ``--json``.

Everything a page needs is here: numbers, distribution, error by position, worst tokens, the decision as a path. All scores
and differences are in nats.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from tracer.format.score_records import ScoreName

__all__ = [
    "SCORE_RESULT_VERSION",
    "Branch",
    "Decision",
    "DecisionStep",
    "Histogram",
    "LogClass",
    "OracleSide",
    "PairResult",
    "PairStatus",
    "PositionBin",
    "Refit",
    "RefitKind",
    "ScoreCounts",
    "ScoreResult",
    "ScoreSummary",
    "ScoreVerdict",
    "SequencePattern",
    "SiblingCheck",
    "SliceResult",
    "Subset",
    "Thresholds",
    "TokenPlace",
    "UpdateOutcome",
    "UpdateResult",
    "UpdateSide",
]

SCORE_RESULT_VERSION = 1


class ScoreVerdict(str, Enum):
    """Exit codes 0, 1 and 2, in this order."""

    AGREE = "agree"
    DIFFERENT = "different"
    COULD_NOT_TELL = "could not tell"

    @property
    def exit_code(self) -> int:
        """0 agree, 1 different, 2 could not tell."""
        return list(ScoreVerdict).index(self)


class Branch(str, Enum):
    """Which half of the system to open."""

    REPEATS = "unstable repeats"
    GENERATION = "generation side"
    SCORING = "scoring across engines"
    WEIGHTS = "weights or update"
    AGREE = "agree"
    UNDECIDED = "undecided"


class LogClass(str, Enum):
    """Class of a difference in the words of the log line."""

    DEFECT = "defect"
    NUMERICAL = "numerical"
    QUANTIZATION = "quantization"
    UNKNOWN = "unknown"


class PairStatus(str, Enum):
    """What the numbers of a pair amount to, given the noise of its sides and the pass mark."""

    IDENTICAL = "identical"
    AGREE = "agree"
    UNCLEAR = "unclear"
    """Above the pass mark, yet not twice as large."""
    APART = "apart"


class _Result(msgspec.Struct, frozen=True):
    """Base of every result struct."""


class TokenPlace(_Result, frozen=True, kw_only=True):
    """One response token and what both sides say of it."""

    request: str
    response_index: int
    """Index in the response, from 0."""
    position: int
    """Index in prompt and response, from 0."""
    token: int
    """Token id."""
    x: float
    y: float
    difference: float
    """x - y."""


class Subset(_Result, frozen=True, kw_only=True):
    """Some of the tokens, apart from the others. ``logprob_mae`` is None where there is no such token."""

    tokens: int
    logprob_mae: float | None = None
    signed_mean: float | None = None


class PositionBin(_Result, frozen=True, kw_only=True):
    """Response tokens ``start`` to ``stop - 1`` of all requests."""

    start: int
    stop: int
    tokens: int
    logprob_mae: float
    signed_mean: float
    largest: float


class Histogram(_Result, frozen=True, kw_only=True):
    """Absolute differences. ``counts[k]`` lie in ``[edges[k], edges[k + 1])``; the last bin has no upper end."""

    zero: int
    """Exactly 0."""
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    above: int
    """x above y."""
    below: int


class PairResult(_Result, frozen=True, kw_only=True):
    """Two scores of the same tokens; a difference is ``x - y``. Only valid (unmasked) tokens count, except in ``masked``."""

    name: str
    """``A-B``, ``B-C``, ``A-C``; ``B0-B1`` and ``C0-C1`` are repeats."""
    x: ScoreName
    y: ScoreName
    status: PairStatus
    noise: float | None
    """Largest repeat ``logprob_mae`` of the sides involved; None where neither was scored twice. Of a repeat: None."""
    tokens: int
    signed_mean: float
    signed_mean_error: float
    """Standard error of the signed mean, were the tokens independent."""
    logprob_mae: float
    """Mean of |x - y|."""
    p95: float
    p99: float
    largest: float
    """Largest |x - y|."""
    far: int
    """Tokens further apart than the tail mark."""
    probability_mae: float
    """Mean of |exp(x) - exp(y)|. Another metric than ``logprob_mae``; the two are never exchanged."""
    probability_largest: float
    k3: float | None
    """Mean of exp(d) - 1 - d with d = y - x, the later score minus the earlier (d = lp_train - lp_rollout for A-C). None
    where exp(d) overflows float64; never clipped."""
    k3_overflow: int
    """Tokens whose exp(d) is no float64."""
    k3_overflow_float32: int
    """Tokens whose exp(d) is no float32, the dtype in which trainers compute it."""
    bitwise_differing: int | None
    """Tokens whose bits differ; None where the dtypes differ, because then bits cannot be compared."""
    first_mismatch: TokenPlace | None
    """The first token, in record order, whose bits (or, with other dtypes, values) differ."""
    first_token: Subset
    """First response tokens: they come from prefill, the others from decode."""
    later_tokens: Subset
    masked: Subset
    """Masked tokens with finite scores on both sides. They count nowhere else."""
    biased: bool
    """The differences have one sign in the mean, beyond what chance gives: noise does not do that."""
    hidden: tuple[str, ...] = ()
    """Parts that are apart although the mean over all tokens may not be: first tokens, places, a worker, a request."""
    positions: tuple[PositionBin, ...]
    histogram: Histogram
    worst: tuple[TokenPlace, ...]


class RefitKind(str, Enum):
    """Causes that a refit can name."""

    MISSING = "missing scores filled with zero"
    OFFSET = "constant offset"
    FACTOR = "constant factor"
    SHIFT = "scores moved by one token"
    LABELS = "labels shifted by one"
    CHUNKS = "chunks in another order"
    PLACES = "fixed places wrong in every request"
    OWN_LOGITS = "scores are not those of their own logits"
    TEMPERATURE = "temperature"
    KEPT_SET = "kept-set renormalisation"
    SHARD = "log-sum-exp over a shard"
    EXTRA_MASS = "extra columns in the log-sum-exp"


class Refit(_Result, frozen=True, kw_only=True):
    """One cause that was tried: fitted on half of the tokens, tested on the other half."""

    kind: RefitKind
    score: ScoreName
    """The score that it would explain."""
    reference: str
    """What it was fitted against: another score, or full logits."""
    parameter: str = ""
    """What was found: ``T = 0.70``, ``-0.100 nats from response token 1 on``."""
    before: float
    """logprob_mae on the test half as recorded."""
    after: float
    """logprob_mae on the test half with the cause undone."""
    tokens: int
    """Tokens of the test half."""
    matched: bool
    """It explains the difference down to the noise."""
    text: str


class DecisionStep(_Result, frozen=True, kw_only=True):
    """One question on the way to the branch."""

    question: str
    answer: str
    numbers: str = ""


class Decision(_Result, frozen=True, kw_only=True):
    """Which half to open, why, what that does not prove, and one next step."""

    branch: Branch
    side: str = ""
    """The score that stands alone: A, B or C; empty where none does."""
    cause: RefitKind | None = None
    klass: LogClass = msgspec.field(default=LogClass.UNKNOWN, name="class")
    evidence: tuple[str, ...] = ()
    not_proven: tuple[str, ...] = ()
    next_step: str = ""
    path: tuple[DecisionStep, ...] = ()


class SequencePattern(_Result, frozen=True, kw_only=True):
    """How one request differs in the pair that decided."""

    request: str
    group: str
    worker: str
    tokens: int
    response_length: int
    prompt_length: int
    differing: int
    """Tokens further apart than the limit of the pair."""
    first: int | None
    """Response index of the first of them."""
    longest_run: int
    logprob_mae: float
    largest: float


class SliceResult(_Result, frozen=True, kw_only=True):
    """The requests of one worker, or of one group, in the pair that decided."""

    kind: str
    """``worker`` or ``group``."""
    score: ScoreName
    """Whose worker it is; of a group: the first score of the pair."""
    name: str
    requests: int
    tokens: int
    logprob_mae: float
    elsewhere: float
    """logprob_mae of all tokens that are in no slice which is apart."""
    signed_mean: float
    largest: float
    apart: bool
    """It is beyond the limit of the pair while the tokens elsewhere are not, and at least three times as far off as they are."""


class SiblingCheck(_Result, frozen=True, kw_only=True):
    """One score: requests with the same prompt must score a shared prefix alike."""

    score: ScoreName
    pairs: int
    """Pairs of neighbouring siblings with a shared response prefix."""
    tokens: int
    """Tokens compared."""
    differing: int
    """Tokens whose bits differ."""
    logprob_mae: float
    largest: float
    worst: TokenPlace | None = None
    """``x`` is this request's, ``y`` its sibling's."""
    sibling: str = ""
    """The other request of ``worst``."""


class ScoreSummary(_Result, frozen=True, kw_only=True):
    """One score over all requests, in a few words."""

    score: ScoreName
    dtype: str
    definitions: tuple[str, ...]
    policies: tuple[str, ...]
    workers: tuple[str, ...]
    models: tuple[str, ...]
    adapters: tuple[str, ...]
    sources: tuple[str, ...]
    mean: float


class ScoreCounts(_Result, frozen=True, kw_only=True):
    """What was compared. Requests without a valid token are listed, not dropped in silence."""

    requests: int
    tokens: int
    """Valid response tokens."""
    masked: int
    """Response tokens that the mask leaves out."""
    other_policy: int = 0
    """Valid tokens left out because policy= asked for one version."""
    without_tokens: tuple[str, ...] = ()
    """Requests without a valid token (the first few)."""
    groups: int = 0


class Thresholds(_Result, frozen=True, kw_only=True):
    """What was asked for. ``pass_mark``: a logprob_mae up to it agrees. ``tail_mark``: a single token beyond it does not."""

    pass_mark: float
    tail_mark: float


class ScoreResult(_Result, frozen=True, kw_only=True):
    """Everything ``tracer scores compare`` found."""

    version: int = SCORE_RESULT_VERSION
    exit: int
    verdict: ScoreVerdict
    headline: str
    decision: Decision
    counts: ScoreCounts
    thresholds: Thresholds
    scores: tuple[ScoreSummary, ...] = ()
    repeats: tuple[PairResult, ...] = ()
    pairs: tuple[PairResult, ...] = ()
    refits: tuple[Refit, ...] = ()
    sequences: tuple[SequencePattern, ...] = ()
    """Of the pair that decided, worst first."""
    sequences_not_shown: int = 0
    slices: tuple[SliceResult, ...] = ()
    """By worker and by group, where there are several; worst first."""
    slices_not_shown: int = 0
    siblings: tuple[SiblingCheck, ...] = ()
    log_lines: tuple[str, ...] = ()


class UpdateOutcome(str, Enum):
    """What became of a weight update."""

    APPLIED = "applied"
    SKIPPED = "skipped"
    PARTIAL = "partial"
    WRONG = "other weights installed"
    NOTHING_MOVED = "nothing moved"
    COULD_NOT_TELL = "could not tell"


class UpdateSide(_Result, frozen=True, kw_only=True):
    """One side before and after: its scores of the same tokens, and its weights where fingerprints were given."""

    side: str
    moved: bool
    """Its scores changed by more than its own noise."""
    logprob_mae: float
    noise: float | None
    weights_compared: int = 0
    weights_changed: int = 0
    unchanged: tuple[str, ...] = ()
    """Of B: weights that changed in the trainer and not here (the first few)."""


class OracleSide(_Result, frozen=True, kw_only=True):
    """Fixed tokens on one side: how their scores and their most likely tokens moved."""

    side: str
    tokens: int
    argmax_changed: int | None
    """Places whose most likely token is another than before; None where it was not kept."""
    largest: float
    """Largest change of a score."""


class UpdateResult(_Result, frozen=True, kw_only=True):
    """Everything ``tracer scores update`` found."""

    version: int = SCORE_RESULT_VERSION
    exit: int
    verdict: ScoreVerdict
    headline: str
    outcome: UpdateOutcome
    sides: tuple[UpdateSide, ...]
    oracle: tuple[OracleSide, ...] = ()
    argmax_apart: tuple[int | None, int | None] = (None, None)
    """Places where B and C have another most likely token: before, after."""
    before: PairResult | None = None
    """B-C before the update."""
    after: PairResult | None = None
    """B-C after it."""
    evidence: tuple[str, ...] = ()
    not_proven: tuple[str, ...] = ()
    next_step: str = ""
