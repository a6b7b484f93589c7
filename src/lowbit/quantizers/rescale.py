"""Moving a factor of each feature from the module in front of a stage into the stage's linears.

    norm or linear:  weight / s (its outputs)          linears of the stage:  weight * s (their inputs)

The float model stays the same. A norm keeps its dtype, so s is rounded to what the norm's new weight can hold, and the
linears get exactly what the norm lost.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.models.decoder import Layer
from lowbit.models.norm import RMSNorm
from lowbit.quantizers.stages import Stage


def front(block: Layer, stage: Stage) -> str | None:
    """The path of the module that takes the factors: a norm right in front, or the linear behind whose output there is
    only a product with something else; None where there is neither."""
    for path in stage.folds:
        try:
            module = block.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(module, RMSNorm | nn.Linear):
            return path
    return None


def fold(block: Layer, stage: Stage, scale: Tensor, stored: torch.dtype, groups: int = 1, head_dim: int = 1) -> None:
    """Divide what comes into the stage by scale [k], and multiply the stage's weights by it.

    stored: the dtype in which the module in front will be saved, if it is a norm. groups, head_dim: as for
    awq.choose_scale, where the module in front has a feature for each `groups` of the stage's.
    """
    path = front(block, stage)
    assert path is not None
    module = block.get_submodule(path)
    assert isinstance(module, RMSNorm | nn.Linear)
    if isinstance(module, RMSNorm):
        old = module.weight
        new = (old / scale).to(stored).to(old.dtype)
        scale = torch.where(new != 0, old / new, 1.0)
        module.weight = nn.Parameter(torch.where(new != 0, new, old), requires_grad=False)
    else:
        own = scale if groups == 1 else scale.reshape(-1, groups, head_dim)[:, 0].reshape(-1)
        module.weight = nn.Parameter(module.weight / own[:, None], requires_grad=False)
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias / own, requires_grad=False)
    for linear in stage.linears:
        target = block.get_submodule(linear)
        assert isinstance(target, nn.Linear)
        target.weight = nn.Parameter(target.weight * scale, requires_grad=False)
