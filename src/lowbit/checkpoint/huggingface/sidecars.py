"""The tokenizer and generation settings beside written weights: copied from a directory, or made from a GGUF file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lowbit.checkpoint.base import Checkpoint
from lowbit.errors import CheckpointError


def write_sidecars(checkpoint: Checkpoint, directory: Path) -> tuple[list[str], list[str]]:
    """Write what a runtime needs besides the weights. Returns the names of the files, and notes on what is missing."""
    if checkpoint.sidecars:
        for source in checkpoint.sidecars:
            shutil.copyfile(source, directory / source.name)
        return [source.name for source in checkpoint.sidecars], []
    try:
        data = checkpoint.tokenizer()
    except CheckpointError as error:
        return [], [f"no tokenizer was written: {error}"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": data.bos_token or None,
        "eos_token": data.eos_token or None,
        "add_bos_token": data.add_bos,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"bos_token_id": data.bos_id, "eos_token_id": list(data.eos_ids)}
    texts = {
        "tokenizer.json": data.tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
    if data.chat_template is not None:
        texts["chat_template.jinja"] = data.chat_template
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8", newline="\n")
    return list(texts), []
