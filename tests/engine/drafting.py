"""Draft with a tiny random head of which some drafts are accepted, and watch what happens."""

from types import SimpleNamespace

import torch

from engines import V2
from vllm_kvcompress.engine.messages.step import BUDGET, HALF

FOUR_TOKENS = (5, 9, 200, 311)
"""Token ids that requests and drafts are limited to, so that a random head is sometimes right."""


def speculative(head: str | None, drafts: int = 3, method: str = "eagle") -> dict:
    """Return an engine's options for `drafts` drafts per step by a head.

    Args:
        head: its checkpoint; None if the target's has the draft layers.
    """
    config = {"method": method, "num_speculative_tokens": drafts}
    return {"speculative_config": config if head is None else config | {"model": head}}


def drafter_of(llm):
    """Return the drafter of either model runner."""
    runner = llm.worker.model_runner
    return runner.speculator if V2 else runner.drafter


def limit_drafts(llm, token_ids=FOUR_TOKENS) -> None:
    """Let an engine draft only `token_ids`."""
    head, ids = drafter_of(llm).model, torch.tensor(token_ids)
    compute_logits = head.compute_logits

    def limited(*args, **kwargs):
        logits = compute_logits(*args, **kwargs)
        return torch.full_like(logits, -torch.inf).index_copy(1, ids, logits[:, ids])

    head.compute_logits = limited


def watch_drafts(llm) -> SimpleNamespace:
    """Count drafts that are verified, and accepted, in later steps."""
    counts = SimpleNamespace(verified=0, accepted=0)
    make_stats = llm.scheduler.make_spec_decoding_stats

    def counting(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        counts.verified += num_draft_tokens
        counts.accepted += num_accepted_tokens
        return make_stats(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    llm.scheduler.make_spec_decoding_stats = counting
    return counts


def draft_layers(llm) -> list:
    """Return the attention layers of the draft model."""
    context = llm.worker.vllm_config.compilation_config.static_forward_context
    attention = [layer for layer in context.values() if hasattr(layer, "impl")]
    return [layer for layer in attention if layer.impl._is_draft]


def watch_draft_attention(llm) -> list[float]:
    """Compare later attention of the draft layer with float64, and record the largest errors.

    The reference has every key and value that the layer computed, by request and position. It
    attends to all tokens before a query, whatever the page tables say. Prompts must not come from
    the prefix cache.
    """
    runner, drafter, errors = llm.worker.model_runner, drafter_of(llm), []
    (layer,) = draft_layers(llm)
    impl, cached, rows_of = layer.impl, {}, lambda: runner.input_batch.req_ids
    if V2:
        propose, batches = drafter.propose, []

        def proposing(input_batch, *args, **kwargs):
            batches[:] = [input_batch]
            return propose(input_batch, *args, **kwargs)

        drafter.propose, rows_of = proposing, lambda: batches[0].req_ids
    forward, heads, dim = impl.forward, impl.num_heads, impl.head_size

    def attending(lay, query, key, value, kv_cache, metadata, output, *args, **kwargs):
        out = forward(lay, query, key, value, kv_cache, metadata, output, *args, **kwargs)
        if metadata is None or not llm.compressor.running:
            return out
        starts = metadata.query_start_loc.tolist()
        all_positions = drafter.input_buffers.positions if V2 else drafter.positions
        rows = zip(rows_of(), starts, starts[1:], strict=False)
        for request_id, start, stop in rows:
            # Model Runner V2 leaves the positions of rejected tokens as they were.
            first = int(all_positions[start])
            positions = range(first, first + stop - start)
            tokens = cached.setdefault(request_id, {})
            for row, position in zip(range(start, stop), positions, strict=True):
                tokens[position] = key[row].view(-1, dim), value[row].view(-1, dim)
            for row, position in zip(range(start, stop), positions, strict=True):
                keys, values = (
                    torch.stack(part).double().repeat_interleave(heads // impl.num_kv_heads, 1)
                    for part in zip(*(tokens[p] for p in range(position + 1)), strict=True)
                )
                logits = torch.einsum("hd,nhd->hn", query[row].view(-1, dim).double(), keys)
                expected = torch.einsum("hn,nhd->hd", (logits * impl.scale).softmax(-1), values)
                errors.append(float((out[row].view(-1, dim) - expected).abs().max()))
        return out

    impl.forward = attending
    return errors


def draft_pages(llm, request_id: str) -> list[int]:
    """Return the flat pages that a compressed request's draft layers were packed into."""
    pool = llm.compressor.pool
    slot = pool._slots[request_id]
    return pool.drafts._packed[slot, :, : pool.drafts._packed_pages[slot]].flatten().tolist()


class ForcedDrafts:
    """Replaces an engine's drafts by the tokens that requests will output, or by wrong ones.

    The draft model still runs, and writes its cache. Drafts are known by their position, because
    with async scheduling the host does not know yet how many of the latest drafts were accepted.

    Args:
        llm: the engine.
        texts: tokens of the prompt and the output, by the request id passed to `Engine.submit`.
        is_wrong: whether the draft of the token at a position is wrong.
    """

    def __init__(self, llm, texts, is_wrong) -> None:
        self.texts, self.is_wrong = texts, is_wrong
        self._runner = llm.worker.model_runner
        self._drafter = self._runner.drafter
        self._propose = self._drafter.propose
        self._drafter.propose = self.propose

    def propose(self, num_speculative_tokens, target_token_ids, target_positions, *args, **kwargs):
        metadata = kwargs["common_attn_metadata"]
        indices = kwargs["token_indices_to_sample"]
        if indices is None:
            indices = metadata.query_start_loc[1:] - 1
        # Tokens at these positions are sampled by the target; drafts follow.
        sampled = (target_positions[indices] + 1).tolist()
        drafts = self._propose(
            num_speculative_tokens, target_token_ids, target_positions, *args, **kwargs
        ).clone()
        for row, (request_id, position) in enumerate(
            zip(self._runner.input_batch.req_ids, sampled, strict=True)
        ):
            drafts[row] = torch.tensor(
                [
                    self._draft(request_id.split("-")[0], position + 1 + index)
                    for index in range(num_speculative_tokens)
                ]
            )
        return drafts

    def _draft(self, name, position) -> int:
        text = self.texts[name]
        right = text[position] if position < len(text) else FOUR_TOKENS[0]
        if not self.is_wrong(position):
            return right
        return next(token for token in FOUR_TOKENS if token != right)


def pack_early(llm, output_tokens) -> dict:
    """Pack later prompts early, once they have so many output tokens.

    Args:
        output_tokens: by target, or by name and target.

    Returns:
        a dict that fills with what each packing kept, by name and target.
    """
    packings, builder = {}, llm.scheduler.step_builder

    def packing(waiting, needed, *, overlaps):
        for state in waiting:
            schedule, footprint = state.lookahead, state.current_schedule.footprint
            target = BUDGET if footprint.pages else HALF
            key, tokens = (state.request_id.split("-")[0], target), state.lookahead_tokens
            if schedule.output_tokens(tokens) >= output_tokens.get(key, output_tokens.get(target)):
                plan = schedule.plan_at(footprint, tokens)
                if target == HALF:
                    plan = schedule.early_plan(footprint, tokens)
                assert builder._pack_lookahead(state, plan, target)

    def packed(pack_request, kept, counts):
        key = pack_request.request_id.split("-")[0], pack_request.early_target
        packings[key] = SimpleNamespace(
            pack_request=pack_request, kept=kept.clone(), counts=counts.clone()
        )

    builder.pack_early = packing
    llm.compressor.packer.observers.append(packed)
    return packings
