"""A compressed server under a real Prometheus: dashboard, rules and autoscaler ask what it has."""

import dataclasses
import math
import time

import pytest
import yaml
from openai import BadRequestError, OpenAI

from manifests import MONITORING, ROOT, alerts, rules
from scraping import METRIC, panels, prometheus
from vllm_kvcompress.serving.process import serve
from vllm_kvcompress.serving.text import long_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FLAGS = [
    "--enforce-eager",
    "--max-model-len",
    "4096",
    "--served-model-name",
    "demo",
    "--dtype",
    "float32",  # the faster one where a CPU has no instructions for bfloat16
    "--num-gpu-blocks-override",
    "65",
    "--kv-compress",
    "cake",
    "--kv-budget",
    "0.2",
    "--kv-min-prompt",
    "512",
    "--kv-allow-override",
    "off,snapkv",
    "--kv-budget-bounds",
    "0.05:0.5",
]
LABELS = {"namespace": "inference", "pod": "vllm-0"}
DASHBOARD = MONITORING / "dashboard.json"
ADAPTER = ROOT / "deploy" / "components" / "autoscaling" / "prometheus-adapter-values.yaml"


@pytest.fixture(scope="module")
def prompt(demo_model):
    from transformers import AutoTokenizer

    return long_prompt(AutoTokenizer.from_pretrained(demo_model), 1400)


@pytest.fixture(scope="module")
def observed(demo_model, prompt, tool, tmp_path_factory):
    """A Prometheus that has seen every kind of request."""
    folder = tmp_path_factory.mktemp("prometheus")
    command = tool("prometheus", "Debian's package prometheus")
    with (
        serve(demo_model, FLAGS, folder / "server.log") as server,
        prometheus(
            command,
            folder,
            target=server.url.removeprefix("http://"),
            job="vllm-kvcompress",
            labels=LABELS,
            rules=rules(),
        ) as running,
    ):
        running.wait("vllm:num_requests_running")

        def ask(text, **xargs):
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
            client.completions.create(
                model="demo", prompt=text, max_tokens=6, extra_body={"vllm_xargs": xargs}
            )

        ask(prompt)
        ask("Hello")
        ask(prompt, kv_compress="off")
        ask(prompt, kv_compress="snapkv", kv_budget=0.3)
        with pytest.raises(BadRequestError):
            ask(prompt, kv_compress="tova")
        with pytest.raises(BadRequestError):
            ask(prompt, kv_budget=0.9)
        running.wait("sum(vllm:kv_compress_requests_total) == 2")
        running.wait("sum(vllm:kv_compress_refused_requests_total) == 2")
        running.wait("vllm:kv_cache_usage_perc == 0")
        yield dataclasses.replace(running, at=time.time())  # one moment, so that rates compare


def only(found):
    """The value of the one series in an answer."""
    assert len(found) == 1, found
    return float(found[0]["value"][1])


def test_every_panel_has_an_answer(observed):
    queries = panels(DASHBOARD)
    assert len(queries) > 20
    empty = [(title, query) for title, query in queries if not observed.query(query)]
    assert not empty


def test_what_the_panels_say_is_true(observed):
    said = {}
    for title, query in panels(DASHBOARD):
        said.setdefault(title, []).append(observed.query(query))
    planned, compressed = said["Prompts to compress, and compressed"]
    methods = {series["metric"]["method"]: float(series["value"][1]) for series in compressed}
    assert methods.keys() == {"cake", "snapkv"}
    assert methods["cake"] == methods["snapkv"] == pytest.approx(only(planned) / 2, rel=1e-3)
    # budgets 0.2 and 0.3, in whole pages of 128 tokens
    assert 0.15 < only(said["Kept share of compressed prompts"][0]) < 0.3
    assert only(said["Packed in place"][0]) == 0
    assert len(said["Tokens kept, by layer"][0]) == 30
    (configuration,) = said["Configuration"][0]
    assert configuration["metric"]["method"] == "cake"
    assert configuration["metric"]["budget"] == "0.2"


def test_every_metric_that_is_named_is_there(observed):
    texts = [query for _, query in panels(DASHBOARD)]
    texts += [rule["expr"] for rule in alerts().values()]
    texts.append(ADAPTER.read_text())
    texts.append((ROOT / "docs" / "runbook.md").read_text().replace(" up ", " "))
    named = {name for text in texts for name in METRIC.findall(text)}
    assert len(named) > 20
    there = observed.names()
    missing = {n for n in named if n not in there and f"{n}_count" not in there}
    assert not missing


def test_prometheus_evaluates_the_rules_and_none_is_about_to_fire(observed):
    (group,) = observed.ask("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == set(alerts())
    assert {rule["name"]: rule["lastError"] for rule in group["rules"] if "lastError" in rule} == {}
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    active = {rule["name"] for rule in group["rules"] if rule["alerts"]}
    assert active <= {"KVCompressSlowFirstToken"}  # as slow as the machine


def test_each_side_of_each_comparison_has_a_value(observed):
    """A rule that compares nothing never fires."""
    for name, rule in alerts().items():
        for metric in set(METRIC.findall(rule["expr"])):
            assert not math.isnan(only(observed.query(f"sum({metric})"))), (name, metric)


def test_the_autoscalers_metric_is_one_value_per_pod(observed):
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    assert observed.query(rule["seriesQuery"])
    filled = (
        rule["metricsQuery"]
        .replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
        .replace("<<.LabelMatchers>>", 'namespace="inference",pod=~"vllm-0"')
        .replace("<<.GroupBy>>", "pod")
    )
    (found,) = observed.query(filled)
    assert found["metric"] == {"pod": "vllm-0"}
    assert float(found["value"][1]) >= 0
