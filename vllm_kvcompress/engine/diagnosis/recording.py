"""What a worker's packer moves, written down as it moves it.

`record` and `recorded` are called in the worker's own process (``collective_rpc``). Nothing is
computed again: the positions are those that are handed to the kernels.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from vllm_kvcompress.engine.compression.packer import Finished, Packer
from vllm_kvcompress.engine.compression.repacker import Due, Repacker
from vllm_kvcompress.engine.pages.layouts import Opened
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.pipeline import Method, Observed

_RECORDS = "_kvcompress_records"
_REPACKED = "_kvcompress_repacked"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Watched(Method):
    """A method that tells what it selects."""

    on_select: Callable[[PagePlan, torch.Tensor, torch.Tensor], None]

    def select(
        self,
        layers: Sequence[Observed],
        plan: PagePlan,
        pages: torch.Tensor,
        *,
        tail: bool = False,
    ) -> torch.Tensor:
        kept = Method.select(self, layers, plan, pages, tail=tail)
        self.on_select(plan, pages, kept)
        return kept


class _Piecewise:
    """The positions that a prompt holds which is packed piece by piece, and at last keeps.

    Args:
        repacker: whose work is watched from now on.
        on_end: called at the prompt's end with its plan, of its whole length, the pages that each
            layer keeps and the positions, as `_Watched.on_select` is.
    """

    def __init__(
        self,
        repacker: Repacker,
        packer: Packer,
        on_end: Callable[[PagePlan, torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._run, self._move, self._on_end = repacker.run, packer.move_in_place, on_end
        # Of each layer ``[Hkv, n]``, up to the last boundary.
        self._held: list[torch.Tensor] = []
        self._computed = 0
        self._due: Sequence[Due] = ()
        repacker.run = self.run  # type: ignore[method-assign]
        packer.move_in_place = self.move  # type: ignore[method-assign]

    def run(self, due: Sequence[Due]) -> dict[str, torch.Tensor]:
        self._due = due
        return self._run(due)

    def move(
        self,
        cache: Opened,
        kept: torch.Tensor,
        counts: torch.Tensor,
        targets: torch.Tensor,
        total: int,
    ) -> None:
        self._move(cache, kept, counts, targets, total)
        todo = self._due[0].todo
        if len(self._due) != 1 or not todo.prefill:
            return
        size, heads = todo.plan.block_size, kept.shape[1]
        since = torch.arange(self._computed, todo.tokens).expand(heads, -1)
        held = self._held or [since[:, :0]] * len(kept)
        slots = [torch.cat([own, since], 1) for own in held]
        ends = [int(count) * size for count in counts]
        chosen = [row.long().cpu()[:, :end] for row, end in zip(kept, ends, strict=True)]
        self._held = [own.gather(1, at) for own, at in zip(slots, chosen, strict=True)]
        self._computed = todo.tokens // size * size
        if todo.ends:
            rows = [pad(own, (0, max(ends) - own.shape[1]), value=-1) for own in self._held]
            plan = dataclasses.replace(todo.plan, tokens=todo.tokens)
            self._on_end(plan, counts, torch.stack(rows))
            self._held, self._computed = [], 0


def record(wrapper: Any, buckets: int) -> None:
    """From now on, note what this worker packs: whole prompts, and one at a time in pieces.

    Args:
        wrapper: vLLM's wrapper of the worker.
        buckets: parts of a prompt, at most, that its positions are counted in.
    """
    compressor = wrapper.worker.compressor
    if compressor is None:
        return
    packer: Packer = compressor.packer
    records: list[dict[str, Any]] = []
    setattr(packer, _RECORDS, records)
    pack = packer.pack

    def packing(finished: Finished) -> torch.Tensor:
        own = {f.name: getattr(finished.method, f.name) for f in dataclasses.fields(Method)}

        def on_select(plan: PagePlan, pages: torch.Tensor, kept: torch.Tensor) -> None:
            records.append(_counted(plan, pages, kept, buckets))

        return pack(dataclasses.replace(finished, method=_Watched(**own, on_select=on_select)))

    packer.pack = packing  # type: ignore[method-assign]
    repacker, again = compressor.repacker, list[int]()
    setattr(packer, _REPACKED, again)
    run = repacker.run

    def running(due: Sequence[Due]) -> dict[str, torch.Tensor]:
        again.append(sum(not each.todo.prefill for each in due))
        kept: dict[str, torch.Tensor] = run(due)
        return kept

    repacker.run = running

    def on_end(plan: PagePlan, pages: torch.Tensor, kept: torch.Tensor) -> None:
        records.append(_counted(plan, pages, kept, buckets))

    _Piecewise(compressor.repacker, packer, on_end)


def recorded(wrapper: Any) -> list[dict[str, Any]]:
    """Per prompt that this worker has packed since `record`: see `_counted`."""
    compressor = wrapper.worker.compressor
    return [] if compressor is None else list(getattr(compressor.packer, _RECORDS))


def repacked(wrapper: Any) -> int:
    """How often this worker has packed an answer again since `record`."""
    compressor = wrapper.worker.compressor
    return 0 if compressor is None else sum(getattr(compressor.packer, _REPACKED))


def _counted(
    plan: PagePlan, pages: torch.Tensor, kept: torch.Tensor, buckets: int
) -> dict[str, Any]:
    """The positions of one prompt, counted.

    Args:
        pages: ``[L]``, pages that each layer keeps.
        kept: ``[L, Hkv, n]`` positions, -1 behind a layer's last. The tail may be among them; it
            stays in any case.

    Returns:
        `pages` over all layers, `kv_heads`, `kept_tokens` of each layer, and `share` as in
        `KeptMap`.
    """
    layers, heads, _ = kept.shape
    buckets = min(buckets, plan.tokens)
    stays = torch.zeros(layers, heads, plan.tokens + 1, dtype=torch.bool)
    # The modulus sends -1 to the column behind the prompt.
    stays.scatter_(2, kept.long().cpu() % (plan.tokens + 1), True)
    stays = stays[..., :-1]
    stays[..., plan.full_blocks * plan.block_size :] = True
    bucket = torch.arange(plan.tokens) * buckets // plan.tokens
    counts = torch.zeros(layers, buckets).index_add_(1, bucket, stays.sum(1).float())
    share = counts / (heads * torch.bincount(bucket, minlength=buckets))
    return {
        "pages": int(pages.sum()),
        "kv_heads": heads,
        "kept_tokens": (stays.sum((1, 2)) / heads).tolist(),
        "share": share.tolist(),
    }
