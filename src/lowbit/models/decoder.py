"""The decoder: one transformer for every family, its options taken from ModelConfig.

    x = embedding[token]
    for each layer:   x = x + attention(norm(x));   x = x + down(silu(gate(y)) * up(y)) with y = norm(x)
    logits = head(norm(x))

Modules are named as in Hugging Face checkpoints, so a parameter's path is its key in the checkpoint. Linears and the
embedding may be torch's or lowbit.nn's: both are called the same way. A tied model has no `lm_head` module: the head is
the embedding's own memory, also after `.to()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.dispatch import matmul
from lowbit.errors import ModelError
from lowbit.kernels.cpu.chooser import Peak
from lowbit.models.attention import Attention
from lowbit.models.cache import Cache, KVCache
from lowbit.models.config import ModelConfig
from lowbit.models.cpu_step import BACKENDS, cpu_step
from lowbit.models.gpu_step import gpu_step
from lowbit.models.norm import RMSNorm
from lowbit.models.paged import AUTO, CONTIGUOUS, PagedKVCache, cache_formats, plain_pages
from lowbit.models.rope import Rope
from lowbit.nn import Embedding


def relu2(x: Tensor) -> Tensor:
    """The square of what is above zero. In float16 it overflows from 256 on: models with it run in bfloat16."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu2": relu2}


class MLP(nn.Module):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer", 2020): down(act(gate(x)) * up(x)), act mostly silu."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)
        self.ffn_sub_norm = RMSNorm(width, config.norm_eps) if config.sub_norms else nn.Identity()
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(self.ffn_sub_norm(self.activation(self.gate_proj(x)) * self.up_proj(x))))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class Body(nn.Module):
    """Everything under "model." in a checkpoint's keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class NextLogits(NamedTuple):
    """What may follow a sequence."""

    logits: Tensor  # [vocab] float32; the next pass over the same cache may write into it
    peak: Peak | None  # the largest of them and its token, where a step has found it already


class Decoder(nn.Module):
    """Token ids in, logits out. `load_model` builds one from a checkpoint."""

    def __init__(self, config: ModelConfig, head_backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.head_backend = head_backend  # of a tied, quantized head, which is no module of its own
        self.model = Body(config)
        self.lm_head: nn.Module | None = None
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope = Rope(config.rope, config.head_dim)
        self.cache_format = AUTO  # of new caches; see new_cache

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations between layers."""
        return self.model.norm.weight.dtype

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `capacity` tokens of `batch` sequences on the model's device, as `cache_format` says.

        "auto": the model's dtype, in pages where they are faster, else contiguous; "contiguous"; or what cache_formats
        takes: in pages.
        """
        name = self.cache_format
        if name == AUTO:
            name = plain_pages(self.config, self.dtype, self.device) or CONTIGUOUS
        if name == CONTIGUOUS:
            return KVCache(self.config, batch, capacity, self.dtype, self.device)
        return PagedKVCache(self.config, batch, capacity, self.dtype, self.device, cache_formats(name))

    def forward(
        self,
        token_ids: Tensor,  # [batch, time] int64, each below vocab_size
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """-> logits [batch, time, vocab] float32; [batch, 1, vocab] of the last token with `last_only`.

        With a cache, the tokens continue the sequence it holds, and it holds them afterwards. Raises ModelError on
        another shape or dtype, no tokens, or more tokens than the context or the cache has room for.
        """
        if token_ids.ndim != 2 or token_ids.dtype != torch.int64 or token_ids.numel() == 0:
            raise ModelError(
                f"token_ids of shape {list(token_ids.shape)}, {token_ids.dtype}: "
                "must be [batch, time] int64 with at least one token"
            )
        batch, time = token_ids.shape
        if cache is not None:
            cache.require_room(batch, time)
            alone = token_ids.numel() == 1 and token_ids.device.type == "cpu"  # else int() would wait for a device
            if alone and (following := self._cpu_next(int(token_ids), cache)) is not None:
                return following.logits.clone()[None, None]
        elif time > self.config.context_length:
            raise ModelError(
                f"{time} tokens: the model's context is {self.config.context_length}; evaluate shorter windows"
            )
        return self._through_layers(token_ids, cache, last_only)

    def next_logits(self, tokens: Sequence[int], cache: Cache) -> NextLogits:
        """What follows the sequence in the cache and these tokens of it, which the cache holds afterwards.

        As forward() with `last_only`, for a cache of one sequence, without a copy of the logits.
        """
        cache.require_room(1, len(tokens))
        if len(tokens) == 1 and (following := self._cpu_next(tokens[0], cache)) is not None:
            return following
        token_ids = torch.tensor([tokens], device=self.device)
        return NextLogits(self._through_layers(token_ids, cache, last_only=True)[0, -1], None)

    def _through_layers(self, token_ids: Tensor, cache: Cache | None, last_only: bool) -> Tensor:
        """forward() without its checks, layer by layer or by a CUDA graph."""
        time, start = token_ids.shape[1], 0 if cache is None else cache.length
        if cache is not None and (logits := self._gpu_logits(token_ids, cache)) is not None:
            cache.advance(time)
            return logits
        positions = torch.arange(start, start + time, device=token_ids.device)
        cos, sin = self.rope.angles(positions, self.dtype)
        x = self.embed(token_ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, cache)
        if cache is not None:
            cache.advance(time)
        return self.head(self.model.norm(x[:, -1:] if last_only else x))

    def _cpu_next(self, token: int, cache: Cache) -> NextLogits | None:
        """next_logits() of one token by one call of compiled code, or None where that does not serve."""
        if torch.is_grad_enabled() or self.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        table = self.model.embed_tokens
        head = self.lm_head if self.lm_head is not None else table if self.head_backend in BACKENDS else None
        step = cpu_step(self.config, table, self.model.layers, self.model.norm, self.rope, head, cache, self.dtype)
        if step is None:
            return None
        y, peak = step.run(token, cache)
        cache.advance(1)
        return NextLogits(y if step.head is not None else self.head(y.to(self.dtype)), peak)

    def _gpu_logits(self, token_ids: Tensor, cache: Cache) -> Tensor | None:
        """Logits [1, 1, vocab] of one new token by one CUDA graph, or None where that does not serve."""
        if token_ids.numel() != 1 or torch.is_grad_enabled() or self.device.type != "cuda":
            return None
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return None
        step = gpu_step(self.config, self.model.layers, self.model.norm, self.rope, self.head, cache)
        return None if step is None else step.run(self.embed(token_ids), cache.length)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[batch, time] -> [batch, time, hidden] in the model's dtype."""
        return cast(Tensor, self.model.embed_tokens(token_ids)).to(self.dtype)

    def head(self, x: Tensor) -> Tensor:
        """[batch, time, hidden] -> logits [batch, time, vocab] float32."""
        table = self.model.embed_tokens
        if self.lm_head is not None:
            logits = self.lm_head(x)
        elif isinstance(table, Embedding):
            logits = matmul(x, table.weight, backend=self.head_backend)
        else:
            logits = F.linear(x, cast(nn.Embedding, table).weight)
        return cast(Tensor, logits).float()
