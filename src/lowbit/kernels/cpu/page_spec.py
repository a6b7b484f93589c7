"""What attention over pages is compiled for, and what its kernel is handed: see pages.py."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats.kv import KVFormat

PAD = 16  # floats behind the scores of a head: a multiple of every vector
FIELDS = (
    "query", "row", "table", "start", "end", "position", "page_table", "pages", "keys", "key_scales", "values",
    "value_scales", "slopes", "scores", "room", "out", "top", "total",
)  # fmt: skip
NEW_FIELDS = ("key", "value", "slots", "cos", "sin", "query_norm", "key_norm", "eps")  # with `appends`


@dataclass(frozen=True)
class PageSpec:
    """What a kernel is written for."""

    head_dim: int
    kv_heads: int
    groups: int  # query heads per key head
    page_size: int
    key: KVFormat
    value: KVFormat
    query: str  # storage type of queries: fp32, fp16, bf16
    scale: float  # of query . key
    window: int = 0  # keys a query sees, itself included; 0: all
    soft_cap: float = 0.0  # 0: none
    alibi: bool = False
    most_keys: int = 0  # of an item: scores lie on the stack; 0: any number, scores lie in memory that is given
    appends: bool = False  # queries are a new token's projections, whose key and value are stored here
    fixed: bool = False  # queries in 16-bit fixed point where page_products.py serves the keys
    norms: bool = False  # with `appends`: of queries and keys

    @property
    def room(self) -> int:
        """Floats for the scores of a head, with `most_keys`."""
        return -(-self.most_keys // PAD) * PAD + PAD

    @property
    def fields(self) -> tuple[str, ...]:
        """Of the arguments, in order."""
        return FIELDS + NEW_FIELDS if self.appends else FIELDS
