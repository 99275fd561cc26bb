"""Tests of ``tools/make_format_reference.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from tracer.format import dumps, schema

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_is_up_to_date() -> None:
    """The reference page is what the tool makes of the format's modules now."""
    run = subprocess.run([sys.executable, "tools/make_format_reference.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_the_page_holds_every_key_of_every_struct() -> None:
    """Every struct on disk has a section, and every one of its keys a line in it."""
    sections = dict(part.split("\n", 1) for part in (ROOT / "docs/reference/trace-format.md").read_text().split("\n### ")[1:])
    classes = [value for module in (schema, dumps) for value in vars(module).values() if isinstance(value, type)]
    structs = [value for value in classes if issubclass(value, schema.Record)]
    for struct in structs:
        if struct is not schema.Record:
            for field in msgspec.structs.fields(struct):
                assert f"| `{field.encode_name}` |" in sections[struct.__name__]
