"""Parse Dockerfiles, as far as the files in docker/ need it."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """One build stage, from a FROM instruction on.

    Args:
        run: commands of RUN instructions, without mounts.
        copy: sources and target of each COPY, without options.
        env: variables of ENV, in order.
        rest: text of other instructions by name; the last one wins, as in an image.
    """

    run: list[str] = field(default_factory=list)
    copy: list[list[str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    rest: dict[str, str] = field(default_factory=dict)

    def command(self, name: str) -> list[str]:
        """Return the exec form of ENTRYPOINT or of HEALTHCHECK's CMD; other forms raise."""
        arguments: list[str] = json.loads(self.rest[name][self.rest[name].index("[") :])
        return arguments


def stages(path: Path) -> list[Stage]:
    """Return the stages of a Dockerfile; the last one is the image."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        name, _, text = line.strip().partition(" ")
        if name == "FROM":
            found.append(Stage())
        if not name or not found:
            continue
        stage, arguments = found[-1], re.sub(r"--\S+\s+", "", text).strip()
        if name == "RUN":
            stage.run.append(arguments)
        elif name == "COPY":
            stage.copy.append(arguments.split())
        elif name == "ENV":
            stage.env.update(part.split("=", 1) for part in shlex.split(text))
        else:
            stage.rest[name] = text
    return found
