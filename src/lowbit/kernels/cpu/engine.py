"""LLVM behind one call: the text of a module in, the address of its function out.

llvmlite compiles the text to an object (10 to 30 ms), MCJIT maps it: pages are written first and made executable, not
both. Objects are kept on disk under a key made of the text, LLVM's version and the processor's features, and loaded
modules in memory, so a kernel is compiled once a machine and mapped once a process.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from functools import cache
from typing import Any

from lowbit.kernels.cpu.cache import ObjectCache, open_cache
from lowbit.kernels.cpu.isa import host_features, machine

ENTRY = "kernel"  # the name emitters give to the function of a module that is called from outside

# Held while LLVM works. No child is made by fork meanwhile: its copy of the lock, and of LLVM's, would stay held.
_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


def compile_object(text: str, triple: str, jit: bool = True) -> bytes:
    """The relocatable object of a module's text for any target LLVM knows; `jit` for one that this process maps."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple)
    parsed = llvm.parse_assembly(f'target triple = "{triple}"\n{text}')
    parsed.verify()
    model = "jitdefault" if jit else "small"
    emitter = target.create_target_machine(opt=3, reloc="pic", codemodel=model, jit=jit)
    return bytes(emitter.emit_object(parsed))


class Engine:
    """Compiles, caches and maps modules. One for the process; its methods may be called from any thread."""

    def __init__(self, cache: ObjectCache) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.cache = cache
        self.triple: str = llvm.get_process_triple()
        version = ".".join(map(str, llvm.llvm_version_info))
        self._salt = "\n".join((version, self.triple, ",".join(sorted(host_features()))))
        self._addresses: dict[str, int] = {}
        empty = llvm.parse_assembly(f'target triple = "{self.triple}"\n')
        self._jit: Any = llvm.create_mcjit_compiler(empty, llvm.Target.from_triple(self.triple).create_target_machine())

    def address(self, text: str) -> int:
        """The address of the module's function `kernel`, compiled now, earlier, or by another process."""
        if (known := self._addresses.get(text)) is not None:
            return known
        with _LOCK:
            if text not in self._addresses:
                self._addresses[text] = self._load(text)
            return self._addresses[text]

    def _load(self, text: str) -> int:
        import llvmlite.binding as llvm

        key = hashlib.sha256(f"{self._salt}\n{text}".encode()).hexdigest()[:40]
        symbol = f"lowbit_{key}"  # one namespace for all objects: every kernel has a name of its own
        code = self.cache.get(key)
        if code is None:
            code = compile_object(text.replace(f"@{ENTRY}(", f"@{symbol}("), self.triple)
            self.cache.put(key, code)
        self._jit.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._jit.finalize_object()
        address = int(self._jit.get_function_address(symbol))
        assert address, f"{symbol} is not in its object"
        return address


@cache
def engine() -> Engine:
    """The process's engine. Raises ImportError without llvmlite, UsageError for an impossible LOWBIT_CACHE_DIR."""
    return Engine(open_cache())


def unavailable() -> str | None:
    """Why compiled kernels cannot run here, or None if they can.

    LLVM's loader serves macOS and Windows too, but nobody has run these kernels there: they have to be asked for, by
    LOWBIT_CPU_KERNELS=untested, and take one thread.
    """
    if not sys.platform.startswith("linux") and os.environ.get("LOWBIT_CPU_KERNELS") != "untested":
        return (
            f"compiled CPU kernels are tested on Linux, this is {sys.platform}; LOWBIT_CPU_KERNELS=untested takes them"
        )
    if machine() not in {"x86_64", "aarch64"}:
        return f"compiled CPU kernels run on x86_64 and aarch64, this is {machine()}"
    try:
        engine()
    except ImportError as error:
        return f"llvmlite cannot be imported ({error}); pip install llvmlite"
    return None
