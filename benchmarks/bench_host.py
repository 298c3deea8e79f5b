"""Host time of compressing the prompts that end in one step, with kernel launches replaced.

    python -m benchmarks.bench_host --before COMMIT

Triton launches are no-ops and torch's operators get tiny CPU tensors. The measured CPU time is
therefore the host's cost of issuing one packing. It barely depends on other processes. With
`--before`, a second process times the code of another commit. The two processes alternate in rounds
on the same machine.

On a GPU the host also waits in CUDA's launch functions, about 2 to 5 microseconds per launch;
`tests/engine/test_launches.py` counts the launches.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "cake": ({"compress": "cake", "budget": 0.2, "lookahead": 0}, {}),
    "snapkv": ({"compress": "snapkv", "budget": 0.2}, {}),
    "cake-chunk": ({"compress": "cake-chunk", "budget": 0.2}, {}),
    "cake-chunk k4v3": ({"compress": "cake-chunk", "budget": 0.6, "packed_dtype": "k4v3"}, {}),
    "cake-chunk, 4 prompts": ({"compress": "cake-chunk", "budget": 0.2}, {"requests": 4}),
    "cake-chunk, 16 prompts": ({"compress": "cake-chunk", "budget": 0.2}, {"requests": 16}),
}
"""Settings, and the shape where it differs from `_SHAPE`."""
_SHORTENED = 8192 // 128
"""Prompts of 8,192 tokens are shortened by this factor, so that torch's operators take no time."""
_SHAPE = {
    "layers": 32,
    "tokens": 8192 // _SHORTENED,
    "heads": 4,
    "kv_heads": 1,
    "head_dim": 64,
    "max_tokens": 131072 // _SHORTENED,
}


def main() -> None:
    """Time all cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--before", help="a commit whose code is timed too")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each case (15)")
    parser.add_argument("--repeats", type=int, default=20, help="packings in a round (20)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve()
        return
    with sources(args.before) as trees:
        times = measure(trees, args.rounds, args.repeats)
    print_table(times)
    if args.json:
        from benchmarks.origin import commit, machine

        run = {"machine": machine(), "commit": commit(), "before": args.before}
        record = {**run, "shape": _SHAPE, "milliseconds": times}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


@contextmanager
def sources(before: str | None) -> Iterator[dict[str, Path]]:
    """Yield the directories of the code to time: "before", if asked for, and "after"."""
    if before is None:
        yield {"after": ROOT}
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), before], check=True)
        try:
            yield {"before": tree, "after": ROOT}
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure(
    trees: dict[str, Path], rounds: int, repeats: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return, by case and tree, the median and the smallest milliseconds per packing."""
    from benchmarks.json_process import JsonProcess

    # A worker runs the benchmark of its own tree, because requests to pack differ between commits.
    script = Path("benchmarks", Path(__file__).name)
    workers = {
        name: JsonProcess(
            [str(tree / script), "--worker"], PYTHONPATH=f"{tree}{os.pathsep}{tree / 'kernels'}"
        )
        for name, tree in trees.items()
    }
    seconds: dict[str, dict[str, list[float]]] = {}
    for case in CASES:
        seconds[case] = {name: [] for name in workers}
        for _ in range(rounds + 1):  # the first round warms up
            for name, worker in workers.items():
                seconds[case][name] += worker.ask({"case": case, "repeats": repeats})
    for worker in workers.values():
        worker.close()
    return {
        case: {
            name: {
                "median": 1e3 * statistics.median(times[repeats:]),
                "best": 1e3 * min(times[repeats:]),
            }
            for name, times in by_tree.items()
        }
        for case, by_tree in seconds.items()
    }


def serve() -> None:
    """Time the cases named on standard input; write the seconds of each packing."""
    # An older commit's `benchmarks` may lack this module, so import it from this file's folder.
    import dummy_prompts
    import torch

    torch.set_num_threads(1)
    # As many layers of a shortened prompt share a launch as of a prompt of full length.
    memory = importlib.import_module("vllm_kvcompress.planning.memory")
    if hasattr(memory, name := "_MIN_SCORED_TOKENS"):
        setattr(memory, name, getattr(memory, name) // _SHORTENED)
    prompts: dict[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        options, shape = CASES[asked["case"]]
        if asked["case"] not in prompts:
            prompts.clear()
            of_model = dummy_prompts.Shape(**{**_SHAPE, **shape})
            prompts[asked["case"]] = dummy_prompts.DummyPrompts(options, of_model, "cpu")
        timed, seconds = prompts[asked["case"]], []
        with dummy_prompts.replaced_launches("cpu"):
            for _ in range(asked["repeats"]):
                timed.begin()
                start = time.thread_time()
                timed.run()
                seconds.append(time.thread_time() - start)
                timed.end()
        print(json.dumps(seconds), flush=True)


def print_table(times: dict[str, dict[str, dict[str, float]]]) -> None:
    print("CPU milliseconds to issue one packing (median, best):")
    for case, by_tree in times.items():
        cells = [
            f"{name} {figures['median']:6.2f} {figures['best']:6.2f}"
            for name, figures in by_tree.items()
        ]
        print(f"  {case:24}", " | ".join(cells))


if __name__ == "__main__":
    main()
