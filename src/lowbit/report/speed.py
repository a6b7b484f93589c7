"""The record behind a speed measurement: what was timed, beside the memory's floor and torch in the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lowbit.timing import Timing

if TYPE_CHECKING:
    from rich.table import Table


TORCH = frozenset({"float32", "float16", "bfloat16"})  # names in torch_us that are torch's; others are peers


@dataclass(frozen=True)
class MatmulSpeed:
    """y[m, n] = x[m, k] @ W[n, k]^T with W in one format."""

    format: str
    kernel: str  # what multiplied: "cpu", "reference", ...
    n: int
    k: int
    m: int
    timing: Timing  # of one matmul
    weight_bytes: int  # of W in memory, read once a matmul
    floor_us: float  # median of reading as many bytes in the same run
    torch_us: Mapping[str, float]  # median of torch with the same W in another dtype: {"float32": ...}; and of peers

    @property
    def gb_per_s(self) -> float:
        """Weights read, in 1e9 bytes a second."""
        return self.weight_bytes / self.timing.median_us / 1e3

    @property
    def floor_share(self) -> float:
        """The time that reading the weights takes, over the time the matmul takes: 1 is the limit for small m."""
        return self.floor_us / self.timing.median_us

    def speed_up(self, dtype: str) -> float:
        """Torch's time in a dtype over this one's."""
        return self.torch_us[dtype] / self.timing.median_us

    def as_dict(self) -> dict[str, Any]:
        """All fields and what follows from them, for JSON."""
        ups = {dtype: self.speed_up(dtype) for dtype in self.torch_us}
        return asdict(self) | {"gb_per_s": self.gb_per_s, "floor_share": self.floor_share, "speed_up": ups}


def speed_table(results: Sequence[MatmulSpeed], title: str) -> Table:
    """One row a result: median time and quartiles, GB/s, share of the floor, speed-up over torch."""
    from rich.table import Table

    dtypes = list(results[0].torch_us) if results else []
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("n x k", "m", "format", "kernel", "us", "quartiles", "GB/s", "of the floor"):
        table.add_column(heading, justify="left" if heading in {"n x k", "format", "kernel"} else "right")
    for dtype in dtypes:
        table.add_column(f"over {'torch' if dtype in TORCH else ''}\n{dtype}", justify="right")
    for r in results:
        table.add_row(
            f"{r.n} x {r.k}",
            str(r.m),
            r.format,
            r.kernel,
            f"{r.timing.median_us:.1f}",
            f"{r.timing.low_us:.1f} to {r.timing.high_us:.1f}",
            f"{r.gb_per_s:.1f}",
            f"{r.floor_share * 100:.0f} %",
            *(f"{r.speed_up(dtype):.2f} x" for dtype in dtypes),
        )
    return table
