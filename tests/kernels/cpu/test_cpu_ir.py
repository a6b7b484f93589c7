"""The IR writer: what it writes compiles and does what it says."""

from __future__ import annotations

import ctypes

import pytest
import torch

from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.engine import compile_object, engine
from lowbit.kernels.cpu.ir import FLOAT, I32, I64, PTR, Function, module, vector
from lowbit.kernels.cpu.isa import INSTRUCTION_SETS, available, best


def run(text: str, *tensors: torch.Tensor, numbers: tuple[int, ...] = ()) -> None:
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (len(tensors) + len(numbers)))
    kind(engine().address(text))(*(t.data_ptr() for t in tensors), *numbers)


def test_loops_carry_values_and_may_run_no_times() -> None:
    f = Function("kernel", {"out": PTR, "count": I64})
    start = f.const(I64, 0)
    with f.loop(0, f.arg("count"), 3, [start]) as loop:
        loop.put([loop.carried[0] + loop.index])
    f.store(loop.carried[0], f.arg("out"))
    text = module([f], "")
    for count in (0, 1, 10):
        out = torch.full((1,), -1, dtype=torch.int64)
        run(text, out, numbers=(count,))
        assert out.item() == sum(range(0, count, 3))


def test_branches_tables_and_constants() -> None:
    f = Function("kernel", {"out": PTR, "at": I64})
    table = f.table("float", [0.5, -1.25, float("nan"), float("-inf")])
    with f.when(f.arg("at").compare("ult", 4)):
        f.store(f.load(FLOAT, f.at(table, f.arg("at") * 4)), f.arg("out"))
    text = module([f], "")
    results = []
    for at in (0, 1, 2, 3, 4):
        out = torch.zeros(1)
        run(text, out, numbers=(at,))
        results.append(out.item())
    assert results[:2] == [0.5, -1.25]
    assert results[2] != results[2]
    assert results[3:] == [float("-inf"), 0.0]


def test_integer_constants_wrap_and_shifts_are_logical() -> None:
    f = Function("kernel", {"out": PTR})
    value = f.load(vector("i32", 4), f.arg("out"))
    f.store(((value & 0xFFFFFFF0) >> 4) - 1, f.arg("out"))
    out = torch.tensor([-1, 16, 31, 0], dtype=torch.int32)
    run(module([f], ""), out)
    assert out.tolist() == [0x0FFFFFFE, 0, 0, -1]


def test_operands_of_two_types_are_a_mistake() -> None:
    f = Function("kernel", {"a": I32, "b": I64})
    with pytest.raises(AssertionError, match="i32 meets i64"):
        _ = f.arg("a") + f.arg("b")
    with pytest.raises(AssertionError, match="no such operation on i32"):
        _ = f.arg("a") / 2


@pytest.mark.parametrize("isa", [row.name for row in available()])
def test_conversions_of_sixteen_bit_floats_are_torchs(isa: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for storage, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        f = Emitter(INSTRUCTION_SETS[isa], {"source": PTR, "target": PTR})
        with f.loop(0, len(every), 8) as loop:
            x = f.load_floats(storage, f.at(f.arg("source"), loop.index * 2), 8)
            f.store(x, f.at(f.arg("target"), loop.index * 4))
            f.store_floats(storage, x * 1.5, f.at(f.arg("source"), loop.index * 2))  # has ties
        source, target = every.clone(), torch.empty(len(every))
        run(f.build(), source, target)
        want = every.view(dtype).float()
        torch.testing.assert_close(target, want, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(source.view(dtype), (want * 1.5).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_the_generic_instruction_set_is_always_there() -> None:
    names = [row.name for row in available()]
    assert names[-1] == "generic"
    assert best().name == names[0]


def test_objects_for_another_processor() -> None:
    f = Emitter(INSTRUCTION_SETS["dotprod"], {"p": PTR})
    f.store(f.load(f.floats, f.arg("p")) * 2.0, f.arg("p"))
    code = compile_object(f.build(), "aarch64-unknown-linux-gnu", jit=False)
    assert code[:4] == b"\x7fELF"
    assert code[18] == 183  # EM_AARCH64
