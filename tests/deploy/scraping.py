"""Run a real Prometheus that scrapes a real server, and query it."""

import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from vllm_kvcompress.serving.process import free_port

METRIC = re.compile(r"\b(?:vllm:\w+|up)\b")


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus.

    Args:
        at: time of all queries in seconds since the epoch; None means now.
    """

    url: str
    at: float | None = None

    def get(self, path: str, **parameters: Any) -> Any:
        """Return ``data`` of a response; an error response raises AssertionError."""
        response = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=300).json()
        assert response["status"] == "success", f"{parameters}: {response['error']}"
        return response["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        moment = {} if self.at is None else {"time": self.at}
        found: list[dict[str, Any]] = self.get("query", query=expression, **moment)["result"]
        return found

    def names(self) -> set[str]:
        return set(self.get("label/__name__/values"))

    def wait(self, expression: str, deadline_s: float = 300) -> None:
        """Wait until `expression` has a result."""
        end = time.monotonic() + deadline_s
        while not self.query(expression):
            assert time.monotonic() < end, f"{expression}: no result within {deadline_s} s"
            time.sleep(0.2)


@contextmanager
def prometheus(
    command: str,
    folder: Path,
    *,
    target: str,
    job: str,
    labels: Mapping[str, str],
    rules: Mapping[str, Any],
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes `target` (host:port) every second as `job` with `labels`."""
    (folder / "rules.yml").write_text(yaml.safe_dump(dict(rules)))
    targets = {"targets": [target], "labels": dict(labels)}
    scrape = {"job_name": job, "static_configs": [targets]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [scrape],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    arguments = [
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([command, *arguments], stdout=log, stderr=log)
    running = Prometheus(url=f"http://127.0.0.1:{port}")
    try:
        _wait_ready(running.url, process, folder / "log")
        yield running
    finally:
        process.terminate()
        process.wait(300)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/-/ready", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"Prometheus did not become ready:\n{log.read_text()[-2000:]}")


def panels(dashboard: Path) -> list[tuple[str, str]]:
    """Return title and query of all panels, with Grafana's variables for "All" and ten minutes."""
    found: Sequence[Any] = json.loads(dashboard.read_text())["panels"]
    variables = {"$__rate_interval": "10m", "$__range": "10m", "$model": ".*", "$pod": ".*"}
    queries = [(p["title"], t["expr"]) for p in found for t in p.get("targets", [])]
    for name, value in variables.items():
        queries = [(title, query.replace(name, value)) for title, query in queries]
    return queries
