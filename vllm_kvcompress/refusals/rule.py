"""A rule of refusal: when it applies, why, and what to do instead."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm_kvcompress.errors import ConfigError

Facts = TypeVar("Facts")
WITHOUT = "serve this model without --kv-compress"
UNTESTED = "not tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[Facts]):
    """Refuses settings, a model or a server.

    Args:
        name: what is refused, in Markdown, for docs/compatibility.md; empty if that page does not
            list the rule.
        when: returns a true value for facts that the rule refuses; `{found}` in the texts.
        reason, fix: format strings with `{found}` and `{it}`, the facts. `fix` is empty if the
            reason says what to write.
        because: shorter reason for docs/compatibility.md; empty to use `reason`.
        error: returns the exception to raise with the text.
    """

    when: Callable[[Facts], Any]
    reason: str
    fix: str = WITHOUT
    name: str = ""
    because: str = ""
    error: Callable[[str], Exception] = ConfigError

    def refusal(self, facts: Facts) -> str | None:
        """Return the reason and the fix as one sentence; None if the rule does not apply."""
        if not (found := self.when(facts)):
            return None
        text = f"{self.reason}; {self.fix}" if self.fix else self.reason
        return text.format(found=found, it=facts)


def refusal(rules: Iterable[Rule[Facts]], facts: Facts) -> str | None:
    """Return the sentence of the first rule that applies; None if none does."""
    return next(filter(None, (rule.refusal(facts) for rule in rules)), None)


def refuse(rules: Iterable[Rule[Facts]], facts: Facts, before: str = "") -> None:
    """Raise the error of the first rule that applies, with `before` and the rule's sentence."""
    for rule in rules:
        if (reason := rule.refusal(facts)) is not None:
            raise rule.error(f"{before}{reason}")
