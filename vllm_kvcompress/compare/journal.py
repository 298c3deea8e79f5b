"""What a run has found, a line each as it comes, so that it can go on where it ended."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.outcome import OUTCOME, Outcome
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.errors import ConfigError

_VERSION = 5
RUN, LINES, TEXTS = "run.json", "journal.jsonl", "texts.jsonl"


class Journal:
    """The files of a run in its folder.

    ``run.json`` says what the run is about, ``journal.jsonl`` has an `Outcome` in each line, and
    ``texts.jsonl`` what was asked and answered, where that is to be kept. A line that was cut off
    is taken away; whatever it was about is asked again. Files have no buffer: what a full disk
    did not take must not be tried again when they are closed.

    Every method that writes raises ConfigError where the disk does not take it.
    """

    def __init__(self, folder: Path, *, keep_text: bool) -> None:
        """Take the folder for this process alone.

        Raises:
            ConfigError: it cannot be written, or another run writes there.
        """
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines = (folder / LINES).open("a+b", buffering=0)
            self._texts = _private(folder / TEXTS) if keep_text else None
        except OSError as e:
            raise ConfigError(f"--out {folder} must be a folder to write in ({e})") from None
        try:
            fcntl.flock(self._lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--out {folder} is in use by another run; wait for it, or give another folder"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        if self._texts is not None:
            self._texts.close()

    def open(
        self,
        settings: Mapping[str, Any],
        cells: Sequence[Cell],
        baselines: Sequence[Cell] = (),
    ) -> list[Outcome]:
        """Begin a run, or go on with the one that is there; returns what it has found.

        Args:
            settings: what must be the same for figures to be put together.
            cells: what is to be compared; may hold more than before.
            baselines: what stands beside it; they may come and go.

        Raises:
            ConfigError: the folder has a run with other settings or cells, or a broken line.
        """
        names = [str(cell) for cell in cells]
        run = self._run()
        if run is None and self._lines.tell():
            raise ConfigError(f"--out {self.folder} has {LINES} and no {RUN}; give another folder")
        if run is None:
            self._save(
                {"version": _VERSION, "settings": dict(settings), "cells": names, "compressed": 0}
            )
            return []
        if run.get("version") != _VERSION:
            raise ConfigError(f"--out {self.folder} is of another version; give another folder")
        earlier = run["settings"]
        other = sorted(
            name
            for name in {*earlier, *settings}
            if json.dumps(earlier.get(name)) != json.dumps(settings.get(name))
        )
        if other:
            raise ConfigError(
                f"--out {self.folder} has a run with another {', '.join(other)}; give another"
                " folder, or the settings of that run to go on with it"
            )
        present = {*names, *map(str, baselines)}
        if missing := [name for name in run["cells"] if name not in present]:
            raise ConfigError(
                f"--out {self.folder} has a run with {', '.join(missing)} as well; name the methods"
                " and budgets of that run again, and any more, or give another folder"
            )
        self._save(run | {"cells": names})
        return self.outcomes()

    def add(self, outcome: Outcome) -> None:
        """Write one line, down to the disk."""
        with self._writing():
            _write_all(self._lines, OUTCOME.dump_json(outcome) + b"\n")
            os.fsync(self._lines.fileno())

    @property
    def counted(self) -> int | None:
        """Prompts that the server compressed meanwhile, as it counts; None where unknown."""
        counted: int | None = (self._run() or {}).get("compressed")
        return counted

    def forget_count(self) -> int | None:
        """`counted`, which is unknown from now on: a run that is killed cannot say it."""
        counted = self.counted
        self.count(None)
        return counted

    def count(self, compressed: int | None) -> None:
        """Set `counted`."""
        self._save((self._run() or {}) | {"compressed": compressed})

    def add_text(self, item: Item, key: str, cell: Cell, text: str) -> None:
        """Keep what was asked and answered, where that was wished for."""
        if self._texts is None:
            return
        kept = {
            "key": key,
            "name": item.name,
            "cell": str(cell),
            "messages": item.messages,
            "answers": item.answers,
            "rules": item.obeyed(text),
            "text": text,
        }
        line = json.dumps(kept, ensure_ascii=False) + "\n"
        with self._writing():
            # Half a surrogate pair, which JSON may have and UTF-8 may not, as JSON's escape.
            _write_all(self._texts, line.encode(errors="backslashreplace"))

    def _run(self) -> dict[str, Any] | None:
        path = self.folder / RUN
        try:
            run: dict[str, Any] = json.loads(path.read_text())
            if not isinstance(run, dict):
                raise ValueError("it must be an object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            raise ConfigError(f"{path} is broken ({e}); give another --out") from None
        return run

    def _save(self, run: Mapping[str, Any]) -> None:
        path = self.folder / RUN
        scratch = path.with_suffix(".new")
        with self._writing():
            scratch.write_text(json.dumps(run, indent=2) + "\n")
            scratch.replace(path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise ConfigError(
                f"--out {self.folder} cannot be written ({e}); make room there, or give another"
                " folder"
            ) from None

    def outcomes(self) -> list[Outcome]:
        """All lines that are whole.

        Raises:
            ConfigError: one before the last is broken.
        """
        self._lines.seek(0)
        found: list[Outcome] = []
        whole = 0
        lines = self._lines.read().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it has no end")
                found.append(OUTCOME.validate_json(line))
            except (ValidationError, ValueError) as e:
                if number == len(lines):
                    break
                reason = str(e).splitlines()[0]
                raise ConfigError(
                    f"{self.folder / LINES}, line {number} is broken ({reason}); give another --out"
                ) from None
            whole += len(line)
        self._lines.truncate(whole)
        return found


def _write_all(file: FileIO, line: bytes) -> None:
    """Write a line; a disk that is nearly full may take it in parts."""
    while line:
        line = line[file.write(line) :]


def _private(path: Path) -> FileIO:
    """A file to write on that nobody else may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return FileIO(descriptor, "a")
