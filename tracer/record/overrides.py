"""What a session asks of a script without changing it: environment variables that take the place of ``trace``'s arguments.

``TRACER_OUT`` and ``TRACER_RUN_ID`` belong to the run's identity, ``TRACER_PLAN`` to its dumps, ``TRACER_IMAGE_DIGEST`` to its conditions.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tracer.errors import Code, UsageError

__all__ = ["BOUNDARIES_VARIABLE", "LEVEL_VARIABLE", "MAP_VARIABLE", "overridden"]

LEVEL_VARIABLE = "TRACER_LEVEL"
BOUNDARIES_VARIABLE = "TRACER_BOUNDARIES"
MAP_VARIABLE = "TRACER_MAP"

_PREFIX = "TRACER_"
_OTHERS = ("TRACER_OUT", "TRACER_RUN_ID", "TRACER_PLAN", "TRACER_IMAGE_DIGEST", "TRACER_DEBUG")
_KNOWN = (LEVEL_VARIABLE, BOUNDARIES_VARIABLE, MAP_VARIABLE, *_OTHERS)
_named: set[str] = set()
"""Unknown variables that this process has been told of."""

_Map = TypeVar("_Map")


def overridden(
    map: _Map, level: int, boundaries: str | Sequence[str] | None, environment: Mapping[str, str] = os.environ
) -> tuple[_Map | str, int, str | Sequence[str] | None]:
    """``map``, ``level`` and ``boundaries`` as given, or as the environment says: a name or file, 0 to 2, globs with commas between.

    A variable that only looks like one of these is named on stderr, once. Raises UsageError (bad-argument)."""
    for name in sorted({name for name in environment if name.startswith(_PREFIX)} - {*_KNOWN} - _named):
        _named.add(name)
        near = difflib.get_close_matches(name, _KNOWN, 1)
        meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(_KNOWN)}"
        print(f"tracer: the variable {name} means nothing{meant}", file=sys.stderr)
    text = environment.get(LEVEL_VARIABLE, "")
    if text and text not in ("0", "1", "2"):
        raise UsageError(Code.BAD_ARGUMENT, f"{LEVEL_VARIABLE} is no level", expected="0, 1 or 2", found=text)
    globs = [part.strip() for part in environment.get(BOUNDARIES_VARIABLE, "").split(",") if part.strip()]
    return environment.get(MAP_VARIABLE) or map, int(text) if text else level, globs or boundaries
