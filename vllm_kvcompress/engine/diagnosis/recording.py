"""What a worker's packer keeps, written down as it packs.

`record`, `recorded` and `repacked` are called in the worker's own process (``collective_rpc``).
Nothing is computed again: the positions are those that are handed to the kernels.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from vllm_kvcompress.engine.messages.step import PackRequest
from vllm_kvcompress.methods.spans import Spans

_RECORDER = "_kvcompress_recorder"


class _Recorder:
    """Notes what is packed: whole prompts, and one at a time piece by piece.

    Args:
        buckets: parts of a prompt, at most, that its positions are counted in.
        parts: spans of the prompt that are counted for themselves, by name.
    """

    def __init__(self, buckets: int, parts: Mapping[str, Spans]) -> None:
        self.prompts: list[dict[str, Any]] = []
        self.answers = 0
        self._buckets, self._parts = buckets, parts
        # Of a prompt in pieces the positions ``[Hkv, n]`` that each layer holds, up to `_computed`.
        self._held: list[torch.Tensor] = []
        self._computed = 0

    def packed(self, pack_request: PackRequest, kept: torch.Tensor, counts: torch.Tensor) -> None:
        """Take in one request that was packed (`Packer.observers`)."""
        if not pack_request.prefill:
            self.answers += 1
            return
        size, heads = pack_request.plan.block_size, kept.shape[1]
        if pack_request.whole:
            self.prompts.append(_counted(pack_request, counts, kept, self._buckets, self._parts))
            return
        since = torch.arange(self._computed, pack_request.tokens).expand(heads, -1)
        held = self._held or [since[:, :0]] * len(kept)
        slots = [torch.cat([own, since], 1) for own in held]
        ends = [int(count) * size for count in counts]
        chosen = [row.long().cpu()[:, :end] for row, end in zip(kept, ends, strict=True)]
        self._held = [own.gather(1, at) for own, at in zip(slots, chosen, strict=True)]
        self._computed = pack_request.tokens // size * size
        if pack_request.ends:
            rows = [pad(own, (0, max(ends) - own.shape[1]), value=-1) for own in self._held]
            every = torch.stack(rows)
            self.prompts.append(_counted(pack_request, counts, every, self._buckets, self._parts))
            self._held, self._computed = [], 0


def record(wrapper: Any, buckets: int, parts: Mapping[str, Spans]) -> None:
    """From now on, note what this worker packs.

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
    """Per prompt that this worker has packed since `record`: see `_counted`."""
    compressor = wrapper.worker.compressor
    return [] if compressor is None else list(getattr(compressor, _RECORDER).prompts)


def repacked(wrapper: Any) -> int:
    """How often this worker has packed an answer since `record`."""
    compressor = wrapper.worker.compressor
    return 0 if compressor is None else int(getattr(compressor, _RECORDER).answers)


def _counted(
    pack_request: PackRequest,
    pages: torch.Tensor,
    kept: torch.Tensor,
    buckets: int,
    parts: Mapping[str, Spans],
) -> dict[str, Any]:
    """The positions of one prompt, counted; those of its answer, after a look-ahead, are not.

    Args:
        pages: ``[L]``, pages that each layer keeps.
        kept: ``[L, Hkv, n]`` positions, -1 behind a layer's last. The tail may be among them; it
            stays in any case.

    Returns:
        `pages` over all layers, `kv_heads`, `kept_tokens` of each layer, `share` as in `KeptMap`,
        and of each of the `parts` the share that stays.
    """
    layers, heads, _ = kept.shape
    prompt = pack_request.prompt_tokens
    buckets = min(buckets, prompt)
    stays = torch.zeros(layers, heads, pack_request.tokens + 1, dtype=torch.bool)
    # The modulus sends -1 to the column behind the prompt.
    stays.scatter_(2, kept.long().cpu() % (pack_request.tokens + 1), True)
    stays = stays[..., :-1]
    stays[
        ..., pack_request.tokens // pack_request.plan.block_size * pack_request.plan.block_size :
    ] = True
    stays = stays[..., :prompt]
    bucket = torch.arange(prompt) * buckets // prompt
    counts = torch.zeros(layers, buckets).index_add_(1, bucket, stays.sum(1).float())
    share = counts / (heads * torch.bincount(bucket, minlength=buckets))
    return {
        "pages": int(pages.sum()),
        "kv_heads": heads,
        "kept_tokens": (stays.sum((1, 2)) / heads).tolist(),
        "share": share.tolist(),
        "parts": {name: _share(stays, spans) for name, spans in parts.items()},
    }


def _share(stays: torch.Tensor, spans: Spans) -> float:
    """Of the pairs of a KV head and a position in some spans, the part that stays."""
    own = torch.cat([stays[..., start:stop] for start, stop in spans], dim=-1)
    return float(own.float().mean())
