"""The result of ``kvcompress plan``, `PlanResult`, and its parts.

The field names are keys of the JSON output.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_kvcompress.commands.plan.drafts import Drafts
from vllm_kvcompress.commands.plan.gpu_memory import Defaults, Estimate
from vllm_kvcompress.commands.plan.model_shape import ModelShape
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.settings.config import CompressionConfig

DEVICES_WITH_K4V3 = frozenset({"cpu"})
"""Devices on which k4v3 has run, so that it may be recommended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Identical requests that share no prefix.

    Args:
        prompt: prompt tokens per request.
        output: output tokens per request.
        protected: protected prompt tokens, assumed at the start of the prompt.
    """

    prompt: int
    output: int
    protected: int = 0

    @property
    def spans(self) -> Spans:
        """Return the protected span. It is at the start: the window at the end is kept anyway."""
        return ((0, self.protected),) if self.protected else ()

    @property
    def cached(self) -> int:
        """Return the tokens in the KV cache when the output ends. The last token is not cached."""
        return self.prompt + self.output - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBlocks:
    """Blocks that one request holds.

    Args:
        prefill: maximum before its prompt is compressed, look-ahead included. The pool must have
            this many blocks.
        looking: blocks at the end of the look-ahead. Equal to `decoding` without a look-ahead.
        decoding: blocks right after its prompt is compressed.
        end: maximum while it decodes. That is the blocks at the last token, or with a decode
            budget the blocks before one of its repeated compressions.
        mean: mean over its decode steps, look-ahead included.
    """

    prefill: int
    looking: int
    decoding: int
    end: int
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NextHits:
    """Tokens of a request that the next turn of its chat finds in the prefix cache.

    Args:
        off, on: without and with compression.
    """

    off: int
    on: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmConversations:
    """Idle conversations whose tokens stay in the prefix cache, with ``--kv-reuse``.

    A conversation is the prompt and the output. None of them share a prefix, and no request runs.

    Args:
        blocks_off, blocks_on: blocks of one conversation in vLLM's own cache, and with reuse.
        off, fp8, on: conversations in the pool with vLLM's own cache, with its fp8 cache, and with
            reuse. None without a pool size.
        scratch_bytes: memory per GPU in which one layer's packed prefix is dequantised.
    """

    blocks_off: int
    blocks_on: int
    off: int | None
    fp8: int | None
    on: int | None
    scratch_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """Requests that fit in one KV pool.

    Args:
        pool_bytes: size of the pool per GPU.
        blocks: blocks that requests can hold.
        decoding: requests that fit while all decode, each at its maximum.
        beside_prefill: requests that fit while one of them is in prefill.
        most: the scheduler's limit of concurrent requests, which bounds both.
    """

    pool_bytes: int
    blocks: int
    decoding: int
    beside_prefill: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstCase:
    """The largest request that clients may choose.

    Args:
        asks: method and budget that the client chooses.
        blocks: blocks that the request holds.
        pool: requests that fit if all are like it. None without a pool size.
    """

    asks: str
    blocks: RequestBlocks
    pool: Concurrency | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InPieces:
    """A prompt that is compressed in pieces during prefill.

    Args:
        held_tokens: tokens per layer that it holds between pieces. None if it drops none (in k4v3).
        roomy: a `max_whole` that lets it hold twice its budget between pieces. None if no such
            value would help.
    """

    held_tokens: float | None
    roomy: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Result of ``kvcompress plan``. Memory is per GPU.

    Args:
        load: the workload.
        block_size: tokens per block.
        block_bytes: bytes per block.
        left_whole: why the prompt is not compressed. None if it is.
        kept_tokens: prompt tokens that a layer keeps, mean over layers.
        budget_tokens: the budget in tokens per layer, before it is rounded to whole blocks.
        packed_dtype: format of kept tokens.
        page_tokens: tokens that a packed page holds.
        pages: pages kept over all layers. 0 if the prompt is not compressed.
        lookahead: output tokens that compression waits for. 0 if it does not wait, or the prompt is
            not compressed.
        off, on: blocks of a request without and with compression.
        table_bytes: size of the page tables.
        extra_bytes: upper bound of the memory that compression needs besides the pool, page tables
            included.
        pool_off, pool_on: requests that fit without and with compression. None without a pool
            size.
        worst: the largest request that clients may choose. None if they cannot choose.
        group: layers whose pages make up a block. None if all layers do.
        in_pieces: None if the prompt is not compressed in pieces.
        with_states: whether some layers keep a recurrent state, which makes blocks long.
        pays_from: prompt length in tokens from which compression always frees a block. Only for
            models with states. None if there is no such length.
        parked: requests whose pages fit into host memory at the end of their output. None without
            `--kv-park`.
        auto: the forecast at the same budget in the cache's dtype. None if kept tokens have it, or
            if no prompt fits.
    """

    load: Workload
    block_size: int
    block_bytes: int
    left_whole: str | None
    kept_tokens: float
    budget_tokens: int
    packed_dtype: str
    page_tokens: int
    pages: int
    lookahead: int
    off: RequestBlocks
    on: RequestBlocks
    table_bytes: int
    extra_bytes: int
    pool_off: Concurrency | None
    pool_on: Concurrency | None
    worst: WorstCase | None = None
    group: int | None = None
    in_pieces: InPieces | None = None
    with_states: bool = False
    pays_from: int | None = None
    parked: int | None = None
    auto: "Forecast | None" = None

    def to_json(self) -> dict[str, Any]:
        payload = asdict(replace(self, auto=None))
        payload["auto"] = None if self.auto is None else self.auto.to_json()
        payload["request_off"] = self._with_bytes(payload.pop("off"))
        payload["request_on"] = self._with_bytes(payload.pop("on"))
        if payload["worst"] is not None:
            payload["worst"]["request"] = self._with_bytes(payload["worst"].pop("blocks"))
        return payload

    def _with_bytes(self, blocks: dict[str, int]) -> dict[str, int]:
        sizes = {f"{name}_bytes": round(n * self.block_bytes) for name, n in blocks.items()}
        return {**{f"{name}_blocks": count for name, count in blocks.items()}, **sizes}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Forecast of ``kvcompress plan`` with the inputs that it is for.

    Args:
        options: the command's options.
        shape: shape of the model.
        drafts: how the server drafts.
        settings: compression settings.
        forecast: the forecast.
        next_hits: what a next turn finds in the prefix cache. None without that cache, and for
            models with sliding windows or states.
        warm: conversations that stay warm with ``--kv-reuse``. None without it, or where
            `next_hits` is None.
        defaults: vLLM's defaults for the device.
        estimated: estimate of the KV pool. None if its size was given or is unknown.
    """

    options: PlanOptions
    shape: ModelShape
    drafts: Drafts
    settings: CompressionConfig
    forecast: Forecast
    next_hits: NextHits | None
    warm: WarmConversations | None
    defaults: Defaults
    estimated: Estimate | None

    def to_json(self) -> dict[str, Any]:
        parts = {
            "kv_cache_estimate": self.estimated,
            "next_hits": self.next_hits,
            "warm": self.warm,
        }
        return {
            "model": self.options.model,
            "device": self.options.device,
            "shape": asdict(self.shape),
            "draft_layers": self.drafts.layers,
            "settings": self.settings.to_additional_config(),
            "budget": self.settings.budget,
            "window": self.settings.resolved_window if self.settings.enabled else None,
            "tensor_parallel_size": self.options.ranks,
            "pipeline_parallel_size": self.options.stages,
            **{name: None if part is None else asdict(part) for name, part in parts.items()},
            **self.forecast.to_json(),
        }
