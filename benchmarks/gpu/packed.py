"""Stage `packed-attention`: a decode step's attention over k4v3 pages, for one layer.

`packed_attention` must agree with its float64 reference. Then its time is compared with that of
FlashAttention over pages of 16 bits: once with the same number of tokens, once with the same number
of bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.report import Report
from benchmarks.gpu.timing import Ceilings, Clock, ceilings
from kvcompress_kernels import k4v3
from kvcompress_kernels.packed_attention import packed_attention, reference, workspace

TOLERANCE = 2e-2
"""Largest error, as a share of the largest output: bfloat16's in the kernel tests."""
PAGES_AT_ONCE = 256  # pages that are quantised together, to bound the memory
SMALLER = 4  # 16-bit tokens in the bytes of one k4v3 token


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Sizes of a layer; the defaults are those of Llama-3.1-8B."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def page_bytes(self) -> int:
        return self.kv_heads * self.block * 2 * self.dim * self.dtype.itemsize


CASES = ((1, 8192), (16, 8192), (1, 32768))
"""Requests and tokens of each request."""
DRY_CASES = ((2, 150),)
DRY_LAYER = Layer(heads=4, kv_heads=2, dim=64, dtype=torch.float32)


class Step:
    """Random queries and pages of requests with equal lengths; `tail` tokens are not packed."""

    def __init__(
        self, layer: Layer, rows: int, tokens: int, tail: int, device: torch.device, seed: int
    ) -> None:
        self.layer, self.rows, self.tokens, self.device = layer, rows, tokens, device
        self._random = torch.Generator(device).manual_seed(seed)
        self.scale, packed_tokens = layer.dim**-0.5, tokens - tail
        self.query = self._normal(rows, layer.heads, layer.dim).to(layer.dtype)
        self.starts = self._ints(rows + 1)
        per_page = k4v3.page_tokens(layer.block, layer.dtype.itemsize)
        self.width = -(-packed_tokens // per_page)
        tail_width, packed_pages = -(-tail // layer.block), rows * self.width
        self.pages = self._pages(packed_pages + rows * tail_width)
        self._quantise(self.pages[:packed_pages], per_page)
        order = torch.randperm(packed_pages, generator=self._random, device=device).int()
        tails = packed_pages + self._ints(rows * tail_width)
        self.arguments = (
            order.view(rows, self.width),
            self._filled(packed_tokens),
            tails.view(rows, tail_width),
            self._filled(tail),
            self.starts,
            self._ints(rows),
            torch.tensor(rows, dtype=torch.int32, device=device),
        )

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._random, device=self.device)

    def _ints(self, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.device)

    def _filled(self, value: int) -> torch.Tensor:
        return torch.full((self.rows,), value, dtype=torch.int32, device=self.device)

    def _pages(self, count: int) -> torch.Tensor:
        """Return random pages ``[count, Hkv, block, 2 * D]`` in the layout of vLLM's on CUDA."""
        layer = self.layer
        pages = self._normal(count, layer.block, layer.kv_heads, 2 * layer.dim)
        return pages.to(layer.dtype).transpose(1, 2)

    def _quantise(self, pages: torch.Tensor, per_page: int) -> None:
        """Replace the pages by groups of random keys and values."""
        rows = k4v3.rows_per_group(self.layer.dtype.itemsize)
        for part in pages.view(torch.uint8).split(PAGES_AT_ONCE):
            size = *part.shape[:2], per_page // k4v3.GROUP, k4v3.GROUP, self.layer.dim
            group = k4v3.quantise(self._normal(*size), self._normal(*size), k4v3.GROUP)
            part.copy_(k4v3.to_bytes(group).unflatten(3, (rows, -1)).flatten(2, 3))

    def run(self, memory: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        packed_attention(
            self.query, output, self.pages, None, *self.arguments,
            scale=self.scale, max_query_tokens=1, workspace=memory,
        )  # fmt: skip
        return output

    def error(self, got: torch.Tensor) -> float:
        """Return the largest difference from the reference, as a share of its largest output."""
        want = torch.zeros_like(got, dtype=torch.float64)
        reference.run(self.query, want, self.pages, None, *self.arguments, scale=self.scale)
        return float((got.double() - want).abs().max() / want.abs().max())

    def flash_attention(self, tokens: int) -> Callable[[], Any]:
        """Return FlashAttention over `tokens` tokens of 16 bits for every request."""
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )

        layer, width = self.layer, -(-tokens // self.layer.block)
        pages = self._pages(self.rows * width).transpose(1, 2)
        tables = torch.randperm(len(pages), generator=self._random, device=self.device).int()
        arguments = {
            "q": self.query,
            "k": pages[..., : layer.dim],
            "v": pages[..., layer.dim :],
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": 1,
            "seqused_k": self._filled(tokens),
            "max_seqlen_k": tokens,
            "softmax_scale": self.scale,
            "causal": True,
            "block_table": tables.view(self.rows, width),
            "fa_version": get_flash_attn_version(),
        }
        return lambda: flash_attn_varlen_func(**arguments)


def run(report: Report, device: torch.device) -> None:
    clock = Clock(device)
    rates = ceilings(report, clock, device)
    layer, cases = (DRY_LAYER, DRY_CASES) if report.dry else (Layer(), CASES)
    for rows, tokens in cases:
        measure(report, clock, rates, Step(layer, rows, tokens, layer.block, device, report.seed))


def measure(report: Report, clock: Clock, rates: Ceilings, step: Step) -> None:
    layer, title = step.layer, f"packed_attention, {step.rows} x {step.tokens}"
    memory = workspace(layer.heads, layer.kv_heads, layer.dim, rows=step.rows, device=step.device)
    output = torch.zeros_like(step.query)
    error = step.error(step.run(memory, output))
    report.check(f"{title}: largest error", error, ("<=", TOLERANCE))
    timing = clock.time(lambda: step.run(memory, output))
    floor = rates.floor_ms(step.rows * step.width * layer.page_bytes, 0)
    row: dict[str, Any] = {"requests": step.rows, "tokens": step.tokens, "ms": timing.ms}
    row |= {"floor_ms": floor, "of_floor": floor / timing.ms}
    if not clock.cuda:
        report.absent(f"{title}: FlashAttention", "it runs on CUDA only")
        report.row("packed attention of one layer", **row)
        return
    for name, tokens in (("tokens", step.tokens), ("bytes", step.tokens // SMALLER)):
        flash = clock.time(step.flash_attention(tokens)).ms
        row |= {f"flash_equal_{name}_ms": flash, f"over_flash_equal_{name}": timing.ms / flash}
    report.row("packed attention of one layer", **row)
