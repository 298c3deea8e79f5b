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
    """The protected tokens before the last `after` of a prompt of which nothing was dropped yet.

    Args:
        own: ``[G]`` int32, their positions, ascending.
        others: ``[P]`` int32, those of the other tokens before the last `after`, likewise.
    """

    own: torch.Tensor
    others: torch.Tensor

    @classmethod
    def of(cls, spans: Spans, end: int, device: torch.device) -> "Guarded | None":
        """Of the first `end` tokens; None where none of them is protected."""
        if not count_before(spans, end):
            return None
        is_own = torch.zeros(end, dtype=torch.bool)
        for start, stop in spans:
            is_own[start:stop] = True
        position = torch.arange(end, dtype=torch.int32)
        own, others = position[is_own], position[~is_own]
        return cls(
            own=to_device(own, torch.int32, device), others=to_device(others, torch.int32, device)
        )

    def without(self, scores: torch.Tensor) -> torch.Tensor:
        """``[..., W]`` scores of the other tokens side by side, W a multiple of 16.

        What lies behind them is not initialised.
        """
        width = -(-len(self.others) // 16) * 16
        found = scores.new_empty(*scores.shape[:-1], width)
        found[..., : len(self.others)] = scores.index_select(-1, self.others)
        return found

    def select(
        self,
        selector: Selector,
        scores: torch.Tensor,
        keep: torch.Tensor,
        after: int,
        most: int,
    ) -> torch.Tensor:
        """``[L, Hkv, most]`` int32 as `Selector.select` gives it: these, and its choice of others.

        Args:
            scores: ``[L, Hkv, W]`` float32, of all tokens before the last `after`.
            keep: ``[L]`` of all these tokens, at least as many as are protected.
        """
        count = len(self.own)
        chosen = selector.select(
            self.without(scores), len(self.others), keep - count, after, max(most - count, 0)
        )
        if len(self.others):
            at = self.others[chosen.clamp(min=0).long()].where(chosen >= 0, _LAST)
        else:
            at = torch.full_like(chosen, _LAST)
        both = torch.cat([at, self.own.expand(*at.shape[:2], count)], dim=2).sort(dim=2).values
        return both.where(both < _LAST, -1)[..., :most]
