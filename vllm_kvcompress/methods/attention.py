"""Window attention of layers of different lengths, and of windows in two parts."""

import torch
from torch.nn.functional import pad

from kvcompress_kernels.window_scores import WindowScores, window_scores_of_rows
from vllm_kvcompress.methods.paged_layers import PagedLayers


def split_window_scores(
    layers: PagedLayers,
    query: torch.Tensor,
    num_output: int,
    *,
    last: bool = False,
    grouped: bool = False,
) -> WindowScores:
    """Return the attention of the last `num_output` queries, with the earlier queries' maximum.

    The earlier queries see only the tokens before the last `num_output` tokens. `last` also returns
    the attention of the last query, and `grouped` returns one line per KV head.
    """
    tokens, block_size = layers.max_tokens - num_output, layers.key_pages.shape[3]
    earlier_maximum = window_scores_of_rows(
        query[:, :-num_output],
        layers.key_pages,
        layers.pages[:, : -(-tokens // block_size)],
        tokens,
        layers.scale,
        lengths=None if layers.lengths is None else layers.lengths - num_output,
        variance=False,
        maximum=True,
        last=False,
        grouped=grouped,
        sinks=layers.sinks,
        offsets=layers.offsets,
    ).maximum  # frees the other statistics before the last queries are scored
    assert earlier_maximum is not None
    maximum = pad(earlier_maximum, (0, num_output))
    del earlier_maximum
    scores = window_scores_of_rows(
        query[:, -num_output:],
        layers.key_pages,
        layers.pages,
        layers.max_tokens,
        layers.scale,
        lengths=layers.lengths,
        variance=True,
        last=last,
        grouped=grouped,
        sinks=layers.sinks,
        offsets=layers.offsets,
    )
    return scores._replace(maximum=maximum)


def zero_after_past(part: torch.Tensor, layers: PagedLayers, window: int) -> torch.Tensor:
    """Return ``[N, Hq, max_tokens - w]`` with 0 in the columns after each layer's own past."""
    past = part[..., : layers.max_tokens - window]
    if layers.lengths is None:
        return past
    column = torch.arange(past.shape[2], device=part.device)
    return past.where((column < (layers.lengths - window)[:, None])[:, None], 0)


def move_window_last(maximum: torch.Tensor, lengths: torch.Tensor, window: int) -> torch.Tensor:
    """Return ``[N, Hq, max_tokens]`` with each layer's window columns moved to the last w columns.

    The columns between a shorter layer's past and the moved window are 0, so that pooling does not
    spread window scores into the past.
    """
    max_tokens, past = maximum.shape[2], (lengths - window)[:, None]
    column = torch.arange(max_tokens, device=maximum.device)
    index = (past + column[:window]).long().clamp(min=0)[:, None].expand(-1, maximum.shape[1], -1)
    window_columns = maximum.gather(2, index)
    maximum = maximum.masked_fill((column >= past)[:, None], 0)
    maximum[..., max_tokens - window :] = window_columns
    return maximum
