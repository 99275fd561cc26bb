"""Weight fingerprints of shards add up to those of the whole parameter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.trace_files import manifest
from tracer.format.fingerprint import Fingerprints, digest_of_rows, fingerprint_rows
from tracer.format.schema import Manifest, Span, Weight
from tracer.format.store import ShardWriter
from tracer.read.findings import FindingCode, Kind
from tracer.read.joined_weights import join_weights, weight_rows_loader
from tracer.read.load import load_trace

NAME = "layers.0.attn.q.weight"
WHOLE = np.random.default_rng(7).standard_normal((12, 20)).astype(np.float32)


def _part(rows: tuple[Span, ...] = (), columns: tuple[Span, ...] = (), tensor: Any = WHOLE) -> tuple[Weight, Fingerprints]:
    held = np.concatenate([np.arange(start, stop) for start, stop in rows or ((0, 12),)])
    columns_held = np.concatenate([np.arange(start, stop) for start, stop in columns or ((0, 20),)])
    found = fingerprint_rows(np.ascontiguousarray(tensor[held][:, columns_held]), "float32", width=20, spans=columns)
    lanes = digest_of_rows(found.digest_N2, held)
    weight = Weight(
        name=NAME, parameter="q", dtype="float32", rows=12, columns=20, row_spans=rows, column_spans=columns,
        digest=(f"{lanes[0]:016x}", f"{lanes[1]:016x}"),
    )  # fmt: skip
    return weight, found


def _manifests(weights: Sequence[Weight]) -> list[Manifest]:
    return [manifest(rank=rank, world_size=len(weights), weights=(weight,)) for rank, weight in enumerate(weights)]


def test_a_grid_of_shards_with_copies_adds_up() -> None:
    """Row and column shards, one of them held twice, have the digest of the whole parameter."""
    spans = [(((0, 5),), ((0, 7),)), (((0, 5),), ((7, 20),)), (((5, 12),), ((0, 7),)), (((5, 12),), ((7, 20),)), (((0, 5),), ((0, 7),))]
    joined, findings = join_weights(_manifests([_part(*box)[0] for box in spans]))
    assert findings == []
    assert joined[NAME].digest == _part()[0].digest
    assert (joined[NAME].row_spans, joined[NAME].column_spans, joined[NAME].unknown) == ((), (), "")


def test_weights_that_changed_add_up_at_the_end_too() -> None:
    """Where one shard changed during the trace, the whole has a digest at the end, with unchanged shards as they were."""
    left, right = _part((), ((0, 10),))[0], _part((), ((10, 20),))[0]
    after = _part((), ((10, 20),), WHOLE + 1)[0].digest
    joined, _ = join_weights(_manifests([left, msgspec.structs.replace(right, after=after)]))
    changed = WHOLE.copy()
    changed[:, 10:] += 1
    assert joined[NAME].after == _part((), (), changed)[0].digest


def test_copies_that_differ_are_a_finding() -> None:
    """Replicated weights must be bitwise equal; both ranks are named."""
    _, (finding,) = join_weights(_manifests([_part()[0], _part((), (), WHOLE + 1)[0]]))
    assert (finding.code, finding.kind, finding.boundary, finding.ranks) == (FindingCode.REPLICAS_DISAGREE, Kind.DIFFERENCE, NAME, (0, 1))


def test_missing_and_unknown_parts_make_the_whole_unknown() -> None:
    """A hole, a part without fingerprint, another shape: never compared as equal, always with the reason."""
    top = _part(((0, 5),))[0]
    cases = {
        "no process holds rows 5:12": [top],
        "repacked": [top, msgspec.structs.replace(_part(((5, 12),))[0], unknown="repacked")],
        "rank 1 has it as 13 x 20 float32, rank 0 as 12 x 20 float32": [top, msgspec.structs.replace(top, rows=13)],
        "no process holds cols 7:20": [_part((), ((0, 7),))[0]],
    }
    for reason, weights in cases.items():
        joined, findings = join_weights(_manifests(weights))
        assert joined[NAME].unknown == reason
        assert joined[NAME].digest == ("", "")
        assert findings == []


def test_overlapping_parts_are_unreadable() -> None:
    """Parts that are neither equal nor disjoint cannot be added up."""
    joined, (finding,) = join_weights(_manifests([_part(((0, 8),))[0], _part(((5, 12),))[0]]))
    assert (finding.code, finding.kind) == (FindingCode.SLICES_OVERLAP, Kind.UNREADABLE)
    assert "rows 5:8" in finding.text
    assert joined[NAME].unknown


def test_rows_are_loaded_in_global_order(tmp_path: Path) -> None:
    """With weights="rows" every row of a sharded parameter comes back with the fingerprint of the whole row."""
    boxes: list[tuple[tuple[Span, ...], tuple[Span, ...]]] = [
        (((8, 12), (0, 2)), ((0, 7),)), (((8, 12), (0, 2)), ((7, 20),)), (((2, 8),), ()),
    ]  # fmt: skip
    for rank, box in enumerate(boxes):
        weight, rows = _part(*box)
        writer = ShardWriter(tmp_path, rank)
        writer.write_weight_rows([rows])
        writer.commit(manifest(rank=rank, world_size=3, weights=(msgspec.structs.replace(weight, start=0),), weights_mode="rows"))
    files = load_trace(tmp_path)
    joined, _ = join_weights([shard.manifest for shard in files.shards if shard.manifest is not None])
    load = weight_rows_loader(files.shards, joined)
    whole, found = fingerprint_rows(WHOLE, "float32"), load(NAME)
    assert found is not None
    np.testing.assert_array_equal(found.digest_N2, whole.digest_N2)
    assert found.sum_squares_N is not None
    assert whole.sum_squares_N is not None
    np.testing.assert_allclose(found.sum_squares_N, whole.sum_squares_N)
    assert load("no such weight") is None
