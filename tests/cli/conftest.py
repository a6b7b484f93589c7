"""A tiny random model on disk, and ways to run command lines in this process and in one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lowbit.cli.main import main
from lowbit.models import Decoder, model_config

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "eos_token_id": 257,
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def _tokenizer() -> Tokenizer:
    """Byte-level without merges: 256 bytes, then <s> and </s>."""
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write(directory: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **options: Any) -> Path:
    """A Hugging Face directory with random weights; change(weights) may spoil them first."""
    config = CONFIG | options
    torch.manual_seed(0)
    weights = Decoder(model_config(CONFIG)).state_dict()
    for name, value in weights.items():
        value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    if change is not None:
        change(weights)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    _tokenizer().save(str(directory / "tokenizer.json"))
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def write_model() -> Callable[..., Path]:
    """write_model(directory, change=None, **config) -> the directory."""
    return write


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog.\n\n" * 20)
    return str(path)


@dataclass
class Done:
    """What a command line came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def lowbit(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """lowbit("eval", "model", ...) in this process."""

    def run(*arguments: str) -> Done:
        capfd.readouterr()
        code = main(list(arguments))
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """start("chat", "model", ..., stdout=...): the command line in a process of its own, as a terminal starts it.

    Control-C reaches it even where these tests run in the background, which starts processes that ignore it.
    """

    def run(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from lowbit.cli.main import main; sys.exit(main())"
        )
        environment = os.environ | {"NO_COLOR": "1"}
        return subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, env=environment, **options)

    return run
