"""A transformers causal language model whose KV cache is accessible as plain tensors.

Its attention function is replaced: `ReferenceModel.prefill` records keys, values and queries of a
prompt, and `ReferenceModel.decode` runs several compressed caches of one prompt as a batch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from benchmarks.evidence.cache_formats import CacheFormat
from kvcompress_kernels.column_sums import column_sums
from vllm_kvcompress.compare.tasks import Message

LONGEST_WINDOW = 128
"""Number of most recent tokens whose queries are recorded: the longest observation window."""


@dataclass(slots=True, kw_only=True)
class PrefilledPrompt:
    """A prompt of S tokens with its full KV cache.

    Args:
        ids: the S token ids.
        keys, values: per layer ``[Hkv, S, D]`` float32, after RoPE.
        queries: per layer ``[<= LONGEST_WINDOW, Hq, D]``, the last queries after RoPE.
        column_sums: per layer ``[Hq, S]`` attention column sums; None if they were not computed.
        logits: ``[vocabulary]`` for the next token.
        sliding_windows: per layer its sliding window in tokens; None for a full-attention layer.
        cache_format: number format of the cache; None for an exact cache.
    """

    ids: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]
    column_sums: list[torch.Tensor] | None
    logits: torch.Tensor
    sliding_windows: list[int | None]
    cache_format: CacheFormat | None = None

    @property
    def full_layers(self) -> list[int]:
        """Indices of the full-attention layers: the only layers that compression changes."""
        windows = enumerate(self.sliding_windows)
        return [layer for layer, window in windows if window is None]


@dataclass(slots=True, kw_only=True)
class CacheBatch:
    """B compressed caches of one prompt, padded into a batch that decodes together.

    Args:
        keys, values: per layer ``[B, Hkv, n, D]``. A cache's kept tokens are right-aligned: they
            end at column ``starts[layer]``, and its output tokens follow from there.
        lengths: per layer ``[B]`` int64, the kept tokens of each cache.
        starts: per layer the column of the first output token.
        position: position of the first output token in the uncompressed sequence: S. For caches of
            several prompts, ``[B, 1]`` int64.
        sliding_windows: as in `PrefilledPrompt`.
        cache_formats: the number format of each cache; None for an exact cache.
        queries: if not None, `ReferenceModel.decode` appends each layer's queries ``[T, Hq, D]`` of
            the T tokens that it gets. Only for a batch of one cache.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: list[torch.Tensor]
    starts: list[int]
    position: int | torch.Tensor
    sliding_windows: list[int | None]
    cache_formats: Sequence[CacheFormat | None]
    queries: list[list[torch.Tensor]] | None = None

    def select(self, batch_indices: torch.Tensor) -> "CacheBatch":
        """Return a batch with copies of the caches at `batch_indices` ``[<= B]`` int64."""
        return CacheBatch(
            keys=[k[batch_indices] for k in self.keys],
            values=[v[batch_indices] for v in self.values],
            lengths=[n[batch_indices] for n in self.lengths],
            starts=self.starts,
            position=self.position,
            sliding_windows=self.sliding_windows,
            cache_formats=[self.cache_formats[index] for index in batch_indices.tolist()],
        )


@dataclass(slots=True)
class _Prefill:
    """Attention of a prompt's new tokens, which also fills the prompt's cache.

    Args:
        num_cached: tokens at the start of the prompt whose keys and values are already filled in.
    """

    prompt: PrefilledPrompt
    with_column_sums: bool
    num_cached: int = 0

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention output ``[1, Hq, T, D]`` of q, k and v ``[1, H, T, D]``."""
        prompt, start = self.prompt, self.num_cached
        keys, values = prompt.keys[layer], prompt.values[layer]
        if prompt.cache_format is not None:
            k, v = prompt.cache_format.stored(layer, len(prompt.keys), k, v)
        stop = start + k.shape[2]
        keys[:, start:stop], values[:, start:stop] = k[0], v[0]
        queries = q[0].transpose(0, 1)
        prompt.queries[layer] = torch.cat([prompt.queries[layer], queries[-LONGEST_WINDOW:]])[
            -LONGEST_WINDOW:
        ]
        if self.with_column_sums:
            self._add_column_sums(layer, queries, keys[:, :stop], start)
        mask, window = None, prompt.sliding_windows[layer]
        if start or (window is not None and stop > window):
            key_index, query_index = torch.arange(stop), torch.arange(start, stop)[:, None]
            mask = (key_index <= query_index) & (key_index > query_index - (window or stop))
        return scaled_dot_product_attention(
            q,
            keys[None, :, :stop],
            values[None, :, :stop],
            mask,
            is_causal=mask is None,
            enable_gqa=True,
        )

    def _add_column_sums(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, start: int
    ) -> None:
        assert self.prompt.column_sums is not None
        sums = column_sums(
            queries,
            keys.mT[None],
            torch.zeros(1, dtype=torch.int64),
            keys.shape[1],
            keys.shape[-1] ** -0.5,
        )
        sums[:, :start] += self.prompt.column_sums[layer]
        self.prompt.column_sums[layer] = sums


@dataclass(slots=True)
class _Decode:
    """Attention of T output tokens per cache, each over its own compressed cache.

    Args:
        output_indices: ``[B, T]`` int64, the index of each token in its output.
    """

    batch: CacheBatch
    output_indices: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the attention output ``[B, Hq, T, D]`` of q, k and v ``[B, H, T, D]``."""
        keys, values = self.batch.keys[layer], self.batch.values[layer]
        start, lengths = self.batch.starts[layer], self.batch.lengths[layer]
        for index, cache_format in enumerate(self.batch.cache_formats):
            if cache_format is not None:
                k[index], v[index] = cache_format.stored(
                    layer, len(self.batch.keys), k[index], v[index]
                )
        batch_index = torch.arange(len(k))[:, None]
        columns = self.output_indices + start
        keys[batch_index, :, columns] = k.transpose(1, 2)
        values[batch_index, :, columns] = v.transpose(1, 2)
        stop = int(columns.max()) + 1
        key_columns = torch.arange(stop)
        last_column = columns[..., None]
        visible = (key_columns >= start - lengths[:, None, None]) & (key_columns <= last_column)
        if (window := self.batch.sliding_windows[layer]) is not None:
            # A sliding-window layer drops nothing in between, so columns count tokens.
            visible &= key_columns > last_column - window
        if self.batch.queries is not None:
            self.batch.queries[layer].append(q[0].transpose(0, 1))
        batch_size, heads, steps, dim = q.shape
        kv_heads = k.shape[1]
        grouped = q.reshape(batch_size, kv_heads, heads // kv_heads * steps, dim)
        logits = grouped @ keys[:, :, :stop].mT * dim**-0.5
        mask = torch.where(visible, 0.0, -torch.inf)[:, None, None]
        weights = (logits.view(batch_size, kv_heads, -1, steps, stop) + mask).softmax(-1)
        out: torch.Tensor = weights.view(batch_size, kv_heads, -1, stop) @ values[:, :, :stop]
        return out.view(batch_size, heads, steps, dim)


_active: list[_Prefill | _Decode] = []
"""The attention of the forward pass that is running; transformers calls a global function."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    assert mask is None
    assert abs(scaling - query.shape[-1] ** -0.5) < 1e-6
    out = _active[-1].attend(module.layer_idx, query.float(), key.float(), value.float())
    return out.transpose(1, 2).to(query.dtype), None


AttentionInterface.register("accessible_cache", _attention)


def encode(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the token ids of a chat; the model continues a final assistant message.

    A single assistant message is encoded as plain text, without the chat template.
    """
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        plain: list[int] = tokenizer.encode(messages[0]["content"])
        return plain
    ids: list[int] = tokenizer.encode(
        render_chat(tokenizer, messages, tools), add_special_tokens=False
    )
    return ids


def render_chat(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return a chat as the model's template writes it, ending inside a final assistant message.

    Tool-call arguments are JSON strings in `messages`. Templates get them as objects, as in vLLM.

    Raises:
        SystemExit: the model has no chat template.
    """
    if not tokenizer.chat_template:
        raise SystemExit(
            "a chat task needs a model with a chat template, but this model has none: pass another"
            " --model, or --tasks texts, which needs no template"
        )
    continues = messages[-1]["role"] == "assistant"
    text: str = tokenizer.apply_chat_template(
        [_with_parsed_arguments(message) for message in (messages[:-1] if continues else messages)],
        tools=list(tools) or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    return text + (messages[-1]["content"] if continues else "")


def _with_parsed_arguments(message: Message) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls parsed into objects."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(arguments)}}
        for call in message.get("tool_calls", ())
        for arguments in [call["function"]["arguments"]]
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


class ReferenceModel:
    """A transformers model with an accessible KV cache, and its tokenizer.

    Args:
        folder: a model folder as ``save_pretrained`` writes it.
        dtype: dtype of weights and activations. Attention, its cache and all comparisons of logits
            have float32; with bfloat16, the cache holds bfloat16 numbers, as vLLM's does.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self._folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="accessible_cache"
        ).eval()
        config = self.model.config
        self.num_layers: int = config.num_hidden_layers
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.num_layers
        self.sliding_windows: list[int | None] = [
            config.sliding_window if kind == "sliding_attention" else None for kind in kinds
        ]
        """Per layer its sliding window in tokens; None for a full-attention layer."""
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        stop_tokens = self.model.generation_config.eos_token_id
        self.stop_tokens = {stop_tokens} if isinstance(stop_tokens, int) else set(stop_tokens or ())

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._folder)

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        return encode(self.tokenizer, messages, tools)

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.inference_mode()
    def prefill(
        self,
        ids: list[int],
        *,
        with_column_sums: bool,
        prefix: PrefilledPrompt | None = None,
        cache_format: CacheFormat | None = None,
    ) -> PrefilledPrompt:
        """Return the full KV cache of a prompt.

        Args:
            ids: token ids of the prompt.
            with_column_sums: also compute attention column sums (h2o and d2o need them).
            prefix: a prefilled prompt that `ids` starts with; only later tokens are computed.
            cache_format: number format of the cache, which the prefill's attention reads.
        """
        start = 0 if prefix is None else len(prefix.ids)
        assert prefix is None or (ids[:start] == prefix.ids and len(ids) > start)

        def extended(cached: list[torch.Tensor] | None) -> list[torch.Tensor]:
            buffers = [
                torch.empty(self.kv_heads, len(ids), self.dim) for _ in range(self.num_layers)
            ]
            for buffer, layer_cache in zip(buffers, cached or [], strict=False):
                buffer[:, :start] = layer_cache
            return buffers

        no_queries = [torch.empty(0, self.heads, self.dim) for _ in range(self.num_layers)]
        no_sums = [torch.zeros(self.heads, 0) for _ in range(self.num_layers)]
        column_sums = list((prefix and prefix.column_sums) or no_sums) if with_column_sums else None
        prompt = PrefilledPrompt(
            ids=list(ids),
            keys=extended(prefix.keys if prefix else None),
            values=extended(prefix.values if prefix else None),
            queries=list(prefix.queries if prefix else no_queries),
            column_sums=column_sums,
            logits=torch.empty(0),
            sliding_windows=self.sliding_windows,
            cache_format=cache_format,
        )
        hidden = self._forward(
            _Prefill(prompt, with_column_sums, start),
            torch.tensor([ids[start:]]),
            torch.arange(start, len(ids))[None],
        )
        prompt.logits = self.logits(hidden[0, -1])
        return prompt

    def stored_as(
        self,
        prompt: PrefilledPrompt,
        cache_format: CacheFormat,
        prefix: PrefilledPrompt | None = None,
    ) -> PrefilledPrompt:
        """Return a prompt as an engine with a cache of another number format would hold it.

        Args:
            prompt: the prompt with its exact cache.
            cache_format: the format.
            prefix: the start of the prompt in this format, if the prefill is computed again.
        """
        if cache_format.changes_prefill:
            return self.prefill(
                prompt.ids,
                with_column_sums=prompt.column_sums is not None,
                prefix=prefix,
                cache_format=cache_format,
            )
        layers = enumerate(zip(prompt.keys, prompt.values, strict=True))
        stored = [cache_format.stored(layer, len(prompt.keys), k, v) for layer, (k, v) in layers]
        keys, values = ([layer[part] for layer in stored] for part in (0, 1))
        return replace(prompt, keys=keys, values=values, cache_format=cache_format)

    @torch.inference_mode()
    def decode(
        self, batch: CacheBatch, tokens: torch.Tensor, output_indices: torch.Tensor
    ) -> torch.Tensor:
        """Append output tokens to a batch of caches and return their hidden states ``[B, T, d]``.

        Args:
            tokens: ``[B, T]`` int64 token ids.
            output_indices: ``[B, T]`` int64, the index of each token in its output.
        """
        attention = _Decode(batch, output_indices)
        return self._forward(attention, tokens, output_indices + batch.position)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[..., vocabulary]`` logits of hidden states ``[..., d]``.

        Call it for one cache at a time: logits of a batch would take much memory.
        """
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits.float()

    def _forward(
        self, attention: _Prefill | _Decode, ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        _active.append(attention)
        try:
            out = self.model.model(input_ids=ids, position_ids=positions, use_cache=False)
        finally:
            _active.pop()
        hidden: torch.Tensor = out.last_hidden_state
        return hidden
