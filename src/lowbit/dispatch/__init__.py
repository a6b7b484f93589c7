"""Which kernel: choice, explanation, and lowbit.matmul itself."""

from lowbit.dispatch.choose import choose, explain, pack, preferred_layout
from lowbit.dispatch.matmul import matmul
from lowbit.errors import SlowPathWarning

__all__ = ["SlowPathWarning", "choose", "explain", "matmul", "pack", "preferred_layout"]
