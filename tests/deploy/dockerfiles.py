"""A Dockerfile as data: enough of the format for the files in docker/."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """What one FROM begins.

    Args:
        run: commands of RUN without their mounts.
        copy: sources and target of each COPY, without its options.
        env: ENV, in order.
        rest: every other instruction's text, by its name; the last one wins, as in an image.
    """

    run: list[str] = field(default_factory=list)
    copy: list[list[str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    rest: dict[str, str] = field(default_factory=dict)

    def command(self, name: str) -> list[str]:
        """The exec form of ENTRYPOINT or of HEALTHCHECK's CMD; raises if it is another form."""
        found: list[str] = json.loads(self.rest[name][self.rest[name].index("[") :])
        return found


def stages(path: Path) -> list[Stage]:
    """The stages of the Dockerfile at `path`, the image itself last."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        name, _, text = line.strip().partition(" ")
        if name == "FROM":
            found.append(Stage())
        if not name or not found:
            continue
        stage, plain = found[-1], re.sub(r"--\S+\s+", "", text).strip()
        if name == "RUN":
            stage.run.append(plain)
        elif name == "COPY":
            stage.copy.append(plain.split())
        elif name == "ENV":
            stage.env.update(part.split("=", 1) for part in shlex.split(text))
        else:
            stage.rest[name] = text
    return found
