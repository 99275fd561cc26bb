"""The structs of a map file and the grammar of layouts."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tracer.record.map_entries import Binding, BoundaryEntry, BoundaryMap, HostBindings, WeightEntry, layout_axes


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("b s (h d)", (("b",), ("s",), ("h", "d"))),
        ("t 1 c", (("t",), (), ("c",))),
        ("b h s d", (("b",), ("h",), ("s",), ("d",))),
        ("(t h) d", (("t", "h"), ("d",))),
        ("b s", (("b",), ("s",))),
    ],
)
def test_layout_names_every_dimension(layout: str, axes: tuple[tuple[str, ...], ...]) -> None:
    """A layout gives the axes of every dimension, a group several, a one none."""
    assert layout_axes(layout) == axes


@pytest.mark.parametrize("layout", ["", "h d", "b s b", "b  s", "b s (h d", "b s ()", "b s -1", "B s", "b,s"])
def test_a_text_without_rows_or_sense_is_no_layout(layout: str) -> None:
    """A layout needs a row axis, every axis once, and single spaces."""
    assert layout_axes(layout) is None


def test_entries_refuse_unknown_keys() -> None:
    """No struct of a map takes a key it does not know."""
    for struct in (BoundaryEntry, Binding, HostBindings):
        with pytest.raises(msgspec.ValidationError, match="unknown field"):
            msgspec.convert({"levle": 1}, struct)


def test_digest_is_of_the_content() -> None:
    """Equal maps in different files have one digest, another level another."""
    one = BoundaryMap(family="f", file="a.yaml", boundaries={"embedding": BoundaryEntry(level=0)}, hosts={})
    assert one.digest() == msgspec.structs.replace(one, file="elsewhere/b.yaml").digest()
    assert one.digest() != msgspec.structs.replace(one, boundaries={"embedding": BoundaryEntry(level=1)}).digest()


def test_the_reference_lists_every_key() -> None:
    """The tables of the reference page hold exactly the keys of each struct."""
    page = (Path(__file__).resolve().parent.parent / "docs/reference/boundary-maps.md").read_text()
    for section, struct in (("Boundaries", BoundaryEntry), ("Hosts", HostBindings), ("Bindings", Binding), ("Weights", WeightEntry)):
        table = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
        listed = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
        assert set(listed) == {field.encode_name for field in msgspec.structs.fields(struct)}, section
        assert len(listed) == len(set(listed))
