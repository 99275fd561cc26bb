"""Every error tracer raises on purpose.

```
TracerError                 anything that goes wrong on purpose; carries a stable code
├── UsageError              the call or command line cannot be carried out as written
├── MapError                a boundary map is malformed or does not fit the model
├── HostError               no host claims the model, or the host refuses it
├── CaptureError            recording failed (with strict=True, raised out of the traced run)
├── TraceFormatError        a trace on disk is torn, altered, foreign or unreadable
├── ScoreError              score records are malformed, or cannot be compared with one another
├── SessionError            a step of a session failed, so that there is no answer yet
└── InternalError           our own bug; never the user's fault
```

Each code is a heading in ``docs/reference/errors.md``; a test holds the two equal.
A finding about two readable traces is no error: see ``tracer.read.findings``.
"""

from __future__ import annotations

import re
from enum import Enum

__all__ = [
    "CaptureError",
    "Code",
    "HostError",
    "InternalError",
    "MapError",
    "ScoreError",
    "SessionError",
    "TraceFormatError",
    "TracerError",
    "UsageError",
    "visible",
]

_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, marks that turn the direction of writing, halves of characters."""


def visible(text: str) -> str:
    """Text that a terminal shows as it is: names come from traces, and what would move a cursor, colour a line or turn its
    direction is written as ``\\x1b``."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Code(str, Enum):
    """Stable names of everything that can go wrong. Never renamed, only added."""

    # usage
    BAD_ARGUMENT = "bad-argument"
    OUT_IN_USE = "out-in-use"
    NOT_A_TRACE = "not-a-trace"
    NOT_A_RESULT = "not-a-result"
    EXTRA_MISSING = "extra-missing"
    # sessions
    NOT_A_SESSION = "not-a-session"
    SESSION_BUSY = "session-busy"
    SESSION_DAMAGED = "session-damaged"
    CONTROLS_INVALID = "controls-invalid"
    SESSION_STOPPED = "session-stopped"
    # maps
    MAP_UNKNOWN = "map-unknown"
    MAP_INVALID = "map-invalid"
    MAP_UNFIT = "map-unfit"
    MAP_LAYOUT = "map-layout"
    MAP_AXIS = "map-axis"
    # hosts
    HOST_UNKNOWN = "host-unknown"
    HOST_MISSING_PACKAGE = "host-missing-package"
    HOST_UNSUPPORTED = "host-unsupported"
    # capture
    LEAF_NOT_TENSOR = "leaf-not-tensor"
    CAPTURE_FAILED = "capture-failed"
    WRITE_FAILED = "write-failed"
    INTERVENTION_REFUSED = "intervention-refused"
    # traces
    FORMAT_UNSUPPORTED = "format-unsupported"
    MANIFEST_INVALID = "manifest-invalid"
    SEGMENT_INVALID = "segment-invalid"
    CHECKSUM_MISMATCH = "checksum-mismatch"
    SHARD_INCOMPLETE = "shard-incomplete"
    SHARD_DUPLICATE = "shard-duplicate"
    # scores
    SCORES_INVALID = "scores-invalid"
    SCORES_IMPORT = "scores-import"
    SCORES_COLLECT = "scores-collect"
    SCORES_TWICE = "scores-twice"
    SCORES_NOTHING = "scores-nothing"
    SCORES_REQUESTS = "scores-requests"
    SCORES_IDS = "scores-ids"
    SCORES_MASKS = "scores-masks"
    SCORES_EMPTY_MASK = "scores-empty-mask"
    SCORES_NONFINITE = "scores-nonfinite"
    SCORES_POSITIVE = "scores-positive"
    SCORES_POLICIES = "scores-policies"
    SCORES_DEFINITIONS = "scores-definitions"
    # ours
    INTERNAL = "internal"


class TracerError(Exception):
    """Base of all errors: what happened, where, expected against found, and what to do.

    Kept on the instance as ``code``, ``what``, ``where``, ``expected``, ``found``, ``remedy``
    (all text; the last four may be empty). ``str()`` is one readable paragraph.
    """

    def __init__(
        self,
        code: Code,
        what: str,
        *,
        where: str = "",
        expected: str = "",
        found: str = "",
        remedy: str = "",
    ) -> None:
        self.code = code
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.remedy = remedy
        super().__init__(self.text())

    def text(self) -> str:
        """The error as a short block: one line of what, then one line per known part."""
        lines = [f"[{self.code.value}] {self.what}"]
        parts = {
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "to do": self.remedy,
        }
        lines += [f"  {label}: {value}" for label, value in parts.items() if value]
        return "\n".join("\n    ".join(map(visible, line.splitlines())) for line in lines)


class UsageError(TracerError):
    """The call or command line cannot be carried out as written."""


class MapError(TracerError):
    """A boundary map is malformed, or does not fit the model it was given."""


class HostError(TracerError):
    """No host claims the model, or the host refuses it."""


class CaptureError(TracerError):
    """Recording failed; raised only with ``strict=True``, else the trace is marked incomplete."""


class TraceFormatError(TracerError):
    """A trace on disk is torn, altered, foreign or unreadable."""


class ScoreError(TracerError):
    """Score records are malformed, or cannot be compared with one another."""


class SessionError(TracerError):
    """A step of a session failed, so that there is no answer yet."""


class InternalError(TracerError):
    """A bug of tracer's own."""
