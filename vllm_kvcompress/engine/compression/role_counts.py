"""How much is kept of each role's tokens, of prompts whose requests ask."""

from dataclasses import dataclass

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.engine.messages.spans import roles_of
from vllm_kvcompress.engine.messages.step import Pack, RoleKept
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

    def kept(self, todo: Pack, pairs: list[list[int]]) -> tuple[RoleKept, ...]:
        """What is told of the prompt.

        Args:
            pairs: `pairs` of every layer of the model that is compressed, on the host.
        """
        size = todo.plan.block_size
        tail = todo.tokens // size * size
        told = []
        for index, (role, spans) in enumerate(self.roles.items()):
            in_pages = sum(layer[index] for layer in pairs) / (len(pairs) * self.heads)
            # the tail is in no page of the packing, and every layer and head keeps it
            stays = in_pages + token_count(clipped(spans, tail, todo.tokens))
            told.append(RoleKept(role, token_count(spans), stays / token_count(spans)))
        return tuple(told)


class RoleCounts:
    """Counts what a packer keeps (`Packer.observers`), by the roles that came with requests."""

    def __init__(self) -> None:
        self._roles: dict[str, Roles] = {}
        self._counted: dict[str, Counted] = {}

    def begin_step(self, output: SchedulerOutput) -> None:
        """Take in the requests that are new to this worker, and forget those that are gone."""
        for request_id in output.finished_req_ids:
            self._roles.pop(request_id, None)
            self._counted.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            if roles := roles_of(new.sampling_params):
                self._roles[new.req_id] = roles

    def packed(self, todo: Pack, kept: torch.Tensor, counts: torch.Tensor) -> None:
        """Count one prompt of which nothing was dropped before: there a slot is a position.

        Args:
            kept: ``[L, Hkv, n]`` int32 slots in pages, -1 behind a layer's last.
            counts: ``[L]``, pages of each layer.
        """
        roles = self._roles.get(todo.request_id)
        if roles is None or not (todo.prefill and todo.whole and todo.ends):
            return
        # one place more, for what is no role's: the answer's tokens, and what is no slot
        role_at = torch.full((todo.tokens + 1,), len(roles))
        for role, spans in enumerate(roles.values()):
            for start, stop in spans:
                role_at[start:stop] = role
        role_at[todo.tokens // todo.plan.block_size * todo.plan.block_size :] = len(roles)
        role_of = to_device(role_at, torch.int64, kept.device)[kept.flatten(1).long()]
        pairs = torch.zeros(len(kept), len(roles) + 1, dtype=torch.int32, device=kept.device)
        pairs.scatter_add_(1, role_of, torch.ones_like(role_of, dtype=torch.int32))
        own = Counted(roles=roles, pairs=pairs[:, :-1], heads=kept.shape[1])
        self._counted[todo.request_id] = own

    def take(self, request_id: str) -> Counted | None:
        """What was counted of a prompt; None where its request does not ask, or nobody can say."""
        return self._counted.pop(request_id, None)
