"""What a quantization scheme is: which tensors of a module it claims, and how they fold into one QuantizedTensor.

A new scheme is one file with a Scheme and one line in SCHEME_MODULES. `parse` checks the quantization_config. `fold`
sees the tensors of one module by local name ("weight_packed", "weight_scale"), checks their shapes and dtypes against
each other and the settings, and returns an Entry whose `load` reads them; it reads no weights itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lowbit.checkpoint.base import Entry
from lowbit.checkpoint.huggingface.store import StoredTensor, TensorStore
from lowbit.errors import CheckpointError

SCHEME_MODULES = (  # in the order they are asked
    "lowbit.checkpoint.compressed_tensors.reader",
    "lowbit.checkpoint.gptq.reader",
    "lowbit.checkpoint.awq.reader",
    "lowbit.checkpoint.auto_round",
    "lowbit.checkpoint.exl2",
    "lowbit.checkpoint.fp8",
    "lowbit.checkpoint.modelopt",
    "lowbit.checkpoint.bitnet",
)


class Module:
    """The tensors of one quantized module. `take` checks and hands out; what nobody takes is an error."""

    def __init__(self, name: str, tensors: dict[str, StoredTensor]) -> None:
        self.name = name
        self.tensors = tensors
        self._taken: set[str] = set()

    def has(self, local: str) -> bool:
        """Whether the module has a tensor of that local name."""
        return local in self.tensors

    def take(self, local: str, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> StoredTensor:
        """The tensor, whose shape and dtype must be one of those given. Raises CheckpointError."""
        if local not in self.tensors:
            raise self.wrong(local, "is missing: a quantized module needs all its tensors")
        stored = self.tensors[local]
        self._taken.add(local)
        if stored.shape not in shapes:
            expected = " or ".join(str(list(s)) for s in shapes)
            raise self.wrong(local, f"has shape {list(stored.shape)}: {expected} was expected from the other tensors")
        if stored.dtype not in dtypes:
            expected = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise self.wrong(local, f"has dtype {str(stored.dtype).removeprefix('torch.')}: {expected} was expected")
        return stored

    def finish(self) -> None:
        """Raises CheckpointError for tensors that were not taken."""
        if left := sorted(self.tensors.keys() - self._taken):
            raise self.wrong(left[0], "is left over: nothing says what it means in a module quantized this way")

    def wrong(self, local: str, what: str) -> CheckpointError:
        """An error about one tensor of this module."""
        stored = next(iter(self.tensors.values()))
        return CheckpointError(
            f"{stored.path.parent}: tensor {self.name + '.' + local!r} {what}; the files are damaged or their "
            "quantization_config is not theirs; download the model again"
        )

    def finite(self, local: str, values: Tensor) -> Tensor:
        """`values`, after checking that all are finite. For scales, when they are read."""
        if not bool(torch.isfinite(values).all()):
            raise self.wrong(local, "holds numbers that are not finite: scales must be finite")
        return values


@dataclass(frozen=True)
class Folded:
    """What a scheme made of a store: entries by parameter name, the tensors they use, and what was assumed."""

    entries: dict[str, Entry]
    claimed: set[str]
    assumptions: list[str]


S = TypeVar("S")


@dataclass(frozen=True)
class Scheme(Generic[S]):
    """A way of storing quantized modules. `parse` and `fold` raise CheckpointError for what contradicts it.

    A scheme whose tensors say everything names one in `marker`: it is then known without a quantization_config.
    """

    name: str
    recognise: Callable[[Mapping[str, Any]], bool]  # from the quantization_config
    parse: Callable[[Mapping[str, Any]], S]  # the quantization_config; its errors need not name the file
    fold: Callable[[TensorStore, S], Folded]
    marker: str | None = None

    def read(self, store: TensorStore, quantization: Mapping[str, Any]) -> Folded:
        """Every quantized module of a store. Raises CheckpointError naming the file, and the tensor or key."""
        try:
            settings = self.parse(quantization)
        except CheckpointError as error:
            raise CheckpointError(f"{store.path}: {error}") from None
        return self.fold(store, settings)


def quantized_modules(
    store: TensorStore, marker: str, parts: frozenset[str], without: Container[str] = ()
) -> list[Module]:
    """The modules that have a tensor `<module>.<marker>`, each with all its own tensors but the bias and `without`.

    `parts` are the other local names that only a quantized module has. Raises CheckpointError when one of them stands
    in a module without the marker.
    """
    return modules_where(store, marker, lambda tensors: marker in tensors, parts, without)


def modules_where(
    store: TensorStore,
    marker: str,
    quantized: Callable[[Mapping[str, StoredTensor]], bool],
    parts: frozenset[str],
    without: Container[str] = (),
) -> list[Module]:
    """quantized_modules() where a look at a module's tensors, not a name alone, tells that it is quantized.

    `marker` is the local name that an error says is missing, or of another kind.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    for key in store:
        module, _, local = key.rpartition(".")
        if local != "bias" and key not in without:
            modules.setdefault(module, {})[local] = store[key]
    found = []
    for name, tensors in modules.items():
        module_view = Module(name, tensors)
        if quantized(tensors):
            found.append(module_view)
        elif orphans := sorted(parts & tensors.keys()):
            state = "is not quantized" if marker in tensors else "is missing"
            raise module_view.wrong(marker, f"{state}, but {orphans[0]!r} is there: a module has both or neither")
    return found


def listed(names: list[str], most: int = 3) -> str:
    """Names for a sentence, the first ones and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def exceptions(
    store: TensorStore, quantization: Mapping[str, Any], key: str, default: list[str] | None = None
) -> Callable[[str], bool]:
    """Whether a list of the quantization_config names a module: an entry is the start or the end of its path.

    Raises CheckpointError for what is no list of names. default: where the config has none.
    """
    entries = quantization.get(key)
    if entries is not None and not (isinstance(entries, list) and all(isinstance(e, str) for e in entries)):
        raise CheckpointError(f"{store.path}: {key} is {entries!r}: it must be a list of names; copy the config again")
    names = frozenset((default or []) if entries is None else entries)
    lengths = sorted({len(name) for name in names})  # names are looked up, not tried: there may be one a module

    def names_module(module: str) -> bool:
        path = f"{module}."
        return any(
            module[len(module) - n :] in names or (path[n] == "." and module[:n] in names)
            for n in lengths
            if n <= len(module)
        )

    return names_module


def note_plain(
    store: TensorStore,
    claimed: set[str],
    expected: Callable[[str], bool],
    assumptions: list[str],
    everywhere: bool = False,
) -> None:
    """Note matrices that the config calls quantized (expected(module)) but the file stores plain.

    Inside of layers, or `everywhere`. The tensors decide.
    """
    plain = []
    for name in store:
        module, _, local = name.rpartition(".")
        inside = everywhere or any(part.isdigit() for part in module.split("."))
        if local == "weight" and inside and name not in claimed and len(store[name].shape) == 2 and expected(module):
            plain.append(module)
    if plain:
        assumptions.append(f"the config calls {listed(plain)} quantized, but stored are plain weights: used")


def schemes() -> list[Scheme[Any]]:
    """Every registered scheme, in the order they are asked."""
    return [import_module(name).SCHEME for name in SCHEME_MODULES]


def scheme_of_tensors(store: TensorStore, has_config: bool) -> Scheme[Any] | None:
    """The scheme of a store without quantization_config: one whose tensors say everything, or None if all are plain.

    Raises CheckpointError for weights of a model that are quantized in a way that only a quantization_config tells.
    """
    locals_ = {name.rpartition(".")[2]: name for name in reversed(list(store))}
    for scheme in schemes():
        if scheme.marker in locals_:
            return scheme
    if has_config and "qweight" in locals_:
        raise CheckpointError(
            f"{store.path}: tensor {locals_['qweight']!r} is quantized, but there is no quantization_config: copy "
            "quantize_config.json or quant_config.json from the original, or say what it is: "
            'open_checkpoint(path, quantization={"quant_method": "gptq", "bits": 4, "group_size": 128})'
        )
    return None


def find_scheme(quantization: Mapping[str, Any], where: str) -> Scheme[Any]:
    """The scheme a quantization_config names. Raises CheckpointError for one that is not known."""
    for scheme in schemes():
        if scheme.recognise(quantization):
            return scheme
    method = quantization.get("quant_method", quantization.get("method"))
    raise CheckpointError(
        f"{where}: quant_method {method!r} is not known: {', '.join(s.name for s in schemes())} and unquantized "
        "weights are read; use a checkpoint in one of these, or the original one"
    )
