"""A plan of sections -> machine code for sm_90a. Needs Triton, but no GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from lowbit.kernels.gpu.build import Binary, tile_type, values_type
from lowbit.kernels.gpu.sections_plan import SectionsPlan


@lru_cache(maxsize=128)
def build_sections(plan: SectionsPlan, x_type: str, maxnreg: int) -> Binary:
    """Compile, or take from Triton's cache on disk. x_type: "fp16" or "bf16".

    The binary's maps are those of the words of every section, plane by plane, then of scales, super-scales and x.
    """
    from lowbit.kernels.gpu import compat, sections_body

    count = len(plan.SECTIONS)
    words = tuple(tuple(tile_type("i32", [1, p.BK // 16 * bits, 32], 32) for bits in p.PLANES) for p in plan.SECTIONS)
    signature: dict[str, Any] = {
        "w_descs": words,
        "s_descs": tuple(values_type(p.SCALE, 1, p.SCALE_GROUPS) for p in plan.SECTIONS),
        "u_descs": tuple(values_type(p.ROWS, 1, p.ROWS_GROUPS) for p in plan.SECTIONS) if plan.ROWS != "none" else None,
        "x_descs": tuple(tile_type(x_type, [p.BM, p.BK], 16) for p in plan.SECTIONS),
        "y_ptr": f"*{x_type}",
        "bias_ptr": f"*{x_type}",
        "partial_ptr": "*i32",
        "super_ptr": "*fp32",
        **dict.fromkeys(("m", "n", "k_cost", "m_tiles", "base", "more", "grain"), "i32"),
        "starts": ("i32",) * (count + 1),
        "columns": ("i32",) * count,
    }
    absent = {name: None for name, kind in signature.items() if kind is None}
    constants = {**absent, "P": compat.Constants(plan), "num_warps": plan.WARPS}
    types = {name: kind for name, kind in signature.items() if kind is not None}
    kernel = compat.compile_kernel(sections_body.matmul, types, constants, 90, num_warps=plan.WARPS, maxnreg=maxnreg)
    meta = kernel.metadata
    kinds = tuple(compat.map_kind(kind) for kind in meta.tensordesc_meta)
    return Binary(meta.name, kernel.asm["cubin"], meta.shared, 32 * meta.num_warps, kernel.asm["ptx"], kinds)
