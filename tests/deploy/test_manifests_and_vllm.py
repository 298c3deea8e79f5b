"""deploy/ uses arguments, ports, paths and metrics that vLLM's server has."""

import asyncio
import re

import httpx
import pytest
import yaml

from manifests import GROUP, ROOT, SERVING, arguments, container, find_object, parse_serve, pods

README = (ROOT / "deploy" / "README.md").read_text()


@pytest.fixture(params=SERVING)
def objects(request, rendered):
    return rendered[request.param]


def test_the_gateway_forwards_only_paths_that_need_the_key(rendered):
    route = find_object(rendered["example"], "HTTPRoute")["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "istio-ingress"}]
    assert route["hostnames"] == ["llm.example.com"]
    (rule,) = route["rules"]
    service = find_object(rendered["example"], "Service")
    (target,) = rule["backendRefs"]
    assert target["name"] == service["metadata"]["name"]
    assert target["port"] == service["spec"]["ports"][0]["port"]
    # The test of the README's table checks that these paths need the key.
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]


def test_probes_and_service_reach_the_port(objects):
    main_container = container(objects)
    assert main_container["ports"] == [{"name": "http", "containerPort": 8000}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert main_container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert find_object(objects, "Service")["spec"]["ports"][0]["targetPort"] == "http"
    assert "--port=8000" in main_container["args"]


def test_the_autoscaler_uses_the_adapters_metric(rendered):
    scaler = find_object(rendered["gpu"], "HorizontalPodAutoscaler")["spec"]
    values = ROOT / "deploy" / "components" / "autoscaling" / "prometheus-adapter-values.yaml"
    (rule,) = yaml.safe_load(values.read_text())["rules"]["custom"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    target = find_object(rendered["gpu"], "Deployment")
    assert scaler["scaleTargetRef"]["name"] == target["metadata"]["name"]
    assert "replicas" not in target["spec"]  # the autoscaler sets it


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVING)
def test_vllm_accepts_the_arguments(rendered, name, demo_model):
    from vllm_kvcompress.settings.config import CompressionConfig

    for number, pod in enumerate(pods(rendered[name])):
        if "args" not in pod["spec"]["containers"][0]:  # a Ray worker
            assert (name, number) == ("multi-node-ray", 1)
            continue
        rank = {"LWS_WORKER_INDEX": str(number)}
        model, *flags = arguments(rendered[name], number, GROUP | rank)
        assert model == find_object(rendered[name], "ConfigMap", "settings")["data"]["MODEL"]
        args, engine = parse_serve([demo_model, *flags])  # vLLM needs an existing model
        assert args.model_tag == demo_model
        assert (args.host, args.port) == ("0.0.0.0", 8000)
        assert engine.shutdown_timeout == 120
        if name == "multi-node":
            assert (engine.nnodes, engine.node_rank) == (2, number)
            assert engine.master_addr == GROUP["LWS_LEADER_ADDRESS"]
            assert args.headless == (number == 1)
        backend = "ray" if name == "multi-node-ray" else None
        assert engine.distributed_executor_backend == backend
        settings = CompressionConfig.parse(engine.additional_config["kvcompress"])
        if name.endswith("canary"):
            assert not settings.enabled
            assert settings.active
            assert "snapkv" in settings.allow_override
            assert settings.usage
            continue
        assert not settings.usage
        assert settings.compress == "cake-chunk"
        budget, packed_dtype = {"example": (0.3, "auto"), "cpu": (0.6, "k4v3")}.get(
            name, (0.2, "auto")
        )
        assert (settings.budget, settings.resolved_packed_dtype) == (budget, packed_dtype)
        # Clients can switch compression off, but cannot choose another method.
        assert settings.allow_override == ("off",)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["gpu", "example/canary"])
def test_the_off_switch_needs_no_other_arguments(rendered, demo_model, name, monkeypatch):
    """The canary compresses requests that name a method, whatever KV_COMPRESS says."""
    from vllm_kvcompress.settings.config import CompressionConfig

    monkeypatch.setenv("KVCOMPRESS_OFF", "1")
    _, engine = parse_serve([demo_model, *arguments(rendered[name])[1:]])
    assert not CompressionConfig.parse(engine.additional_config["kvcompress"]).active


@pytest.mark.engine
def test_the_readme_lists_all_paths_without_a_key(demo_model):
    """Request every path of vLLM's application without a key."""
    from vllm.entrypoints.launchers.app import build_app

    args, _ = parse_serve([demo_model, "--api-key=secret"])
    app = build_app(args, ("generate",))
    paths = {route.path: getattr(route, "methods", None) or {"GET"} for route in app.routes}

    async def statuses():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
            return {
                path: (await client.request(sorted(methods)[0], path)).status_code
                for path, methods in paths.items()
            }

    status_by_path = asyncio.run(statuses())
    assert status_by_path["/v1/chat/completions"] == 401
    assert {status for path, status in status_by_path.items() if path.startswith("/v1/")} == {401}
    assert status_by_path["/version"] == 200
    section = README.partition("## Who gets in")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(/[\w/.-]+)`", "".join(re.findall(r"^\| `.*", section, re.M))))
    assert documented == {path for path, status in status_by_path.items() if status != 401}


@pytest.mark.engine
def test_vllm_rejects_an_unknown_method(rendered, capsys):
    argv = [a.replace("=cake-chunk", "=cake-chunks") for a in arguments(rendered["gpu"])]
    with pytest.raises(SystemExit, match="2"):
        parse_serve(argv)
    assert "did you mean 'cake-chunk'" in capsys.readouterr().err.splitlines()[-1]
