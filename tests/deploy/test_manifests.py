"""deploy/: every overlay renders, is valid and has restricted permissions."""

import re
import shutil
from ipaddress import ip_address, ip_network

import jsonschema
import kubernetes_validate
import pytest

from manifests import (
    GROUP,
    GROUPS,
    NAMES,
    NEWEST,
    OLDEST,
    SERVING,
    arguments,
    container,
    downloads_model,
    find_object,
    pods,
    render,
    selects,
)
from operator_schemas import SCHEMAS
from vllm_kvcompress import __version__

GPU = [name for name in SERVING if name != "cpu"]


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
    for template in pods(any_objects):  # operator schemas do not check pod templates
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}}
        kubernetes_validate.validate({**pod, "spec": template["spec"]}, version, strict=True)


def test_the_schemas_reject_unknown_fields(rendered):
    deployment = find_object(rendered["gpu"], "Deployment")
    broken = {**deployment, "spec": {**deployment["spec"], "replica": 2}}
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        kubernetes_validate.validate(broken, NEWEST, strict=True)
    monitor = find_object(rendered["gpu"], "ServiceMonitor")
    broken = {**monitor, "spec": {**monitor["spec"], "endpoint": []}}
    with pytest.raises(jsonschema.ValidationError, match="endpoint"):
        jsonschema.validate(broken, SCHEMAS["ServiceMonitor"])


def test_another_kubectl_version_renders_the_same(rendered):
    """Users have other versions than the lock; test the one on this machine, if any."""
    other = shutil.which("kubectl")
    if other is None:
        pytest.skip("no other kubectl on this machine")
    for name in NAMES:
        assert render(other, name) == rendered[name], name


def test_pods_have_minimal_permissions(any_objects, request):
    openshift = "openshift" in request.node.name
    for template in pods(any_objects):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        if accounts := [o for o in any_objects if o["kind"] == "ServiceAccount"]:
            assert accounts[0]["automountServiceAccountToken"] is False
            assert pod["serviceAccountName"] == accounts[0]["metadata"]["name"]
        assert pod["enableServiceLinks"] is False
        context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        if not openshift:  # its SCC assigns a uid per namespace and rejects others
            context |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 10001)
            context["fsGroupChangePolicy"] = "OnRootMismatch"
        assert pod["securityContext"] == context
        (main_container,) = pod["containers"]
        assert main_container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert main_container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in main_container["resources"]["limits"]


def test_all_that_the_images_write_to_is_mounted(any_objects, request):
    needed = {"/models", "/scratch", "/tmp", "/dev/shm"}
    for template in pods(any_objects):
        (main_container,) = template["spec"]["containers"]
        mounted = {mount["mountPath"] for mount in main_container["volumeMounts"]}
        unused = {"/dev/shm"} if downloads_model(main_container) else set()
        assert mounted - {"/compiled"} == needed - unused
        names = {mount["name"] for mount in main_container["volumeMounts"]}
        assert {v["name"] for v in template["spec"]["volumes"]} == names


@pytest.mark.parametrize("name", GPU)
def test_what_is_compiled_outlives_a_pod(rendered, name):
    for template in pods(rendered[name]):
        (main_container,) = template["spec"]["containers"]
        names = [entry["name"] for entry in main_container["env"]]
        values = {e["name"]: e["value"] for e in main_container["env"] if "value" in e}
        kept = {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"}
        assert values.keys() >= kept
        for variable in kept:
            assert values[variable].startswith("/compiled/$(NODE_NAME)/")
            # otherwise kubelet does not expand it
            assert names.index("NODE_NAME") < names.index(variable)
        (volume,) = [v for v in template["spec"]["volumes"] if v["name"] == "compiled"]
        claim = volume["persistentVolumeClaim"]["claimName"]
    volumes_of = {"canary": "gpu", "example/canary": "example"}
    owner = rendered[volumes_of.get(name, name)]
    spec = find_object(owner, "PersistentVolumeClaim", claim)["spec"]
    assert spec["accessModes"] == ["ReadWriteMany"]


def test_secrets_are_references_and_gpu_pods_require_the_api_key(any_objects, request):
    assert not [o for o in any_objects if o["kind"] == "Secret"]
    for template in pods(any_objects):
        (main_container,) = template["spec"]["containers"]
        secrets = {
            entry["name"]: entry["valueFrom"]["secretKeyRef"]
            for entry in main_container["env"]
            if "secretKeyRef" in entry.get("valueFrom", {})
        }
        token = {"name": "vllm-secrets", "key": "hf-token", "optional": True}
        assert secrets.pop("HF_TOKEN") == token
        if downloads_model(main_container):
            assert not secrets
            continue
        optional = "gpu" not in str(main_container["resources"])
        key = {"name": "vllm-secrets", "key": "api-key", "optional": optional}
        assert secrets == {"VLLM_API_KEY": key}


def test_running_requests_have_time_to_finish(objects):
    pod = pods(objects)[0]["spec"]
    sleep = int(container(objects)["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(re.search(r"--shutdown-timeout=(\d+)", " ".join(container(objects)["args"]))[1])
    ready = container(objects)["readinessProbe"]
    assert drain > 0
    assert pod["terminationGracePeriodSeconds"] >= sleep + drain + 20
    assert sleep >= ready["periodSeconds"]


def test_selectors_match_only_their_own_pods(rendered):
    def labels(name):
        return pods(rendered[name])[0]["metadata"]["labels"]

    # Only these overlays run at the same time as another one. All others replace each other.
    separate = {"canary", "multi-node", "prefetch"}
    for path, objects in rendered.items():
        name = path.rpartition("/")[2].removesuffix("-ray")
        for item in objects:
            kinds = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
            if item["kind"] not in kinds:
                continue
            policy = item["kind"] == "NetworkPolicy"
            selector = item["spec"]["podSelector" if policy else "selector"]
            assert selects(selector, labels(path)), (path, item["kind"])
            for other in ({"gpu"} | separate) - {name}:
                if name in separate or other in separate:
                    assert not selects(selector, labels(other)), (name, item["kind"], other)
        if monitors := [o for o in objects if o["kind"] == "ServiceMonitor"]:
            selected = monitors[0]["spec"]["selector"]["matchLabels"].items()
            for service in (find_object(each, "Service") for each in (objects, rendered["canary"])):
                assert selected <= service["metadata"]["labels"].items()


def peers(policy, port):
    """Return the peers that ingress rules for `port` admit."""
    rules = policy["spec"]["ingress"]
    return [
        p for r in rules if {"port": port} in r.get("ports", [{"port": port}]) for p in r["from"]
    ]


def test_only_labelled_clients_prometheus_and_the_gateway_are_admitted(objects, request):
    policy = find_object(objects, "NetworkPolicy")
    pod_selectors = [p["podSelector"] for p in peers(policy, "http") if "podSelector" in p]
    client = {"vllm-kvcompress/client": "yes"}
    main_container = pods(objects)[0]["metadata"]["labels"]
    assert any(selects(selector, client) for selector in pod_selectors)
    assert not any(selects(selector, {"app": "another"}) for selector in pod_selectors)
    is_group = "multi-node" in request.node.name  # machines of a group reach each other
    assert any(selects(selector, main_container) for selector in pod_selectors) == is_group
    namespaces = [
        p["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for p in peers(policy, "http")
        if "namespaceSelector" in p
    ]
    if "example/canary" in request.node.name:
        assert namespaces == ["observability"]  # only the deployment has a gateway
    elif "example" in request.node.name:
        assert namespaces == ["observability", "istio-ingress"]
    else:
        assert namespaces == ["monitoring"]


def test_all_kinds_of_cluster_dns_are_reachable(any_objects):
    rules = find_object(any_objects, "NetworkPolicy")["spec"]["egress"]
    both = [{"port": 53, "protocol": name} for name in ("UDP", "TCP")]
    (names,) = [rule for rule in rules if rule.get("ports") == both]
    space = "kubernetes.io/metadata.name"
    assert {"namespaceSelector": {"matchLabels": {space: "kube-system"}}} in names["to"]
    # NodeLocal DNSCache is on the host network, which no selector matches.
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in names["to"]
    both = [{"port": 5353, "protocol": name} for name in ("UDP", "TCP")]
    (names,) = [rule for rule in rules if rule.get("ports") == both]
    assert names["to"] == [{"namespaceSelector": {"matchLabels": {space: "openshift-dns"}}}]


def test_egress_is_dns_and_public_https(any_objects, request):
    policy = find_object(any_objects, "NetworkPolicy")["spec"]
    assert "Egress" in policy["policyTypes"]
    ports = [({port["port"] for port in r.get("ports", [])}, r) for r in policy["egress"]]
    others = [rule for numbers, rule in ports if numbers not in ({53}, {5353})]
    if "multi-node" in request.node.name:  # machines of a group reach each other
        assert others.pop().keys() == {"to"}
    if re.search(r"example(/canary)?\]", request.node.name):
        assert not others  # the model is in the volume
        settings = find_object(any_objects, "ConfigMap", "settings")["data"]
        assert settings["HF_HUB_OFFLINE"] == "1"
        return
    (rule,) = others
    assert rule["ports"] == [{"port": 443}]
    blocks = [peer["ipBlock"] for peer in rule["to"]]
    inside = ("10.0.0.1", "172.31.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "fd00::1")
    for address in map(ip_address, (*inside, "93.184.215.14", "2606:2800:220:1::1")):
        admitted = any(
            address in ip_network(block["cidr"])
            and not any(address in ip_network(part) for part in block["except"])
            for block in blocks
        )
        assert admitted == (str(address) not in inside), address


def test_the_canary_can_run_next_to_the_gpu_overlay(rendered):
    gpu, canary = (
        {(o["kind"], o["metadata"]["name"]) for o in rendered[name]} for name in ("gpu", "canary")
    )
    assert not gpu & canary
    volumes = find_object(rendered["canary"], "Deployment")["spec"]["template"]["spec"]["volumes"]
    claims = [v["persistentVolumeClaim"] for v in volumes if "persistentVolumeClaim" in v]
    assert {claim["claimName"] for claim in claims} == {"model-cache", "compile-cache"}
    for claim in claims:
        volume = find_object(rendered["gpu"], "PersistentVolumeClaim", claim["claimName"])
        assert volume["spec"]["accessModes"] == ["ReadWriteMany"]


def test_each_overlay_requests_its_gpus_and_image(rendered):
    counts = {"cpu": None, "prefetch": None, "tensor-parallel": "4"} | dict.fromkeys(GROUPS, "8")
    for name in NAMES:
        for template in pods(rendered[name]):
            (main_container,) = template["spec"]["containers"]
            gpus = counts.get(name.rpartition("/")[2], "1")
            assert main_container["resources"]["limits"].get("nvidia.com/gpu") == gpus
            registry = "registry.example.com/team/" if name.startswith("example") else ""
            build = {"cpu": "cpu", "multi-node-ray": "cuda-ray"}.get(name, "cuda")
            assert main_container["image"] == f"{registry}vllm-kvcompress:{__version__}-{build}"


def test_tensor_parallelism_uses_all_gpus_and_has_shared_memory(rendered):
    for name, machines in (("tensor-parallel", 1), *((group, 2) for group in GROUPS)):
        for number, template in enumerate(pods(rendered[name])):
            (main_container,) = template["spec"]["containers"]
            limits = main_container["resources"]["limits"]
            ranks = machines * int(limits["nvidia.com/gpu"])
            args = main_container.get("args", ["--headless"])  # a Ray worker has no arguments
            assert f"--tensor-parallel-size={ranks}" in args or args == ["--headless"]
            (shm,) = [v for v in template["spec"]["volumes"] if v["name"] == "shm"]
            assert shm["emptyDir"]["medium"] == "Memory"
            assert int(shm["emptyDir"]["sizeLimit"].removesuffix("Gi")) >= 8 * ranks / machines
            assert ("--headless" in args) == (number == 1)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_machines_is_one_server(rendered, name):
    objects = rendered[name]
    group = find_object(objects, "LeaderWorkerSet")
    leader, worker = pods(objects)
    assert group["spec"]["leaderWorkerTemplate"]["size"] == int(GROUP["LWS_GROUP_SIZE"])
    # The operator creates a Service with the name of the set.
    assert group["metadata"]["name"] != find_object(objects, "Service")["metadata"]["name"]
    selector = find_object(objects, "Service")["spec"]["selector"]
    assert selects(selector, leader["metadata"]["labels"])
    assert not selects(selector, worker["metadata"]["labels"])
    assert not [name for name in container(objects, 1) if "Probe" in name or name == "ports"]
    names = [entry["name"] for entry in container(objects, 1)["env"]]
    assert "VLLM_HOST_IP" in names
    settings = find_object(objects, "ConfigMap", "settings")["metadata"]["name"]
    for number in (0, 1):
        assert container(objects, number)["envFrom"] == [{"configMapRef": {"name": settings}}]
    # Workers run until the leader has drained.
    sleep = int(container(objects, 1)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert sleep >= leader["spec"]["terminationGracePeriodSeconds"]
    assert worker["spec"]["terminationGracePeriodSeconds"] > sleep
    policy = find_object(objects, "NetworkPolicy")["spec"]
    for rules, side in ((policy["ingress"], "from"), (policy["egress"], "to")):
        (among,) = [r for r in rules if "ports" not in r]
        assert selects(among[side][0]["podSelector"], worker["metadata"]["labels"])
        assert not selects(among[side][0]["podSelector"], {"track": "multi-node"})


def test_the_prefetch_job_downloads_the_model_that_pods_serve(rendered):
    objects = rendered["prefetch"]
    kinds = {o["kind"] for o in objects}
    assert kinds == {"ConfigMap", "Job", "NetworkPolicy", "PersistentVolumeClaim"}
    main_container = container(objects)
    assert main_container["command"] == ["hf", "download"]
    settings = find_object(rendered["gpu"], "ConfigMap", "settings")["data"]
    model, *options = arguments(objects)
    assert model == settings["MODEL"]
    assert options == ["--exclude=original/*"]
    assert find_object(objects, "PersistentVolumeClaim") == {
        **find_object(rendered["gpu"], "PersistentVolumeClaim", "model"),
        "metadata": find_object(objects, "PersistentVolumeClaim")["metadata"],
    }
