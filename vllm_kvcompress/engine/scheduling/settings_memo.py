"""Cache of results that depend on a request's settings."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from vllm_kvcompress.settings.config import CompressionConfig

Result = TypeVar("Result")


class SettingsMemo(Generic[Result]):
    """Calls a function once per settings and arguments, and caches the latest results.

    The cache compares settings by identity, because equal settings may differ in the fields set.

    Args:
        function: depends on nothing but its arguments.
        max_results: maximum number of cached results.
    """

    def __init__(self, function: Callable[..., Result], max_results: int = 64) -> None:
        self._function, self._max_results = function, max_results
        # The settings are stored too, so that no other object gets their id.
        self._results: dict[tuple[Hashable, ...], tuple[CompressionConfig, Result]] = {}

    def __call__(self, settings: CompressionConfig, *args: Hashable) -> Result:
        key = (id(settings), *args)
        known = self._results.get(key)
        if known is None:
            known = self._results[key] = (settings, self._function(settings, *args))
            if len(self._results) > self._max_results:
                del self._results[next(iter(self._results))]
        return known[1]
