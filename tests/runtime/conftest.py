"""A tiny random model with a byte-level tokenizer, and a model that says what it is told to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lowbit.checkpoint.base import Checkpoint, Entry, TokenizerData
from lowbit.models import Decoder, KVCache, NextLogits, model_config
from lowbit.runtime import LLM

BOS, EOS = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 263,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Token i < 256 is the byte i; 256 and 257 are <s> and </s>."""
    characters = [decode_byte(byte) for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    assert tokenizer.encode("<s>é</s>").ids == [BOS, *"é".encode(), EOS]
    return tokenizer


def decode_byte(byte: int) -> str:
    """The printable character that stands for a byte in byte-level vocabularies (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + hidden.index(byte))


def tiny(tokenizer: Callable[[], TokenizerData] | None, **options: Any) -> Checkpoint:
    config = {**CONFIG, **options}
    torch.manual_seed(0)
    model = Decoder(model_config(config))
    for name, value in model.state_dict().items():
        value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    entries = {n: Entry(tuple(v.shape), v.dtype, lambda v=v: v) for n, v in model.state_dict().items()}
    return Checkpoint(entries, config, format_name="memory", tokenizer=tokenizer)


@pytest.fixture
def checkpoint(tokenizer: Tokenizer) -> Checkpoint:
    data = TokenizerData(tokenizer, TEMPLATE, BOS, (EOS,), False, "<s>", "</s>")
    return tiny(lambda: data)


@pytest.fixture
def wide_checkpoint(tokenizer: Tokenizer) -> Checkpoint:
    """With heads that compiled decode steps take, once its linears are packed."""
    data = TokenizerData(tokenizer, TEMPLATE, BOS, (EOS,), False, "<s>", "</s>")
    return tiny(lambda: data, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture
def bare_checkpoint() -> Checkpoint:
    """Weights without a tokenizer."""
    return tiny(None)


@pytest.fixture
def llm(checkpoint: Checkpoint) -> LLM:
    return LLM(checkpoint, device="cpu")


class Scripted:
    """Stands for a Decoder whose most likely tokens are `script`, then a's for ever; counts its calls."""

    def __init__(self, model: Decoder, script: Sequence[int]) -> None:
        self.config, self.device = model.config, model.device
        self.new_cache = model.new_cache
        self.script, self.calls, self.prompts = list(script), 0, 0

    def next_logits(self, tokens: Sequence[int], cache: KVCache) -> NextLogits:
        if cache.length == 0:
            self.prompts += 1
            self.at = 0
        else:
            assert list(tokens) == [self._token(self.at - 1)]
        cache.advance(len(tokens))
        logits = torch.zeros(self.config.vocab_size)
        logits[self._token(self.at)] = 50.0
        self.at += 1
        self.calls += 1
        return NextLogits(logits, None)

    def _token(self, at: int) -> int:
        return self.script[at] if at < len(self.script) else ord("a")


@pytest.fixture
def says(llm: LLM) -> Callable[[Sequence[int] | str], LLM]:
    """says("text") -> an LLM that continues every prompt with it."""

    def build(script: Sequence[int] | str) -> LLM:
        tokens = list(script.encode()) if isinstance(script, str) else script
        llm.model = Scripted(llm.model, tokens)  # type: ignore[assignment]
        return llm

    return build
