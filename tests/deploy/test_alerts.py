"""The alert rules pass promtool, and each has unit tests and a runbook section."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from manifests import MONITORING, ROOT, alerts, container, find_object, rules
from scraping import METRIC, panels

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


def test_the_unit_tests_of_the_alerts_pass(promtool):
    done = promtool("test", "rules", "alerts.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "change",
    [
        (">", "<"),
        ("0.9 *", "0 *"),
        ("> 0.5 *", "> 5 *"),
        ("> 0.1 *", "> 1 *"),
        ('{to="budget"}', ""),
        ('{unit="tokens"}', '{unit="none"}'),
        ('{unit="ratio"}', '{unit="none"}'),
        ('{job="vllm-kvcompress"}[10m]', "[10m]"),
    ],
)
def test_the_unit_tests_fail_for_a_changed_rule(promtool, tmp_path, change):
    path = tmp_path / "rules.yaml"
    changed = yaml.safe_load(path.read_text())
    ours = changed["groups"][0]["rules"]
    assert any(change[0] in rule["expr"] for rule in ours)
    for rule in ours:
        rule["expr"] = rule["expr"].replace(*change)
    path.write_text(yaml.safe_dump(changed))
    assert promtool("test", "rules", "alerts.yaml").returncode != 0


def test_a_server_in_another_namespace_does_not_hide_a_missing_one(promtool, tmp_path, rendered):
    spec = find_object(rendered["example"], "PrometheusRule")["spec"]
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
def test_each_alert_has_a_unit_test_that_fires_and_one_that_does_not(name):
    found = [
        case["exp_alerts"]
        for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == name
    ]
    assert any(found)
    assert not all(found)


@pytest.mark.parametrize(("name", "rule"), sorted(alerts().items()))
def test_each_alert_has_a_runbook_section(name, rule):
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert re.fullmatch(r"\d+m", rule["for"])
    assert rule["annotations"]["summary"].endswith(".")
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert page == "docs/runbook.md"
    assert anchor == name.lower()
    section = re.search(rf"^### {name}$(.*?)(?=^##|\Z)", RUNBOOK, re.M | re.S)
    assert section, f"docs/runbook.md has no section ### {name}"
    assert len(section[1].split()) > 15


def test_the_dashboard_shows_the_metrics_of_all_alerts():
    shown = "".join(query for _, query in panels(MONITORING / "dashboard.json"))
    for name, rule in alerts().items():
        assert not [m for m in METRIC.findall(rule["expr"]) if m not in shown and m != "up"], name


def test_the_runbook_has_only_sections_of_existing_alerts():
    assert set(re.findall(r"^### (KVCompress\w+)$", RUNBOOK, re.M)) == set(alerts())


def test_the_kept_share_alert_uses_the_budget_of_the_server():
    """A number in the rule would not follow changes of the server's budget."""
    rule = alerts()["KVCompressKeptShareOff"]["expr"]
    for unit in ("ratio", "tokens"):
        assert f'vllm:kv_compress_budget{{unit="{unit}"}}' in rule
    assert re.findall(r"(?<![\w\[])[\d.]+(?![\dm])", rule) == ["2"]


def test_the_alerts_select_the_scraped_job(rendered):
    monitor = find_object(rendered["gpu"], "ServiceMonitor")
    service = find_object(rendered["gpu"], "Service")
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert f'absent(up{{job="{job}", namespace=~".*"}})' in alerts()["KVCompressServerDown"]["expr"]
    # metrics of plain vLLM must be restricted to this deployment
    for name, rule in alerts().items():
        for metric, labels in re.findall(r"(vllm:\w+)(\{[^}]*\})?", rule["expr"]):
            if not metric.startswith("vllm:kv_compress_"):
                assert labels == f'{{job="{job}"}}', (name, metric)
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert container(rendered["gpu"])["ports"][0]["name"] == "http"
