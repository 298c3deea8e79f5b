"""deploy/'s recipes for charts, runtimes and proxies of other projects.

production-stack publishes its schema in no Python package, and KServe's and LiteLLM's packages
bring large parts of other servers. So operator_schemas lists their fields, and vLLM parses the
arguments that reach it.
"""

import jsonschema
import kubernetes_validate
import pytest
import yaml

from manifests import NEWEST, OLDEST, ROOT, arguments, parse_serve
from operator_schemas import PRODUCTION_STACK, SCHEMAS
from vllm_kvcompress.planning.model_traits import Traits
from vllm_kvcompress.refusals.rule import refusal
from vllm_kvcompress.refusals.server import SERVER, Server
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

DEPLOY = ROOT / "deploy"


def read(path):
    return yaml.safe_load((DEPLOY / path).read_text())


RUNTIME, SERVICE = read("kserve/servingruntime.yaml"), read("kserve/inferenceservice.yaml")
ACCOUNT, POLICY = read("kserve/serviceaccount.yaml"), read("kserve/networkpolicy.yaml")
STACK = read("production-stack/values.yaml")["servingEngineSpec"]
DISAGGREGATED = read("production-stack/disaggregated-values.yaml")
PREFILL, DECODE = DISAGGREGATED["servingEngineSpec"]["modelSpec"]
LITELLM = read("litellm/config.yaml")["model_list"]


def kserve_pod():
    """Return KServe's pod: the runtime's container with the model of the InferenceService."""
    (main_container,) = RUNTIME["spec"]["containers"]
    predictor = SERVICE["spec"]["predictor"]
    main_container = {**main_container, "resources": predictor["model"]["resources"]}
    of_predictor = ("serviceAccountName", "automountServiceAccountToken", "securityContext")
    pod = {name: predictor[name] for name in (*of_predictor, "terminationGracePeriodSeconds")}
    pod |= {name: RUNTIME["spec"][name] for name in ("volumes", "tolerations")}
    return {"containers": [main_container], **pod}


def stack_pod():
    """Return the part of the chart's pod that comes directly from the values."""
    main_container = {"name": "vllm", "image": "any"}
    main_container["securityContext"] = STACK["containerSecurityContext"]
    return {"containers": [main_container], "securityContext": STACK["securityContext"]}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("spec", [kserve_pod(), stack_pod()], ids=["kserve", "production-stack"])
def test_the_pods_are_valid(spec, version):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": spec}
    kubernetes_validate.validate(pod, version, strict=True)


def test_all_fields_exist_in_the_projects_schemas():
    jsonschema.validate(RUNTIME, SCHEMAS["ServingRuntime"])
    jsonschema.validate(SERVICE, SCHEMAS["InferenceService"])
    jsonschema.validate({"servingEngineSpec": STACK}, PRODUCTION_STACK)
    jsonschema.validate(DISAGGREGATED, PRODUCTION_STACK)
    model = SERVICE["spec"]["predictor"]["model"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    formats = [entry["name"] for entry in RUNTIME["spec"]["supportedModelFormats"]]
    assert model["modelFormat"]["name"] in formats
    (main_container,) = RUNTIME["spec"]["containers"]
    assert main_container["name"] == "kserve-container"  # KServe adds the model to this container
    mounted = {mount["mountPath"] for mount in main_container["volumeMounts"]}
    assert mounted == {"/models", "/scratch", "/tmp", "/dev/shm"}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kserve_pods_have_a_policy_and_can_download_a_gated_model(version):
    for item in (ACCOUNT, POLICY):
        kubernetes_validate.validate(item, version, strict=True)
    # KServe's storage initializer gets HF_TOKEN from the account's Secrets.
    assert SERVICE["spec"]["predictor"]["serviceAccountName"] == ACCOUNT["metadata"]["name"]
    assert ACCOUNT["secrets"] == [{"name": "vllm-hub"}]
    label = "serving.kserve.io/inferenceservice"
    assert POLICY["spec"]["podSelector"] == {"matchLabels": {label: SERVICE["metadata"]["name"]}}
    (rule,) = POLICY["spec"]["ingress"]
    ours = yaml.safe_load((DEPLOY / "base" / "networkpolicy.yaml").read_text())
    assert rule["from"] == ours["spec"]["ingress"][0]["from"]
    assert POLICY["spec"]["policyTypes"] == ours["spec"]["policyTypes"]
    assert POLICY["spec"]["egress"] == ours["spec"]["egress"]
    (main_container,) = RUNTIME["spec"]["containers"]
    assert rule["ports"] == [{"port": main_container["ports"][0]["containerPort"]}]


def flags(name):
    if name == "kserve":
        (main_container,) = RUNTIME["spec"]["containers"]
        return [*main_container["args"][1:], *SERVICE["spec"]["predictor"]["model"]["args"]]
    (model,) = STACK["modelSpec"]
    return ["--host=0.0.0.0", "--port=8000", *model["vllmConfig"]["extraArgs"]]


@pytest.mark.engine
@pytest.mark.parametrize("name", ["kserve", "production-stack"])
def test_vllm_accepts_the_arguments_of_the_recipe(name, rendered, demo_model):
    args, engine = parse_serve([demo_model, *flags(name)])
    assert (args.host, args.port) == ("0.0.0.0", 8000)
    settings = CompressionConfig.parse(engine.additional_config["kvcompress"])
    _, ours = parse_serve([demo_model, *arguments(rendered["gpu"])[1:]])
    assert settings == CompressionConfig.parse(ours.additional_config["kvcompress"])


@pytest.mark.engine
def test_the_disaggregated_engines_and_router_match(demo_model):
    """NIXL accepts both engines, only decode compresses, and the router selects both."""
    engines = {}
    for main_container in (PREFILL, DECODE):
        argv = [demo_model, "--host=0.0.0.0", "--port=8000"]
        argv += main_container["vllmConfig"]["extraArgs"]
        _, engines[main_container["name"]] = parse_serve(argv)
    prefill, decode = engines.values()
    assert not CompressionConfig.parse(prefill.additional_config.get("kvcompress", {})).active
    main_container = CompressionConfig.parse(decode.additional_config["kvcompress"])
    transfer = decode.kv_transfer_config
    options = {"--kv-transfer-config": transfer.kv_connector}
    server = Server(settings=main_container, model=Traits(), options=options)
    assert refusal(SERVER, server) is None
    assert transfer.kv_role == "kv_consumer"
    assert not transfer.get_from_extra_config("bidirectional_kv_xfer", False)
    assert transfer.kv_connector_module_path is None
    assert not transfer.enable_permute_local_kv
    assert prefill.kv_transfer_config.kv_role == "kv_producer"
    assert prefill.attention_backend == decode.attention_backend == "FLASH_ATTN"
    for key in ("repository", "tag", "modelURL", "env"):
        assert PREFILL[key] == DECODE[key]
    assert DISAGGREGATED["routerSpec"]["extraArgs"] == [
        f"--prefill-model-labels={PREFILL['name']}",
        f"--decode-model-labels={DECODE['name']}",
    ]
    # the two recipes of the chart differ in nothing that has no reason
    single, both = STACK, DISAGGREGATED["servingEngineSpec"]
    shared = {key: value for key, value in single.items() if key != "vllmApiKey"}
    assert both == {**shared, "modelSpec": both["modelSpec"]}
    compressing, expected = (
        [a for a in model["vllmConfig"]["extraArgs"] if a.startswith("--kv-compress")]
        for model in (DECODE, STACK["modelSpec"][0])
    )
    assert compressing == expected


@pytest.mark.parametrize("name", ["gpu", "canary"])
def test_litellm_models_use_settings_that_the_pods_allow(rendered, name):
    valued = [a[5:] for a in arguments(rendered[name]) if a.startswith("--kv-") and "=" in a]
    given = dict(a.split("=", 1) for a in valued)
    pods = CompressionConfig.parse({k.replace("-", "_"): v for k, v in given.items()})
    settings_by_model = {}
    for entry in LITELLM:
        parameters = entry["litellm_params"]
        assert parameters.keys() == {"model", "api_base", "api_key", "extra_body"}
        assert parameters["model"].startswith("hosted_vllm/")  # it forwards extra_body unchanged
        assert parameters["api_key"] == "os.environ/VLLM_API_KEY"
        settings_by_model[entry["model_name"]] = RequestOptions.parse(
            pods, parameters["extra_body"]["vllm_xargs"]
        ).settings
    assert settings_by_model["llama-3.1-8b"] is None
    compressed = settings_by_model["llama-3.1-8b@kv0.2"]
    assert (compressed.compress, compressed.budget) == ("cake-chunk", 0.2)
