"""Whether modules still hold the tensors that something was made from: for programs and graphs that keep addresses."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class Watch:
    """The modules, parameters and buffers under some roots, as they are now.

    `holds()` is false once one of them was replaced or their memory moved, or a parameter was changed in place (norms
    and biases are copied into programs; packed weights are read where they lie, so changes in place are seen anyway).
    Writing through `parameter.data` hides the change from torch itself, and so from here.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        roots = list(roots)
        modules = {id(m): m for root in roots for m in root.modules()}
        self._entries: list[tuple[dict[str, object], str, object]] = []
        self._versions: list[tuple[Tensor, int]] = []
        # torch moves the memory of all tensors of a model that it sends to another process: one of each root tells
        tensors = [t for root in roots for t in (*root.parameters(), *root.buffers())[:1]]
        self._places = [(t, t.data_ptr()) for t in tensors]
        for module in modules.values():
            for owner in (module._modules, module._parameters, module._buffers):
                entries = [(owner, name, value) for name, value in owner.items() if value is not None]
                self._entries += entries  # type: ignore[arg-type]
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.is_inference():  # those have no versions
                    self._versions.append((parameter, parameter._version))

    def holds(self) -> bool:
        """Whether nothing was replaced or changed. Called for every token: no generator, no properties."""
        for owner, name, value in self._entries:
            if owner[name] is not value:
                return False
        for tensor, place in self._places:
            if tensor.data_ptr() != place:
                return False
        for tensor, version in self._versions:  # noqa: SIM110
            if tensor._version != version:
                return False
        return True
