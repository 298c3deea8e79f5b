"""Keys, values and attention of a prompt in float64, for the reference implementations."""

import torch


def cached_keys(key_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Gather keys ``[Hkv, tokens, D]`` from ``key_pages [N, Hkv, D, block_size]``."""
    return cached_values(key_pages.mT, pages, tokens)


def cached_values(value_pages: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Gather values ``[Hkv, tokens, D]`` from ``value_pages [N, Hkv, block_size, D]``."""
    block = value_pages.shape[2]
    token = torch.arange(tokens, device=pages.device)
    return value_pages[pages[token // block], :, token % block].double().transpose(0, 1)


def attention(
    query: torch.Tensor, keys: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the causal attention ``[Hq, T, tokens]`` of a prompt's last T tokens to all of it.

    Args:
        query: ``[T, Hq, D]``; head h reads the keys of head ``h // (Hq // Hkv)``.
        keys: ``[Hkv, tokens, D]`` float64.
        scale: factor on the logits.
        sinks: ``[Hq]`` attention sink logits, or None.
    """
    (count, heads, _), (kv_heads, tokens, _) = query.shape, keys.shape
    keys = keys.repeat_interleave(heads // kv_heads, 0)
    logits = scale * query.double().transpose(0, 1) @ keys.mT
    position = torch.arange(tokens, device=query.device)
    logits.masked_fill_(position > position[tokens - count :, None], -torch.inf)
    if sinks is None:
        return logits.softmax(-1)
    sink = sinks.double()[:, None, None].expand(-1, count, 1)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
