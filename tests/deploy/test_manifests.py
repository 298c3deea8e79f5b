"""deploy/: every overlay renders, is valid, is locked down, and gives vLLM what it accepts."""

import re
import shutil

import jsonschema
import kubernetes_validate
import pytest

from manifests import (
    GROUPS,
    NAMES,
    NEWEST,
    OLDEST,
    ROOT,
    arguments,
    container,
    fetches,
    one,
    pods,
    render,
    selected,
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
        assert mounted - {"/compiled"} == (needed - {"/dev/shm"} if fetches(own) else needed)
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
        if fetches(own):
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


def test_every_selector_finds_the_pods_and_no_others(rendered):
    def labels(name):
        return pods(rendered[name])[0]["metadata"]["labels"]

    # all others stand in each other's place, and the groups in one another's
    apart = {"canary", "multi-node", "prefetch"}
    for path, objects in rendered.items():
        name = path.rpartition("/")[2].removesuffix("-ray")
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
    counts = {"cpu": None, "prefetch": None, "tensor-parallel": "4"} | dict.fromkeys(GROUPS, "8")
    for name in NAMES:
        for template in pods(rendered[name]):
            (own,) = template["spec"]["containers"]
            asked = counts.get(name.rpartition("/")[2], "1")
            assert own["resources"]["limits"].get("nvidia.com/gpu") == asked
            where = "registry.example.com/team/" if name.startswith("example") else ""
            build = {"cpu": "cpu", "multi-node-ray": "cuda-ray"}.get(name, "cuda")
            assert own["image"] == f"{where}vllm-kvcompress:{__version__}-{build}"


def test_tensor_parallelism_fills_a_pods_gpus_and_has_shared_memory(rendered):
    for name, machines in (("tensor-parallel", 1), *((group, 2) for group in GROUPS)):
        for number, template in enumerate(pods(rendered[name])):
            (own,) = template["spec"]["containers"]
            limits = own["resources"]["limits"]
            ranks = machines * int(limits["nvidia.com/gpu"])
            given = own.get("args", ["--headless"])  # a worker of Ray's is given none
            assert f"--tensor-parallel-size={ranks}" in given or given == ["--headless"]
            (shm,) = [v for v in template["spec"]["volumes"] if v["name"] == "shm"]
            assert shm["emptyDir"]["medium"] == "Memory"
            assert int(shm["emptyDir"]["sizeLimit"].removesuffix("Gi")) >= 8 * ranks / machines
            assert ("--headless" in given) == (number == 1)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_is_one_server(rendered, name):
    objects = rendered[name]
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
