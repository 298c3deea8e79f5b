"""Files of a comparison run, written result by result so that a run can be resumed."""

import fcntl
import json
import os
import re
import stat
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

_VERSION = 7
_CONTROLS = re.compile(r"[\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal would obey and that JSON does not escape."""
RUN, LINES, TEXTS = "run.json", "journal.jsonl", "texts.jsonl"


class Journal:
    """The files of a run in its folder.

    ``run.json`` holds the settings of the run, ``journal.jsonl`` one `Outcome` per line, and
    ``texts.jsonl`` prompts and outputs if they are kept. An incomplete last line is removed and
    its prompt is run again. Files are unbuffered: a buffered write that failed on a full disk
    would be tried again when the file is closed.

    Every method that writes raises ConfigError if the write fails.
    """

    def __init__(self, folder: Path, *, keep_text: bool) -> None:
        """Create the folder if needed and lock it for this process.

        Raises:
            ConfigError: The folder cannot be written, another run holds the lock, or others could
                read the texts.
        """
        self.folder = folder
        self._run: dict[str, Any] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._texts = _open_private(folder / TEXTS) if keep_text else None
            self._lines = (folder / LINES).open("a+b", buffering=0)
        except OSError as e:
            raise ConfigError(f"--out {folder} must be a writable folder ({e})") from None
        try:
            fcntl.flock(self._lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--out {folder} is in use by another run; wait for it, or use another folder"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        if self._texts is not None:
            self._texts.close()

    def open(
        self, settings: Mapping[str, Any], cells: Sequence[Cell], baselines: Sequence[Cell] = ()
    ) -> list[Outcome]:
        """Start a run, or resume the one in the folder, and return its outcomes so far.

        Args:
            settings: must equal those of the run in the folder.
            cells: must include every cell of the run in the folder.
            baselines: may differ from those of the run in the folder.

        Raises:
            ConfigError: The folder holds a run with other settings or cells, or a broken line.
        """
        names = [str(cell) for cell in cells]
        run = self._earlier_run()
        if run is None:
            if self._lines.tell():
                raise ConfigError(
                    f"--out {self.folder} has {LINES} but no {RUN}; use another folder"
                )
            self._save(version=_VERSION, settings=settings, cells=names, compressed=0)
            return []
        if run.get("version") != _VERSION:
            raise ConfigError(
                f"--out {self.folder} was written by another version; use another folder"
            )
        earlier, settings = run["settings"], json.loads(json.dumps(settings))
        names_of_settings = sorted({*earlier, *settings})
        if changed := [n for n in names_of_settings if earlier.get(n) != settings.get(n)]:
            raise ConfigError(
                f"--out {self.folder} holds a run with different {', '.join(changed)}; use another"
                " folder, or repeat the settings of that run to resume it"
            )
        present = {*names, *map(str, baselines)}
        if missing := [name for name in run["cells"] if name not in present]:
            raise ConfigError(
                f"--out {self.folder} holds a run that also has {', '.join(missing)}; repeat the"
                " methods and budgets of that run and add any others, or use another folder"
            )
        self._save(**run | {"cells": names})
        return self.outcomes()

    def add(self, outcome: Outcome) -> None:
        """Append one outcome and sync it to disk."""
        with self._writing():
            _write_all(self._lines, OUTCOME.dump_json(outcome) + b"\n")
            os.fsync(self._lines.fileno())

    @property
    def keeps_text(self) -> bool:
        """Return whether this run keeps prompts and outputs."""
        return self._texts is not None

    @property
    def compressed_count(self) -> int | None:
        """Return how many prompts the server compressed during the run, or None if unknown."""
        count: int | None = self._run.get("compressed")
        return count

    def set_compressed_count(self, count: int | None) -> None:
        """Store `compressed_count`."""
        self._save(compressed=count)

    def add_text(self, item: Item, key: str, cell: Cell, text: str) -> None:
        """Append a prompt and its output text if this run keeps texts."""
        if self._texts is None:
            return
        entry = {
            "key": key,
            "name": item.name,
            "cell": str(cell),
            "messages": item.messages,
            "answers": item.answers,
            "rules": item.obeyed(text),
            "text": text,
        }
        line = json.dumps(entry, ensure_ascii=False) + "\n"
        line = _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
        with self._writing():
            # UTF-8 cannot encode a lone surrogate; backslashreplace writes it as a JSON escape.
            _write_all(self._texts, line.encode(errors="backslashreplace"))

    def _earlier_run(self) -> dict[str, Any] | None:
        path = self.folder / RUN
        try:
            run: dict[str, Any] = json.loads(path.read_text())
            if not isinstance(run, dict):
                raise ValueError("it must be an object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            raise ConfigError(f"{path} is broken ({e}); use another --out") from None
        return run

    def _save(self, **changes: Any) -> None:
        """Write ``run.json`` with these entries changed."""
        run = self._run | changes
        with self._writing():
            replace_file(self.folder / RUN, f"{json.dumps(run, indent=2)}\n".encode())
        self._run = run

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise ConfigError(
                f"--out {self.folder} cannot be written ({e}); free some disk space, or use"
                " another folder"
            ) from None

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of all complete lines, and remove an incomplete last line.

        Raises:
            ConfigError: A line before the last is broken.
        """
        self._lines.seek(0)
        found: list[Outcome] = []
        valid_bytes = 0
        lines = self._lines.read().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it does not end with a newline")
                found.append(OUTCOME.validate_json(line))
            except (ValidationError, ValueError) as e:
                if number == len(lines):
                    break
                reason = str(e).splitlines()[0]
                raise ConfigError(
                    f"{self.folder / LINES}, line {number} is broken ({reason}); use another --out"
                ) from None
            valid_bytes += len(line)
        self._lines.truncate(valid_bytes)
        return found


def _write_all(file: FileIO, line: bytes) -> None:
    """Write all of `line`: an unbuffered write may write only a part of it."""
    while line:
        line = line[file.write(line) :]


def replace_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Put a new file with `data` at `path`. A symbolic link there is replaced, not followed.

    Args:
        private: only the owner can read the file.
    """
    scratch = path.with_name(f"{path.name}.new")
    scratch.unlink(missing_ok=True)
    try:
        mode = 0o600 if private else 0o666
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _open_private(path: Path) -> FileIO:
    """Open a file for appending that only its owner can read.

    Raises:
        ConfigError: The path exists, and is not a regular file that only this user can read.
    """
    # Without O_NONBLOCK, a pipe would wait for its reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = FileIO(os.open(path, flags, 0o600), "a")
    except OSError:
        if os.path.lexists(path):
            _require_private(path, path.lstat())
        raise
    try:
        _require_private(path, os.fstat(file.fileno()))
    except ConfigError:
        file.close()
        raise
    return file


def _require_private(path: Path, status: os.stat_result) -> None:
    fix = "remove it, or use another --out"
    if stat.S_ISLNK(status.st_mode):
        found = "a symbolic link"
    elif not stat.S_ISREG(status.st_mode):
        found = "something else"
    elif status.st_uid != os.geteuid():
        found = f"a file of user {status.st_uid}"
    elif status.st_mode & 0o077:
        found = f"mode {stat.S_IMODE(status.st_mode):04o}"
        fix = f"run chmod 600 {path}, or use another --out"
    else:
        return
    raise ConfigError(
        f"--keep-text saves prompts, so {path} must be a regular file that only you can read, got"
        f" {found}; {fix}"
    )
