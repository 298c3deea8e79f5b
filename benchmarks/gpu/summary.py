"""Summarise all stages of a folder, with failures first."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import FAIL, line, plain, read_stages
from benchmarks.gpu.stages import LIMITS
from vllm_kvcompress.compare.tables import markdown_table


def conclude(folder: Path, names: Sequence[str], faults: Sequence[str]) -> int:
    """Write the summary, print it, and return the exit status: 1 if anything failed.

    Args:
        names: the requested stages.
        faults: failures outside of the stages' checks, one line each.
    """
    found = read_stages(folder, names)
    faults = [*faults, *failures(found)]
    write(folder, faults)
    results = [check["result"] for stage in found for check in stage["checks"]]
    counts = ", ".join(f"{results.count(kind)} {kind}" for kind in dict.fromkeys(results))
    print("\n".join([f"{len(results)} checks: {counts}", *faults]), flush=True)
    return 1 if faults else 0


def write(folder: Path, faults: Sequence[str]) -> None:
    """Write `summary.md` and `summary.json` of all stages in the folder, in run order."""
    found = read_stages(folder, list(LIMITS))
    (folder / "summary.md").write_text(page(found, faults))
    summary = {"faults": list(faults), "stages": found}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def failures(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per failed check and per unfinished stage."""
    lines = [
        line(stage["stage"], check)
        for stage in found
        for check in stage["checks"]
        if check["result"] == FAIL
    ]
    return lines + [
        f"{FAIL:6} {stage['stage']}: did not finish" for stage in found if not stage["finished"]
    ]


def page(found: Sequence[Mapping[str, Any]], faults: Sequence[str]) -> str:
    """Return all stages as one Markdown page, failures first."""
    parts = ["# Measured on one machine"]
    if any(stage["dry"] for stage in found):
        parts.append("**Dry run: no figure below is a measurement.**")
    parts.append("\n".join(f"- {fault}" for fault in faults) or "Nothing failed.")
    for stage in found:
        machine = ", ".join(f"{key} {value}" for key, value in stage["machine"].items())
        parts.append(f"## {stage['stage']}")
        origin = f"commit {stage['commit']}, seed {stage['seed']}, {stage['date']}"
        parts.append(f"`{stage['command']}`, {origin}; {machine}.")
        if not stage["finished"]:
            parts.append("**Did not finish.**")
        goals = [" ".join(map(str, check["goal"] or [])) for check in stage["checks"]]
        checks = [
            {"check": check["name"], "figure": check["figure"], "goal": goal}
            | {"result": check["result"], "note": check["note"]}
            for check, goal in zip(stage["checks"], goals, strict=True)
        ]
        parts.append(table(checks))
        for name, rows in stage["tables"].items():
            parts += [f"### {name}", table(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with the columns of all rows, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    return markdown_table(columns, cells, text_columns=len(columns)).rstrip("\n")


def _cell(value: Any) -> str:
    return "" if value is None else str(plain(value)).replace("|", "/").replace("\n", " ")
