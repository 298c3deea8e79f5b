"""A causal language model that keeps its prompt's cache where we can reach it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from kvcompress_kernels.column_sums import column_sums
from vllm_kvcompress.compare.tasks import Message

LONGEST_WINDOW = 128
"""Queries of the last tokens that are kept, of a prompt and of what is packed behind it."""


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One prompt's full cache.

    Args:
        ids: its tokens, S.
        keys, values: per layer ``[Hkv, S, D]`` float32, rotated.
        queries: per layer the last ``[<= LONGEST_WINDOW, Hq, D]`` rotated queries.
        sums: per layer column sums ``[Hq, S]``; None where they were not asked for.
        logits: ``[vocabulary]`` of the next token.
        spans: per layer the tokens of its sliding window; None for a full layer.
    """

    ids: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]
    sums: list[torch.Tensor] | None
    logits: torch.Tensor
    spans: list[int | None]

    @property
    def full_layers(self) -> list[int]:
        """Layers that are compressed; a sliding window forgets by itself."""
        return [layer for layer, span in enumerate(self.spans) if span is None]


@dataclass(slots=True, kw_only=True)
class Rows:
    """Compressed caches that answer together; row r of layer l holds ``lengths[l][r]`` tokens.

    Args:
        keys, values: per layer ``[R, Hkv, n, D]``: kept tokens end at column ``starts[l]``, and the
            answer's tokens follow.
        lengths: per layer ``[R]`` int64.
        starts: per layer, the column of the answer's first token.
        position: of the answer's first token in the text, S.
        spans: as of `Prompt`.
        queries: where it is a list, each layer's queries ``[1, Hq, D]`` of every token are added
            to it; for a single row that is fed a token at a time.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: list[torch.Tensor]
    starts: list[int]
    position: int
    spans: list[int | None]
    queries: list[list[torch.Tensor]] | None = None

    def only(self, rows: torch.Tensor) -> "Rows":
        """These rows alone, copied."""
        return Rows(
            keys=[k[rows] for k in self.keys],
            values=[v[rows] for v in self.values],
            lengths=[n[rows] for n in self.lengths],
            starts=self.starts,
            position=self.position,
            spans=self.spans,
        )


@dataclass(slots=True)
class _Prefill:
    """The attention of a prompt's next tokens, over those before them."""

    prompt: Prompt
    want_sums: bool
    earlier: int = 0

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p, past = self.prompt, self.earlier
        keys, values = p.keys[layer], p.values[layer]
        stop = past + k.shape[2]
        keys[:, past:stop], values[:, past:stop] = k[0], v[0]
        rows = q[0].transpose(0, 1)
        p.queries[layer] = torch.cat([p.queries[layer], rows[-LONGEST_WINDOW:]])[-LONGEST_WINDOW:]
        if self.want_sums:
            self._add_sums(layer, rows, keys[:, :stop], past)
        mask, span = None, p.spans[layer]
        if past or (span is not None and stop > span):
            column, row = torch.arange(stop), torch.arange(past, stop)[:, None]
            mask = (column <= row) & (column > row - (span or stop))
        return scaled_dot_product_attention(
            q,
            keys[None, :, :stop],
            values[None, :, :stop],
            mask,
            is_causal=mask is None,
            enable_gqa=True,
        )

    def _add_sums(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, past: int) -> None:
        assert self.prompt.sums is not None
        sums = column_sums(
            rows,
            keys.mT[None],
            torch.zeros(1, dtype=torch.int64),
            keys.shape[1],
            keys.shape[-1] ** -0.5,
        )
        sums[:, :past] += self.prompt.sums[layer]
        self.prompt.sums[layer] = sums


@dataclass(slots=True)
class _Decode:
    """The attention of rows of an answer, each over its own compressed cache.

    Args:
        at: ``[R, T]`` int64, the places of the tokens in the answer.
    """

    rows: Rows
    at: torch.Tensor
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.rows.keys[layer], self.rows.values[layer]
        start, lengths = self.rows.starts[layer], self.rows.lengths[layer]
        row = torch.arange(len(k))[:, None]
        column = self.at + start
        keys[row, :, column], values[row, :, column] = k.transpose(1, 2), v.transpose(1, 2)
        stop = int(column.max()) + 1
        each = torch.arange(stop)
        seen = (each >= start - lengths[:, None, None]) & (each <= column[..., None])  # [R, T, n]
        if (span := self.rows.spans[layer]) is not None:
            # Such a layer keeps its latest tokens without gaps, so columns are as far as tokens.
            seen &= each > column[..., None] - span
        if self.rows.queries is not None:
            self.rows.queries[layer].append(q[0].transpose(0, 1))
        count, heads, steps, dim = q.shape
        kv_heads = k.shape[1]
        grouped = q.reshape(count, kv_heads, heads // kv_heads * steps, dim)
        logits = grouped @ keys[:, :, :stop].mT * dim**-0.5
        mask = torch.where(seen, 0.0, -torch.inf)[:, None, None]
        weights = (logits.view(count, kv_heads, -1, steps, stop) + mask).softmax(-1)
        out: torch.Tensor = weights.view(count, kv_heads, -1, stop) @ values[:, :, :stop]
        return out.view(count, heads, steps, dim)


_running: list[_Prefill | _Decode] = []


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
    return _running[-1].attend(module.layer_idx, query, key, value).transpose(1, 2), None


AttentionInterface.register("kept_in_reach", _attention)


def encode(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """The prompt's tokens; a last message of the assistant is gone on with.

    Where that is the only one, it is plain text.
    """
    if len(messages) == 1 and messages[0]["role"] == "assistant":
        plain: list[int] = tokenizer.encode(messages[0]["content"])
        return plain
    ids: list[int] = tokenizer.encode(
        rendered(tokenizer, messages, tools), add_special_tokens=False
    )
    return ids


def rendered(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """What the model's template makes of a chat; a last message of the assistant is gone on with.

    Arguments of calls are JSON in a text, and templates take them as objects, as vLLM hands them
    out too.
    """
    if not tokenizer.chat_template:
        raise SystemExit(
            "a chat needs a model with a chat template, and this one has none; give another"
            " --model, or --tasks texts, which are gone on with"
        )
    begun = messages[-1]["role"] == "assistant"
    text: str = tokenizer.apply_chat_template(
        [_opened(message) for message in (messages[:-1] if begun else messages)],
        tools=list(tools) or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    return text + (messages[-1]["content"] if begun else "")


def _opened(message: Message) -> dict[str, Any]:
    """A message whose calls have their arguments as an object."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(arguments)}}
        for call in message.get("tool_calls", ())
        for arguments in [call["function"]["arguments"]]
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


class Reader:
    """A model in float32, and its tokenizer.

    Args:
        folder: as ``save_pretrained`` writes it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="kept_in_reach"
        ).eval()
        config = self.model.config
        self.layers: int = config.num_hidden_layers
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.layers
        self.spans: list[int | None] = [
            config.sliding_window if kind == "sliding_attention" else None for kind in kinds
        ]
        """Per layer the tokens of its sliding window; None for a full layer."""
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        stops = self.model.generation_config.eos_token_id
        self.stops = {stops} if isinstance(stops, int) else set(stops or ())

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
    def read(self, ids: list[int], *, sums: bool, earlier: Prompt | None = None) -> Prompt:
        """The full cache of a prompt, of which `earlier` is the beginning."""
        past = 0 if earlier is None else len(earlier.ids)
        assert earlier is None or (ids[:past] == earlier.ids and len(ids) > past)

        def grown(old: list[torch.Tensor] | None) -> list[torch.Tensor]:
            made = [torch.empty(self.kv_heads, len(ids), self.dim) for _ in range(self.layers)]
            for new, kept in zip(made, old or [], strict=False):
                new[:, :past] = kept
            return made

        none = [torch.empty(0, self.heads, self.dim) for _ in range(self.layers)]
        zero = [torch.zeros(self.heads, 0) for _ in range(self.layers)]
        prompt = Prompt(
            ids=list(ids),
            keys=grown(earlier.keys if earlier else None),
            values=grown(earlier.values if earlier else None),
            queries=list(earlier.queries if earlier else none),
            sums=(list((earlier and earlier.sums) or zero)) if sums else None,
            logits=torch.empty(0),
            spans=self.spans,
        )
        new = torch.tensor([ids[past:]])
        hidden = self._run(_Prefill(prompt, sums, past), new, torch.arange(past, len(ids))[None])
        prompt.logits = self.logits(hidden[0, -1])
        return prompt

    @torch.inference_mode()
    def answer(self, rows: Rows, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[R, T, d]`` behind `tokens` ``[R, T]``, at places `at` of answers."""
        return self._run(_Decode(rows, at), tokens, at + rows.position)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., vocabulary]``; asked row by row, since a vocabulary is wide."""
        made: torch.Tensor = self.model.lm_head(hidden)
        return made

    def _run(
        self, attention: _Prefill | _Decode, ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        _running.append(attention)
        try:
            out = self.model.model(input_ids=ids, position_ids=positions, use_cache=False)
        finally:
            _running.pop()
        hidden: torch.Tensor = out.last_hidden_state
        return hidden
