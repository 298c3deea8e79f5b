"""Exceptions of this package.

KVCompressError
+ ConfigError      a setting is wrong; the message names the key and the fix
  + OverrideError  a request's setting is wrong or not allowed
+ VllmHookError    the installed vLLM is not supported; nothing was changed
"""


class KVCompressError(Exception):
    """Base class of all exceptions of this package."""


class ConfigError(KVCompressError, ValueError):
    """A setting is unknown, out of range, or in conflict with another setting."""


class OverrideError(ConfigError):
    """A request's compression settings are unknown, invalid or not allowed on this server.

    Args:
        reason: "not_allowed", "out_of_bounds", "invalid" or "too_long".
        message: one sentence with the rule, the value received and the fix.
        parameter: field of the request that is wrong.
    """

    def __init__(self, reason: str, message: str, parameter: str = "vllm_xargs") -> None:
        super().__init__(message)
        self.reason = reason
        self.parameter = parameter

    @classmethod
    def invalid(cls, message: str) -> "OverrideError":
        """Return the error for a value that is wrong on any server."""
        return cls("invalid", message)

    @classmethod
    def not_allowed(cls, message: str, parameter: str = "vllm_xargs") -> "OverrideError":
        """Return the error for a setting that this server does not let requests choose."""
        return cls("not_allowed", message, parameter)

    @classmethod
    def out_of_bounds(cls, message: str) -> "OverrideError":
        """Return the error for a value above or below what this server allows."""
        return cls("out_of_bounds", message)


class VllmHookError(KVCompressError, RuntimeError):
    """A vLLM name that this package uses has changed, is missing or cannot be imported.

    Args:
        problem: what this package needs and what it found.
        fix: the fix; empty if `problem` includes it.
    """

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(f"{problem}; {fix}" if fix else problem)
        self.problem, self.fix = problem, fix


SeamError = VllmHookError
"""The old name of `VllmHookError`, for one release."""
