"""Checkpoint: a lazy mapping from Hugging Face parameter names to tensors, whatever file they come from.

A reader describes every parameter by an Entry (shape, stored form, and how to load it) and reads nothing else; a weight
is read when it is asked for and kept by nobody, so memory is bounded by the largest tensor in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.errors import CheckpointError
from lowbit.formats import QuantizedTensor, Section, WeightFormat
from lowbit.packing import StoredWeight

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# entries of an attention module beside its weights: what a quantized cache of keys and values is scaled by
CACHE_PARTS = frozenset(f"{what}_{kind}" for what in ("q", "k", "v", "kv", "prob") for kind in ("scale", "zero_point"))

Value = Tensor | QuantizedTensor
Progress = Callable[[int, int, str], None]  # (done_bytes, total_bytes, name of what was just done)


class MissingTensor(CheckpointError, KeyError):
    """A parameter that the checkpoint does not have. Also a KeyError, as a Mapping promises."""

    __str__ = Exception.__str__  # KeyError would print the repr


class CheckpointWarning(UserWarning):
    """A file that can be read, but bears signs that what it holds is not what its maker meant."""


@dataclass(frozen=True)
class Entry:
    """One parameter as it lies in the file: known without reading it, and how to read it."""

    shape: tuple[int, ...]
    form: torch.dtype | WeightFormat  # dtype of a plain tensor, format of a quantized one
    load: Callable[[], Value | StoredWeight] = field(repr=False)
    sections: tuple[Section, ...] = ()  # of a quantized weight whose format changes along k
    act_order: bool = False  # whether its columns are stored in an order of their own
    activations: str | None = None  # how the model was trained to round this linear's input: a name of nn.ROUNDINGS

    def read(self) -> Value:
        """The parameter, a quantized one with one code a byte."""
        value = self.load()
        return value.quantized() if isinstance(value, StoredWeight) else value

    @property
    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter as its form counts them: codes at their width, scales, zeros and order included."""
        if not isinstance(self.form, WeightFormat):
            return self.numel * self.form.itemsize
        n, k = self.shape
        parts = [(s.format, s.stop - s.start) for s in self.sections] or [(self.form, k)]
        bits = sum(form.total_bits(n, columns) for form, columns in parts)
        return -(-bits // 8) + (4 * k if self.act_order else 0)


@dataclass(frozen=True)
class TokenizerData:
    """A tokenizer and what a runtime must know besides.

    `tokenizer.encode(text)` puts the beginning-of-sequence token in front exactly when `add_bos`;
    `tokenizer.encode(text, add_special_tokens=False)` never does. Special tokens written in the text are recognised
    by both.
    """

    tokenizer: Tokenizer = field(repr=False)
    chat_template: str | None = field(default=None, repr=False)  # jinja2 source, from a stranger
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # every token that ends an answer, the main one first
    add_bos: bool = False
    bos_token: str = ""
    eos_token: str = ""


class Checkpoint(Mapping[str, Value]):
    """Parameters of a model by Hugging Face name, read on access; its configuration and tokenizer.

    `checkpoint["model.layers.0.mlp.up_proj.weight"]` reads and returns a plain tensor or a QuantizedTensor; the name of
    the module alone means its weight. Iterating, `len`, `in`, `entries` and `config` read no weights. `config` has the
    keys of a config.json in the flat style (rope_theta, rope_scaling, dtype). `assumptions` lists in sentences what the
    file left open and was decided.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        config: Mapping[str, Any],
        *,
        format_name: str,
        path: Path | None = None,
        assumptions: list[str] | None = None,
        tokenizer: Callable[[], TokenizerData] | None = None,
        sidecars: tuple[Path, ...] = (),
    ) -> None:
        self.entries = dict(entries)
        self.config = dict(config)
        self.format_name = format_name
        self.path = path
        self.assumptions = list(assumptions or ())
        self.sidecars = sidecars  # tokenizer and generation files beside the weights, copied as they are by writers
        self._tokenizer = tokenizer

    def __getitem__(self, name: str) -> Value:
        """Read one parameter. Raises MissingTensor, or CheckpointError when the file is damaged there."""
        return self.entries[self._key(name)].read()

    def stored(self, name: str) -> Value | StoredWeight:
        """Read one parameter to be packed: where codes can stay in the words of the file until then, they do.

        `lowbit.pack(checkpoint.stored(name))` is the same weight as `lowbit.pack(checkpoint[name])`, sooner.
        """
        return self.entries[self._key(name)].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries or f"{name}.weight" in self.entries

    __eq__ = object.__eq__  # a Mapping would compare, and so read, every weight
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        model = self.config.get("model_type", "unknown model")
        return f"Checkpoint({model}, {len(self)} parameters, {self.format_name}, {str(self.path)!r})"

    def _key(self, name: str) -> str:
        for key in (name, f"{name}.weight"):
            if key in self.entries:
                return key
        raise MissingTensor(
            f"{name!r} is not in {self.path or 'this checkpoint'}: it has {len(self)} parameters, such as "
            f"{', '.join(list(self.entries)[:3]) or 'none'}; list(checkpoint) names them all"
        )

    def entry(self, name: str) -> Entry:
        """Shape and form of a parameter, without reading it. Raises MissingTensor."""
        return self.entries[self._key(name)]

    def tokenizer(self) -> TokenizerData:
        """The tokenizer that belongs to the weights. Raises CheckpointError if there is none or it is not known."""
        if self._tokenizer is None:
            raise CheckpointError(
                f"{self.path or 'this checkpoint'} has no tokenizer: pass token ids instead of text, or put the "
                "model's tokenizer.json beside its weights"
            )
        return self._tokenizer()

    def with_entries(self, entries: Mapping[str, Entry]) -> Checkpoint:
        """A view of the same file with other parameters."""
        view = copy(self)
        view.entries = dict(entries)
        return view

    def mapped(
        self,
        change: Callable[[str, Value], Value],
        form: Callable[[str, Entry], torch.dtype | WeightFormat],
        *,
        format_name: str | None = None,
        assumptions: list[str] | None = None,
    ) -> Checkpoint:
        """A lazy view whose parameters are `change(name, value)`.

        `form(name, entry)` says beforehand what `change` will return: a dtype, or a WeightFormat.
        """

        def changed(name: str, entry: Entry) -> Entry:
            new_form = form(name, entry)
            if new_form == entry.form:
                return replace(entry, load=lambda: change(name, entry.read()))
            return Entry(entry.shape, new_form, lambda: change(name, entry.read()))

        return Checkpoint(
            {name: changed(name, entry) for name, entry in self.entries.items()},
            self.config,
            format_name=format_name or self.format_name,
            path=self.path,
            assumptions=self.assumptions + list(assumptions or ()),
            tokenizer=self._tokenizer,
            sidecars=self.sidecars,
        )

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Checkpoint:
        """A lazy view with every quantized weight as a plain tensor of `dtype`, and plain tensors cast to it."""

        def change(name: str, value: Value) -> Value:
            return value.dequantize(dtype) if isinstance(value, QuantizedTensor) else value.to(dtype)

        view = self.mapped(change, lambda name, entry: dtype, format_name=f"{self.format_name}, dequantized")
        view.config = {k: v for k, v in self.config.items() if k != "quantization_config"} | {
            "dtype": str(dtype).removeprefix("torch.")
        }
        return view
