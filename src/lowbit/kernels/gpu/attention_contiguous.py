"""Long prompts on a GPU: the pages of a request are gathered into contiguous 16-bit memory, which torch attends over.

    gather     one launch: codes to numbers in the queries' dtype, the Hadamard transform taken back
    attend     torch's scaled_dot_product_attention, causal; on an H200 that is cuDNN's kernel

Which prompts: as measured on an H200 (docs/attention.md). cuDNN compiles for each number of tokens it meets, 30 ms of
host time, so prompts are padded to multiples of STEP with zeros, which no query sees. Room is set aside by the plan,
ROOM_BYTES at most; a request that needs more is done some key heads at a time. The numbers are those of the pages, so
what a prompt sees is what later tokens see.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.kernels.attention import AttentionProblem, Gathering, Prompt, Work
from lowbit.kernels.gpu import attention_launch as launches
from lowbit.kernels.gpu.attention_launch import scales_of, side_kinds, words_of
from lowbit.kernels.gpu.attention_plan import HeadShape, side_of, width_of
from lowbit.packing.paged import PagedTensor

ROOM_BYTES = 64 << 20
LEAST_ROWS = 2048  # new tokens
STEP = 128  # tokens
MOST_HEAD_DIM = 128
CAPABILITIES = (0, 90)  # 0: the interpreter
BLOCK_TOKENS, BLOCK_NUMBERS = 64, 8192  # of a key head that a program takes, at most


class GpuGathering(Gathering):
    def reason_against(self, problem: AttentionProblem, rows: int, length: int) -> str | None:
        options = {
            "a sliding window": problem.window is not None, "a soft cap": problem.soft_cap is not None,
            "sinks": problem.sinks, "ALiBi": problem.alibi,
        }  # fmt: skip
        if asked := [name for name, has in options.items() if has]:
            return f"{' and '.join(asked)}: torch's attention has no such option"
        if rows < LEAST_ROWS:
            return f"{rows} new tokens: worth it from {LEAST_ROWS} on"
        if rows < length:
            return f"{rows} new of {length} tokens: torch's kernels for continued prompts are no faster"
        if problem.head_dim > MOST_HEAD_DIM:
            return f"head_dim={problem.head_dim}: measured up to {MOST_HEAD_DIM}"
        if (capability := launches.capability(torch.device(problem.device))) not in CAPABILITIES:
            return f"capability {capability / 10}: measured on 9.0"
        if _padded(length) * _token_bytes(problem) > ROOM_BYTES:
            return f"{length} tokens: one key head is more than {ROOM_BYTES >> 20} MiB"
        return None

    def room(self, problem: AttentionProblem, max_rows: int, max_length: int) -> int:
        tokens = min(max_rows, max_length, ROOM_BYTES // _token_bytes(problem) // STEP * STEP)
        if self.reason_against(problem, tokens, tokens):
            return 0
        return min(ROOM_BYTES, problem.kv_heads * _padded(tokens) * _token_bytes(problem)) // problem.dtype.itemsize

    def run(
        self,
        problem: AttentionProblem,
        work: Work,
        prompt: Prompt,
        query: Tensor,
        key: PagedTensor,
        value: PagedTensor,
        space: Tensor,
    ) -> Tensor:
        own = query[prompt.row : prompt.row + prompt.rows]
        if rest := _padded(prompt.rows) - prompt.rows:
            own = F.pad(own, (0, 0, 0, 0, 0, rest))
        own = own.transpose(0, 1)[None]  # [1, heads, padded rows, head_dim]
        at_once = min(problem.kv_heads, space.nbytes // _token_bytes(problem) // _padded(prompt.length))
        outs = []
        for first in range(0, problem.kv_heads, at_once):
            heads = range(first, min(first + at_once, problem.kv_heads))
            keys, values = self._gather(problem, work, prompt, (key, value), space, heads)
            some = own[:, heads.start * problem.groups : heads.stop * problem.groups]
            outs.append(
                F.scaled_dot_product_attention(
                    some, keys, values, is_causal=True, scale=problem.scale, enable_gqa=problem.groups > 1
                )
            )
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
        return out[0, :, : prompt.rows].transpose(0, 1).contiguous()

    def _gather(
        self,
        problem: AttentionProblem,
        work: Work,
        prompt: Prompt,
        sides: tuple[PagedTensor, PagedTensor],
        space: Tensor,
        heads: range,
    ) -> tuple[Tensor, Tensor]:
        """-> keys and values of some key heads, [1, heads, padded length, head_dim] each, in `space`."""
        tokens = _padded(prompt.length)
        shape = (1, len(heads), tokens, problem.head_dim)
        size = len(heads) * tokens * problem.head_dim
        keys, values = space[:size].view(shape), space[size : 2 * size].view(shape)
        cached = [tensor for side in sides for tensor in (words_of(side), scales_of(side))]
        numbers = (prompt.table, work.limits.pages, heads.start, len(heads), prompt.length, tokens)
        kernel = gather_kernel(problem, launches.capability(space.device))
        programs = -(-tokens // _block(problem)) * len(heads)
        launches.launch(kernel, programs, (*cached, keys, values, work.page_table, *numbers))
        return keys, values


@lru_cache(maxsize=256)
def gather_kernel(problem: AttentionProblem, target: int) -> launches.Kernel:
    """What brings pages together. target: compute capability, 90 for 9.0."""
    shape = HeadShape(
        problem.heads, problem.kv_heads, problem.head_dim, width_of(problem.head_dim), problem.page_size, target >= 90
    )
    sides = (side_of(kept, problem.head_dim, target) for kept in (problem.key, problem.value))
    out = launches.TYPES[problem.dtype]
    kinds = (*side_kinds(problem.key), *side_kinds(problem.value), out, out, "*i32", *["i32"] * 6)
    constants = (("BLOCK", _block(problem)), *zip(("K", "V"), sides, strict=True), ("P", shape))
    return launches.Kernel("attention_gather", "gather", kinds, constants, target, 4)


def _block(problem: AttentionProblem) -> int:
    """Tokens of a program."""
    return min(BLOCK_TOKENS, BLOCK_NUMBERS // width_of(problem.head_dim))


def _padded(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def _token_bytes(problem: AttentionProblem) -> int:
    """Of the key and the value of one head."""
    return 2 * problem.head_dim * problem.dtype.itemsize
