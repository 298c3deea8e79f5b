"""Selection with protected spans, which every layer and head keeps.

Protected tokens count towards the budget, as the observation window does. The method divides and
fills the rest of the budget as if the protected tokens did not exist: scores cover the whole
prompt, but allocator and selector see only the unprotected tokens' scores, without gaps.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.methods.base import Selector
from vllm_kvcompress.methods.spans import Spans, clip_spans

_LAST = torch.iinfo(torch.int32).max
_MAX_PARTS = 8
"""Number of parts into which layers are split, to select in one part after another.

Selecting needs several temporary numbers per token. For one part, they take no more memory than one
score per token of all layers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectedTokens:
    """The protected tokens of N layers, without those among the last tokens, which are all kept.

    Args:
        slots: ``[N, Hkv, G]`` int32 slots, ascending; ``[1, 1, G]`` if they are the same in all
            layers and heads, as in a prompt that has lost no tokens.
    """

    slots: torch.Tensor

    @classmethod
    def of(
        cls, spans: Spans, end: int, device: torch.device, first: int = 0
    ) -> "ProtectedTokens | None":
        """Return the protected tokens from `first` to `end` of an uncompressed prompt, or None."""
        clipped = clip_spans(spans, first, end)
        if not clipped:
            return None
        parts = [torch.arange(start, stop) for start, stop in clipped]
        return cls(slots=to_device(torch.cat(parts), torch.int32, device)[None, None])

    def behind(self, leading: int) -> "ProtectedTokens":
        """Return these tokens with slots counted from the first token behind `leading` tokens."""
        return ProtectedTokens(slots=self.slots - leading) if leading else self

    def unprotected_slots(self, width: int) -> torch.Tensor:
        """Return the other slots, ascending: ``[N, Hkv, width - G]`` int64, or ``[1, 1, ...]``."""
        slots = self.slots
        is_protected = torch.zeros(*slots.shape[:2], width, dtype=torch.bool, device=slots.device)
        is_protected.scatter_(2, slots.long(), True)
        return is_protected.sort(dim=2, stable=True).indices[..., : width - slots.shape[2]]

    def unprotected_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the unprotected tokens' scores ``[..., W - G]`` from all scores ``[..., W]``."""
        unprotected = self.unprotected_slots(scores.shape[2])
        return scores.gather(2, unprotected.expand(*scores.shape[:2], -1))

    def select(
        self,
        selector: Selector,
        scores: torch.Tensor,
        past: int | torch.Tensor,
        keep: torch.Tensor,
        kept_after: int,
        width: int,
    ) -> torch.Tensor:
        """Return the protected slots and the slots that the selector chooses from the others.

        Args:
            scores: ``[L, Hkv, W]`` float32, of all tokens before the last `kept_after`.
            past: number of these tokens, for every layer or ``[L]``.
            keep: ``[L]``, how many of these tokens to keep, at least as many as are protected.
            width: size of the result's last dimension.

        Returns:
            ``[L, Hkv, width]`` int32 as from `Selector.select`.
        """
        (num_layers, heads, num_scores), num_protected = scores.shape, self.slots.shape[2]
        selected = scores.new_empty(num_layers, heads, width, dtype=torch.int32)
        step = -(-num_layers // _MAX_PARTS)
        for start in range(0, num_layers, step):
            part = slice(start, start + step)
            protected = self if len(self.slots) == 1 else ProtectedTokens(slots=self.slots[part])
            unprotected = protected.unprotected_slots(num_scores)
            unprotected = unprotected.expand(*scores[part].shape[:2], -1)
            chosen = selector.select(
                _aligned(scores[part].gather(2, unprotected)),
                (past if isinstance(past, int) else past[part]) - num_protected,
                keep[part] - num_protected,
                kept_after,
                max(width - num_protected, 0),
            )
            selected[part] = protected._merge(chosen, unprotected)[..., :width]
        return selected

    def _merge(self, chosen: torch.Tensor, unprotected: torch.Tensor) -> torch.Tensor:
        """Return ``[N, Hkv, G + n]`` int32: protected and chosen slots, ascending, then -1.

        Args:
            chosen: ``[N, Hkv, n]`` int32 indices into `unprotected`, with -1 after the last.
        """
        if unprotected.shape[2]:
            slots = unprotected.gather(2, chosen.clamp(min=0).long()).int()
            slots = slots.where(chosen >= 0, _LAST)
        else:
            slots = torch.full_like(chosen, _LAST)
        protected = self.slots.expand(*chosen.shape[:2], -1)
        both = torch.cat([slots, protected], dim=2).sort(dim=2).values
        return both.where(both < _LAST, -1)


def _aligned(scores: torch.Tensor) -> torch.Tensor:
    """Return the scores padded to a multiple of 16 columns, which a GPU loads four at a time."""
    padding = -scores.shape[2] % 16
    return pad(scores, (0, padding)) if padding else scores


def indices_in_kept(kept: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the indices of `slots` in `kept`, which must contain all of them.

    Args:
        kept: ``[N, Hkv, n]`` int32 slots, ascending, with -1 after the last.
        slots: ``[N, Hkv, G]`` int32, or broadcastable to it.

    Returns:
        ``[N, Hkv, G]`` int32.
    """
    ascending = kept.where(kept >= 0, _LAST).contiguous()
    wanted = slots.expand(*kept.shape[:2], slots.shape[2]).contiguous()
    return torch.searchsorted(ascending, wanted, out_int32=True)
