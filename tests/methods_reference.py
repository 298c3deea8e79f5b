"""docs/methods.md in float64 loops over numpy arrays: slow, simple, without the package's code.

One function per section. Shapes: q ``[Hq, S, d]``, k and v ``[Hkv, S, d]`` of one layer.
"""

import math

import numpy as np

# -- attention ---------------------------------------------------------------------------------


class Queries(np.ndarray):
    """Queries ``[Hq, S, D]`` of a layer, with the ``[Hq]`` logits of its heads' attention sinks."""

    sinks: np.ndarray | None = None

    def __array_finalize__(self, source):
        self.sinks = getattr(source, "sinks", None)


def with_sinks(q, sinks):
    """Return the queries with these attention sinks; None for no sinks."""
    queries = np.asarray(q).view(Queries)
    queries.sinks = sinks
    return queries


def softmax(s, sink=None):
    """Return the softmax of rows of logits.

    A sink is one more logit, which takes its share of the sum but has no column.
    """
    top = s.max(-1, keepdims=True)
    top = top if sink is None else np.maximum(top, sink)
    e = np.exp(s - top)
    return e / (e.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - top)))


def attention(q, k, rows):
    """Return ``[Hq, len(rows), S]``, the causal attention of the given queries."""
    group, tokens, dim = len(q) // len(k), k.shape[1], k.shape[2]
    sinks, q = getattr(q, "sinks", None), np.asarray(q)
    a = np.zeros((len(q), len(rows), tokens))
    for h in range(len(q)):
        sink = None if sinks is None else sinks[h]
        for row, i in enumerate(rows):
            s = k[h // group, : i + 1] @ q[h, i] / math.sqrt(dim)
            a[h, row, : i + 1] = softmax(s, sink)
    return a


def column_sums(q, k):
    tokens = k.shape[1]
    return attention(q, k, range(tokens)).sum(1)


def column_means(q, k):
    """Return each column's mean over the queries that see it."""
    tokens = k.shape[1]
    a = attention(q, k, range(tokens))
    return np.stack([a[:, j:, j].mean(1) for j in range(tokens)], axis=1)


def pool(x, kind, kernel):
    half, out = kernel // 2, np.empty_like(x)
    for j in range(x.shape[-1]):
        near = x[..., max(j - half, 0) : j + half + 1]
        out[..., j] = near.sum(-1) / kernel if kind == "avg" else near.max(-1)
    return out


def over_group(x, kv_heads, how="mean"):
    grouped = x.reshape(kv_heads, -1, x.shape[-1])
    return grouped.mean(1) if how == "mean" else np.sqrt((grouped**2).sum(1))


# -- scorers: [Hkv, P] ---------------------------------------------------------------------------


def snapkv(q, k, v, w, kind="max", kernel=7, aggregate="mean", value_norm=False):
    tokens, group = k.shape[1], len(q) // len(k)
    a = attention(q, k, range(tokens - w, tokens))[..., : tokens - w]
    if aggregate == "mean":
        score = pool(over_group(a.sum(1), len(k)), kind, kernel)
    else:
        rows = a.reshape(len(k), group * w, tokens - w)
        score = np.stack([over_rows(x, aggregate, kind, kernel) for x in rows])
    if value_norm:
        norm = np.abs(v[:, : tokens - w]).sum(-1)
        score = score * norm / norm.sum(-1, keepdims=True)
    return score


def over_rows(a, aggregate, kind, kernel):
    """Return ``[P]`` from ``[rows, P]``: the pooled maximum, or the maximum of pooled rows."""
    if aggregate == "max":
        return pool(a.max(0)[None], kind, kernel)[0]
    highest = np.max([pooled_row(row) for row in a], axis=0)
    return np.maximum(highest, highest.mean())


def pooled_row(a):
    """Return one row averaged over five adjacent tokens, scaled to its original sum."""
    p = pool(a[None], "avg", 5)[0]
    return p * a.sum() / p.sum() if a.any() else p


def cake(q, k, v, w, gamma=200.0, kernel=5):
    tokens = k.shape[1]
    a = attention(q, k, range(tokens - w, tokens))[..., : tokens - w]
    return over_group(pool(a.mean(1) + gamma * a.var(1, ddof=1), "avg", kernel), len(k))


def runs(q, k, v, w, num_output=None, size=20, min_attention=0.6):
    """Return CAKE's indicator by the last `num_output` queries, with runs by the other queries."""
    tokens, past, num_output = k.shape[1], k.shape[1] - w, w if num_output is None else num_output
    a = attention(q, k, range(tokens - num_output, tokens))[..., :past]
    t = over_group(pool(a.mean(1) + 200 * a.var(1, ddof=1), "avg", 5), len(k))
    prompt_queries = range(tokens - w, tokens - num_output if num_output < w else tokens)
    m = attention(q, k, prompt_queries)[..., :past].max(1).reshape(len(k), -1, past).max(1)
    score = t.copy()
    for head in range(len(k)):
        for start in range(0, past, size):
            run_sum = m[head, start : start + size].sum()
            if run_sum >= min_attention:
                score[head, start : start + size] = 201 * run_sum / min_attention
    return score


def h2o(q, k, v, w, per_query=False):
    columns = column_means(q, k) if per_query else column_sums(q, k)
    return over_group(columns, len(k))[:, : k.shape[1] - w]


def tova(q, k, v, w):
    tokens = k.shape[1]
    row = attention(q, k, [tokens - 1])[:, 0].mean(0)[: tokens - w]
    return np.tile(row, (len(k), 1))


def streamingllm(q, k, v, w):
    row = np.arange(k.shape[1] - w, dtype=float)
    row[:4] = np.inf
    return np.tile(row, (len(k), 1))


def caote(q, k, v, w, base="snapkv", how="mean", fast=False, aggregate="mean"):
    tokens, group = k.shape[1], len(q) // len(k)
    if base == "tova":
        h = attention(q, k, [tokens - 1])[:, 0]
    elif base == "h2o":
        h = column_sums(q, k)
    elif aggregate == "mean":
        h = attention(q, k, range(tokens - w, tokens)).mean(1)
        h[:, : tokens - w] = pool(h[:, : tokens - w], "max", 7)
    else:
        a = attention(q, k, range(tokens - w, tokens))
        h = a.max(1)
        h[:, : tokens - w] = [over_rows(x, aggregate, "max", 7) for x in a[..., : tokens - w]]
    h = h / h.sum(-1, keepdims=True)
    c = np.zeros_like(h)
    for head in range(len(q)):
        values = v[head // group]
        o = values.mean(0) if fast else h[head] @ values
        for j in range(tokens):
            c[head, j] = h[head, j] / (1 - h[head, j]) * np.linalg.norm(o - values[j])
    return over_group(c, len(k), how)[:, : tokens - w]


WINDOW_SCORERS = {
    "snapkv": snapkv,
    "pyramidkv": snapkv,
    "tova": tova,
    "cake": cake,
    "streamingllm": streamingllm,
    "chunkkv": lambda *x: snapkv(*x, kernel=1),
    "cake-chunk": lambda *x: snapkv(*x, aggregate="max"),
    "caote": caote,
    "fastcaote": lambda *x: caote(*x, fast=True),
}
"""Presets that score by a window, each a function of (q, k, v, w)."""
CHUNKS = {"chunkkv": 10, "cake-chunk": 20}
"""Tokens in a chunk, of presets that choose chunks."""
OUTPUT_SCORERS = {"cake-chunk": runs}
"""Presets with another scorer when output tokens score, token by token.

Each is a function of (q, k, v, w, m), where the last m of the w queries are the output's.
"""


def keydiff(q, k, v, w):
    scores = []
    for keys in k:
        unit = [key / max(np.linalg.norm(key), 1e-12) for key in keys]
        anchor = sum(unit) / len(unit)
        length = max(np.linalg.norm(anchor), 1e-12)
        scores.append([-(u @ anchor) / length for u in unit[: len(unit) - w]])
    return np.array(scores)


def lag_relative(x, start, lag):
    """Return a partition's softmax shares of one head's ``[S, d]``, scaled by the next one."""
    part, next_part = x[start : start + lag], x[start + lag : start + 2 * lag]
    low, high = next_part.min(0), next_part.max(0)
    scaled = np.zeros(part.shape)
    for channel in np.flatnonzero(high > low):
        scaled[:, channel] = (part[:, channel] - low[channel]) / (high - low)[channel]
    spread = scaled.std(1, ddof=1)
    e = np.exp(spread - spread.max())
    return e / e.sum()


def lag_scores(k, v, sinks, lag):
    """Return ``[Hkv, parts, lag]`` scores, not ranked."""
    starts = range(sinks, k.shape[1] - 2 * lag + 1, lag)
    scores = [
        [(lag_relative(x, start, lag) + lag_relative(y, start, lag)) / 2 for start in starts]
        for x, y in zip(k, v, strict=True)
    ]
    return np.array(scores).reshape(len(k), len(starts), lag)


def lagkv(q, k, v, w, sinks=4, lag=128):
    scores = np.tile(np.arange(k.shape[1], dtype=float), (len(k), 1))
    scores[:, :sinks] = np.inf
    for row, parts in zip(scores, lag_scores(k, v, sinks, lag), strict=True):
        for part, part_scores in enumerate(parts):
            order = sorted(range(lag), key=lambda i: (-part_scores[i], i))
            for place, i in enumerate(order):
                row[sinks + part * lag + i] = (lag - 1 - place) / lag
    return scores[:, : k.shape[1] - w]


# -- allocators: past tokens per layer ------------------------------------------------------------


def apportion(weights, total, caps, floor=0):
    if sum(caps) <= total:
        return list(caps)
    n = [min(floor, cap) for cap in caps]
    free = [cap - have for cap, have in zip(caps, n, strict=True)]
    rest, x, frozen = total - sum(n), [0.0] * len(n), set()
    for active_weights in (weights, [1.0] * len(n)):
        while True:
            active = [i for i in range(len(n)) if i not in frozen and active_weights[i] > 0]
            left = rest - sum(x[i] for i in frozen)
            if not active or left <= 0:
                break
            level = left / sum(active_weights[i] for i in active)
            full = [i for i in active if level * active_weights[i] >= free[i]]
            for i in full:
                x[i] = free[i]
                frozen.add(i)
            if not full:
                for i in active:
                    x[i] = level * active_weights[i]
                    frozen.add(i)
    rounded = [math.floor(value + 1e-9) for value in x]
    order = sorted(range(len(n)), key=lambda i: (-round(x[i] - rounded[i], 9), i))
    while sum(rounded) < rest:
        for i in order:
            if sum(rounded) < rest and rounded[i] < free[i]:
                rounded[i] += 1
    return [have + more for have, more in zip(n, rounded, strict=True)]


def cake_stats(q, k, w):
    tokens = k.shape[1]
    a = attention(q, k, range(tokens - w, tokens))[..., : tokens - w]
    entropy = -sum(p * math.log(p) for p in a.ravel() if p > 0)
    return entropy, a.var(1, ddof=1).sum()


def cake_budgets(stats, base, past, tau1=1.0, tau2=1.0):
    weights = [h ** (1 / tau1) * s ** (1 / tau2) for h, s in stats]
    return apportion([x / max(weights) for x in weights], len(stats) * base, [past] * len(stats))


def pyramid_budgets(layers, base, past, beta=20):
    if layers == 1:
        return [base]
    lo, hi = base / beta, 2 * base - base / beta
    if hi > past:
        hi, lo = past, 2 * base - past
    x = [hi - i * (hi - lo) / (layers - 1) for i in range(layers)]
    return apportion(x, layers * base, [past] * layers)


def dynamickv_budgets(scores, base, past, r_max=10, every=4):
    """Return the layers' budgets from `scores`, per layer ``[Hkv, P]``."""
    layers, heads = len(scores), len(scores[0])
    limit, total, held = min(int(r_max * base), past), base * len(scores), []
    for n in range(1, layers + 1):
        held.append(limit)
        if n % every and n < layers:
            continue
        entries = [(-value, i) for i in range(n) for value in scores[i].ravel()]
        entries.sort()
        counts = [0] * n
        for _, i in entries[: base * heads * n]:
            counts[i] += 1
        if n < layers:
            share = apportion(counts, total, [limit] * n)
            held = [min(pair) for pair in zip(held, share, strict=True)]
        else:
            held = apportion(counts, total, held)
    return held


def global_budgets(scores, base, past):
    """Return the layers' budgets from `scores`, per layer ``[Hkv, P]``, >= 0 or +inf."""
    layers, heads, entries = len(scores), len(scores[0]), []
    for i, layer in enumerate(scores):
        values = [float(value) for value in layer.ravel()]
        total = math.fsum(value for value in values if math.isfinite(value))
        for value in values:
            value = -math.inf if math.isnan(value) else value
            entries.append((-value / total if total > 0 else -value, i))
    entries.sort()
    counts = [0] * layers
    for _, i in entries[: layers * base * heads]:
        counts[i] += 1
    return apportion(counts, layers * base, [past] * layers)


def d2o_budgets(sums, total, tokens, norm="layer_minmax", floor=8):
    """Return the layers' budgets from `sums`, per layer ``[Hq, S]`` column sums or means."""
    v = [c.var(-1, ddof=1) for c in sums]
    if norm == "head_minmax":
        v = [(x - x.min()) / (x.max() - x.min() + 1e-6) for x in v]
    f = np.array([x.mean() for x in v])
    if norm == "layer_minmax":
        f = (f - f.min()) / (f.max() - f.min() + 1e-6)
    weights = np.exp(-(f - f.min()))
    return apportion(list(weights / weights.sum()), total, [tokens] * len(sums), floor)


# -- selectors: a sorted list per KV head ----------------------------------------------------------


def best(row, keep):
    return sorted(sorted(range(len(row)), key=lambda j: (-row[j], j))[:keep])


def chunks(t, keep, size):
    """Return the kept positions in chunks, from one row `t` of token scores."""
    parts = [list(range(a, min(a + size, len(t)))) for a in range(0, len(t), size)]
    order = sorted(
        range(len(parts)), key=lambda i: (-math.fsum(t[j] for j in parts[i]) / len(parts[i]), i)
    )
    return sorted([j for i in order for j in parts[i]][:keep])


def split(n):
    sinks = min(4, n)
    recent = min(n - sinks, n // 4)
    return sinks, n - sinks - recent, recent


def heavy_recent(row, n):
    tokens = len(row)
    sinks, heavy, recent = split(n)
    middle = range(sinks, tokens - recent)
    chosen = sorted(middle, key=lambda j: (-row[j], j))[:heavy]
    return sorted([*range(sinks), *chosen, *range(tokens - recent, tokens)])


# -- D2O merge -------------------------------------------------------------------------------------


def merge(k, v, kept, values_only=False, threshold=None):
    """Return one KV head's merged keys and values.

    Args:
        k, v: ``[S, d]``.
        kept: sorted list of positions.
        threshold: the running mean of cosines before, to be returned updated; None without.
    """
    evicted = [i for i in range(len(k)) if i not in set(kept)]
    unit = k / np.maximum(np.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
    new_k, new_v = k[kept].copy(), v[kept].copy()
    if not evicted:
        return (new_k, new_v) if threshold is None else (new_k, new_v, threshold)
    cos = unit[evicted] @ unit[kept].T
    near, u = cos.argmax(1), cos.max(1)
    tau = u.mean()
    if threshold is not None and not math.isnan(threshold):
        tau = 0.7 * u.mean() + 0.3 * threshold
    for index, j in enumerate(kept):
        merged = [e for e in range(len(evicted)) if near[e] == index and u[e] >= tau]
        if merged:
            weight = np.exp(u[merged])
            z = math.e + weight.sum()
            members = [evicted[e] for e in merged]
            if not values_only:
                new_k[index] = (math.e * k[j] + weight @ k[members]) / z
            new_v[index] = (math.e * v[j] + weight @ v[members]) / z
    if threshold is not None:
        return new_k, new_v, tau
    return new_k, new_v
