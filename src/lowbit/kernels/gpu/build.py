"""A plan -> machine code for sm_90a. Needs Triton, but no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lowbit.errors import UnsupportedConfig
from lowbit.formats import SCALE_TYPES
from lowbit.kernels.gpu.dequantize_plan import DequantizePlan
from lowbit.kernels.gpu.large_plan import LargePlan
from lowbit.kernels.gpu.plan import Plan

MOST_PLANES = 3  # of a code: 7 bits are 4 + 2 + 1


@dataclass(frozen=True, eq=False)
class Binary:
    """Machine code and what a launch has to know about it."""

    name: str
    cubin: bytes
    smem_bytes: int
    threads: int
    ptx: str
    maps: tuple[dict[str, Any], ...]  # of words of each plane, scales, zeros, super-scales, x: block_size, elem_type


def rows_box(blocks: int, groups: int, bits: int) -> list[int]:
    """The box of scales or zeros fetched with a unit: lines of 16 bytes, at least eight of them."""
    return [blocks, groups, bits // 2, 128 // bits]


def tile_type(kind: str, shape: list[int], bits: int) -> str:
    """The type of a tensor map whose boxes have a shape."""
    from lowbit.kernels.gpu.compat import gl

    swizzle = 128 if shape[-1] * bits >= 1024 else 0
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(shape))
    return f"tensordesc<{kind}[{','.join(map(str, shape))}],{layout!r}>"


def values_type(name: str, blocks: int, groups: int) -> str:
    """The type of a map of rows of scales or zeros that are stored as `name`, a key of SCALE_TYPES."""
    bits = 8 * SCALE_TYPES[name].storage.itemsize
    return tile_type("u8" if bits == 8 else name, rows_box(blocks, groups, bits), bits)


@lru_cache(maxsize=512)
def build(plan: Plan, x_type: str, maxnreg: int) -> Binary:
    """Compile, or take from Triton's cache on disk. x_type: "fp16" or "bf16".

    The kind of plan says which kernel. Raises UnsupportedConfig where Triton is missing.
    """
    try:
        from lowbit.kernels.gpu import compat, dequantize_body, hopper_body, large_body
    except ImportError as error:
        raise UnsupportedConfig(
            f"hopper needs Triton 3.6 or later ({error}): install torch for CUDA, which brings it"
        ) from error
    blocks = plan.BLOCKS * plan.PARTS if isinstance(plan, LargePlan) else plan.BLOCKS

    planes = {
        f"w{i}_desc": tile_type("i32", [blocks, plan.BK // 16 * bits, 32], 32) for i, bits in enumerate(plan.PLANES)
    }
    absent = {f"w{i}_desc": None for i in range(len(plan.PLANES), MOST_PLANES)}

    supers = {}
    if plan.ROWS != "none":
        supers["u_desc"] = values_type(plan.ROWS, blocks, plan.ROWS_GROUPS)
        if plan.ZERO == "minimum":
            supers["v_desc"] = supers["u_desc"]
    of_weight = {
        **planes,
        "s_desc": values_type(plan.SCALE, blocks, plan.SCALE_GROUPS),
        "z_desc": values_type(plan.SCALE if plan.ZERO in ("float", "minimum") else "u4", blocks, plan.ZERO_GROUPS),
        **supers,
    }
    x = {"x_desc": tile_type(x_type, [plan.BM, plan.BK], 16)}
    results = {"y_ptr": f"*{x_type}", "bias_ptr": f"*{x_type}", "partial_ptr": "*i32"}
    if isinstance(plan, LargePlan):
        y = {"y_desc": tile_type(x_type, [plan.BM, plan.BLOCKS * 64], 16)}
        numbers = ("m", "n", "k_tiles", "m_tiles", "tiles", "band", "striped", "base", "more")
        function = large_body.matmul
        rest = x | y | results | {"super_ptr": "*fp32", "lift_ptr": "*fp32"} | dict.fromkeys(numbers, "i32")
    elif isinstance(plan, DequantizePlan):
        w = {"w_desc": tile_type(x_type, [plan.BLOCKS * 64, plan.BK], 16)}
        function = dequantize_body.dequantize
        rest = w | {"super_ptr": "*fp32"} | dict.fromkeys(("first", "k_tiles"), "i32")
    else:
        function = hopper_body.matmul
        absent |= {name: None for name in ("u_desc", "v_desc") if name not in supers}
        ints = dict.fromkeys(("m", "n", "k_tiles", "m_tiles", "base", "more", "grain"), "i32")
        rest = x | results | {"super_ptr": "*fp32"} | ints
    kernel = compat.compile_kernel(
        function,
        of_weight | rest,
        {**absent, "P": compat.Constants(plan), "num_warps": plan.WARPS},
        90,
        num_warps=plan.WARPS,
        maxnreg=maxnreg,
    )
    meta = kernel.metadata
    kinds = tuple(compat.map_kind(kind) for kind in meta.tensordesc_meta)
    return Binary(meta.name, kernel.asm["cubin"], meta.shared, 32 * meta.num_warps, kernel.asm["ptx"], kinds)
