"""One side of a comparison, made by hand: full tensors in, ``LogicalTrace`` out, with real fingerprints and real keys.

``Side`` is a small decoder's worth of values: ``ids`` per sequence, and per boundary one row of numbers per token.
Shape suffixes: K tokens, C columns.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.format.fingerprint import Fingerprints, fingerprint_rows
from tracer.format.schema import Boundary, BoundaryStatus, Manifest, MapIdentity, RowScope, Weight
from tracer.format.token_keys import label_keys, token_keys
from tracer.read.findings import Finding
from tracer.read.logical import LogicalBoundary, LogicalSequence, LogicalTrace, Statistics, TokenTable

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]

IDS = {"s0": list(range(11, 18)), "s1": list(range(21, 26))}
HIDDEN = 32


def catalogue(layers: int = 4, *, moe: bool = False) -> list[Boundary]:
    """A decoder: what every boundary is computed from, in causal order."""
    found = [
        Boundary(name="input.ids", level=0),
        Boundary(name="input.positions", level=0),
        Boundary(name="input.visible_from", level=0),
        Boundary(name="embedding", level=0, inputs=("input.ids",), weights=("embedding.weight",)),
    ]
    stream = "embedding"
    for layer in range(layers):
        at = f"layers.{layer}"
        found += [
            Boundary(name=f"{at}.attn.norm", level=2, inputs=(stream,), weights=(f"{at}.attn.norm.weight",)),
            Boundary(name=f"{at}.attn.q", level=2, inputs=(f"{at}.attn.norm",), weights=(f"{at}.attn.q.weight",)),
            Boundary(name=f"{at}.attn.core", level=2, inputs=(f"{at}.attn.q", "input.positions", "input.visible_from"), mixes_tokens=True),
            Boundary(name=f"{at}.attn.out", level=1, inputs=(f"{at}.attn.core",), weights=(f"{at}.attn.out.weight",)),
            Boundary(name=f"{at}.attn.residual", level=2, inputs=(stream, f"{at}.attn.out")),
        ]
        if moe:
            scores, ids = f"{at}.moe.router_logits", f"{at}.moe.topk_ids"
            found += [
                Boundary(name=scores, level=1, inputs=(f"{at}.attn.residual",), weights=(f"{at}.moe.router.weight",)),
                Boundary(name=ids, level=1, inputs=(scores,), discrete=True, scores=scores),
                Boundary(name=f"{at}.moe.topk_weights", level=1, inputs=(scores, ids)),
                Boundary(name=f"{at}.moe.expert_out", level=2, inputs=(f"{at}.attn.residual", ids), rows=RowScope.EXPERTS),
                Boundary(name=f"{at}.moe.combine", level=1, inputs=(f"{at}.moe.expert_out", f"{at}.moe.topk_weights")),
            ]
        else:
            found.append(Boundary(name=f"{at}.mlp.out", level=1, inputs=(f"{at}.attn.residual",), weights=(f"{at}.mlp.up.weight",)))
        last = f"{at}.moe.combine" if moe else f"{at}.mlp.out"
        found.append(Boundary(name=f"{at}.residual", level=0, inputs=(f"{at}.attn.residual", last)))
        stream = f"{at}.residual"
    found += [
        Boundary(name="final_norm", level=0, inputs=(stream,)),
        Boundary(name="lm_head", level=0, inputs=("final_norm",), rows=RowScope.SAMPLED, weights=("lm_head.weight",)),
        Boundary(name="scorer.logprobs", level=1, inputs=("lm_head", "input.ids"), rows=RowScope.NEXT),
    ]
    return found


_RUNS = itertools.count()
"""Every trace made is a run of its own."""


@dataclass
class Values:
    """Rows of one boundary: ``rows_KC`` in token order (or per expert row), with what is not the default."""

    rows: Array
    dtype: str
    tokens: I64
    experts: I64 | None = None
    partial: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


class Side:
    """Everything one side computed. Change ``values`` (boundary -> ``Values``), then ``trace()``."""

    def __init__(
        self,
        ids: Mapping[str, Sequence[int]] | None = None,
        *,
        boundaries: Sequence[Boundary] | None = None,
        level: int = 2,
        moe: bool = False,
        path: str = "side",
    ) -> None:
        self.ids = {name: np.array(tokens, np.int64) for name, tokens in (IDS if ids is None else ids).items()}
        self.boundaries = list(catalogue(moe=moe) if boundaries is None else boundaries)
        self.level, self.path = level, path
        self.requests: dict[str, str] = {}
        self.labelled: set[str] = set()
        self.conditions: dict[str, Any] = {"mode": "eval"}
        self.findings: list[Finding] = []
        self.noise: dict[str, float] = {}
        self.declared: dict[str, dict[str, list[tuple[str, int]]]] = {}
        self.weights: dict[str, Weight] = {}
        self.weight_rows: dict[str, Fingerprints] = {}
        self.positions = {name: np.arange(len(tokens)) for name, tokens in self.ids.items()}
        self.host = "playback"
        self.interventions: tuple[str, ...] = ()
        self._lay_out()
        self.values: dict[str, Values] = {}
        for boundary in self.boundaries:
            if boundary.level <= level:
                self.values[boundary.name] = self._default(boundary)
        for name in dict.fromkeys(weight for boundary in self.boundaries for weight in boundary.weights):
            self.set_weight(name, 0)

    # ------------------------------------------------------------ tokens

    def _lay_out(self) -> None:
        keys: dict[int, int] = {}
        self.sequence: list[int] = []
        self.position: list[int] = []
        self.previous: list[int] = []
        self.key: list[int] = []
        labelled: list[bool] = []
        self.token_of: dict[str, I64] = {}
        for number, (name, ids) in enumerate(self.ids.items()):
            known = name not in self.labelled
            row_keys = token_keys(ids) if known else label_keys(self.requests.get(name, name), np.arange(len(ids)))
            before = -1
            own: list[int] = []
            for position, key in enumerate(row_keys.tolist()):
                if key not in keys:
                    keys[key] = len(self.key)
                    self.key.append(key)
                    self.sequence.append(number)
                    self.position.append(position)
                    self.previous.append(before)
                    labelled.append(not known)
                before = keys[key]
                own.append(before)
            self.token_of[name] = np.array(own, np.int64)
        self.labelled_K = np.array(labelled, np.bool_)

    def __len__(self) -> int:
        return len(self.key)

    def at(self, row: str) -> int:
        """Token index of ``s0:3``."""
        name, _, position = row.partition(":")
        return int(self.token_of[name][int(position)])

    def label_only(self, name: str) -> None:
        """Forget the ids of a sequence before any value is changed."""
        self.labelled.add(name)
        self._lay_out()

    # ------------------------------------------------------------ values

    def _default(self, boundary: Boundary) -> Values:
        every = np.arange(len(self))
        if boundary.name == "input.ids":
            ids = np.array([list(self.ids.values())[s][p] for s, p in zip(self.sequence, self.position, strict=True)])
            return Values(ids[:, None], "int64", every)
        if boundary.name == "input.positions":
            positions = [list(self.positions.values())[s][p] for s, p in zip(self.sequence, self.position, strict=True)]
            return Values(np.array(positions)[:, None], "int64", every)
        if boundary.name == "input.visible_from":
            return Values(np.zeros((len(self), 1), np.int64), "int64", every)
        # rows depend on the boundary and on the key alone, so equal tokens have equal values on both sides
        name = zlib.crc32(boundary.name.encode())

        def rows(columns: int) -> Array:
            return np.array([np.random.default_rng([name, key]).standard_normal(columns) for key in self.key], np.float32)

        if boundary.name.endswith("router_logits"):
            return Values(rows(8), "float32", every)
        if boundary.name.endswith("topk_ids"):
            logits = self.values[boundary.scores].rows
            return Values(np.sort(np.argsort(-logits, axis=1)[:, :2], axis=1), "int64", every)
        if boundary.name.endswith("topk_weights"):
            return Values(rows(2), "float32", every)
        if boundary.rows is RowScope.EXPERTS:
            chosen = self.values[boundary.name.replace("expert_out", "topk_ids")].rows
            return Values(np.repeat(rows(HIDDEN), 2, axis=0), "float32", np.repeat(every, 2), chosen.reshape(-1).astype(np.int64))
        if boundary.rows is RowScope.NEXT:
            spoken = np.array([k for k in every if self.position[k] > 0], np.int64)
            return Values(rows(1)[spoken], "float32", spoken)
        return Values(rows(40 if boundary.name == "lm_head" else HIDDEN), "float32", every)

    def change(self, boundary: str, *rows: str, by: float = 1e-3, column: int = 17) -> None:
        """Change one element of some rows (``s0:5``), all rows if none is named."""
        values = self.values[boundary]
        values.rows = values.rows.copy()
        tokens = [self.at(row) for row in rows] or list(values.tokens)
        lines = np.flatnonzero(np.isin(values.tokens, tokens))
        values.rows[lines, column % values.rows.shape[1]] += values.rows.dtype.type(by)

    def carry_on(self, boundary: str, *rows: str, by: float = 1e-3) -> None:
        """A fault at one place, carried on: every later boundary differs in these rows and in later rows of their sequences."""
        self.change(boundary, *rows, by=by)
        order = [info.name for info in self.boundaries]
        later = []
        for row in rows:
            name, _, position = row.partition(":")
            later += [f"{name}:{at}" for at in range(int(position), len(self.ids[name]))]
        mixed = False
        for info in self.boundaries[order.index(boundary) + 1 :]:
            if info.name not in self.values or info.discrete or info.name.startswith("input."):
                continue
            mixed = mixed or info.mixes_tokens or ".core" in info.name
            touched = later if mixed or "attn.out" in info.name else list(rows)
            mixed = mixed or "attn.out" in info.name
            if info.rows is RowScope.NEXT:
                touched = [f"{r.partition(':')[0]}:{int(r.partition(':')[2]) + 1}" for r in touched if self._has_next(r)]
            if touched:
                self.change(info.name, *touched, by=by)

    def _has_next(self, row: str) -> bool:
        name, _, position = row.partition(":")
        return int(position) + 1 < len(self.ids[name])

    def drop(self, boundary: str, *, status: BoundaryStatus = BoundaryStatus.VACUOUS, reason: str = "") -> None:
        """A boundary that was not recorded."""
        del self.values[boundary]
        self.boundaries = [
            msgspec.structs.replace(info, status=status, reason=reason) if info.name == boundary else info for info in self.boundaries
        ]

    def drop_rows(self, *rows: str, boundary: str = "") -> None:
        """Rows that were never recorded, of one boundary or of all."""
        gone = [self.at(row) for row in rows]
        for name, values in self.values.items():
            if boundary in ("", name):
                keep = ~np.isin(values.tokens, gone)
                values.rows, values.tokens = values.rows[keep], values.tokens[keep]
                values.experts = None if values.experts is None else values.experts[keep]

    def set_weight(self, name: str, seed: int, *, rows: int = 4, dtype: str = "bfloat16", buffer: bool = False, unknown: str = "") -> None:
        """A weight whose bytes follow from its name and ``seed``."""
        digest = ("", "") if unknown else (f"{zlib.crc32(name.encode()):08x}{seed:08x}", f"{seed:016x}")
        self.weights[name] = Weight(
            name=name, parameter=name, dtype=dtype, rows=rows, columns=HIDDEN, digest=digest, buffer=buffer, unknown=unknown
        )

    # ------------------------------------------------------------ the trace

    def trace(self) -> LogicalTrace:
        """The side as a reader sees it."""
        seen = np.zeros(len(self), np.bool_)
        for values in self.values.values():
            seen[values.tokens] = True
        keep = np.flatnonzero(seen)
        index = np.full(len(self) + 1, -1, np.int64)
        index[keep] = np.arange(len(keep))
        boundaries = {info.name: self._boundary(info, index) for info in self.boundaries if info.name in self.values}
        known = {name: boundary.info for name, boundary in boundaries.items()}
        unrecorded = {
            info.name: msgspec.structs.replace(info, status=BoundaryStatus.NOT_SELECTED)
            for info in self.boundaries
            if info.name not in known and info.status is BoundaryStatus.RECORDED
        }
        listed = tuple(known.get(info.name, unrecorded.get(info.name, info)) for info in self.boundaries)
        not_computed: dict[str, dict[str, npt.NDArray[np.uint64]]] = {}
        for reason, places in self.declared.items():
            for boundary, rows in places.items():
                keys = [int(token_keys(self.ids[name])[position]) for name, position in rows]
                not_computed.setdefault(reason, {})[boundary] = np.unique(np.array(keys, np.uint64))
        return LogicalTrace(
            path=self.path,
            manifests=(
                Manifest(
                    format=1,
                    run_id=f"{self.path}-{next(_RUNS)}",
                    tracer="0",
                    host=self.host,
                    map=MapIdentity(family="playback", host=self.host, root_class="Playback", digest="0"),
                    level=self.level,
                    boundaries=listed,
                    conditions=self.conditions,
                    weights_mode="digest" if self.weights else "none",
                    weights=tuple(self.weights.values()),
                    interventions=self.interventions,
                ),
            ),
            sequences=tuple(
                LogicalSequence(
                    label=name,
                    request=self.requests.get(name, ""),
                    scope="",
                    ids=np.empty(0, np.int64) if name in self.labelled else ids,
                    token=index[self.token_of[name]],
                )
                for name, ids in self.ids.items()
            ),
            tokens=TokenTable(
                key_K=np.array(self.key, np.uint64)[keep],
                sequence_K=np.array(self.sequence, np.int64)[keep],
                position_K=np.array(self.position, np.int64)[keep],
                previous_K=index[np.array(self.previous, np.int64)[keep]],
                labelled_K=self.labelled_K[keep],
            ),
            catalogue=listed,
            boundaries=boundaries,
            weights=self.weights,
            not_computed=not_computed,
            noise=self.noise,
            findings=tuple(self.findings),
            load_weight_rows=self.weight_rows.get,
        )

    def _boundary(self, info: Boundary, index: I64) -> LogicalBoundary:
        values = self.values[info.name]
        rows = _bfloat16(values.rows) if values.dtype == "bfloat16" else values.rows.astype(values.dtype)
        found = fingerprint_rows(rows, values.dtype)
        width = values.rows.shape[1]
        order = np.lexsort((values.experts, values.tokens)) if values.experts is not None else np.argsort(values.tokens, kind="stable")
        found = found.take(order)
        info = msgspec.structs.replace(info, dtype=values.dtype, width=width, executions=1, row_count=len(rows))

        def statistics() -> Statistics | None:
            if found.sketch_N16 is None or found.sum_squares_N is None or found.abs_max_N is None or found.nonfinite_N is None:
                return None
            return Statistics(found.sketch_N16, found.sum_squares_N, found.abs_max_N, found.nonfinite_N)

        load: Callable[[], Statistics | None] = values.extra.pop("load_statistics", statistics)
        return LogicalBoundary(
            info=info,
            dtype=values.dtype,
            width=width,
            token_R=index[values.tokens[order]],
            expert_R=None if values.experts is None else values.experts[order],
            seen_R=np.ones(len(rows), np.int64),
            digest_R2=found.digest_N2,
            load_statistics=load,
            load_values=lambda: found.values_NC,
            load_nonfinite=lambda: found.nonfinite_N,
            executions=1,
            **values.extra,
        )


def _bfloat16(rows: Array) -> Array:
    return (np.ascontiguousarray(rows, np.float32).view(np.uint32) >> 16).astype(np.uint16)
