"""GPTQ, AWQ and EXL2 files with random damage either open and load or raise CheckpointError, and never take memory that
the file could not hold."""

from __future__ import annotations

import json
import struct
import warnings
from typing import Any

import pytest
import torch
from checkpoint_builders import LLAMA_CONFIG, save_hf
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_files import NAME, awq, draw, exl2, gptq, marlin_scales, marlin_words
from test_fuzz_checkpoint import paths_of, replaced

from lowbit.checkpoint import open_checkpoint
from lowbit.errors import CheckpointError
from lowbit.packing import StoredWeight, pack_as

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq",
        "pack_dtype": "int32", "dynamic": {"-:.*no.*": {}, ".*up.*": {"bits": 4, "group_size": 32, "sym": False}},
        "meta": {"quantizer": ["gptqmodel:1"]}}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "modules_to_not_convert": ["x"]}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
AUTO |= {"packing_format": "auto_round", "extra_config": {"lm_head": {"bits": 16}, ".*up.*": {"group_size": 32}}}
NUMBERS = draw(64, 192, 4, 32)
CASES: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "gptq": (gptq(NUMBERS, 4), GPTQ),
    "gptq planes": (gptq(draw(64, 192, 5, 32), 5, planar=True), GPTQ | {"bits": 5, "dynamic": None}),
    "gptq marlin": (
        {"B": marlin_words(NUMBERS.codes), "s": marlin_scales(NUMBERS.scales)}, GPTQ | {"checkpoint_format": "marlin"}
    ),
    **{f"awq {v}": (awq(NUMBERS, v), AWQ | {"version": v}) for v in ("gemm", "gemv", "gemv_fast", "llm-awq", "marlin")},
    "auto-round": (gptq(NUMBERS, 4), AUTO),
    "auto-round awq": (awq(NUMBERS, "gemm"), AUTO | {"packing_format": "auto_round:auto_awq"}),
    "exl2": (exl2(64, [(8, 32), (5, 64), (4, 64), (2, 32)])[0], {"quant_method": "exl2", "bits": 4.0}),
}  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.integers() | st.floats(allow_nan=False)
    | st.sampled_from(["", "gptq", "marlin", "(", "a" * 200, "int64", "llm-awq"]),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["bits", "x", "-:("]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]


def use(directory) -> bool:
    """Open a checkpoint and read all of it. Returns whether that worked."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = open_checkpoint(directory)
            for name in checkpoint:
                checkpoint[name]
                if isinstance(stored := checkpoint.stored(name), StoredWeight):
                    pack_as(stored, "cpu_tile")
    except CheckpointError as error:
        assert str(directory) in str(error)
        return False
    return True


def save(directory, tensors, quantization):
    named = {f"{NAME}.{local}": t for local, t in tensors.items()}
    return save_hf(directory, named, LLAMA_CONFIG | {"intermediate_size": 64, "quantization_config": quantization})


@pytest.mark.parametrize("case", CASES)
def test_undamaged_they_load(tmp_path, case):
    assert use(save(tmp_path, *CASES[case]))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), case=st.sampled_from(list(CASES)), value=VALUES)
def test_settings(tmp_path_factory, data, case, value):
    tensors, quantization = CASES[case]
    path = data.draw(st.sampled_from([p for p in paths_of(quantization) if p]))
    use(save(tmp_path_factory.mktemp("settings"), tensors, replaced(quantization, path, value)))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), case=st.sampled_from(list(CASES)))
def test_tensors(tmp_path_factory, data, case):
    """A tensor is gone, of another shape or dtype, or holds something else."""
    tensors, quantization = CASES[case]
    tensors = {name: t.clone() for name, t in tensors.items()}
    for _ in range(data.draw(st.integers(1, 2))):
        local = data.draw(st.sampled_from(list(tensors)))
        tensor = tensors[local]
        what = data.draw(st.sampled_from(["remove", "shape", "cut", "dtype", "bytes", "value", "extra"]))
        if what == "remove" and len(tensors) > 1:
            del tensors[local]
        elif what == "shape" and tensor.numel() % 2 == 0 < tensor.numel():
            tensors[local] = tensor.reshape(data.draw(st.sampled_from([(-1,), (1, -1), (-1, 1), (2, -1), (1, 1, -1)])))
        elif what == "cut":
            tensors[local] = tensor[: data.draw(st.integers(0, len(tensor)))].clone()
        elif what == "dtype":
            tensors[local] = tensor.to(data.draw(st.sampled_from(DTYPES)))
        elif what == "bytes" and tensor.numel() > 1:
            data_bytes = tensor.reshape(-1).view(torch.uint8)
            for _ in range(data.draw(st.integers(1, 8))):
                data_bytes[data.draw(st.integers(0, len(data_bytes) - 1))] = data.draw(st.integers(0, 127))
        elif what == "value":
            tensors[local] = torch.full_like(tensor, data.draw(st.sampled_from([0, 1, -1, 100])))
        else:
            tensors[data.draw(st.sampled_from(["g_idx", "qzeros", "weight", "q_perm", "more"]))] = torch.zeros(3)
    use(save(tmp_path_factory.mktemp("tensors"), tensors, quantization))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), case=st.sampled_from(list(CASES)))
def test_headers_that_lie(tmp_path_factory, data, case):
    """Shapes, dtypes and offsets of the header changed, or the file cut off."""
    directory = save(tmp_path_factory.mktemp("header"), *CASES[case])
    raw = (directory / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    body = raw[8 + length :]
    key = data.draw(st.sampled_from([k for k in header if k != "__metadata__"]))
    field = data.draw(st.sampled_from(["shape", "dtype", "data_offsets", "cut"]))
    if field == "cut":
        body = body[: data.draw(st.integers(0, len(body)))]
    elif field == "dtype":
        header[key]["dtype"] = data.draw(st.sampled_from(["I8", "I32", "F16", "F32", "I64", "F8_E4M3", "X"]))
    else:
        header[key][field] = data.draw(st.lists(st.integers(-1, 2**40) | st.integers(0, 300), max_size=3))
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    use(directory)
