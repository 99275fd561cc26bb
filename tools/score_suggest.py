"""How much `tracer map suggest` finds of families whose map it does not look at: one line per family, as in the docs.

    python tools/score_suggest.py

Each tiny model is traced with its own map and with the suggested one. A boundary is found if both recorded the same rows under
the same name, bit for bit; wrong if the suggested map recorded other rows under that name, or has a name the family's map lacks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.suggestion_scores import Score, score_family
from tests.tiny_models import FAMILIES


def main() -> None:
    scores = []
    for family in FAMILIES:
        with TemporaryDirectory() as folder:
            scores.append(score_family(family, Path(folder)))
    print("| family | levels 0 and 1 | level 2 | wrong |")
    print("|---|---|---|---|")
    for score in scores:
        print(line(score))
    worst = min(len(score.right[0]) / len(score.wanted[0]) for score in scores)
    print(f"\nlowest share at levels 0 and 1: {worst:.0%}; wrong in all: {sum(len(score.wrong) for score in scores)}")


def line(score: Score) -> str:
    """One family's row."""
    coarse, fine = (f"{len(score.right[n])} of {len(score.wanted[n])}" for n in (0, 1))
    return f"| `{score.family}` | {coarse} | {fine} | {len(score.wrong)} |"


if __name__ == "__main__":
    main()
