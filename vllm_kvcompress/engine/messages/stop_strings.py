"""Tell the scheduler which aborted requests a stop string has ended.

vLLM's front end finds stop strings. It then aborts the request in the engine, as it does when the
client hangs up, and an abort carries request ids only. An id that is listed twice means a stop
string. vLLM routes and ends such a list like any other.
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
