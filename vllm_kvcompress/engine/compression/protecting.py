"""Where protected tokens lie in what requests hold, whatever was dropped of them before.

Every layer and head has them all, but in slots of its own: what was dropped between them differs.
Within a span nothing is dropped, so that the slot of its first token says where all of it lies.
"""

from collections.abc import Sequence

import torch

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.engine.compression.mover import SourcePages
from vllm_kvcompress.engine.messages.step import PackRequest
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.remembered import Protected
from vllm_kvcompress.methods.protected import places_among
from vllm_kvcompress.methods.spans import Spans, clipped


class ProtectedSlots:
    """Knows the slots of protected tokens on one worker.

    Those that were packed lie where that was noted. Of the later ones nothing was dropped, so that
    they are counted from the end.

    Args:
        pool: notes them while requests run.
        num_layers: layers on this worker, L.
    """

    def __init__(self, pool: PagePool, num_layers: int) -> None:
        self._pool, self._num_layers = pool, num_layers

    def before(
        self, pack_requests: Sequence[PackRequest], source: SourcePages, heads: int
    ) -> torch.Tensor | None:
        """``[N, Hkv, G]`` int32, ascending: those before the windows and tails of some rows.

        Of a prompt of which nothing was dropped ``[1, 1, G]``; None where there are none.

        Args:
            todos: requests of which as many tokens are protected, with their rows in `held`.
        """
        if not pack_requests[0].plan.guarded:
            return None
        return self._slots(
            pack_requests,
            source,
            [pack_request.plan.settled for pack_request in pack_requests],
            heads,
        )

    def every(
        self, pack_requests: Sequence[PackRequest], source: SourcePages, heads: int
    ) -> torch.Tensor | None:
        """``[N, Hkv, G]`` int32, ascending: all of them; None where there are none."""
        if not pack_requests[0].plan.spans:
            return None
        found = self._slots(
            pack_requests, source, [pack_request.tokens for pack_request in pack_requests], heads
        )
        return found.expand(len(source.pages), heads, -1)

    def note(
        self, pack_requests: Sequence[PackRequest], kept: torch.Tensor, own: torch.Tensor
    ) -> None:
        """Note where those before the windows and tails lie from now on, if it will be asked.

        Args:
            kept: ``[N, Hkv, n]`` int32 slots that the rows keep, ascending; -1 behind the last.
            own: `before`.
        """
        count = self._num_layers
        for index, (pack_request, rows) in enumerate(
            zip(pack_requests, kept.split(count), strict=True)
        ):
            if pack_request.ends and pack_request.settings.decode_budget is None:
                self._pool.protected.pop(pack_request.request_id, None)
                continue
            spans = clipped(pack_request.plan.spans, 0, pack_request.plan.settled)
            lengths = torch.tensor([0, *(stop - start for start, stop in spans[:-1])])
            first = to_device(lengths.cumsum(0), torch.int64, kept.device)
            mine = own if len(own) == 1 else own[index * count :][:count]
            starts = places_among(rows, mine.index_select(2, first))
            self._pool.protected[pack_request.request_id] = Protected(
                pack_request.plan.settled, spans, starts
            )

    def _slots(
        self,
        pack_requests: Sequence[PackRequest],
        source: SourcePages,
        ends: Sequence[int],
        heads: int,
    ) -> torch.Tensor:
        """Those among the first tokens of each request, so many as `ends` says."""
        found, device = [], source.pages.device
        for index, (pack_request, end) in enumerate(zip(pack_requests, ends, strict=True)):
            packed = self._pool.protected.get(pack_request.request_id)
            first = 0 if packed is None else packed.settled
            assert first <= end, "what was packed lies before the window"
            late = to_device(
                _positions(clipped(pack_request.plan.spans, first, end)), torch.int32, device
            )
            if source.lengths is None:
                return late[None, None]
            lengths = source.lengths[index * self._num_layers :][: self._num_layers]
            late = late - (pack_request.tokens + pack_request.plan.probe) + lengths[:, None]
            own = late[:, None].expand(-1, heads, -1)
            found.append(own if packed is None else torch.cat([_packed(packed), own], dim=2))
        return torch.cat(found)


def _positions(spans: Spans) -> torch.Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(*span) for span in spans)])


def _packed(packed: Protected) -> torch.Tensor:
    """``[L, Hkv, G]`` int32: the slots of what was packed."""
    counts = torch.tensor([stop - start for start, stop in packed.spans])
    which = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
    device = packed.starts.device
    starts = packed.starts.index_select(2, to_device(which, torch.int64, device))
    return starts + to_device(within, torch.int32, device)
