"""What every kernel must give for one row, in float64 and from the formula alone.

No code of the package: attention is a matrix, selection a stable sort. An element that rounding
may decide either way is `IGNORED`.
"""

import math

import torch
from h200_problem import Problem

Outputs = dict[str, torch.Tensor]
IGNORED = torch.nan
CHUNK = 10  # tokens of a chunk of `select_chunks`
PER_HEAD = ("total", "variance", "recent", "last")


def window_truth(p: Problem, row: int, *, grouped: bool) -> Outputs:
    keys, tokens, group = p.keys_of(row), p.tokens[row], p.shape.heads // p.shape.kv_heads
    past = tokens - p.shape.window
    key = torch.arange(tokens, device=p.device)
    future = key > key[past:, None]
    heads: dict[str, list[torch.Tensor]] = {name: [] for name in PER_HEAD}
    entropy = keys.new_zeros(())
    for head in range(p.shape.heads):
        query = p.query[row, :, head].double()
        logits = p.scale * query @ keys[head // group].T
        log_a = logits.masked_fill_(future, -torch.inf).log_softmax(-1)
        a = log_a.exp()
        heads["total"].append(a[:, :past].sum(0))
        heads["variance"].append(a[:, :past].var(0))
        heads["recent"].append(a[:, past:].sum(0))
        heads["last"].append(a[-1])
        entropy -= (a[:, :past] * log_a[:, :past]).sum()
    out = {name: torch.stack(rows) for name, rows in heads.items()}
    out |= {"entropy": entropy, "shift": out["variance"].sum()}
    if grouped:
        out |= {name: out[name].unflatten(0, (p.shape.kv_heads, -1)).mean(1) for name in PER_HEAD}
    return out


def value_truth(p: Problem, row: int, *, fast: bool, reduce: str) -> Outputs:
    values, tokens, group = p.values_of(row), p.tokens[row], p.shape.heads // p.shape.kv_heads
    out = []
    for kv_head, v in enumerate(values):
        changes = []
        for h in p.weights[row, kv_head * group : (kv_head + 1) * group, :tokens].double():
            o = v.mean(0) if fast else h @ v
            distance = torch.linalg.vector_norm(o - v, dim=-1)
            changes.append(h / (1 - h).clamp_min(1e-6) * distance)
        all_of = torch.stack(changes)
        out.append(all_of.mean(0) if reduce == "mean" else torch.linalg.vector_norm(all_of, dim=0))
    return {"scores": torch.stack(out)}


def column_query(p: Problem, row: int) -> torch.Tensor:
    start = sum(p.chunks[:row])
    return p.chunk_query[start : start + p.chunks[row]]


def column_truth(p: Problem, row: int) -> Outputs:
    keys, query, group = p.keys_of(row), column_query(p, row), p.shape.heads // p.shape.kv_heads
    key = torch.arange(p.tokens[row], device=p.device)
    future = key > key[-len(query) :, None]
    sums = []
    for head in range(p.shape.heads):
        logits = p.scale * query[:, head].double() @ keys[head // group].T
        sums.append(logits.masked_fill_(future, -torch.inf).softmax(-1).sum(0))
    return {"sums": torch.stack(sums)}


def compact_truth(p: Problem, row: int) -> Outputs:
    kept, block = p.kept_of(row), p.shape.block
    at = kept[..., None].expand(-1, -1, p.shape.dim)
    keys, values = (x.gather(1, at) for x in (p.keys_of(row), p.values_of(row)))
    paged = [x.unflatten(1, (-1, block)).transpose(0, 1) for x in (keys, values)]
    return {"keys": paged[0].transpose(2, 3), "values": paged[1]}


def merge_truth(p: Problem, row: int, *, near: float = 1e-5) -> Outputs:
    """Kept tokens that gain or lose one whose cosine is within `near` of a decision are ignored."""
    kept = p.kept_of(row)
    made: dict[str, list[torch.Tensor]] = {"keys": [], "values": []}
    for head, (k, v) in enumerate(zip(p.keys_of(row), p.values_of(row), strict=True)):
        out = torch.ones(len(k), dtype=torch.bool, device=p.device)
        out[kept[head]] = False
        unit = k / torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_min(1e-12)
        cosines = unit[out] @ unit[kept[head]].T
        top, into = cosines.topk(min(2, cosines.shape[1]), dim=1)
        u, nearest = top[:, 0], into[:, 0]
        merged = u >= u.mean()
        unsure = (u - u.mean()).abs() < near
        if top.shape[1] > 1:
            unsure |= merged & (u - top[:, 1] < near)
        weight = (u.exp() * merged)[:, None]
        total = weight.new_zeros(kept.shape[1], 1).index_add_(0, nearest, weight)
        for name, x in (("keys", k), ("values", v)):
            mean = math.e * x[kept[head]]
            mean.index_add_(0, nearest, weight * x[out])
            mean /= math.e + total
            mean[into[unsure].flatten()] = IGNORED
            made[name].append(mean)
    return {name: torch.stack(rows) for name, rows in made.items()}


def select_truth(p: Problem, row: int) -> Outputs:
    columns, keep = int(p.columns[row]), int(p.keep[row])
    order = p.scores[row, :columns].double().sort(descending=True, stable=True).indices
    return {"positions": order[:keep].sort().values}


def chunks_truth(p: Problem, row: int) -> Outputs:
    heads, tokens = p.shape.kv_heads, p.tokens[row]
    token = p.scores[row * heads : (row + 1) * heads, :tokens].double().sum(0)
    parts = torch.arange(tokens, device=p.device).split(CHUNK)
    means = torch.stack([token[part].mean() for part in parts])
    order = means.sort(descending=True, stable=True).indices.tolist()
    kept = torch.cat([parts[i] for i in order])[: p.shape.pages_of(tokens) * p.shape.block]
    return {"positions": kept.sort().values}


def tables_truth(p: Problem, row: int) -> Outputs:
    """Columns within a layer's length; what lies beyond is ignored."""
    t = p.tables
    blocks, first = t.block_table[row].double(), int(t.first_block[row])
    lengths, tables = [], []
    for layer in range(p.shape.layers):
        count = int(t.num_packed[row, layer])
        ordinary = int(t.layer_offset[layer]) + t.block_stride * blocks[first:]
        table = torch.cat([t.packed[row, layer, :count].double(), ordinary])
        length = int(t.seq_lens[row]) + (count - first) * t.block_size
        line = torch.full_like(blocks, IGNORED)
        used = -(-length // t.block_size)
        line[:used] = table[:used]
        tables.append(line)
        lengths.append(length)
    return {"tables": torch.stack(tables), "lengths": torch.tensor(lengths, device=p.device)}
