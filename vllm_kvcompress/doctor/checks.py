"""Results of `kvcompress doctor`: named checks and the report that combines them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check.

    Args:
        name: its subject, in one or two words.
        ok: whether it passed.
        detail: the finding in one sentence or a few numbers; if it failed, also the fix.
    """

    name: str
    ok: bool
    detail: str


CheckCallback = Callable[[Check], None]


class Failed(Exception):
    """A check failed, and the checks after it would only fail for the same reason."""


def require(on_check: CheckCallback, check: Check) -> None:
    """Report a check through `on_check`.

    Raises:
        Failed: the check did not pass.
    """
    on_check(check)
    if not check.ok:
        raise Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one command, in order.

    Args:
        checks: the checks.
        kept: the prompt's kept tokens in the format of `KeptMap.to_json`; None unless requested.
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
