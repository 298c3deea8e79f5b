"""Measure the cost of compressing a prompt per KV cache layout, without a model.

    python benchmarks/bench_layouts.py

CPU_ATTN's AMX kernels store tiles; its vector kernels store rows. Both can be measured on any
x86-64 processor: one prompt of random keys and values is written into two page pools, and the same
method compresses both in turns. vLLM's kernel writes the rows. The benchmark writes the tiles by
their formulas, because the kernel needs AVX-512. Kept positions and all kept bytes must be equal.
Figures are medians over the turns.

* score: milliseconds to score all layers
* move: milliseconds to move the kept tokens to their pages
* tokens: milliseconds to read the kept keys and values token by token through views with split
  axes, for comparison with reading and writing complete pages (move)
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from origin import commit, machine


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", default="cake")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.1, 0.2, 0.5])
    parser.add_argument("--prompt", type=int, default=6000, help="tokens")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, nargs=2, default=(9, 3), help="query and KV heads")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    return parser.parse_args()


def writer(isa: str, args: argparse.Namespace) -> Callable[..., None]:
    """Return a function that writes keys and values ``[n, Hkv, D]`` into pages in order."""
    import torch
    from vllm import _custom_ops as ops

    block, dim = args.block, args.dim
    t, d = torch.arange(block)[:, None], torch.arange(dim)
    # The same formulas as in `pages.layouts`.
    key_offsets = t // 16 * 16 * dim + d // 2 * 32 + t % 16 * 2 + d % 2
    value_offsets = block * dim + d // 16 * 16 * block + t // 2 * 32 + d % 16 * 2 + t % 2

    def tiles(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> None:
        flat = pages.flatten(2)
        for tokens, offsets in ((keys, key_offsets), (values, value_offsets)):
            by_page = tokens.unflatten(0, (-1, block)).transpose(1, 2)
            flat[: len(by_page), :, offsets] = by_page

    def rows(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> None:
        halves = pages.view(*pages.shape[:2], 2 * block, dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(len(keys)), isa)

    return tiles if isa == "amx" else rows


def filled_compressor(isa: str, args: argparse.Namespace) -> Any:
    """Return a compressor whose pool holds one random prompt in the layout of `isa`."""
    import torch

    from vllm_kvcompress.engine.compression.compressor import PromptCompressor
    from vllm_kvcompress.engine.compression.stages import Stages
    from vllm_kvcompress.engine.pages.layouts import find_layout
    from vllm_kvcompress.engine.pages.pool import PagePool
    from vllm_kvcompress.engine.pages.scales import Scales
    from vllm_kvcompress.settings.config import CompressionConfig

    heads, kv_heads = args.heads
    blocks = -(-args.prompt // args.block)
    shape = 2 * blocks + 2, kv_heads, args.block, 2 * args.dim

    write = writer(isa, args)
    layout = find_layout(
        write,
        block_size=args.block,
        kv_heads=kv_heads,
        head_dim=args.dim,
        dtype=torch.bfloat16,
        name=isa,
    )
    storage = torch.zeros(args.layers, *shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for layer in storage:
        size = 2, blocks * args.block, kv_heads, args.dim
        keys, values = torch.randn(size, generator=generator).bfloat16()
        write(keys, values, layer)
    pool = PagePool(
        list(storage),
        max_requests=1,
        max_rows=1,
        max_blocks=blocks + 1,
        block_size=args.block,
    )
    settings = CompressionConfig.parse({"compress": args.method})
    compressor = PromptCompressor(
        settings,
        pool,
        layout,
        scales=Scales([args.dim**-0.5] * args.layers, [1.0] * args.layers, pool.pages.device),
        stages=Stages([range(args.layers)]),
        queries=(heads, args.dim, torch.bfloat16),
    )
    return compressor


def pack_job(budget: float, args: argparse.Namespace) -> Any:
    """Return the job that compresses the prompt to a budget."""
    import torch

    from vllm_kvcompress.engine.compression.packer import PackJob
    from vllm_kvcompress.engine.messages.step import PackRequest
    from vllm_kvcompress.methods.base import Reads
    from vllm_kvcompress.methods.page_plan import page_plan
    from vllm_kvcompress.settings.config import CompressionConfig

    settings = CompressionConfig.parse({"compress": args.method, "budget": budget})
    plan = page_plan(settings.budget_spec(args.layers, args.prompt), args.block)
    if plan is None:
        raise SystemExit(
            f"a budget of {budget} drops none of {args.prompt} tokens: lower --budgets"
        )
    method = settings.method
    if Reads.COLUMN_SUMS in method.reads:
        raise SystemExit(
            f"{args.method} reads the attention of all queries: choose a method with a window"
        )
    blocks = -(-args.prompt // args.block)
    generator = torch.Generator().manual_seed(1)
    shape = plan.window, args.heads[0], args.dim
    queries = {
        layer: torch.randn(shape, generator=generator).bfloat16() for layer in range(args.layers)
    }
    pack_request = PackRequest(
        request_id="r",
        settings=settings,
        plan=plan,
        tokens=args.prompt,
        destination=tuple(range(blocks + 1, blocks + 1 + plan.blocks)),
    )
    return PackJob(
        pack_request=pack_request, method=method, blocks=torch.arange(blocks), queries=queries
    )


def timed(packer: Any, job: Any) -> tuple[dict[str, float], Any]:
    """Run a job; return the milliseconds of scoring, moving and both, and the kept tokens."""
    seconds = {"score": 0.0, "move": 0.0}
    mover = packer.mover
    originals = {"score": packer._observe, "move": mover.move}

    def timed_call(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return originals[name](*arguments)
            finally:
                seconds[name] += time.perf_counter() - start

        return call

    packer._observe, mover.move = timed_call("score"), timed_call("move")
    start = time.perf_counter()
    try:
        packer.run([job])
    finally:
        seconds["all"] = time.perf_counter() - start
        packer._observe, mover.move = originals["score"], originals["move"]
    pool = packer.pool
    kept = [
        mover.read(pool._packed[pool._slots["r"], layer, :count].long())
        for layer, count in enumerate(pool._num_packed[pool._slots["r"]].tolist())
    ]
    pool.forget("r")
    return {name: 1000 * value for name, value in seconds.items()}, kept


def token_by_token(compressor: Any, job: Any, args: argparse.Namespace) -> float:
    """Return the milliseconds to read the kept tokens of all layers from AMX tiles one by one."""
    import torch

    pages, dim, block = compressor.pool.pages, args.dim, args.block
    flat = pages.flatten(2)
    keys = flat[..., : block * dim].unflatten(-1, (block // 16, dim // 2, 16, 2))
    values = flat[..., block * dim :].unflatten(-1, (dim // 16, block // 2, 16, 2))
    count = job.pack_request.plan.pages // args.layers * block
    generator = torch.Generator().manual_seed(2)
    kept = torch.randperm(args.prompt, generator=generator)[:count].sort().values
    head, slot = torch.arange(args.heads[1])[:, None], kept % block
    start = time.perf_counter()
    for layer in range(args.layers):
        page = compressor.pool.flat_ids(layer, job.blocks)[kept // block]
        keys[page, head, slot // 16, :, slot % 16].flatten(2)
        values[page, head, :, slot // 2, :, slot % 2].flatten(2)
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    args = parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    torch.set_num_threads(args.threads)
    compressors = {isa: filled_compressor(isa, args) for isa in ("vec", "amx")}
    rows = {}
    for budget in args.budgets:
        job = pack_job(budget, args)
        times: dict[str, list[dict[str, float]]] = {isa: [] for isa in compressors}
        token_times = []
        for turn in range(args.turns + 1):
            kept = {}
            for isa, compressor in compressors.items():
                milliseconds, kept[isa] = timed(compressor.packer, job)
                if turn:  # the first turn warms up
                    times[isa].append(milliseconds)
            token_times.append(token_by_token(compressors["amx"], job, args))
            for of_vec, of_amx in zip(kept["vec"], kept["amx"], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(of_vec, of_amx, strict=True))
        row: dict[str, Any] = {
            isa: {
                name: round(statistics.median(t[name] for t in times[isa]), 2)
                for name in ("score", "move", "all")
            }
            for isa in times
        }
        row["tokens"] = round(statistics.median(token_times[1:]), 2)
        pairs = zip(times["amx"], times["vec"], strict=True)
        row["amx_over_vec"] = round(statistics.median(a["all"] / v["all"] for a, v in pairs), 3)
        rows[str(budget)] = row
    result = {
        "machine": machine(),
        "command": " ".join(["python", "benchmarks/bench_layouts.py", *sys.argv[1:]]),
        "commit": commit(),
        "shapes": {
            "method": args.method,
            "prompt": args.prompt,
            "layers": args.layers,
            "heads": list(args.heads),
            "dim": args.dim,
            "block": args.block,
            "dtype": "bfloat16",
            "threads": args.threads,
        },
        "milliseconds_by_budget": rows,
    }
    print(json.dumps(result, indent=2))
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
