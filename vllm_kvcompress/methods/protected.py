"""Spans of a prompt that are kept in any case, in every layer and head.

They count in the budget, as the observation window does. What they and the window leave is shared
out and chosen by the method, as if the protected tokens were not there: scores are of the whole
prompt, and allocator and selector see those of the other tokens side by side.
"""

from dataclasses import dataclass

import torch

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.methods.base import Selector
from vllm_kvcompress.methods.spans import Spans, count_before

_LAST = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """The protected tokens of some rows, and the others, before the last ones that all are kept.

    Args:
        own: ``[N, Hkv, G]`` int32 slots, ascending; ``[1, 1, G]`` where they are the same in all
            rows and heads, as in a prompt of which nothing was dropped.
        others: ``[N, Hkv, P - G]`` int64 slots of the other tokens, likewise, those of the last
            ones behind them.
    """

    own: torch.Tensor
    others: torch.Tensor

    @classmethod
    def of(cls, spans: Spans, end: int, device: torch.device) -> "Guarded | None":
        """Of the first `end` tokens of a whole prompt; None where none of them is protected."""
        if not count_before(spans, end):
            return None
        is_own = torch.zeros(end, dtype=torch.bool)
        for start, stop in spans:
            is_own[start:stop] = True
        position = torch.arange(end, dtype=torch.int32)
        own, others = position[is_own], position[~is_own]
        return cls(
            own=to_device(own, torch.int32, device)[None, None],
            others=to_device(others, torch.int64, device)[None, None],
        )

    @classmethod
    def of_slots(cls, own: torch.Tensor, width: int) -> "Guarded":
        """Of rows that hold at most `width` tokens, where `own` ``[N, Hkv, G]`` are protected.

        `own` may be ``[1, 1, G]``, as in `Guarded`.
        """
        is_own = torch.zeros(*own.shape[:2], width, dtype=torch.bool, device=own.device)
        is_own.scatter_(2, own.long(), True)
        others = is_own.sort(dim=2, stable=True).indices[..., : width - own.shape[2]]
        return cls(own=own, others=others)

    def without(self, scores: torch.Tensor) -> torch.Tensor:
        """``[..., W]`` scores of the other tokens side by side, W a multiple of 16.

        What lies behind them is not initialised.
        """
        count = self.others.shape[2]
        found = scores.new_empty(*scores.shape[:-1], -(-count // 16) * 16)
        others = self.others.expand(*scores.shape[:2], count)
        found[..., :count] = scores.gather(2, others)
        return found

    def select(
        self,
        selector: Selector,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        after: int,
        most: int,
    ) -> torch.Tensor:
        """``[L, Hkv, most]`` int32 as `Selector.select` gives it: these, and its choice of others.

        Args:
            scores: ``[L, Hkv, W]`` float32, of all tokens before the last `after`.
            past: how many these are, in every row or ``[L]``.
            keep: ``[L]`` of these tokens, at least as many as are protected.
        """
        shape, count = scores.shape[:2], self.own.shape[2]
        free = self.without(scores)
        chosen = selector.select(free, past - count, keep - count, after, max(most - count, 0))
        if self.others.shape[2]:
            others = self.others.expand(*shape, -1).gather(2, chosen.clamp(min=0).long())
            at = others.int().where(chosen >= 0, _LAST)
        else:
            at = torch.full_like(chosen, _LAST)
        both = torch.cat([at, self.own.expand(*shape, count)], dim=2).sort(dim=2).values
        return both.where(both < _LAST, -1)[..., :most]


def places_among(kept: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """``[N, Hkv, G]`` int32: at which place of `kept` each of `own` is, all of which it has.

    Args:
        kept: ``[N, Hkv, n]`` int32 slots, ascending; -1 behind the last.
        own: ``[N, Hkv, G]`` int32, or what is broadcast to that.
    """
    ascending = kept.where(kept >= 0, _LAST).contiguous()
    wanted = own.expand(*kept.shape[:2], own.shape[2]).contiguous()
    return torch.searchsorted(ascending, wanted, out_int32=True)
