"""Tell the scheduler which aborted requests ended at a stop string.

vLLM's front end detects stop strings. It then aborts the request in the engine, as it also does
when the client hangs up, and an abort carries only request ids. We list an id twice to mean "ended
by a stop string". vLLM routes and aborts such a list like any other.
"""

from collections import Counter
from collections.abc import Iterable


def mark_stopped(request_ids: Iterable[str]) -> list[str]:
    """Return the request ids of an abort, each listed twice."""
    return [request_id for request_id in request_ids for _ in range(2)]


def stopped_ids(request_ids: Iterable[str]) -> frozenset[str]:
    """Return the request ids of an abort that `mark_stopped` has marked."""
    listed = Counter(request_ids)
    return frozenset(request_id for request_id, times in listed.items() if times > 1)
