"""The boundaries of all shards as one list in causal order.

Pipeline stages resolve different parts of a model, so their lists differ; what is causal in each stays causal in the whole.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tracer.format.schema import Boundary, BoundaryStatus, Manifest
from tracer.read.findings import Finding, FindingCode, Kind
from tracer.read.wording import count

__all__ = ["later_use", "merge_catalogue", "merge_orders", "ranks_text", "vacuous_findings", "with_later_uses"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

_STATUS_ORDER = (
    BoundaryStatus.RECORDED,
    BoundaryStatus.VACUOUS,
    BoundaryStatus.UNRESOLVED,
    BoundaryStatus.NOT_OBSERVABLE,
    BoundaryStatus.NOT_SELECTED,
    BoundaryStatus.ELSEWHERE,
)
"""Of several processes' statuses the first here is the whole's: one that recorded is enough, one that should have comes next."""


def merge_orders(orders: Sequence[tuple[str, ...]], inputs: Mapping[str, Iterable[str]]) -> list[str]:
    """One order of all names in which every name comes after what precedes it in any of the ``orders`` and after its ``inputs``.

    Where that leaves a choice: names outside the layers first, then by layer number, then in the order of the lists.
    Contradictory orders give a deterministic compromise.
    """
    distinct = list(dict.fromkeys(orders))
    if len(distinct) == 1:
        return list(distinct[0])
    before: dict[str, set[str]] = {name: set() for order in distinct for name in order}
    place: dict[str, int] = {}
    for order in distinct:
        for index, name in enumerate(order):
            place.setdefault(name, index)
            if index:
                before[name].add(order[index - 1])
    for name, sources in inputs.items():
        before[name] |= {source for source in sources if source in before and source != name}

    def rank(name: str) -> tuple[int, int, str]:
        layer = _LAYER.search(name)
        return (int(layer[1]) if layer else -1, place[name], name)

    after: dict[str, list[str]] = {name: [] for name in before}
    for name, sources in before.items():
        for source in sources:
            after[source].append(name)
    waiting = {name: len(sources) for name, sources in before.items()}
    ready = [rank(name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    merged: list[str] = []
    while waiting:
        if not ready:  # a cycle: the lists contradict each other
            ready = [min(rank(name) for name in waiting)]
        name = heapq.heappop(ready)[2]
        if waiting.pop(name, None) is None:
            continue
        merged.append(name)
        for following in after[name]:
            if following in waiting:
                waiting[following] -= 1
                if not waiting[following]:
                    heapq.heappush(ready, rank(following))
    return merged


def merge_catalogue(manifests: Sequence[Manifest], scopes: Sequence[str]) -> list[Boundary]:
    """All boundaries of the maps in causal order, each as the whole run saw it.

    ``manifests``: by rank. ``scopes``: the data-parallel scope of each. Executions are those of the busiest process, added over scopes;
    ``row_count`` is left to stitching.
    """
    orders: list[tuple[str, ...]] = []
    seen: dict[str, dict[int, Boundary]] = {}
    counted: dict[str, dict[str, tuple[int, int]]] = {}
    for manifest, scope in zip(manifests, scopes, strict=True):
        orders.append(tuple(boundary.name for boundary in manifest.boundaries))
        for boundary in manifest.boundaries:
            seen.setdefault(boundary.name, {})[id(boundary)] = boundary
            most = counted.setdefault(boundary.name, {})
            executions, recomputed = most.get(scope, (0, 0))
            most[scope] = (max(executions, boundary.executions), max(recomputed, boundary.recomputed))
    inputs = {name: [source for boundary in versions.values() for source in boundary.inputs] for name, versions in seen.items()}
    merged = []
    for name in merge_orders(orders, inputs) if orders else []:
        versions = sorted(seen[name].values(), key=lambda boundary: _STATUS_ORDER.index(boundary.status))
        executions, recomputed = (sum(counts) for counts in zip(*counted[name].values(), strict=True))
        merged.append(
            msgspec.structs.replace(
                versions[0],
                dtype=next((boundary.dtype for boundary in versions if boundary.dtype), ""),
                width=max(boundary.width for boundary in versions),
                executions=executions,
                recomputed=recomputed,
                row_count=0,
            )
        )
    return merged


def vacuous_findings(manifests: Sequence[Manifest], catalogue: Iterable[Boundary]) -> list[Finding]:
    """One finding per boundary that a process was to record and did not, in causal order.

    Where others recorded the boundary, a process does not count that was given no rows at all, or whose pipeline stage never
    executed it while another stage did: many programs build every module on every stage.
    """
    silent: dict[str, list[tuple[Manifest, Boundary]]] = {}
    stages: dict[str, set[int]] = {}
    for manifest in manifests:
        for boundary in manifest.boundaries:
            if boundary.status is BoundaryStatus.VACUOUS:
                silent.setdefault(boundary.name, []).append((manifest, boundary))
            elif boundary.status is BoundaryStatus.RECORDED:
                stages.setdefault(boundary.name, set()).add(_stage(manifest))
    findings = []
    for boundary in catalogue:
        recorded_by = stages.get(boundary.name, set())
        ranks = [
            (manifest.rank, own.reason)
            for manifest, own in silent.get(boundary.name, [])
            if not recorded_by or not (manifest.counts.rows == 0 or (own.executions == 0 and _stage(manifest) not in recorded_by))
        ]
        if ranks:
            reasons = sorted({reason or "no reason is known" for _, reason in ranks})
            where = f" by {ranks_text([rank for rank, _ in ranks])}" if len(manifests) > 1 else ""
            findings.append(
                Finding(
                    code=FindingCode.VACUOUS,
                    kind=Kind.ABSENCE,
                    boundary=boundary.name,
                    ranks=tuple(rank for rank, _ in ranks),
                    text=f"vacuous: not recorded as the map says{where}, {count(boundary.executions, 'execution')}: {'; '.join(reasons)}",
                )
            )
    return findings


def _stage(manifest: Manifest) -> int:
    """Coordinate on the pipeline axis, 0 where there is none."""
    return next((axis.index for axis in manifest.mesh if axis.name == "pp"), 0)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, at most eight of them."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def later_use(name: str, use: int) -> str:
    """Name of a boundary's n-th use on the same rows within one forward; the first has the plain name."""
    return name if use == 1 else f"{name}#{use}"


def with_later_uses(catalogue: Sequence[Boundary], uses: Mapping[str, Iterable[int]]) -> list[Boundary]:
    """The catalogue with boundaries of their own for modules that run several times on the same rows (shared layers).

    ``uses``: boundary -> further uses (2, 3 ...). All second uses come after the last boundary that has one, then the third.
    Executions of boundaries with several uses are set to 0: the manifests count them together.
    """
    catalogue = [
        msgspec.structs.replace(boundary, executions=0, recomputed=0) if uses.get(boundary.name) else boundary for boundary in catalogue
    ]
    result = list(catalogue)
    for use in sorted({use for numbers in uses.values() for use in numbers}):
        again = [boundary for boundary in catalogue if use in uses.get(boundary.name, ())]
        names = {boundary.name for boundary in again}
        entry = later_use(again[-1].name, use - 1)
        renamed = [
            msgspec.structs.replace(
                boundary,
                name=later_use(boundary.name, use),
                inputs=tuple(dict.fromkeys(later_use(source, use) if source in names else entry for source in boundary.inputs or (entry,))),
            )
            for boundary in again
        ]
        at = max(index for index, boundary in enumerate(result) if boundary.name == entry)
        result[at + 1 : at + 1] = renamed
    return result
