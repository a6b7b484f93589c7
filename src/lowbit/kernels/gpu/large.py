"""The Hopper family for many tokens: weights of 1 to 8 bits with fp16 or bf16 activations on compute capability 9.0.

    y[m, n] = sum over k of x[m, k] * W[n, k] + bias[n],   W = number(code, zero) * scale, packed as fragments

Weights are multiplied by their scales as they are decoded, so each is rounded to x's type once, as it is in a weight
that torch multiplies. So that none overflows or becomes subnormal in fp16, the scales are first multiplied by a power
of two that brings the largest weight below 2^15, and the sums by its inverse. The kernel is large_body.py.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from lowbit.formats import WeightFormat
from lowbit.kernels.gpu import driver
from lowbit.kernels.gpu.form import illegal_one_level
from lowbit.kernels.gpu.fragments import FragmentFamily, multiprocessors
from lowbit.kernels.gpu.large_heuristic import choose_config
from lowbit.kernels.gpu.large_plan import NAME, LargeConfig, illegal_config, large_plan
from lowbit.kernels.gpu.large_proven import unproven_tile
from lowbit.kernels.gpu.launch import MOST_KEPT, TensorMaps, bind_weight, map_slots
from lowbit.kernels.gpu.work import X_TYPES
from lowbit.kernels.gpu.workspace import workspace
from lowbit.kernels.problem import KernelConfig, Problem
from lowbit.packing import PackedWeight

FEWEST_TOKENS = 65  # from where "auto" takes it
TABLE_TOKENS = (64, 96, 128, 192, 256, 512, 1024, 4096)  # a shipped row serves what is nearest below it
_WASTE = 1.05  # of the multiprocessors, up to where tiles stay whole or are cut into equal parts


def lift_of(weight: PackedWeight, x_type: str, factor: float) -> Tensor:
    """What scales are multiplied by before they are rounded to x's type, and what sums are: float32 [2], on w's device.

    factor: what the decoded numbers have to be multiplied by. Does not wait for the device.
    """
    if x_type == "bf16" or weight.format.scale.super is not None:
        return torch.ones(2, device=weight.device)
    scales = weight.scales
    size = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float().abs()
    largest = torch.where(size.isfinite(), size, 0).amax()
    numbers = weight.format.element.values().double()
    most = float(numbers[numbers.isfinite()].abs().max()) if weight.zeros is None else float(1 << weight.format.bits)
    _, exponent = torch.frexp(largest * max(1.0, most / factor))
    up = torch.exp2((15 - exponent).clamp(-100, 100).float())
    return torch.stack([up, 1 / up])


def shared_out(config: LargeConfig, tiles: int, k_tiles: int, most: int) -> tuple[int, int]:
    """CTAs, and how many tiles are cut into runs, on `most` multiprocessors."""
    if config.whole_tiles:
        return min(tiles, most), 0
    waves, rest = divmod(tiles, most)
    if rest == 0 or (waves + 1) * most < _WASTE * tiles:
        return min(tiles, most), 0
    if waves:
        return most, rest + most
    parts = most // tiles  # of each tile, which then end where tiles end
    ctas = tiles * parts if tiles * parts * _WASTE >= most else most
    return min(ctas, tiles * k_tiles), tiles


class Prepared:
    """A compiled kernel bound to one weight: a call fills in x, y and bias."""

    def __init__(self, config: LargeConfig, weight: PackedWeight, x_dtype: torch.dtype, bias: bool) -> None:
        from lowbit.kernels.gpu.build import build

        self.config = config
        self.n, self.k = weight.shape
        self.device = weight.device.index or 0
        x_type = X_TYPES[x_dtype]
        self._bulk = self.n % 8 == 0
        plan = large_plan(config, weight.format, x_type, bias, self._bulk)
        binary = build(plan, x_type, config.maxnreg)
        function = driver.load_function(binary.cubin, binary.name, binary.smem_bytes, self.device)
        maps, slots = map_slots((*(3,) * len(plan.PLANES), 4, 4, 2, 2))
        self._at = len(slots)
        slots += [8] * 5 + [4] * 9 + [8] * 2
        self._launch = driver.Launch(function, slots, binary.threads, binary.smem_bytes)
        self._lock = Lock()
        self._x, self._y = (TensorMaps([self._launch.addresses[maps[i]]], [binary.maps[i]]) for i in (-2, -1))
        self._splits: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        self._lift = lift_of(weight, x_type, plan.FACTOR)
        self._super = 0 if weight.super_scales is None else weight.super_scales.data_ptr()
        bind_weight(self._launch, maps, binary.maps, weight)

    def __call__(self, x: Tensor, y: Tensor, bias: Tensor | None) -> None:
        """x [m, k], rows a multiple of 16 bytes apart and aligned; y [m, n] is written."""
        m = x.shape[0]
        split = self._splits.get(m)
        if split is None:
            if len(self._splits) >= MOST_KEPT:
                self._splits.clear()
            split = self._splits[m] = self._split(m)
        ctas, words, arguments = split
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        partial = workspace(self.device, stream, words).data_ptr()
        bias_pointer = 0 if bias is None else bias.data_ptr()
        with self._lock:
            self._x.point_at(x)
            if self._bulk:
                self._y.point_at(y)
            self._launch.set_words(self._at, y.data_ptr(), bias_pointer, partial, *arguments)
            self._launch(ctas, stream)

    def _split(self, m: int) -> tuple[int, int, tuple[int, ...]]:
        """How m tokens are shared out: CTAs, words of workspace, and the kernel's last arguments."""
        config = self.config
        k_tiles = -(-self.k // config.block_k)
        m_tiles = -(-m // config.block_m)
        n_tiles = -(-self.n // config.rows)
        tiles = n_tiles * m_tiles
        most = config.ctas_per_sm * multiprocessors(self.device)
        ctas, striped = shared_out(config, tiles, k_tiles, most)
        base, more = divmod(striped * k_tiles, ctas)
        words = ctas * config.rows * config.block_m if striped else 0
        numbers = (m, self.n, k_tiles, m_tiles, tiles, min(config.band, n_tiles), striped, base, more)
        return ctas, words, (self._super, self._lift.data_ptr(), *numbers)


class Large(FragmentFamily):
    name = NAME
    config_type = LargeConfig
    summary = "tiles of 128 tokens and more, weights times their scales as they are decoded, on H100 and H200"

    def illegal_format(self, format: WeightFormat) -> str | None:  # noqa: A002 - the field's word
        return illegal_one_level(format)

    def illegal_weight(self, problem: Problem) -> str | None:
        if reason := super().illegal_weight(problem):
            return reason
        if problem.batch_invariant:
            return "batch_invariant: a tile's place in the grid decides how its columns are cut"
        return None

    def illegal_config(self, config: KernelConfig, problem: Problem) -> str | None:
        assert isinstance(config, LargeConfig)
        return illegal_config(config, problem.format) or unproven_tile(config, problem)

    def slower(self, problem: Problem) -> str | None:
        return f"m={problem.m}: it is faster from {FEWEST_TOKENS} tokens on" if problem.m < FEWEST_TOKENS else None

    def default(self, problem: Problem) -> LargeConfig:
        return choose_config(problem)

    def tokens(self, problem: Problem) -> int:
        return next((tokens for tokens in TABLE_TOKENS if problem.m <= tokens), TABLE_TOKENS[-1])

    def prepare(self, config: KernelConfig, weight: PackedWeight, x_dtype: torch.dtype, bias: bool) -> Prepared:
        assert isinstance(config, LargeConfig)
        return Prepared(config, weight, x_dtype, bias)


FAMILY = Large()
