"""Method: how one weight is rounded, given what calibration says about its inputs. One file and one registry row each.

class Mine(Method):
    name, needs_inputs = "mine", True
    def round(self, weight, format, inputs): ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lowbit.errors import QuantizationError
from lowbit.formats import QuantizedTensor, WeightFormat
from lowbit.quantizers.hessian import Inputs

SEARCHES = ("auto", "mse", "none")
SEARCHED_BITS = 6  # "auto": above this the search takes minutes and wins under 5 % of an error that is small already


@dataclass(frozen=True)
class Options:
    """What all methods may be told. Each uses what it knows."""

    search: str = "auto"  # of scales: "mse", "none", or "auto": "mse" up to 6 bits
    order: str = "groups"  # GPTQ: see gptq.py
    damping: float = 0.01  # GPTQ

    def __post_init__(self) -> None:
        if self.search not in SEARCHES:
            raise QuantizationError(
                f"search={self.search!r}: it is 'auto', 'mse' (least squared error) or 'none' (cover the group)"
            )

    def search_of(self, format: WeightFormat) -> Literal["mse", "none"]:  # noqa: A002 - the field's word
        """How `lowbit.quantize` looks for the scales of a format."""
        return "mse" if self.search == "mse" or (self.search == "auto" and format.bits <= SEARCHED_BITS) else "none"


@dataclass(frozen=True)
class Rounded:
    """A quantized weight, and in a sentence what was done otherwise than asked for."""

    tensor: QuantizedTensor
    note: str = ""


class Method(ABC):
    """A way to round a weight."""

    name: ClassVar[str]
    needs_inputs: ClassVar[bool] = True  # whether it cannot do without calibration
    rescales: ClassVar[bool] = False  # whether features are rescaled before (see awq.py)

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def round(self, weight: Tensor, format: WeightFormat, inputs: Inputs | None) -> Rounded:  # noqa: A002
        """Round a weight [n, k]. inputs: None where there was no calibration; otherwise it has seen tokens.

        Raises QuantizationError where the weight cannot be rounded so; the job then rounds it to nearest and says so.
        """
