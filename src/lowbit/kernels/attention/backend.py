"""An attention backend: one way to compute attention over pages. One file each; `BACKENDS` in __init__ names them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from lowbit.kernels.attention.problem import AttentionProblem
from lowbit.kernels.attention.work import Work, Workspace
from lowbit.packing.paged import PagedTensor

MOST_UNITS, MOST_LEAST_KEYS = 64, 1 << 16


@dataclass(frozen=True)
class Shape:
    """How a backend wants a step cut."""

    tile_rows: int  # query rows of an item, at most
    target_items: int  # keys are cut until there are about this many items; 1: never
    least_keys: int  # of an item that is one of several, at least; a multiple of 16
    merge_keys: int = 0  # keys of an item that take as long as merging the parts of a row


@dataclass(frozen=True)
class DecodeConfig:
    """How a backend decodes, as far as a measurement may choose. Backends with more to choose derive from it."""

    units: int  # items times key heads, for each multiprocessor or thread: keys are cut until there are about as many
    least_keys: int  # as Shape has it


@dataclass(frozen=True)
class Operands:
    """Tensors of one call, checked already."""

    query: Tensor  # [rows, heads, head_dim] in the problem's dtype, after rope, not Hadamard-transformed
    key: PagedTensor
    value: PagedTensor
    out: Tensor  # [rows, heads, head_dim], to be written for the first counts[1] rows
    sinks: Tensor | None  # [heads] fp32
    slopes: Tensor | None  # [heads] fp32


@dataclass(frozen=True)
class NewTokens:
    """Projections of new tokens, on their way into the cache."""

    query: Tensor  # [tokens, heads, head_dim]
    key: Tensor  # [tokens, kv_heads, head_dim]
    value: Tensor  # [tokens, kv_heads, head_dim]
    slots: Tensor  # [tokens] int64: page * page_size + place; below 0: the token is not stored
    cos: Tensor | None = None  # [tokens, head_dim], both halves alike; None: no rope
    sin: Tensor | None = None
    query_norm: Tensor | None = None  # [head_dim] weight of an RMSNorm before rope
    key_norm: Tensor | None = None
    eps: float = 1e-6


@dataclass(frozen=True)
class Prompt:
    """A request whose pages are gathered before its queries meet them."""

    table: int  # its row of the page table
    row: int  # the first of its query rows
    rows: int
    length: int  # tokens in the cache; the last `rows` of them are those of the queries


class Gathering(ABC):
    """Another way to compute prompts: pages are dequantized into contiguous memory, where other kernels read them."""

    @abstractmethod
    def reason_against(self, problem: AttentionProblem, rows: int, length: int) -> str | None:
        """Why a request with `rows` new of `length` tokens is better left in its pages, or None. The problem is legal.

        It depends on the request alone, so that its bits do not depend on others.
        """

    @abstractmethod
    def room(self, problem: AttentionProblem, max_rows: int, max_length: int) -> int:
        """Numbers in the queries' dtype that run() wants room for; 0: no request of such a plan is gathered."""

    @abstractmethod
    def run(
        self,
        problem: AttentionProblem,
        work: Work,
        prompt: Prompt,
        query: Tensor,  # [rows of the step, heads, head_dim], contiguous, as in Operands
        key: PagedTensor,
        value: PagedTensor,
        space: Tensor,  # [room], of no meaning between runs
    ) -> Tensor:
        """-> out of the prompt's rows [rows, heads, head_dim], contiguous."""


class AttentionBackend(ABC):
    """Backends choose nothing about each other."""

    name: str
    config_type: type[DecodeConfig] = DecodeConfig  # what measurements are read into
    gathering: Gathering | None = None

    @abstractmethod
    def legal(self, problem: AttentionProblem) -> str | None:
        """Why the backend does not serve a problem, or None."""

    def decode_config(self, problem: AttentionProblem, requests: int | None = None) -> DecodeConfig | None:
        """How it decodes a legal problem when nobody has measured; None: there is nothing to choose.

        requests: at most so many; None: many.
        """
        return None

    def illegal_config(self, config: DecodeConfig, problem: AttentionProblem) -> str | None:
        """Why a configuration cannot decode a legal problem, or None."""
        if not 1 <= config.units <= MOST_UNITS:
            return f"units={config.units}: 1 to {MOST_UNITS}"
        if config.least_keys % 64 or not 64 <= config.least_keys <= MOST_LEAST_KEYS:
            return f"least_keys={config.least_keys}: 64 to {MOST_LEAST_KEYS}, in multiples of 64"
        return None

    def single_rows(self, problem: AttentionProblem) -> str | None:
        """Why items of a legal problem have one query row each, prompts' too, or None: they may have several."""
        return None

    @abstractmethod
    def shape(self, problem: AttentionProblem, prefill: bool, config: DecodeConfig | None = None) -> Shape:
        """How it wants steps cut. The problem is legal. config: of a decode; None: decode_config's."""

    @abstractmethod
    def run(
        self,
        problem: AttentionProblem,
        work: Work,
        operands: Operands,
        workspace: Workspace,
        config: DecodeConfig | None = None,  # the one that shape() had
    ) -> None:
        """Work through the items and merge, into operands.out. Does not synchronize or allocate on a GPU."""

    @abstractmethod
    def append(self, new: NewTokens, key: PagedTensor, value: PagedTensor) -> Tensor:
        """Norm and rotate queries and keys, store keys and values; -> query [tokens, heads, head_dim]."""
