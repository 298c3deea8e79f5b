"""Numba code of `packed_attention` on a CPU.

A task is one KV head of one row, a tile of its query tokens and a share of its tokens.
Tokens are read in chunks of 64: first the packed groups, then the ordinary tokens. All query heads
of the KV head and all query tokens of the tile are the lines of a small matrix product:

* the scores add 8 channels at a time, in a panel ``[8, 64]`` of float32 that stays in the L1 cache,
* the output adds 8 tokens at a time, in a panel ``[8, D]``.

A packed group fills its panels with codes. The key scales are folded into the query, and the value
scales into the probabilities, so no key or value is ever dequantised.

A long row is split into up to `SPLITS` tasks. The task that finishes last joins their partial
results. Splits depend only on the row's lengths, so neither the batch nor the number of threads
changes a result. `kvcompress_kernels.packed_attention.cpu` says which threads run it.
"""

import functools
from typing import Any

import numpy as np

from kvcompress_kernels.compiling_numba import (
    as_pointer,
    c_function,
    carray,
    cgutils,
    compiled,
    fetch_add,
    intrinsic,
    ir,
    types,
)
from kvcompress_kernels.elements_numba import (
    LANES,
    LOWEST,
    ONE,
    address_of,
    as_element,
    as_float,
    copy_rows,
    exp2,
    multiply_add,
    read_halves,
    read_run,
    repeated,
    run_step,
    vector_at,
)
from kvcompress_kernels.packed_attention.scratch import SPLITS

_FEW_LINES = 8
"""Most lines for which codes are unpacked again for every 4 lines instead of stored in a panel."""
_MIN_CHUNKS = 8
"""Least chunks of a split."""

# -- products -------------------------------------------------------------------------------------


@compiled
def _add_scores(scores, query, panel, channels, lines):
    """Add the products with 8 channels of 64 tokens to the scores ``[lines, 64]``."""
    c0, c1, c2, c3, c4, c5, c6, c7 = channels
    for m in range(lines):
        q = query[m]
        q0, q1, q2, q3 = q[c0], q[c1], q[c2], q[c3]
        q4, q5, q6, q7 = q[c4], q[c5], q[c6], q[c7]
        row = scores[m]
        for t in range(64):
            row[t] += (
                (q0 * panel[0, t] + q1 * panel[1, t]) + (q2 * panel[2, t] + q3 * panel[3, t])
            ) + ((q4 * panel[4, t] + q5 * panel[5, t]) + (q6 * panel[6, t] + q7 * panel[7, t]))


@compiled
def _add_values(sums, weights, panel, first, lines, eighths):
    """Add 8 tokens of the panel ``[8, D]``, from token `first`, to the sums ``[lines, D]``."""
    for m in range(lines):
        w = weights[m]
        w0, w1, w2, w3 = w[first], w[first + 1], w[first + 2], w[first + 3]
        w4, w5, w6, w7 = w[first + 4], w[first + 5], w[first + 6], w[first + 7]
        row = sums[m]
        for d in range(8 * len(eighths)):
            row[d] += (
                (w0 * panel[0, d] + w1 * panel[1, d]) + (w2 * panel[2, d] + w3 * panel[3, d])
            ) + ((w4 * panel[4, d] + w5 * panel[5, d]) + (w6 * panel[6, d] + w7 * panel[7, d]))


@compiled
def _softmax(scores, tops, totals, sums, line, limit, eighths):
    """Turn a line's 64 scores into weights, 0 from token `limit` on, and rescale its sums."""
    row = scores[line]
    top = tops[line]
    for t in range(64):
        top = max(top, row[t] if t < limit else LOWEST)
    total = np.float32(0)
    for t in range(64):
        weight = exp2(np.float32(row[t] - top))
        weight = weight if t < limit else np.float32(0)
        row[t] = weight
        total += weight
    if top > tops[line]:
        rise = exp2(np.float32(tops[line] - top))
        total += totals[line] * rise
        old = sums[line]
        for d in range(8 * len(eighths)):
            old[d] *= rise
        tops[line] = top
        totals[line] = total
    else:
        totals[line] += total


@intrinsic
def _add_packed_scores(typing_context, words, query, scores, first_line, eighths, block):
    """Add the products of a block of lines with 64 packed keys to their scores.

    Args:
        words: ``[D / 8, 64]`` uint32: key codes, transposed.
        query: ``[lines, D]``.
        scores: ``[lines, 64]``.
        first_line: first line of the block.
        eighths: D / 8 zeros.
        block: a zero for each line of the block.
    """
    dim, count, parts = 8 * len(eighths), len(block), 2

    def code(context, builder, signature, args):
        int32, float32, index = ir.IntType(32), ir.FloatType(), ir.IntType(64)
        words, query, scores = (address_of(context, builder, signature, args, i) for i in range(3))
        vector = ir.VectorType(float32, LANES)

        def number(x):
            return ir.Constant(index, x)

        lines = [builder.add(args[3], number(i)) for i in range(count)]
        query_lines = [builder.mul(line, number(dim)) for line in lines]
        totals = [
            [cgutils.alloca_once(builder, vector) for _ in range(parts)] for _ in range(count)
        ]
        with cgutils.for_range(builder, number(64 // LANES // parts)) as loop:
            first = builder.mul(loop.index, number(LANES * parts))
            firsts = [builder.add(first, number(LANES * part)) for part in range(parts)]
            places = [
                [
                    vector_at(
                        builder,
                        scores,
                        builder.add(builder.mul(line, number(64)), at),
                        float32,
                        LANES,
                    )
                    for at in firsts
                ]
                for line in lines
            ]
            for line in range(count):
                for part in range(parts):
                    value = builder.load(places[line][part], align=4)
                    builder.store(value, totals[line][part])
            with cgutils.for_range(builder, number(dim // 8)) as inner:
                row = builder.mul(inner.index, number(64))
                packed = [
                    builder.load(
                        vector_at(builder, words, builder.add(row, at), int32, LANES), align=4
                    )
                    for at in firsts
                ]
                low = builder.mul(inner.index, number(4))
                for i in range(8):
                    channel = builder.add(low, number(i // 2 + i % 2 * (dim // 2)))
                    for part in range(parts):
                        bits = builder.lshr(packed[part], repeated(4 * i, LANES))
                        bits = builder.and_(bits, repeated(15, LANES))
                        codes = builder.sitofp(bits, vector)
                        for line in range(count):
                            at = builder.add(query_lines[line], channel)
                            value = builder.load(builder.gep(query, [at]))
                            multiply_add(builder, totals[line][part], value, codes)
            for line in range(count):
                for part in range(parts):
                    builder.store(builder.load(totals[line][part]), places[line][part], align=4)
        return context.get_dummy_value()

    return types.void(words, query, scores, types.intp, eighths, block), code


def _value_codes(builder, content, low, high, channels, eighth):
    """Yield the value codes of a token's `channels` in each quarter, as vectors of float32.

    Args:
        low: byte of the low bits of the first channel.
        high: first byte of the token's high bits.
        channels: neighbours in the first quarter.
        eighth: an eighth of the channels.
    """
    byte, lanes = ir.IntType(8), len(channels)
    words = ir.VectorType(ir.IntType(32), lanes)
    low_bits = builder.load(vector_at(builder, content, low, byte, lanes), align=1)
    low_bits = builder.zext(low_bits, words)
    bits = builder.load(vector_at(builder, content, high, byte, eighth), align=1)
    source = ir.Constant(words, [channel % eighth for channel in channels])
    high_bits = builder.zext(builder.shuffle_vector(bits, bits, source), words)
    # The second half of a quarter has the next bit of the same byte. Bit 2 is the code's.
    shift = ir.Constant(words, [2 if channel < eighth else 1 for channel in channels])
    high_bits = builder.shl(high_bits, shift)
    for i in range(4):
        bits = builder.and_(builder.lshr(low_bits, repeated(2 * i, lanes)), repeated(3, lanes))
        top = builder.and_(builder.lshr(high_bits, repeated(2 * i, lanes)), repeated(4, lanes))
        yield builder.sitofp(builder.or_(bits, top), ir.VectorType(ir.FloatType(), lanes))


@intrinsic
def _add_packed_values(
    typing_context, content, low, high, weights, sums, first_line, tokens, eighths, block
):
    """Add the weighted value codes of a packed group to the sums of a block of lines.

    Args:
        content: bytes.
        low, high: bytes at which the group's bit planes start.
        weights: ``[lines, 64]``.
        sums: ``[lines, D]``.
        first_line: first line of the block.
        tokens: tokens of the group.
        eighths: D / 8 zeros.
        block: a zero for each line of the block.
    """
    eighth, count = len(eighths), len(block)
    quarter, dim = 2 * eighth, 8 * eighth

    def code(context, builder, signature, args):
        float32, index = ir.FloatType(), ir.IntType(64)
        content = address_of(context, builder, signature, args, 0)
        weights, sums = (address_of(context, builder, signature, args, i) for i in (3, 4))

        def number(x):
            return ir.Constant(index, x)

        lines = [builder.add(args[5], number(i)) for i in range(count)]
        weight_lines = [builder.mul(line, number(64)) for line in lines]
        sum_lines = [builder.mul(line, number(dim)) for line in lines]
        # The lanes are neighbours in a quarter of the channels.
        for first in range(0, quarter, LANES):
            lanes = min(LANES, quarter - first)
            channels = range(first, first + lanes)
            vector = ir.VectorType(float32, lanes)
            totals = [
                [cgutils.alloca_once(builder, vector) for _ in range(4)] for _ in range(count)
            ]
            places = [
                [
                    vector_at(builder, sums, builder.add(line, number(at)), float32, lanes)
                    for at in range(first, dim, quarter)
                ]
                for line in sum_lines
            ]
            for line in range(count):
                for i in range(4):
                    builder.store(builder.load(places[line][i], align=4), totals[line][i])
            with cgutils.for_range(builder, args[6]) as loop:
                token = loop.index
                low = builder.add(args[1], builder.mul(token, number(quarter)))
                low = builder.add(low, number(first))
                high = builder.add(args[2], builder.mul(token, number(eighth)))
                values = [
                    builder.load(builder.gep(weights, [builder.add(line, token)]))
                    for line in weight_lines
                ]
                all_codes = _value_codes(builder, content, low, high, channels, eighth)
                for i, codes in enumerate(all_codes):
                    for line in range(count):
                        multiply_add(builder, totals[line][i], values[line], codes)
            for line in range(count):
                for i in range(4):
                    builder.store(builder.load(totals[line][i]), places[line][i], align=4)
        return context.get_dummy_value()

    arrays = content, types.intp, types.intp, weights, sums
    return types.void(*arrays, types.intp, types.intp, eighths, block), code


# -- packed groups --------------------------------------------------------------------------------


@compiled
def _group_scores(content, at, query, scaled, scales, minima, scores, words, panel, lines, eighths):
    """Write the scores of the packed group at byte `at`."""
    dim = 8 * len(eighths)
    read_halves(content, at + 56 * dim, scales, eighths)
    read_halves(content, at + 58 * dim, minima, eighths)
    for m in range(lines):
        base = np.float32(0)
        for d in range(dim):
            scaled[m, d] = query[m, d] * scales[d]
            base += query[m, d] * minima[d]
        scores[m, :] = base
    # Transpose in words of 4 bytes, so that 64 tokens lie side by side.
    for t in range(64):
        for w in range(len(eighths)):
            byte = at + t * (dim // 2) + 4 * w
            words[w, t] = (
                np.uint32(content[np.uintp(byte)])
                | (np.uint32(content[np.uintp(byte + 1)]) << np.uint32(8))
                | (np.uint32(content[np.uintp(byte + 2)]) << np.uint32(16))
                | (np.uint32(content[np.uintp(byte + 3)]) << np.uint32(24))
            )
    if lines <= _FEW_LINES:
        # The scores of up to 4 lines stay in registers.
        m = 0
        while m + 4 <= lines:
            _add_packed_scores(words, scaled, scores, m, eighths, (0, 0, 0, 0))
            m += 4
        if m + 3 == lines:
            _add_packed_scores(words, scaled, scores, m, eighths, (0, 0, 0))
        elif m + 2 == lines:
            _add_packed_scores(words, scaled, scores, m, eighths, (0, 0))
        elif m + 1 == lines:
            _add_packed_scores(words, scaled, scores, m, eighths, (0,))
        return
    for w in range(len(eighths)):
        for i in range(8):
            for t in range(64):
                code = (words[w, t] >> np.uint32(4 * i)) & np.uint32(15)
                panel[i, t] = np.float32(np.int32(code))
        c, h = 4 * w, 4 * w + dim // 2
        channels = c, h, c + 1, h + 1, c + 2, h + 2, c + 3, h + 3
        _add_scores(scores, scaled, panel, channels, lines)


@intrinsic
def _decode_values(typing_context, content, low, high, row, eighths):
    """Write the D value codes of a token to `row` as float32.

    Its low bits are at byte `low` and its high bits at byte `high`. The quarters of the channels
    are the lanes of one vector, which LLVM does not find by itself.
    """
    eighth = len(eighths)
    quarter = 2 * eighth

    def code(context, builder, signature, args):
        content, row = (address_of(context, builder, signature, args, i) for i in (0, 3))
        all_codes = _value_codes(builder, content, args[1], args[2], range(quarter), eighth)
        for i, codes in enumerate(all_codes):
            at = ir.Constant(ir.IntType(64), i * quarter)
            place = vector_at(builder, row, at, ir.FloatType(), quarter)
            builder.store(codes, place, align=4)
        return context.get_dummy_value()

    return types.void(content, types.intp, types.intp, row, eighths), code


@compiled
def _group_values(content, at, weights, sums, scales, minima, panel, tokens, lines, eighths):
    """Add the values of the packed group at byte `at`."""
    dim = 8 * len(eighths)
    read_halves(content, at + 60 * dim, scales, (0, 0, 0, 0, 0, 0, 0, 0))
    read_halves(content, at + 60 * dim + 128, minima, (0, 0, 0, 0, 0, 0, 0, 0))
    for t in range(tokens, 64):  # bytes after the last token may hold NaN
        scales[t] = np.float32(0)
        minima[t] = np.float32(0)
    for m in range(lines):
        base = np.float32(0)
        for t in range(64):
            base += weights[m, t] * minima[t]
            weights[m, t] *= scales[t]
        for d in range(dim):
            sums[m, d] += base
    low, high = at + 32 * dim, at + 48 * dim
    if lines <= _FEW_LINES:
        m = 0
        while m + 4 <= lines:
            _add_packed_values(content, low, high, weights, sums, m, tokens, eighths, (0, 0, 0, 0))
            m += 4
        if m + 3 == lines:
            _add_packed_values(content, low, high, weights, sums, m, tokens, eighths, (0, 0, 0))
        elif m + 2 == lines:
            _add_packed_values(content, low, high, weights, sums, m, tokens, eighths, (0, 0))
        elif m + 1 == lines:
            _add_packed_values(content, low, high, weights, sums, m, tokens, eighths, (0,))
        return
    for first in range(0, tokens, 8):
        for t in range(8):
            low = at + 32 * dim + (first + t) * (dim // 4)
            high = at + 48 * dim + (first + t) * (dim // 8)
            _decode_values(content, low, high, panel[t], eighths)
        _add_values(sums, weights, panel, first, lines, eighths)


# -- ordinary pages -------------------------------------------------------------------------------


@compiled
def _ordinary_scores(
    elements, table, starts, dims, step, tokens, query, scores, panel, lines, eighths
):
    """Write the scores of up to 64 ordinary tokens, whose elements 0 are at `starts`."""
    for m in range(lines):
        scores[m, :] = np.float32(0)
    for c in range(0, 8 * len(eighths), 8):
        for j in range(8):
            dim, row = dims[c + j], panel[j]
            if step == 1 or step == 2:
                for first in range(0, tokens, 16):
                    read_run(elements, starts[first] + dim, step, table, row, first)
            else:
                for t in range(tokens):
                    row[t] = as_float(elements[np.uintp(starts[t] + dim)], table)
        channels = c, c + 1, c + 2, c + 3, c + 4, c + 5, c + 6, c + 7
        _add_scores(scores, query, panel, channels, lines)


@compiled
def _ordinary_values(
    elements, table, starts, dims, step, tokens, weights, sums, panel, lines, eighths
):
    """Add the values of up to 64 ordinary tokens."""
    for first in range(0, tokens, 8):
        for t in range(8):
            row = panel[t]
            if first + t >= tokens:
                row[:] = np.float32(0)
                continue
            start = starts[first + t]
            if step == 1 or step == 2:
                for c in range(0, 8 * len(eighths), 16):
                    read_run(elements, start + dims[c], step, table, row, c)
            else:
                for d in range(8 * len(eighths)):
                    row[d] = as_float(elements[np.uintp(start + dims[d])], table)
        _add_values(sums, weights, panel, first, lines, eighths)


# -- attention ------------------------------------------------------------------------------------

NUMBERS = (
    "row_count", "kv_heads", "group", "block", "itemsize", "tile", "page_step", "head_step",
    "row_step", "query_token_step", "query_head_step", "output_token_step", "output_head_step",
    "packed_step", "packed_tokens_step", "tables_step", "has_sinks", "max_split_lines",
)  # fmt: skip


@compiled
def _aligned(rows, columns):
    """Return float32 that starts a cache line, because vectors that cross one take longer."""
    memory = np.empty(rows * columns + 16, np.float32)
    first = -(memory.ctypes.data // 4) % 16
    return memory[first : first + rows * columns].reshape((rows, columns))


@compiled
def _attend(
    rows, kv_heads, group, block, itemsize, tile, page_step, head_step, row_step,
    query_token_step, query_head_step, output_token_step, output_head_step,
    packed_step, packed_tokens_step, tables_step, has_sinks, max_split_lines,
    factors, query, output, elements, content, table, packed, packed_tokens, tables, lengths,
    query_start, slots, sinks, key_tokens, key_dims, value_tokens, value_dims,
    counter, arrivals, partials, eighths,
):  # fmt: skip
    """Run tasks until none is left. Every thread calls this."""
    dim = 8 * len(eighths)
    scale, key_scale, value_scale = factors[0], factors[1], factors[2]
    key_step, value_step = run_step(key_tokens), run_step(value_dims)
    group_rows = 32 // itemsize
    page_groups = block // group_rows
    max_lines = tile * group
    q = _aligned(max_lines, dim)
    scaled = _aligned(max_lines, dim)
    sums = _aligned(max_lines, dim)
    scores = _aligned(max_lines, 64)
    tops = np.empty(max_lines, np.float32)
    totals = np.empty(max_lines, np.float32)
    panel = _aligned(8, max(dim, 64))
    words = _aligned(len(eighths), 64).view(np.uint32)
    scales = _aligned(1, max(dim, 64))[0]
    minima = _aligned(1, max(dim, 64))[0]
    starts = np.empty((2, 64), np.int64)
    copied = np.empty(64 * dim, np.uint8)
    wanted = fetch_add(counter, 0, 1)
    task = 0
    for row in range(rows):
        slot = slots[row]
        count = np.int64(packed_tokens[slot * packed_tokens_step])
        first_query, queries = np.int64(query_start[row]), query_start[row + 1] - query_start[row]
        if count == 0 or queries <= 0:
            continue
        length = np.int64(lengths[row])
        groups = (count + 63) // 64
        chunks = groups + (length + 63) // 64
        tiles = (queries + tile - 1) // tile
        splits = 1
        if queries * group <= max_split_lines:
            splits = max(1, min(SPLITS, chunks // _MIN_CHUNKS))
        if wanted >= task + kv_heads * tiles * splits:
            task += kv_heads * tiles * splits
            continue
        for index in range(kv_heads * tiles * splits):
            if task + index != wanted:
                continue
            wanted = fetch_add(counter, 0, 1)
            head, part = index // (tiles * splits), index % (tiles * splits)
            split = part if tiles == 1 else 0
            start = 0 if tiles == 1 else part * tile  # first query token of the tile
            stop = min(start + tile, queries)
            # Ordinary tokens that the tile's last query attends to.
            seen = length - queries + stop
            used = groups + (seen + 63) // 64
            lines = (stop - start) * group
            for m in range(lines):
                token, h = first_query + start + m // group, head * group + m % group
                at = token * query_token_step + h * query_head_step
                for d in range(dim):
                    q[m, d] = as_float(query[np.uintp(at + d)], table) * scale
                    sums[m, d] = np.float32(0)
                tops[m], totals[m] = LOWEST, np.float32(0)
            for chunk in range(used * split // splits, used * (split + 1) // splits):
                if chunk < groups:
                    page = np.int64(packed[slot * packed_step + chunk // page_groups])
                    at = page * page_step + head * head_step
                    at += chunk % page_groups * group_rows * row_step
                    at *= itemsize
                    tokens = min(64, count - 64 * chunk)
                    source = content
                    if row_step != 2 * dim:
                        width, step = 2 * dim * itemsize, row_step * itemsize
                        copy_rows(content, at, step, width, group_rows, copied)
                        source, at = copied, 0
                    _group_scores(
                        source, at, q, scaled, scales, minima, scores, words, panel, lines, eighths
                    )
                    for m in range(lines):
                        _softmax(scores, tops, totals, sums, m, tokens, eighths)
                    _group_values(
                        source, at, scores, sums, scales, minima, panel, tokens, lines, eighths
                    )
                    continue
                first = 64 * (chunk - groups)
                tokens = min(64, seen - first)
                for t in range(tokens):
                    page = np.int64(tables[row * tables_step + (first + t) // block])
                    at = page * page_step + head * head_step
                    starts[0, t] = at + key_tokens[(first + t) % block]
                    starts[1, t] = at + value_tokens[(first + t) % block]
                _ordinary_scores(
                    elements, table, starts[0], key_dims, key_step, tokens, q, scores, panel, lines,
                    eighths,
                )  # fmt: skip
                for m in range(lines):
                    if key_scale != ONE:
                        for t in range(64):
                            scores[m, t] *= key_scale
                    limit = length - queries + start + m // group + 1 - first
                    _softmax(scores, tops, totals, sums, m, limit, eighths)
                    if value_scale != ONE:
                        for t in range(64):
                            scores[m, t] *= value_scale
                _ordinary_values(
                    elements, table, starts[1], value_dims, value_step, tokens, scores, sums, panel,
                    lines, eighths,
                )  # fmt: skip
            if splits > 1:
                space = max_split_lines * (dim + 2)
                part_0 = (row * kv_heads + head) * SPLITS * space
                at = part_0 + split * space
                for m in range(lines):
                    partials[np.uintp(at + m * (dim + 2))] = tops[m]
                    partials[np.uintp(at + m * (dim + 2) + 1)] = totals[m]
                    for d in range(dim):
                        partials[np.uintp(at + m * (dim + 2) + 2 + d)] = sums[m, d]
                if fetch_add(arrivals, row * kv_heads + head, 1) != splits - 1:
                    continue
                arrivals[row * kv_heads + head] = 0
                _join(partials, part_0, space, splits, lines, tops, totals, sums, eighths)
            for m in range(lines):
                token, h = first_query + start + m // group, head * group + m % group
                total = totals[m]
                factor = ONE
                if has_sinks:
                    sink = sinks[h]
                    top = max(tops[m], sink)
                    factor = exp2(np.float32(tops[m] - top))
                    total = total * factor + exp2(np.float32(sink - top))
                factor = np.float32(factor / total)
                at = token * output_token_step + h * output_head_step
                for d in range(dim):
                    place = np.uintp(at + d)
                    output[place] = as_element(np.float32(sums[m, d] * factor), output[place])
        task += kv_heads * tiles * splits


@compiled
def _join(partials, at, space, splits, lines, tops, totals, sums, eighths):
    """Join the partial results of a row's splits, in order."""
    dim = 8 * len(eighths)
    for m in range(lines):
        line = at + m * (dim + 2)
        top = LOWEST
        for split in range(splits):
            top = max(top, partials[np.uintp(line + split * space)])
        total, row = np.float32(0), sums[m]
        row[:] = np.float32(0)
        for split in range(splits):
            part = line + split * space
            factor = exp2(np.float32(partials[np.uintp(part)] - top))
            total += partials[np.uintp(part + 1)] * factor
            for d in range(dim):
                row[d] += partials[np.uintp(part + 2 + d)] * factor
        tops[m], totals[m] = top, total


ARRAYS = (
    "query", "output", "elements", "content", "table", "packed", "packed_tokens", "tables",
    "lengths", "query_start", "slots", "sinks", "key_tokens", "key_dims", "value_tokens",
    "value_dims", "counter", "arrivals", "partials",
)  # fmt: skip
FACTORS = len(NUMBERS) + len(ARRAYS)


@functools.cache
def attention_worker(query: Any, output: Any, cache: Any, eighths: tuple[int, ...]) -> Any:
    """Return the C function that each thread runs, for element types and a head dim.

    Args:
        query, output, cache: numpy types of their elements.
        eighths: D / 8 zeros. The length of a tuple is part of its type, so the compiler knows D.
    """
    numbers, arrays, count = len(NUMBERS), FACTORS, FACTORS + 2

    def work(call):
        n = carray(call, (count,), np.int64)
        p = n[numbers:arrays]
        dim = 8 * len(eighths)
        _attend(
            n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8],
            n[9], n[10], n[11], n[12], n[13], n[14], n[15], n[16], n[17],
            n[arrays:].view(np.float32),
            carray(as_pointer(p[0]), (1,), query),
            carray(as_pointer(p[1]), (1,), output),
            carray(as_pointer(p[2]), (1,), cache),
            carray(as_pointer(p[3]), (1,), np.uint8),
            carray(as_pointer(p[4]), (256,), np.float32),
            carray(as_pointer(p[5]), (1,), np.int32),
            carray(as_pointer(p[6]), (1,), np.int32),
            carray(as_pointer(p[7]), (1,), np.int32),
            carray(as_pointer(p[8]), (1,), np.int32),
            carray(as_pointer(p[9]), (1,), np.int32),
            carray(as_pointer(p[10]), (1,), np.int32),
            carray(as_pointer(p[11]), (1,), np.float32),
            carray(as_pointer(p[12]), (n[3],), np.int32),
            carray(as_pointer(p[13]), (dim,), np.int32),
            carray(as_pointer(p[14]), (n[3],), np.int32),
            carray(as_pointer(p[15]), (dim,), np.int32),
            carray(as_pointer(p[16]), (1,), np.int64),
            carray(as_pointer(p[17]), (1,), np.int64),
            carray(as_pointer(p[18]), (1,), np.float32),
            eighths,
        )  # fmt: skip

    return c_function(work)
