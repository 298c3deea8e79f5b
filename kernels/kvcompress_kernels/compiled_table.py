"""The table in kernels/compiled.md: one section per Triton version, one column per figure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

SEPARATOR = " \N{MIDDLE DOT} "
"""Separator between the figures of several architectures in one cell."""
ABSENT = "-"
"""Figure of a kernel that is not built for an architecture."""
HEAD = (
    "Each cell lists one number per architecture, in the order of the section's title. "
    '"Shared" is bytes per\nprogram. "Barriers", "per logit", "per number" (instructions for each '
    'logit, for each unpacked number) and\n"copies in flight" describe one iteration of the '
    "kernel's main loop.\n"
)
"""First lines of a table file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Resources of one build on one architecture.

    Args:
        registers: per thread.
        shared: bytes of shared memory per program.
        spills: instructions that load or store spilled registers.
        loads_16: 16-byte loads from global memory, through registers or straight to shared.
        tensor: tensor-core instructions.
        instructions: instructions in total.
        programs: programs that fit on one streaming multiprocessor at the same time.
        barriers: barriers in one iteration of the main loop.
        per_logit: instructions of the main loop for each logit; None if it computes no logits.
        per_number: instructions of the main loop for each unpacked number; None if it unpacks none.
        copies_in_flight: smallest number of asynchronous copies from global memory that the main
            loop leaves in flight when it waits for one; None if it does not wait.
    """

    registers: int
    shared: int
    spills: int
    loads_16: int
    tensor: int
    instructions: int
    programs: int
    barriers: int
    per_logit: float | None
    per_number: float | None
    copies_in_flight: int | None


HEADINGS = (
    "kernel",
    "registers",
    "shared",
    "spills",
    "16-byte loads",
    "tensor",
    "instructions",
    "programs per SM",
    "barriers",
    "per logit",
    "per number",
    "copies in flight",
)
NUMBERS = [field.name for field in fields(Compiled)]


def section(
    version: str, architectures: Sequence[int], rows: Mapping[str, Mapping[int, Compiled]]
) -> str:
    """Return the heading and Markdown table of one Triton version, with one row per build."""
    lines = [
        f"## Triton {version}: {SEPARATOR.join(f'sm_{sm}' for sm in architectures)}",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "| --- |" + " ---: |" * len(NUMBERS),
    ]
    for name, by_architecture in rows.items():
        cells = [name]
        for number in NUMBERS:
            figures = [
                _figure(by_architecture[sm], number) if sm in by_architecture else ABSENT
                for sm in architectures
            ]
            cells.append(SEPARATOR.join(figures))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _figure(kernel: Compiled, number: str) -> str:
    value = getattr(kernel, number)
    return "none" if value is None else str(value)


def sections(text: str) -> dict[str, str]:
    """Split the text of a table file into its sections, keyed by Triton version."""
    parts = re.split(r"^(?=## Triton )", text, flags=re.MULTILINE)
    matches = {re.match(r"## Triton ([\w.+]+):", part): part.strip() + "\n" for part in parts}
    return {match[1]: part for match, part in matches.items() if match}


def numbers(section: str) -> dict[tuple[str, int], tuple[str, ...]]:
    """Return the figures of a section, keyed by build name and architecture."""
    lines = section.splitlines()
    architectures = [int(sm) for sm in re.findall(r"sm_(\d+)", lines[0])] if lines else []
    table = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) != 1 + len(NUMBERS) or not (cells[1][0].isdigit() or SEPARATOR in cells[1]):
            # The line is a heading or not part of the table.
            continue
        columns = [cell.split(SEPARATOR) for cell in cells[1:]]
        for index, sm in enumerate(architectures):
            figures = tuple(column[index] for column in columns)
            if ABSENT not in figures:
                table[cells[0], sm] = figures
    return table


def differences(current_section: str, committed_section: str, *, report_missing: bool) -> list[str]:
    """List the differences between two sections of the same Triton version.

    Args:
        current_section: section of the current build.
        committed_section: section of the committed file.
        report_missing: also report builds that the current section lacks for one of its
            architectures.
    """
    if not committed_section:
        return ["the committed file has no table of this Triton version; write one with --write"]
    current, committed = numbers(current_section), numbers(committed_section)
    architectures = {sm for _, sm in current}
    missing = [key for key in committed if key not in current and key[1] in architectures]
    if not report_missing:
        missing = []
    return [
        f"{key[0]}, sm_{key[1]}: {', '.join(current.get(key, ['none']))} now, "
        f"{', '.join(committed.get(key, ['none']))} in the committed table"
        for key in [*current, *missing]
        if current.get(key) != committed.get(key)
    ]
