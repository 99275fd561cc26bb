"""What a comparison says: frozen structs that are also the JSON of ``--json``.

Every finding has a stable code; each code is a heading in ``docs/reference/findings.md``, and a test
holds the two equal. Presenters (``tracer.reports``) know these structs and nothing else.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

__all__ = [
    "RESULT_VERSION",
    "BoundaryOutcome",
    "BoundaryResult",
    "Class",
    "Classification",
    "Confidence",
    "Control",
    "ControlOutcome",
    "Counts",
    "DiffResult",
    "Distance",
    "DumpLine",
    "Explanation",
    "Finding",
    "FindingCode",
    "Kind",
    "MapColumn",
    "MapRow",
    "Place",
    "Root",
    "Shape",
    "Side",
    "SideSummary",
    "TokenMap",
    "Verdict",
]

RESULT_VERSION = 1


class Verdict(str, Enum):
    """Exit codes 0, 1 and 2, in this order."""

    SAME = "same"
    DIFFERENT = "different"
    COULD_NOT_TELL = "could not tell"

    @property
    def exit_code(self) -> int:
        """0 same, 1 different, 2 could not tell."""
        return list(Verdict).index(self)


class Side(str, Enum):
    """Which trace a statement is about."""

    A = "a"
    B = "b"
    BOTH = "both"


class Kind(str, Enum):
    """What a finding does to the verdict."""

    UNREADABLE = "unreadable"
    """The side cannot be read as a whole: 2, whatever else differs."""
    DIFFERENCE = "difference"
    """Proven: 1."""
    ABSENCE = "absence"
    """Something undeclared is missing or incomparable: 2 unless a difference is proven."""
    INFORMATION = "information"
    """Changes no verdict."""


class FindingCode(str, Enum):
    """Stable codes. Never renamed, only added."""

    # a side that cannot be read as a whole
    SHARD_MISSING = "shard-missing"
    SHARD_UNCOMMITTED = "shard-uncommitted"
    SHARD_TWICE = "shard-twice"
    RUN_MIXED = "run-mixed"
    TRACE_INCOMPLETE = "trace-incomplete"
    SEGMENT_TORN = "segment-torn"
    HOLE = "hole"
    SLICES_OVERLAP = "slices-overlap"
    IDS_CONTRADICT = "ids-contradict"
    # a side against itself
    REPLICAS_DISAGREE = "replicas-disagree"
    RECOMPUTE_DISAGREES = "recompute-disagrees"
    REPEATS_DISAGREE = "repeats-disagree"
    SIBLINGS_DISAGREE = "siblings-disagree"
    PARTIAL_COPIES_IDENTICAL = "partial-copies-identical"
    VACUOUS = "vacuous"
    # between the sides
    CONDITION_DIFFERS = "condition-differs"
    INPUT_DIFFERS = "input-differs"
    WEIGHT_DIFFERS = "weight-differs"
    WEIGHT_MISSING = "weight-missing"
    WEIGHT_UNKNOWN = "weight-unknown"
    DTYPE_DIFFERS = "dtype-differs"
    WIDTH_DIFFERS = "width-differs"
    VALUE_DIFFERS = "value-differs"
    CHOICE_DIFFERS = "choice-differs"
    BOUNDARY_MISSING = "boundary-missing"
    ROWS_UNMATCHED = "rows-unmatched"
    ROWS_NOT_COMPUTED = "rows-not-computed"
    NOTHING_COMPARED = "nothing-compared"
    ONLY_BY_SKETCH = "only-by-sketch"
    NOT_OBSERVABLE = "not-observable"
    INTERVENTION = "intervention"
    NOT_REPRODUCIBLE = "not-reproducible"
    DUMP_ALTERED = "dump-altered"
    DUMP_UNUSABLE = "dump-unusable"
    DUMP_CAPPED = "dump-capped"
    NOTE = "note"


class Class(str, Enum):
    """Classes in the order they are ruled out."""

    INPUT = "input mismatch"
    WEIGHT = "weight mismatch"
    DISCRETE = "discrete path mismatch"
    CORRECTNESS = "correctness error"
    FLOATING_POINT = "normal floating point"
    QUANTIZATION = "quantization as designed"
    UNLOCALIZED = "unlocalized"


class _Result(msgspec.Struct, frozen=True):
    """Base of every result struct."""


class Place(_Result, frozen=True, kw_only=True):
    """A cell of one or both traces."""

    boundary: str
    """Boundary, or semantic name of a weight."""
    request: str = ""
    """Request id where the user gave one, else the sequence's label; empty for weights."""
    position: int | None = None
    """Index of the token in its sequence, from 0."""
    expert: int | None = None
    side: Side = Side.BOTH
    ranks: tuple[int, ...] = ()


class Finding(_Result, frozen=True, kw_only=True):
    """One thing that was found."""

    code: FindingCode
    kind: Kind
    boundary: str = ""
    side: Side = Side.BOTH
    rows: int = 0
    text: str
    """A sentence for people, with numbers."""
    request: str = ""
    position: int | None = None
    ranks: tuple[int, ...] = ()
    remedy: str = ""


class Distance(_Result, frozen=True, kw_only=True):
    """Relative distances of the differing rows, from the sketches: ``|sketch(x) - sketch(y)| / max(|x|, |y|)``.

    ``None`` means undefined (zero norms, an overflowed bucket, no sketch); ``below_resolution`` says that
    digests differ although every sketch distance is exactly 0."""

    largest: float | None = None
    median: float | None = None
    below_resolution: bool = False


class BoundaryOutcome(str, Enum):
    """What became of one boundary in a comparison."""

    IDENTICAL = "identical"
    WITHIN_FLOOR = "within floor"
    DIFFERS = "differs"
    HEALS = "heals"
    """Differs here, and is equal again at a later boundary that depends on it."""
    BY_SKETCH = "by sketch"
    """Partial sums: only the sketch could be compared."""
    MISSING = "missing"
    INCOMPARABLE = "incomparable"
    NOT_OBSERVABLE = "not observable"
    NOT_RECORDED = "not recorded"


class Flip(_Result, frozen=True, kw_only=True):
    """One token for which the sides chose differently: the ids that each chose."""

    request: str
    position: int
    a: tuple[int, ...]
    b: tuple[int, ...]


class BoundaryResult(_Result, frozen=True, kw_only=True):
    """One boundary, both sides."""

    name: str
    outcome: BoundaryOutcome
    level: int = 0
    rows_compared: int = 0
    rows_differing: int = 0
    rows_above_floor: int = 0
    tokens: str = ""
    """Which rows differ: all, all but position 0, from position 8, n of m."""
    first_request: str = ""
    first_position: int | None = None
    distance: Distance | None = None
    floor: float | None = None
    """The stated floor of this boundary, None where none was given."""
    dtype_a: str = ""
    dtype_b: str = ""
    copies_a: int = 1
    copies_b: int = 1
    executions_a: int = 0
    executions_b: int = 0
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    root: bool = False
    flips: tuple[Flip, ...] = ()
    """Of a choice that differs, the first tokens in which it does, at most 16 of ``rows_above_floor``."""
    text: str = ""
    """What else is worth saying (healed at ..., sign of zero, NaN bits only, both integers)."""


class Root(_Result, frozen=True, kw_only=True):
    """A causal root: it differs although everything it is computed from is equal."""

    place: Place
    rows: int
    rows_compared: int
    tokens: str
    distance: Distance | None = None
    between: tuple[str, ...] = ()
    """Nearest recorded ancestors that stand for inputs not recorded; empty where all inputs were compared."""
    klass: Class = msgspec.field(default=Class.UNLOCALIZED, name="class")
    text: str = ""


class Shape(str, Enum):
    """Shapes that a difference can have. Each is fitted on some rows and tested on others."""

    ZERO = "zero"
    """One side is all zero."""
    SIGN = "sign"
    CONSTANT_RATIO = "constant ratio"
    CONSTANT_VECTOR = "constant vector"
    """The same vector was added to every row."""
    ROW_RATIO = "row ratio"
    COLUMN_RATIO = "column ratio"
    LOW_RANK = "low rank"
    ONE_SIDED = "one-sided"
    """No element of one side is larger, or its rows are shorter on average."""
    LENGTH_KEPT = "length kept"
    """Rows, or blocks of columns, keep their norms: a rotation or a permutation."""
    ROTATION = "rotation"
    """Pairs of columns are turned: other pairs, other angles, or before the norm instead of after it."""
    OPERATION = "operation"
    """Each side computes something known, and not the same, from equal inputs."""
    COLUMNS_PERMUTED = "columns permuted"
    ROWS_PERMUTED = "rows permuted"
    TOKEN_SHIFT = "token shift"
    OTHER_LAYER = "other layer"
    """The rows of another layer of the other side."""
    GRID = "grid"
    """On the grid of a coarser dtype."""
    SOME_COLUMNS = "some columns"
    FIRST_TOKEN = "first token"
    FROM_POSITION = "from position"
    DOCUMENT = "document"
    GROWS = "grows"
    """The difference grows with the position."""
    SOME_EXPERTS = "some experts"
    SETTING = "setting"
    """A scalar of the module that computes the boundary differs."""
    WEIGHTS = "weights"
    """What became of weights: tied or not, exchanged, the same rows in another order."""


class Explanation(_Result, frozen=True, kw_only=True):
    """A shape that the difference at one boundary has, found on some rows and tested on rows not used to find it."""

    boundary: str
    """Boundary, or semantic name of a weight."""
    shape: Shape
    text: str
    """A clause for people, with its parameters: ``B is A times 1.4159``."""
    parameters: dict[str, Any] = {}
    source: str = "sketches"
    """Where the rows came from: dumps, recorded values, sketches, digests, positions, conditions."""
    rows_fitted: int = 0
    rows_tested: int = 0
    misfit: float | None = None
    """Of the tested rows: what the shape leaves of the difference, 0 nothing, 1 all of it."""


class DumpLine(_Result, frozen=True, kw_only=True):
    """Raw values of one boundary on both sides, rows matched by token. Ratios of a zero norm are None: undefined."""

    boundary: str
    role: str
    """input, output, or asked for."""
    rows: int
    columns: int
    dtype_a: str
    dtype_b: str
    rows_differing: int = 0
    finite_a: float = 1.0
    """Share of values that are finite."""
    finite_b: float = 1.0
    max_abs: float | None = None
    """Largest absolute difference; this and the following over values that are finite on both sides."""
    mae: float | None = None
    relative_l2: float | None = None
    cosine: float | None = None
    ulps: float | None = None
    """Largest difference in units in the last place of the coarser of both dtypes, at the larger of both values."""
    b_above: float | None = None
    """Share of differing elements at which B is the larger."""
    first_request: str = ""
    first_position: int | None = None
    first_expert: int | None = None
    first_column: int | None = None
    log_softmax: float | None = None
    """Logits only: largest absolute difference of log-softmax, in nats."""
    total_variation: float | None = None
    """Logits only: largest total variation distance of a row's distribution."""
    argmax_differs: int | None = None
    """Logits only: rows with another argmax."""
    text: str = ""


class ControlOutcome(str, Enum):
    """What a control pair in float32 says of a difference."""

    SURVIVES = "survives"
    """About as large in float32: it is no rounding."""
    FALLS = "falls"
    """Down to the rounding of float32."""
    UNCLEAR = "unclear"


class Control(_Result, frozen=True, kw_only=True):
    """The first divergence, held against the same pair in float32."""

    boundary: str
    outcome: ControlOutcome
    distance: float | None = None
    """Largest relative distance of the same rows in float32."""
    native: float | None = None
    """The same of the two sides themselves."""
    rows: int = 0
    text: str


class Confidence(str, Enum):
    """How far the evidence of a class carries."""

    HIGH = "high"
    """Proven by a control or by an exact comparison."""
    MEDIUM = "medium"
    LOW = "low"


class Classification(_Result, frozen=True, kw_only=True):
    """The class of the earliest root, with what carries it. No evidence, no class: then ``unlocalized``."""

    klass: Class = msgspec.field(default=Class.UNLOCALIZED, name="class")
    confidence: Confidence = Confidence.LOW
    evidence: tuple[str, ...] = ()
    not_proven: tuple[str, ...] = ()
    next_step: str = ""


class Counts(_Result, frozen=True, kw_only=True):
    """Totals of a comparison. Tokens are distinct token keys; rows are (token, boundary) cells."""

    tokens_a: int = 0
    tokens_b: int = 0
    tokens_matched: int = 0
    rows_compared: int = 0
    rows_differing: int = 0
    rows_only_a: int = 0
    rows_only_b: int = 0
    boundaries_compared: int = 0
    boundaries_identical: int = 0
    boundaries_differing: int = 0
    boundaries_missing: int = 0
    weights_compared: int = 0
    weights_differing: int = 0
    weights_unknown: int = 0
    not_computed: dict[str, int] = {}
    """``a: last sampled token`` -> tokens."""
    skipped: dict[str, int] = {}
    """``a: padding`` -> rows."""


class MapColumn(_Result, frozen=True, kw_only=True):
    """A run of neighbouring tokens of side A, in its order: from (request, position) to (last_request, last_position), both included."""

    request: str
    position: int
    last_request: str
    last_position: int
    tokens: int


class MapRow(_Result, frozen=True, kw_only=True):
    """One compared boundary over the columns of the map. The four tuples are parallel: the columns in which rows differ, how many
    do, their largest relative distance (None: undefined, or no distance is kept; 0: below the sketch's resolution), and how many
    are causal roots. In every other column all compared rows are bitwise equal, but for ``unseen``: nothing compared there."""

    boundary: str
    columns: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    largest: tuple[float | None, ...] = ()
    roots: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()


class TokenMap(_Result, frozen=True, kw_only=True):
    """Where in the model, and at which tokens, two sides differ: boundaries in causal order against tokens."""

    columns: tuple[MapColumn, ...] = ()
    rows: tuple[MapRow, ...] = ()


class SideSummary(_Result, frozen=True, kw_only=True):
    """One trace, in a few words."""

    path: str
    run_id: str = ""
    host: str = ""
    root_class: str = ""
    world_size: int = 0
    mesh: str = ""
    level: int | None = None
    """None where no process has committed, so that nobody says."""
    sequences: int = 0
    tokens: int = 0


class DiffResult(_Result, frozen=True, kw_only=True):
    """Everything ``tracer diff`` found."""

    version: int = RESULT_VERSION
    exit: int
    verdict: Verdict
    headline: str
    """The one line a tired person reads."""
    first: Place | None = None
    first_bitwise: Place | None = None
    """Earliest bitwise difference where a floor or tolerance was given; else equal to ``first``."""
    classification: Classification | None = None
    next_step: str = ""
    roots: tuple[Root, ...] = ()
    explanations: tuple[Explanation, ...] = ()
    """Shapes found at the first divergence and at further roots, in causal order, the telling ones first."""
    dumps: tuple[DumpLine, ...] = ()
    """Boundaries of which both sides hold raw values, in causal order."""
    control: Control | None = None
    """Where a control pair was given."""
    findings: tuple[Finding, ...] = ()
    boundaries: tuple[BoundaryResult, ...] = ()
    counts: Counts = Counts()
    conditions: dict[str, dict[str, Any]] = {}
    """Conditions that differ: name -> {"a": ..., "b": ...}."""
    token_map: TokenMap = TokenMap()
    """Bounded: however many tokens were compared, a few hundred columns at most."""
    a: SideSummary
    b: SideSummary
