"""`lowbit warmup --aot` on a card: a process with empty caches that may not compile generates what this one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from lowbit.models import Decoder, model_config

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "dtype": "float16", "eos_token_id": 1,
}  # fmt: skip
GENERATE = """
import sys
model, cache, refused = sys.argv[1:]
import lowbit
import triton
from lowbit.kernels.cpu import engine
def refuse(*arguments, **options):
    raise RuntimeError("compiled")
if refused == "refuse":
    triton.compile = engine.compile_object = refuse
llm = lowbit.LLM(model, device="cuda", cache=cache)
print(llm.generate([[1, 2, 3, 4]], lowbit.SamplingParams(max_tokens=6, ignore_eos=True))[0].tokens)
"""


def run(place: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A process with caches of its own."""
    caches = {"LOWBIT_CACHE_DIR": str(place / "lowbit"), "TRITON_CACHE_DIR": str(place / "triton")}
    environment = os.environ | caches | more
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, its linears in int4."""
    plain = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    weights = Decoder(model_config(CONFIG)).state_dict()
    for name, value in weights.items():
        value.normal_(1.0 if "norm" in name else 0.0, 0.1)
    save_file({name: value.half() for name, value in weights.items()}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(CONFIG))
    words = {f"w{i}": i for i in range(512)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(plain / "tokenizer.json"))
    quantized = plain.parent / f"{plain.name}-int4"
    done = run(plain, "-m", "lowbit.cli.main", "quantize", str(plain), str(quantized), "--format", "int4_g64")
    assert done.returncode == 0, done.stderr
    return quantized


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_made_ahead(model: Path, cache: str, tmp_path: Path) -> None:
    ahead, one = tmp_path / "ahead", tmp_path / "one"
    made = run(one, "-m", "lowbit.cli.main", "warmup", str(model), "--m", "4", "--aot", str(ahead), "--device", "cuda",
               "--cache", cache)  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert f"in {ahead}: set LOWBIT_AOT_DIR to it" in made.stdout and len(list(ahead.glob("*.kernel"))) >= 3
    here = run(one, "-c", GENERATE, str(model), cache, "allow")
    assert here.returncode == 0, here.stderr
    elsewhere = run(tmp_path / "two", "-c", GENERATE, str(model), cache, "refuse", LOWBIT_AOT_DIR=str(ahead))
    assert (elsewhere.returncode, elsewhere.stdout) == (0, here.stdout), elsewhere.stderr
    assert "RuntimeError: compiled" in run(tmp_path / "three", "-c", GENERATE, str(model), cache, "refuse").stderr
