"""Queries in 16-bit fixed point, multiplied by codes of a paged cache as they lie: `a16` of activations.py, for keys.

    q = round(x / s), s = largest |x| of the head / LARGEST;  q = 256 high + low, two planes of signed bytes
    x . k  ~  s sum over groups of key_scale_g sum over d in g of (code_d - middle) q_d

vpdpbusd multiplies 4 lanes codes and adds up each lane's four. The middle goes into where sums begin: a key whose codes
are all the middle scores 0. Every |x - s q| is at most s / 2. A head with NaN or infinity gets s = NaN.

In memory, of each head and each span of 4 lanes values: the high plane, the low one, and lanes int32 where sums begin.
"""

from __future__ import annotations

from lowbit.formats.kv import KVFormat
from lowbit.kernels.cpu.dot import dot
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import FLOAT, Value, vector
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.page_decoding import NIBBLE_SHIFTS, Rows
from lowbit.kernels.cpu.vector_math import largest, total

LARGEST = 32512  # so that the high plane fits a signed byte
_ROUND, _ROUND_BITS = 1.5 * 2**23, 0x4B400000  # adding it leaves the nearest integer in a float's low bits


def serves(isa: InstructionSet, fmt: KVFormat, head_dim: int) -> bool:
    """Whether keys of a format can be multiplied so."""
    return isa.dot == "vnni" and fmt.is_integer and not fmt.offset and head_dim % (4 * isa.lanes) == 0


class FixedQueries:
    """The query heads of a key head."""

    def __init__(self, f: Emitter, keys: Rows, heads: int, memory: Value) -> None:
        """memory: memory_bytes() of the stack."""
        self.f, self.keys, self.memory = f, keys, memory
        self.width = 4 * f.lanes  # values of a span, and bytes of a plane of it
        self.spans = keys.head_dim // self.width
        self.head_bytes = self.spans * 3 * self.width
        self.scales = f.at(memory, heads * self.head_bytes)
        self._scratch = f.at(self.scales, 4 * heads)
        self.middle = 1 << (keys.format.bits - 1)
        self.order = list(range(self.width))  # the value each byte of codes() is of
        if keys.format.bits == 4:
            words = range(0, self.width, 8)
            of_byte = [[NIBBLE_SHIFTS.index(8 * byte + half) for byte in range(4)] for half in (0, 4)]
            self.order = [word + value for values in of_byte for word in words for value in values]

    @staticmethod
    def memory_bytes(head_dim: int, heads: int) -> int:
        """Of the planes, the scales, and two planes of one head in the order of its values."""
        return heads * (3 * head_dim + 4) + 2 * head_dim

    def put(self, head: Value, x: list[Value]) -> None:
        """Round a head's vector, scaled and in the basis of the keys."""
        f, lanes, head_dim = self.f, self.f.lanes, self.keys.head_dim
        highest, spoiled = f.zero(f.floats), f.zero(f.floats)
        for v in x:
            size = f.absolute(v)
            highest = f.select(size.compare("ogt", highest), size, highest)
            spoiled = spoiled + v * 0.0
        top, zero = largest(f, highest), f.const(FLOAT, 0.0)
        factor = f.select(top.compare("oeq", zero), zero, f.const(FLOAT, float(LARGEST)) / top)
        f.store(top / float(LARGEST) + total(f, spoiled), f.at(self.scales, head * 4), 4)
        for i, v in enumerate(x):
            whole = (v * f.splat(factor, lanes) + _ROUND).cast("bitcast", f.ints) - _ROUND_BITS
            for plane, part in enumerate(((whole + 128).arithmetic_shift(8), whole)):
                f.store(part.cast("trunc", vector("i8", lanes)), f.at(self._scratch, plane * head_dim + i * lanes))
        middle = f.const(f.ints, self.middle * 0x01010101)
        for span in range(self.spans):
            target, products = f.at(self.memory, head * self.head_bytes + span * 3 * self.width), []
            for plane in range(2):
                source = f.at(self._scratch, plane * head_dim + span * self.width)
                part = f.shuffle(f.load(vector("i8", self.width), source), None, self.order)
                f.store(part, f.at(target, plane * self.width))
                products.append(self._dot(f.zero(f.ints), middle, part.cast("bitcast", f.ints)))
            start = f.zero(f.ints) - ((products[0] << 8) + products[1])
            f.store(start, f.at(target, 2 * self.width))

    def products(self, block: Value, token: Value, heads: range) -> list[Value]:
        """Of one key and some heads: floats whose lanes add up to (x / s) . k."""
        f = self.f
        sums: list[Value] = []
        for span in range(self.spans):
            codes, scales = self._codes(block, token, span), self._key_scales(token, span)
            for i, head in enumerate(heads):
                place = head * self.head_bytes + span * 3 * self.width
                high, low, start = (f.load(f.ints, f.at(self.memory, place + j * self.width)) for j in range(3))
                whole = (self._dot(f.zero(f.ints), codes, high) << 8) + self._dot(start, codes, low)
                product = whole.cast("sitofp", f.floats)
                if span:
                    sums[i] = f.fma(product, scales, sums[i])
                else:
                    sums.append(product * scales)
        return sums

    def scale(self, head: int, lanes: int) -> Value:
        """s of a head in some lanes."""
        return self.f.splat(self.f.load(FLOAT, self.f.at(self.scales, 4 * head), 4), lanes)

    def _dot(self, start: Value, codes: Value, plane: Value) -> Value:
        sums = [start]
        dot(self.f, sums, [codes], [plane], (2 * self.middle) - 1)
        return sums[0]

    def _codes(self, block: Value, token: Value, span: int) -> Value:
        """The codes of a span as bytes, in `order`."""
        f, lanes = self.f, self.f.lanes
        pointer = f.at(self.keys.codes, (block + token) * self.keys.code_bytes)
        if self.keys.format.bits == 8:
            return f.load(f.ints, f.at(pointer, span * self.width))
        half = lanes // 2
        words = f.load(vector("i32", half), f.at(pointer, span * self.width // 2))
        both = f.shuffle(words, None, [*range(half), *range(half)])
        shifts = ", ".join(f"i32 {4 * (lane // half)}" for lane in range(lanes))
        nibbles: Value = both >> Value(f, f.ints, f"<{shifts}>")
        return nibbles & 0x0F0F0F0F

    def _key_scales(self, token: Value, span: int) -> Value:
        """The scale of each lane's group."""
        f, keys = self.f, self.keys
        groups = [(span * self.width + self.order[4 * lane]) // keys.group_size for lane in range(f.lanes)]
        scales = [f.broadcast(FLOAT, keys.scale(token, group)) for group in sorted(set(groups))]
        if len(scales) == 1:
            return scales[0]
        low, high = scales
        return f.shuffle(low, high, [lane + f.lanes * (group > groups[0]) for lane, group in enumerate(groups)])
