"""LLM: a checkpoint, its tokenizer and its decoder behind one door."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.checkpoint import Checkpoint, TokenizerData, open_checkpoint
from lowbit.compiling import expecting_compilation
from lowbit.errors import CheckpointError, UsageError
from lowbit.models import Decoder, ModelConfig, check_cache, load_model
from lowbit.models.paged import AUTO, CONTIGUOUS
from lowbit.runtime.chat_template import ChatTemplate, Message
from lowbit.runtime.completion import Completion
from lowbit.runtime.memory import Memory
from lowbit.runtime.placement import choose_device, choose_dtype
from lowbit.runtime.sampling import SamplingParams
from lowbit.runtime.stream import PREFILL_CHUNK, TextStream
from lowbit.tuner.warmup import warm
from lowbit.tuner.work import TOKENS, weights_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A language model that is ready to run.

    source: what open_checkpoint takes (a directory, a .gguf or .safetensors file, a hub id, "smollm2"), or an open
        Checkpoint.
    device: "auto" is the first CUDA device if there is one, else the CPU.
    dtype: of activations and unquantized weights. "auto" is what the checkpoint's config says (the norms' dtype if it
        says nothing), but float32 where it says float16 and the device is a CPU, which computes float16 slowly; the
        same for a plain bfloat16 model on a CPU without AVX-512.
    backend: which kernels run quantized weights, see lowbit.matmul.
    progress: called with (done_bytes, total_bytes, module) while weights are read.
    activations: "plain", or "stored": inputs of linears are rounded as the checkpoint says its model was trained.
    cache: how keys and values are kept. "auto": in `dtype`, in pages where those are faster, else contiguous;
        "contiguous". "int8", "int4", "fp8", "fp16" and the other names of lowbit.formats.kv, or two as "int8/int4" for
        keys and values: in pages (docs/attention.md).

    Raises CheckpointError, ModelError, FormatError or UsageError. Prompts given as text, and text in completions, need
    the checkpoint to have a tokenizer; token ids always work.
    """

    def __init__(
        self,
        source: str | Path | Checkpoint,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        backend: str = "auto",
        progress: Callable[[int, int, str], None] | None = None,
        activations: str = "plain",
        cache: str = "auto",
    ) -> None:
        check_cache(cache)
        self.checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.checkpoint, self.device)
        self.model: Decoder = load_model(self.checkpoint, self.device, self.dtype, backend, progress, activations)
        self.model.cache_format = cache

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @cached_property
    def tokenizer_data(self) -> TokenizerData:
        """Tokenizer, chat template and special tokens. Raises CheckpointError if the checkpoint has none."""
        return self.checkpoint.tokenizer()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself (of the tokenizers package). Raises CheckpointError if the checkpoint has none."""
        return self.tokenizer_data.tokenizer

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises UsageError if it has none."""
        data = self.tokenizer_data
        if not data.chat_template:
            raise UsageError(
                "this model has no chat template: it was not trained to chat, or the file was stripped of it; "
                "write the whole prompt yourself and call generate()"
            )
        return ChatTemplate(data.chat_template, data.bos_token, data.eos_token)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer, by the tokenizer and by the model's config."""
        data = self._tokenizer_or_none()
        return frozenset(self.config.eos_ids) | frozenset(data.eos_ids if data else ())

    def warmup(
        self,
        tokens: Sequence[int] = TOKENS,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> int:
        """Compile, before the first request, what prompts of `tokens` tokens, steps and choosing a token need.

        progress: called with (what, done, total). Returns how many matmul kernels of a GPU were prepared in parallel.
        """
        weights = weights_of(self.checkpoint, self.config)
        count = warm(self.model, tokens, progress, [weight for weight in weights if weight.in_a_step])
        with expecting_compilation():
            for params in (
                SamplingParams(max_tokens=2),
                SamplingParams(max_tokens=2, temperature=0.8, top_p=0.9, seed=0),
            ):
                self.generate([0], replace(params, ignore_eos=True))
        return count

    def encode(self, text: str) -> list[int]:
        """Text -> token ids, with a beginning-of-sequence token where the model wants one.

        Raises UsageError for a string that is no text because it holds halves of characters (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds {text[error.start]!r} at {error.start}, which is no character: it was read from bytes "
                "in another encoding than UTF-8; convert it"
            ) from error
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """Messages -> token ids of the prompt that asks for the assistant's next message.

        Raises as ChatTemplate.render does, which also explains `tools` and `variables`.
        """
        text = self.chat_template.render(messages, tools=tools, **variables)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids  # the template writes them
        return ids

    @torch.inference_mode()
    def logits(
        self,
        token_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],  # [batch, time], or [time] for a batch of one
    ) -> Tensor:
        """-> [batch, time, vocab] float32 on the model's device: at each position, of the token that follows it.

        With a rounded cache, every position attends over keys and values as that cache holds them.
        Raises UsageError for ids outside the vocabulary, no tokens, or more of them than the context holds.
        """
        try:
            ids = torch.as_tensor(token_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"token_ids are no rectangle of whole numbers ({error}): rows of one call have one length; run others "
                "apart"
            ) from error
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.ndim != 2 or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise UsageError(
                f"token_ids of shape {list(ids.shape)}, {ids.dtype}: must be whole numbers, [batch, time] or [time], "
                "at least one"
            )
        _check_range(int(ids.min()), int(ids.max()), self.config.vocab_size)
        if ids.shape[1] > self.config.context_length:
            raise UsageError(
                f"{ids.shape[1]} tokens in a row: the model's context is {self.config.context_length}; "
                "cut them into windows of at most that"
            )
        ids = ids.to(device=self.device, dtype=torch.int64)
        if self.model.cache_format in (AUTO, CONTIGUOUS):
            logits: Tensor = self.model(ids)
            return logits
        cache = self.model.new_cache(*ids.shape)
        return torch.cat([self.model(part, cache) for part in torch.split(ids, PREFILL_CHUNK, dim=1)], dim=1)

    def generate(
        self, prompts: str | Sequence[int] | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Continue each prompt: a text, its token ids, or a list of such. One completion per prompt, in order.

        Prompts run one after another. With a seed, each starts from that seed, so a prompt's answer does not depend on
        the others. Raises UsageError, before anything runs, for an empty prompt, one that leaves no room in the
        context, or ids outside the vocabulary.
        """
        if not isinstance(prompts, Sequence):
            raise UsageError(
                f"prompts is {type(prompts).__name__}: must be a text, a list of token ids, or a list of such; for an "
                "array or tensor pass .tolist()"
            )
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        batch: Sequence[Any] = [prompts] if single else prompts
        streams = [self._stream(prompt, params, f"prompt {at}") for at, prompt in enumerate(batch)]
        for stream in streams:
            for _ in stream:
                pass
        return [stream.completion for stream in streams]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, memory: Memory | None = None) -> TextStream:
        """Continue one prompt: an iterator over pieces of text, with `.completion` at its end. Raises as generate.

        memory: keeps what was computed for the next stream that is given it (see Memory), which reads only what is new.
        """
        return self._stream(prompt, params, "prompt", memory)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The assistant's next message. To stream it: `llm.stream(llm.encode_chat(messages), params)`."""
        return self.generate([self.encode_chat(messages)], params)[0]

    def _stream(
        self, prompt: Prompt, params: SamplingParams | None, name: str, memory: Memory | None = None
    ) -> TextStream:
        params = params or SamplingParams()
        if not isinstance(prompt, str) and (not isinstance(prompt, Sequence) or not all(map(_is_id, prompt))):
            raise UsageError(
                f"{name} is {type(prompt).__name__}: must be a text or a list of token ids; "
                "for an array or tensor pass .tolist()"
            )
        ids = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not prompt or not ids:
            raise UsageError(f"{name} is empty: generation continues at least one token; give it some text")
        _check_range(min(ids), max(ids), self.config.vocab_size)
        context = self.config.context_length
        if len(ids) >= context:
            raise UsageError(
                f"{name} has {len(ids)} tokens: the model's context is {context}, prompt and answer together; "
                f"shorten it to at most {context - 1}"
            )
        data = self._tokenizer_or_none()
        if data is None and params.stop:
            raise UsageError(
                f"stop={params.stop!r}: this checkpoint has no tokenizer to find texts with; leave stop out"
            )
        decode = data.tokenizer.decode if data else _no_text
        return TextStream(self.model, ids, params, self.eos_ids, decode, memory)

    def _tokenizer_or_none(self) -> TokenizerData | None:
        try:
            return self.tokenizer_data
        except CheckpointError:
            return None


def _no_text(tokens: list[int]) -> str:
    return ""


def _is_id(token: object) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)


def _check_range(least: int, most: int, vocab_size: int) -> None:
    if least < 0 or most >= vocab_size:
        raise UsageError(
            f"token id {least if least < 0 else most}: must be between 0 and {vocab_size - 1}, the model's vocabulary; "
            "encode the text with this model's own tokenizer"
        )
