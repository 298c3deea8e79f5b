"""Counts the kept tokens of each chat role, for requests that ask for it."""

from dataclasses import dataclass

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.engine.messages.options import roles_of
from vllm_kvcompress.engine.messages.step import PackRequest, RoleKept
from vllm_kvcompress.methods.spans import Roles, clip_spans, token_count


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePairCounts:
    """Kept (KV head, token) pairs of each role in one packed prompt.

    Args:
        roles: token spans of each role.
        pairs: ``[L, R]`` int32, kept pairs in the pages of each layer, in the order of `roles`.
        heads: KV heads of a layer on this worker.
    """

    roles: Roles
    pairs: torch.Tensor
    heads: int

    def shares(
        self, pack_request: PackRequest, layer_pairs: list[list[int]]
    ) -> tuple[RoleKept, ...]:
        """Return the share of each role's tokens that is kept, averaged over layers and KV heads.

        Args:
            pack_request: the prompt's entry in the scheduler's plan.
            layer_pairs: `pairs` of all compressed layers of the model, on the host.
        """
        tail_start, shares = pack_request.plan.packed_end, []
        for index, (role, spans) in enumerate(self.roles.items()):
            in_pages = sum(pairs[index] for pairs in layer_pairs) / (len(layer_pairs) * self.heads)
            # Packed pages exclude the tail, which every layer and head keeps.
            kept_tokens = in_pages + token_count(clip_spans(spans, tail_start, pack_request.tokens))
            shares.append(RoleKept(role, token_count(spans), kept_tokens / token_count(spans)))
        return tuple(shares)


class RoleCounts:
    """Observes a packer (`Packer.observers`) and counts kept tokens by the requests' roles."""

    def __init__(self) -> None:
        self._roles: dict[str, Roles] = {}
        self._counted: dict[str, RolePairCounts] = {}

    def begin_step(self, output: SchedulerOutput) -> None:
        """Add the roles of new requests and drop those of finished ones."""
        stale = [*output.finished_req_ids, *(new.req_id for new in output.scheduled_new_reqs)]
        for request_id in stale:
            self._roles.pop(request_id, None)
            self._counted.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            if roles := roles_of(new.sampling_params):
                self._roles[new.req_id] = roles

    def packed(self, pack_request: PackRequest, kept: torch.Tensor, counts: torch.Tensor) -> None:
        """Count the kept tokens of a prompt that has dropped no token before.

        A slot is then a token position.

        Args:
            pack_request: the prompt's entry in the scheduler's plan.
            kept: ``[L, Hkv, n]`` int32, kept slots, ascending; -1 after a layer's last.
            counts: ``[L]``, pages of each layer.
        """
        roles = self._roles.get(pack_request.request_id)
        if roles is None or not (
            pack_request.prefill and pack_request.nothing_dropped and pack_request.completes_prompt
        ):
            return
        paged_spans = [
            clip_spans(spans, 0, pack_request.plan.packed_end) for spans in roles.values()
        ]
        span_roles = [role for role, spans in enumerate(paged_spans) for _ in spans]
        edges = torch.tensor([edge for spans in paged_spans for span in spans for edge in span])
        head_edges = to_device(edges, torch.int32, kept.device).expand(*kept.shape[:2], -1)
        # Padding sorts after every edge, so it is counted in no span.
        positions = kept.masked_fill(kept < 0, pack_request.tokens)
        kept_before = torch.searchsorted(positions, head_edges.contiguous(), out_int32=True)
        in_spans = (kept_before[..., 1::2] - kept_before[..., ::2]).sum(1, dtype=torch.int32)
        pairs = torch.zeros(len(kept), len(roles), dtype=torch.int32, device=kept.device)
        index = to_device(torch.tensor(span_roles), torch.int64, kept.device)
        pairs.index_add_(1, index, in_spans)
        self._counted[pack_request.request_id] = RolePairCounts(
            roles=roles, pairs=pairs, heads=kept.shape[1]
        )

    def take(self, request_id: str) -> RolePairCounts | None:
        """Remove and return a prompt's counts.

        Returns:
            None if the request did not ask for counts, or if pieces of its prompt dropped tokens.
        """
        return self._counted.pop(request_id, None)
