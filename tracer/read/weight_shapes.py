"""What became of weights that differ: zeroed, exchanged, tied or not, rows permuted, or moved by a simple rule.

Digests of whole weights tell what is all zero and what is another weight's bytes, for every digest is linear and keyed
by place. Rows need ``weights="rows"``, their values a dump of the first weight that differs (a plan, or ``against=``).

Shape suffixes: R rows of one weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tracer.format.dtypes import decode_to_float32
from tracer.format.fingerprint import Fingerprints
from tracer.format.fingerprint_plan import GROUP, sketch_buckets, sketch_signs
from tracer.format.schema import Weight
from tracer.read.dump_table import weight_lines
from tracer.read.dumped import Dumps
from tracer.read.findings import Shape
from tracer.read.grids import grid_shape, round_to
from tracer.read.logical import LogicalTrace
from tracer.read.matched import MOST_VALUES, MatchedRows, spread
from tracer.read.permutations import column_permutation
from tracer.read.shapes import Found, one_sided, value_shape
from tracer.read.weight_diff import WeightComparison
from tracer.read.wording import count

__all__ = ["weight_shapes"]

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_ZERO = ("0" * 16, "0" * 16)
_EXPERT = re.compile(r"^(.*\.experts\.)(\d+)(\..*)$")
_TIED = ("embedding.weight", "lm_head.weight")
_MOST = 8
"""Weights that are looked at row by row."""


def weight_shapes(
    a: LogicalTrace, b: LogicalTrace, weights: WeightComparison, first: str, dumps: tuple[Dumps, Dumps] | None = None
) -> list[tuple[str, Found]]:
    """(weight, shape) for the weights that differ. ``first``: the one the report is about. ``dumps``: of both sides, whose
    values are looked at where no digest tells."""
    names = [weight.name for weight in weights.differing]
    found: list[tuple[str, Found]] = []
    found += _untied(a, b, names)
    found += _experts(a.weights, b.weights, names)
    told = {name for name, _ in found}
    for name in [first, *(name for name in names if name != first)][:_MOST]:
        if name in told or name not in names:
            continue
        shape = _zeroed(a.weights[name], b.weights[name]) or _elsewhere(a, b, name) or _by_rows(a, b, name, dumps)
        if shape is not None:
            found.append((name, shape))
    return found


def _zeroed(x: Weight, y: Weight) -> Found | None:
    for side, own, other in (("B", y, x), ("A", x, y)):
        if own.digest == _ZERO and other.digest != _ZERO:
            return Found(Shape.ZERO, f"{side} is all zero", 0, own.rows, 0.0, {"side": side.lower()})
    return None


def _untied(a: LogicalTrace, b: LogicalTrace, names: Sequence[str]) -> Iterable[tuple[str, Found]]:
    """An output head that is the embedding on one side only."""
    embedding, head = _TIED
    if not {embedding, head} & set(names):
        return
    tied = {}
    for side, trace in (("A", a), ("B", b)):
        held = [trace.weights.get(name) for name in _TIED]
        if any(weight is None or weight.unknown for weight in held):
            return
        tied[side] = held[0] is not None and held[1] is not None and held[0].digest == held[1].digest
    if tied["A"] == tied["B"]:
        return
    loose = "A" if tied["B"] else "B"
    trace = a if loose == "A" else b
    declared = " although its config ties them" if _config(trace).get("tie_word_embeddings") is True else ""
    text = f"the head of {loose} is not its embedding{declared}; that of the other side is"
    yield head if head in names else embedding, Found(Shape.WEIGHTS, text, 0, 1, 0.0, {"untied": loose.lower()})


def _config(trace: LogicalTrace) -> Mapping[str, object]:
    model = trace.manifest.conditions.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    return config if isinstance(config, dict) else {}


def _experts(a: Mapping[str, Weight], b: Mapping[str, Weight], names: Sequence[str]) -> Iterable[tuple[str, Found]]:
    """Experts that carry another number on the other side: one permutation for every weight of a layer's experts."""
    layers: dict[str, dict[int, dict[str, tuple[Weight, Weight]]]] = {}
    differ = set(names)
    for name in a.keys() & b.keys():
        hit = _EXPERT.match(name)
        if hit and not a[name].unknown and not b[name].unknown:
            layers.setdefault(hit[1], {}).setdefault(int(hit[2]), {})[hit[3]] = (a[name], b[name])
    for prefix, experts in layers.items():
        if not any(name.startswith(prefix) for name in differ):
            continue
        of_a = {tuple(sorted((leaf, pair[0].digest) for leaf, pair in own.items())): expert for expert, own in experts.items()}
        of_b = {expert: tuple(sorted((leaf, pair[1].digest) for leaf, pair in own.items())) for expert, own in experts.items()}
        order = [of_a.get(of_b[expert], -1) for expert in sorted(of_b)]
        if min(order) < 0 or sorted(order) != sorted(of_a.values()) or order == sorted(order):
            continue
        first = min((name for name in differ if name.startswith(prefix)), key=names.index)
        text = f"experts permuted: B holds A's experts {order if len(order) <= 64 else 'in another order'}, byte for byte"
        yield first, Found(Shape.COLUMNS_PERMUTED, text, 0, len(order), 0.0, {"order": order[:256]})


def _elsewhere(a: LogicalTrace, b: LogicalTrace, name: str) -> Found | None:
    """The bytes of another weight of the other side."""
    weight = b.weights[name]
    kind = weight.digest, weight.rows, weight.columns, weight.dtype
    same = [other for other, held in a.weights.items() if other != name and (held.digest, held.rows, held.columns, held.dtype) == kind]
    if not same or weight.unknown or weight.digest == _ZERO:
        return None
    return Found(Shape.WEIGHTS, f"B holds the bytes of A's {same[0]}", 0, weight.rows, 0.0, {"source": same[0]})


# ---------------------------------------------------------------- row by row


def _by_rows(a: LogicalTrace, b: LogicalTrace, name: str, dumps: tuple[Dumps, Dumps] | None) -> Found | None:
    rows_a, rows_b = a.load_weight_rows(name), b.load_weight_rows(name)
    x, y = a.weights[name], b.weights[name]
    recorded = rows_a is not None and rows_b is not None and (x.rows, x.columns) == (y.rows, y.columns)
    if recorded and rows_b is not None and x.dtype == y.dtype:
        found = _permuted_rows(a, b, name, rows_b)
        if found is not None:
            return found
    held = None if dumps is None else _dumped(name, dumps)
    if held is not None:
        found = column_permutation(held) or value_shape(held) or grid_shape(held) or one_sided(held)
        if found is not None:
            more = f" ({count(held.total, 'row')} of {x.rows} differ)" if found.shape is Shape.LOW_RANK and recorded else ""
            return replace(found, text=found.text + more, source="dumps")
    return _moved(x, y, rows_a, rows_b) if recorded and rows_a is not None and rows_b is not None else None


def _dumped(name: str, dumps: tuple[Dumps, Dumps]) -> MatchedRows | None:
    """Dumped rows of a weight that differ, as numbers; None where there are none of both sides."""
    a, b = (held.weights.get(name) for held in dumps)
    if a is None or b is None or a.width != b.width:
        return None
    lines_a, lines_b = weight_lines(a, b)
    same = a.dtype == b.dtype
    apart = (a.raw_RB[lines_a] != b.raw_RB[lines_b]).any(axis=1) if same else np.ones(len(lines_a), np.bool_)
    number_N = a.row_R[lines_a[apart]]
    chosen = spread(np.flatnonzero(apart), max(MOST_VALUES // max(a.width, 1), 8))
    try:
        values = [
            decode_to_float32(side.raw_RB[lines[chosen]], side.dtype).reshape(len(chosen), side.width).astype(np.float64)
            for side, lines in ((a, lines_a), (b, lines_b))
        ]
    except ValueError:
        return None  # packed: bytes without values of their own
    good = np.isfinite(values[0]).all(axis=1) & np.isfinite(values[1]).all(axis=1)
    if not good.any():
        return None
    a_NC, b_NC = (side[good] for side in values)
    row_N = a.row_R[lines_a[chosen]][good]
    return MatchedRows(
        name=name, dtype_a=a.dtype, dtype_b=b.dtype, a_NC=a_NC, b_NC=b_NC, squares_a_N=(a_NC**2).sum(axis=1),
        squares_b_N=(b_NC**2).sum(axis=1), exact=True, source="dumps", token_N=row_N, position_N=row_N, total=len(number_N),
    )  # fmt: skip


def _permuted_rows(a: LogicalTrace, b: LogicalTrace, name: str, rows_b: Fingerprints) -> Found | None:
    """Every row of B's weight is a row of A's, of this weight or of its neighbours (q, k and v packed in another order)."""
    stem = name.rpartition(".")[0].rpartition(".")[0]
    family = [name, *(other for other in a.weights if other != name and other.rpartition(".")[0].rpartition(".")[0] == stem)]
    place: dict[bytes, tuple[str, int]] = {}
    for other in family:
        held = a.load_weight_rows(other)
        if held is None or a.weights[other].columns != a.weights[name].columns or a.weights[other].dtype != a.weights[name].dtype:
            continue
        for row, digest in enumerate(held.digest_N2):
            place.setdefault(digest.tobytes(), (other, row))
    sources = [place.get(digest.tobytes(), ("", -1)) for digest in rows_b.digest_N2]
    if any(row < 0 for _, row in sources) or all(source == (name, row) for row, source in enumerate(sources)):
        return None
    runs: list[tuple[int, int, str, int]] = []  # B's start, length, A's weight, A's start
    for row, (other, source) in enumerate(sources):
        if runs and runs[-1][2] == other and runs[-1][3] + runs[-1][1] == source:
            start, length, *rest = runs[-1]
            runs[-1] = (start, length + 1, str(rest[0]), int(str(rest[1])))
        else:
            runs.append((row, 1, other, source))
    shown = ", ".join(f"{start}..{start + size - 1} <- {other} {at}..{at + size - 1}" for start, size, other, at in runs[:4])
    where = "another order of the same rows" if {other for other, _ in sources} == {name} else "rows of its neighbours"
    text = f"rows permuted: B holds {where}, byte for byte ({shown}{', ...' if len(runs) > 4 else ''})"
    return Found(Shape.ROWS_PERMUTED, text, 0, len(sources), 0.0, {"runs": len(runs)})


def _moved(x: Weight, y: Weight, rows_a: Fingerprints, rows_b: Fingerprints) -> Found | None:
    """A simple rule between the rows: a ratio, a constant, few directions, rounding to another dtype."""
    if rows_a.sketch_N16 is None or rows_b.sketch_N16 is None or rows_a.sum_squares_N is None or rows_b.sum_squares_N is None:
        return None
    if not np.isfinite(rows_a.sketch_N16).all() or not np.isfinite(rows_b.sketch_N16).all():
        return None
    apart = np.flatnonzero((rows_a.digest_N2 != rows_b.digest_N2).any(axis=1))
    columns = np.arange(x.columns)
    exact = x.columns <= GROUP
    a_NC, b_NC = (rows.sketch_N16.astype(np.float64) for rows in (rows_a, rows_b) if rows.sketch_N16 is not None)
    if exact:
        a_NC, b_NC = (values[:, sketch_buckets(columns)] * sketch_signs(columns) for values in (a_NC, b_NC))
    matched = MatchedRows(
        name=x.name, dtype_a=x.dtype, dtype_b=y.dtype, a_NC=a_NC[apart], b_NC=b_NC[apart],
        squares_a_N=rows_a.sum_squares_N[apart], squares_b_N=rows_b.sum_squares_N[apart], exact=exact,
        source="recorded values" if exact else "sketches", token_N=apart, position_N=apart, total=len(apart),
    )  # fmt: skip
    if not len(apart):
        return None
    if exact:
        for side, image, source in (("B", matched.b_NC, matched.a_NC), ("A", matched.a_NC, matched.b_NC)):
            for dtype in ("bfloat16", "float16"):
                if np.array_equal(image, round_to(source, dtype)) and source.size >= 4:
                    other = "A" if side == "B" else "B"
                    parameters = {"dtype": dtype, "side": side.lower(), "scale": "none"}
                    return Found(Shape.GRID, f"{side} is {other} rounded to {dtype}", 0, len(apart), 0.0, parameters)
    found = _constant(matched, x.columns, exact) or value_shape(replace(matched, exact=exact))
    if found is not None and found.shape is Shape.LOW_RANK:
        return Found(
            found.shape,
            f"{found.text} ({count(len(apart), 'row')} of {x.rows} differ)",
            found.fitted,
            found.tested,
            found.misfit,
            found.parameters,
        )
    return found


def _constant(rows: MatchedRows, columns: int, exact: bool) -> Found | None:
    """The same number was added to every element: the difference of the sketches is that number times the sketch of ones."""
    if exact or columns < 2 * GROUP:
        return None
    every = np.arange(columns)
    ones = np.bincount(sketch_buckets(every), sketch_signs(every).astype(np.float64), GROUP)
    moved = rows.b_NC - rows.a_NC
    value = float((moved @ ones).sum() / (len(moved) * (ones @ ones)))
    left = np.linalg.norm(moved - value * ones)
    if value == 0 or left > np.linalg.norm(moved) / 16:
        return None
    misfit = float(left / np.linalg.norm(moved))
    return Found(Shape.CONSTANT_VECTOR, f"constant offset: B is A plus {value:.4g} in every element", 0, GROUP, misfit, {"value": value})
