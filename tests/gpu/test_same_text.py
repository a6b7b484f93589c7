"""Greedy text on a GPU and on a CPU: the same weights choose the same tokens, but where two are all but equal."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from lowbit.models.config import ModelConfig
from lowbit.models.decoder import Decoder
from lowbit.nn import convert

CONFIG = ModelConfig("llama", 512, 256, 512, 3, 8, 2, 32, 1024)
PROMPT, TOKENS = 7, 64
TIE = 0.1  # between the two best logits, which have a standard deviation of about one


def _greedy(model: Decoder, prompt: Tensor) -> tuple[list[int], list[Tensor]]:
    """The tokens chosen, and the logits they were chosen from."""
    device = next(model.parameters()).device
    cache = model.new_cache(1, PROMPT + TOKENS)
    step, tokens, logits = prompt.to(device), [], []
    for _ in range(TOKENS):
        logits.append(model(step, cache, last_only=True)[0, -1].float().cpu())
        tokens.append(int(logits[-1].argmax()))
        step = torch.tensor([[tokens[-1]]], device=device)
    return tokens, logits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_format", ["auto", "contiguous"])
@pytest.mark.parametrize("name", ["int4_g64", "int8_g128", "nf4_g64"])
def test_greedy_text_is_the_cpus(name: str, cache_format: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cpu = Decoder(CONFIG).requires_grad_(False).eval().to(dtype)
    gpu = copy.deepcopy(cpu).cuda()
    gpu.cache_format = cache_format
    for model in (cpu, gpu):
        convert(model, {"_proj": name})
    same = 0
    with torch.inference_mode():
        for seed in range(4):
            prompt = torch.randint(0, 512, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
            expected, logits = _greedy(cpu, prompt)
            found, _ = _greedy(gpu, prompt)
            parting = next((i for i in range(TOKENS) if found[i] != expected[i]), TOKENS)
            same += parting
            if parting < TOKENS:  # from here on the texts are different ones
                best = logits[parting].topk(2).values
                assert float(best[0] - best[1]) < TIE
    assert same >= TOKENS  # of 4 x TOKENS
