"""Everything that is known about the places where two sides part, gathered and classed: shapes, dumps, control, settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tracer.format.schema import Boundary
from tracer.read.classify import ROUNDINGS, RootEvidence, classify_root, is_quantized
from tracer.read.compare import Method
from tracer.read.control import measure_control
from tracer.read.divergence import Candidate, Scene
from tracer.read.explain import Material, explain_boundary, explain_weights
from tracer.read.findings import (
    BoundaryOutcome,
    Class,
    Classification,
    Confidence,
    Control,
    ControlOutcome,
    DumpLine,
    Explanation,
    Root,
)
from tracer.read.logical import LogicalTrace
from tracer.read.matched import EPSILON
from tracer.read.outcomes import Judged
from tracer.read.pairing import MASK, mask_unseen

__all__ = ["Account", "EvidenceGatherer"]

Bools = npt.NDArray[np.bool_]

_WIDELY = 16
"""So many roundings are far beyond what a reader at rounding size inherited."""
_FLOAT32_ROUNDING = 2.0**-18


@dataclass(frozen=True)
class Account:
    """One root, accounted for."""

    root: Root
    explanations: tuple[Explanation, ...]
    classification: Classification
    control: Control | None = None


class EvidenceGatherer:
    """Gathers what is known about candidates. ``control``: a pair in float32. ``dump_lines``: the table of dumps."""

    def __init__(
        self,
        scene: Scene,
        material: Material,
        dump_lines: Sequence[DumpLine] = (),
        control: tuple[LogicalTrace, LogicalTrace] | None = None,
    ) -> None:
        self.scene, self.material, self.control = scene, material, control
        self.dump_lines = {line.boundary: line for line in dump_lines}

    def account(self, candidate: Candidate, outcomes: Sequence[BoundaryOutcome] = ()) -> Account | None:
        """Evidence and class of one candidate; None where it is the cause of nothing. ``outcomes``: of the boundaries before it."""
        root = candidate.root
        if root is None:
            return None
        account = self._account(candidate, root, outcomes)
        return replace(account, root=msgspec.structs.replace(root, klass=account.classification.klass))

    def _account(self, candidate: Candidate, root: Root, outcomes: Sequence[BoundaryOutcome]) -> Account:
        if candidate.weight:
            return self._weight(root)
        if root.place.boundary.startswith("input."):
            evidence = tuple(text for text in (root.text,) if text)
            not_proven = ("that nothing else differs: what follows from other inputs was not told apart",)
            return Account(root, (), _class(Class.INPUT, Confidence.HIGH, evidence, not_proven))
        if root.klass is Class.DISCRETE:
            return self._choice(root)
        return self._value(root, outcomes)

    # ------------------------------------------------------------ kinds of roots

    def _weight(self, root: Root) -> Account:
        weights = self.scene.weights
        explanations = tuple(explain_weights(self.material, weights, root.place.boundary))
        evidence = [weights.summary(), *([] if weights.summary() in root.text else [root.text])]
        for found in explanations:
            tested = f" (dumps, tested on {found.rows_tested} held-out rows)" if found.source == "dumps" else ""
            evidence.append(f"{found.boundary}: {found.text}{tested}")
        lead = next((lead for lead in self.scene.leads if lead.name == "quantization"), None)
        evidence += [lead.text for lead in self.scene.leads]
        first = [found for found in explanations if found.boundary == root.place.boundary]
        if lead is not None and any(is_quantized(found, lead.text[:1].lower()) for found in first):
            not_proven = ("that its rules (scales, clipping, which tensors) are those that were meant",)
            return Account(root, explanations, _class(Class.QUANTIZATION, Confidence.HIGH, evidence, not_proven))
        open_points = ["that this explains everything that differs later", *(["that the quantization is as designed"] if lead else [])]
        return Account(root, explanations, _class(Class.WEIGHT, Confidence.HIGH, evidence, open_points))

    def _choice(self, root: Root) -> Account:
        name = root.place.boundary
        explanations = tuple(explain_boundary(self.material, name, self._root_tokens(name)))
        control = self._measure(name)
        evidence = [root.text, *(found.text for found in explanations), *([control.text] if control is not None else [])]
        not_proven = ["anything behind this choice in these tokens"]
        if control is None:
            not_proven.append("that rounding flipped it: no control pair in float32 was given")
        found = _class(Class.DISCRETE, Confidence.HIGH, [text for text in evidence if text], not_proven)
        return Account(root, explanations, found, control)

    def _value(self, root: Root, outcomes: Sequence[BoundaryOutcome]) -> Account:
        scene, name = self.scene, root.place.boundary
        judged = scene.judged[name]
        info = scene.graph.boundaries[scene.graph.index[name]]
        cells = scene.causes.cells[name]
        explanations = tuple(explain_boundary(self.material, name, self._root_tokens(name)))
        control = self._measure(name)
        fades = self._fades(name)
        known = {weight for weight in info.weights if weight in scene.a.weights and weight in self.material.b.weights}
        unknown = {weight for weight, *_ in scene.weights.unknown}
        missing = {weight for weight, _, buffer in scene.weights.missing if not buffer}
        masked = MASK in info.inputs or info.mixes_tokens or cells.between
        unseen = mask_unseen(scene.a, self.material.b, scene.pairing) if masked else ""
        lines = self.dump_lines.get(name)
        evidence = RootEvidence(
            root=root,
            info=info,
            dtypes=(judged.comparison.a.dtype, judged.comparison.b.dtype),
            same_input=not cells.between and not cells.unobserved and not unseen,
            ancestors=bool(cells.between) and not cells.unobserved and not unseen,
            weights_equal=not info.weights or (bool(known) and not (set(info.weights) & (unknown | missing))),
            explanations=explanations,
            dump=lines if lines is not None and lines.rows else None,
            control=control,
            leads=scene.leads,
            fades=fades,
            faded=bool(fades) and self._faded(fades),
            reduced=_reduced_products(scene.a, self.material.b) if info.weights or info.mixes_tokens else "",
            unseen=unseen,
            earlier=outcomes,
        )
        return Account(root, explanations, classify_root(evidence), control)

    # ------------------------------------------------------------ pieces

    def _root_tokens(self, name: str) -> Bools:
        return self.scene.causes.cells[name].root_K

    def _measure(self, name: str) -> Control | None:
        if self.control is None:
            return None
        inputs = tuple(source for source in self._info(name).inputs if not source.startswith("input."))
        return measure_control(self.control, self.scene.a, self.scene.judged[name], inputs, self._root_tokens(name))

    def _info(self, name: str) -> Boundary:
        return self.scene.graph.boundaries[self.scene.graph.index[name]]

    def _fades(self, name: str) -> tuple[str, ...]:
        """What reads a boundary directly, where all of it was compared and is at rounding size while the boundary is far from it."""
        judged, graph = self.scene.judged[name], self.scene.graph
        if judged.distance is None or (judged.distance.median or 0.0) <= _WIDELY * _rounding(judged):
            return ()
        readers = [graph.boundaries[at].name for at in graph.readers()[graph.index[name]]]
        for reader in readers:
            found = self.scene.judged.get(reader)
            if found is None or found.comparison.method is Method.NONE or not len(found.comparison):
                return ()
            if found.above_D.any() and (found.distance is None or not (found.distance.largest or np.inf) <= ROUNDINGS * _rounding(found)):
                return ()
        return tuple(readers)

    def _faded(self, readers: Sequence[str]) -> bool:
        """Whether all of these fall to the rounding of float32 in the control pair."""
        if self.control is None:
            return False
        every = np.ones(len(self.scene.a.tokens), np.bool_)
        for reader in readers:
            judged = self.scene.judged[reader]
            if not judged.above_D.any():
                continue
            found = measure_control(self.control, self.scene.a, judged, (), every)
            if found.outcome is not ControlOutcome.FALLS and not (found.distance is not None and found.distance <= _FLOAT32_ROUNDING):
                return False
        return True


def _class(klass: Class, confidence: Confidence, evidence: Sequence[str], not_proven: Sequence[str]) -> Classification:
    return Classification(klass=klass, confidence=confidence, evidence=tuple(evidence), not_proven=tuple(not_proven))


def _rounding(judged: Judged) -> float:
    return max(EPSILON.get(dtype, 2.0**-24) for dtype in (judged.comparison.a.dtype, judged.comparison.b.dtype))


def _reduced_products(a: LogicalTrace, b: LogicalTrace) -> str:
    """A switch of either side by which float32 products are computed in less, on a device that has such products."""
    for side, trace in (("A", a), ("B", b)):
        conditions: dict[str, Any] = trace.manifest.conditions
        torch, devices = conditions.get("torch"), conditions.get("devices")
        if not isinstance(torch, dict) or not isinstance(devices, dict) or not devices.get("cuda"):
            continue
        if torch.get("float32_matmul_precision") not in (None, "highest", "unknown"):
            return f"float32_matmul_precision of {side} is {torch['float32_matmul_precision']}"
        matmul = torch.get("cuda_matmul")
        if isinstance(matmul, dict) and matmul.get("allow_tf32") is True:
            return f"{side} allows TF32 products"
    return ""
