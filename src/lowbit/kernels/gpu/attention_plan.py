"""What an attention kernel is compiled for: how keys and values lie, the problem, the tile. Constants of the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowbit.formats.kv import KVFormat
from lowbit.kernels.attention import AttentionProblem, DecodeConfig
from lowbit.kernels.gpu import ptx

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Tile:
    """The tile of one program and how it runs."""

    block_m: int  # rows of queries times heads of a key head; a power of two, 16 or more
    block_n: int  # keys; with the streaming kernel, of a warp
    warps: int
    stages: int  # blocks of keys on their way
    maxnreg: int | None = None


@dataclass(frozen=True)
class GpuDecode(DecodeConfig):
    """How a decode runs; units are programs of a multiprocessor."""

    streamed: bool  # by attention_stream, else by attention_body
    keys: int  # Tile.block_n
    warps: int
    stages: int
    maxnreg: int = 0  # 0: as many as the compiler takes


@dataclass(frozen=True)
class Side:
    """Keys or values. Upper case, because kernels read it."""

    BITS: int
    PARTS: int  # values in a 16-bit word
    SCALE: str  # KVFormat.scale
    OFFSET: bool
    FLOAT: bool  # e4m3
    ZERO: float  # 1024 + the code of zero: what magic numbers have subtracted
    GROUP: int  # values under one scale, and of the Hadamard transform
    GROUPS: int  # of a row
    GROUP_WORDS: int  # words under one scale
    HADAMARD: bool
    WORDS: int  # of a row
    WORDS_PADDED: int
    SCALED: bool  # decoding multiplies by scales
    GROUPED: bool  # scales of groups meet products and weights instead: attention_operands.py
    RAW: tuple[bool, ...]  # parts that decoding leaves on their GROUND
    GROUND: tuple[float, ...]  # of each part, with the code of zero: 1024 + it, in odd parts of four bits 64 + it
    SCALE_ROW: int  # scales of eight keys that lie side by side, 16 bits each
    ASM: str  # "" does without inline assembly
    CONSTRAINTS: str


@dataclass(frozen=True)
class Plan:
    """The rest."""

    HEADS: int
    KV_HEADS: int
    GROUPS: int  # query heads of a key head
    GROUPS_PADDED: int
    HEAD_DIM: int
    WIDTH: int  # width_of(HEAD_DIM)
    PAGE: int  # tokens
    PAGE_BITS: int  # PAGE is 2 to this
    FACTOR: float  # of q . k
    WINDOW: int  # 0: none
    SOFT_CAP: float  # 0: none
    ALIBI: bool
    SINKS: bool
    BLOCK_M: int
    GROUPED: bool  # rows of products are pairs of a group and a query head
    ROWS: int  # query heads of a product: BLOCK_M, or with GROUPED its share of a group
    BLOCK_N: int
    WARPS: int
    STAGES: int
    ITEMS: str  # "all"; "wide", the first counts[3]; "narrow", the others
    BACKWARD: bool  # from the last item to the first
    MERGED: int  # partial results added up at a time
    DEPENDENT: bool  # started while the kernel before it ends: compute capability 9.0 and up
    EXCHANGES: tuple[str, ...]  # assembly: the value of the lane 1, 2, 4 away; () does without
    PAIRS: str  # assembly of a product of two pairs of fp16; "" does without
    AWAIT: str = ptx.AWAIT[0]
    AWAIT_CONSTRAINTS: str = ptx.AWAIT[1]
    AWAIT_ONE: str = ptx.AWAIT_ONE[0]
    AWAIT_ONE_CONSTRAINTS: str = ptx.AWAIT_ONE[1]
    EMPTY: int = ptx.EMPTY


@dataclass(frozen=True)
class HeadShape:
    """What appending has to know of the heads."""

    HEADS: int
    KV_HEADS: int
    HEAD_DIM: int
    WIDTH: int  # width_of(HEAD_DIM)
    PAGE: int
    DEPENDENT: bool


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def width_of(head_dim: int) -> int:
    """A head as kernels see it: a power of two, 64 or more, so that the words of four bits fill a product of 16."""
    return max(64, padded(head_dim))


def groups_in_rows(problem: AttentionProblem) -> int:
    """Groups of the 16 rows of a product, where each has scales for all query heads of a key head; else 1."""
    for kept in (problem.key, problem.value):
        if kept.scale != "group" or kept.offset:
            return 1
    groups = problem.head_dim // problem.key.group_size(problem.head_dim)
    return groups if groups in (2, 4, 8) and problem.groups <= 16 // groups else 1


def side_of(
    format: KVFormat,  # noqa: A002
    head_dim: int,
    capability: int,  # 90 for 9.0; 0 for the interpreter, which knows no assembly
    streamed: bool = False,  # for attention_stream.py
    grouped: bool = False,  # there, with more than one group in the rows of a product
    keys: bool = False,
) -> Side:
    """Keys or values of a format, as a kernel reads them."""
    parts = 16 // format.bits
    group = format.group_size(head_dim)
    is_float = format.scale in ("token", "head")
    middle = 0 if format.offset else 2 ** (format.bits - 1)
    # The scale of a token may meet scores and weights instead of its values.
    scaled = (format.scale == "group" and not grouped) or (format.scale == "token" and not streamed)
    groups = head_dim // group
    # Products of all keys come with their own ground; sums over many keys shall not stand on much more than they are.
    raw = tuple(range(parts)) if grouped and (keys or format.bits == 8) else (1, 3) if grouped else ()
    asm, constraints = "", ""
    if capability and parts > 1:
        asm, constraints = ptx.cache_decode(
            format.bits, is_float, 1024 + middle, scaled, format.offset, capability >= 89, raw
        )
    # The scale of a whole row covers the padding too: as many groups as lie in memory.
    width = width_of(head_dim)
    return Side(
        BITS=format.bits,
        PARTS=parts,
        SCALE=format.scale,
        OFFSET=format.offset,
        FLOAT=is_float,
        ZERO=1024.0 + middle,
        GROUP=group,
        GROUPS=groups,
        GROUP_WORDS=(width if groups == 1 else group) // parts,
        HADAMARD=format.hadamard,
        WORDS=head_dim // parts,
        WORDS_PADDED=width // parts,
        SCALED=scaled,
        GROUPED=grouped,
        RAW=tuple(j in raw for j in range(parts)),
        GROUND=tuple(middle + (64.0 if format.bits == 4 and j % 2 else 1024.0) for j in range(parts)),
        SCALE_ROW=8 * groups * (1 + format.offset) if format.scale in ("token", "group") else 0,
        ASM=asm,
        CONSTRAINTS=constraints,
    )


def plan_of(problem: AttentionProblem, tile: Tile, capability: int, items: str, groups: int = 1) -> Plan:
    """The constants of a legal problem and a tile. items: as in Plan; groups: of groups_in_rows, while streaming."""
    return Plan(
        HEADS=problem.heads,
        KV_HEADS=problem.kv_heads,
        GROUPS=problem.groups,
        GROUPS_PADDED=padded(problem.groups),
        HEAD_DIM=problem.head_dim,
        WIDTH=width_of(problem.head_dim),
        PAGE=problem.page_size,
        PAGE_BITS=problem.page_size.bit_length() - 1,
        FACTOR=problem.scale_value,
        WINDOW=problem.window or 0,
        SOFT_CAP=problem.soft_cap or 0.0,
        ALIBI=problem.alibi,
        SINKS=problem.sinks,
        BLOCK_M=tile.block_m,
        GROUPED=groups > 1,
        ROWS=tile.block_m // groups,
        BLOCK_N=tile.block_n,
        WARPS=tile.warps,
        STAGES=tile.stages,
        ITEMS=items,
        BACKWARD=items == "wide",
        MERGED=min(16, max(4, 2048 * tile.warps // (padded(problem.groups) * width_of(problem.head_dim)))),
        DEPENDENT=capability >= 90,
        EXCHANGES=ptx.EXCHANGES if capability else (),
        PAIRS="mul.rn.f16x2 $0, $1, $2;" if capability else "",
    )
