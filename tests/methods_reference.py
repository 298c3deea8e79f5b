"""docs/methods.md in float64 by loops over numpy arrays: slow, obvious, no code of the package.

One function per section. Shapes: q ``[Hq, S, d]``, k and v ``[Hkv, S, d]`` of one layer.
"""

import math

import numpy as np

# -- attention ---------------------------------------------------------------------------------


class Queries(np.ndarray):
    """Queries ``[Hq, S, D]`` of a layer whose heads have sinks, ``[Hq]`` logits."""

    sinks: np.ndarray | None = None

    def __array_finalize__(self, source):
        self.sinks = getattr(source, "sinks", None)


def with_sinks(q, sinks):
    """The same queries, of a layer with these sinks; None for none."""
    own = np.asarray(q).view(Queries)
    own.sinks = sinks
    return own


def softmax(s, sink=None):
    """Of a row of logits; a sink is one more, which gets its share and stands in no column."""
    top = s.max() if sink is None else max(s.max(), sink)
    e = np.exp(s - top)
    return e / (e.sum() + (0 if sink is None else math.exp(sink - top)))


def attention(q, k, rows):
    """``[Hq, len(rows), S]``: causal softmax of the given rows."""
    group, tokens, dim = len(q) // len(k), k.shape[1], k.shape[2]
    sinks, q = getattr(q, "sinks", None), np.asarray(q)
    a = np.zeros((len(q), len(rows), tokens))
    for h in range(len(q)):
        sink = None if sinks is None else sinks[h]
        for at, i in enumerate(rows):
            s = k[h // group, : i + 1] @ q[h, i] / math.sqrt(dim)
            a[h, at, : i + 1] = softmax(s, sink)
    return a


def column_sums(q, k):
    tokens = k.shape[1]
    return attention(q, k, range(tokens)).sum(1)


def column_means(q, k):
    """Of each column, over the rows that see it."""
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
    """``[rows, P]`` to ``[P]``: the maximum, pooled; or that of rows that were pooled before."""
    if aggregate == "max":
        return pool(a.max(0)[None], kind, kernel)[0]
    highest = np.max([pooled_row(row) for row in a], axis=0)
    return np.maximum(highest, highest.mean())


def pooled_row(a):
    """One row averaged over five neighbours, scaled to the sum that it had."""
    p = pool(a[None], "avg", 5)[0]
    return p * a.sum() / p.sum() if a.any() else p


def cake(q, k, v, w, gamma=200.0, kernel=5):
    tokens = k.shape[1]
    a = attention(q, k, range(tokens - w, tokens))[..., : tokens - w]
    return over_group(pool(a.mean(1) + gamma * a.var(1, ddof=1), "avg", kernel), len(k))


def runs(q, k, v, w, latest=None, size=20, attention_paid=0.6):
    """CAKE's indicator by the `latest` queries, and runs by the others of the window's w."""
    tokens, past, latest = k.shape[1], k.shape[1] - w, w if latest is None else latest
    a = attention(q, k, range(tokens - latest, tokens))[..., :past]
    t = over_group(pool(a.mean(1) + 200 * a.var(1, ddof=1), "avg", 5), len(k))
    others = range(tokens - w, tokens - latest if latest < w else tokens)
    m = attention(q, k, others)[..., :past].max(1).reshape(len(k), -1, past).max(1)
    score = t.copy()
    for head in range(len(k)):
        for start in range(0, past, size):
            paid = m[head, start : start + size].sum()
            if paid >= attention_paid:
                score[head, start : start + size] = 201 * paid / attention_paid
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


def caote(q, k, v, w, base="snapkv", how="mean", fast=False, aggregate="mean", per_query=False):
    tokens, group = k.shape[1], len(q) // len(k)
    if base == "tova":
        h = attention(q, k, [tokens - 1])[:, 0]
    elif base == "h2o":
        h = column_means(q, k) if per_query else column_sums(q, k)
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
"""Presets that judge by a window, each of (q, k, v, w)."""
CHUNKS = {"chunkkv": 10, "cake-chunk": 20}
"""Tokens in a chunk of presets that choose chunks."""
BY_ANSWER = {"cake-chunk": runs}
"""Presets that choose otherwise once an answer judges, token by token; each of (q, k, v, w, m),
of whose w queries the last m are the answer's."""


def keydiff(q, k, v, w):
    scores = []
    for keys in k:
        unit = [key / max(np.linalg.norm(key), 1e-12) for key in keys]
        anchor = sum(unit) / len(unit)
        length = max(np.linalg.norm(anchor), 1e-12)
        scores.append([-(u @ anchor) / length for u in unit[: len(unit) - w]])
    return np.array(scores)


def lag_relative(x, start, lag):
    """A partition's shares of one head's keys or values ``[S, d]``, by the partition after it."""
    own, after = x[start : start + lag], x[start + lag : start + 2 * lag]
    low, high = after.min(0), after.max(0)
    scaled = np.zeros(own.shape)
    for channel in np.flatnonzero(high > low):
        scaled[:, channel] = (own[:, channel] - low[channel]) / (high - low)[channel]
    spread = scaled.std(1, ddof=1)
    e = np.exp(spread - spread.max())
    return e / e.sum()


def lag_scores(k, v, sinks, lag):
    """``[Hkv, parts, lag]``, not ranked."""
    starts = range(sinks, k.shape[1] - 2 * lag + 1, lag)
    every = [
        [(lag_relative(x, start, lag) + lag_relative(y, start, lag)) / 2 for start in starts]
        for x, y in zip(k, v, strict=True)
    ]
    return np.array(every).reshape(len(k), len(starts), lag)


def lagkv(q, k, v, w, sinks=4, lag=128):
    every = np.tile(np.arange(k.shape[1], dtype=float), (len(k), 1))
    every[:, :sinks] = np.inf
    for row, parts in zip(every, lag_scores(k, v, sinks, lag), strict=True):
        for part, scores in enumerate(parts):
            for place, i in enumerate(sorted(range(lag), key=lambda i: (-scores[i], i))):
                row[sinks + part * lag + i] = (lag - 1 - place) / lag
    return every[:, : k.shape[1] - w]


# -- allocators: past tokens per layer ------------------------------------------------------------


def apportion(weights, total, caps, floor=0):
    if sum(caps) <= total:
        return list(caps)
    n = [min(floor, cap) for cap in caps]
    room = [cap - have for cap, have in zip(caps, n, strict=True)]
    rest, x, frozen = total - sum(n), [0.0] * len(n), set()
    for active_weights in (weights, [1.0] * len(n)):
        while True:
            active = [i for i in range(len(n)) if i not in frozen and active_weights[i] > 0]
            left = rest - sum(x[i] for i in frozen)
            if not active or left <= 0:
                break
            level = left / sum(active_weights[i] for i in active)
            full = [i for i in active if level * active_weights[i] >= room[i]]
            for i in full:
                x[i] = room[i]
                frozen.add(i)
            if not full:
                for i in active:
                    x[i] = level * active_weights[i]
                    frozen.add(i)
    whole = [math.floor(value + 1e-9) for value in x]
    order = sorted(range(len(n)), key=lambda i: (-round(x[i] - whole[i], 9), i))
    while sum(whole) < rest:
        for i in order:
            if sum(whole) < rest and whole[i] < room[i]:
                whole[i] += 1
    return [have + more for have, more in zip(n, whole, strict=True)]


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
    """`scores`: per layer ``[Hkv, P]``."""
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
    """`scores`: per layer ``[Hkv, P]``, none below 0; +inf is kept whatever the rest is."""
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
    """`sums`: per layer ``[Hq, S]``; or the means."""
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
    """`t`: one row of token scores."""
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
    """One KV head: k and v ``[S, d]``, `kept` a sorted list."""
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
    for at, j in enumerate(kept):
        into = [e for e in range(len(evicted)) if near[e] == at and u[e] >= tau]
        if into:
            weight = np.exp(u[into])
            z = math.e + weight.sum()
            members = [evicted[e] for e in into]
            if not values_only:
                new_k[at] = (math.e * k[j] + weight @ k[members]) / z
            new_v[at] = (math.e * v[j] + weight @ v[members]) / z
    if threshold is not None:
        return new_k, new_v, tau
    return new_k, new_v
