"""Matmuls on a GPU beside torch and, where it is installed, Humming: CUDA graphs over copies of weights, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lowbit.packing import PackedWeight
    from lowbit.report import MatmulSpeed
    from lowbit.timing import Sampler

READ_BYTES = 2 << 30  # where nobody knows the bandwidth, a tensor of that size is read
HUMMING_FORMAT = "int4_g128"


@cache
def gpu_floor(place: torch.device) -> tuple[float, float | None, str]:
    """Bytes a microsecond, operations a microsecond (None: unknown), and how they are known."""
    import torch

    from lowbit.dispatch.tuned import device_name
    from lowbit.hardware import RATES
    from lowbit.timing import graphed, summarize

    name = device_name("cuda", place.index or 0)
    if name in RATES:
        rates = RATES[name]
        why = f"{rates.read_tb_s} TB/s and {rates.tflops:g} TFLOP/s, measured on an {name}"
        return rates.read_tb_s * 1e6, rates.tflops * 1e6, why
    buffer = torch.ones(READ_BYTES // 4, dtype=torch.int32, device=place)
    sample = graphed(lambda: buffer.amax(), 1)
    speed = READ_BYTES / summarize([sample() for _ in range(9)]).median_us
    return speed, None, f"torch.amax over {READ_BYTES >> 20} MiB, {speed / 1e6:.2f} TB/s"


def measure_gpu(
    formats: Sequence[str], n: int, k: int, m: int, dtype: torch.dtype, backend: str, runs: int, place: torch.device
) -> list[MatmulSpeed]:
    """One result a format; torch in x's type and Humming take their turns with all of them.

    Raises UnsupportedConfig where no kernel serves a format.
    """
    import torch

    from lowbit.compiling import expecting_compilation
    from lowbit.dispatch import choose, matmul
    from lowbit.formats import parse_format
    from lowbit.kernels import Problem
    from lowbit.report import MatmulSpeed
    from lowbit.timing import graphed, race
    from lowbit.tuner.operands import copies_of, random_weight, require_room
    from lowbit.tuner.work import Weight, matmuls

    require_room(f"--shape {n}x{k}", (4 + 2 * copies_of(2 * n * k)) * n * k, "cuda", place.index or 0)
    torch.cuda.set_device(place)
    samplers: dict[str, Sampler] = {}
    weights: dict[str, PackedWeight] = {}

    def add(name: str, first: Any, nbytes: int, copy: Callable[[Any], Any], call: Callable[[Any], object]) -> None:
        copies = [first, *(copy(first) for _ in range(copies_of(nbytes) - 1))]
        samplers[name] = graphed(lambda: [call(w) for w in copies], len(copies))

    with torch.inference_mode(), expecting_compilation():
        x = torch.randn(m, k, device=place).to(dtype)
        for name in formats:
            problem = matmuls([Weight(n, k, parse_format(name))], [m], place, dtype)[0]
            w = weights[name] = random_weight(n, k, problem.format, problem.layout, place)
            add(name, w, w.nbytes, lambda w: w.map_tensors(torch.clone), lambda w: matmul(x, w, backend=backend))
        plain = torch.randn(n, k, device=place).to(dtype)
        torch_name = str(dtype).removeprefix("torch.")
        add(f"torch {torch_name}", plain, plain.nbytes, torch.clone, lambda w: torch.nn.functional.linear(x, w))
        if HUMMING_FORMAT in weights and find_spec("humming") is not None:
            layer = humming_layer(weights[HUMMING_FORMAT], dtype)
            layers = [layer, *(humming_layer(weights[HUMMING_FORMAT], dtype) for _ in range(11))]
            samplers["torch humming"] = graphed(lambda: [one(x) for one in layers], len(layers))
        times = race(samplers, rounds=runs, drop=float("inf"))
    bytes_us, operations_us, _ = gpu_floor(place)
    peers = {key.removeprefix("torch "): t.median_us for key, t in times.items() if key.startswith("torch ")}
    return [
        MatmulSpeed(
            format=name,
            kernel=choose(Problem.of(w, m=m, x_dtype=dtype), backend).family.name,
            n=n,
            k=k,
            m=m,
            timing=times[name],
            weight_bytes=w.nbytes,
            floor_us=max(
                (w.nbytes + x.element_size() * m * (n + k)) / bytes_us,
                2 * m * n * k / operations_us if operations_us else 0.0,
            ),
            torch_us=peers,
        )
        for name, w in weights.items()
    ]


def humming_layer(weight: PackedWeight, dtype: torch.dtype) -> Any:
    """Humming's layer of the same weight, an int4_g128."""
    from humming.layer import HummingLayer  # type: ignore[import-not-found]

    n, k = weight.shape
    settings = {"dtype": "int4", "weight_scale_group_size": 128}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=settings, torch_dtype=dtype).cuda()
    layer.load_from_unquantized(weight.unpack().dequantize(dtype))
    layer.transform()
    return layer
