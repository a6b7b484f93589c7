"""acc[lane] += sum over four bytes of weight * activation: weights unsigned, activations signed. One case a kind.

vnni     vpdpbusd: exact, one instruction.
maddubs  vpmaddubsw into 16 bits, then vpmaddwd into 32. Sums of pairs are kept in 16 bits for as many quads as cannot
         saturate; weights of 8 bits go as two nibbles.
sdot     signed by signed: weights of 8 bits go as two nibbles too.
plain    shifts and 32-bit products, for any processor.

AVX2 takes most of its kernels from running_sums.py.

All are exact, so every instruction set and any order gives the same integers.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.ir import Value, vector

_NIBBLES = 0x0F0F0F0F
_LOWEST_ACTIVATION = 128  # magnitude of int8's lowest number


def dot(f: Emitter, accumulators: list[Value], weights: Sequence[Value], xs: Sequence[Value], largest: int) -> None:
    """Adds the products of all quads to the accumulators, in turns. largest: of the weights' bytes."""
    {"vnni": _vnni, "maddubs": _maddubs, "sdot": _sdot, "plain": _plain}[f.isa.dot](
        f, accumulators, weights, xs, largest
    )


def _vnni(f: Emitter, acc: list[Value], weights: Sequence[Value], xs: Sequence[Value], largest: int) -> None:
    name = f"llvm.x86.avx512.vpdpbusd.{32 * f.lanes}"
    for i, (w, x) in enumerate(zip(weights, xs, strict=True)):
        acc[i % len(acc)] = f.call(f.ints, name, acc[i % len(acc)], w, x)


def nibbles(weights: Sequence[Value], largest: int) -> list[tuple[list[Value], int, int]]:
    """The weights as (bytes, shift of their products, largest byte): in two parts if they are above 7 bits."""
    if largest < 128:
        return [(list(weights), 0, largest)]
    return [([w & _NIBBLES for w in weights], 0, 15), ([(w >> 4) & _NIBBLES for w in weights], 4, 15)]


def quads_in_16_bits(largest: int) -> int:
    """How many sums of two products of such bytes 16 bits hold, at least one."""
    return max(1, 32767 // (2 * _LOWEST_ACTIVATION * largest))


def _maddubs(f: Emitter, acc: list[Value], weights: Sequence[Value], xs: Sequence[Value], largest: int) -> None:
    halves = vector("i16", 2 * f.lanes)
    multiply, widen = {
        8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
        16: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    }[f.lanes]
    for part, shift, top in nibbles(weights, largest):
        together = quads_in_16_bits(top)
        for start in range(0, len(part), together):
            total = None
            for w, x in list(zip(part, xs, strict=True))[start : start + together]:
                product = f.call(halves, multiply, f.bytes_of(w), f.bytes_of(x))
                total = product if total is None else total + product
            assert total is not None
            acc[0] = acc[0] + (f.call(f.ints, widen, total, f.const(halves, 1)) << shift)


def _sdot(f: Emitter, acc: list[Value], weights: Sequence[Value], xs: Sequence[Value], largest: int) -> None:
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    for part, shift, _ in nibbles(weights, largest):
        for i, (w, x) in enumerate(zip(part, xs, strict=True)):
            at = i % len(acc)
            start = acc[at] if shift == 0 else f.zero(f.ints)
            total = f.call(f.ints, name, start, f.bytes_of(w), f.bytes_of(x))
            acc[at] = total if shift == 0 else acc[at] + (total << shift)


def _plain(f: Emitter, acc: list[Value], weights: Sequence[Value], xs: Sequence[Value], largest: int) -> None:
    for w, x in zip(weights, xs, strict=True):
        for byte in range(4):
            activation = (x << (24 - 8 * byte)).arithmetic_shift(24)
            acc[0] = acc[0] + ((w >> (8 * byte)) & 0xFF) * activation
