"""Waiting for what a real server's own metrics say."""

import time


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def idle(server):
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(server.metric(f"vllm:{name}") == 0 for name in names)
