"""Which kernel: choice, explanation, and lowbit.matmul itself."""

from lowbit.dispatch.choose import SlowPathWarning, choose, explain, pack, preferred_layout
from lowbit.dispatch.matmul import matmul

__all__ = ["SlowPathWarning", "choose", "explain", "matmul", "pack", "preferred_layout"]
