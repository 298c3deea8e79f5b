"""``kvcompress health``: check that a server responds and that its compression works."""

from vllm_kvcompress.serving.exposition import PREFIX, Host, Metrics, Unreachable, printable


def health(
    host: Host, *, after: int = 5, expect: bool | None = None, timeout_s: float = 5.0
) -> tuple[bool, str]:
    """Check a server once.

    Args:
        after: planned prompts from which an engine without any compressed prompt is unhealthy.
        expect: True if compression must be on, False to skip the compression check, None if
            compression may be on or off.
        timeout_s: seconds to wait for each page.

    Returns:
        Whether the server is healthy, and one sentence that says why.
    """
    try:
        status, _ = host.get("/health", timeout_s)
        if status != 200:
            return False, f"{host.url}/health returned {status}."
        if expect is False:
            return True, "The server responds; compression was not checked."
        return _check_compression(host.metrics(timeout_s), after, expect)
    except Unreachable as e:
        return False, f"{e}."


def _check_compression(metrics: Metrics, after: int, expect: bool | None) -> tuple[bool, str]:
    info = metrics.info
    if info is None:
        if expect:
            return False, (
                "Compression is expected, but this server runs without it;"
                f" {metrics.how_to_turn_on}."
            )
        return True, "The server responds; compression is off."
    planned = metrics.by_engine(f"{PREFIX}planned_requests_total")
    compressed = metrics.by_engine(f"{PREFIX}requests_total")
    for engine, count in planned.items():
        if count >= after and not compressed.get(engine):
            return False, (
                f"Engine {printable(engine, 60) or 0} planned to compress {count:.0f} prompts but"
                " compressed none; check its log, and run kvcompress doctor."
            )
    method = printable(info.get("method", "on"), 60)
    return True, (
        f"The server responds; {method} compressed {sum(compressed.values()):.0f} of"
        f" {sum(planned.values()):.0f} planned prompts."
    )
