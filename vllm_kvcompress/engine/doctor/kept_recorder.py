"""Records the token positions that a worker's packer keeps.

`record`, `recorded` and `repacked` run in the worker's process (``collective_rpc``). The recorded
positions are those that the packer passes to its kernels.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from vllm_kvcompress.engine.messages.step import PackRequest
from vllm_kvcompress.methods.spans import Spans

_RECORDER = "_kvcompress_recorder"


class _Recorder:
    """Records packed prompts. Of prompts that are packed in pieces, only one may be active.

    Args:
        buckets: maximum number of position ranges in which kept tokens are counted.
        parts: spans of the prompt to count separately, by name.
    """

    def __init__(self, buckets: int, parts: Mapping[str, Spans]) -> None:
        self.prompts: list[dict[str, Any]] = []
        self.output_packings = 0
        self._buckets, self._parts = buckets, parts
        # For a prompt in pieces, by layer, the kept positions ``[Hkv, n]`` before `_packed_tokens`.
        self._kept: list[torch.Tensor] = []
        self._packed_tokens = 0

    def packed(self, pack_request: PackRequest, kept: torch.Tensor, counts: torch.Tensor) -> None:
        """Record one packed request (`Packer.observers`)."""
        if not pack_request.prefill:
            self.output_packings += 1
            return
        size, heads = pack_request.plan.block_size, kept.shape[1]
        if not pack_request.reads_page_tables:
            self.prompts.append(_counted(pack_request, counts, kept, self._buckets, self._parts))
            return
        new_positions = torch.arange(self._packed_tokens, pack_request.tokens).expand(heads, -1)
        earlier = self._kept or [new_positions[:, :0]] * len(kept)
        slot_positions = [torch.cat([positions, new_positions], 1) for positions in earlier]
        ends = [int(count) * size for count in counts]
        kept_slots = [slots.long().cpu()[:, :end] for slots, end in zip(kept, ends, strict=True)]
        self._kept = [
            positions.gather(1, slots)
            for positions, slots in zip(slot_positions, kept_slots, strict=True)
        ]
        self._packed_tokens = pack_request.packed_end // size * size
        if pack_request.completes_prompt:
            layers = [pad(layer, (0, max(ends) - layer.shape[1]), value=-1) for layer in self._kept]
            positions = torch.stack(layers)
            counted = _counted(pack_request, counts, positions, self._buckets, self._parts)
            self.prompts.append(counted)
            self._kept, self._packed_tokens = [], 0


def record(wrapper: Any, buckets: int, parts: Mapping[str, Spans]) -> None:
    """Start recording the prompts that this worker packs.

    Args:
        wrapper: vLLM's wrapper of the worker.
        buckets, parts: as in `_Recorder`.
    """
    compressor = wrapper.worker.compressor
    if compressor is not None:
        recorder = _Recorder(buckets, parts)
        setattr(compressor, _RECORDER, recorder)
        compressor.packer.observers.append(recorder.packed)


def recorded(wrapper: Any) -> list[dict[str, Any]]:
    """Return `_counted` for each prompt that this worker has packed since `record`."""
    compressor = wrapper.worker.compressor
    return [] if compressor is None else list(getattr(compressor, _RECORDER).prompts)


def repacked(wrapper: Any) -> int:
    """Return how often this worker has packed output tokens since `record`."""
    compressor = wrapper.worker.compressor
    return 0 if compressor is None else int(getattr(compressor, _RECORDER).output_packings)


def _counted(
    pack_request: PackRequest,
    pages: torch.Tensor,
    kept: torch.Tensor,
    buckets: int,
    parts: Mapping[str, Spans],
) -> dict[str, Any]:
    """Count the kept positions of one prompt, without the output tokens of its look-ahead.

    Args:
        pack_request: the prompt's entry in the scheduler's plan.
        pages: ``[L]``, pages that each layer keeps.
        kept: ``[L, Hkv, n]``, kept positions, -1 after a layer's last. Leading tokens and the tail
            always count as kept, whether or not they are included.
        buckets, parts: as in `_Recorder`.

    Returns:
        A JSON object: `pages` over all layers, `kv_heads`, `kept_tokens` of each layer, `share` as
        in `KeptMap`, and in `parts` the kept share of each part.
    """
    layers, heads, _ = kept.shape
    prompt_tokens = pack_request.prompt_tokens
    buckets = min(buckets, prompt_tokens)
    is_kept = torch.zeros(layers, heads, pack_request.tokens + 1, dtype=torch.bool)
    # The modulus maps -1 to an extra column at the end, which is cut off.
    is_kept.scatter_(2, kept.long().cpu() % (pack_request.tokens + 1), True)
    is_kept = is_kept[..., :-1]
    is_kept[..., : pack_request.plan.leading_tokens] = True
    is_kept[..., pack_request.plan.packed_end :] = True
    is_kept = is_kept[..., :prompt_tokens]
    bucket = torch.arange(prompt_tokens) * buckets // prompt_tokens
    counts = torch.zeros(layers, buckets).index_add_(1, bucket, is_kept.sum(1).float())
    share = counts / (heads * torch.bincount(bucket, minlength=buckets))
    return {
        "pages": int(pages.sum()),
        "kv_heads": heads,
        "kept_tokens": (is_kept.sum((1, 2)) / heads).tolist(),
        "share": share.tolist(),
        "parts": {name: _share(is_kept, spans) for name, spans in parts.items()},
    }


def _share(is_kept: torch.Tensor, spans: Spans) -> float:
    """Return the kept share of all layers, KV heads and positions in the spans."""
    in_spans = torch.cat([is_kept[..., start:stop] for start, stop in spans], dim=-1)
    return float(in_spans.float().mean())
