"""The portable kernel's plan -> machine code, for any compute capability from 80 on. Needs Triton, but no GPU."""

from __future__ import annotations

from functools import lru_cache

from lowbit.errors import UnsupportedConfig
from lowbit.kernels.gpu.build import Binary
from lowbit.kernels.gpu.portable_plan import PortablePlan


@lru_cache(maxsize=512)
def build_portable(plan: PortablePlan, x_type: str, maxnreg: int, capability: int) -> Binary:
    """Compile, or take from Triton's cache on disk. capability: such as 80; the rest as in build().

    Raises UnsupportedConfig where Triton is missing.
    """
    try:
        from lowbit.kernels.gpu import compat, portable_body
    except ImportError as error:
        raise UnsupportedConfig(
            f"portable needs Triton 3.6 or later ({error}): install torch for CUDA, which brings it"
        ) from error
    scale = f"*{plan.SCALE}" if plan.SCALE_BITS > 8 else "*u8"
    upper = f"*{plan.ROWS}" if plan.ROWS != "none" else "*fp32"
    signature = {
        "w_ptr": "*i32",
        "s_ptr": scale,
        "z_ptr": scale if plan.ZERO in ("float", "minimum") else "*u8",
        "u_ptr": upper,
        "v_ptr": upper,
        "x_ptr": f"*{x_type}",
        "y_ptr": f"*{x_type}",
        "bias_ptr": f"*{x_type}",
        "partial_ptr": "*i32",
        "super_ptr": "*fp32",
        **dict.fromkeys(
            ("m", "n", "k_eighths", "groups", "uppers", "k_tiles", "m_tiles", "base", "more", "grain"), "i32"
        ),
    }
    constants = {"P": compat.Constants(plan), "num_warps": plan.WARPS}
    options = {"num_warps": plan.WARPS, "maxnreg": maxnreg}
    kernel = compat.compile_kernel(portable_body.matmul, signature, constants, capability, **options)
    meta = kernel.metadata
    return Binary(meta.name, kernel.asm["cubin"], meta.shared, 32 * meta.num_warps, kernel.asm["ptx"], ())
