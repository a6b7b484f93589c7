"""Writes LLVM IR as text: typed values with operators, structured loops and branches.

    f = Function("double_it", {"x": PTR, "count": I64})
    with f.loop(0, f.arg("count"), 8) as loop:
        at = f.at(f.arg("x"), loop.index * 4)
        f.store(f.load(vector("float", 8), at) * 2.0, at)
    text = module([f], features="+avx2")

Only what the CPU kernels use. Every emitting method appends one line and returns the value it names; integers and
floats of Python become constants of the other operand's type. Text, because it is the cache key and any LLVM parses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lowbit.kernels.cpu.ir_types import (
    BOOL,
    DOUBLE,
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    PTR,
    Type,
    literal,
    vector,
)

__all__ = [
    "BOOL", "DOUBLE", "FLOAT", "HALF", "I8", "I16", "I32", "I64", "PTR", "Function", "Loop", "Type", "Value", "module",
    "vector",
]  # fmt: skip


def _is(operand: object, number: int) -> bool:
    """Whether an operand is this constant of Python."""
    return not isinstance(operand, Value) and operand == number


@dataclass(frozen=True, slots=True)
class Value:
    """An SSA value or a constant. Operators emit into the function it belongs to; >> is the logical shift."""

    function: Function
    type: Type
    name: str

    def _binary(self, floats: str, integers: str, other: Value | int | float) -> Value:
        op = floats if self.type.is_float else integers
        assert op, f"no such operation on {self.type}"
        return self.function.emit(self.type, f"{op} {self.type} {self.name}, {self._operand(other)}")

    def _operand(self, other: Value | int | float) -> str:
        if not isinstance(other, Value):
            return literal(self.type, other)
        assert other.type == self.type, f"{self.type} meets {other.type}"
        return other.name

    def __add__(self, other: Value | int | float) -> Value:
        return self if _is(other, 0) else self._binary("fadd", "add", other)

    def __sub__(self, other: Value | int | float) -> Value:
        return self._binary("fsub", "sub", other)

    def __mul__(self, other: Value | int | float) -> Value:
        return self if _is(other, 1) else self._binary("fmul", "mul", other)

    def __truediv__(self, other: Value | int | float) -> Value:
        return self._binary("fdiv", "", other)

    def __floordiv__(self, other: Value | int) -> Value:
        if isinstance(other, int) and other > 0 and other & (other - 1) == 0:
            return self >> (other.bit_length() - 1)
        return self._binary("", "udiv", other)

    def __mod__(self, other: Value | int) -> Value:
        return self._binary("", "urem", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("", "and", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("", "or", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self if _is(other, 0) else self._binary("", "shl", other)

    def __rshift__(self, other: Value | int) -> Value:
        return self if _is(other, 0) else self._binary("", "lshr", other)

    def arithmetic_shift(self, places: int) -> Value:
        return self if places == 0 else self._binary("", "ashr", places)

    def compare(self, relation: str, other: Value | int | float) -> Value:
        """relation: LLVM's predicate, such as ult, eq, ogt. Returns i1, as many lanes."""
        op = "fcmp" if self.type.is_float else "icmp"
        return self.function.emit(
            self.type.of("i1"), f"{op} {relation} {self.type} {self.name}, {self._operand(other)}"
        )

    def cast(self, op: str, target: Type) -> Value:
        """op: bitcast, zext, sext, trunc, sitofp, uitofp, fpext, fptrunc, ptrtoint, inttoptr."""
        if target == self.type:
            return self
        return self.function.emit(target, f"{op} {self.type} {self.name} to {target}")


@dataclass(slots=True)
class Loop:
    """The inside of a loop: its index, the carried values, and where to put their next values."""

    index: Value
    carried: list[Value]
    following: list[Value] = field(default_factory=list)

    def put(self, values: Iterable[Value]) -> None:
        self.following.extend(values)


class Function:
    """One `void` function under construction."""

    def __init__(self, name: str, parameters: Mapping[str, Type], internal: bool = False) -> None:
        self.name, self.parameters, self.internal = name, dict(parameters), internal
        self.lines: list[str] = []
        self.declarations: set[str] = set()
        self.constants: dict[str, str] = {}  # definition -> global name
        self._count = 0
        self._block = "entry"

    def arg(self, name: str) -> Value:
        return Value(self, self.parameters[name], f"%{name}")

    def const(self, kind: Type, value: int | float) -> Value:
        return Value(self, kind, "null" if kind == PTR else literal(kind, value))

    def emit(self, kind: Type, text: str) -> Value:
        self._count += 1
        name = f"%v{self._count}"
        self.lines.append(f"  {name} = {text}")
        return Value(self, kind, name)

    def do(self, text: str) -> None:
        self.lines.append(f"  {text}")

    # ------------------------------------------------------------------------------------------------ memory
    def at(self, pointer: Value, offset_bytes: Value | int) -> Value:
        if isinstance(offset_bytes, int):
            if offset_bytes == 0:
                return pointer
            offset_bytes = self.const(I64, offset_bytes)
        return self.emit(PTR, f"getelementptr i8, ptr {pointer.name}, i64 {offset_bytes.name}")

    def load(self, kind: Type, pointer: Value, align: int = 1) -> Value:
        return self.emit(kind, f"load {kind}, ptr {pointer.name}, align {align}")

    def store(self, value: Value, pointer: Value, align: int = 1) -> None:
        self.do(f"store {value.type} {value.name}, ptr {pointer.name}, align {align}")

    def prefetch(self, pointer: Value, level: int) -> None:
        """Asks for the cache line at a pointer, which need not be readable. level: 1 the nearest cache, 2 the next."""
        self.declarations.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self.do(f"call void @llvm.prefetch.p0(ptr {pointer.name}, i32 0, i32 {4 - level}, i32 1)")

    def stack(self, size_bytes: int) -> Value:
        """Memory that lives until the function returns; call it outside of loops."""
        return self.emit(PTR, f"alloca [{size_bytes} x i8], align 64")

    def table(self, item: str, values: Sequence[int | float]) -> Value:
        """The address of a constant array in the module."""
        body = ", ".join(f"{item} {literal(Type(item), v)}" for v in values)
        definition = f"private unnamed_addr constant [{len(values)} x {item}] [{body}], align 64"
        name = self.constants.setdefault(definition, f"@{self.name}.c{len(self.constants)}")
        return Value(self, PTR, name)

    # ----------------------------------------------------------------------------------------------- vectors
    def splat(self, scalar: Value, lanes: int) -> Value:
        kind = vector(scalar.type.item, lanes)
        one = self.emit(kind, f"insertelement {kind} poison, {scalar.type} {scalar.name}, i64 0")
        return self.emit(kind, f"shufflevector {kind} {one.name}, {kind} poison, <{lanes} x i32> zeroinitializer")

    def extract(self, value: Value, lane: int) -> Value:
        return self.emit(Type(value.type.item), f"extractelement {value.type} {value.name}, i64 {lane}")

    def insert(self, value: Value, scalar: Value, lane: int) -> Value:
        return self.emit(
            value.type, f"insertelement {value.type} {value.name}, {scalar.type} {scalar.name}, i64 {lane}"
        )

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return self.emit(
            yes.type,
            f"select {condition.type} {condition.name}, {yes.type} {yes.name}, {no.type} {no.name}",
        )

    def smaller(self, a: Value, b: Value) -> Value:
        """The smaller of two unsigned integers."""
        return self.select(a.compare("ult", b), a, b)

    def call(self, result: Type, name: str, *args: Value) -> Value:
        """Calls an intrinsic or an external function and declares it."""
        self.declarations.add(f"declare {result} @{name}({', '.join(str(a.type) for a in args)})")
        return self.emit(result, f"call {result} @{name}({', '.join(f'{a.type} {a.name}' for a in args)})")

    def call_void(self, target: str, *args: Value) -> None:
        """Calls a `void` function: "@name" in this module, or the name of a pointer value."""
        self.do(f"call void {target}({', '.join(f'{a.type} {a.name}' for a in args)})")

    # ---------------------------------------------------------------------------------------------- control
    def label(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def open_block(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self._block = label

    def jump(self, label: str) -> None:
        self.do(f"br label %{label}")

    def branch(self, condition: Value, yes: str, no: str) -> None:
        self.do(f"br i1 {condition.name}, label %{yes}, label %{no}")

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Runs the body if the condition holds. Values made inside cannot be used after it."""
        yes, done = self.label("then"), self.label("done")
        self.branch(condition, yes, done)
        self.open_block(yes)
        yield
        self.jump(done)
        self.open_block(done)

    @contextmanager
    def loop(
        self, begin: Value | int, end: Value | int, step: int = 1, carried: Sequence[Value] = ()
    ) -> Iterator[Loop]:
        """Runs the body for index = begin, begin + step, ... below end. After it, `carried` holds the last values.

        The body puts one next value for each carried one. The indices are i64.
        """
        first = begin if isinstance(begin, Value) else self.const(I64, begin)
        last = end if isinstance(end, Value) else self.const(I64, end)
        head, body, done = self.label("loop"), self.label("body"), self.label("done")
        before = self._block
        self.jump(head)
        self.open_block(head)
        self._count += 1 + len(carried)
        names = [f"%v{self._count - i}" for i in range(1 + len(carried))]
        place = len(self.lines)
        self.lines.extend([""] * len(names))
        index = Value(self, I64, names[0])
        state = Loop(index, [Value(self, v.type, name) for v, name in zip(carried, names[1:], strict=True)])
        self.branch(index.compare("ult", last), body, done)
        self.open_block(body)
        yield state
        following = [index + step, *state.following]
        assert len(following) == len(names), "put() one next value for each carried value"
        starts = [first, *carried]
        for i, (name, start, after) in enumerate(zip(names, starts, following, strict=True)):
            self.lines[place + i] = (
                f"  {name} = phi {start.type} [ {start.name}, %{before} ], [ {after.name}, %{self._block} ]"
            )
        self.jump(head)
        self.open_block(done)

    def text(self) -> str:
        parameters = ", ".join(f"{t} %{name}" for name, t in self.parameters.items())
        linkage = "internal " if self.internal else ""
        head = f"define {linkage}void @{self.name}({parameters}) #0 {{\nentry:\n"
        return head + "\n".join(self.lines) + "\n  ret void\n}\n"


def module(functions: Sequence[Function], features: str) -> str:
    """The text of a module. features: LLVM's target features, such as "+avx2,+fma"."""
    declarations = sorted(set().union(*(f.declarations for f in functions)))
    constants = [f"{name} = {text}" for f in functions for text, name in f.constants.items()]
    attributes = f'attributes #0 = {{ nounwind "target-features"="{features}" "prefer-vector-width"="512" }}'
    return "\n".join([*declarations, *constants, *(f.text() for f in functions), attributes]) + "\n"
