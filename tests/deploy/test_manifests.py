"""deploy/: every overlay renders, is valid, is locked down, and gives vLLM what it accepts."""

import asyncio
import re
import shutil

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml

from manifests import (
    NAMES,
    NEWEST,
    OLDEST,
    OVERLAYS,
    ROOT,
    arguments,
    container,
    one,
    parsed,
    pods,
    render,
)
from operator_schemas import SCHEMAS
from vllm_kvcompress import __version__

SERVING = [name for name in NAMES if not name.endswith("prefetch")]
GPU = [name for name in SERVING if name != "cpu"]
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "vllm-group-0.vllm-group.default"}
README = (ROOT / "deploy" / "README.md").read_text()


@pytest.fixture(params=NAMES)
def any_objects(request, rendered):
    return rendered[request.param]


@pytest.fixture(params=SERVING)
def objects(request, rendered):
    return rendered[request.param]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid(any_objects, version):
    for found in any_objects:
        if found["kind"] in SCHEMAS:
            jsonschema.validate(found, SCHEMAS[found["kind"]])
        else:
            kubernetes_validate.validate(found, version, strict=True)
    for template in pods(any_objects):  # the operators' own kinds have no schema for these
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}}
        kubernetes_validate.validate({**pod, "spec": template["spec"]}, version, strict=True)


def test_the_schemas_refuse_what_kubernetes_would(rendered):
    deployment = one(rendered["gpu"], "Deployment")
    broken = {**deployment, "spec": {**deployment["spec"], "replica": 2}}
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        kubernetes_validate.validate(broken, NEWEST, strict=True)
    monitor = one(rendered["gpu"], "ServiceMonitor")
    broken = {**monitor, "spec": {**monitor["spec"], "endpoint": []}}
    with pytest.raises(jsonschema.ValidationError, match="endpoint"):
        jsonschema.validate(broken, SCHEMAS["ServiceMonitor"])


def test_a_kubectl_of_this_machine_renders_the_same(rendered):
    """Users have other versions than the one in the lock; here is one more if there is one."""
    other = shutil.which("kubectl")
    if other is None:
        pytest.skip("there is no other kubectl on this machine")
    for name in NAMES:
        assert render(other, name) == rendered[name], name


def test_it_may_do_nothing_that_it_need_not(any_objects, request):
    openshift = "openshift" in request.node.name
    for template in pods(any_objects):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        if accounts := [o for o in any_objects if o["kind"] == "ServiceAccount"]:
            assert accounts[0]["automountServiceAccountToken"] is False
            assert pod["serviceAccountName"] == accounts[0]["metadata"]["name"]
        assert pod["enableServiceLinks"] is False
        context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        if not openshift:  # its SCC gives each namespace users of its own, and refuses any other
            context |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 10001)
            context["fsGroupChangePolicy"] = "OnRootMismatch"
        assert pod["securityContext"] == context
        (own,) = pod["containers"]
        assert own["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert own["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in own["resources"]["limits"]


def test_all_that_the_images_write_to_is_mounted(any_objects, request):
    needed = {"/models", "/scratch", "/tmp", "/dev/shm"}
    for template in pods(any_objects):
        (own,) = template["spec"]["containers"]
        mounted = {mount["mountPath"] for mount in own["volumeMounts"]}
        assert mounted - {"/compiled"} == (needed - {"/dev/shm"} if "command" in own else needed)
        assert {v["name"] for v in template["spec"]["volumes"]} == {
            mount["name"] for mount in own["volumeMounts"]
        }


@pytest.mark.parametrize("name", GPU)
def test_what_is_compiled_outlives_a_pod(rendered, name):
    for template in pods(rendered[name]):
        (own,) = template["spec"]["containers"]
        names = [entry["name"] for entry in own["env"]]
        values = {e["name"]: e["value"] for e in own["env"] if "value" in e}
        kept = {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
        assert values.keys() >= kept
        for variable in kept:
            assert values[variable].startswith("/compiled/$(NODE_NAME)/")
            assert names.index("NODE_NAME") < names.index(variable)  # or kubelet leaves it as it is
        (volume,) = [v for v in template["spec"]["volumes"] if v["name"] == "compiled"]
        claim = volume["persistentVolumeClaim"]["claimName"]
    beside = {"canary": "gpu", "example/canary": "example"}  # whose volumes it mounts
    made = rendered[beside.get(name, name)]
    assert one(made, "PersistentVolumeClaim", claim)["spec"]["accessModes"] == ["ReadWriteMany"]


def test_secrets_are_named_and_a_gpus_api_key_must_be_there(any_objects, request):
    assert not [o for o in any_objects if o["kind"] == "Secret"]
    for template in pods(any_objects):
        (own,) = template["spec"]["containers"]
        secrets = {
            entry["name"]: entry["valueFrom"]["secretKeyRef"]
            for entry in own["env"]
            if "secretKeyRef" in entry.get("valueFrom", {})
        }
        token = {"name": "vllm-secrets", "key": "hf-token", "optional": True}
        assert secrets.pop("HF_TOKEN") == token
        if "command" in own:
            assert not secrets
            continue
        optional = "gpu" not in str(own["resources"])
        key = {"name": "vllm-secrets", "key": "api-key", "optional": optional}
        assert secrets == {"VLLM_API_KEY": key}


def test_running_requests_are_given_time_to_end(objects):
    pod = pods(objects)[0]["spec"]
    sleep = int(container(objects)["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(re.search(r"--shutdown-timeout=(\d+)", " ".join(container(objects)["args"]))[1])
    ready = container(objects)["readinessProbe"]
    assert drain > 0
    assert pod["terminationGracePeriodSeconds"] >= sleep + drain + 20
    assert sleep >= ready["periodSeconds"]


def selected(selector, labels):
    """Whether a LabelSelector, or a Service's plain one, finds these labels."""
    wanted = selector if "match" not in "".join(selector) else selector.get("matchLabels", {})
    keys = {e["key"] for e in selector.get("matchExpressions", []) if e["operator"] == "Exists"}
    return wanted.items() <= labels.items() and keys <= labels.keys()


def test_every_selector_finds_the_pods_and_no_others(rendered):
    def labels(name):
        return pods(rendered[name])[0]["metadata"]["labels"]

    apart = {"canary", "multi-node", "prefetch"}  # all others stand in each other's place
    for path, objects in rendered.items():
        name = path.rpartition("/")[2]
        for made in objects:
            kinds = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
            if made["kind"] not in kinds:
                continue
            policy = made["kind"] == "NetworkPolicy"
            selector = made["spec"]["podSelector" if policy else "selector"]
            assert selected(selector, labels(path)), (path, made["kind"])
            for other in ({"gpu"} | apart) - {name}:
                if name in apart or other in apart:
                    assert not selected(selector, labels(other)), (name, made["kind"], other)
        if monitors := [o for o in objects if o["kind"] == "ServiceMonitor"]:
            wanted = monitors[0]["spec"]["selector"]["matchLabels"].items()
            assert wanted <= one(objects, "Service")["metadata"]["labels"].items()
            assert wanted <= one(rendered["canary"], "Service")["metadata"]["labels"].items()


def peers(policy, port):
    """Whom an ingress rule for `port` lets in."""
    rules = policy["spec"]["ingress"]
    return [
        p for r in rules if {"port": port} in r.get("ports", [{"port": port}]) for p in r["from"]
    ]


def test_whoever_wants_in_says_so_or_is_prometheus(objects, request):
    policy = one(objects, "NetworkPolicy")
    here = [p["podSelector"] for p in peers(policy, "http") if "podSelector" in p]
    client = {"vllm-kvcompress/client": "yes"}
    own = pods(objects)[0]["metadata"]["labels"]
    assert any(selected(selector, client) for selector in here)
    assert not any(selected(selector, {"app": "another"}) for selector in here)
    group = "multi-node" in request.node.name  # whose machines talk to each other
    assert any(selected(selector, own) for selector in here) == group
    spaces = [
        p["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for p in peers(policy, "http")
        if "namespaceSelector" in p
    ]
    if "example/canary" in request.node.name:
        assert spaces == [
            "observability"
        ]  # a gateway that goes on to /v1 alone is the deployment's
    elif "example" in request.node.name:
        assert spaces == ["observability", "istio-ingress"]
    else:
        assert spaces == ["monitoring"]


def test_every_kind_of_cluster_dns_is_reached(any_objects):
    rules = one(any_objects, "NetworkPolicy")["spec"]["egress"]
    both = [{"port": 53, "protocol": name} for name in ("UDP", "TCP")]
    (names,) = [rule for rule in rules if rule.get("ports") == both]
    space = "kubernetes.io/metadata.name"
    assert {"namespaceSelector": {"matchLabels": {space: "kube-system"}}} in names["to"]
    # its pods are on the host's network, which no selector finds
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in names["to"]
    both = [{"port": 5353, "protocol": name} for name in ("UDP", "TCP")]
    (names,) = [rule for rule in rules if rule.get("ports") == both]
    assert names["to"] == [{"namespaceSelector": {"matchLabels": {space: "openshift-dns"}}}]


def test_the_canary_stands_beside_the_gpu_overlay(rendered):
    names = {
        name: {(o["kind"], o["metadata"]["name"]) for o in rendered[name]}
        for name in ("gpu", "canary")
    }
    assert not names["gpu"] & names["canary"]
    volumes = one(rendered["canary"], "Deployment")["spec"]["template"]["spec"]["volumes"]
    claims = [v["persistentVolumeClaim"] for v in volumes if "persistentVolumeClaim" in v]
    assert {claim["claimName"] for claim in claims} == {"model-cache", "compile-cache"}
    for claim in claims:
        volume = one(rendered["gpu"], "PersistentVolumeClaim", claim["claimName"])
        assert volume["spec"]["accessModes"] == ["ReadWriteMany"]


def test_gpus_are_asked_for_where_they_are_needed(rendered):
    counts = {"cpu": None, "prefetch": None, "tensor-parallel": "4", "multi-node": "8"}
    for name in NAMES:
        for template in pods(rendered[name]):
            (own,) = template["spec"]["containers"]
            asked = counts.get(name.rpartition("/")[2], "1")
            assert own["resources"]["limits"].get("nvidia.com/gpu") == asked
            where = "registry.example.com/team/" if name.startswith("example") else ""
            build = "cpu" if name == "cpu" else "cuda"
            assert own["image"] == f"{where}vllm-kvcompress:{__version__}-{build}"


def test_tensor_parallelism_fills_a_pods_gpus_and_has_shared_memory(rendered):
    for name, machines in (("tensor-parallel", 1), ("multi-node", 2)):
        for number, template in enumerate(pods(rendered[name])):
            (own,) = template["spec"]["containers"]
            limits = own["resources"]["limits"]
            ranks = machines * int(limits["nvidia.com/gpu"])
            assert f"--tensor-parallel-size={ranks}" in own["args"]
            (shm,) = [v for v in template["spec"]["volumes"] if v["name"] == "shm"]
            assert shm["emptyDir"]["medium"] == "Memory"
            assert int(shm["emptyDir"]["sizeLimit"].removesuffix("Gi")) >= 8 * ranks / machines
            assert ("--headless" in own["args"]) == (number == 1)


def test_a_group_is_one_server(rendered):
    objects = rendered["multi-node"]
    group = one(objects, "LeaderWorkerSet")
    leader, worker = pods(objects)
    assert group["spec"]["leaderWorkerTemplate"]["size"] == int(GROUP["LWS_GROUP_SIZE"])
    # the operator makes a Service of the set's name
    assert group["metadata"]["name"] != one(objects, "Service")["metadata"]["name"]
    selector = one(objects, "Service")["spec"]["selector"]
    assert selected(selector, leader["metadata"]["labels"])
    assert not selected(selector, worker["metadata"]["labels"])
    assert not [name for name in container(objects, 1) if "Probe" in name or name == "ports"]
    names = [entry["name"] for entry in container(objects, 1)["env"]]
    assert "VLLM_HOST_IP" in names
    settings = one(objects, "ConfigMap", "settings")["metadata"]["name"]
    for number in (0, 1):
        assert container(objects, number)["envFrom"] == [{"configMapRef": {"name": settings}}]
    # the workers are there until the leader has drained
    sleep = int(container(objects, 1)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert sleep >= leader["spec"]["terminationGracePeriodSeconds"]
    assert worker["spec"]["terminationGracePeriodSeconds"] > sleep
    policy = one(objects, "NetworkPolicy")["spec"]
    for rules, side in ((policy["ingress"], "from"), (policy["egress"], "to")):
        (among,) = [r for r in rules if "ports" not in r]
        assert selected(among[side][0]["podSelector"], worker["metadata"]["labels"])
        assert not selected(among[side][0]["podSelector"], {"track": "multi-node"})


def test_the_job_fetches_what_the_pods_look_for(rendered):
    objects = rendered["prefetch"]
    assert {o["kind"] for o in objects} == {
        "ConfigMap",
        "Job",
        "NetworkPolicy",
        "PersistentVolumeClaim",
    }
    own = container(objects)
    assert own["command"] == ["hf", "download"]
    settings = one(rendered["gpu"], "ConfigMap", "settings")["data"]
    model, *options = arguments(objects)
    assert model == settings["MODEL"]
    assert options == ["--exclude=original/*"]
    assert one(objects, "PersistentVolumeClaim") == {
        **one(rendered["gpu"], "PersistentVolumeClaim", "model"),
        "metadata": one(objects, "PersistentVolumeClaim")["metadata"],
    }


def test_compression_is_one_line_of_an_overlay_and_off_in_the_base():
    base = ROOT / "deploy" / "base" / "settings.env"
    assert "KV_COMPRESS=off" in base.read_text().splitlines()
    for name in ("gpu", "cpu", "multi-node"):
        text = (OVERLAYS / name / "kustomization.yaml").read_text()
        before, line, _ = text.partition("      - KV_COMPRESS=cake\n")
        assert line, name
        assert "What it costs: " in before[-400:], name
    for name in ("canary", "prefetch", "example", "openshift", "tensor-parallel"):
        assert "KV_COMPRESS=" not in (OVERLAYS / name / "kustomization.yaml").read_text()


def test_the_example_changes_what_it_says(rendered):
    before, after = rendered["gpu"], rendered["example"]
    settings = one(after, "ConfigMap", "settings")["data"]
    assert settings.items() > {"MODEL": "Qwen/Qwen3-8B", "KV_BUDGET": "0.3"}.items()
    more = container(after)["args"][len(container(before)["args"]) :]
    assert more == ["--max-num-seqs=256", "--gpu-memory-utilization=0.92"]
    pod = pods(after)[0]["spec"]
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    for spread in pod["topologySpreadConstraints"]:
        assert selected(spread["labelSelector"], pods(after)[0]["metadata"]["labels"])
    claims = [o for o in after if o["kind"] == "PersistentVolumeClaim"]
    assert {claim["spec"]["storageClassName"] for claim in claims} == {"shared-files"}
    assert {o["metadata"]["namespace"] for o in after} == {"inference"}
    for rule in one(after, "PrometheusRule")["spec"]["groups"][0]["rules"]:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "https://docs.example.com/vllm-kvcompress/runbook.md"
        assert anchor == rule["alert"].lower()
    for kind in ("PrometheusRule", "ServiceMonitor"):
        assert one(after, kind)["metadata"]["labels"]["release"] == "prometheus"
    names = one(after, "NetworkPolicy")["spec"]["egress"][0]["to"]
    assert {"ipBlock": {"cidr": "10.96.0.10/32"}} in names
    assert not [o for o in after if o["metadata"]["name"] == "site"]


def claims(objects):
    """What a claim asks for, by its namespace and name."""
    return {
        (o["metadata"].get("namespace"), o["metadata"]["name"]): o["spec"]
        for o in objects
        if o["kind"] == "PersistentVolumeClaim"
    }


@pytest.fixture
def copied(tmp_path):
    """An operator's copy of overlay example, in a tree of its own."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    overlays = tmp_path / "deploy" / "overlays"
    return shutil.copytree(overlays / "example", overlays / "ours")


def edit(path, before, after):
    text = path.read_text()
    assert text.count(before) == 1, (path, before)
    path.write_text(text.replace(before, after))


@pytest.mark.parametrize("stands_on", ["gpu", "tensor-parallel"])
def test_what_a_rollout_applies_is_of_one_site(kubectl_binary, copied, stands_on):
    """Prefetch, deployment and canary, as the runbook applies them one after the other."""
    site = copied / "site" / "kustomization.yaml"
    edit(copied / "kustomization.yaml", "- ../gpu #", f"- ../{stands_on} #")
    edit(
        site,
        "- MODEL=Qwen/Qwen3-8B",
        "- MODEL=team/model\n      - KV_COMPRESS=snapkv\n      - KV_ALLOW_OVERRIDE=off,h2o",
    )
    edit(site, "value: 100Gi #", "value: 200Gi #")
    if stands_on == "tensor-parallel":
        line = "- ../../../components/tensor-parallel #"
        edit(copied / "canary" / "kustomization.yaml", f"# {line}", line)
    applied = [render(kubectl_binary, path) for path in (copied / "prefetch", copied)]
    applied.append(render(kubectl_binary, copied / "canary"))
    prefetch, deployment, canary = applied
    assert {o["metadata"].get("namespace") for objects in applied for o in objects} == {"inference"}
    models = {one(objects, "ConfigMap", "settings")["data"]["MODEL"] for objects in applied}
    assert models == {"team/model"}
    assert {container(objects)["image"] for objects in applied} == {
        f"registry.example.com/team/vllm-kvcompress:{__version__}-cuda"
    }
    for objects in applied:
        assert pods(objects)[0]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    # most of a claim can never be changed: whoever makes one makes it as the deployment does
    assert claims(prefetch) == {
        key: spec for key, spec in claims(deployment).items() if key[1] == "model-cache"
    }
    (spec,) = claims(prefetch).values()
    assert spec["resources"]["requests"]["storage"] == "200Gi"
    assert spec["storageClassName"] == "shared-files"
    assert not claims(canary)
    # no object but that claim is in two of them; settings of one name have one content
    names = [
        {(o["kind"], o["metadata"]["name"]) for o in objects if o["kind"] != "ConfigMap"}
        for objects in applied
    ]
    assert names[0] & names[1] == {("PersistentVolumeClaim", "model-cache")}
    assert not names[2] & (names[0] | names[1])
    # the same prompts fit: its flags and GPUs are the deployment's
    assert container(canary)["args"] == container(deployment)["args"]
    assert container(canary)["resources"] == container(deployment)["resources"]
    assert pods(canary)[0]["spec"]["runtimeClassName"] == "nvidia"
    asked = [one(objects, "ConfigMap", "settings")["data"] for objects in (deployment, canary)]
    methods = [(data["KV_COMPRESS"], data["KV_ALLOW_OVERRIDE"]) for data in asked]
    assert methods == [("snapkv", "off,h2o"), ("off", "off,cake,snapkv")]
    # pods ask no hub, and the Job asks it all the same
    assert one(prefetch, "ConfigMap", "settings")["data"]["HF_HUB_OFFLINE"] == "1"
    assert {"name": "HF_HUB_OFFLINE", "value": "0"} in container(prefetch)["env"]


def test_a_site_on_openshift_names_no_user(kubectl_binary, copied):
    site = copied / "site" / "kustomization.yaml"
    edit(site, "# components: # on OpenShift\n#   -", "components:\n  -")
    for path in (copied, copied / "prefetch", copied / "canary"):
        context = pods(render(kubectl_binary, path))[0]["spec"]["securityContext"]
        assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_the_runbook_leaves_no_namespace_out():
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    found = re.findall(r"`(kubectl\s[^`]*)`", runbook)
    found += re.findall(r"^ {4,}(kubectl .*)", runbook, re.M)
    commands = {" ".join(command.split()) for command in found}
    assert len(commands) > 10
    applied = {c.split(" -k ")[1] for c in commands if c.startswith("kubectl apply -k ")}
    assert applied == {"OVERLAY", "OVERLAY/prefetch", "OVERLAY/canary"}  # which name theirs
    allowed = ("kubectl -n $NAMESPACE ", "kubectl apply -k OVERLAY", "kubectl create namespace ")
    assert not [c for c in commands if not c.startswith((*allowed, "kubectl delete -k"))]


def test_the_gateway_forwards_what_the_key_guards_and_nothing_else(rendered):
    route = one(rendered["example"], "HTTPRoute")["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "istio-ingress"}]
    assert route["hostnames"] == ["llm.example.com"]
    (rule,) = route["rules"]
    service = one(rendered["example"], "Service")
    (target,) = rule["backendRefs"]
    assert target["name"] == service["metadata"]["name"]
    assert target["port"] == service["spec"]["ports"][0]["port"]
    # that each of these paths wants the key is the test of the README's table
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]


def test_probes_and_service_reach_the_port(objects):
    own = container(objects)
    assert own["ports"] == [{"name": "http", "containerPort": 8000}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert own[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert one(objects, "Service")["spec"]["ports"][0]["targetPort"] == "http"
    assert "--port=8000" in own["args"]


def test_the_autoscaler_asks_for_the_adapters_metric(rendered):
    scaler = one(rendered["gpu"], "HorizontalPodAutoscaler")["spec"]
    values = ROOT / "deploy" / "components" / "autoscaling" / "prometheus-adapter-values.yaml"
    (rule,) = yaml.safe_load(values.read_text())["rules"]["custom"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    target = one(rendered["gpu"], "Deployment")
    assert scaler["scaleTargetRef"]["name"] == target["metadata"]["name"]
    assert "replicas" not in target["spec"]  # it is the autoscaler's


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVING)
def test_vllm_takes_the_arguments(rendered, name, demo_model):
    from vllm_kvcompress.config import CompressionConfig

    for number in range(len(pods(rendered[name]))):
        rank = {"LWS_WORKER_INDEX": str(number)}
        model, *flags = arguments(rendered[name], number, GROUP | rank)
        assert model == one(rendered[name], "ConfigMap", "settings")["data"]["MODEL"]
        args, engine = parsed([demo_model, *flags])  # vLLM looks for the model at once
        assert args.model_tag == demo_model
        assert (args.host, args.port) == ("0.0.0.0", 8000)
        assert engine.shutdown_timeout == 120
        if name == "multi-node":
            assert (engine.nnodes, engine.node_rank) == (2, number)
            assert engine.master_addr == GROUP["LWS_LEADER_ADDRESS"]
            assert args.headless == (number == 1)
        settings = CompressionConfig.parse(engine.additional_config["kvcompress"])
        if name.endswith("canary"):
            assert not settings.enabled
            assert settings.active
            assert "snapkv" in settings.allow_override
            continue
        assert settings.compress == "cake"
        assert settings.budget == (0.3 if name == "example" else 0.2)
        # a client can step out at once, and ask for no other method
        assert settings.allow_override == ("off",)


@pytest.mark.engine
def test_off_is_off(rendered, demo_model):
    from vllm_kvcompress.config import CompressionConfig

    argv = [a.replace("=cake", "=off") for a in arguments(rendered["gpu"])[1:]]
    assert "--kv-compress=off" in argv
    _, engine = parsed([demo_model, *argv])
    settings = CompressionConfig.parse(engine.additional_config.get("kvcompress", {}))
    assert not settings.active


@pytest.mark.engine
def test_the_readme_names_every_path_that_the_key_leaves_open(demo_model):
    """What vLLM's own application answers without a key, path by path."""
    from vllm.entrypoints.launchers.app import build_app

    args, _ = parsed([demo_model, "--api-key=secret"])
    app = build_app(args, ("generate",))
    paths = {route.path: getattr(route, "methods", None) or {"GET"} for route in app.routes}

    async def statuses():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            return {
                path: (await client.request(sorted(methods)[0], path)).status_code
                for path, methods in paths.items()
            }

    answered = asyncio.run(statuses())
    assert answered["/v1/chat/completions"] == 401
    assert {status for path, status in answered.items() if path.startswith("/v1/")} == {401}
    assert answered["/version"] == 200
    section = README.partition("## Who gets in")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(/[\w/.-]+)`", "".join(re.findall(r"^\| `.*", section, re.M))))
    assert named == {path for path, status in answered.items() if status != 401}


@pytest.mark.engine
def test_vllm_refuses_a_wrong_setting(rendered, capsys):
    argv = [argument.replace("=cake", "=cakes") for argument in arguments(rendered["gpu"])]
    with pytest.raises(SystemExit, match="2"):
        parsed(argv)
    assert "cake" in capsys.readouterr().err
