"""Detokenizer and StopMatcher against whole decoding and whole searching, over random texts and cuts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from lowbit.runtime.detokenize import Detokenizer, StopMatcher, TextAssembler

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
Decode = Callable[[list[int]], str]


def lossy(tokens: list[int]) -> str:
    """Tokens are bytes; an unfinished or impossible sequence becomes U+FFFD, as in byte-level decoders."""
    return bytes(tokens).decode("utf-8", "replace")


@pytest.fixture(scope="module")
def byte_fallback() -> Decode:
    """Llama 2's way: pieces with U+2581 for a space, single bytes for what is not in the vocabulary, and the first
    space of a text is dropped. A run of bytes that is not UTF-8 becomes one U+FFFD per byte. Tokens < 256: bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256, "▁": 257, "cat": 258, "▁\u00e9t": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer.decode


def pieces(decode: Decode, tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(decode, prompt or [])
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=UNKNOWN), max_size=20))
def test_bytes_of_any_text(text: str) -> None:
    given_out = pieces(lossy, list(text.encode()))
    assert "".join(given_out) == text
    assert [piece for piece in given_out if piece] == list(text)  # each character as soon as it is whole


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=24))
def test_any_bytes(tokens: list[int]) -> None:
    """Also nonsense comes out as it would at once."""
    assert "".join(pieces(lossy, tokens)) == lossy(tokens)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["the", " ", "cat", "é", "日本", "👩‍🚀"]), max_size=8))
def test_byte_fallback(byte_fallback: Decode, words: list[str]) -> None:
    tokens: list[int] = [258]
    for word in words:
        known = {"the": [256], " ": [257], "cat": [258]}
        tokens += known.get(word, list(word.encode()))
    given_out = pieces(byte_fallback, tokens)
    assert "".join(given_out) == byte_fallback(tokens)
    assert UNKNOWN not in "".join(given_out)


def test_byte_fallback_that_never_becomes_a_character(byte_fallback: Decode) -> None:
    tokens = [*"é".encode(), 0xFF, 0xFE, 0xFD, 0xFC, 258]
    assert "".join(pieces(byte_fallback, tokens)).endswith("cat")


def test_the_first_space_is_that_of_the_text_not_of_the_answer(byte_fallback: Decode) -> None:
    assert pieces(byte_fallback, [256, 258], prompt=[258]) == [" the", "cat", ""]
    assert pieces(byte_fallback, [256, 258]) == ["the", "cat", ""]


def test_tokens_without_text_and_replacement_characters_that_are_meant() -> None:
    silent = 0

    def decode(tokens: list[int]) -> str:
        return lossy([token for token in tokens if token != silent])

    tokens = [silent, *b"a", silent, silent, *UNKNOWN.encode(), *b"b", *([silent] * 40), *UNKNOWN.encode()]
    assert "".join(pieces(decode, tokens)) == f"a{UNKNOWN}b{UNKNOWN}"


def test_the_window_stays_short() -> None:
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return lossy(tokens)

    pieces(decode, list(("日本語 text " * 40).encode()), prompt=list(b"x" * 500))
    assert longest <= 12


def cut(text: str, stops: list[str]) -> str:
    """Character by character: the text before the first stop string that is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=16),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(1, 6), max_size=16),
)
def test_stop_strings_in_any_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, shown, rest = StopMatcher(stops), "", text
    for length in [*cuts, len(text)]:
        piece, rest = rest[:length], rest[length:]
        shown += matcher.push(piece)
        assert cut(text, stops).startswith(shown)  # nothing was given out too early
        if matcher.stopped:
            break
    else:
        shown += matcher.finish()
    assert shown == cut(text, stops)
    assert matcher.stopped == any(stop in text for stop in stops)


def test_text_is_held_back_only_while_it_may_be_a_stop() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("an E", "N", "Ding")] == ["an ", "", ""]
    assert matcher.stopped
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("an E", "N", "ding", " EN")] == ["an ", "", "ENding", " "]
    assert matcher.finish() == "EN"


def test_assembler() -> None:
    text = TextAssembler(lossy, [], ["日x"])
    assert [text.push(byte) for byte in "a日y".encode()] == ["a", "", "", "", "日y"]
    assert (text.finish(), text.shown, text.stopped) == ("", "a日y", False)
    text = TextAssembler(lossy, [], ["日x"])
    assert "".join(text.push(byte) for byte in "a日".encode()) == "a"
    assert (text.finish(), text.shown) == ("日", "a日")
    text = TextAssembler(lossy, [], [UNKNOWN])
    assert [text.push(byte) for byte in b"a\xe6"] == ["a", ""]
    assert (text.finish(), text.stopped, text.shown) == ("", True, "a")
