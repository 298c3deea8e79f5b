"""Whether a container is healthy: the server answers, and what should be compressed is."""

from vllm_kvcompress.serving.exposition import PREFIX, Host, Metrics, Unreachable


def health(
    host: Host, *, after: int = 5, expect: bool | None = None, timeout_s: float = 5.0
) -> tuple[bool, str]:
    """Ask a server once.

    Args:
        after: prompts that an engine must have planned to compress before it is judged by whether
            it did.
        expect: whether compression must be on; None where it may be either.

    Returns:
        Whether it is healthy, and one sentence.
    """
    try:
        status, _ = host.get("/health", timeout_s)
        if status != 200:
            return False, f"{host.url}/health answered {status}."
        if expect is False:
            return True, "The server answers; whether it compresses was not asked."
        return _compresses(host.metrics(timeout_s), after, expect)
    except Unreachable as e:
        return False, f"{e}."


def _compresses(metrics: Metrics, after: int, expect: bool | None) -> tuple[bool, str]:
    info = metrics.info
    if info is None:
        if expect:
            return False, (
                "Compression is expected, and this server runs without it; start it with"
                " --kv-compress, and see in its log whether the plugin was loaded."
            )
        return True, "The server answers; compression is off."
    planned = metrics.by_engine(f"{PREFIX}planned_requests_total")
    done = metrics.by_engine(f"{PREFIX}requests_total")
    for engine, count in planned.items():
        if count >= after and not done.get(engine):
            return False, (
                f"Engine {engine or 0} planned to compress {count:.0f} prompts and compressed none:"
                " compression does not run; see its log, and kvcompress doctor."
            )
    method = info.get("method", "on")
    return True, (
        f"The server answers; {method} compressed {sum(done.values()):.0f} of"
        f" {sum(planned.values()):.0f} planned prompts."
    )
