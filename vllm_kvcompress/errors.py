"""Everything this package raises on purpose.

KVCompressError
+ ConfigError      the user's settings are wrong; the message names the key and a fix
+ SeamError        this vLLM does not look the way we need; nothing was changed
"""


class KVCompressError(Exception):
    """Base class; catch this to catch all of ours."""


class ConfigError(KVCompressError, ValueError):
    """A setting is unknown, out of range, or in conflict with another."""


class SeamError(KVCompressError, RuntimeError):
    """An extension point of the running vLLM differs from what we need."""
