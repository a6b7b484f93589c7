"""The beginning-of-sequence token in front of every text that a tokenizer encodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def prepend_bos(tokenizer: Tokenizer, token: str, token_id: int) -> None:
    """Let `encode` put the token in front of every text (in place)."""
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B:1"], special_tokens=[(token, token_id)]
    )
