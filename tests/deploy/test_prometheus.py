"""Dashboard, alert rules and autoscaler work with a real server and a real Prometheus."""

import dataclasses
import math
import shlex
import time

import pytest
import yaml
from openai import BadRequestError, OpenAI

from first_layers import LAYERS, first_layers
from forks import serve_forking
from long_text import long_prompt
from manifests import MONITORING, ROOT, alerts, rules
from scraping import METRIC, panels, prometheus

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# float32 is faster on CPUs without bfloat16 instructions
FLAGS = shlex.split("""
    --enforce-eager --max-model-len 4096 --served-model-name demo --dtype float32
    --num-gpu-blocks-override 65 --kv-compress cake --kv-budget 0.2 --kv-min-prompt 512
    --kv-allow-override off,snapkv --kv-budget-bounds 0.05:0.5
""")
LABELS = {"namespace": "inference", "pod": "vllm-0"}
DASHBOARD = MONITORING / "dashboard.json"
ADAPTER = ROOT / "deploy" / "components" / "autoscaling" / "prometheus-adapter-values.yaml"


@pytest.fixture(scope="module")
def prompt(demo_model):
    from transformers import AutoTokenizer

    return long_prompt(AutoTokenizer.from_pretrained(demo_model), 1400)


@pytest.fixture(scope="module")
def observed(demo_model, prompt, tool, tmp_path_factory):
    """A Prometheus after every kind of request."""
    folder = tmp_path_factory.mktemp("prometheus")
    command = tool("prometheus", "Debian's package prometheus")
    model = first_layers(tmp_path_factory.mktemp("model"), demo_model)
    with (
        serve_forking(model, FLAGS, tmp_path_factory.mktemp("server")) as server,
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

        def request(text, **xargs):
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
            client.completions.create(
                model="demo", prompt=text, max_tokens=6, extra_body={"vllm_xargs": xargs}
            )

        request(prompt)
        request("Hello")
        request(prompt, kv_compress="off")
        request(prompt, kv_compress="snapkv", kv_budget=0.3)
        with pytest.raises(BadRequestError):
            request(prompt, kv_compress="tova")
        with pytest.raises(BadRequestError):
            request(prompt, kv_budget=0.9)
        running.wait("sum(vllm:kv_compress_requests_total) == 2")
        running.wait("sum(vllm:kv_compress_refused_requests_total) == 2")
        running.wait("vllm:kv_cache_usage_perc == 0")
        yield dataclasses.replace(running, at=time.time())  # one time, so that rates are comparable


def only_value(found):
    """Return the value of the only series in a result."""
    assert len(found) == 1, found
    return float(found[0]["value"][1])


def test_every_panel_has_data(observed):
    queries = panels(DASHBOARD)
    assert len(queries) > 20
    empty = [(title, query) for title, query in queries if not observed.query(query)]
    assert not empty


def test_the_panels_show_the_requests(observed):
    results = {}
    for title, query in panels(DASHBOARD):
        results.setdefault(title, []).append(observed.query(query))
    planned, compressed = results["Prompts to compress, and compressed"]
    methods = {series["metric"]["method"]: float(series["value"][1]) for series in compressed}
    assert methods.keys() == {"cake", "snapkv"}
    assert methods["cake"] == methods["snapkv"] == pytest.approx(only_value(planned) / 2, rel=1e-3)
    # Budgets of 0.2 and 0.3 take 3 and 4 blocks of 128 tokens, which are filled, and a tail of 6.
    kept_share = only_value(results["Kept share of compressed prompts"][0])
    assert kept_share == pytest.approx(((3 + 4) / 2 * 128 + 6) / 1414, rel=1e-3)
    # Each frees the prompt's 11 full blocks, and takes 3 or 4 for kept tokens.
    net = only_value(results["Net blocks returned to the pool"][0])
    assert net == pytest.approx(only_value(planned) / 2 * (11 - 3 + 11 - 4), rel=1e-3)
    assert only_value(results["Packed in place"][0]) == 0
    cut, slotless = results["Look-aheads cut short or without a slot"]
    assert {series["metric"]["to"]: float(series["value"][1]) for series in cut} == {
        "half": 0,
        "budget": 0,
    }
    assert only_value(slotless) == 0
    assert len(results["Tokens kept, by layer"][0]) == LAYERS
    (configuration,) = results["Configuration"][0]
    assert configuration["metric"]["method"] == "cake"
    assert configuration["metric"]["budget"] == "0.2"


def test_all_metrics_in_rules_panels_and_runbook_exist(observed):
    texts = [query for _, query in panels(DASHBOARD)]
    texts += [rule["expr"] for rule in alerts().values()]
    texts.append(ADAPTER.read_text())
    texts.append((ROOT / "docs" / "runbook.md").read_text().replace(" up ", " "))
    named = {name for text in texts for name in METRIC.findall(text)}
    assert len(named) > 20
    existing = observed.names()
    missing = {n for n in named if n not in existing and f"{n}_count" not in existing}
    assert not missing


def test_prometheus_evaluates_the_rules_and_none_fires(observed):
    (group,) = observed.get("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == set(alerts())
    assert {rule["name"]: rule["lastError"] for rule in group["rules"] if "lastError" in rule} == {}
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    active = {rule["name"] for rule in group["rules"] if rule["alerts"]}
    assert active <= {"KVCompressSlowFirstToken"}  # depends on the speed of the machine


def test_all_metrics_of_the_rules_have_values(observed):
    """A rule without data never fires."""
    for name, rule in alerts().items():
        for metric in set(METRIC.findall(rule["expr"])):
            assert not math.isnan(only_value(observed.query(f"sum({metric})"))), (name, metric)


def test_the_autoscalers_metric_has_one_value_per_pod(observed):
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
