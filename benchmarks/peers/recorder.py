"""Record an engine's logits while forcing its output tokens."""

from collections.abc import Callable
from typing import Any

import torch

RecordedLogits = dict[tuple[str, int], torch.Tensor]
"""Logits ``[vocabulary]`` float32 by record name and output step."""


def recorder(recorded: RecordedLogits) -> type[Any]:
    """Return a vLLM logits processor class that copies logits to `recorded`, then forces a token.

    It records requests with ``extra_args["record"]``, under that name, and forces the tokens in
    ``extra_args["force"]``. A step that runs twice, as in a chunked prefill, is overwritten.
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
                recorded[name, step] = logits.to(torch.float32, copy=True)
                if force is None:
                    return logits
                forced = torch.full_like(logits, -torch.inf)
                forced[force[step]] = 0.0
                return forced

            return process

    return Recorder
