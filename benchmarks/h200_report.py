"""What a stage found out: checks against goals, figures, and where they come from, as one file."""

import json
import math
import operator
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from origin import commit, machine

PASS, FAIL, DRY, ABSENT = "pass", "FAIL", "dry", "absent"
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
Goal = tuple[str, Any]
"""``("<=", 1.02)``: how a figure compares with its goal."""


def verdict(figure: Any, goal: Goal) -> str:
    """PASS or FAIL; NaN, and a figure that is no number, miss every goal."""
    how, wanted = goal
    try:
        return PASS if COMPARISONS[how](figure, wanted) else FAIL
    except TypeError:
        return FAIL


def facts() -> dict[str, Any]:
    """Machine, driver and versions."""
    import torch

    found: dict[str, Any] = {"processor": machine(), "python": sys.version.split()[0]}
    for name in ("torch", "triton", "vllm", "transformers", "vllm-kvcompress"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": device.name,
            "multiprocessors": device.multi_processor_count,
            "memory_gib": round(device.total_memory / 2**30, 1),
            "l2_mib": round(device.L2_cache_size / 2**20, 1),
            "cuda": torch.version.cuda,
            "driver": driver(),
        }
    return found


def driver() -> str:
    """The GPU driver's version, as its own tool tells it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    ask = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()


@dataclass(slots=True)
class Report:
    """One stage's results; written after every check, so that what is known outlives a crash.

    Args:
        dry: figures of time mean nothing here: no goal judges them.
        origin: the commit, where no git tells it.
    """

    stage: str
    folder: Path
    dry: bool
    seed: int
    origin: str | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = {
            "stage": self.stage,
            "dry": self.dry,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", *sys.argv]),
            "commit": self.origin or commit(),
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
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.stage}.json"
        path.write_text(json.dumps(plain(self.data), indent=1) + "\n")

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
    said = f"{check['result']:6} {stage}: {check['name']}"
    if check["goal"]:
        said += f" = {plain(check['figure'])} (goal {' '.join(map(str, check['goal']))})"
    return said + (f"; {check['note']}" if check["note"] else "")


def stages(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """The stages' files that are there."""
    paths = (folder / f"{name}.json" for name in names)
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def failures(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of the checks that failed, and of stages that did not come to their end."""
    lines = [
        line(stage["stage"], check)
        for stage in found
        for check in stage["checks"]
        if check["result"] == FAIL
    ]
    return lines + [
        f"{FAIL:6} {stage['stage']}: did not finish" for stage in found if not stage["finished"]
    ]


def summary(found: Sequence[Mapping[str, Any]]) -> str:
    """All stages as one markdown page."""
    parts = ["# Measured on one machine"]
    if any(stage["dry"] for stage in found):
        parts.append("**Dry run: no figure below is a measurement.**")
    for stage in found:
        where = ", ".join(f"{key} {value}" for key, value in stage["machine"].items())
        parts.append(f"## {stage['stage']}")
        parts.append(f"`{stage['command']}`, commit {stage['commit']}, {stage['date']}; {where}.")
        if not stage["finished"]:
            parts.append("**Did not finish.**")
        lines = [
            {
                "check": check["name"],
                "figure": check["figure"],
                "goal": " ".join(map(str, check["goal"] or [])),
                "result": check["result"],
                "note": check["note"],
            }
            for check in stage["checks"]
        ]
        parts.append(table(lines))
        for name, rows in stage["tables"].items():
            parts += [f"### {name}", table(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; columns are those of all rows, in the order they appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ""
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else str(plain(value)).replace("|", "/").replace("\n", " ")
