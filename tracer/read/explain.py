"""What shape a difference has: the shapes of values, of places and of settings, at the boundaries where the sides part.

Values come from dumps where both sides have them, else from what was recorded. Every shape was found on some rows and
tested on others; a boundary gets at most one shape of its values and one of its places.

Shape suffixes: R matched rows, D differing rows, K tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tracer.format.schema import Boundary
from tracer.read.compare import Comparison, Method
from tracer.read.dumped import Dumps
from tracer.read.findings import Explanation, Shape
from tracer.read.grids import grid_shape
from tracer.read.logical import LogicalTrace
from tracer.read.matched import MatchedRows, dumped_rows, recorded_rows
from tracer.read.operations import activation, exchanged_weights, weighted_sum
from tracer.read.outcomes import Judged
from tracer.read.permutations import column_permutation, row_permutation
from tracer.read.placement import document, experts_only, from_position, grows
from tracer.read.rotations import norm_order, rotation_shape
from tracer.read.settings import settings_at
from tracer.read.shapes import Found, kept_length, one_sided, some_columns, value_shape
from tracer.read.weight_diff import WeightComparison
from tracer.read.weight_shapes import weight_shapes

__all__ = ["SYSTEMATIC", "Material", "explain_boundary", "explain_weights"]

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SYSTEMATIC = frozenset(
    {
        Shape.ZERO, Shape.SIGN, Shape.CONSTANT_RATIO, Shape.CONSTANT_VECTOR, Shape.ROW_RATIO, Shape.COLUMN_RATIO, Shape.LOW_RANK,
        Shape.ONE_SIDED, Shape.LENGTH_KEPT, Shape.COLUMNS_PERMUTED, Shape.ROWS_PERMUTED, Shape.TOKEN_SHIFT, Shape.OTHER_LAYER,
        Shape.ROTATION, Shape.OPERATION,
    }
)  # fmt: skip
"""Shapes of values that rounding to nearest never has."""

_LAYER = re.compile(r"^layers\.(\d+)\.(.*)$")


@dataclass(frozen=True)
class Material:
    """What explanations are made from: both sides, their dumps, which conditions differ."""

    a: LogicalTrace
    b: LogicalTrace
    judged: Mapping[str, Judged]
    conditions: Mapping[str, Mapping[str, Any]]
    dumps: tuple[Dumps, Dumps] | None = None
    catalogue: Mapping[str, Boundary] = field(default_factory=dict)


def explain_boundary(material: Material, name: str, among_K: Bools | None = None) -> list[Explanation]:
    """Shapes of the rows above the floor at one boundary, the telling ones first. ``among_K``: only rows of these tokens of A."""
    judged = material.judged.get(name)
    if judged is None or judged.comparison.method not in (Method.DIGEST, Method.SKETCH):
        return []
    comparison, pairs = judged.comparison, judged.above
    if among_K is not None:
        pairs = pairs[among_K[comparison.token_R[pairs]]]
    if not len(pairs) or name.startswith("input."):
        return []
    found: list[tuple[Found, str]] = []
    moved = row_permutation(comparison, pairs, material.a.tokens) or _other_layer(material, comparison, pairs)
    if moved is not None:
        found.append((moved, "digests"))
    rows = None if comparison.a.info.discrete else matched_rows(material, comparison, pairs)
    if rows is not None:
        rows = replace(rows, head=_head_columns(material.a))
        shapes = list(_of_values(rows, moved is None))
        if rows.source == "dumps" and moved is None and (not shapes or shapes[0].shape in (Shape.LENGTH_KEPT, Shape.SOME_COLUMNS)):
            computed = _of_inputs(material, name, rows)
            shapes = shapes if computed is None else [computed, *(shape for shape in shapes if shape.shape is not Shape.LENGTH_KEPT)]
        found += [(shape, rows.source) for shape in shapes]
    found += [(shape, "positions") for shape in _of_places(material, judged, pairs)]
    info = material.catalogue.get(name, comparison.a.info)
    for setting in settings_at(material.a, material.b, info):
        text = setting.text()
        parameters = {"name": setting.name, "a": setting.a, "b": setting.b, "number": setting.number}
        found.append((Found(Shape.SETTING, text, 0, 0, None, parameters), "conditions"))
    comparison.release()
    return [_explanation(name, shape, source) for shape, source in found]


def matched_rows(material: Material, comparison: Comparison, pairs: I64) -> MatchedRows | None:
    """The values of some differing pairs: as dumped where both sides did, else as recorded."""
    position_K = material.a.tokens.position_K
    if material.dumps is not None:
        a, b = (dumps.boundaries.get(comparison.name) for dumps in material.dumps)
        if a is not None and b is not None:
            rows = dumped_rows(comparison, pairs, a, b, position_K)
            if rows is not None and (len(rows) > 1 or len(pairs) == 1):
                return rows
    return recorded_rows(comparison, pairs, position_K)


def _head_columns(trace: LogicalTrace) -> int:
    """Columns of one attention head as the model's config has them, 0 where it does not say."""
    config = trace.manifest.conditions.get("model")
    config = config.get("config") if isinstance(config, dict) else None
    if not isinstance(config, dict):
        return 0
    size, heads, hidden = (config.get(name) for name in ("head_dim", "num_attention_heads", "hidden_size"))
    if isinstance(size, int) and size > 0:
        return size
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else 0


def _of_values(rows: MatchedRows, whole: bool) -> Iterable[Found]:
    """At most one shape of the values, and the columns it is confined to. ``whole``: nothing else explains the rows yet."""
    if whole:
        shape = column_permutation(rows) or value_shape(rows) or grid_shape(rows) or one_sided(rows) or kept_length(rows)
        if shape is not None:
            yield shape
            if shape.shape is Shape.COLUMNS_PERMUTED:
                return
    confined = some_columns(rows)
    if confined is not None:
        yield confined


def _of_inputs(material: Material, name: str, rows: MatchedRows) -> Found | None:
    """What each side computes from dumped inputs that are equal on both, row by row."""
    held: dict[str, tuple[MatchedRows, F64]] = {}
    for source in () if material.dumps is None else material.dumps[0].boundaries:
        equal = None if source == name else _equal_input(material, source, rows)
        if equal is not None:
            held[source] = equal
    wide = {source: values for source, (kept, values) in held.items() if values.shape[1] == rows.a_NC.shape[1] and len(kept) == len(rows)}
    scalars = {source: values[:, 0] for source, (kept, values) in held.items() if values.shape[1] == 1 and len(kept) == len(rows)}
    for source, (kept, values) in held.items():
        if values.shape[1] == rows.a_NC.shape[1]:
            found = rotation_shape(kept, values, source) or norm_order(kept, values, source)
        else:
            found = activation(kept, values) or (exchanged_weights(kept, values) if source.endswith(".topk_weights") else None)
        if found is not None:
            return found
    return weighted_sum(rows, wide, scalars)


def _equal_input(material: Material, source: str, rows: MatchedRows) -> tuple[MatchedRows, F64] | None:
    """The rows whose tokens have a dumped row of ``source``, with it; None where any of those differs between the sides."""
    assert material.dumps is not None
    judged, dumped = material.judged.get(source), material.dumps[0].boundaries[source]
    if judged is None or source not in material.dumps[1].boundaries or dumped.expert_R is not None or rows.expert_N is not None:
        return None
    if np.isin(judged.comparison.token_R[judged.comparison.differing], rows.token_N).any() or not len(dumped):
        return None
    at_N = np.minimum(np.searchsorted(dumped.token_R, rows.token_N), len(dumped) - 1)
    there_N = (dumped.token_R[at_N] == rows.token_N) & ~dumped.altered_R[at_N]
    if there_N.sum() < 2:
        return None
    try:
        values = dumped.float32_RC[at_N[there_N]].astype(np.float64)
    except ValueError:
        return None  # packed: bytes without values of their own
    return (rows if there_N.all() else rows.take(there_N), values) if np.isfinite(values).all() else None


def _of_places(material: Material, judged: Judged, pairs: I64) -> Iterable[Found]:
    """Which tokens, documents and experts."""
    comparison = judged.comparison
    token_R = comparison.token_R
    differs_R = np.zeros(len(token_R), np.bool_)
    differs_R[pairs] = True
    found = document(material.a, token_R, differs_R)
    if found is None and not differs_R.all():
        position_R = material.a.tokens.position_K[token_R] - judged.shift
        attends = material.catalogue.get(comparison.name, comparison.a.info).mixes_tokens
        found = from_position(material.a, material.b, position_R, differs_R, material.conditions, attends)
    if found is not None:
        yield found
    if comparison.values is None:
        position_D = material.a.tokens.position_K[token_R[pairs]]
        growing = grows(position_D, comparison.distances(pairs))
        if growing is not None:
            yield growing
    experts = _experts(material, comparison, differs_R)
    if experts is not None:
        yield experts


def _experts(material: Material, comparison: Comparison, differs_R: Bools) -> Found | None:
    """Only some experts: by the expert of each row, or by the ids chosen for its token in that layer."""
    expert_R = comparison.a.expert_R
    if expert_R is not None:
        own = expert_R[comparison.sides(np.arange(len(comparison)))[0]]
        return experts_only(own[:, None], differs_R, len(np.unique(own)))
    hit = _LAYER.match(comparison.name)
    chosen = material.judged.get(f"layers.{hit[1]}.moe.topk_ids") if hit and hit[2].startswith("moe.") else None
    if chosen is None or chosen.above_D.any() or comparison.a.info.discrete:
        return None
    ids = chosen.comparison.a.load_values()
    token_a = chosen.comparison.a.token_R
    if ids is None or not len(token_a):
        return None
    at = np.minimum(np.searchsorted(token_a, comparison.token_R), len(token_a) - 1)
    if not np.array_equal(token_a[at], comparison.token_R):
        return None
    return experts_only(ids[at], differs_R, len(np.unique(ids)))


def _other_layer(material: Material, comparison: Comparison, pairs: I64) -> Found | None:
    """B's rows are, bit for bit, A's rows of the same boundary in another layer; the nearest such layer."""
    hit = _LAYER.match(comparison.name)
    if hit is None or comparison.method is not Method.DIGEST or len(pairs) < 2:
        return None
    layer, leaf = int(hit[1]), hit[2]
    rows_a, rows_b = comparison.sides(pairs)
    wanted = comparison.b.digest_R2[rows_b]
    others = [name for name in material.a.boundaries if (other := _LAYER.match(name)) and other[2] == leaf and int(other[1]) != layer]
    for name in sorted(others, key=lambda name: abs(int(name.split(".")[1]) - layer)):
        boundary = material.a.boundaries[name]
        if boundary.dtype != comparison.b.dtype or not np.array_equal(boundary.token_R, comparison.a.token_R):
            continue
        same = (boundary.digest_R2[rows_a] == wanted).all(axis=1)
        if same[::2].mean() >= 0.98 and same[1::2].mean() >= 0.98:
            text = f"B's rows are A's of layer {name.split('.')[1]}, bit for bit"
            tested = len(pairs) // 2
            return Found(Shape.OTHER_LAYER, text, len(pairs) - tested, tested, 1 - float(same.mean()), {"layer": int(name.split(".")[1])})
    return None


def explain_weights(material: Material, weights: WeightComparison, first: str) -> list[Explanation]:
    """Shapes of the weights that differ, and of the first boundary that is computed with the first of them."""
    found = [
        _explanation(name, shape, shape.source or ("sketches" if shape.shape in (Shape.LOW_RANK, Shape.CONSTANT_VECTOR) else "digests"))
        for name, shape in weight_shapes(material.a, material.b, weights, first, material.dumps)
    ]
    for name, judged in material.judged.items():
        if first in material.catalogue.get(name, judged.comparison.a.info).weights and judged.above_D.any():
            return found + explain_boundary(material, name)
    return found


def _explanation(boundary: str, found: Found, source: str) -> Explanation:
    return Explanation(
        boundary=boundary,
        shape=found.shape,
        text=found.text,
        parameters={name: value.item() if isinstance(value, np.generic) else value for name, value in found.parameters.items()},
        source=source,
        rows_fitted=found.fitted,
        rows_tested=found.tested,
        misfit=None if found.misfit is None else float(found.misfit),
    )
