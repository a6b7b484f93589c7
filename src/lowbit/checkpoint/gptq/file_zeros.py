"""The zero points of one GPTQ file: which rule it follows, decided from its settings and its first symmetric module."""

from __future__ import annotations

import warnings

from torch import Tensor

from lowbit.checkpoint.base import CheckpointWarning
from lowbit.checkpoint.gptq.settings import ModuleSettings, Settings
from lowbit.checkpoint.gptq.zeros import WORD_BITS, Rule, lost_words, zero_points
from lowbit.checkpoint.huggingface.scheme import Module
from lowbit.checkpoint.streams import stream_words

OVERRIDE = "quantization={'checkpoint_format': 'gptq_v2'}"


class FileZeros:
    """The zero points of one file: whether its symmetric modules are, by which rule fields are read, what was lost."""

    def __init__(self, settings: Settings, assumptions: list[str]) -> None:
        self.settings, self.assumptions = settings, assumptions
        v1 = Rule.WORDS if settings.by_gptqmodel else Rule.FIELDS
        self.rule = Rule.AS_STORED if settings.layout != "gptq" else v1
        self._warned = False

    def decide(self, modules: list[Module], kinds: dict[str, ModuleSettings]) -> dict[str, ModuleSettings]:
        """Settings of each module; what the config calls symmetric is believed if the first such module bears it out.

        Reads the zero points of that module.
        """
        first = next((m for m in modules if kinds[m.name].symmetric and m.has("qzeros")), None)
        if first is not None:
            bits = kinds[first.name].bits
            fields = stored_fields(first, bits, self.settings)
            least, most = (int(v) for v in fields.aminmax())
            half = 1 << (bits - 1)
            if (least, most) not in {(half, half), (half - 1, half - 1)}:
                said = "says sym" if self.settings.states_symmetric else "does not say whether it is sym"
                self.assumptions.append(
                    f"the config {said}, but zero points such as those of {first.name} differ: used as stored"
                )
                kinds = {
                    name: ModuleSettings(kind.bits, kind.group_size, False) if kind.symmetric else kind
                    for name, kind in kinds.items()
                }
            elif self.rule is not Rule.AS_STORED and least == half:
                self.rule = Rule.AS_STORED
                self.assumptions.append(
                    "checkpoint_format means zero points stored less one, but those of symmetric modules are stored "
                    "as they are: so are all, as in 'gptq_v2'"
                )
        if any(not kind.symmetric for kind in kinds.values()):
            self._say()
        return kinds

    def _say(self) -> None:
        layout = self.settings.layout
        said = (
            f"checkpoint_format {layout!r}" if self.settings.states_layout else f"no checkpoint_format, so {layout!r}"
        )
        if self.rule is not Rule.AS_STORED:
            remedy = f"; if the model answers nonsense, open it with {OVERRIDE} or write that into its config"
            self.assumptions.append(f"zero points are stored {self.rule.value}: {said}{remedy}")

    def read(self, module: Module, kind: ModuleSettings, n: int) -> Tensor | None:
        """Zero points uint8 [G, n], None where all are in the middle. Raises CheckpointError where they are not."""
        bits = kind.bits
        if kind.symmetric:
            least, most = (int(v) for v in stored_fields(module, bits, self.settings).aminmax())
            half = 1 << (bits - 1)
            if (least, most) not in {(half, half), (half - 1, half - 1)}:
                raise module.wrong(
                    "qzeros",
                    f"holds fields from {least} to {most}, but the module is symmetric, so all are {half - 1} (or "
                    f"{half}); open the model with quantization={{'sym': False}} if it is not",
                )
            return None
        stored = module.tensors["qzeros"].read()
        planar = self.settings.is_planar(bits)
        if self.rule is Rule.FIELDS and not self._warned:
            self._warn(module, lost_words(stored_fields(module, bits, self.settings), bits, WORD_BITS[stored.dtype]))
        return zero_points(stored, bits, n, Rule.AS_STORED if planar else self.rule, planar)

    def _warn(self, module: Module, lost: int) -> None:
        if lost:
            self._warned = True
            warnings.warn(
                f"{module.name}: {lost} words of qzeros end in fields of ones, as a writer leaves that stores a zero "
                "point of 0 as -1 over its neighbours: their zero points are lost; quantize the model again, or use "
                "a file in the format gptq_v2",
                CheckpointWarning,
                stacklevel=2,
            )


def stored_fields(module: Module, bits: int, settings: Settings) -> Tensor:
    """The stored fields of a module's zero points, uint8 [G, n]; its shapes have not been checked yet."""
    stored = module.tensors["qzeros"]
    scales = module.tensors.get("scales")
    planar = settings.is_planar(bits)
    n = scales.shape[-1] if scales is not None and scales.shape else 0
    words = zero_words(n, bits, settings)
    if scales is None or not n or stored.dtype != settings.word or stored.shape != (scales.shape[0], words):
        raise module.wrong("qzeros", f"has shape {list(stored.shape)}: it does not fit the scales")
    return zero_points(stored.read(), bits, n, Rule.AS_STORED, planar)


def zero_words(n: int, bits: int, settings: Settings) -> int:
    return stream_words(n, bits, WORD_BITS[settings.word])
