"""LLM: generation against the plain formula, endings, streams, chat, and the sentences of what cannot be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowbit.checkpoint.base import Checkpoint, TokenizerData
from lowbit.errors import FormatError, UsageError
from lowbit.formats import quantize
from lowbit.models import ModelConfig
from lowbit.runtime import LLM, SamplingParams

EOS = 257
Says = Callable[[Any], LLM]


def test_greedy_generation_is_the_argmax_of_the_logits(llm: LLM) -> None:
    prompt = [72, 105, 33]
    sequence = list(prompt)
    for _ in range(12):
        sequence.append(int(llm.logits(sequence)[0, -1].argmax()))
    (answer,) = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
    assert list(answer.tokens) == sequence[3:]
    assert len(set(answer.tokens)) > 3  # not one token for ever


def test_long_prompts_are_read_in_chunks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(30, 60))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    whole = llm.generate(prompt, params)[0].tokens
    for chunk in (1, 7, 30):
        monkeypatch.setattr("lowbit.runtime.stream.PREFILL_CHUNK", chunk)
        assert llm.generate(prompt, params)[0].tokens == whole


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    prompts = ["Hello", [1, 2, 3, 4, 5], "x", "Hello"]
    params = SamplingParams(max_tokens=9, temperature=1.5, top_p=0.9, seed=3)
    together = llm.generate(prompts, params)
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert together[0].tokens == together[3].tokens != together[2].tokens
    assert llm.generate([], params) == []


def test_seeds(llm: LLM) -> None:
    def run(seed: int | None) -> Any:
        return llm.generate("Hello", SamplingParams(max_tokens=12, temperature=2.0, seed=seed))[0]

    assert run(1).tokens == run(1).tokens != run(2).tokens
    free = run(None)
    assert run(free.seed).tokens == free.tokens
    assert run(None).seed != free.seed


def test_logits_of_a_batch(llm: LLM) -> None:
    ids = torch.randint(0, 263, (3, 7), generator=torch.Generator().manual_seed(0))
    logits = llm.logits(ids)
    assert logits.shape == (3, 7, 263) and logits.dtype == torch.float32
    for row in range(3):
        torch.testing.assert_close(llm.logits(ids[row].tolist()), logits[row : row + 1], atol=1e-5, rtol=0)
    assert torch.equal(llm.logits(ids.to(torch.int32)), logits)


def test_end_of_sequence(says: Says) -> None:
    llm = says([*b"Hi", EOS, *b"more"])
    (answer,) = llm.generate("x", SamplingParams(max_tokens=20))
    assert (answer.text, answer.finish_reason, answer.tokens) == ("Hi", "eos", (*b"Hi", EOS))
    (answer,) = llm.generate("x", SamplingParams(max_tokens=5, ignore_eos=True))
    assert (answer.text, answer.finish_reason) == ("Himo", "length")


def test_end_of_sequence_of_the_config(checkpoint: Checkpoint) -> None:
    checkpoint.config["eos_token_id"] = [7, 9]
    assert LLM(checkpoint).eos_ids == {7, 9, EOS}


def test_end_of_the_context(says: Says) -> None:
    llm = says("a" * 99)  # the context is 48
    (answer,) = llm.generate([1] * 40, SamplingParams(max_tokens=99))
    assert (len(answer.tokens), answer.finish_reason, answer.prompt_tokens) == (8, "length", 40)
    assert len(llm.generate([1] * 47)[0].tokens) == 1


@pytest.mark.parametrize(
    ("script", "stop", "text", "tokens"),
    [
        ("one two three", "two", "one ", 7),
        ("one two three", ("x", "e t"), "on", 5),
        ("aab", "ab", "a", 3),
        ("one", "onex", "one", 3),
        ("größer", "ö", "gr", 4),
    ],
)
def test_stop_strings(script: str, stop: Any, text: str, tokens: int, says: Says) -> None:
    llm = says([*script.encode(), EOS])
    params = SamplingParams(max_tokens=30, stop=stop)
    stream = llm.stream("x", params)
    pieces = list(stream)
    assert "".join(pieces) == stream.completion.text == text == llm.generate("x", params)[0].text
    ended = "eos" if text == script else "stop"
    assert stream.completion.finish_reason == ended
    assert len(stream.completion.tokens) == tokens + (ended == "eos")


def test_no_piece_ends_inside_a_character(says: Says) -> None:
    text = "naïve 日本 👩‍🚀 e\u0301!"
    stream = says([*text.encode(), EOS]).stream("x", SamplingParams(max_tokens=99))
    pieces = list(stream)
    assert pieces == list(text)
    assert stream.completion.text == text


def test_a_character_cut_by_the_limit_stays_a_replacement(says: Says) -> None:
    (answer,) = says("a日").generate("x", SamplingParams(max_tokens=3))
    assert answer.text == "a\N{REPLACEMENT CHARACTER}"


def test_a_stream_works_only_when_it_is_read(says: Says) -> None:
    llm = says("abc")
    first = llm.stream("x", SamplingParams(max_tokens=3))
    assert llm.model.calls == 0  # type: ignore[attr-defined]
    with pytest.raises(UsageError) as error:
        _ = first.completion
    assert str(error.value) == ("completion: the stream is not at its end; iterate over it first, or call generate()")
    assert next(first) == "a" and llm.model.calls == 1  # type: ignore[attr-defined]


def test_interleaved_streams_do_not_mix(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    expected = [answer.text for answer in llm.generate(["Hello", "World!"], params)]
    streams = [llm.stream("Hello", params), llm.stream("World!", params)]
    texts = ["", ""]
    for _ in range(12):
        for index, stream in enumerate(streams):
            texts[index] += next(stream, "")
    assert texts == expected


def test_chat(says: Says) -> None:
    llm = says([*b"Hello!", EOS])
    messages = [{"role": "user", "content": "Say hello"}]
    assert llm.encode_chat(messages) == [256, *b"user: Say hello\nassistant: "]
    answer = llm.chat(messages)
    assert (answer.text, answer.finish_reason, answer.prompt_tokens) == ("Hello!", "eos", 28)


def test_times(llm: LLM) -> None:
    (answer,) = llm.generate("Hello", SamplingParams(max_tokens=6, ignore_eos=True))
    assert answer.first_token_ms > 0 and answer.decode_ms > 0
    assert answer.decode_tokens_per_s == pytest.approx(5 / answer.decode_ms * 1e3)
    assert answer.prefill_tokens_per_s == pytest.approx(5 / answer.first_token_ms * 1e3)
    assert math.isnan(llm.generate("Hello", SamplingParams(max_tokens=1))[0].decode_tokens_per_s)


def test_the_readers_time_is_not_counted(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("lowbit.runtime.stream.time.perf_counter", lambda: clock[0])
    stream = says("abcd").stream("x", SamplingParams(max_tokens=4))
    for _ in stream:
        clock[0] += 100.0
    assert stream.completion.first_token_ms == stream.completion.decode_ms == 0.0


def test_from_an_open_checkpoint_with_quantized_weights(checkpoint: Checkpoint) -> None:
    def change(name: str, value: Any) -> Any:
        return quantize(value, "int4_g16") if value.ndim == 2 else value

    form = quantize(torch.ones(1, 16), "int4_g16").format
    small = checkpoint.mapped(change, lambda name, entry: form if len(entry.shape) == 2 else entry.form)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    packed = LLM(small, device="cpu", backend="reference")
    plain = LLM(small.dequantized(torch.float32), device="cpu")
    torch.testing.assert_close(packed.logits([1, 2, 3]), plain.logits([1, 2, 3]), atol=1e-4, rtol=0)
    assert packed.generate("Hello", params)[0].tokens == plain.generate("Hello", params)[0].tokens


def test_progress_and_config(checkpoint: Checkpoint) -> None:
    steps: list[tuple[int, int, str]] = []
    llm = LLM(checkpoint, progress=lambda *step: steps.append(step))
    assert steps[-1][0] == steps[-1][1] > 0
    assert isinstance(llm.config, ModelConfig) and llm.config.context_length == 48
    assert llm.tokenizer.encode("a").ids == [97]


def test_without_a_tokenizer(bare_checkpoint: Checkpoint) -> None:
    llm = LLM(bare_checkpoint)
    (answer,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
    assert answer.text == "" and len(answer.tokens) == 4
    with pytest.raises(UsageError) as error:
        llm.generate([1, 2], SamplingParams(stop="x"))
    assert str(error.value) == ("stop=('x',): this checkpoint has no tokenizer to find texts with; leave stop out")


def test_no_chat_template(checkpoint: Checkpoint, llm: LLM) -> None:
    llm.tokenizer_data = TokenizerData(llm.tokenizer, None)
    with pytest.raises(UsageError) as error:
        llm.chat([{"role": "user", "content": "x"}])
    assert str(error.value) == (
        "this model has no chat template: it was not trained to chat, or the file was stripped of it; "
        "write the whole prompt yourself and call generate()"
    )


EMPTY = "prompt{} is empty: generation continues at least one token; give it some text"
RANGE = (
    "token id {}: must be between 0 and 262, the model's vocabulary; encode the text with this model's own tokenizer"
)
LONG = "prompt 1 has 48 tokens: the model's context is 48, prompt and answer together; shorten it to at most 47"
KIND = "prompt 0 is {}: must be a text or a list of token ids; for an array or tensor pass .tolist()"


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ("", EMPTY.format(" 0")),
        (["ok", ""], EMPTY.format(" 1")),
        ([[]], EMPTY.format(" 0")),
        ([1, 2, 263], RANGE.format(263)),
        ([[5], [-1, 999]], RANGE.format(-1)),
        (["ok", "x" * 48], LONG),
        ([[1.5]], KIND.format("list")),
        ([[True]], KIND.format("list")),
        ([None], KIND.format("NoneType")),
        ([torch.tensor([1, 2])], KIND.format("Tensor")),
    ],
    ids=str,
)
def test_prompts_that_cannot_be_continued(prompts: Any, sentence: str, says: Says) -> None:
    llm = says("abc")
    with pytest.raises(UsageError) as error:
        llm.generate(prompts)
    assert str(error.value) == sentence
    assert llm.model.calls == 0  # type: ignore[attr-defined]  # nothing ran, not even for the good ones
    if len(prompts) < 2 and prompts:
        with pytest.raises(UsageError, match=r"^prompt is "):
            llm.stream(prompts[0])


@pytest.mark.parametrize("ids", [[], [[]], [1.0], torch.zeros(1, 1, 1, dtype=torch.int64), [True]])
def test_token_ids_of_another_kind(ids: Any, llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"^token_ids of shape .*: must be whole numbers, \[batch, time\] or \[time\]"):
        llm.logits(ids)


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, torch.tensor([1, 2])])
def test_prompts_of_another_kind(prompts: Any, llm: LLM) -> None:
    with pytest.raises(UsageError, match=rf"^prompts is {type(prompts).__name__}: must be a text, a list of token ids"):
        llm.generate(prompts)


@pytest.mark.parametrize("ids", [[[1], [1, 2]], None, "a", [[10**30]]])
def test_token_ids_that_are_no_rectangle(ids: Any, llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"^token_ids are no rectangle of whole numbers \(.*\): rows of one call have"):
        llm.logits(ids)


def test_logits_errors(llm: LLM) -> None:
    with pytest.raises(UsageError) as error:
        llm.logits([0, 263])
    assert str(error.value) == RANGE.format(263)
    with pytest.raises(UsageError) as error:
        llm.logits([0] * 49)
    assert str(error.value) == ("49 tokens in a row: the model's context is 48; cut them into windows of at most that")


def test_rounded_caches(wide_checkpoint: Checkpoint) -> None:
    """Generation and logits over pages; a name that is none is refused before weights are read."""
    plain = LLM(wide_checkpoint, device="cpu", dtype="float32")
    paged = LLM(wide_checkpoint, device="cpu", dtype="float32", cache="fp32")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    assert paged.generate("Hello", params)[0].tokens == plain.generate("Hello", params)[0].tokens
    torch.testing.assert_close(paged.logits([1, 2, 3]), plain.logits([1, 2, 3]), atol=1e-5, rtol=1e-4)
    rounded = LLM(wide_checkpoint, device="cpu", dtype="float32", cache="int8/int4")
    assert not torch.equal(rounded.logits([1, 2, 3]), plain.logits([1, 2, 3]))
    with pytest.raises(FormatError, match="cache format 'int9': keys and values are stored as one of fp32, bf16"):
        LLM(wide_checkpoint, cache="int9")
