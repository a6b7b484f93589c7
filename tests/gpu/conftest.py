"""GPU tests run only where the kernels do, and end the process rather than hang."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_weights import compile_all

from lowbit.kernels.gpu.portable import chip_of

LIMIT_SECONDS = 120
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if why := reason or _unserved(_kernel_of(item)):
                item.add_marker(pytest.mark.skip(reason=why))


def _kernel_of(item: pytest.Item) -> str:
    """The kernel a test is about: its parameter, or Hopper's."""
    kernel: str = item.callspec.params.get("kernel", "hopper") if hasattr(item, "callspec") else "hopper"
    return kernel


def _unserved(kernel: str) -> str | None:
    capability = torch.cuda.get_device_capability()
    if kernel == "portable":
        return None if chip_of(0) else f"compute capability {capability}: the portable kernel does not serve it"
    return None if capability == (9, 0) else f"compute capability {capability}: this kernel is for 9.0"


@pytest.fixture(params=["hopper", "portable"])
def kernel(request: pytest.FixtureRequest) -> str:
    """The name of a kernel family; `-k portable` runs one of them."""
    name: str = request.param
    return name


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    compile_all({_kernel_of(item) for item in request.session.items if HERE in Path(item.path).parents})


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
