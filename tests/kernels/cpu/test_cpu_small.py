"""The small kernels of a decode step, one by one, on every instruction set."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cpu_cases import ISAS, numbers

from lowbit.kernels.cpu import small
from lowbit.kernels.cpu.emitter import Emitter
from lowbit.kernels.cpu.engine import engine
from lowbit.kernels.cpu.ir import PTR
from lowbit.kernels.cpu.isa import INSTRUCTION_SETS
from lowbit.kernels.cpu.program import Program
from lowbit.kernels.cpu.vector_math import exponential, totals

EPS = 2**-23


@pytest.fixture(params=ISAS)
def program(request: pytest.FixtureRequest) -> Program:
    return Program(INSTRUCTION_SETS[request.param], "a16")


def run(program: Program, text: str, arguments: int, units: int = 1) -> None:
    program.record(engine().address(text), arguments, units)
    program.run()


@pytest.mark.parametrize("isa", ISAS)
def test_exponential(isa: str) -> None:
    f = Emitter(INSTRUCTION_SETS[isa], {"x": PTR})
    with f.loop(0, 4096, f.lanes) as loop:
        place = f.at(f.arg("x"), loop.index * 4)
        f.store(exponential(f, f.load(f.floats, place)), place)
    x = torch.linspace(-86, 87, 4096)
    x[:5] = torch.tensor([float("-inf"), -87.5, 0.0, 1000.0, float("nan")])
    y = x.clone()
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(engine().address(f.build()))(y.data_ptr())
    assert y[:3].tolist() == [0.0, 0.0, 1.0]
    assert y[3] > 1e38
    assert y[4] != y[4]
    want = x[5:].double().exp()
    assert ((y[5:] - want) / want).abs().max() < 2 * EPS


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [1, 3, 4, 6, 8, 12, 16])
def test_totals(isa: str, count: int) -> None:
    """Each lane adds up in an order of its own, lanes / 4 + 2 deep at most."""
    row = INSTRUCTION_SETS[isa]
    count = min(count, row.lanes)
    f = Emitter(row, {"x": PTR, "y": PTR})
    vectors = [f.load(f.floats, f.at(f.arg("x"), 4 * i * f.lanes)) for i in range(count)]
    f.store(totals(f, vectors), f.arg("y"))
    x, y = numbers(count, row.lanes), torch.full((16,), float("nan"))
    ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(engine().address(f.build()))(x.data_ptr(), y.data_ptr())
    bound = (row.lanes.bit_length() + 1) * EPS / 2 * x.double().abs().sum(-1)
    assert ((y[:count] - x.double().sum(-1)).abs() <= bound).all()


@pytest.mark.parametrize("added", [False, True])
def test_norm(program: Program, added: bool) -> None:
    size = 72
    x, more, weight, out = (program.floats(size) for _ in range(4))
    for i, tensor in enumerate((x, more, weight)):
        tensor.copy_(numbers(size, seed=i))
    start, eps = x.clone(), torch.tensor([1e-5])
    values = {
        "x": x.data_ptr(), "added": more.data_ptr(), "weight": weight.data_ptr(), "out": out.data_ptr(),
        "padded": 80, "size": size, "eps": program.hold(eps),
    }  # fmt: skip
    run(program, small.norm(program.isa, added), program.arguments(small.NORM_FIELDS, values))
    total = start + more if added else start
    assert torch.equal(x, total)
    want = torch.nn.functional.rms_norm(total.double(), (size,), weight.double(), 1e-5)
    assert ((out - want).abs() / want.abs()).max() < 8 * EPS


def test_gate(program: Program) -> None:
    size = 200
    gate, up, out = (program.floats(size) for _ in range(3))
    gate.copy_(numbers(size) * 8)
    up.copy_(numbers(size, seed=1))
    values = {"gate": gate.data_ptr(), "up": up.data_ptr(), "out": out.data_ptr(), "padded": 208, "unit": 64}
    run(program, small.gate(program.isa), program.arguments(small.GATE_FIELDS, values), 4)
    want = torch.nn.functional.silu(gate.double()) * up
    assert ((out - want).abs() / want.abs()).max() < 8 * EPS


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
@pytest.mark.parametrize("window", [0, 4])
def test_attend(program: Program, dtype: torch.dtype, name: str, window: int) -> None:
    kv_heads, heads, dim, capacity, position = 2, 3, 64, 24, 17
    query, key, value = (
        program.floats(kv_heads * heads * dim),
        program.floats(kv_heads * dim),
        program.floats(kv_heads * dim),
    )
    for i, tensor in enumerate((query, key, value)):
        tensor.copy_(numbers(len(tensor), seed=i))
    angle = numbers(capacity, dim // 2, seed=3).repeat(1, 2)
    keys, values = (numbers(kv_heads, capacity, dim, seed=s).to(dtype) for s in (4, 5))
    before = keys.clone()
    out, scores = program.floats(kv_heads * heads * dim), program.floats(kv_heads * heads * (capacity + small.PAD))
    places = {
        "query": query, "key": key, "value": value, "cos": angle.cos(), "sin": angle.sin(), "keys": keys,
        "values": values, "out": out, "scores": scores, "position": torch.tensor([position]),
        "eps": torch.tensor([1e-6]), "scale": torch.tensor([dim**-0.5]),
    }  # fmt: skip
    arguments = {k: program.hold(v) for k, v in places.items()}
    arguments |= {"query_norm": 0, "key_norm": 0, "capacity": capacity}
    spec = small.AttendSpec(dim, heads, name, norms=False, window=window)
    run(program, small.attend(program.isa, spec), program.arguments(small.ATTEND_FIELDS, arguments), kv_heads)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.double().chunk(2, -1)
        return x * angle[position].cos().double() + torch.cat((-high, low), -1) * angle[position].sin().double()

    assert torch.equal(values[:, position], value.view(kv_heads, dim).to(dtype))
    torch.testing.assert_close(keys[:, position], rotate(key.view(kv_heads, dim)).to(dtype))
    kept = [i for i in range(capacity) if i != position]
    assert torch.equal(keys[:, kept], before[:, kept])
    first = position + 1 - window if window else 0
    q = rotate(query.view(kv_heads, heads, dim))
    weights = torch.softmax(q @ keys[:, first : position + 1].double().mT * dim**-0.5, -1)
    want = weights @ values[:, first : position + 1].double()
    torch.testing.assert_close(out.view_as(want).double(), want, rtol=1e-5, atol=1e-6)
