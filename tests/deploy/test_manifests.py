"""deploy/: every overlay renders, is valid, is locked down, and gives vLLM what it accepts."""

import re
import shutil

import jsonschema
import kubernetes_validate
import pytest
import yaml

from manifests import OVERLAYS, ROOT, arguments, container, one, render
from operator_schemas import SCHEMAS

NAMES = sorted(path.name for path in OVERLAYS.iterdir())
OLDEST, NEWEST = "1.29", "1.37"  # of Kubernetes


@pytest.fixture(params=NAMES)
def objects(request, rendered):
    return rendered[request.param]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid(objects, version):
    for found in objects:
        if found["apiVersion"].startswith("monitoring.coreos.com/"):
            jsonschema.validate(found, SCHEMAS[found["kind"]])
        else:
            kubernetes_validate.validate(found, version, strict=True)


def test_the_schemas_refuse_what_kubernetes_would(rendered):
    deployment = one(rendered["gpu"], "Deployment")
    broken = {**deployment, "spec": {**deployment["spec"], "replica": 2}}
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        kubernetes_validate.validate(broken, NEWEST, strict=True)
    monitor = one(rendered["gpu"], "ServiceMonitor")
    broken = {**monitor, "spec": {**monitor["spec"], "endpoint": []}}
    with pytest.raises(jsonschema.ValidationError, match="endpoint"):
        jsonschema.validate(broken, SCHEMAS["ServiceMonitor"])


def test_a_kubectl_of_this_machine_renders_the_same(rendered, kubectl_binary):
    """Users have other versions than the one in the lock; here is one more if there is one."""
    for binary in filter(None, {shutil.which("kubectl"), str(kubectl_binary)}):
        for name in NAMES:
            assert render(binary, name) == rendered[name], (binary, name)


def test_it_may_do_nothing_that_it_need_not(objects):
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert one(objects, "ServiceAccount")["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == one(objects, "ServiceAccount")["metadata"]["name"]
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    own = container(objects)["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_all_that_the_images_write_to_is_mounted(objects):
    mounted = {mount["mountPath"] for mount in container(objects)["volumeMounts"]}
    assert mounted == {"/models", "/scratch", "/tmp", "/dev/shm"}
    volumes = one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {v["name"] for v in volumes} == {m["name"] for m in container(objects)["volumeMounts"]}


def test_secrets_are_named_and_optional(objects):
    from_secrets = [e for e in container(objects)["env"] if "secretKeyRef" in e["valueFrom"]]
    assert {e["name"] for e in from_secrets} == {"HF_TOKEN", "VLLM_API_KEY"}
    assert all(e["valueFrom"]["secretKeyRef"]["optional"] for e in from_secrets)
    assert not [o for o in objects if o["kind"] == "Secret"]


def test_running_requests_are_given_time_to_end(objects):
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    sleep = int(container(objects)["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(re.search(r"--shutdown-timeout=(\d+)", " ".join(arguments(objects)))[1])
    ready = container(objects)["readinessProbe"]
    assert drain > 0
    assert pod["terminationGracePeriodSeconds"] >= sleep + drain + 20
    assert sleep >= ready["periodSeconds"]


def test_every_selector_finds_the_pods_and_no_others(rendered):
    def labels(name):
        return one(rendered[name], "Deployment")["spec"]["template"]["metadata"]["labels"].items()

    for name, objects in rendered.items():
        for kind in ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"):
            spec = one(objects, kind)["spec"]
            selector = spec["podSelector" if kind == "NetworkPolicy" else "selector"]
            selector = selector.get("matchLabels", selector)
            assert selector.items() <= labels(name), (name, kind)
            other = "gpu" if name == "canary" else "canary"
            assert not selector.items() <= labels(other), (name, kind)
        if monitors := [o for o in objects if o["kind"] == "ServiceMonitor"]:
            wanted = monitors[0]["spec"]["selector"]["matchLabels"].items()
            assert wanted <= one(objects, "Service")["metadata"]["labels"].items()
            assert wanted <= one(rendered["canary"], "Service")["metadata"]["labels"].items()


def test_the_canary_stands_beside_the_gpu_overlay(rendered):
    names = {
        name: {(o["kind"], o["metadata"]["name"]) for o in rendered[name]}
        for name in ("gpu", "canary")
    }
    assert not names["gpu"] & names["canary"]
    volumes = one(rendered["canary"], "Deployment")["spec"]["template"]["spec"]["volumes"]
    claims = [v["persistentVolumeClaim"] for v in volumes if "persistentVolumeClaim" in v]
    assert claims == [{"claimName": "model-cache"}]
    assert one(rendered["gpu"], "PersistentVolumeClaim")["metadata"]["name"] == "model-cache"
    modes = one(rendered["gpu"], "PersistentVolumeClaim")["spec"]["accessModes"]
    assert modes == ["ReadWriteMany"]


def test_gpus_are_asked_for_where_they_are_needed(rendered):
    for name in NAMES:
        limits = container(rendered[name])["resources"]["limits"]
        assert limits.get("nvidia.com/gpu") == (None if name == "cpu" else "1")
        image = container(rendered[name])["image"]
        assert image == f"vllm-kvcompress:0.1.0-{'cpu' if name == 'cpu' else 'cuda'}"


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


def parsed(argv):
    """The arguments as `vllm serve` parses and folds them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    import vllm_kvcompress

    vllm_kvcompress.register()
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *argv])
    args.model = args.model_tag  # as the command does first
    return args, AsyncEngineArgs.from_cli_args(args)


@pytest.mark.engine
@pytest.mark.parametrize("name", NAMES)
def test_vllm_takes_the_arguments(rendered, name, demo_model):
    from vllm_kvcompress.config import CompressionConfig

    model, *flags = arguments(rendered[name])
    assert model == one(rendered[name], "ConfigMap", "settings")["data"]["MODEL"]
    args, engine = parsed([demo_model, *flags])  # vLLM looks for the model at once
    assert args.model_tag == demo_model
    assert (args.host, args.port) == ("0.0.0.0", 8000)
    assert engine.shutdown_timeout == 120
    settings = CompressionConfig.parse(engine.additional_config["kvcompress"])
    if name == "canary":
        assert not settings.enabled
        assert settings.active
        assert "snapkv" in settings.allow_override
        return
    assert settings.compress == "cake"
    assert settings.budget == 0.2
    # a client can step out at once, and ask for no other method
    assert settings.allow_override == ("off",)


@pytest.mark.engine
def test_vllm_refuses_a_wrong_setting(rendered, capsys):
    argv = [argument.replace("=cake", "=cakes") for argument in arguments(rendered["gpu"])]
    with pytest.raises(SystemExit, match="2"):
        parsed(argv)
    assert "cake" in capsys.readouterr().err
