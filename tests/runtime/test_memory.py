"""Memory: the turns of a conversation read only what is new, and say what a full reading says."""

from __future__ import annotations

from typing import Any

import pytest

from lowbit.checkpoint import Checkpoint
from lowbit.errors import ModelError, UsageError
from lowbit.models import Decoder, KVCache, cpu_step
from lowbit.nn import convert
from lowbit.runtime import LLM, Memory, SamplingParams
from lowbit.runtime.completion import Completion

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
TURNS = ("Hi", "Hi there, ", "Hi there, you", "Hello", "Hello", "He")


def read(llm: LLM, prompt: str, memory: Memory | None = None, params: SamplingParams = PARAMS) -> Completion:
    stream = llm.stream(prompt, params, memory)
    for _ in stream:
        pass
    return stream.completion


@pytest.fixture
def reads(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that passes through the model read."""
    counts: list[int] = []
    plain = Decoder.next_logits

    def count(self: Decoder, tokens: Any, cache: KVCache) -> Any:
        counts.append(len(tokens))
        return plain(self, tokens, cache)

    monkeypatch.setattr(Decoder, "next_logits", count)
    return counts


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.5, seed=3)])
def test_any_sequence_of_prompts_says_what_a_full_reading_says(llm: LLM, params: SamplingParams) -> None:
    memory = Memory()
    for prompt in TURNS:
        answer = read(llm, prompt, memory, params)
        assert (answer.tokens, answer.text) == ((full := read(llm, prompt, None, params)).tokens, full.text)
        assert memory.tokens[: len(prompt)] == tuple(prompt.encode())


def test_compiled_steps_go_on_with_the_cache(wide_checkpoint: Checkpoint) -> None:
    """And begin anew with a larger one."""
    llm = LLM(wide_checkpoint, device="cpu")
    convert(llm.model.model.layers, {"": "int8"})
    memory, caches = Memory(), set()
    for prompt in TURNS:
        answer = read(llm, prompt, memory)
        assert answer.tokens == read(llm, prompt).tokens
        assert memory._cache in cpu_step._steps
        caches.add(id(memory._cache))
    assert 1 < len(caches) < len(TURNS)


def test_a_conversation_reads_what_is_new(llm: LLM, reads: list[int]) -> None:
    memory = Memory()
    first = read(llm, "user: a\n", memory)
    assert reads[0] == 8 and first.known_tokens == 0
    told = list(b"user: a\n") + list(first.tokens)
    reads.clear()
    stream = llm.stream([*told, *b" b"], PARAMS, memory)
    assert list(stream) is not None
    # the last token of an answer was chosen but never read
    assert reads[0] == len(b" b") + 1
    assert stream.completion.known_tokens == len(told) - 1
    assert stream.completion.prefill_tokens_per_s == pytest.approx(3 / stream.completion.first_token_ms * 1e3)


def test_the_last_token_of_a_prompt_is_always_read(llm: LLM, reads: list[int]) -> None:
    memory = Memory()
    answer = read(llm, "Hello", memory)
    reads.clear()
    again = read(llm, "Hello", memory)
    assert reads[0] == 1 and again.tokens == answer.tokens and again.known_tokens == 4


def test_an_interrupted_stream_leaves_what_it_read(llm: LLM) -> None:
    memory = Memory()
    stream = llm.stream("Hello", PARAMS, memory)
    for _ in range(3):
        next(stream)
    del stream
    assert memory.tokens[:5] == tuple(b"Hello")
    assert read(llm, "Hello, you", memory).tokens == read(llm, "Hello, you").tokens


def test_a_pass_that_fails_leaves_the_tokens_before_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    read(llm, "Hello", memory)
    held = memory.tokens

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "next_logits", fail)
        with pytest.raises(KeyboardInterrupt):
            read(llm, "Hello, you", memory)
    assert memory.tokens == held[:5] == tuple(b"Hello")
    assert read(llm, "Hello, we", memory).tokens == read(llm, "Hello, we").tokens


def test_an_earlier_stream_cannot_go_on(llm: LLM) -> None:
    memory = Memory()
    first, second = llm.stream("Hello", PARAMS, memory), llm.stream("World", PARAMS, memory)
    next(first)
    rest = next(second)
    with pytest.raises(UsageError) as error:
        list(first)
    assert str(error.value) == (
        "this stream's memory was taken over by a stream that was begun later: read streams of one memory one after "
        "the other, or give each a memory of its own"
    )
    assert rest + "".join(second) == read(llm, "World").text


def test_another_model_begins_anew(llm: LLM, checkpoint: Any) -> None:
    memory = Memory()
    read(llm, "Hello", memory)
    other = LLM(checkpoint, device="cpu")
    assert read(other, "Hello", memory).known_tokens == 0


def test_a_cache_takes_over_what_fits(llm: LLM) -> None:
    small, large = llm.model.new_cache(1, 4), llm.model.new_cache(1, 8)
    llm.model.next_logits([1, 2, 3, 4, 5], large)
    with pytest.raises(ModelError, match="take_over: 5 tokens exceed this KVCache's capacity of 4; make a larger one"):
        small.take_over(large)
