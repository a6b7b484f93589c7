"""GPTQ and the job on a GPU: the same as on the CPU, but for weights that lie next to a rounding boundary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowbit.checkpoint import Checkpoint, Entry
from lowbit.formats import QuantizedTensor, parse_format
from lowbit.models import Decoder, model_config
from lowbit.quantizers import Job, Recipe, Settings, calibration
from lowbit.quantizers.gptq import ORDERS, gptq
from lowbit.quantizers.hessian import Inputs, output_error

pytestmark = pytest.mark.gpu
CONFIG = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["int4_g64", "int3_g32_asym", "nf4_g64", "nvfp4", "fp8_e4m3"])
def test_gptq_equals_the_cpu(name: str, order: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 512, generator=generator)
    inputs = Inputs(512)
    inputs.add(torch.randn(2048, 512, generator=generator) * torch.exp(torch.randn(512, generator=generator)))
    cpu, _ = gptq(weight, parse_format(name), inputs.hessian, order=order)
    gpu, _ = gptq(weight.cuda(), parse_format(name), inputs.hessian.cuda(), order=order)
    assert (cpu.codes == gpu.codes.cpu()).float().mean() > 0.98
    errors = [output_error(q.to("cpu").dequantize() - weight, inputs.hessian) for q in (cpu, gpu)]
    assert errors[1] == pytest.approx(errors[0], rel=0.01)


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_the_job_runs_on_the_gpu(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {n: p.detach().to(torch.bfloat16) for n, p in Decoder(model_config(CONFIG)).named_parameters()}
    entries = {n: Entry(tuple(w.shape), w.dtype, lambda w=w: w) for n, w in weights.items()}  # type: ignore[misc]
    checkpoint = Checkpoint(entries, CONFIG, format_name="memory")
    data = calibration(torch.randint(128, (2000,)), "random tokens", samples=8, length=64)
    recipe = Recipe.uniform("int4_g64")
    job = Job(checkpoint, data, Settings(recipe, method, device=torch.device("cuda"), dtype=torch.bfloat16), tmp_path)
    rows = job.run()
    assert len(rows) == 2 * 7 + 2 and not any(row["note"] for row in rows)
    assert all(row["output_error"] < 0.05 for row in rows if row["output_error"] is not None)
    value = job.view()["model.layers.1.mlp.down_proj"]
    assert isinstance(value, QuantizedTensor) and value.device.type == "cpu"
