"""Modules of compressed-tensors, and what its own package makes of a directory."""

from __future__ import annotations

import json

import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from safetensors.torch import load_file

from lowbit.checkpoint import Checkpoint, Entry
from lowbit.checkpoint.compressed_tensors.bits import pack_codes, width
from lowbit.formats import QuantizedTensor, parse_format

BITS = range(1, 9)


GROUPINGS = ("g32", "g20", "channel", "tensor")


NAME = "model.layers.0.mlp.up_proj"


def random_tensor(fmt: str, n: int, k: int, seed: int = 0) -> QuantizedTensor:
    """Any codes, scales and zero points a format allows."""
    form = parse_format(fmt)
    generator = torch.Generator().manual_seed(seed)
    shape = form.grouping.scale_shape(n, k)
    limit = 3 if fmt.startswith("ternary") else 2**form.bits
    codes = torch.randint(0, limit, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(shape, generator=generator) + 0.01).to(form.scale.kind.storage)
    zeros = torch.randint(0, limit, shape, generator=generator, dtype=torch.uint8) if "asym" in fmt else None
    return QuantizedTensor(codes, scales, zeros, form)


def checkpoint_of(values: dict[str, QuantizedTensor | torch.Tensor], config=None, **more) -> Checkpoint:
    def entry(value):
        form = value.format if isinstance(value, QuantizedTensor) else value.dtype
        return Entry(tuple(value.shape), form, lambda: value)

    config = LLAMA_CONFIG if config is None else config
    return Checkpoint({f"{k}.weight": entry(v) for k, v in values.items()}, config, format_name="test", **more)


def read_by_the_package(directory) -> dict[str, torch.Tensor]:
    """Every quantized module's weight, decompressed by the compressed-tensors package according to config.json."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_targets

    config = QuantizationConfig.model_validate(
        json.loads((directory / "config.json").read_text())["quantization_config"]
    )
    schemes = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    weights = {}
    for name in tensors:
        module, _, local = name.rpartition(".")
        codes = {"weight_packed": True, "weight": f"{module}.weight_scale" in tensors}
        if not codes.get(local):
            continue
        stand_in = torch.nn.Embedding(1, 1) if "embed" in module else torch.nn.Linear(1, 1)
        scheme = schemes[match_targets(module, stand_in, schemes)[0]]
        parts = {
            key.removeprefix(f"{module}."): value for key, value in tensors.items() if key.startswith(f"{module}.")
        }
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        weights[module] = compressor.decompress(parts, scheme)["weight"]
    return weights


def assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert a.format == b.format
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(a.scales, b.scales)
    assert (a.zeros is None) == (b.zeros is None) and (a.zeros is None or torch.equal(a.zeros, b.zeros))


def padded_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """32 // bits codes a word, code by code."""
    rows, count = codes.shape
    words = torch.zeros(rows, width(count, bits, "padded"), dtype=torch.int64)
    for i in range(count):
        words[:, i // (32 // bits)] |= codes[:, i].long() << (i % (32 // bits) * bits)
    return words.to(torch.int32) if words.numel() == 0 else (words & 0xFFFFFFFF).view(torch.int32)[:, ::2].contiguous()


def scheme(bits, symmetric, strategy, size=None, **more):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": size}
    return {"targets": ["Linear"], "weights": weights | more}


def save_ct(directory, modules, groups=None, **quantization):
    """modules: name -> tensors by local name."""
    tensors = {f"{name}.{local}": t.contiguous() for name, parts in modules.items() for local, t in parts.items()}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups} | quantization
    return save_hf(directory, tensors, LLAMA_CONFIG | {"quantization_config": config})


def parts_of(fmt="int3_g32_asym", n=33, k=96, padded=False, zeros_padded=None):
    """(tensors of a module, what they mean) in either packing."""
    q = random_tensor(fmt, n, k)
    bits = q.format.bits
    pack = padded_words if padded else pack_codes
    parts = {
        "weight_packed": pack(q.codes, bits),
        "weight_scale": q.scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if q.zeros is not None:
        parts["weight_zero_point"] = (padded_words if padded else pack_codes)(q.zeros.T.contiguous(), bits).T
    return parts, q


ASYM3 = {"g": scheme(3, False, "group", 32)}
