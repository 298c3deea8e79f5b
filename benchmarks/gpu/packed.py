"""Stage `packed-attention`: a decode step's attention over k4v3 pages, for one layer.

`packed_attention` must agree with its float64 reference. Then it takes turns with vLLM's other
caches: FlashAttention over 16 bits and over fp8, and TurboQuant, with as many tokens, and 16 bits
with as many bytes. Requests and tokens are those of vllm#53060.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.gpu.report import Report
from benchmarks.gpu.rounds import (
    ONE_PERCENT_ROUNDS,
    Figures,
    alternate,
    median,
    report_difference,
    report_rounds,
)
from benchmarks.gpu.timing import Ceilings, Clock, ceilings
from kvcompress_kernels import k4v3
from kvcompress_kernels.packed_attention import packed_attention, reference, workspace

TOLERANCE = 2e-2
"""Largest error, as a share of the largest output: bfloat16's in the kernel tests."""
RIGHT_TOKENS = 0.5
"""Largest error of another cache against exact attention: 1 and more if it reads other tokens."""
PAGES_AT_ONCE = 256  # pages that are quantised together, to bound the memory
SMALLER = 4  # 16-bit tokens in the bytes of one k4v3 token
K4V3, SIXTEEN_BITS, EQUAL_BYTES = "k4v3", "16 bits", "16 bits, equal bytes"
FP8, TURBOQUANT = "fp8", "turboquant_4bit_nc"
TURBOQUANT_SPLITS = 32  # vLLM's default


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


CASES = (*product((1, 8, 32), (128, 4096, 16384, 32768)),)
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

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of the packed pages of all requests."""
        return self.rows * self.width * self.layer.page_bytes

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

    def others(self) -> dict[str, Callable[[], "Other"]]:
        """Return by name what starts attention over another cache."""
        layer, tokens = self.layer, self.tokens
        return {
            SIXTEEN_BITS: lambda: self.flash_attention(tokens, layer.dtype),
            EQUAL_BYTES: lambda: self.flash_attention(max(1, tokens // SMALLER), layer.dtype),
            FP8: lambda: self.flash_attention(tokens, torch.float8_e4m3fn),
            TURBOQUANT: lambda: self.turboquant(tokens),
        }

    def flash_attention(self, tokens: int, cache: torch.dtype) -> "Other":
        """Return FlashAttention over `tokens` tokens of every request, of dtype `cache`."""
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )

        layer, tables = self.layer, self._tables(tokens)
        pages = self._pages(tables.numel()).transpose(1, 2).to(cache)
        keys, values = pages[..., : layer.dim], pages[..., layer.dim :]
        query, scales = self.query, {}
        if cache != layer.dtype:
            query = query.to(cache)
            one = torch.ones((), device=self.device).expand(self.rows, layer.kv_heads)
            scales = {"q_descale": one, "k_descale": one, "v_descale": one}
        arguments = {
            "q": query,
            "k": keys,
            "v": values,
            "out": torch.empty_like(self.query),
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": 1,
            "seqused_k": self._filled(tokens),
            "max_seqlen_k": tokens,
            "softmax_scale": self.scale,
            "causal": True,
            "block_table": tables,
            "fa_version": get_flash_attn_version(),
            **scales,
        }
        exact = self.exact(query[0], keys[tables[0]], values[tables[0]], tokens)
        return Other(lambda: flash_attn_varlen_func(**arguments), exact)

    def turboquant(self, tokens: int) -> "Other":
        """Return vLLM's TurboQuant attention over `tokens` tokens of every request."""
        from vllm.triton_utils import HAS_TRITON

        if not HAS_TRITON:
            raise ImportError("vLLM finds no driver of Triton")
        from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
        from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
        from vllm.v1.attention.backends.turboquant_attn import _build_hadamard
        from vllm.v1.attention.ops.triton_turboquant_decode import (
            triton_turboquant_decode_attention,
        )
        from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

        layer, tables = self.layer, self._tables(tokens)
        config = TurboQuantConfig.from_cache_dtype(TURBOQUANT, layer.dim)
        size = tables.numel(), layer.block, layer.kv_heads
        pages = torch.zeros(*size, config.slot_size_aligned, dtype=torch.uint8, device=self.device)
        keys, values = (self._normal(*size, layer.dim).to(layer.dtype) for _ in range(2))
        rotation = _build_hadamard(layer.dim, str(self.device))
        centroids = get_centroids(layer.dim, config.centroid_bits).to(self.device).float()
        ordered = centroids.sort().values
        bits = {
            "mse_bits": config.key_mse_bits,
            "key_packed_size": config.key_packed_size,
            "value_quant_bits": config.effective_value_quant_bits,
            "key_fp8": config.key_fp8,
        }
        slots = self._ints(tables.numel() * layer.block)
        midpoints = (ordered[:-1] + ordered[1:]) / 2
        for part in slots.split(PAGES_AT_ONCE * layer.block):
            new = (x.flatten(0, 1)[part.long()] for x in (keys, values))
            triton_turboquant_store(*new, pages, part, rotation, midpoints, **bits)
        heads, splits = (self.rows, layer.heads), TURBOQUANT_SPLITS
        arguments = {
            "query": self.query,
            "kv_cache": pages,
            "block_table": tables,
            "seq_lens": self._filled(tokens),
            "Pi": rotation,
            "PiT": rotation,
            "centroids": centroids,
            "scale": self.scale,
            "norm_correction": config.norm_correction,
            "mid_o_buf": torch.empty(*heads, splits, layer.dim + 1, device=self.device),
            "output_buf": torch.empty_like(self.query),
            "lse_buf": torch.empty(heads, device=self.device),
            "max_num_kv_splits": splits,
            **bits,
        }
        exact = self.exact(self.query[0], keys[tables[0]], values[tables[0]], tokens)
        return Other(lambda: triton_turboquant_decode_attention(**arguments), exact)

    def _tables(self, tokens: int) -> torch.Tensor:
        """Return the pages of `tokens` tokens of every request, in a random order."""
        width = -(-tokens // self.layer.block)
        order = torch.randperm(self.rows * width, generator=self._random, device=self.device)
        return order.int().view(self.rows, width)

    def exact(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """Return the first request's attention ``[Hq, D]`` in float64.

        Args:
            query: ``[Hq, D]``.
            keys, values: ``[pages, block, Hkv, D]``, its pages in order.
        """
        group = self.layer.heads // self.layer.kv_heads
        keys, values = (
            x.flatten(0, 1)[:tokens].double().repeat_interleave(group, 1) for x in (keys, values)
        )
        logits = torch.einsum("hd,thd->ht", query.double(), keys) * self.scale
        return torch.einsum("ht,thd->hd", logits.softmax(-1), values)


class Other(NamedTuple):
    """Attention over another cache, and the first request's exact output."""

    call: Callable[[], torch.Tensor]
    exact: torch.Tensor
    """``[Hq, D]`` float64."""

    def error(self) -> float:
        """Return the first request's largest error, as a share of its largest output."""
        return float((self.call()[0].double() - self.exact).abs().max() / self.exact.abs().max())


def run(report: Report, device: torch.device) -> None:
    clock = Clock(device)
    rates = ceilings(report, clock, device)
    layer, cases, rounds = Layer(), CASES, ONE_PERCENT_ROUNDS
    if report.dry:
        layer, cases, rounds = DRY_LAYER, DRY_CASES, 1
    for rows, tokens in cases:
        step = Step(layer, rows, tokens, 2 * layer.block, device, report.seed)
        measure(report, clock, rates, step, rounds)


def measure(report: Report, clock: Clock, rates: Ceilings, step: Step, rounds: int) -> None:
    """Check all caches of a step, then time them in alternating rounds."""
    layer, title = step.layer, f"packed_attention, {step.rows} x {step.tokens}"
    memory = workspace(layer.heads, layer.kv_heads, layer.dim, rows=step.rows, device=step.device)
    output = torch.zeros_like(step.query)
    error = step.error(step.run(memory, output))
    report.check(f"{title}: largest error", error, ("<=", TOLERANCE))
    variants = {K4V3: timed(clock, lambda: step.run(memory, output))}
    for name, start in step.others().items():
        try:
            other = start()
            error = other.error()
        except Exception as e:  # time the others
            report.absent(f"{title}: {name}", f"{type(e).__name__}: {str(e).strip()[-300:]}")
            continue
        report.check(f"{title}: {name}, largest error", error, ("<=", RIGHT_TOKENS))
        variants[name] = timed(clock, other.call)
    found = alternate(rounds, variants)
    report_rounds(report, title, found)
    for name in [*variants][1:]:
        report_difference(report, title, found, K4V3, name, "ms")
    ms, floor = median(found[K4V3], "ms"), rates.floor_ms(step.packed_bytes, 0)
    row = {"requests": step.rows, "tokens": step.tokens, "ms": ms, "floor_ms": floor}
    over = {f"over {name}": ms / median(found[name], "ms") for name in [*variants][1:]}
    report.row("packed attention of one layer", **row, of_floor=floor / ms, **over)


def timed(clock: Clock, call: Callable[[], torch.Tensor]) -> Callable[[int], Figures]:
    """Return a function that times one call, for a round number."""
    return lambda _: {"ms": clock.time(call, min_runs=1, max_runs=1).ms}
