"""One head's vector in registers: loading it, its norm, its rotation by position."""

from __future__ import annotations

from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.ir import FLOAT, Value
from lowbit.kernels.cpu.vector_math import square_root, total


def load_head(f: Emitter, pointer: Value, head_dim: int, storage: str = "fp32") -> list[Value]:
    """head_dim numbers, a multiple of f.lanes, as vectors of floats."""
    size = SIZE_BYTES[storage]
    return [f.load_floats(storage, f.at(pointer, i * size), f.lanes) for i in range(0, head_dim, f.lanes)]


def root_mean_square(f: Emitter, squares: Value, size: int | Value, eps: Value) -> Value:
    """1 / sqrt(sum of squares / size + eps), a scalar. squares: a vector of partial sums; eps: address of a float."""
    count = f.const(FLOAT, float(size)) if isinstance(size, int) else size.cast("uitofp", FLOAT)
    return f.const(FLOAT, 1.0) / square_root(f, total(f, squares) / count + f.load(FLOAT, eps, 4))


def normed(f: Emitter, x: list[Value], weight: Value, eps: Value) -> list[Value]:
    """RMSNorm of a head. weight: address of floats [head_dim]; eps: of a float."""
    squares = f.zero(f.floats)
    for part in x:
        squares = f.fma(part, part, squares)
    head_dim = len(x) * f.lanes
    factor = f.splat(root_mean_square(f, squares, head_dim, eps), f.lanes)
    return [part * factor * w for part, w in zip(x, load_head(f, weight, head_dim), strict=True)]


def rotated(f: Emitter, x: list[Value], cos: list[Value], sin: list[Value], scratch: Value | None) -> list[Value]:
    """x cos + [-high half of x, low half of x] sin.

    scratch: room for 2 head_dim floats where half a head is no whole number of vectors (scratch_of).
    """
    half = len(x) // 2
    if len(x) % 2 == 0:
        low = [x[i] * cos[i] - x[i + half] * sin[i] for i in range(half)]
        high = [x[i + half] * cos[i + half] + x[i] * sin[i + half] for i in range(half)]
        return low + high
    assert scratch is not None
    head_dim = len(x) * f.lanes
    for i, part in enumerate(x):  # -x and behind it x: from the middle on, the turned head
        f.store(f.zero(f.floats) - part, f.at(scratch, 4 * i * f.lanes))
        f.store(part, f.at(scratch, 4 * (head_dim + i * f.lanes)))
    turned = load_head(f, f.at(scratch, 2 * head_dim), head_dim)
    return [f.fma(t, s, part * c) for part, t, c, s in zip(x, turned, cos, sin, strict=True)]


class Turn:
    """What becomes of the queries and keys of one new token: RMSNorm of each head, if any, and rotation."""

    def __init__(
        self,
        f: Emitter,
        head_dim: int,
        cos: Value,  # address of floats [positions, head_dim], both halves alike
        sin: Value,
        position: Value,  # i64
        eps: Value | None,  # of the norms, address of a float; None: heads are not normed
        scratch: Value | None,  # scratch_of()
    ) -> None:
        self.f, self.head_dim, self.eps, self.scratch = f, head_dim, eps, scratch
        self.cos, self.sin = (load_head(f, f.at(table, position * (4 * head_dim)), head_dim) for table in (cos, sin))

    def head(self, pointer: Value, weight: Value) -> list[Value]:
        """pointer: address of a head's floats; weight: of its norm's floats [head_dim], not read without norms."""
        x = load_head(self.f, pointer, self.head_dim)
        if self.eps is not None:
            x = normed(self.f, x, weight, self.eps)
        return rotated(self.f, x, self.cos, self.sin, self.scratch)


def scratch_of(f: Emitter, head_dim: int) -> Value | None:
    """Memory on the stack for rotated() where it needs it; call it outside of loops."""
    return f.stack(8 * head_dim) if head_dim // f.lanes % 2 else None
