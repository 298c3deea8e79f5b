"""The alert rules: promtool's opinion, a unit test of each, and a runbook section of each."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from manifests import ROOT, alerts, container, one, rules

UNIT_TESTS = Path(__file__).with_name("alerts.yaml")
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()


@pytest.fixture
def promtool(tool, tmp_path):
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules()))
    shutil.copy(UNIT_TESTS, tmp_path)
    command = tool("promtool", "Debian's package prometheus")

    def run(*arguments):
        return subprocess.run(
            [command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )

    return run


def test_promtool_accepts_the_rules(promtool):
    done = promtool("check", "rules", "rules.yaml")
    assert done.returncode == 0, done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


def test_alerts_fire_and_stay_silent_as_their_unit_tests_say(promtool):
    done = promtool("test", "rules", "alerts.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "change",
    [
        (">", "<"),
        ("0.9 *", "0 *"),
        ("> 0.5 *", "> 5 *"),
        ('{unit="tokens"}', '{unit="none"}'),
        ('{unit="ratio"}', '{unit="none"}'),
        ('{job="vllm-kvcompress"}[10m]', "[10m]"),
    ],
)
def test_the_unit_tests_notice_a_changed_rule(promtool, tmp_path, change):
    path = tmp_path / "rules.yaml"
    changed = yaml.safe_load(path.read_text())
    ours = changed["groups"][0]["rules"]
    assert any(change[0] in rule["expr"] for rule in ours)
    for rule in ours:
        rule["expr"] = rule["expr"].replace(*change)
    path.write_text(yaml.safe_dump(changed))
    assert promtool("test", "rules", "alerts.yaml").returncode != 0


def test_another_deployments_server_does_not_hide_that_ours_is_gone(promtool, tmp_path, rendered):
    spec = one(rendered["example"], "PrometheusRule")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))

    def firing(namespace, expected):
        series = f'up{{job="vllm-kvcompress", namespace="{namespace}", pod="a"}}'
        query = {
            "expr": 'count(ALERTS{alertname="KVCompressServerDown", alertstate="firing"})',
            "eval_time": "6m",
            "exp_samples": [{"labels": "{}", "value": 1}] if expected else [],
        }
        test = {
            "interval": "1m",
            "input_series": [{"series": series, "values": "1x30"}],
            "promql_expr_test": [query],
        }
        case = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
        (tmp_path / "two.yaml").write_text(yaml.safe_dump(case))
        done = promtool("test", "rules", "two.yaml")
        assert done.returncode == 0, done.stdout + done.stderr

    firing("another", expected=True)
    firing("inference", expected=False)


@pytest.mark.parametrize("name", sorted(alerts()))
def test_each_has_a_case_that_fires_and_one_that_does_not(name):
    found = [
        case["exp_alerts"]
        for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == name
    ]
    assert any(found)
    assert not all(found)


@pytest.mark.parametrize(("name", "rule"), sorted(alerts().items()))
def test_each_says_what_to_do(name, rule):
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert re.fullmatch(r"\d+m", rule["for"])
    assert rule["annotations"]["summary"].endswith(".")
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page == "docs/runbook.md"
    assert anchor == name.lower()
    section = re.search(rf"^### {name}$(.*?)(?=^##|\Z)", RUNBOOK, re.M | re.S)
    assert section, f"docs/runbook.md has no section ### {name}"
    assert len(section[1].split()) > 15


def test_the_runbook_has_no_section_of_an_alert_that_is_gone():
    assert set(re.findall(r"^### (KVCompress\w+)$", RUNBOOK, re.M)) == set(alerts())


def test_the_kept_share_has_no_budget_of_its_own():
    """It follows the server's: a number by hand would be forgotten."""
    rule = alerts()["KVCompressKeptShareOff"]["expr"]
    for unit in ("ratio", "tokens"):
        assert f'vllm:kv_compress_budget{{unit="{unit}"}}' in rule
    assert re.findall(r"(?<![\w\[])[\d.]+(?![\dm])", rule) == ["2"]


def test_the_job_that_must_be_up_is_the_one_that_is_scraped(rendered):
    monitor = one(rendered["gpu"], "ServiceMonitor")
    service = one(rendered["gpu"], "Service")
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert f'absent(up{{job="{job}", namespace=~".*"}})' in alerts()["KVCompressServerDown"]["expr"]
    for name, rule in alerts().items():  # what every vLLM exports, of this deployment only
        for metric, labels in re.findall(r"(vllm:\w+)(\{[^}]*\})?", rule["expr"]):
            if not metric.startswith("vllm:kv_compress_"):
                assert labels == f'{{job="{job}"}}', (name, metric)
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert container(rendered["gpu"])["ports"][0]["name"] == "http"
