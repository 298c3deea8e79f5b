"""What a stage finds: checks against goals, figures, and where they come from, as one JSON file."""

import json
import math
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import facts

PASS, FAIL, DRY, ABSENT = "pass", "FAIL", "dry", "absent"
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
Goal = tuple[str, Any]
"""``("<=", 1.02)``: how a figure compares with its goal."""


def verdict(figure: Any, goal: Goal) -> str:
    """PASS or FAIL; NaN, and a figure that is no number, miss every goal."""
    comparison, wanted = goal
    try:
        return PASS if COMPARISONS[comparison](figure, wanted) else FAIL
    except TypeError:
        return FAIL


@dataclass(slots=True)
class Report:
    """One stage's results; written after every check, so that what is known outlives a crash.

    Args:
        dry: times mean nothing here, and no goal judges them.
        commit: of the code that is measured.
        seed: of the random data.
    """

    stage: str
    folder: Path
    dry: bool
    commit: str
    seed: int
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = {
            "stage": self.stage,
            "dry": self.dry,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
            "commit": self.commit,
            "machine": facts(),
            "seed": self.seed,
            "finished": False,
            "checks": [],
            "tables": {},
        }
        self.save()

    def check(
        self, name: str, figure: Any, goal: Goal, *, measured: bool = False, note: str = ""
    ) -> None:
        """Judge a figure; one that is `measured` is not judged in a dry run."""
        result = DRY if self.dry and measured else verdict(figure, goal)
        self._add(name, figure, goal, result, note)

    def absent(self, name: str, why: str) -> None:
        """A check that could not be made: neither passed nor failed."""
        self._add(name, None, None, ABSENT, why)

    def failed(self, name: str, why: str) -> None:
        self._add(name, None, None, FAIL, why)

    def row(self, table: str, **cells: Any) -> None:
        """A line of figures."""
        self.data["tables"].setdefault(table, []).append(cells)
        self.save()

    def finish(self) -> None:
        self.data["finished"] = True
        self.save()

    def save(self) -> None:
        """Whole or not at all: a run that is killed leaves the file before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.stage}.json"
        unfinished = path.with_suffix(".json.new")
        unfinished.write_text(json.dumps(plain(self.data), indent=1) + "\n")
        unfinished.replace(path)

    def _add(self, name: str, figure: Any, goal: Goal | None, result: str, note: str) -> None:
        check = {"name": name, "figure": figure, "goal": goal, "result": result, "note": note}
        self.data["checks"].append(check)
        self.save()
        print(line(self.stage, check), flush=True)


def plain(value: Any) -> Any:
    """`value` in JSON's types: floats of 5 digits, and those it lacks as words."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    return value


def line(stage: str, check: Mapping[str, Any]) -> str:
    """A check on one line, for the console."""
    text = f"{check['result']:6} {stage}: {check['name']}"
    if check["goal"]:
        text += f" = {plain(check['figure'])} (goal {' '.join(map(str, check['goal']))})"
    return text + (f"; {check['note']}" if check["note"] else "")


def read_stages(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """The stages' files that are there."""
    paths = (folder / f"{name}.json" for name in names)
    return [json.loads(path.read_text()) for path in paths if path.exists()]
