"""Numba code of `window_scores` on a CPU.

A task is one KV head of one row and a few chunks of 64 columns. The first pass multiplies queries
and keys, and replaces each line's logits in a chunk by weights relative to a power of 2 near their
maximum. The last task of a KV head computes the lines' factors. The second pass reduces the weights
over the window.
"""

import functools
import math
from typing import Any

import numpy as np

from kvcompress_kernels.compiling_numba import (
    FAST_MATH,
    as_pointer,
    c_function,
    cached,
    carray,
    cfunc,
    cgutils,
    compiled,
    fetch_add,
    intrinsic,
    ir,
    njit,
    types,
)
from kvcompress_kernels.elements_numba import (
    LANES,
    LEAST_EXPONENT,
    LOWEST,
    ONE,
    address_of,
    as_float,
    exp2,
    multiply_add,
    power_of_fraction,
    power_of_two,
    read_run,
    run_step,
    vector_at,
)

# Equal columns must have equal results in every chunk, so that their ties go to the lower position.
# So all loops over columns have 64 iterations, and chunks differ only by powers of 2, whose
# products are exact. Attention below 2 ** -124 counts as 0, because smaller products may round.

PRODUCT_LINES = 6
"""Lines that are multiplied at once: their products with 16 keys stay in registers."""
_TILE = 4
"""Chunks of a task."""
_LEAST_ATTENTION = np.float32(2.0**-124)
_LOWEST_TOP = np.float32(-1e29)

NUMBERS = (
    "step", "reader", "call", "kv_heads", "group", "window", "dim", "tokens", "block", "page_step",
    "head_step", "pooled", "grouped", "has_variance", "has_last", "has_maximum", "total_step",
    "all_step",
)  # fmt: skip
ARRAYS = (
    "query", "elements", "table", "pages", "key_tokens", "key_dims", "sinks", "counter", "arrivals",
    "weights", "factors", "sums", "pooling", "entropy", "shifts", "total", "variance", "recent",
    "last", "maximum", "totals",
)  # fmt: skip


@intrinsic
def _multiply_lines(typing_context, query, at, panel, keys, dim, scores, place):
    """Write the products of `PRODUCT_LINES` lines with 16 keys to the scores.

    Args:
        query: ``[D, PRODUCT_LINES]`` from element `at` on.
        panel: ``[D, 16]`` from element `keys` on.
        dim: D.
        scores: ``[lines, 64]``: the first score is element `place`.
    """

    def code(context, builder, signature, args):
        query, panel, scores = (address_of(context, builder, signature, args, i) for i in (0, 2, 5))
        index, float32 = ir.IntType(64), ir.FloatType()
        vector = ir.VectorType(float32, LANES)
        totals = [cgutils.alloca_once(builder, vector) for _ in range(PRODUCT_LINES)]
        for total in totals:
            builder.store(ir.Constant(vector, None), total)
        with cgutils.for_range(builder, args[4]) as loop:
            row = builder.mul(loop.index, ir.Constant(index, LANES))
            key = vector_at(builder, panel, builder.add(args[3], row), float32, LANES)
            key = builder.load(key, align=4)
            first = builder.mul(loop.index, ir.Constant(index, PRODUCT_LINES))
            first = builder.add(args[1], first)
            for i, total in enumerate(totals):
                value = builder.add(first, ir.Constant(index, i))
                multiply_add(builder, total, builder.load(builder.gep(query, [value])), key)
        for i, total in enumerate(totals):
            line = builder.add(args[6], ir.Constant(index, 64 * i))
            to = vector_at(builder, scores, line, float32, LANES)
            builder.store(builder.load(total), to, align=4)
        return context.get_dummy_value()

    offsets = types.intp, panel, types.intp, types.intp, scores, types.intp
    return types.void(query, *offsets), code


@functools.cache
def key_reader(cache: Any) -> Any:
    """Return the C function that reads 64 keys of a KV head, for an element type.

    Its arguments are the address of those of `score_worker`, the KV head, the chunk, and the
    address of a panel ``[4, D, 16]`` of float32, which it writes.
    """
    numbers, count = len(NUMBERS), len(NUMBERS) + len(ARRAYS)

    def work(call, head, chunk, to):
        n = carray(call, (count,), np.int64)
        p, dim, tokens, block = n[numbers:], n[6], n[7], n[8]
        elements = carray(as_pointer(p[1]), (1,), cache)
        table = carray(as_pointer(p[2]), (256,), np.float32)
        pages = carray(as_pointer(p[3]), (1,), np.int64)
        key_tokens = carray(as_pointer(p[4]), (block,), np.int64)
        key_dims = carray(as_pointer(p[5]), (dim,), np.int64)
        panel, step = carray(to, (4 * dim, 16), np.float32), run_step(key_tokens)
        for first in range(0, min(64, tokens - 64 * chunk), 16):
            row = first // 16 * dim
            for t in range(min(16, tokens - 64 * chunk - first)):
                token = 64 * chunk + first + t
                at = pages[token // block] * n[9] + head * n[10] + key_tokens[token % block]
                if step == 1 or step == 2:
                    for d in range(dim):
                        read_run(elements, at + key_dims[d], step, table, panel[row + d], 0)
                    break
                for d in range(dim):
                    panel[row + d, t] = as_float(elements[np.uintp(at + key_dims[d])], table)

    signature = types.void(types.voidptr, types.int64, types.int64, types.voidptr)
    return cached(cfunc, signature)(work)


@intrinsic
def _read_keys_with(typing_context, reader, call, head, chunk, panel):
    """Call the function at the address `reader`, which is a `key_reader`."""

    def code(context, builder, signature, args):
        index, pointer = ir.IntType(64), cgutils.voidptr_t
        function = ir.FunctionType(ir.VoidType(), [pointer, index, index, pointer]).as_pointer()
        to = builder.bitcast(address_of(context, builder, signature, args, 4), pointer)
        given = builder.inttoptr(args[1], pointer), args[2], args[3], to
        builder.call(builder.inttoptr(args[0], function), given)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, panel), code


@intrinsic
def _highest(typing_context, scores, at):
    """Return the maximum of 64 scores from element `at` on. NaN is ignored."""

    def code(context, builder, signature, args):
        scores = address_of(context, builder, signature, args, 0)

        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        highest = None
        for first in range(0, 64, LANES):
            at = builder.add(args[1], ir.Constant(ir.IntType(64), first))
            part = vector_at(builder, scores, at, ir.FloatType(), LANES)
            part = builder.load(part, align=4)
            highest = part if highest is None else larger(part, highest)
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            halves = (
                ir.Constant(ir.VectorType(ir.IntType(32), lanes), [*range(start, start + lanes)])
                for start in (0, lanes)
            )
            low, high = (builder.shuffle_vector(highest, highest, half) for half in halves)
            highest = larger(low, high)
        return builder.extract_element(highest, ir.Constant(ir.IntType(32), 0))

    return types.float32(scores, types.intp), code


@compiled
def _weigh_lines(scores, lines, is_past, tops, sums):
    """Replace the logits of all lines in a chunk, which are exponents of 2, by weights.

    A weight is 2 to the logit less the line's top, which is a whole number near the maximum.

    Args:
        scores: ``[lines, 64]``.
        is_past: ``[64]``: 1 for columns before the window, and 0 for its own columns.
        tops: ``[lines]``, written.
        sums: ``[3, lines]``, written: the sum of all weights, that of the past, and the sum of the
            past's weights times their logits less the top.
    """
    for m in range(lines):
        row = scores[m]
        top = max(np.rint(_highest(scores, 64 * m)), _LOWEST_TOP)
        total, before, product = np.float32(0), np.float32(0), np.float32(0)
        for t in range(64):
            logit = row[t]
            whole = np.rint(logit)
            # 2 ** -127 is computed as 0.
            scale = power_of_two(max(np.float32(whole - top), LEAST_EXPONENT - ONE))
            weight = np.float32(power_of_fraction(np.float32(logit - whole)) * scale)
            row[t] = weight
            total += weight
            older = np.float32(weight * is_past[t])
            before += older
            product += np.float32(older * np.float32(logit - top))
        tops[m] = top
        sums[0, m], sums[1, m], sums[2, m] = total, before, product


@compiled
def _set_factors(
    first, chunks, lines, past, head, group, window, pooled, sinks, weights, factors, sums,
    totals, pooling, entropy,
):  # fmt: skip
    """Replace the tops of a KV head's lines by factors: weights times these, over the line's total.

    Also write the totals, the head's entropy, and with `pooled` the factors of its pooled lines.
    """
    top, total, mass = np.empty((3, lines), np.float32)
    for m in range(lines):
        top[m] = max(LOWEST, np.rint(sinks[head * group + m // window]))
    for c in range(first, first + chunks):
        for m in range(lines):
            top[m] = max(top[m], factors[c, m])
    for m in range(lines):
        total[m] = exp2(np.float32(sinks[head * group + m // window] - top[m]))
        mass[m] = np.float32(0)
    for c in range(first, first + chunks):
        for m in range(lines):
            total[m] += sums[c, 0, m] * exp2(np.float32(factors[c, m] - top[m]))
    result = np.float64(0)
    for c in range(first, first + chunks):
        bits = np.float32(0)
        for m in range(lines):
            distance = np.float32(factors[c, m] - top[m])
            factor = exp2(distance)
            before = np.float32(sums[c, 1, m] * factor / total[m])
            mass[m] += before
            bits += sums[c, 2, m] * factor / total[m] + before * max(distance, LEAST_EXPONENT)
            factors[c, m] = factor
        result -= np.float64(bits)
    for m in range(lines):
        totals[head, m] = total[m]
        result += np.float64(mass[m]) * math.log2(np.float64(total[m]))
    entropy[head] = result * math.log(2.0)
    if pooled and past > 0:
        # Each column counts five times in the sum of a pooled line, columns next to an end less.
        for m in range(lines):
            lost = np.float32(0)
            for j in range(min(past, 2)):
                left, right = first + j // 64, first + (past - 1 - j) // 64
                a = _attention(weights[left, m, j % 64], factors[left, m], total[m])
                b = _attention(weights[right, m, (past - 1 - j) % 64], factors[right, m], total[m])
                lost += np.float32(2 - j) * (a + b)
            pooling[head, m] = mass[m] / max(np.float32(5) * mass[m] - lost, _LEAST_ATTENTION)


@cached(
    njit,
    fastmath=FAST_MATH - {"arcp", "afn"},
    error_model="numpy",
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
)
def _attention(weight, factor, total):
    # With a product by the inverse, a query that attends to one token might not give it 1.
    quotient = np.float32(np.float32(weight * factor) / total)
    return np.float32(0) if quotient < _LEAST_ATTENTION else quotient


@compiled
def _read_attention(weights, factors, totals, first, window, rows, columns):
    """Write the attention of a query head's lines in a chunk to `rows`; add it to `columns`."""
    for i in range(window):
        factor, line, row = factors[first + i], weights[first + i], rows[i]
        total = totals[first + i]
        for t in range(64):
            a = _attention(line[t], factor, total)
            row[t] = a
            columns[t] += a


@compiled
def _pool(
    weights, factors, totals, pooling, rows, at, start, past, first, window, padded, maximum
):  # fmt: skip
    """Raise `maximum` to the pooled attention of a query head's lines in chunk `at`.

    Args:
        rows: attention of the lines in the chunk.
        start: first column of the chunk.
        first: first line of the query head.
        padded: memory for 68 columns.
    """
    for i in range(window):
        m = first + i
        for t in range(2):
            padded[t], padded[66 + t] = np.float32(0), np.float32(0)
            if start > 0:
                padded[t] = _attention(weights[at - 1, m, 62 + t], factors[at - 1, m], totals[m])
            if start + 64 + t < past:
                padded[66 + t] = _attention(weights[at + 1, m, t], factors[at + 1, m], totals[m])
        for t in range(64):
            padded[2 + t] = rows[i, t] if start + t < past else np.float32(0)
        factor = pooling[m]
        for t in range(64):
            outer = (padded[t] + padded[t + 1]) + (padded[t + 3] + padded[t + 4])
            maximum[t] = max(maximum[t], (outer + padded[t + 2]) * factor)


@compiled
def _weigh(n, query, sinks, counter, arrivals, weights, factors, sums, totals, pooling, entropy):
    """Multiply queries and keys, and weigh the logits, until no task is left."""
    kv_heads, group, window, dim, tokens = n[3], n[4], n[5], n[6], n[7]
    chunks, lines, past = (tokens + 63) // 64, group * window, tokens - window
    blocks = (lines + PRODUCT_LINES - 1) // PRODUCT_LINES
    tiles = (chunks + _TILE - 1) // _TILE
    panel, is_past = np.empty((4 * dim, 16), np.float32), np.ones(64, np.float32)
    task = fetch_add(counter, 0, 1)
    while task < kv_heads * tiles:
        head, tile = task // tiles, task % tiles
        for c in range(_TILE * tile, min(_TILE * tile + _TILE, chunks)):
            first, at = 64 * c, head * chunks + c
            _read_keys_with(n[1], n[2], head, c, panel)
            scores = weights[at]
            for part in range(4):
                for b in range(blocks):
                    _multiply_lines(
                        query, (head * blocks + b) * dim * PRODUCT_LINES, panel, part * dim * 16,
                        dim, scores, b * PRODUCT_LINES * 64 + 16 * part,
                    )  # fmt: skip
            for t in range(64):
                is_past[t] = np.float32(first + t < past)
            if first + 64 > past:
                for m in range(lines):
                    # The query attends to no later column.
                    for t in range(max(past + m % window + 1 - first, 0), 64):
                        scores[m, t] = LOWEST
            _weigh_lines(scores, lines, is_past, factors[at], sums[at])
        if fetch_add(arrivals, head, 1) == tiles - 1:
            arrivals[head] = 0
            _set_factors(
                head * chunks, chunks, lines, past, head, group, window, n[11], sinks, weights,
                factors, sums, totals, pooling, entropy,
            )  # fmt: skip
        task = fetch_add(counter, 0, 1)


@compiled
def _store(target, place, columns, first, stop):
    """Copy columns from `first` to `stop` to the elements from `place` on."""
    for t in range(first, stop):
        target[np.uintp(place + t)] = columns[t]


@compiled
def _clear(columns):
    for t in range(64):
        columns[t] = np.float32(0)


@compiled
def _reduce(
    n, counter, weights, factors, totals, pooling, shifts, total, variance, recent, last, maximum
):  # fmt: skip
    """Reduce the attention over the window's queries until no task is left."""
    kv_heads, group, window, tokens, pooled, grouped = n[3], n[4], n[5], n[7], n[11], n[12]
    has_variance, has_last, has_maximum, total_step, all_step = n[13], n[14], n[15], n[16], n[17]
    chunks, past = (tokens + 63) // 64, tokens - window
    tiles = (chunks + _TILE - 1) // _TILE
    share = np.float32(ONE / np.float32(group)) if grouped else ONE
    mean_share = np.float32(ONE / np.float32(window))
    square_share = np.float32(ONE / np.float32(max(window - 1, 1)))
    rows, padded = np.empty((window, 64), np.float32), np.empty(68, np.float32)
    columns, squares = np.empty((2, 64), np.float32)
    statistics = np.empty((5, 64), np.float32)
    line_sums, deviations, latest, highest, pools = statistics
    task = fetch_add(counter, 0, 1)
    while task < kv_heads * tiles:
        head, tile = task // tiles, task % tiles
        for c in range(_TILE * tile, min(_TILE * tile + _TILE, chunks)):
            start, at = 64 * c, head * chunks + c
            older, count = min(max(past - start, 0), 64), min(64, tokens - start)
            shift = np.float64(0)
            for g in range(group):
                if g == 0 or not grouped:
                    for row in statistics:
                        _clear(row)
                _clear(columns)
                _clear(squares)
                _read_attention(
                    weights[at], factors[at], totals[head], g * window, window, rows, columns
                )
                if has_variance or has_maximum:
                    for i in range(window):
                        for t in range(64):
                            a = rows[i, t]
                            difference = np.float32(a - columns[t] * mean_share)
                            squares[t] += difference * difference
                            highest[t] = max(highest[t], a)
                for t in range(64):
                    variances = np.float32(squares[t] * square_share)
                    squares[t] = variances
                    deviations[t] += np.float32(variances * share)
                    line_sums[t] += np.float32(columns[t] * share)
                    latest[t] += np.float32(rows[window - 1, t] * share)
                if has_variance:
                    for t in range(older):
                        shift += np.float64(squares[t])
                if pooled and older:
                    _pool(
                        weights, factors, totals[head], pooling[head], rows, at, start, past,
                        g * window, window, padded, pools,
                    )  # fmt: skip
                if grouped and g < group - 1:
                    continue
                line = head if grouped else head * group + g
                place = line * total_step + start
                _store(total, place, line_sums, 0, older)
                _store(recent, line * window + start - past, line_sums, older, count)
                if has_variance:
                    _store(variance, place, deviations, 0, older)
                place = line * all_step + start
                if has_last:
                    _store(last, place, latest, 0, count)
                if has_maximum:
                    _store(maximum, place, highest, older if pooled else 0, count)
                    _store(maximum, place, pools, 0, older if pooled else 0)
            shifts[at] = shift
        task = fetch_add(counter, 0, 1)


@functools.cache
def score_worker() -> Any:
    """Return the C function that each thread runs, once for each of the two steps of a row."""
    numbers, count = len(NUMBERS), len(NUMBERS) + len(ARRAYS)

    def work(call):
        n = carray(call, (count,), np.int64)
        p = n[numbers:]
        kv_heads, lines, chunks = n[3], n[4] * n[5], (n[7] + 63) // 64
        padded = (lines + PRODUCT_LINES - 1) // PRODUCT_LINES * PRODUCT_LINES
        total = kv_heads * chunks
        weights = carray(as_pointer(p[9]), (total, padded, 64), np.float32)
        factors = carray(as_pointer(p[10]), (total, lines), np.float32)
        pooling = carray(as_pointer(p[12]), (kv_heads, lines), np.float32)
        totals = carray(as_pointer(p[20]), (kv_heads, lines), np.float32)
        counter = carray(as_pointer(p[7]), (1,), np.int64)
        if n[0] == 0:
            _weigh(
                n,
                carray(as_pointer(p[0]), (1,), np.float32),
                carray(as_pointer(p[6]), (1,), np.float32),
                counter,
                carray(as_pointer(p[8]), (kv_heads,), np.int64),
                weights,
                factors,
                carray(as_pointer(p[11]), (total, 3, lines), np.float32),
                totals,
                pooling,
                carray(as_pointer(p[13]), (kv_heads,), np.float64),
            )
        else:
            _reduce(
                n, counter, weights, factors, totals, pooling,
                carray(as_pointer(p[14]), (total,), np.float64),
                carray(as_pointer(p[15]), (1,), np.float32),
                carray(as_pointer(p[16]), (1,), np.float32),
                carray(as_pointer(p[17]), (1,), np.float32),
                carray(as_pointer(p[18]), (1,), np.float32),
                carray(as_pointer(p[19]), (1,), np.float32),
            )  # fmt: skip

    return c_function(work)
