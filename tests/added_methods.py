"""Packages that add methods by entry point, installed into a folder without pip."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_kvcompress.methods import registry
from vllm_kvcompress.methods.entry_points import GROUP, method_entries

PACKAGE = "kvcompress-evens"
ENTRIES = {"scorer.evens": "kvcompress_evens:Evens", "preset.evens": "kvcompress_evens:PRESET"}
EVENS = """
import os
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.preset import Preset

SEEN = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evens:
    '''Rank every `step`-th slot first, starting with slot 0.'''

    reads: ClassVar[Reads] = Reads.NOTHING
    needs_whole_prompt: ClassVar[str] = ""

    step: int = 2

    def score(self, stats):
        if stats.past > 100 and os.getpid() not in SEEN:
            SEEN.add(os.getpid())
            os.write(1, f"evens scores in process {os.getpid()}\\n".encode())
        slot = torch.arange(stats.past, device=stats.device)
        return (slot % self.step == 0).float().expand(stats.num_kv_heads, -1)


PRESET = Preset(allocator="uniform", scorer="evens", window=4)
"""
"""Scorer `evens`, and a preset of the same name. Each process writes its id when it scores."""


def write_package(
    folder: Path,
    entries: Mapping[str, str] = ENTRIES,
    code: str = EVENS,
    name: str = PACKAGE,
    version: str = "1.0",
) -> Path:
    """Write an installed package with one module into a folder, and return the folder.

    Args:
        entries: entry points of our group by name.
        code: the module's text. The module is called as the package, with underscores.
    """
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[{GROUP}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


@contextmanager
def installed(*folders: Path) -> Iterator[None]:
    """Let this process find the packages in the folders; afterwards it has never seen them."""
    modules = {path.stem for folder in folders for path in folder.glob("*.py")}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for folder in folders:
                patch.syspath_prepend(str(folder))
            forget_added_methods()
            yield
    finally:
        forget_added_methods()
        for module in modules & sys.modules.keys():
            del sys.modules[module]


def forget_added_methods() -> None:
    """Put this process into the state before it looked for methods of other packages."""
    registry._started.clear()
    method_entries.cache_clear()
    for kind, table in registry.TABLES.items():
        for name in table.data.keys() - {*registry.BUILT_IN[kind]}:
            del table.data[name]
