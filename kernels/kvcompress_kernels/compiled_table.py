"""The table of compiled kernels: a section for each Triton, a column for each figure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

BETWEEN = " \N{MIDDLE DOT} "
"""Stands between the architectures' figures within a cell."""
ABSENT = "-"
"""The figure of a kernel that is not built for an architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One build for one architecture.

    Args:
        registers: per thread.
        shared: bytes of shared memory per program.
        spills: instructions that load or store spilled registers.
        loads_16: 16-byte loads from global memory, through registers or straight to shared.
        tensor: tensor-core instructions.
        instructions: all of them.
    """

    registers: int
    shared: int
    spills: int
    loads_16: int
    tensor: int
    instructions: int


NUMBERS = [field.name for field in fields(Compiled)]


def section(
    version: str, architectures: Sequence[int], rows: Mapping[str, Mapping[int, Compiled]]
) -> str:
    """Heading and markdown table of what one Triton makes: a row per build."""
    lines = [
        f"## Triton {version}: {BETWEEN.join(f'sm_{sm}' for sm in architectures)}",
        "",
        "| kernel | registers | shared | spills | 16-byte loads | tensor | instructions |",
        "| --- |" + " ---: |" * len(NUMBERS),
    ]
    for name, by_architecture in rows.items():
        cells = [name]
        for number in NUMBERS:
            figures = [
                str(getattr(by_architecture[sm], number)) if sm in by_architecture else ABSENT
                for sm in architectures
            ]
            cells.append(BETWEEN.join(figures))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def sections(text: str) -> dict[str, str]:
    """A file's sections by the version of Triton."""
    parts = re.split(r"^(?=## Triton )", text, flags=re.MULTILINE)
    matches = {re.match(r"## Triton ([\w.+]+):", part): part.strip() + "\n" for part in parts}
    return {match[1]: part for match, part in matches.items() if match}


def numbers(section: str) -> dict[tuple[str, int], tuple[str, ...]]:
    """A section's figures by build and architecture."""
    lines = section.splitlines()
    architectures = [int(sm) for sm in re.findall(r"sm_(\d+)", lines[0])] if lines else []
    table = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) != 1 + len(NUMBERS) or not (cells[1][0].isdigit() or BETWEEN in cells[1]):
            # This line is a heading, or none of the table's.
            continue
        each = [cell.split(BETWEEN) for cell in cells[1:]]
        for at, sm in enumerate(architectures):
            figures = tuple(cell[at] for cell in each)
            if ABSENT not in figures:
                table[cells[0], sm] = figures
    return table


def differences(now: str, then: str, *, gone: bool) -> list[str]:
    """Where two sections by the same Triton differ.

    Args:
        gone: whether what `now` lacks counts, of the architectures that it has.
    """
    if not then:
        return ["the committed file has no table by this Triton; write one with --write"]
    current, committed = numbers(now), numbers(then)
    architectures = {sm for _, sm in current}
    lost = (
        [key for key in committed if key not in current and key[1] in architectures] if gone else []
    )
    return [
        f"{key[0]}, sm_{key[1]}: {', '.join(current.get(key, ['none']))} now, "
        f"{', '.join(committed.get(key, ['none']))} in the committed table"
        for key in [*current, *lost]
        if current.get(key) != committed.get(key)
    ]
