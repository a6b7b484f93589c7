"""The record behind a speed measurement: what was timed, beside the memory's floor and torch in the same run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from lowbit.timing import Timing

if TYPE_CHECKING:
    from rich.table import Table


TORCH = frozenset({"float32", "float16", "bfloat16"})  # names in torch_us that are torch's; others are peers


@dataclass(frozen=True)
class Speed(ABC):
    """What every operation's record has. Operations derive from it."""

    format: str
    kernel: str  # what ran: "cpu", "hopper", "reference", ...
    timing: Timing  # of one launch
    floor_us: float  # median of reading as many bytes in the same run
    torch_us: Mapping[str, float]  # median of torch in another dtype: {"float32": ...}; and of peers

    bytes_of: ClassVar[str]  # what nbytes counts, for an axis

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that a launch reads from memory."""

    @property
    @abstractmethod
    def operations(self) -> int:
        """Multiplications and additions of a launch."""

    @property
    @abstractmethod
    def series(self) -> str:
        """A name that results of one sweep share."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, str]:
        """What a sweep goes over, and what it is called."""

    @abstractmethod
    def labels(self) -> dict[str, str]:
        """What tells this result from others: heading of a column and text. Texts of digits stand right."""

    @property
    def gb_per_s(self) -> float:
        """Bytes read, in 1e9 a second."""
        return self.nbytes / self.timing.median_us / 1e3

    @property
    def floor_share(self) -> float:
        """The time that reading takes, over the time the launch takes: 1 is the limit where memory is one."""
        return self.floor_us / self.timing.median_us

    def speed_up(self, name: str) -> float:
        """The time of torch in a dtype, or of a peer, over this one's."""
        return self.torch_us[name] / self.timing.median_us

    def with_floor(self, floor_us: float) -> Self:
        """The same with another floor."""
        return replace(self, floor_us=floor_us)

    def as_dict(self) -> dict[str, Any]:
        """All fields and what follows from them, for JSON."""
        ups = {name: self.speed_up(name) for name in self.torch_us}
        return asdict(self) | {"gb_per_s": self.gb_per_s, "floor_share": self.floor_share, "speed_up": ups}


@dataclass(frozen=True)
class MatmulSpeed(Speed):
    """y[m, n] = x[m, k] @ W[n, k]^T with W in one format."""

    n: int
    k: int
    m: int
    weight_bytes: int  # of W in memory, read once a matmul

    bytes_of = "weight"

    @property
    def nbytes(self) -> int:
        return self.weight_bytes

    @property
    def operations(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def series(self) -> str:
        return f"{self.format} {self.n} x {self.k}"

    @property
    def size(self) -> tuple[int, str]:
        return self.m, "m"

    def labels(self) -> dict[str, str]:
        return {"n x k": f"{self.n} x {self.k}", "m": str(self.m), "format": self.format, "kernel": self.kernel}


@dataclass(frozen=True)
class AttentionSpeed(Speed):
    """Queries of some requests over a paged cache in one format (two as keys/values)."""

    heads: int
    kv_heads: int
    head_dim: int
    requests: int
    length: int  # tokens of each request
    new: int  # of these, the last that have a query
    cache_bytes: int  # of the keys and values of all requests
    sweep: Literal["tokens", "requests"] = "tokens"  # what changes from one result to the next

    bytes_of = "cache"

    @property
    def nbytes(self) -> int:
        return self.cache_bytes

    @property
    def operations(self) -> int:
        seen = self.new * (self.length - self.new) + self.new * (self.new + 1) // 2  # keys that its queries see
        return 4 * self.requests * self.heads * self.head_dim * seen

    @property
    def series(self) -> str:
        rest = f"requests: {self.requests}" if self.sweep == "tokens" else f"tokens: {self.length}"
        return f"{self.format}, {rest}"

    @property
    def size(self) -> tuple[int, str]:
        return (self.length if self.sweep == "tokens" else self.requests), self.sweep

    def over_requests(self) -> AttentionSpeed:
        """The same as part of a sweep over numbers of requests."""
        return replace(self, sweep="requests")

    def labels(self) -> dict[str, str]:
        return {
            "requests": str(self.requests), "tokens": str(self.length), "new": str(self.new), "cache": self.format,
            "kernel": self.kernel,
        }  # fmt: skip


def speed_table(results: Sequence[Speed], title: str) -> Table:
    """One row a result: median time and quartiles, GB/s, share of the floor, speed-up over torch and peers."""
    from rich.table import Table

    names = list(dict.fromkeys(name for r in results for name in r.torch_us))
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading, text in results[0].labels().items() if results else ():
        table.add_column(heading, justify="right" if text.isdigit() else "left")
    for heading in ("us", "quartiles", "GB/s", "of the floor"):
        table.add_column(heading, justify="right")
    for name in names:
        table.add_column(f"over {'torch' if name in TORCH else ''}\n{name}", justify="right")
    for r in results:
        table.add_row(
            *r.labels().values(),
            f"{r.timing.median_us:.1f}",
            f"{r.timing.low_us:.1f} to {r.timing.high_us:.1f}",
            f"{r.gb_per_s:.1f}",
            f"{r.floor_share * 100:.0f} %",
            *(f"{r.speed_up(name):.2f} x" if name in r.torch_us else "" for name in names),
        )
    return table
