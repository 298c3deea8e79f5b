"""How much is kept of each role's tokens, of prompts whose requests ask."""

from dataclasses import dataclass

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.engine.messages.spans import roles_of
from vllm_kvcompress.engine.messages.step import PackRequest, RoleKept
from vllm_kvcompress.methods.spans import Roles, clipped, token_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Of one prompt that was packed.

    Args:
        roles: the tokens of each.
        pairs: ``[L, R]`` int32, the pairs of a KV head and a token that each layer has in pages, by
            role in that order.
        heads: KV heads of a layer on this worker.
    """

    roles: Roles
    pairs: torch.Tensor
    heads: int

    def shares(self, pack_request: PackRequest, every: list[list[int]]) -> tuple[RoleKept, ...]:
        """What is told of the prompt.

        Args:
            every: such pairs, on the host, of every layer of the model that is compressed.
        """
        tail, told = _tail_of(pack_request), []
        for index, (role, spans) in enumerate(self.roles.items()):
            in_pages = sum(pairs[index] for pairs in every) / (len(every) * self.heads)
            # the tail is in no page of the packing, and every layer and head keeps it
            stays = in_pages + token_count(clipped(spans, tail, pack_request.tokens))
            told.append(RoleKept(role, token_count(spans), stays / token_count(spans)))
        return tuple(told)


class RoleCounts:
    """Counts what a packer keeps (`Packer.observers`), by the roles that came with requests."""

    def __init__(self) -> None:
        self._roles: dict[str, Roles] = {}
        self._counted: dict[str, Counted] = {}

    def begin_step(self, output: SchedulerOutput) -> None:
        """Take in the requests that are new to this worker, and forget those that are gone."""
        gone = [*output.finished_req_ids, *(new.req_id for new in output.scheduled_new_reqs)]
        for request_id in gone:
            self._roles.pop(request_id, None)
            self._counted.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            if roles := roles_of(new.sampling_params):
                self._roles[new.req_id] = roles

    def packed(self, pack_request: PackRequest, kept: torch.Tensor, counts: torch.Tensor) -> None:
        """Count one prompt of which nothing was dropped before: there a slot is a position.

        Args:
            kept: ``[L, Hkv, n]`` int32 slots in pages, ascending; -1 behind a layer's last.
            counts: ``[L]``, pages of each layer.
        """
        roles = self._roles.get(pack_request.request_id)
        if roles is None or not (pack_request.prefill and pack_request.whole and pack_request.ends):
            return
        own = [clipped(spans, 0, _tail_of(pack_request)) for spans in roles.values()]
        role_of = [role for role, spans in enumerate(own) for _ in spans]
        edges = torch.tensor([edge for spans in own for span in spans for edge in span])
        at = to_device(edges, torch.int32, kept.device).expand(*kept.shape[:2], -1)
        # behind the last slot nothing is before any edge
        rows = kept.masked_fill(kept < 0, pack_request.tokens)
        before = torch.searchsorted(rows, at.contiguous(), out_int32=True)
        in_spans = (before[..., 1::2] - before[..., ::2]).sum(1, dtype=torch.int32)
        pairs = torch.zeros(len(kept), len(roles), dtype=torch.int32, device=kept.device)
        index = to_device(torch.tensor(role_of), torch.int64, kept.device)
        pairs.index_add_(1, index, in_spans)
        self._counted[pack_request.request_id] = Counted(
            roles=roles, pairs=pairs, heads=kept.shape[1]
        )

    def take(self, request_id: str) -> Counted | None:
        """What was counted of a prompt; None where its request does not ask, or nobody can say."""
        return self._counted.pop(request_id, None)


def _tail_of(pack_request: PackRequest) -> int:
    """The first token of the last page that is not full, which stays where it is."""
    return pack_request.tokens // pack_request.plan.block_size * pack_request.plan.block_size
