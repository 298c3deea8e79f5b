"""Records groups in k4v3 as an engine adds them, and replays attention over them in float64."""

import math
from typing import NamedTuple

import torch

from engines import BLOCK
from kvcompress_kernels import k4v3


class Added(NamedTuple):
    """Groups that were added to a request's packed pages in one packing.

    Args:
        computed: tokens computed by then.
        end: tokens of the request before the first one that is not packed.
        tokens: tokens that were added.
        pages: ``[L, n]`` flat pages of the groups.
        content: the bytes of these pages.
        groups: the groups in them.
    """

    computed: int
    end: int
    tokens: int
    pages: torch.Tensor
    content: torch.Tensor
    groups: k4v3.Group


def watch_added_groups(llm, seen):
    """Return a list that gets an `Added` for each packing of one request from now on.

    Args:
        seen: what `record_attention` returned.
    """
    pool, added = llm.compressor.pool, []
    add_groups = pool.add_groups

    def adding(request_id, pages, num_tokens, page_tokens, first_block, leading=None):
        add_groups(request_id, pages, num_tokens, page_tokens, first_block, leading)
        groups = k4v3.read_pages(pool.byte_pages, pages.long(), pool.itemsize)
        computed = sum(len(part) for part in seen[0]["q"])
        content = pool.byte_pages[pages.long()]
        end = first_block * BLOCK
        added.append(Added(computed, end, num_tokens, pages.long(), content, groups))

    pool.add_groups = adding
    return added


def assert_never_written_again(pool, added):
    """Assert that the pages of all added groups still hold the same bytes."""
    for each in added:
        assert torch.equal(pool.byte_pages[each.pages], each.content)


def assert_replay_matches(shape, seen, added, layer, first, positions, leading=BLOCK):
    """Assert that groups are quantised exactly, and that attention reads them and ordinary tokens.

    Args:
        shape: shape of the model.
        seen: what `record_attention` returned.
        added: what `watch_added_groups` returned.
        layer: the layer to check.
        first: tokens computed when the first ordinary token was ``first[1]``, and the keys and
            values ``[Hkv, n, D]`` in groups by then.
        positions: positions of the queries to check, none before the tokens in `first`.
        leading: first tokens of `seen` that stay ordinary tokens.
    """
    q, k, v, out = (
        torch.cat([part.flatten(1) for part in seen[layer][name]]).double()
        for name in ("q", "k", "v", "out")
    )
    q, k, v, out = (x.view(len(q), -1, shape.head_dim) for x in (q, k, v, out))
    steps = [first]
    held = first[2]
    for each in added:
        parts = k4v3.dequantise(k4v3.Group(*(part[layer] for part in each.groups)), torch.float64)
        flat = [part.transpose(0, 1).flatten(1, 3)[:, : each.tokens] for part in parts]
        _assert_quantised(shape, k, v, each, flat)
        held = [torch.cat([old, new], 1) for old, new in zip(held, flat, strict=True)]
        steps.append((each.computed, each.end, held))
    for position in positions:
        _, start, (keys, values) = next(step for step in reversed(steps) if step[0] <= position)
        for head in range(shape.heads):
            kv = head // (shape.heads // shape.kv_heads)
            own = slice(leading if start else 0), slice(start, position + 1)
            all_k = torch.cat([keys[kv], *(k[part, kv] for part in own)])
            all_v = torch.cat([values[kv], *(v[part, kv] for part in own)])
            weights = (all_k @ q[position, head] / math.sqrt(shape.head_dim)).softmax(0)
            error = (out[position, head] - weights @ all_v).abs().amax()
            assert error <= 1e-4 * all_v.abs().amax()


def _assert_quantised(shape, k, v, each, flat):
    """Assert that added groups are the exact tokens, quantised 64 at a time."""
    start = each.end - each.tokens
    for head in range(shape.kv_heads):
        for offset in range(0, each.tokens, k4v3.GROUP):
            valid = min(k4v3.GROUP, each.tokens - offset)
            exact = slice(start + offset, start + offset + valid)
            padding = (0, 0, 0, k4v3.GROUP - valid)
            exact_k, exact_v = (torch.nn.functional.pad(x[exact, head], padding) for x in (k, v))
            want = k4v3.dequantise(k4v3.quantise(exact_k, exact_v, valid), torch.float64)
            for actual, expected in zip(flat, want, strict=True):
                got, expected = actual[head, offset : offset + valid], expected[:valid]
                step = (got - expected).abs() > 1e-3 * expected.abs().amax()
                assert step.float().mean() < 1e-3, "only ties may round differently"
