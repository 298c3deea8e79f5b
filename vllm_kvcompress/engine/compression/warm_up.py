"""What is compiled before the first request: every kernel that a method's packing launches."""

from dataclasses import replace

import torch

from vllm_kvcompress.engine.compression.attention_adder import AttentionAdder
from vllm_kvcompress.engine.compression.packer import Packer, PackJob
from vllm_kvcompress.engine.messages.step import Addition, PackRequest
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan
from vllm_kvcompress.methods.paged_layers import LATEST
from vllm_kvcompress.methods.presets import least_window
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import (
    adds_up,
    allocator_rows,
    keeps_sums,
    lookahead_window,
    method_of,
    probe_tokens,
)


class WarmUp:
    """Packs the null block, which no request reads, as if it were the first request's of a batch.

    Args:
        settings: what packs it.
        queries: query heads, head dim and dtype of a layer's queries.
    """

    def __init__(
        self,
        packer: Packer,
        adder: AttentionAdder,
        settings: CompressionConfig,
        queries: tuple[int, int, torch.dtype],
    ) -> None:
        self._packer, self._adder, self._pool = packer, adder, packer.pool
        self._settings, self._method = settings, method_of(settings)
        self._heads, self._dim, self._dtype = queries

    def run(self, longest: int) -> None:
        """Pack whole prompts of up to `longest` tokens, and whatever else these settings pack."""
        settings = self._settings
        self._prompts(longest)
        if settings.decode_budget is not None:
            self.pack_again(settings.resolved_decode_window, prefill=False)
        if settings.max_whole is not None:
            self.pack_again(settings.resolved_window, prefill=True)
            probe, least = probe_tokens(settings), least_window(self._method.reads)
            for rows in _powers(probe):
                alone = allocator_rows(settings, rows)
                if rows >= least:
                    self.pack_again(rows, prefill=True, probe=rows, allocator_window=alone)
        if settings.max_whole is not None or settings.lookahead_yields != "never":
            # what pieces left, or a cut to half, is packed again by the answer
            for window, answered in self._by_answer():
                self.pack_again(
                    window, prefill=True, allocator_window=answered, scored_by_output=True
                )

    def _query(self, rows: int) -> torch.Tensor:
        device = self._pool.pages.device
        return torch.zeros(rows, self._heads, self._dim, dtype=self._dtype, device=device)

    def _prompts(self, longest: int) -> None:
        """Lengths are one per configuration of the kernels, and odd.

        Whole attention is watched in the first one only.
        """
        settings, block = self._settings, self._pool.block_size
        budget = settings.budget if isinstance(settings.budget, int) else 0
        short = max(
            2 * lookahead_window(settings), 4 * block, settings.min_prompt, budget + 2 * block
        )
        lengths = sorted({min(short + extra, longest) for extra in (3, 4096, 32768, longest)})
        for tokens in lengths:
            plan = page_plan(settings.prompt(self._packer.num_layers, tokens), block)
            if plan is not None:
                self._prompt(plan, shortest=tokens == lengths[0])
        if plan is None or not settings.resolved_lookahead:
            return
        # one that is packed early may have fewer queries; kernels are made for powers of two
        for rows in _powers(lookahead_window(settings)):
            plan = self._judged_by(rows, lengths[-1])
            if plan is not None and rows >= least_window(self._method.reads):
                self._prompt(plan, shortest=False)
        for window, answered in self._by_answer():
            plan = self._judged_by(window, lengths[-1])
            if plan is not None:
                plan = replace(plan, allocator_window=answered, scored_by_output=True)
                self._prompt(plan, shortest=False)

    def _judged_by(self, window: int, tokens: int) -> PagePlan | None:
        """How a prompt of `tokens` is packed by so many queries, whose tokens are kept."""
        layers, block = self._packer.num_layers, self._pool.block_size
        own = self._settings.prompt(layers, tokens)
        budget, total = max(own.budget, window + 1), own.total
        if total is not None:
            total = max(total, layers * budget)
        return page_plan(replace(own, window=window, budget=budget, total=total), block)

    def _by_answer(self) -> list[tuple[int, int | None]]:
        """Windows when a look-ahead is over, and queries of an answer that judge in parts of them.

        Requests may choose the look-ahead, and the pool may be short of blocks for some steps then,
        so there is one of each power of two that kernels are made for.
        """
        settings, window = self._settings, lookahead_window(self._settings)
        if not settings.resolved_lookahead:
            return []
        found: list[tuple[int, int | None]] = [(window, None)]
        reads = method_of(settings, scored_by_output=True).reads
        if not reads & (Reads.VARIANCE | Reads.APART):
            return found
        beside = settings.parts.prompt_window or window
        powers = [answered for answered in _powers(window - 1) if answered >= least_window(reads)]
        return found + [(min(answered + beside, window), answered) for answered in powers]

    def _prompt(self, plan: PagePlan, *, shortest: bool) -> None:
        layers, pages = range(self._packer.num_layers), self._pool.pages
        blocks = pages.new_zeros(-(-plan.tokens // plan.block_size), dtype=torch.int64)
        if shortest and Reads.COLUMN_SUMS in self._method.reads:
            for layer in layers:
                self._packer.column_sums(layer, blocks, self._query(plan.tokens), plan.tokens)
        sums = torch.zeros(self._heads, plan.tokens, device=pages.device)
        for in_place in sorted({False, shortest}):
            pack_request = PackRequest(
                request_id="",
                settings=self._settings,
                plan=plan,
                tokens=plan.tokens,
                destination=(0,) * plan.blocks,
                in_place=in_place,
            )
            job = PackJob(
                pack_request=pack_request,
                method=method_of(self._settings, scored_by_output=plan.scored_by_output),
                blocks=blocks,
                queries=dict.fromkeys(layers, self._query(plan.window)),
                sums=dict.fromkeys(layers, sums),
            )
            self._packer.run([job])
            self._pool.forget("")

    def pack_again(
        self,
        window: int,
        *,
        prefill: bool,
        allocator_window: int | None = None,
        scored_by_output: bool = False,
        probe: int = 0,
    ) -> None:
        """Pack what a request holds of which tokens were dropped, and add up its attention.

        Args:
            window: queries that choose.
            prefill: they are a prompt's, and not an answer's.
            allocator_window, scored_by_output, probe: as in `PagePlan`.
        """
        layers, size = self._packer.num_layers, self._pool.block_size
        pages = layers * (window // size + 2)
        plan = PagePlan(
            num_layers=layers,
            tokens=(window // size + 4) * size + probe,
            block_size=size,
            window=window,
            budget=pages // layers * size + probe,
            pages=pages,
            total=pages * size + layers * probe,
            allocator_window=allocator_window,
            scored_by_output=scored_by_output,
            probe=probe,
        )
        self._pool.keep_queries("")
        # The layers of an answer divide once; those of a prompt divide anew at every boundary.
        for destination in ((0,) * plan.blocks, None)[: 1 if prefill else 2]:
            pack_request = PackRequest(
                request_id="",
                settings=self._settings,
                plan=plan,
                tokens=plan.tokens - probe,
                destination=destination,
                prefill=prefill,
                whole=False,
                ends=False,
                in_place=True,
            )
            self._pool.put_null_block_in_row(plan.tokens)
            asked = dict.fromkeys(range(layers), self._query(window)) if prefill else {}
            method = method_of(self._settings, scored_by_output=scored_by_output)
            self._packer.run([PackJob(pack_request=pack_request, method=method, queries=asked)])
        if keeps_sums(self._settings) if prefill else adds_up(self._settings):
            self._add_up(prefill)
        self._pool.put_null_block_in_row(0)
        self._pool.forget("")

    def _add_up(self, prefill: bool) -> None:
        """Add up as many queries at once as there are kernels of."""
        size = self._pool.block_size
        most = LATEST if prefill else min(self._settings.decode_interval, LATEST)
        for latest in sorted({min(2**power, most) for power in range(3, 8)}):
            tokens = (latest // size + 1) * size
            self._pool.put_null_block_in_row(tokens)
            if prefill:
                self._adder.add_chunk(0, 0, self._query(latest), tokens)
            else:
                add = Addition(request_id="", tokens=0, latest=latest, most=tokens)
                self._adder.add([(add, 0)])


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`, which kernels are made for, and `most` itself."""
    return [min(2**power, most) for power in range((most - 1).bit_length() + 1)] if most else []
