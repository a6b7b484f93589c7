"""What Linear and Embedding share: a PackedWeight held as buffers, so that state_dict, .to() and deepcopy work.

Words, scales and zeros keep their types: `.to(torch.bfloat16)`, `.half()` and the like move them but never convert
them, because converting would change the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from lowbit.errors import FormatError
from lowbit.packing import TENSORS, Description, PackedWeight


class PackedModule(nn.Module):
    """Holds one PackedWeight. `weight` gives it back, with its launch handles as long as no tensor was replaced."""

    _weight: PackedWeight | None
    description: Description

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self.description = weight.description
        for name in TENSORS:
            self.register_buffer(name, getattr(weight, name))
        self._weight = weight

    @property
    def weight(self) -> PackedWeight:
        """The packed weight [n, k]."""
        held, buffers = self._weight, self._buffers
        if held is not None:
            for name in TENSORS:  # for every token: no generator
                if getattr(held, name) is not buffers[name]:
                    break
            else:
                return held
        held = self._weight = self.description.assemble({name: buffers[name] for name in TENSORS})
        return held

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        def keep_type(t: Tensor) -> Tensor:
            if any(t is getattr(self, name) for name in TENSORS):
                moved = fn(t)
                return moved if moved.dtype == t.dtype else t.to(moved.device)
            return fn(t)

        super()._apply(keep_type, recurse)  # type: ignore[no-untyped-call]
        self._weight = None
        return self

    def get_extra_state(self) -> tuple[object, ...]:
        return tuple(self.description)

    def set_extra_state(self, state: Any) -> None:
        """Raises FormatError for the state of another weight."""
        if tuple(state) != tuple(self.description):
            raise FormatError(
                f"state of a weight {tuple(state)[:4]} loaded into one of {tuple(self.description)[:4]}: build the "
                "module from the same format, layout and shape"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = f"{prefix}{_EXTRA_STATE_KEY_SUFFIX}"
        if key in state_dict:  # torch would ask only after it copied the tensors
            self.set_extra_state(state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._weight = None

    def extra_repr(self) -> str:
        d = self.description
        return f"n={d.n}, k={d.k}, {d.format}, layout={d.layout}"
