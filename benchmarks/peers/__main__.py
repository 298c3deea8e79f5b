"""Compare kvpress's presses with this plugin at equal numbers of kept tokens: `make peers`.

    python -m benchmarks.peers --peers .cache/peers/bin/python

Two processes share a folder. One makes the prompts and compresses them with our methods, and then
one compresses them with kvpress's presses in kvpress's own environment. Results stay in the folder,
so an interrupted run continues. The outputs are a JSON file and a Markdown report.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.origin import commit, machine
from benchmarks.peers import exchange
from benchmarks.peers.report import markdown, summaries

ROOT = Path(__file__).parents[2]
STAGES = {exchange.OURS: "ours", exchange.KVPRESS: "presses"}
"""By side, in run order: the module that measures it."""
_VERSIONS = "import importlib.metadata as m; print(*(m.version(n) for n in {names!r}))"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", type=Path, default=Path(".cache/smollm2-135m-instruct"))
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path(".cache/peers/bin/python"),
        help="Python of kvpress's environment",
    )
    parser.add_argument(
        "--run", type=Path, default=Path(".cache/peers-run"), help="folder that the processes share"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/peers"))
    parser.add_argument("--budgets", nargs="+", type=float, default=(0.5, 0.2, 0.1))
    parser.add_argument("--needles", type=int, default=10)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument(
        "--kvzip-tokens",
        type=int,
        default=1400,
        help="maximum length of needle prompts for KVzip, which replays them",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", nargs="*", choices=list(STAGES), default=list(STAGES))
    return parser.parse_args(argv)


def claim_folder(args: argparse.Namespace) -> None:
    """Create the run folder, or continue in it if it has the same settings.

    Raises:
        SystemExit: the folder has a run with other settings.
    """
    names = ("model", "budgets", "needles", "texts", "kvzip_tokens", "seed")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"model": str(args.model), "budgets": list(args.budgets)}
    settings_file = args.run / "settings.json"
    args.run.mkdir(parents=True, exist_ok=True)
    if settings_file.exists() and (found := json.loads(settings_file.read_text())) != settings:
        raise SystemExit(
            f"{args.run} has a run with the settings {found}, but this run needs {settings}:"
            " pass another folder with --run, or remove this one"
        )
    settings_file.write_text(json.dumps(settings) + "\n")


def stage(args: argparse.Namespace, name: str) -> None:
    """Run the process of one stage.

    Raises:
        SystemExit: the process failed. Its results so far stay in the folder.
    """
    python = args.peers if name == exchange.KVPRESS else sys.executable
    arguments = [f"benchmarks.peers.{STAGES[name]}", str(args.run)]
    paths = [str(ROOT), str(ROOT / "kernels")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([str(python), "-m", *arguments], env=environment, check=False)
    if run.returncode:
        raise SystemExit(
            f"stage {name} failed with status {run.returncode}; its results so far are in"
            f" {args.run}: fix the error above and run the same command again"
        )


def versions(python: Path | str, *names: str) -> list[str]:
    code = _VERSIONS.format(names=names)
    run = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()


def collect_results(args: argparse.Namespace) -> dict[str, Any]:
    """Return all results of the folder and their origin."""
    prompts = exchange.read(args.run / "prompts.jsonl", exchange.Prompt)
    results = [
        result
        for side in (exchange.KVPRESS, exchange.OURS)
        for result in exchange.read(args.run / f"{side}.jsonl", exchange.Result)
    ]
    lengths = [len(prompt.ids) for prompt in prompts]
    needles = sum(prompt.kind == exchange.NEEDLE for prompt in prompts)
    kvpress, theirs = versions(args.peers, "kvpress", "transformers")
    (ours,) = versions(sys.executable, "transformers")
    return {
        "machine": machine(),
        "command": " ".join(["python -m benchmarks.peers", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "model": args.model.name,
        "kvpress": kvpress,
        "transformers": {"kvpress": theirs, "ours": ours},
        "prompts": f"{needles} needles and {len(prompts) - needles} texts of {min(lengths)} to"
        f" {max(lengths)} tokens",
        "budgets": sorted(args.budgets, reverse=True),
        "pairs": summaries(results),
    }


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    claim_folder(args)
    for name in args.stages:
        stage(args, name)
    results = collect_results(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    args.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
