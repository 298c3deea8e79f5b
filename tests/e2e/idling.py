"""Waiting for what a real server's own metrics say."""

import time
from collections import Counter

import httpx
from prometheus_client.parser import text_string_to_metric_families


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def idle(server):
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(server.metric(f"vllm:{name}") == 0 for name in names)


def scrape(server, label=None):
    """All metrics of one scrape: sums by name, or by name and the value of one label."""
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    sums = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name if label is None else (sample.name, sample.labels.get(label))
            sums[name] += sample.value
    return sums


def received(server):
    """Requests that the engine has or has answered, since it started."""
    names = ("num_requests_running", "num_requests_waiting", "request_success_total")
    found = scrape(server)
    return sum(found[f"vllm:{name}"] for name in names)
