"""The tokenizer embedded in a GGUF file, built with the `tokenizers` library.

Two kinds: `gpt2` (byte-level BPE: vocabulary, merges, and the name of a pre-tokenizer in tokenizer.ggml.pre) and
`llama` (SentencePiece BPE: vocabulary with scores, byte fallback). A new pre-tokenizer is one row of PRE_TOKENIZERS.

Sources: the GGUF specification (tokenizer.ggml keys); llama.cpp's vocabulary loader for which expressions belong to a
pre-tokenizer name, and the tokenizer.json files of the models for their exact form.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from lowbit.checkpoint.base import TokenizerData
from lowbit.checkpoint.bos import prepend_bos
from lowbit.checkpoint.files import MAX_TEXT_BYTES
from lowbit.checkpoint.gguf.container import DAMAGED, GGUFFile
from lowbit.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

MAX_TOKEN_BYTES = 1 << 16


class TokenType(IntEnum):
    """What tokenizer.ggml.token_type says about a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text before merging: expressions applied one after the other to every piece."""

    expressions: tuple[str, ...]
    whole_words: bool = False  # a piece that is a token as a whole is taken without merging
    add_bos: bool = False  # when the file does not say


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

GPT2 = PreTokenizer((_GPT2,))
DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
LLAMA3 = PreTokenizer((_WORDS + r"|\p{N}{1,3}" + _REST,), whole_words=True, add_bos=True)
QWEN2 = PreTokenizer((_WORDS + r"|\p{N}" + _REST,))
SMOLLM = PreTokenizer((r"\p{N}", _GPT2))
TEKKEN = PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": DEFAULT,
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "mpt": GPT2,
    "olmo": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "stablelm2": QWEN2,
    "smollm": SMOLLM,
    "starcoder": SMOLLM,
    "refact": SMOLLM,
    "command-r": SMOLLM,
    "codeshell": SMOLLM,
    "tekken": TEKKEN,
}

# control tokens that end a turn in the chat formats in use; files often name only one of them as end of sequence
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


def build_tokenizer(file: GGUFFile) -> TokenizerData:
    """The file's tokenizer. Raises CheckpointError when there is none, or its kind or pre-tokenizer is not known."""
    vocabulary = _Vocabulary(file)
    kind = file["tokenizer.ggml.model"]
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary)
    else:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}: 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE) "
            "are known; pass token ids, or put the model's tokenizer.json into a Hugging Face directory with the "
            "weights"
        )
    add_bos = bool(file.get("tokenizer.ggml.add_bos_token", add_bos))
    bos, eos = vocabulary.token_id("bos"), vocabulary.token_id("eos")
    if add_bos and bos is not None:
        prepend_bos(tokenizer, vocabulary.tokens[bos], bos)
    return TokenizerData(
        tokenizer,
        chat_template=_chat_template(file),
        bos_id=bos,
        eos_ids=vocabulary.ends(),
        add_bos=add_bos and bos is not None,
        bos_token="" if bos is None else vocabulary.tokens[bos],
        eos_token="" if eos is None else vocabulary.tokens[eos],
    )


class _Vocabulary:
    """tokens, types, scores and special ids of a file, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        if "tokenizer.ggml.tokens" not in file:
            raise CheckpointError(f"{file.path} has no tokenizer inside: pass token ids instead of text")
        self.tokens: list[str] = self._list("tokenizer.ggml.tokens", str)
        if len(set(self.tokens)) != len(self.tokens):
            seen: set[str] = set()
            twice = next(t for t in self.tokens if t in seen or seen.add(t))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{file.path}: token {twice!r} stands twice in the vocabulary: {DAMAGED}")
        self.types: list[int] = [TokenType.NORMAL] * len(self.tokens)
        if "tokenizer.ggml.token_type" in file:
            self.types = self._list("tokenizer.ggml.token_type", int)
            self._same_length("tokenizer.ggml.token_type", self.types)

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self.file[key]
        if not isinstance(values, list) or not all(isinstance(v, kind) for v in values):
            raise CheckpointError(f"{self.file.path}: metadata {key!r} must be a list of {kind.__name__}: {DAMAGED}")
        return values

    def _same_length(self, key: str, values: list[Any]) -> None:
        if len(values) != len(self.tokens):
            raise CheckpointError(
                f"{self.file.path}: metadata {key!r} has {len(values)} items for {len(self.tokens)} tokens: {DAMAGED}"
            )

    def scores(self) -> list[float]:
        values = self._list("tokenizer.ggml.scores", float)
        self._same_length("tokenizer.ggml.scores", values)
        return values

    def merges(self) -> list[tuple[str, str]]:
        """The merge rules of a byte-level vocabulary, both parts and their union in the vocabulary."""
        known = set(self.tokens)
        merges = []
        for line in self._list("tokenizer.ggml.merges", str):
            # a part may begin with a space only in broken files; the separator is the first space after position 0
            left, _, right = line.partition(" ")
            if not left or not right or left not in known or right not in known or left + right not in known:
                raise CheckpointError(
                    f"{self.file.path}: merge rule {line!r} does not join two tokens of the vocabulary to a third: "
                    f"{DAMAGED}"
                )
            merges.append((left, right))
        return merges

    def token_id(self, kind: str) -> int | None:
        """The id under tokenizer.ggml.<kind>_token_id, if there is one."""
        value = self.file.get(f"tokenizer.ggml.{kind}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise CheckpointError(
                f"{self.file.path}: tokenizer.ggml.{kind}_token_id is {value!r}: ids are below {len(self.tokens)}; "
                f"{DAMAGED}"
            )
        return value

    def ends(self) -> tuple[int, ...]:
        """Ids that end an answer: those the file names, then control tokens known to end a turn."""
        ids = [i for kind in ("eos", "eot", "eom") if (i := self.token_id(kind)) is not None]
        place = {self.tokens[i]: i for i, t in enumerate(self.types) if t == TokenType.CONTROL}
        ids += [place[text] for text in END_OF_TURN if text in place]
        return tuple(dict.fromkeys(ids))

    def added(self) -> list[AddedToken]:
        """Tokens that are matched whole before anything else: control (special) and user-defined ones, in id order."""
        from tokenizers import AddedToken

        whole = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
        return [
            AddedToken(text, normalized=False, special=whole[TokenType(kind)])
            for text, kind in zip(self.tokens, self.types, strict=True)
            if kind in whole and text
        ]


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it begins with the beginning-of-sequence token when the file does not say."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    file = vocabulary.file
    name = file.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {name!r} is not known: {', '.join(sorted(PRE_TOKENIZERS))} are; pass token "
            "ids, or put the model's tokenizer.json into a Hugging Face directory with the weights"
        )
    pre = PRE_TOKENIZERS[name]
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    model = models.BPE(ids, vocabulary.merges(), ignore_merges=pre.whole_words, fuse_unk=False)
    tokenizer = Tokenizer(model)
    splits: list[Any] = [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in pre.expressions]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added())
    return tokenizer, pre.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE: a merge is any two tokens whose union is a token, the union with the highest score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    file = vocabulary.file
    tokens, scores = vocabulary.tokens, vocabulary.scores()
    ids = {text: i for i, text in enumerate(tokens)}
    mergeable = {
        text
        for text, kind in zip(tokens, vocabulary.types, strict=True)
        if kind in {TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED}
    }
    ranked = []
    for text in mergeable:
        if len(text) > MAX_TOKEN_BYTES:
            raise CheckpointError(f"{file.path}: a token has {len(text)} characters: {DAMAGED}")
        for at in range(1, len(text)):
            if text[:at] in mergeable and text[at:] in mergeable:
                ranked.append((-scores[ids[text]], ids[text], ids[text[:at]], ids[text[at:]]))
    merges = [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]
    unknown = vocabulary.token_id("unknown")
    model = models.BPE(
        ids, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_tokens(vocabulary.added())
    return tokenizer, True


def _chat_template(file: GGUFFile) -> str | None:
    template = file.get("tokenizer.chat_template")
    if template is not None and (not isinstance(template, str) or len(template) > MAX_TEXT_BYTES):
        raise CheckpointError(
            f"{file.path}: tokenizer.chat_template is not a text of at most {MAX_TEXT_BYTES} bytes: {DAMAGED}"
        )
    return template
