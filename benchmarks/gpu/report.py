"""Results of a stage as one JSON file: checks against goals, tables, and their origin."""

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
"""Comparison and goal value, for example ``("<=", 1.02)``."""


def verdict(figure: Any, goal: Goal) -> str:
    """Return PASS or FAIL. NaN and values that are not numbers fail every goal."""
    comparison, goal_value = goal
    try:
        return PASS if COMPARISONS[comparison](figure, goal_value) else FAIL
    except TypeError:
        return FAIL


@dataclass(slots=True)
class Report:
    """Results of one stage, saved after every check so that a crash loses nothing.

    Args:
        dry: True if times mean nothing; they are not compared with goals then.
        commit: commit of the measured code.
        seed: seed of the random data.
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
            "rounds": {},
        }
        self.save()

    def check(
        self, name: str, figure: Any, goal: Goal, *, measured: bool = False, note: str = ""
    ) -> None:
        """Compare a figure with its goal, unless it is `measured` and this is a dry run."""
        result = DRY if self.dry and measured else verdict(figure, goal)
        self._add(name, figure, goal, result, note)

    def absent(self, name: str, reason: str) -> None:
        """Record a check that could not be made: it neither passed nor failed."""
        self._add(name, None, None, ABSENT, reason)

    def failed(self, name: str, reason: str) -> None:
        self._add(name, None, None, FAIL, reason)

    def row(self, table: str, **cells: Any) -> None:
        """Add a row to a table."""
        self.data["tables"].setdefault(table, []).append(cells)
        self.save()

    def keep_rounds(self, workload: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Keep every round's figures by variant, for another evaluation; the page omits them."""
        self.data["rounds"][workload] = found
        self.save()

    def finish(self) -> None:
        self.data["finished"] = True
        self.save()

    def save(self) -> None:
        """Write the file atomically: a killed run leaves the previous file."""
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
    """Return `value` as JSON types: floats with 5 digits, NaN and infinity as strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    return value


def line(stage: str, check: Mapping[str, Any]) -> str:
    """Return a check as one line for the console."""
    text = f"{check['result']:6} {stage}: {check['name']}"
    if check["goal"]:
        text += f" = {plain(check['figure'])} (goal {' '.join(map(str, check['goal']))})"
    return text + (f"; {check['note']}" if check["note"] else "")


def read_stages(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the contents of the stage files that exist."""
    paths = (folder / f"{name}.json" for name in names)
    return [json.loads(path.read_text()) for path in paths if path.exists()]
