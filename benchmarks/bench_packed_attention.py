"""Measure attention over packed pages (k4v3) on a CPU, per layer.

    python benchmarks/bench_packed_attention.py
    python benchmarks/bench_packed_attention.py --queries 512 --rows 1 --tokens 1024 4096 8192

All implementations attend to as many tokens, in turns. Figures are the median of the turns and, in
parentheses, the least one. On a machine that runs other programs, only the least one is meaningful.

* vLLM: vLLM's own kernel on a cache of 16 bits
* op: `packed_attention`, with all tokens packed except the last `--tail`
* copies: `dequantise_pages`, then vLLM's kernel on the copies, for prefills (``--queries``)
* torch: PyTorch code that dequantises the packed tokens and calls its attention, with ``--torch``
* compiled: the same through torch.compile, with ``--torch``; needs a C++ compiler

With ``--queries``, a request is a chunk of a prefill: ``--tokens`` packed tokens are before it, and
its own tokens are in 16 bits.

A matrix product of PyTorch precedes every call, as a model's layers do, so that threads which wait
in another pool would show.

On two cores of an AMD EPYC (Zen 5, AVX-512, without AMX), quiet, with two threads at 644bd60,
the op took this multiple of vLLM's time (median of 25 turns):

| heads, KV, dim | 1 x 1,024 | 1 x 4,096 | 1 x 16,384 | 8 x 1,024 | 8 x 4,096 | 8 x 16,384 |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| 9, 3, 64 | 3.37 | 2.24 | 1.18 | 2.14 | 0.70 | 0.50 |
| 14, 2, 64 | 3.22 | 2.29 | 1.77 | 2.21 | 1.10 | 0.63 |
| 12, 2, 128 | 2.73 | 1.83 | 0.71 | 1.35 | 0.66 | 0.52 |
| 32, 8, 128 | 1.90 | 0.66 | 0.50 | 0.73 | 0.51 | 0.43 |

So it loses while 16-bit pages fit in the processor's cache: by 40 microseconds at 1 x 1,024 tokens.
Beyond that, reading a quarter of the bytes wins. In a run of the first shape with 4,096 tokens on a
busy machine, PyTorch code took 5,522 microseconds and torch.compile 8,752; the op took 448.

For 512 queries behind packed tokens on an AMD EPYC of family 25 (AVX2, without AVX-512), busy, with
one thread, op and copies took these multiples of vLLM's time (least of 5 turns):

| heads, KV, dim | 1,024 | 4,096 | 8,192 |
| --- | ---: | ---: | ---: |
| 9, 3, 64 | 0.69, 0.95 | 0.64, 0.90 | 0.59, 1.09 |
| 14, 2, 64 | 0.66, 1.05 | 0.64, 0.96 | 0.63, 0.93 |
| 12, 2, 128 | 0.77, 0.91 | 0.72, 0.87 | 0.63, 0.78 |
| 32, 8, 128 | 0.80, 1.03 | 0.72, 0.95 | 0.89, 1.13 |

So vLLM's kernel is slower than the op there, and copies gain nothing. `reads_copies` of
vllm_kvcompress/engine/worker/cpu.py is therefore off without AMX.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from origin import commit, machine
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvcompress_kernels import k4v3
from kvcompress_kernels.dequantise_pages import dequantise_pages
from kvcompress_kernels.packed_attention import Offsets, packed_attention, workspace

SHAPES = ((9, 3, 64), (14, 2, 64), (12, 2, 128), (32, 8, 128))
"""Query heads, KV heads and head dim of SmolLM2-135M, Qwen2.5 0.5B and 1.5B, and an 8B Llama."""
DTYPE, BLOCK = torch.bfloat16, 128


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="requests of a batch")
    parser.add_argument("--queries", type=int, default=1, help="tokens of a prefill's chunk")
    parser.add_argument("--tail", type=int, default=64, help="tokens of a request in 16 bits")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--torch", action="store_true", help="measure PyTorch code, too")
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    if args.torch and args.queries > 1:
        parser.error("--torch measures decode steps only, so it does not go with --queries")
    return args


class Step:
    """A step of one layer: random queries, and requests of equal lengths.

    Args:
        shape: query heads, KV heads and head dim.
        rows: requests.
        tokens: tokens of each request.
        tail: tokens of each request that are not packed.
        queries: queries of each request.
    """

    def __init__(
        self, shape: tuple[int, int, int], rows: int, tokens: int, tail: int, queries: int
    ) -> None:
        torch.manual_seed(0)
        self.heads, self.kv_heads, self.dim = shape
        self.rows, self.tokens, self.tail, self.queries = rows, tokens, tail, queries
        self.query = torch.randn(rows * queries, self.heads, self.dim).to(DTYPE)
        self.output = torch.empty_like(self.query)
        self.starts = torch.arange(rows + 1, dtype=torch.int32) * queries
        self.scale = self.dim**-0.5
        self.isa = _get_attn_isa(DTYPE, BLOCK, self.dim, "auto")

    def _pages(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pages of random keys and values, and the tables of rows with `tokens` tokens."""
        width = -(-tokens // BLOCK)
        pages = torch.zeros(self.rows * width, self.kv_heads, BLOCK, 2 * self.dim, dtype=DTYPE)
        parts = pages.view(len(pages), self.kv_heads, 2 * BLOCK, self.dim).chunk(2, dim=2)
        for page in range(len(pages)):
            keys, values = torch.randn(2, BLOCK, self.kv_heads, self.dim).to(DTYPE)
            slots = torch.arange(page * BLOCK, (page + 1) * BLOCK)
            ops.cpu_attn_reshape_and_cache(keys, values, *parts, slots, self.isa)
        return pages, torch.randperm(len(pages)).int().view(self.rows, width)

    def vllm(self) -> Callable[[], object]:
        """Return vLLM's attention."""
        return self._vllm(*self._pages(self.tokens))

    def _vllm(self, pages: torch.Tensor, tables: torch.Tensor) -> Callable[[], object]:
        parts = pages.view(len(pages), self.kv_heads, 2 * BLOCK, self.dim).chunk(2, dim=2)
        lengths = torch.full((self.rows,), self.tokens, dtype=torch.int32)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=self.rows,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            seq_lens=lengths,
            dtype=DTYPE,
            query_start_loc=self.starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
            dynamic_causal=None,
            kv_cache_dtype="auto",
        )
        return lambda: ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=parts[0],
            value_cache=parts[1],
            output=self.output,
            query_start_loc=self.starts,
            seq_lens=lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=tables,
            softcap=0,
            scheduler_metadata=plan,
            s_aux=None,
            dynamic_causal=None,
        )

    def _packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return packed pages and each row's, ``[rows, C]``."""
        per_page = k4v3.page_tokens(BLOCK, DTYPE.itemsize)
        width = -(-(self.tokens - self.tail) // per_page)
        pages = torch.zeros(self.rows * width, self.kv_heads, BLOCK, 2 * self.dim, dtype=DTYPE)
        groups = pages.view(torch.uint8).unflatten(2, (per_page // k4v3.GROUP, -1)).flatten(3)
        for page in groups:
            keys, values = torch.randn(2, *groups.shape[1:3], k4v3.GROUP, self.dim)
            page.copy_(k4v3.to_bytes(k4v3.quantise(keys, values, k4v3.GROUP)))
        return pages, torch.randperm(len(pages)).int().view(self.rows, width)

    def copies(self) -> Callable[[], object]:
        """Return code that dequantises all packed pages, then calls vLLM's attention."""
        packed_pages, packed = self._packed()
        tail, tables = self._pages(self.tail)
        per_page = k4v3.page_tokens(BLOCK, DTYPE.itemsize) // BLOCK
        scratch = torch.zeros(len(packed_pages) * per_page, *tail.shape[1:], dtype=DTYPE)
        pages = torch.cat([packed_pages, tail, scratch])
        destinations = torch.arange(len(pages) - len(scratch), len(pages), dtype=torch.int32)
        tables = torch.cat([destinations.view(self.rows, -1), tables + len(packed_pages)], 1)
        attend, offsets, sources = self._vllm(pages, tables), self._offsets(), packed.flatten()

        def run() -> None:
            dequantise_pages(pages, offsets, sources, destinations)
            attend()

        return run

    def _offsets(self) -> Offsets:
        """Return where vLLM's kernel stores K and V in a page."""
        token, dim = torch.arange(BLOCK), torch.arange(self.dim)
        first_value = BLOCK * self.dim
        if self.isa == "amx":  # tiles, see vllm_kvcompress/engine/pages/layouts.py
            offsets = (
                token // 16 * 16 * self.dim + token % 16 * 2,
                dim // 2 * 32 + dim % 2,
                first_value + token // 2 * 32 + token % 2,
                dim // 16 * 16 * BLOCK + dim % 16 * 2,
            )
        else:
            offsets = token, dim * BLOCK, first_value + token * self.dim, dim
        return Offsets(*(x.int() for x in offsets))

    def op(self) -> Callable[[], object]:
        """Return `packed_attention`."""
        packed_pages, packed = self._packed()
        tail, tables = self._pages(self.tail)
        count = torch.full((self.rows,), self.tokens - self.tail, dtype=torch.int32)
        length = torch.full((self.rows,), self.tail, dtype=torch.int32)
        arguments = (
            self.query,
            self.output,
            torch.cat([packed_pages, tail]),
            self._offsets(),
            packed,
            count,
            tables + len(packed_pages),
            length,
            self.starts,
            torch.arange(self.rows, dtype=torch.int32),
            torch.tensor(self.rows, dtype=torch.int32),
        )
        memory = workspace(self.heads, self.kv_heads, self.dim, rows=self.rows, device="cpu")
        return lambda: packed_attention(
            *arguments, scale=self.scale, max_query_tokens=self.queries, workspace=memory
        )

    def torch(self, *, compiled: bool = False) -> Callable[[], object]:
        """Return code that dequantises. Its tail is contiguous already, to its advantage."""
        pages, packed = self._packed()
        content, tables = pages.view(torch.uint8), packed.long()
        tail = torch.randn(2, self.rows, self.kv_heads, self.tail, self.dim).to(DTYPE)
        count, itemsize = self.tokens - self.tail, DTYPE.itemsize

        def attend(query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            groups = k4v3.read_pages(content, table, itemsize)  # [rows, pages, Hkv, groups, ...]
            keys, values = (
                torch.cat([x.transpose(1, 2).flatten(2, 4)[:, :, :count], end], 2)
                for x, end in zip(k4v3.dequantise(groups, DTYPE), tail, strict=True)
            )
            query = query[:, :, None]
            return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        run: Callable[..., torch.Tensor] = torch.compile(attend) if compiled else attend
        return lambda: run(self.query, tables)


def times(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Return the median and the least time of each call, in microseconds."""
    a, b = torch.randn(64, 1024), torch.randn(1024, 1024)
    for call in calls.values():
        call()
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            a @ b
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: [statistics.median(x) * 1e6, min(x) * 1e6] for name, x in seconds.items()}


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    current_platform.import_kernels()
    results: list[dict[str, Any]] = []
    for shape in SHAPES:
        for rows in args.rows:
            for tokens in args.tokens:
                if args.queries == 1:
                    step = Step(shape, rows, tokens, args.tail, 1)
                else:
                    step = Step(shape, rows, tokens + args.queries, args.queries, args.queries)
                calls = {"vLLM": step.vllm(), "op": step.op()}
                if args.queries > 1:
                    calls["copies"] = step.copies()
                if args.torch:
                    calls |= {"torch": step.torch(), "compiled": step.torch(compiled=True)}
                figures = times(calls, args.turns)
                text = ", ".join(f"{name} {a:.0f} ({b:.0f}) us" for name, (a, b) in figures.items())
                ratios = {
                    name: [a / b for a, b in zip(figures[name], figures["vLLM"], strict=True)]
                    for name in ("op", "copies")
                    if name in figures
                }
                ratio_text = ", ".join(
                    f"{name} / vLLM {a:.2f} ({b:.2f})" for name, (a, b) in ratios.items()
                )
                heads, kv_heads, dim = shape
                print(
                    f"{heads} heads, {kv_heads} KV heads of {dim}, {rows} x {tokens} tokens:"
                    f" {text}; {ratio_text}",
                    flush=True,
                )
                case = {"shape": shape, "rows": rows, "tokens": tokens}
                results.append({**case, "microseconds": figures})
    if args.output:
        settings = {"threads": args.threads, "tail": args.tail, "turns": args.turns}
        settings |= {"queries": args.queries}
        content = {"machine": machine(), "commit": commit(), **settings, "results": results}
        args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
