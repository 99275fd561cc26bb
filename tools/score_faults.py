"""Score the tool on the fault catalogue: is the place right, the rows, the class, the explanation?

Every fault is planted in a tiny model, traced, compared, dumped by plan and, where its dtype is coarse, controlled in
float32, as in ``tests/test_faults.py``. Takes a few minutes on one core.

    python tools/score_faults.py [F20 F21 ...] [--write docs/explanation/fault-scores.md]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fault_runs import EXPLAINED, TRACED, FaultRun, run_fault

COLUMNS = ("fault", "what is planted", "model", "first divergence", "rows", "class", "explanation")
SCORED = ("first divergence", "rows", "class", "explanation")
BEGIN, END = "<!-- scores -->", "<!-- end of scores -->"


def marks(run: FaultRun) -> dict[str, bool | None]:
    """What is right about a run, by column; None where the catalogue asks for nothing."""
    if run.fault.effect == "same":
        return {"first divergence": run.first.exit == 0, "rows": None, "class": None, "explanation": None}
    if run.fault.effect == "absent":
        return {"first divergence": run.first.exit == 2, "rows": None, "class": None, "explanation": None}
    return {"first divergence": run.place_right, "rows": run.tokens_right, "class": run.class_right, "explanation": run.explained}


def line(run: FaultRun) -> tuple[str, ...]:
    """One row of the table."""
    fault, found, right = run.fault, run.last.classification, marks(run)
    first = run.first.first
    explanation = next((text for text in _said(run) if text), "")
    texts = {
        "first divergence": f"`{first.boundary}`" if first is not None else run.first.verdict.value,
        "rows": run.entry.tokens if run.entry is not None else "",
        "class": "" if found is None else f"{found.klass.value} ({found.confidence.value})",
        "explanation": explanation,
    }
    dtype = str(fault.dtype).removeprefix("torch.")
    cells = [f"{texts[name]}{'' if right[name] is None else ' ✓' if right[name] else ' ✗'}".strip() for name in SCORED]
    return (fault.id, fault.note, f"{fault.model} {dtype}", *cells)


def _said(run: FaultRun) -> list[str]:
    """The piece of evidence that explains, else the first telling one."""
    found = run.last.classification
    evidence = [] if found is None else list(found.evidence)
    pattern = EXPLAINED.get(run.fault.id)
    fitting = [text for text in evidence if pattern and re.search(pattern, text, re.DOTALL)]
    control = [run.last.control.text] if run.last.control is not None else []
    return [text.replace("|", "\\|") for text in (fitting or control or evidence[-1:])]


def table(runs: list[FaultRun]) -> str:
    """The whole table as Markdown, with what is right of each column."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(line(run)) + " |" for run in runs]
    totals = []
    for name in SCORED:
        asked = [right for run in runs if (right := marks(run)[name]) is not None]
        totals.append(f"{name} {sum(asked)} of {len(asked)}")
    controls = [run for run in runs if run.fault.effect == "rounding"]
    wrong = [run.fault.id for run in controls if run.klass is not None and run.klass.value == "correctness error"]
    totals.append(f"negative controls called an error: {len(wrong)} of {len(controls)}")
    return "\n".join(lines) + "\n\nRight: " + "; ".join(totals) + ".\n"


def main() -> None:
    """Run the faults, print the table, and put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", help="ids; default: all that are traced")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for fault in TRACED:
            if options.faults and fault.id not in options.faults:
                continue
            runs.append(run_fault(fault, Path(folder) / fault.id))
            sys.stderr.write(".")
    sys.stderr.write("\n")
    text = table(runs)
    print(text)
    if options.write:
        page = options.write.read_text()
        head, _, rest = page.partition(BEGIN)
        options.write.write_text(f"{head}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
