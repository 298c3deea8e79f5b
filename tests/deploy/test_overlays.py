"""deploy/overlays: operators' changes apply, and a rollout uses one site's settings."""

import re
import shutil

import jsonschema
import pytest

from manifests import OVERLAYS, ROOT, container, find_object, pods, render, selects
from operator_schemas import SCHEMAS
from vllm_kvcompress import __version__


def test_overlays_turn_compression_on_with_one_line():
    base = ROOT / "deploy" / "base" / "settings.env"
    assert "KV_COMPRESS=off" in base.read_text().splitlines()
    for name in ("gpu", "cpu", "multi-node"):
        text = (OVERLAYS / name / "kustomization.yaml").read_text()
        before, line, _ = text.partition("      - KV_COMPRESS=cake-chunk\n")
        assert line, name
        assert "What it costs: " in before[-600:], name
    for name in ("canary", "prefetch", "example", "openshift", "tensor-parallel", "multi-node-ray"):
        assert "KV_COMPRESS=" not in (OVERLAYS / name / "kustomization.yaml").read_text()


def test_files_that_compress_quote_the_measurements():
    """Each quotes a run of the settings that it deploys."""
    page = (ROOT / "docs" / "measurements.md").read_text()
    match = sorted(re.search(r"^\| \*\*0\.2\*\* \| (\d+) %.*?\| (\d+) %", page, re.M).groups())
    late = re.search(
        r"Of (\d+) numbers, `cake-chunk` at 0\.2 with its look-ahead found (\d+)", page
    )
    outputs = sum(map(int, re.search(r"which (\d+) and (\d+)\s+outputs have", page).groups()))
    share = re.search(r"^\| \*\*k4v3\*\* \| 60 % \| 0\.(\d+) ", page, re.M)[1]
    quotes = {
        "0.2": [
            f"{match[0]} to {match[1]} % of a 0.5B model's output tokens matched in"
            f" {outputs} ordinary",
            # with each of two models
            f"{2 * int(late[2])} of {2 * int(late[1])} numbers that outputs named late were right",
        ],
        "0.6": ["keeps 60 % of each long prompt's tokens", f"in {share} % of the prompt's 16-bit"],
    }
    found = set()
    for path in sorted((ROOT / "deploy").rglob("*.yaml")):
        text = path.read_text()
        if not re.search(r"KV_COMPRESS=cake|--kv-compress=cake|kv_compress: cake", text):
            continue
        found.add(path.parent.name)
        comments = " ".join(re.sub(r"\n +#", "", text).split())
        budget = re.search(r"(?i)KV[-_]BUDGET(?:=|: )([\d.]+)", text)
        for quote in quotes[budget[1] if budget else "0.2"]:
            assert quote in comments, path
    assert found == {"gpu", "cpu", "multi-node", "kserve", "litellm", "production-stack"}


def test_the_example_overlay_applies_its_changes(rendered):
    before, after = rendered["gpu"], rendered["example"]
    settings = find_object(after, "ConfigMap", "settings")["data"]
    assert settings.items() > {"MODEL": "Qwen/Qwen3-8B", "KV_BUDGET": "0.3"}.items()
    more = container(after)["args"][len(container(before)["args"]) :]
    assert more == ["--max-num-seqs=256", "--gpu-memory-utilization=0.92"]
    pod = pods(after)[0]["spec"]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    for spread in pod["topologySpreadConstraints"]:
        assert selects(spread["labelSelector"], pods(after)[0]["metadata"]["labels"])
    claims = [o for o in after if o["kind"] == "PersistentVolumeClaim"]
    assert {claim["spec"]["storageClassName"] for claim in claims} == {"shared-files"}
    assert {o["metadata"]["namespace"] for o in after} == {"inference"}
    for rule in find_object(after, "PrometheusRule")["spec"]["groups"][0]["rules"]:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "https://docs.example.com/vllm-kvcompress/runbook.md"
        assert anchor == rule["alert"].lower()
    for kind in ("PrometheusRule", "ServiceMonitor"):
        assert find_object(after, kind)["metadata"]["labels"]["release"] == "prometheus"
    names = find_object(after, "NetworkPolicy")["spec"]["egress"][0]["to"]
    assert {"ipBlock": {"cidr": "10.96.0.10/32"}} in names
    assert not [o for o in after if o["metadata"]["name"] == "site"]


def claims(objects):
    """Return the specs of volume claims by namespace and name."""
    return {
        (o["metadata"].get("namespace"), o["metadata"]["name"]): o["spec"]
        for o in objects
        if o["kind"] == "PersistentVolumeClaim"
    }


@pytest.fixture
def copied(tmp_path):
    """An operator's copy of overlay example in a copy of deploy/."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    overlays = tmp_path / "deploy" / "overlays"
    return shutil.copytree(overlays / "example", overlays / "ours")


def edit(path, before, after):
    text = path.read_text()
    assert text.count(before) == 1, (path, before)
    path.write_text(text.replace(before, after))


@pytest.mark.parametrize("overlay", ["gpu", "tensor-parallel"])
def test_a_rollout_uses_one_sites_settings(kubectl_binary, copied, overlay):
    """Prefetch, deployment and canary, which the runbook applies one after the other."""
    site = copied / "site" / "kustomization.yaml"
    edit(copied / "kustomization.yaml", "- ../gpu #", f"- ../{overlay} #")
    ours = ["MODEL=team/model", "KV_COMPRESS=snapkv", "KV_ALLOW_OVERRIDE=off,h2o"]
    ours.append("KV_USAGE=--no-kv-usage")
    edit(site, "- MODEL=Qwen/Qwen3-8B", "\n      ".join(f"- {line}" for line in ours))
    edit(site, "value: 100Gi #", "value: 200Gi #")
    if overlay == "tensor-parallel":
        line = "- ../../../components/tensor-parallel #"
        edit(copied / "canary" / "kustomization.yaml", f"# {line}", line)
    applied = [render(kubectl_binary, path) for path in (copied / "prefetch", copied)]
    applied.append(render(kubectl_binary, copied / "canary"))
    prefetch, deployment, canary = applied
    assert {o["metadata"].get("namespace") for objects in applied for o in objects} == {"inference"}
    models = {find_object(objects, "ConfigMap", "settings")["data"]["MODEL"] for objects in applied}
    assert models == {"team/model"}
    assert {container(objects)["image"] for objects in applied} == {
        f"registry.example.com/team/vllm-kvcompress:{__version__}-cuda"
    }
    for objects in applied:
        assert pods(objects)[0]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    # Claims are mostly immutable, so prefetch must create the same claim as the deployment.
    assert claims(prefetch) == {
        key: spec for key, spec in claims(deployment).items() if key[1] == "model-cache"
    }
    (spec,) = claims(prefetch).values()
    assert spec["resources"]["requests"]["storage"] == "200Gi"
    assert spec["storageClassName"] == "shared-files"
    assert not claims(canary)
    # Only that claim is in two of them; ConfigMap names contain a hash of their content.
    names = [
        {(o["kind"], o["metadata"]["name"]) for o in objects if o["kind"] != "ConfigMap"}
        for objects in applied
    ]
    assert names[0] & names[1] == {("PersistentVolumeClaim", "model-cache")}
    assert not names[2] & (names[0] | names[1])
    # The canary accepts the same prompts: it has the flags and GPUs of the deployment.
    assert container(canary)["args"] == container(deployment)["args"]
    assert container(canary)["resources"] == container(deployment)["resources"]
    assert pods(canary)[0]["spec"]["runtimeClassName"] == "nvidia"
    settings = [
        find_object(objects, "ConfigMap", "settings")["data"] for objects in (deployment, canary)
    ]
    names = ("KV_COMPRESS", "KV_ALLOW_OVERRIDE", "KV_USAGE")
    canary_overrides = "off,cake-chunk,cake,snapkv,streamingllm,random"
    assert [tuple(data[name] for name in names) for data in settings] == [
        ("snapkv", "off,h2o", "--no-kv-usage"),
        ("off", canary_overrides, "--kv-usage"),
    ]
    # Serving pods are offline, the Job is online.
    assert find_object(prefetch, "ConfigMap", "settings")["data"]["HF_HUB_OFFLINE"] == "1"
    assert {"name": "HF_HUB_OFFLINE", "value": "0"} in container(prefetch)["env"]


@pytest.mark.parametrize(
    ("gateway", "kind"),
    [
        ("envoy-gateway", "BackendTrafficPolicy"),
        ("nginx-gateway", "ClientSettingsPolicy"),
        ("istio", "EnvoyFilter"),
    ],
)
def test_each_kind_of_gateway_can_limit_bodies(kubectl_binary, copied, gateway, kind):
    path = copied / "kustomization.yaml"
    offered = "istio" if gateway == "istio" else "nginx-gateway"
    line = "- ../../components/body-limit/"
    edit(path, f"# {line}{offered} #", f"{line}{gateway} #")
    objects = render(kubectl_binary, copied)
    policy = find_object(objects, kind)
    jsonschema.validate(policy, SCHEMAS[kind])
    route = find_object(objects, "HTTPRoute")
    spec, (parent,) = policy["spec"], route["spec"]["parentRefs"]
    if gateway == "istio":
        assert policy["metadata"]["namespace"] == parent["namespace"]
        (selected,) = spec["workloadSelector"]["labels"].items()
        assert selected == ("gateway.networking.k8s.io/gateway-name", parent["name"])
        return
    assert policy["metadata"]["namespace"] == route["metadata"]["namespace"]
    (target,) = spec.get("targetRefs", [spec.get("targetRef")])
    assert target["name"] == route["metadata"]["name"]


def test_the_memory_limit_includes_the_host_memory_of_parked_requests(kubectl_binary, copied):
    """The server takes this memory when it starts, and a pod above its limit is killed."""
    before = container(render(kubectl_binary, copied))
    path, line = copied / "kustomization.yaml", "- ../../components/host-memory #"
    edit(path, f"# {line}", line)
    after = container(render(kubectl_binary, copied))
    (added,) = [argument for argument in after["args"] if argument not in before["args"]]
    flag, _, gib = added.partition("=")
    assert flag == "--kv-park"
    limits = [
        int(each["resources"]["limits"]["memory"].removesuffix("Gi")) for each in (before, after)
    ]
    assert limits[1] - limits[0] == int(gib)


def test_a_site_on_openshift_sets_no_user(kubectl_binary, copied):
    site = copied / "site" / "kustomization.yaml"
    edit(site, "# components: # on OpenShift\n#   -", "components:\n  -")
    for path in (copied, copied / "prefetch", copied / "canary"):
        context = pods(render(kubectl_binary, path))[0]["spec"]["securityContext"]
        assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_all_kubectl_commands_of_the_runbook_set_a_namespace():
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    found = re.findall(r"`(kubectl\s[^`]*)`", runbook)
    found += re.findall(r"^ {4,}(kubectl .*)", runbook, re.M)
    commands = {" ".join(command.split()) for command in found}
    assert len(commands) > 10
    applied = {c.split(" -k ")[1] for c in commands if c.startswith("kubectl apply -k ")}
    # these set their own namespace
    assert applied == {"OVERLAY", "OVERLAY/prefetch", "OVERLAY/canary"}
    allowed = ("kubectl -n $NAMESPACE ", "kubectl apply -k OVERLAY", "kubectl create namespace ")
    assert not [c for c in commands if not c.startswith((*allowed, "kubectl delete -k"))]
