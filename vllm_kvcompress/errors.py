"""Everything this package raises on purpose.

KVCompressError
+ ConfigError      the user's settings are wrong; the message names the key and a fix
  + OverrideError  what one request asks for is wrong or not allowed
+ VllmHookError        this vLLM does not look the way we need; nothing was changed
"""


class KVCompressError(Exception):
    """Base class; catch this to catch all of ours."""


class ConfigError(KVCompressError, ValueError):
    """A setting is unknown, out of range, or in conflict with another."""


class OverrideError(ConfigError):
    """A request asks for something that it may not have, or that does not exist.

    Args:
        reason: "not_allowed", "out_of_bounds" or "invalid".
        message: what must hold, what the request has, and what to do, in one sentence.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class VllmHookError(KVCompressError, RuntimeError):
    """An extension point of the running vLLM differs from what we need, or cannot be imported.

    Args:
        problem: what must hold and what was found.
        cure: what to do, unless `problem` says it.
    """

    def __init__(self, problem: str, cure: str = "") -> None:
        super().__init__(f"{problem}; {cure}" if cure else problem)
        self.problem, self.cure = problem, cure
