"""Spans of a prompt that are kept in any case, in every layer and head.

They count in the budget, as the observation window does. What they and the window leave is shared
out and chosen by the method, as if the protected tokens were not there: scores are of the whole
prompt, and allocator and selector see those of the other tokens side by side.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.methods.base import Selector
from vllm_kvcompress.methods.spans import Spans, count_before

_LAST = torch.iinfo(torch.int32).max
_TURNS = 8
"""Parts that rows are chosen from in turns: each takes a few figures of every token beside its
score, which together take no more than one score does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """The protected tokens of some rows, before the last ones that all are kept.

    Args:
        own: ``[N, Hkv, G]`` int32 slots, ascending; ``[1, 1, G]`` where they are the same in all
            rows and heads, as in a prompt of which nothing was dropped.
    """

    own: torch.Tensor

    @classmethod
    def of(cls, spans: Spans, end: int, device: torch.device) -> "Guarded | None":
        """Of the first `end` tokens of a whole prompt; None where none of them is protected."""
        if not count_before(spans, end):
            return None
        parts = [torch.arange(start, min(stop, end)) for start, stop in spans if start < end]
        return cls(own=to_device(torch.cat(parts), torch.int32, device)[None, None])

    def others(self, width: int) -> torch.Tensor:
        """``[N, Hkv, width - G]`` int64, or ``[1, 1, ...]``: the other slots, ascending."""
        own = self.own
        is_own = torch.zeros(*own.shape[:2], width, dtype=torch.bool, device=own.device)
        is_own.scatter_(2, own.long(), True)
        return is_own.sort(dim=2, stable=True).indices[..., : width - own.shape[2]]

    def without(self, scores: torch.Tensor) -> torch.Tensor:
        """``[..., W - G]`` of scores ``[..., W]``: those of the other tokens side by side."""
        others = self.others(scores.shape[2])
        return scores.gather(2, others.expand(*scores.shape[:2], -1))

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
        (rows, heads, width), count = scores.shape, self.own.shape[2]
        found = scores.new_empty(rows, heads, most, dtype=torch.int32)
        step = -(-rows // _TURNS)
        for start in range(0, rows, step):
            some = slice(start, start + step)
            part = self if len(self.own) == 1 else Guarded(own=self.own[some])
            others = part.others(width).expand(*scores[some].shape[:2], -1)
            free = _aligned(scores[some].gather(2, others))
            held = past if isinstance(past, int) else past[some]
            room = held - count, keep[some] - count, after, max(most - count, 0)
            found[some] = part._beside(selector.select(free, *room), others)[..., :most]
        return found

    def _beside(self, chosen: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """``[N, Hkv, G + n]`` int32 slots, ascending, -1 behind the last: these and some others.

        Args:
            chosen: ``[N, Hkv, n]`` int32 places among `others`, -1 behind the last.
        """
        if others.shape[2]:
            at = others.gather(2, chosen.clamp(min=0).long()).int().where(chosen >= 0, _LAST)
        else:
            at = torch.full_like(chosen, _LAST)
        own = self.own.expand(*chosen.shape[:2], -1)
        both = torch.cat([at, own], dim=2).sort(dim=2).values
        return both.where(both < _LAST, -1)


def _aligned(scores: torch.Tensor) -> torch.Tensor:
    """The scores in rows of a multiple of 16, of which a GPU loads four at once."""
    missing = -scores.shape[2] % 16
    return pad(scores, (0, missing)) if missing else scores


def places_among(kept: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """``[N, Hkv, G]`` int32: at which place of `kept` each of `own` is, all of which it has.

    Args:
        kept: ``[N, Hkv, n]`` int32 slots, ascending; -1 behind the last.
        own: ``[N, Hkv, G]`` int32, or what is broadcast to that.
    """
    ascending = kept.where(kept >= 0, _LAST).contiguous()
    wanted = own.expand(*kept.shape[:2], own.shape[2]).contiguous()
    return torch.searchsorted(ascending, wanted, out_int32=True)
