"""The registry of methods: a new one is a file with a Method and a row here."""

from __future__ import annotations

from lowbit.errors import QuantizationError
from lowbit.quantizers.awq import AWQ
from lowbit.quantizers.gptq import GPTQ
from lowbit.quantizers.method import Method, Options
from lowbit.quantizers.nearest import Nearest

METHODS: dict[str, type[Method]] = {method.name: method for method in (Nearest, AWQ, GPTQ)}


def get_method(name: str, options: Options | None = None) -> Method:
    """A method by name. Raises QuantizationError listing the names, and for options out of range."""
    if name not in METHODS:
        raise QuantizationError(f"method {name!r}: the methods are {', '.join(METHODS)}")
    return METHODS[name](options or Options())
