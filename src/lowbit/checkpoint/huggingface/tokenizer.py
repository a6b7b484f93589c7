"""The tokenizer of a Hugging Face directory: tokenizer.json, and what the configuration files beside it add."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.checkpoint.base import TokenizerData
from lowbit.checkpoint.bos import prepend_bos
from lowbit.checkpoint.files import MAX_JSON_BYTES, MAX_TEXT_BYTES, read_json, read_text
from lowbit.errors import CheckpointError

# copied as they are when a checkpoint is written again
SIDECARS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def read_tokenizer(directory: Path, config: Mapping[str, Any]) -> TokenizerData:
    """The tokenizer of a model directory. Raises CheckpointError when tokenizer.json is missing or damaged."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.is_file():
        slow = ""
        if (directory / "tokenizer.model").is_file():
            slow = " (tokenizer.model alone is not read: save the fast tokenizer)"
        raise CheckpointError(
            f"{directory} has no tokenizer.json{slow}: pass token ids instead of text, or copy the file from the "
            "original"
        )
    try:
        tokenizer = Tokenizer.from_str(read_text(path, MAX_JSON_BYTES))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer ({error}): download it again") from error
    settings = _optional(directory / "tokenizer_config.json")
    generation = _optional(directory / "generation_config.json")
    bos_token, eos_token = _text(settings.get("bos_token")), _text(settings.get("eos_token"))
    bos_id = tokenizer.token_to_id(bos_token) if bos_token else _first(config.get("bos_token_id"))
    ends = [
        *_ids(generation.get("eos_token_id")),
        *_ids(config.get("eos_token_id")),
        *_ids(tokenizer.token_to_id(eos_token) if eos_token else None),
    ]
    if not bos_token and bos_id is not None:
        bos_token = tokenizer.id_to_token(bos_id) or ""
    if not eos_token and ends:
        eos_token = tokenizer.id_to_token(ends[0]) or ""
    return TokenizerData(
        tokenizer,
        chat_template=_chat_template(directory, settings),
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(ends)),
        add_bos=_settle_bos(tokenizer, settings, bos_token, bos_id),
        bos_token=bos_token,
        eos_token=eos_token,
    )


def _settle_bos(tokenizer: Any, settings: Mapping[str, Any], token: str, token_id: int | None) -> bool:
    """Whether encode puts the beginning-of-sequence token in front, after making it do as the settings ask."""
    if token_id is None:
        return False
    wanted = settings.get("add_bos_token")
    first = tokenizer.encode("a").ids[:1] == [token_id]
    if isinstance(wanted, bool) and wanted != first:
        from tokenizers import processors

        if wanted:
            prepend_bos(tokenizer, token, token_id)
        else:
            tokenizer.post_processor = processors.Sequence([])
        return wanted
    return bool(first)


def _chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja, else the settings; of several named templates the one called default."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path, MAX_TEXT_BYTES)
    template = settings.get("chat_template", _optional(directory / "chat_template.json").get("chat_template"))
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and (not isinstance(template, str) or len(template) > MAX_TEXT_BYTES):
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: chat_template is not a text of at most {MAX_TEXT_BYTES} bytes: "
            "download it again"
        )
    return template


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(token: Any) -> str:
    """A token given as text, or as the object of an added token."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else ""


def _ids(value: Any) -> list[int]:
    """The token ids in a value or a list; -1 and other numbers that no token has mean none."""
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 32]


def _first(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None
