"""Greedy outputs of compressed caches, compared with the full cache's output."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from benchmarks.evidence.compressed_cache import CompressedCache, stack_caches
from benchmarks.evidence.reference_model import (
    LONGEST_WINDOW,
    CacheBatch,
    PrefilledPrompt,
    ReferenceModel,
)
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.compare.tasks.matches import has_result

DRAFTED_TOKENS = 8
"""Most drafted tokens per forward pass, whose time is mostly that of reading the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullOutput:
    """The full cache's greedy output of T tokens, and the cache after it.

    Args:
        prompt: the prefilled prompt.
        tokens, text: the output, with its end-of-turn token.
        logits: ``[T - 1, vocabulary]`` of all output tokens except the first.
        cache: cache of the prompt and the first T - 1 output tokens. The last token is never fed
            to the model.
        num_forced: tokens at the start of the output that were given, not chosen by the model.
    """

    prompt: PrefilledPrompt
    tokens: list[int]
    text: str
    logits: torch.Tensor
    cache: PrefilledPrompt
    num_forced: int = 0

    def prompt_with_output(self, output_tokens: int) -> PrefilledPrompt | None:
        """Return the prompt followed by its first `output_tokens` output tokens.

        None if the output ends before any later token reads that cache: the engine would not
        compress such a request.
        """
        if len(self.tokens) - 1 <= output_tokens:
            return None
        if not output_tokens:
            return self.prompt
        stop = len(self.prompt.ids) + output_tokens
        return replace(
            self.cache,
            ids=self.cache.ids[:stop],
            keys=[k[:, :stop] for k in self.cache.keys],
            values=[v[:, :stop] for v in self.cache.values],
            queries=[
                torch.cat((of_prompt, of_output[:output_tokens]))[-LONGEST_WINDOW:]
                for of_prompt, of_output in zip(
                    self.prompt.queries, self.cache.queries, strict=True
                )
            ],
            logits=self.logits[output_tokens - 1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedOutput:
    """The output of one compressed cache, compared with the full cache's output of T tokens.

    Args:
        tokens: its greedy output. If it was not decoded fully, it ends at the first token that
            differs from the full cache's output.
        text: the decoded `tokens`.
        same: True if `tokens` equal the full cache's output.
        kl: KL divergence in nats from the full cache's distribution, for each of the T - 1 tokens
            of the full cache's output after the first. The prefill computes the first one.
        agreed: for each of these T - 1 tokens, True if the compressed cache would choose it.
    """

    tokens: list[int]
    text: str
    same: bool
    kl: list[float]
    agreed: list[bool]

    @property
    def mean_kl(self) -> float | None:
        """Nats per token; None if the full cache's output has one token."""
        return fmean(self.kl) if self.kl else None

    @property
    def top1(self) -> float | None:
        """Share of tokens where both caches agree; None if the full output has one token."""
        return fmean(self.agreed) if self.agreed else None


def is_finished(model: ReferenceModel, item: Item, tokens: Sequence[int]) -> bool:
    """Return True if an output has a stop token, its maximum length, or all expected answers."""
    if tokens[-1] in model.stop_tokens or len(tokens) >= item.max_tokens:
        return True
    if item.match in ("f1", "refusal", "mrcr"):
        return False  # what follows could change the score
    if item.match == "number":
        return has_result(model.tokenizer.decode(tokens))
    # A number is complete only once another character follows it.
    return bool(item.answers) and item.score(model.tokenizer.decode(tokens)[:-1]) == 1.0


def full_cache_output(
    model: ReferenceModel,
    item: Item,
    prompt: PrefilledPrompt,
    forced_prefix: Sequence[int] = (),
) -> FullOutput:
    """Return the full cache's greedy output.

    A forward pass also gets tokens drafted from earlier text, and the output keeps those that the
    model would choose.

    Args:
        forced_prefix: token ids that the output starts with, whatever the model predicts.
    """
    full_cache = CompressedCache(keys=prompt.keys, values=prompt.values, tokens=0)
    batch = stack_caches(prompt, [full_cache], item.max_tokens)
    batch.queries = [[q[:0]] for q in prompt.queries]
    tokens = list(forced_prefix) or [int(prompt.logits.argmax())]
    logits = [prompt.logits[None][:0]]

    def feed(fed: Sequence[int], first_index: int) -> None:
        output_indices = torch.arange(first_index, first_index + len(fed))[None]
        hidden = model.decode(batch, torch.tensor([fed]), output_indices)
        logits.append(model.logits(hidden[0]))

    if given := tokens[:-1]:
        feed(given, 0)
    while not is_finished(model, item, tokens):
        drafted: Sequence[int] = []
        if model.model.dtype == torch.float32:  # bfloat16 rounds differently in larger products
            drafted = _repeated([*prompt.ids, *tokens])[: item.max_tokens - len(tokens)]
        feed([tokens[-1], *drafted], len(tokens) - 1)
        chosen = logits[-1].argmax(-1).tolist()
        count = 0
        while not count or (
            drafted[count - 1 : count] == tokens[-1:] and not is_finished(model, item, tokens)
        ):
            tokens.append(chosen[count])
            count += 1
        logits[-1] = logits[-1][:count]
        for of_layer in batch.queries:
            of_layer[-1] = of_layer[-1][:count]
    stop = len(prompt.ids) + len(tokens) - 1
    cache = replace(
        prompt,
        ids=[*prompt.ids, *tokens[:-1]],
        keys=[k[0, :, :stop] for k in batch.keys],
        values=[v[0, :, :stop] for v in batch.values],
        queries=[torch.cat(of_layer) for of_layer in batch.queries],
        column_sums=None,
    )
    return FullOutput(
        prompt=prompt,
        tokens=tokens,
        text=decode_text(model, tokens),
        logits=torch.cat(logits),
        cache=cache,
        num_forced=len(forced_prefix),
    )


def _repeated(ids: Sequence[int]) -> Sequence[int]:
    """Return the tokens that followed an earlier occurrence of the last two tokens."""
    for end in range(len(ids) - 1, 1, -1):
        if ids[end - 2 : end] == ids[-2:]:
            return ids[end : end + DRAFTED_TOKENS]
    return []


def decode_text(model: ReferenceModel, tokens: Sequence[int]) -> str:
    text: str = model.tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def compare_outputs(
    model: ReferenceModel,
    item: Item,
    prompt: PrefilledPrompt,
    caches: Sequence[CompressedCache],
    full: FullOutput,
    *,
    decode_fully: bool = True,
) -> list[CompressedOutput]:
    """Compare each compressed cache with the full cache along the full cache's output.

    One forward pass feeds the full cache's output to all caches. The tokens before a cache's first
    disagreement are its greedy output, so only the tokens after it need decoding.

    Args:
        prompt: the prompt that `caches` compress: `full.prompt`, or `full.prompt_with_output` for
            caches with a look-ahead, whose first output tokens come from the full cache.
        caches: the compressed caches.
        full: the full cache's output.
        decode_fully: decode each output to its end after the first disagreement.
    """
    output_tokens = len(prompt.ids) - len(full.prompt.ids)
    batch = stack_caches(prompt, caches, item.max_tokens - output_tokens)
    inputs = full.tokens[output_tokens:-1]
    outputs = [list(full.tokens[: output_tokens + 1]) for _ in caches]
    kl = [[0.0] * output_tokens for _ in caches]
    agreed = [[True] * output_tokens for _ in caches]
    if inputs:
        output_indices = torch.arange(len(inputs)).expand(len(caches), -1)
        fed = torch.tensor(inputs).expand(len(caches), -1)
        hidden = model.decode(batch, fed, output_indices)
        full_log_probs = full.logits[output_tokens:].log_softmax(-1)
        targets = torch.tensor(full.tokens[output_tokens + 1 :])
        num_forced = max(full.num_forced - output_tokens - 1, 0)
        for index, states in enumerate(hidden):
            logits = model.logits(states)
            chosen = logits.argmax(-1)
            chosen[:num_forced] = targets[:num_forced]
            same = chosen == targets
            kl[index] += divergence(full_log_probs, logits).tolist()
            agreed[index] += same.tolist()
            count = int(same.long().cumprod(0).sum())
            outputs[index] += targets[:count].tolist() + chosen[count : count + 1].tolist()
    if decode_fully:
        _finish_outputs(model, item, batch, outputs, output_tokens)
    return [
        CompressedOutput(
            tokens=tokens,
            text=decode_text(model, tokens),
            same=tokens == full.tokens,
            kl=kl[index],
            agreed=agreed[index],
        )
        for index, tokens in enumerate(outputs)
    ]


def _finish_outputs(
    model: ReferenceModel,
    item: Item,
    batch: CacheBatch,
    outputs: list[list[int]],
    output_tokens: int,
) -> None:
    """Decode all outputs greedily to their end, in place.

    Args:
        output_tokens: output tokens that are part of the compressed prompt, not of the batch.
    """
    capacity = item.max_tokens - output_tokens

    def unfinished(indices: Sequence[int]) -> list[int]:
        return [index for index in indices if not is_finished(model, item, outputs[index])]

    open_indices = unfinished(range(len(outputs)))
    batch_outputs = list(range(len(outputs)))  # the output that each cache of the batch writes
    while open_indices:
        if len(open_indices) <= len(batch_outputs) // 2:
            kept = torch.tensor([batch_outputs.index(index) for index in open_indices])
            batch, batch_outputs = batch.select(kept), list(open_indices)
        # Finished outputs stay in the batch until half are finished. Their tokens are ignored.
        output_indices = torch.tensor(
            [[len(outputs[index]) - 1 - output_tokens] for index in batch_outputs]
        ).clamp(max=capacity - 1)
        fed = torch.tensor([outputs[index][-1:] for index in batch_outputs])
        hidden = model.decode(batch, fed, output_indices)
        chosen = model.logits(hidden[:, -1]).argmax(-1).tolist()
        for index, token in zip(batch_outputs, chosen, strict=True):
            if index in open_indices:
                outputs[index].append(token)
        open_indices = unfinished(open_indices)


def divergence(full_log_probs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return ``KL(full || other)`` in nats ``[T]``.

    Args:
        full_log_probs: ``[T, vocabulary]`` log-probabilities of the full cache.
        logits: ``[T, vocabulary]`` of the other cache.
    """
    log_ratio = full_log_probs - logits.log_softmax(-1)
    return (full_log_probs.exp() * log_ratio).sum(-1).clamp(min=0)
