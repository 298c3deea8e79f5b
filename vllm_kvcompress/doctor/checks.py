"""What an operator's command found out: named checks, and what they amount to."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Args:
        name: what it is about, in one or two words.
        ok: whether it is as it must be.
        detail: what was found, in one sentence or a few figures; where not ok, what to do.
    """

    name: str
    ok: bool
    detail: str


Tell = Callable[[Check], None]


class Failed(Exception):
    """A check failed that says all there is to say: those behind it would say the same."""


def require(tell: Tell, check: Check) -> None:
    """Tell of a check.

    Raises:
        Failed: it is not ok.
    """
    tell(check)
    if not check.ok:
        raise Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one command, in the order they were made.

    Args:
        kept: where the prompt's kept tokens lie, as `KeptMap.to_json` has it; None unless asked
            for.
    """

    checks: Sequence[Check]
    kept: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def status(self) -> int:
        """The exit status: 0 when every check is ok, else 1."""
        return 0 if self.ok else 1

    def to_json(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        payload: dict[str, Any] = {"ok": self.ok, "checks": checks}
        return payload if self.kept is None else {**payload, "kept": self.kept}
