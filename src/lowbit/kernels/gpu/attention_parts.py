"""Pieces that the attention kernels share, plain Triton: codes to numbers, Hadamard, scores, work items.

A row of codes is read as 16-bit words; a word holds PARTS = 16 / bits values, and part j of word w is the value

    8 bits    d = 2 w + j                              4 bits    d = 8 (w // 2) + w % 2 + 2 j

of packing/paged.py. So every part of a tile is a 16-bit tile of its own, [keys, words], that goes to the tensor cores
as it is loaded, by keys or by words: q . k = sum over j of q_j . k_j, and out_j = sum over keys of p v_j. Queries are
split into parts before the loop over keys, the output is joined after it.
"""

from __future__ import annotations

from lowbit.kernels.gpu.compat import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def butterfly(x, LOW: tl.constexpr):
    """Sums and differences of values LOW apart along the width."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    pairs = tl.permute(tl.reshape(x, (ROWS, WIDTH // (2 * LOW), 2, LOW)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, WIDTH))


@triton.jit
def hadamard(x, GROUP: tl.constexpr):
    """x [rows, width] fp32, each run of GROUP (16 or 32) along the width transformed; its own inverse."""
    for step in tl.static_range(4 if GROUP == 16 else 5):
        x = butterfly(x, 1 << step)
    return x * (0.25 if GROUP == 16 else 0.17677669529663687)


@triton.jit
def split_parts(x, PARTS: tl.constexpr):
    """x [rows, width] -> PARTS tensors [rows, width / PARTS], in the order of the words."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    if PARTS == 1:
        return (x,)
    elif PARTS == 2:
        return tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    else:
        y = tl.reshape(x, (ROWS, WIDTH // 8, 2, 2, 2))  # d = 4 (j // 2) + 2 (j % 2) + w % 2
        low, high = tl.split(tl.permute(y, (0, 1, 4, 3, 2)))
        part0, part1 = tl.split(low)
        part2, part3 = tl.split(high)
        SHAPE: tl.constexpr = (ROWS, WIDTH // 4)
        return (
            tl.reshape(part0, SHAPE),
            tl.reshape(part1, SHAPE),
            tl.reshape(part2, SHAPE),
            tl.reshape(part3, SHAPE),
        )


@triton.jit
def join_parts(parts, PARTS: tl.constexpr):
    """The inverse of split_parts."""
    ROWS: tl.constexpr = parts[0].shape[0]
    WORDS: tl.constexpr = parts[0].shape[1]
    if PARTS == 1:
        return parts[0]
    elif PARTS == 2:
        return tl.reshape(tl.join(parts[0], parts[1]), (ROWS, 2 * WORDS))
    else:
        SHAPE: tl.constexpr = (ROWS, WORDS // 2, 2)
        low = tl.join(tl.reshape(parts[0], SHAPE), tl.reshape(parts[1], SHAPE))
        high = tl.join(tl.reshape(parts[2], SHAPE), tl.reshape(parts[3], SHAPE))
        y = tl.permute(tl.join(low, high), (0, 1, 4, 3, 2))  # [rows, words / 2, j // 2, j % 2, w % 2]
        return tl.reshape(y, (ROWS, 4 * WORDS))


@triton.jit
def paired(parts, PARTS: tl.constexpr):
    """Parts of four bits two by two, columns in turn: half the products, twice as wide."""
    if PARTS < 4:
        return parts
    else:
        SHAPE: tl.constexpr = (parts[0].shape[0], 2 * parts[0].shape[1])
        return (
            tl.reshape(tl.join(parts[0], parts[1]), SHAPE),
            tl.reshape(tl.join(parts[2], parts[3]), SHAPE),
        )


@triton.jit
def unpaired(pairs, PARTS: tl.constexpr):
    """The inverse of paired."""
    if PARTS < 4:
        return pairs
    else:
        SHAPE: tl.constexpr = (pairs[0].shape[0], pairs[0].shape[1] // 2, 2)
        a, b = tl.split(tl.reshape(pairs[0], SHAPE))
        c, d = tl.split(tl.reshape(pairs[1], SHAPE))
        return (a, b, c, d)


@triton.jit
def numbers(words, scales, offsets, S: tl.constexpr):
    """Codes to fp16: words 16-bit of any shape, scales and offsets fp16 of that shape -> PARTS tensors of the shape.

    S: the side, keys or values (attention_plan.Side). Without inline assembly the same in integers and floats.
    """
    if S.PARTS == 1:
        return (words,)
    elif S.ASM != "":
        if not S.SCALED:
            return tl.inline_asm_elementwise(
                S.ASM, S.CONSTRAINTS, [words], dtype=(tl.float16,) * S.PARTS, is_pure=True, pack=2
            )
        elif S.OFFSET:
            return tl.inline_asm_elementwise(
                S.ASM, S.CONSTRAINTS, [words, scales, offsets], dtype=(tl.float16,) * S.PARTS, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                S.ASM, S.CONSTRAINTS, [words, scales], dtype=(tl.float16,) * S.PARTS, is_pure=True, pack=2
            )
    else:
        parts = ()
        for j in tl.static_range(S.PARTS):
            code = (words >> (j * S.BITS)) & ((1 << S.BITS) - 1)
            if S.FLOAT:  # e4m3: sign and the rest in the places of fp16, whose exponent is 8 larger
                bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
                value = bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
            elif S.BITS == 4 and j % 2 == 1:
                value = (code * 16 | 0x5400).to(tl.uint16).to(tl.float16, bitcast=True)
                if not S.RAW[j]:
                    value = value - (S.ZERO - 960)
            else:
                value = (code | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)
                if not S.RAW[j]:
                    value = value - S.ZERO
            if S.OFFSET:
                value = tl.fma(value.to(tl.float32), scales.to(tl.float32), offsets.to(tl.float32)).to(tl.float16)
            elif S.SCALED:
                value = value * scales
            parts = parts + (value.to(tl.float16),)
        return parts


@triton.jit
def side_block(codes_ptr, scales_ptr, token, inside, S: tl.constexpr):
    """A block of keys or values -> PARTS tensors [keys, words].

    token: [keys] int64, which row of [pages, kv_heads, page_size] each key is; inside: where one is.
    """
    word = tl.arange(0, S.WORDS_PADDED)
    there = inside[:, None] & (word < S.WORDS)[None, :]
    words = tl.load(codes_ptr + token[:, None] * S.WORDS + word[None, :], mask=there, other=0)
    scales, offsets = words, words  # not read
    if S.SCALED:
        KEYS: tl.constexpr = token.shape[0]
        GROUPS: tl.constexpr = S.WORDS_PADDED // S.GROUP_WORDS
        STEP: tl.constexpr = 2 if S.OFFSET else 1
        group = tl.arange(0, GROUPS)
        at = scales_ptr + (token[:, None] * S.GROUPS + group[None, :]) * STEP
        real = inside[:, None] & (group < S.GROUPS)[None, :]
        shape: tl.constexpr = (KEYS, GROUPS, S.GROUP_WORDS)
        scales = tl.load(at, mask=real, other=0.0)
        scales = tl.reshape(tl.broadcast_to(scales[:, :, None], shape), (KEYS, S.WORDS_PADDED))
        if S.OFFSET:
            offsets = tl.load(at + 1, mask=real, other=0.0)
            offsets = tl.reshape(tl.broadcast_to(offsets[:, :, None], shape), (KEYS, S.WORDS_PADDED))
    return numbers(words, scales, offsets, S)


@triton.jit
def scores(s, distance, slope, factor, P: tl.constexpr):
    """Products q . k -> scores times log2(e). distance: how far a key lies behind the query; slope: of ALiBi."""
    if P.SOFT_CAP > 0:
        s = s * factor * (1.0 / P.SOFT_CAP)
        s = (1.0 - 2.0 / (1.0 + tl.exp2(s * (2.0 * LOG2E)))) * (P.SOFT_CAP * LOG2E)
    else:
        s = s * (factor * LOG2E)
    if P.ALIBI:
        s = s - slope * LOG2E * distance.to(tl.float32)
    return s


@triton.jit
def seen(distance, P: tl.constexpr):
    """Which keys a query sees, by how far they lie behind it."""
    if P.WINDOW > 0:
        return (distance >= 0) & (distance < P.WINDOW)
    else:
        return distance >= 0


@triton.jit
def with_sink(top, total, sinks_ptr, real, P: tl.constexpr):
    """-> the sum of weights with the sink's, and what partial sums have to be multiplied by. top: in base 2."""
    weight = total * 0.0 + 1.0
    if P.SINKS:
        sink = tl.load(sinks_ptr, mask=real, other=0.0) * LOG2E
        higher = tl.maximum(top, sink)
        weight = tl.exp2(top - higher)
        total = total * weight + tl.exp2(sink - higher)
    return total, weight


@triton.jit
def merge_row(
    partial_ptr, lse_ptr, sinks_ptr, slots_ptr,
    first, end,  # in the list of slots
    c, g, d,  # numbers of parts at a time, query heads, columns: [parts, 1, 1], [1, heads, 1], [1, 1, width]
    head, P: tl.constexpr,
):  # fmt: skip
    """The partial results of one row and key head added up in the order of the list: fp32 [heads, width], finished."""
    q_head = head * P.GROUPS + g
    nothing = (c + g + d).to(tl.float32) * 0.0
    out = tl.sum(nothing, 0)
    total = tl.sum((c + g).to(tl.float32) * 0.0, 0)  # [heads, 1]
    top = total - float("inf")
    for at in range(first, end, P.MERGED):
        inside = at + c < end
        slot = tl.load(slots_ptr + at + c, mask=inside, other=0)
        places = slot.to(tl.int64) * P.HEADS + q_head
        real = inside & (g < P.GROUPS)
        lse = tl.load(lse_ptr + places, mask=real, other=float("-inf")) * LOG2E
        parts = tl.load(partial_ptr + places * P.HEAD_DIM + d, mask=real & (d < P.HEAD_DIM), other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        scale = tl.exp2(top - base)
        weights = tl.exp2(lse - tl.expand_dims(base, 0))
        total = total * scale + tl.sum(weights, 0)
        out = out * scale + tl.sum(parts * weights, 0)
        top = new_top
    heads = tl.max(q_head + c * 0, 0)  # [heads, 1]
    total, weight = with_sink(top, total, sinks_ptr + heads, heads - head * P.GROUPS < P.GROUPS, P)
    return out * tl.where(total > 0, weight / total, 0.0)
