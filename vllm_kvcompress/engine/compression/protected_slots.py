"""Finds the slots of protected tokens in requests that have dropped tokens before.

Every layer and head keeps all protected tokens, but at different slots, because each drops other
tokens between them. No token inside a protected span is dropped, so the slot of its first token
determines the slots of the rest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.engine.compression.mover import SourcePages
from vllm_kvcompress.engine.messages.step import PackRequest
from vllm_kvcompress.methods.protected import indices_in_kept
from vllm_kvcompress.methods.spans import Spans, clip_spans


class _PackedSpans(NamedTuple):
    """Slots of the protected tokens in the packed part of one request.

    Args:
        intact_from: number of tokens in the packed part; no later token has been dropped.
        spans: protected spans in the packed part.
        starts: ``[L, Hkv, n]`` int32, ascending, the slot of each span's first token.
    """

    intact_from: int
    spans: Spans
    starts: torch.Tensor


class ProtectedSlots:
    """Tracks the slots of protected tokens on one worker.

    The slots of packed tokens are recorded when they are packed. No token was dropped after them,
    so the slots of later tokens are counted from the end.

    Args:
        num_layers: layers on this worker, L.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        # By id, the requests that may be packed again.
        self._packed: dict[str, _PackedSpans] = {}

    def __len__(self) -> int:
        return len(self._packed)

    def forget(self, request_id: str) -> None:
        """Drop what was recorded for a request, if anything was."""
        self._packed.pop(request_id, None)

    def before(
        self, pack_requests: Sequence[PackRequest], source: SourcePages, heads: int
    ) -> torch.Tensor | None:
        """Return the protected slots before each row's window and tail, without leading tokens.

        Args:
            pack_requests: requests with equally many protected tokens.
            source: the requests' rows.
            heads: KV heads of a layer.

        Returns:
            ``[N, Hkv, G]`` int32, ascending; ``[1, 1, G]`` for a prompt that has dropped no token;
            None if no token is protected.
        """
        if not pack_requests[0].plan.protected_in_pages:
            return None
        return self._slots(
            pack_requests,
            source,
            [pack_request.plan.intact_from for pack_request in pack_requests],
            heads,
            with_leading=False,
        )

    def all_slots(
        self, pack_requests: Sequence[PackRequest], source: SourcePages, heads: int
    ) -> torch.Tensor | None:
        """Return all protected and leading slots, ascending; None if there are none.

        Returns:
            ``[N, Hkv, G]`` int32.
        """
        if not pack_requests[0].plan.always_kept_spans:
            return None
        ends = [pack_request.tokens for pack_request in pack_requests]
        slots = self._slots(pack_requests, source, ends, heads, with_leading=True)
        return slots.expand(len(source.pages), heads, -1)

    def note(
        self, pack_requests: Sequence[PackRequest], kept: torch.Tensor, slots_before: torch.Tensor
    ) -> None:
        """Record the new slots of protected tokens for requests that will be packed again.

        Args:
            pack_requests: the requests just packed.
            kept: ``[N, Hkv, n]`` int32, kept slots, ascending; -1 after the last.
            slots_before: the result of `before`.
        """
        count = self._num_layers
        for index, (pack_request, rows) in enumerate(
            zip(pack_requests, kept.split(count), strict=True)
        ):
            if pack_request.completes_prompt and pack_request.settings.decode.budget is None:
                self.forget(pack_request.request_id)
                continue
            spans = clip_spans(pack_request.plan.spans, 0, pack_request.plan.intact_from)
            lengths = torch.tensor([0, *(stop - start for start, stop in spans[:-1])])
            first_tokens = to_device(lengths.cumsum(0), torch.int64, kept.device)
            request_slots = (
                slots_before if len(slots_before) == 1 else slots_before[index * count :][:count]
            )
            starts = indices_in_kept(rows, request_slots.index_select(2, first_tokens))
            self._packed[pack_request.request_id] = _PackedSpans(
                pack_request.plan.intact_from, spans, starts
            )

    def _slots(
        self,
        pack_requests: Sequence[PackRequest],
        source: SourcePages,
        ends: Sequence[int],
        heads: int,
        *,
        with_leading: bool,
    ) -> torch.Tensor:
        """Return the protected slots among the first ``ends[r]`` tokens of each request r.

        Args:
            with_leading: whether to return all slots of leading tokens; otherwise none of them.
        """
        request_slots, device = [], source.pages.device
        for index, (pack_request, end) in enumerate(zip(pack_requests, ends, strict=True)):
            packed = self._packed.get(pack_request.request_id)
            first_unpacked = 0 if packed is None else packed.intact_from
            assert first_unpacked <= end, "packed tokens come before the window"
            plan = pack_request.plan
            spans, first = plan.spans, max(first_unpacked, plan.leading_tokens)
            if with_leading:
                spans, first = plan.always_kept_spans, first_unpacked
            positions = to_device(_positions(clip_spans(spans, first, end)), torch.int32, device)
            if source.lengths is None:
                return positions[None, None]
            lengths = source.lengths[index * self._num_layers :][: self._num_layers]
            num_tokens = pack_request.tokens + pack_request.plan.probe
            unpacked = positions - num_tokens + lengths[:, None]
            slots = unpacked[:, None].expand(-1, heads, -1)
            if packed is not None:
                slots = torch.cat([_packed_slots(packed), slots], dim=2)
            request_slots.append(slots)
        return torch.cat(request_slots)


def _positions(spans: Spans) -> torch.Tensor:
    """Return all positions in the spans, ascending, int64."""
    return torch.cat([torch.arange(0), *(torch.arange(*span) for span in spans)])


def _packed_slots(packed: _PackedSpans) -> torch.Tensor:
    """Return the slots ``[L, Hkv, G]`` int32 of the protected tokens that are packed."""
    counts = torch.tensor([stop - start for start, stop in packed.spans])
    span_index = torch.arange(len(counts)).repeat_interleave(counts)
    offset_in_span = torch.arange(len(span_index)) - (counts.cumsum(0) - counts)[span_index]
    device = packed.starts.device
    starts = packed.starts.index_select(2, to_device(span_index, torch.int64, device))
    return starts + to_device(offset_in_span, torch.int32, device)
