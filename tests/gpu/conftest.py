"""GPU tests run only where the kernels do, and end the process rather than hang."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_weights import compile_all

LIMIT_SECONDS = 120
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
    elif torch.cuda.get_device_capability() != (9, 0):
        reason = f"compute capability {torch.cuda.get_device_capability()}: these kernels are for 9.0"
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    compile_all()


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
