"""Attention over a paged cache on a GPU: which kernel, and the launches. A backend of kernels/attention.

    decode      one row a request: attention_stream.attend, which also merges rows whose keys were cut; what it does
                not serve, attention_body.attend and attention_body.merge
    prefill     many rows: attention_body.attend with a larger tile, so that `wgmma` (9.0) or `mma` multiplies; long
                prompts: attention_contiguous.py
    append      attention_append.append

Nothing here waits for the device or allocates but `append`'s queries, so all of it can be captured in CUDA graphs.
With TRITON_INTERPRET=1 the same kernels run on the CPU, which is how they are tested without a GPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lowbit.kernels.attention import (
    AttentionBackend,
    AttentionProblem,
    DecodeConfig,
    NewTokens,
    Operands,
    Shape,
    Work,
    Workspace,
)
from lowbit.kernels.gpu import attention_launch as launches
from lowbit.kernels.gpu import attention_tiles as tiles
from lowbit.kernels.gpu.attention_contiguous import GpuGathering
from lowbit.kernels.gpu.attention_launch import scales_of, side_kinds, words_of
from lowbit.kernels.gpu.attention_plan import (
    TYPES,
    GpuDecode,
    HeadShape,
    Tile,
    groups_in_rows,
    plan_of,
    side_of,
    width_of,
)
from lowbit.packing.paged import PagedTensor

MERGE_KEYS = 256  # keys of an item that take as long as merging a row: as measured on an H200
APPENDED = 8  # tokens of a program when there are many


def mixed_widths(problem: AttentionProblem, target: int) -> str | None:
    """Why a tile of many rows does not serve keys and values of different widths, or None.

    On an H200 the plain kernel with such a tile (`wgmma`) gave NaN or read outside the cache for int8 keys and int4
    values with heads of 32, 80 and 128, where the same source is right in Triton's interpreter, in one width, and with
    tiles of 16 rows. The cause is not known: tests/gpu/test_paged_attention.py has the cases for whoever looks for it.
    """
    if target != 90 or problem.key.bits == problem.value.bits:
        return None
    return f"keys in {problem.key} and values in {problem.value}: on capability 9.0 items have one row each"


class GpuAttention(AttentionBackend):
    name = "gpu"
    config_type = GpuDecode
    gathering = GpuGathering()

    def legal(self, problem: AttentionProblem) -> str | None:
        if problem.device != "cuda" and not launches.interpreted():
            return f"the problem is on {problem.device}"
        if problem.dtype not in TYPES:
            return f"queries in {problem.dtype}: fp16 or bf16"
        for name, kept in (("keys", problem.key), ("values", problem.value)):
            if kept.bits == 32:
                return f"{name} in {kept}: 16 bits or fewer"
            if kept.name == "bf16" and problem.dtype != torch.bfloat16:
                return f"{name} in bf16 with queries in {problem.dtype}: bf16 queries, or a cache in fp16"
        return None

    def decode_config(self, problem: AttentionProblem, requests: int | None = None) -> GpuDecode:
        device = problem.device
        few = requests is not None and requests * problem.kv_heads <= launches.multiprocessors(device)
        if tile := tiles.stream_tile(problem, launches.capability(device), few):
            return GpuDecode(1, tile.block_n * tile.warps, True, tile.block_n, tile.warps, tile.stages)
        tile = tiles.decode_tile(problem)
        units = 1 if max(problem.key.bits, problem.value.bits) <= 8 else 2
        return GpuDecode(units, 64, False, tile.block_n, tile.warps, tile.stages)

    def illegal_config(self, config: DecodeConfig, problem: AttentionProblem) -> str | None:
        assert isinstance(config, GpuDecode)
        return super().illegal_config(config, problem) or tiles.illegal_decode(
            config, problem, launches.capability(problem.device)
        )

    def single_rows(self, problem: AttentionProblem) -> str | None:
        return mixed_widths(problem, launches.capability(torch.device(problem.device)))

    def shape(self, problem: AttentionProblem, prefill: bool, config: DecodeConfig | None = None) -> Shape:
        if prefill and self.single_rows(problem):
            return Shape(1, 1, 64)
        if prefill:
            return Shape(tiles.LARGEST_TILE // problem.groups, 1, 64)
        config = config or self.decode_config(problem)
        at_once = config.units * launches.multiprocessors(problem.device)
        return Shape(1, max(1, at_once // problem.kv_heads), config.least_keys, MERGE_KEYS)

    def run(
        self,
        problem: AttentionProblem,
        work: Work,
        operands: Operands,
        workspace: Workspace,
        config: DecodeConfig | None = None,
    ) -> None:
        tile = tiles.decode_tile(problem)
        if work.tile_rows == 1:
            config = config or self.decode_config(problem)
            assert isinstance(config, GpuDecode)
            tile = tiles.tile_of(config, problem)
            if config.streamed:
                kernel = stream_kernel(problem, tile, launches.capability(operands.query.device))
                arguments = stream_arguments(work, operands, workspace)
                launches.launch(kernel, work.limits.items * problem.kv_heads, arguments)
                return
            self._attend(problem, work, operands, workspace, tile, "all")
        else:
            wide = tiles.prefill_tile(problem, launches.capability(operands.query.device))
            self._attend(problem, work, operands, workspace, wide, "wide")
            self._attend(problem, work, operands, workspace, tile, "narrow")
        self._merge(problem, work, operands, workspace, tile)

    def _attend(
        self, problem: AttentionProblem, work: Work, operands: Operands, workspace: Workspace, tile: Tile, items: str
    ) -> None:
        kernel = attend_kernel(problem, tile, items, launches.capability(operands.query.device))
        launches.launch(kernel, work.limits.items * problem.kv_heads, _arguments(work, operands, workspace))

    def _merge(
        self, problem: AttentionProblem, work: Work, operands: Operands, workspace: Workspace, tile: Tile
    ) -> None:
        device = operands.query.device
        arguments = (
            workspace.out, workspace.lse, _or(operands.sinks, workspace.lse), operands.out, work.counts,
            work.merge_start, work.merge_slots,
        )  # fmt: skip
        programs = min(work.limits.rows * problem.kv_heads, 4 * launches.multiprocessors(device))
        launches.launch(merge_kernel(problem, tile, launches.capability(device)), programs, arguments)

    def append(self, new: NewTokens, key: PagedTensor, value: PagedTensor) -> Tensor:
        tokens, heads, head_dim = new.query.shape
        out = torch.empty(tokens, heads, head_dim, dtype=new.query.dtype, device=new.query.device)
        if not tokens:
            return out
        query, keys, values = (
            x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (new.query, new.key, new.value)
        )
        eps = _EPS.get((new.eps, out.device))
        if eps is None:
            eps = _EPS[new.eps, out.device] = torch.tensor([new.eps], device=out.device)
        arguments: tuple[Tensor | int, ...] = (
            query, keys, values, new.slots, *(_or(x, query) for x in (new.cos, new.sin)),
            *(_or(x, query) for x in (new.query_norm, new.key_norm)), eps, out, key.codes, scales_of(key), value.codes,
            scales_of(value), tokens, query.stride(0), keys.stride(0), values.stride(0),
        )  # fmt: skip
        kernel, block = append_kernel(new, key, value, launches.capability(out.device))
        launches.launch(kernel, -(-tokens // block) * (heads + 2 * key.kv_heads), arguments)
        return out


def decode_kernels(config: GpuDecode, problem: AttentionProblem, target: int) -> list[launches.Kernel]:
    """What a decode launches, as it is compiled."""
    tile = tiles.tile_of(config, problem)
    if config.streamed:
        return [stream_kernel(problem, tile, target)]
    return [attend_kernel(problem, tile, "all", target), merge_kernel(problem, tile, target)]


@lru_cache(maxsize=256)
def attend_kernel(problem: AttentionProblem, tile: Tile, items: str, target: int) -> launches.Kernel:
    """The kernel of a legal problem. items: as in Plan; target: compute capability, 90 for 9.0."""
    key, value = (side_of(kept, problem.head_dim, target) for kept in (problem.key, problem.value))
    query = launches.TYPES[problem.dtype]
    kinds = (
        query,
        *side_kinds(problem.key),
        *side_kinds(problem.value),
        query,
        *["*fp32"] * 4,
        *["*i32"] * 9,
        "i32",
    )
    constants = (("K", key), ("V", value), ("P", plan_of(problem, tile, target, items)))
    return launches.Kernel("attention_body", "attend", kinds, constants, target, tile.warps, tile.maxnreg)


@lru_cache(maxsize=256)
def stream_kernel(problem: AttentionProblem, tile: Tile, target: int) -> launches.Kernel:
    """The same for one row an item, merged in the same launch: attention_stream.py."""
    groups = groups_in_rows(problem)
    key, value = (
        side_of(kept, problem.head_dim, target, streamed=True, grouped=groups > 1, keys=kept_is_key)
        for kept, kept_is_key in ((problem.key, True), (problem.value, False))
    )
    kinds = attend_kernel(problem, tile, "all", target).kinds
    kinds = (*kinds[:-1], "*i32", kinds[-1])
    constants = (("K", key), ("V", value), ("P", plan_of(problem, tile, target, "all", groups)))
    return launches.Kernel("attention_stream", "attend", kinds, constants, target, tile.warps, tile.maxnreg)


@lru_cache(maxsize=256)
def merge_kernel(problem: AttentionProblem, tile: Tile, target: int) -> launches.Kernel:
    """What adds up partial results."""
    constants = (
        ("V", side_of(problem.value, problem.head_dim, target)), ("P", plan_of(problem, tile, target, "all")),
    )  # fmt: skip
    kinds = (*["*fp32"] * 3, launches.TYPES[problem.dtype], *["*i32"] * 3)
    return launches.Kernel("attention_body", "merge", kinds, constants, target, 4)


def append_kernel(new: NewTokens, key: PagedTensor, value: PagedTensor, target: int) -> tuple[launches.Kernel, int]:
    """The kernel that stores new tokens, and how many of them a program takes."""
    tokens, heads, head_dim = new.query.shape
    block = 1 if tokens < 8 * APPENDED else APPENDED
    shape = HeadShape(heads, key.kv_heads, head_dim, width_of(head_dim), key.page_size, target >= 90)
    constants = (
        ("ROPE", new.cos is not None), ("QUERY_NORM", new.query_norm is not None),
        ("KEY_NORM", new.key_norm is not None), ("BLOCK", block), ("K", side_of(key.format, head_dim, target)),
        ("V", side_of(value.format, head_dim, target)), ("P", shape),
    )  # fmt: skip

    def kind(x: Tensor | None, other: Tensor) -> str:
        return launches.TYPES[_or(x, other).dtype]

    query = new.query
    kinds = (
        *(kind(x, x) for x in (query, new.key, new.value, new.slots)),
        *(kind(x, query) for x in (new.cos, new.sin, new.query_norm, new.key_norm)), "*fp32", kind(query, query),
        *(kind(x, x) for x in (key.codes, scales_of(key), value.codes, scales_of(value))), *["i32"] * 4,
    )  # fmt: skip
    return launches.Kernel("attention_append", "append", kinds, constants, target, 1, fusion=False), block


_EPS: dict[tuple[float, torch.device], Tensor] = {}  # kernels read it from memory


def _arguments(work: Work, operands: Operands, workspace: Workspace) -> tuple[Tensor | int, ...]:
    """Arguments of attend."""
    key, value, unused = operands.key, operands.value, workspace.lse
    return (
        operands.query, words_of(key), scales_of(key), words_of(value), scales_of(value), operands.out, workspace.out,
        workspace.lse, _or(operands.sinks, unused), _or(operands.slopes, unused), work.counts, work.row, work.rows,
        work.table, work.start, work.end, work.slot, work.position, work.page_table, work.limits.pages,
    )  # fmt: skip


def stream_arguments(work: Work, operands: Operands, workspace: Workspace) -> tuple[Tensor | int, ...]:
    """Arguments of attention_stream.attend."""
    arguments = _arguments(work, operands, workspace)
    return (*arguments[:-1], work.merge_start, arguments[-1])


def _or(given: Tensor | None, unused: Tensor) -> Tensor:
    """A tensor, or another one in the place of an argument that the kernel does not read."""
    return unused if given is None else given


BACKEND = GpuAttention()
