"""Compiles every kernel that packing launches, before the first request."""

from dataclasses import replace

import torch

from vllm_kvcompress.engine.compression.attention_adder import AttentionAdder
from vllm_kvcompress.engine.compression.packer import Packer, PackJob
from vllm_kvcompress.engine.messages.step import (
    AddGroups,
    AttentionAddition,
    PackOutput,
    PackPiece,
    PackPrompt,
)
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan
from vllm_kvcompress.methods.paged_layers import QUERIES_PER_SUM
from vllm_kvcompress.methods.preset import min_window
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.settings.config import CompressionConfig


class WarmUp:
    """Packs dummy requests in batch row 0 whose blocks are all the null block.

    No request reads the null block.

    Args:
        packer: the worker's packer.
        adder: the worker's attention adder.
        settings: the settings to compile for.
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
        self._settings, self._method = settings, settings.method
        self._heads, self._dim, self._dtype = queries
        self._page_tokens = packed_page_tokens(settings, self._pool.block_size, self._pool.itemsize)

    def run(self, max_tokens: int) -> None:
        """Pack dummy prompts of up to `max_tokens` tokens, in every way that the settings allow."""
        settings = self._settings
        self._pack_prompts(max_tokens)
        if self._page_tokens is not None:
            # As floats, the bytes of groups may be NaN.
            self._pool.zero((0,))
        if settings.decode.budget is not None:
            self.pack_again(settings.resolved_decode_window, prefill=False)
        if settings.pieces.max_whole is not None:
            self.pack_again(settings.resolved_window, prefill=True)
            probe, min_rows = self._method.probe_tokens, self._method.min_window
            for rows in _powers_of_two(probe):
                allocator_window = self._method.num_allocator_queries(rows)
                if rows >= min_rows:
                    self.pack_again(
                        rows, prefill=True, probe=rows, allocator_window=allocator_window
                    )
        # Prompts packed in pieces, or early under memory pressure, are packed again after their
        # look-ahead, with the queries of their output.
        for window, output_queries in self._lookahead_windows():
            self.pack_again(
                window, prefill=True, allocator_window=output_queries, scored_by_output=True
            )

    def _query(self, rows: int) -> torch.Tensor:
        """Return dummy queries ``[rows, Hq, D]``."""
        device = self._pool.pages.device
        return torch.zeros(rows, self._heads, self._dim, dtype=self._dtype, device=device)

    def _pack_prompts(self, max_tokens: int) -> None:
        """Pack one prompt for each kernel configuration and window.

        The lengths are odd, so the last page is never full. Attention sums over the prompt are
        computed for the shortest prompt only.
        """
        settings, block = self._settings, self._pool.block_size
        budget = settings.budget if isinstance(settings.budget, int) else 0
        short = max(
            2 * self._method.lookahead_window,
            4 * block,
            settings.resolved_min_prompt,
            budget + 2 * block,
        )
        lengths = sorted({min(short + extra, max_tokens) for extra in (3, 4096, 32768, max_tokens)})
        for tokens in lengths:
            spec = settings.budget_spec(self._packer.num_layers, tokens)
            plan = page_plan(
                spec,
                block,
                page_tokens=self._page_tokens,
                cell=self._page_tokens,
                recent_tokens=settings.recent_tokens,
            )
            if plan is None:
                continue
            if plan.cell is None:
                self._pack_prompt(plan, shortest=tokens == lengths[0])
            else:
                self._add_groups(plan)
        if plan is None or not settings.resolved_lookahead:
            return
        # Early compression may have fewer queries; kernels are specialised for powers of two.
        for rows in _powers_of_two(self._method.lookahead_window):
            plan = self._plan_with_window(rows, lengths[-1])
            if plan is not None and rows >= self._method.min_window:
                self._pack_prompt(plan, shortest=False)
        for window, output_queries in self._lookahead_windows():
            plan = self._plan_with_window(window, lengths[-1])
            if plan is not None:
                plan = replace(plan, allocator_window=output_queries, scored_by_output=True)
                self._pack_prompt(plan, shortest=False)

    def _plan_with_window(self, window: int, tokens: int) -> PagePlan | None:
        """Return the page plan of a prompt of `tokens` tokens that `window` queries score."""
        layers, block = self._packer.num_layers, self._pool.block_size
        spec = self._settings.budget_spec(layers, tokens)
        budget, total = max(spec.budget, window + 1), spec.total
        if total is not None:
            total = max(total, layers * budget)
        spec = replace(spec, window=window, budget=budget, total=total)
        return page_plan(
            spec,
            block,
            page_tokens=self._page_tokens,
            recent_tokens=self._settings.recent_tokens,
        )

    def _lookahead_windows(self) -> list[tuple[int, int | None]]:
        """Return the windows at the end of a look-ahead, each with the output queries in it.

        A request may choose its look-ahead, and a shortage of blocks may end it early, so the list
        has an entry for each power of two for which kernels are specialised.

        Returns:
            Pairs of a window and the number of output queries that the method reads separately;
            None if it does not read them separately.
        """
        settings, window = self._settings, self._method.lookahead_window
        if not settings.resolved_lookahead:
            return []
        windows: list[tuple[int, int | None]] = [(window, None)]
        reads = self._method.after_lookahead.reads
        if not reads & (Reads.VARIANCE | Reads.PROMPT_MAXIMUM):
            return windows
        prompt_window = settings.parts.prompt_window or window
        return windows + [
            (min(output_queries + prompt_window, window), output_queries)
            for output_queries in _powers_of_two(window - 1)
            if output_queries >= min_window(reads)
        ]

    def _pack_prompt(self, plan: PagePlan, *, shortest: bool) -> None:
        """Pack a prompt of null blocks twice: without log-sum-exps, then with them.

        The shortest prompt's second packing is in place.
        """
        layers, pages = range(self._packer.num_layers), self._pool.pages
        blocks = pages.new_zeros(-(-plan.tokens // plan.block_size), dtype=torch.int64)
        if shortest and Reads.COLUMN_SUMS in self._method.reads:
            for layer in layers:
                self._packer.column_sums(layer, blocks, self._query(plan.tokens), plan.tokens)
        sums = torch.zeros(self._heads, plan.tokens, device=pages.device)
        # FLASH_ATTN gives log-sum-exps, except for prompts that it did not compute entirely.
        known = torch.zeros(self._heads, plan.window, device=pages.device)
        for in_place, log_sums in ((False, {}), (shortest, dict.fromkeys(layers, known))):
            pack_request = PackPrompt(
                request_id="",
                settings=self._settings,
                plan=plan,
                tokens=plan.tokens,
                destination=(0,) * plan.blocks,
                in_place=in_place,
                reads_page_tables=False,
            )
            job = PackJob(
                pack_request=pack_request,
                method=self._method.method_for(scored_by_output=plan.scored_by_output),
                blocks=blocks,
                queries=dict.fromkeys(layers, self._query(plan.window)),
                sums=dict.fromkeys(layers, sums),
                log_sums=log_sums,
            )
            self._packer.run([job])
            self._pool.forget("")

    def _add_groups(self, plan: PagePlan) -> None:
        """Pack all tokens of a prompt of null blocks twice; the second packing is in place."""
        blocks = self._pool.pages.new_zeros(plan.full_blocks, dtype=torch.int64)
        for in_place in (False, True):
            pack_request = AddGroups(
                request_id="",
                settings=self._settings,
                plan=plan,
                tokens=plan.tokens,
                destination=(0,) * plan.blocks,
                in_place=in_place,
                prefill=False,
                completes_prompt=False,
                added_tokens=plan.max_tokens_in_pages,
                leading_blocks=plan.leading_blocks,
            )
            job = PackJob(pack_request=pack_request, method=self._method, blocks=blocks)
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
        """Pack a request that has dropped tokens before, and add up its attention.

        Args:
            window: number of queries that score the tokens.
            prefill: whether the tokens belong to the prompt, not to the output.
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
        # Output tokens divide the budget among layers once; a prompt divides it at every piece.
        for destination in ((0,) * plan.blocks, None)[: 1 if prefill else 2]:
            pack_request = (PackPiece if prefill else PackOutput)(
                request_id="",
                settings=self._settings,
                plan=plan,
                tokens=plan.tokens - probe,
                destination=destination,
                in_place=True,
            )
            self._pool.put_null_block_in_row(plan.tokens)
            queries = dict.fromkeys(range(layers), self._query(window)) if prefill else {}
            method = self._method.method_for(scored_by_output=scored_by_output)
            self._packer.run([PackJob(pack_request=pack_request, method=method, queries=queries)])
        method = self._method
        if method.sums_attention if prefill else method.sums_output_attention:
            self._add_up(prefill)
        self._pool.put_null_block_in_row(0)
        self._pool.forget("")

    def _add_up(self, prefill: bool) -> None:
        """Add attention with every number of queries for which kernels are specialised."""
        size = self._pool.block_size
        max_queries = (
            QUERIES_PER_SUM if prefill else min(self._settings.decode.interval, QUERIES_PER_SUM)
        )
        for latest in sorted({min(2**power, max_queries) for power in range(3, 8)}):
            tokens = (latest // size + 1) * size
            self._pool.put_null_block_in_row(tokens)
            if prefill:
                self._adder.add_chunk(0, 0, self._query(latest), tokens)
            else:
                addition = AttentionAddition(
                    request_id="", tokens=0, num_queries=latest, max_tokens=tokens
                )
                self._adder.add([(addition, 0)])


def _powers_of_two(limit: int) -> list[int]:
    """Return the powers of two up to `limit`, and `limit` itself; empty for 0."""
    return [min(2**power, limit) for power in range((limit - 1).bit_length() + 1)] if limit else []
