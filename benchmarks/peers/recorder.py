"""What an engine thinks at each step of an answer that is forced on it."""

from collections.abc import Callable
from typing import Any

import torch

Tape = dict[tuple[str, int], torch.Tensor]
"""Logits ``[vocabulary]`` float32 of a job's step."""


def recorder(tape: Tape) -> type[Any]:
    """A vLLM logits processor that copies a request's logits to `tape` before it forces a token.

    A request is recorded under ``extra_args["record"]``; a step that is computed again, as in the
    chunks of a prefill before the last, is overwritten.
    """
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    class Recorder(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Callable[..., torch.Tensor] | None:
            extra = params.extra_args or {}
            name, force = extra.get("record"), extra.get("force")
            if name is None:
                return None

            def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
                step = len(output_ids)
                tape[name, step] = logits.to(torch.float32, copy=True)
                if force is None:
                    return logits
                forced = torch.full_like(logits, -torch.inf)
                forced[force[step]] = 0.0
                return forced

            return process

    return Recorder
