"""The boundaries of all processes as one causal list."""

from __future__ import annotations

from collections.abc import Sequence

from tests.trace_files import manifest
from tracer.format.schema import Axis, Boundary, BoundaryStatus, Counts, Manifest
from tracer.read.catalogue import later_use, merge_catalogue, merge_orders, vacuous_findings, with_later_uses
from tracer.read.findings import FindingCode, Kind


def _manifest(rank: int, boundaries: Sequence[Boundary], rows: int = 1) -> Manifest:
    return manifest(rank=rank, world_size=4, boundaries=tuple(boundaries), counts=Counts(forwards=1, rows=rows))


def test_stages_interleave_by_layer_number() -> None:
    """Interleaved pipeline stages come out as layers 0, 1, 2 .. 11, not in text order, whoever is listed first."""
    even = ("embedding", *(f"layers.{layer}.residual" for layer in range(0, 12, 2)))
    odd = (*(f"layers.{layer}.residual" for layer in range(1, 12, 2)), "final_norm")
    wanted = ["embedding", *(f"layers.{layer}.residual" for layer in range(12)), "final_norm"]
    assert merge_orders([even, odd], {"final_norm": ["layers.11.residual"]}) == wanted
    assert merge_orders([odd, even], {"final_norm": ["layers.11.residual"]}) == wanted


def test_inputs_place_a_stage_that_has_no_layers() -> None:
    """A last stage that only lists the head comes after the layers its head is computed from."""
    orders = [("final_norm", "lm_head"), ("embedding", "layers.0.residual")]
    merged = merge_orders(orders, {"final_norm": ["layers.0.residual"]})
    assert merged == ["embedding", "layers.0.residual", "final_norm", "lm_head"]


def test_contradictory_orders_give_one_order_of_all_names() -> None:
    """Lists that contradict each other still end, with every name once."""
    assert sorted(merge_orders([("a", "b", "c"), ("b", "a", "d")], {})) == ["a", "b", "c", "d"]


def test_recorded_anywhere_is_recorded_and_executions_add_over_scopes() -> None:
    """Statuses merge to the most telling one; ranks of one scope count once, scopes add."""
    recorded = Boundary(name="x", level=0, dtype="bfloat16", width=8, executions=3, recomputed=1)
    elsewhere = Boundary(name="x", level=0, status=BoundaryStatus.ELSEWHERE, reason="another stage")
    silent = Boundary(name="y", level=0, status=BoundaryStatus.VACUOUS)
    hidden = Boundary(name="y", level=0, status=BoundaryStatus.NOT_OBSERVABLE)
    lists = [(elsewhere, hidden), (recorded, silent), (recorded, hidden)]
    manifests = [_manifest(rank, boundaries) for rank, boundaries in enumerate(lists)]
    x, y = merge_catalogue(manifests, ["dp=0", "dp=0", "dp=1"])
    assert (x.status, x.executions, x.recomputed, x.dtype, x.width, x.reason) == (BoundaryStatus.RECORDED, 6, 2, "bfloat16", 8, "")
    assert y.status is BoundaryStatus.VACUOUS


def test_s36_a_vacuous_boundary_is_a_finding_with_its_reason() -> None:
    """Vacuous on one rank stays a finding though another recorded it, unless that rank was given no rows at all."""
    silent = Boundary(name="x", level=0, status=BoundaryStatus.VACUOUS, reason="compiled region")
    manifests = [_manifest(0, [Boundary(name="x", level=0, executions=1)]), _manifest(1, [silent]), _manifest(2, [silent], rows=0)]
    (finding,) = vacuous_findings(manifests, merge_catalogue(manifests, [""] * 3))
    assert (finding.code, finding.kind, finding.boundary, finding.ranks) == (FindingCode.VACUOUS, Kind.ABSENCE, "x", (1,))
    assert "compiled region" in finding.text


def test_a_run_without_any_row_is_vacuous() -> None:
    """Where no process was given rows, a boundary that never ran is still a finding."""
    manifests = [_manifest(0, [Boundary(name="x", level=0, status=BoundaryStatus.VACUOUS)], rows=0)]
    assert [finding.boundary for finding in vacuous_findings(manifests, merge_catalogue(manifests, [""]))] == ["x"]


def test_a_stage_that_never_runs_a_boundary_of_another_is_not_silent() -> None:
    """On a pipeline the stage that executed a boundary speaks for it; a silent process of that same stage is still a finding."""
    silent = Boundary(name="x", level=0, status=BoundaryStatus.VACUOUS, reason="0 executions")
    lists = [Boundary(name="x", level=0, executions=1), silent, silent, silent]
    manifests = []
    for rank, boundary in enumerate(lists):
        mesh = (Axis(name="pp", index=rank // 2, size=2), Axis(name="tp", index=rank % 2, size=2))
        manifests.append(manifest(rank=rank, world_size=4, boundaries=(boundary,), mesh=mesh, counts=Counts(forwards=1, rows=1)))
    (finding,) = vacuous_findings(manifests, merge_catalogue(manifests, [""] * 4))
    assert finding.ranks == (1,)
    none = vacuous_findings(manifests[1:], merge_catalogue(manifests[1:], [""] * 3))
    assert [finding.ranks for finding in none] == [(1, 2, 3)]


def test_later_uses_follow_the_last_of_the_use_before() -> None:
    """A shared block that runs three times is listed three times, each run behind the one before it."""
    catalogue = [Boundary(name=name, level=0, inputs=inputs) for name, inputs in (("e", ()), ("a", ("e",)), ("b", ("a",)), ("z", ("b",)))]
    result = with_later_uses(catalogue, {"a": {2, 3}, "b": {2, 3}})
    assert [boundary.name for boundary in result] == ["e", "a", "b", "a#2", "b#2", "a#3", "b#3", "z"]
    assert [boundary.inputs for boundary in result[3:7]] == [("b",), ("a#2",), ("b#2",), ("a#3",)]
    assert later_use("a", 1) == "a"
