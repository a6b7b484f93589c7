"""A function under construction for one instruction set: vectors of its width, conversions it may lack in hardware.

Without F16C or FMA, LLVM turns conversions and fused multiply-adds into calls of libraries that are not there; the
integer forms here take their place. Storage types are named as in formats: fp32, fp16, bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowbit.kernels.cpu.ir import Function, Type, Value, module, vector
from lowbit.kernels.cpu.isa import InstructionSet

SIZE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


class Emitter(Function):
    """ir.Function with an instruction set. `ints` and `floats` are its vectors of 32-bit lanes.

    registers: of the instruction set in a vector, one or two; the compiler splits all but intrinsics: call_each().
    """

    def __init__(
        self,
        isa: InstructionSet,
        parameters: Mapping[str, Type],
        name: str = "kernel",
        internal: bool = False,
        registers: int = 1,
    ) -> None:
        super().__init__(name, parameters, internal)
        self.isa = isa
        self.lanes = isa.lanes * registers
        self.ints, self.floats = vector("i32", self.lanes), vector("float", self.lanes)

    def build(self) -> str:
        return module([self], self.isa.target_features)

    def zero(self, kind: Type) -> Value:
        return Value(self, kind, "zeroinitializer" if kind.lanes else "0.0" if kind.is_float else "0")

    def counting(self) -> Value:
        """The integers 0, 1, 2, ... in the lanes of a vector."""
        return Value(self, self.ints, "<" + ", ".join(f"i32 {i}" for i in range(self.lanes)) + ">")

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once where the hardware can."""
        if not self.isa.fma and self.isa.machine != "aarch64":
            return a * b + c
        return self.call(a.type, f"llvm.fma.{a.type.mangled}", a, b, c)

    def broadcast(self, kind: Type, pointer: Value) -> Value:
        """One scalar from memory in all lanes; a memory operand of the instruction that uses it."""
        return self.splat(self.load(kind, pointer, 4), self.lanes)

    def absolute(self, x: Value) -> Value:
        return self.call(x.type, f"llvm.fabs.{x.type.mangled}", x)

    # -------------------------------------------------------------------------------------------- conversions
    def half_to_float(self, bits: Value) -> Value:
        """Vector of i16 holding fp16 -> float, exactly."""
        floats = bits.type.of("float")
        if self.isa.half:
            return bits.cast("bitcast", bits.type.of("half")).cast("fpext", floats)
        wide = bits.cast("zext", bits.type.of("i32"))
        magnitude = (wide & 0x7FFF) << 13
        finite = (magnitude.cast("bitcast", floats) * 2.0**112).cast("bitcast", wide.type)
        special = magnitude.compare("uge", 0x7C00 << 13)
        return (self.select(special, magnitude | 0x7F800000, finite) | ((wide & 0x8000) << 16)).cast("bitcast", floats)

    def float_to_half(self, x: Value) -> Value:
        """float -> vector of half, rounded to nearest even."""
        half = x.type.of("half")
        if self.isa.half:
            return x.cast("fptrunc", half)
        bits = x.cast("bitcast", x.type.of("i32"))
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112 << 23)) >> 13
        # below 2^-14 adding 0.5 rounds to multiples of fp16's smallest number, 2^-24
        small = (magnitude.cast("bitcast", x.type) + 0.5).cast("bitcast", bits.type) - 0x3F000000
        finite = self.select(magnitude.compare("ult", 0x38800000), small, normal)
        nan = self.select(
            magnitude.compare("ugt", 0x7F800000), self.const(bits.type, 0x7E00), self.const(bits.type, 0x7C00)
        )
        rounded = self.select(magnitude.compare("uge", 0x47800000), nan, finite)
        return (rounded | ((bits >> 16) & 0x8000)).cast("trunc", x.type.of("i16")).cast("bitcast", half)

    def float_to_bf16(self, x: Value) -> Value:
        """float -> vector of i16 holding bf16, rounded to nearest even; NaN stays NaN."""
        bits = x.cast("bitcast", x.type.of("i32"))
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        nan = (bits & 0x7FFFFFFF).compare("ugt", 0x7F800000)
        return (self.select(nan, bits | 0x400000, rounded) >> 16).cast("trunc", x.type.of("i16"))

    def load_floats(self, storage: str, pointer: Value, lanes: int) -> Value:
        """`lanes` numbers stored as fp32, fp16 or bf16 -> float. lanes 0: one scalar."""
        if storage == "fp32":
            return self.load(vector("float", lanes), pointer)
        bits = self.load(vector("i16", lanes), pointer)
        if storage == "fp16":
            return self.half_to_float(bits)
        return (bits.cast("zext", vector("i32", lanes)) << 16).cast("bitcast", vector("float", lanes))

    def store_floats(self, storage: str, x: Value, pointer: Value) -> None:
        """float -> stored as fp32, fp16 or bf16, rounded to nearest even."""
        narrow = {"fp32": lambda v: v, "fp16": self.float_to_half, "bf16": self.float_to_bf16}[storage]
        self.store(narrow(x), pointer)

    def bytes_of(self, x: Value) -> Value:
        """A vector of i32 seen as four times as many bytes."""
        return x.cast("bitcast", vector("i8", 4 * x.type.lanes))

    def shuffle(self, a: Value, b: Value | None, lanes: Sequence[int]) -> Value:
        """Lanes of a and, counted on from there, of b."""
        kind, mask = vector(a.type.item, len(lanes)), ", ".join(f"i32 {lane}" for lane in lanes)
        other = "poison" if b is None else b.name
        return self.emit(kind, f"shufflevector {a.type} {a.name}, {a.type} {other}, <{len(lanes)} x i32> <{mask}>")

    def slice_lanes(self, x: Value, start: int, count: int) -> Value:
        return self.shuffle(x, None, range(start, start + count))

    def call_each(self, result: Type, name: str, *args: Value) -> Value:
        """An intrinsic of whole registers, on each register of some vectors."""
        if self.lanes == self.isa.lanes:
            return self.call(result, name, *args)
        half = vector(result.item, result.lanes // 2)
        low, high = (
            self.call(half, name, *(self.slice_lanes(a, i * a.type.lanes // 2, a.type.lanes // 2) for a in args))
            for i in range(2)
        )
        return self.shuffle(low, high, range(result.lanes))

    def masked(self, x: Value, keep: range) -> Value:
        """x with zero in the lanes outside of `keep`."""
        if keep.start <= 0 and keep.stop >= x.type.lanes:
            return x
        bits = ", ".join(f"i1 {int(i in keep)}" for i in range(x.type.lanes))
        mask = Value(self, x.type.of("i1"), f"<{bits}>")
        return self.select(mask, x, self.zero(x.type))
