"""Read a server's metrics, and wait for them to reach a state."""

import time
from collections import Counter

import httpx
from prometheus_client.parser import text_string_to_metric_families


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition was not met within {seconds} s"
        time.sleep(0.1)


def idle(server):
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(server.metric(f"vllm:{name}") == 0 for name in names)


def scrape(server, label=None):
    """Return the metrics of one scrape, summed by name or by (name, value of `label`)."""
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    sums = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name if label is None else (sample.name, sample.labels.get(label))
            sums[name] += sample.value
    return sums


def received(server):
    """Return the number of requests that the engine has received since it started."""
    names = ("num_requests_running", "num_requests_waiting", "request_success_total")
    metrics = scrape(server)
    return sum(metrics[f"vllm:{name}"] for name in names)
