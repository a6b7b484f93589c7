"""Configurations that were measured to be the fastest: by this user on this device, else those shipped with lowbit.

user    <cache>/tuned/<device>.json, written by `lowbit tune` (store.py); a row serves the m it was measured with
        and smaller ones down to half of it, as long as kernels' source and compiler are the same
shipped dispatch/tuned/<device>.json, made by searches (benchmarks/tune.py table); a row serves every m that needs
        the same tile of tokens
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from lowbit.errors import UsageError
from lowbit.formats.weight_format import Zero
from lowbit.hardware import Gpu, assume, gpu, host
from lowbit.kernels import FAMILIES, KernelConfig, KernelFamily, Problem, get_family
from lowbit.places import cache_root
from lowbit.store import Row, Store, file_name

HERE, SHIPPED = "measured on this machine", "from the table shipped for this device"
_BAD_CONFIG = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError)


def measured_config(problem: Problem, names: list[str]) -> KernelConfig | None:
    """What this user measured to be the fastest of the families `names`, or None where nothing legal is known."""
    for row in _rows_here(problem):
        if row["family"] in names and (config := config_of(row, problem)) is not None:
            return config
    return None


def config_of(row: Row, problem: Problem) -> KernelConfig | None:
    """The configuration of a row, or None where its values are none or not legal for a problem."""
    try:
        family = get_family(row["family"])
        kinds = {field.name: type(getattr(family.default(problem), field.name)) for field in fields(family.config_type)}
        if any(type(value) is not kinds[name] for name, value in row["config"].items()):
            return None
        config = family.config_type(family=family.name, **row["config"])
        return config if family.legal(config, problem) is None else None
    except _BAD_CONFIG:
        return None


# ------------------------------------------------------------------------------------------------- what users measure
def device_name(device: str, index: int = 0) -> str:
    """What the device of a problem is called: the GPU's or the processor's name."""
    if device == "cuda":
        found = gpu(index)
        return found.name if found else "no GPU"
    return _host_name()


@cache
def _host_name() -> str:
    return host().name


def user_store(name: str) -> Store:
    """This user's measurements of a device; where there is no place for them, one that keeps nothing."""
    try:
        return Store(cache_root("measured configurations") / "tuned" / file_name(name), name)
    except UsageError:
        return Store(None, name)


def source_digest(family: str) -> str:
    """A digest of the source of a family's folder: with other kernels, measurements are made again."""
    return folders_digest(FAMILIES[family].rpartition(".")[0].removeprefix("lowbit."))


@cache
def folders_digest(*names: str) -> str:
    """A digest of the source of folders of this package, such as "kernels.gpu"."""
    digest = hashlib.sha256()
    for name in names:
        folder = Path(str(files("lowbit"))).joinpath(*name.split("."))
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def compiler(device: str) -> str:
    """The compiler of a device type's kernels, with its version."""
    name = "triton" if device == "cuda" else "llvmlite"
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name} missing"


def problem_key(problem: Problem) -> dict[str, Any]:
    """A problem as JSON, without its device."""
    key: dict[str, Any] = {
        "op": "matmul",
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "format": str(problem.format),
        "layout": problem.layout,
        "x": str(problem.x_dtype).removeprefix("torch."),
        "batch_invariant": problem.batch_invariant,
    }
    if problem.device == "cpu":
        from lowbit.kernels.cpu.threads import usable_threads

        key["threads"] = usable_threads()
    if problem.sections:
        key["sections"] = [[s.start, s.stop, str(s.format)] for s in problem.sections]
    return key


@cache
def _index(device: str, index: int) -> dict[str, list[tuple[int, Row]]]:
    """Rows that are valid now by problem without m, each with its m, the smallest first."""
    found: dict[str, list[tuple[int, Row]]] = {}
    for row in user_store(device_name(device, index)).rows():
        problem = dict(row["problem"])
        m = problem.pop("m", None)
        fresh = row["family"] in FAMILIES and row.get("source") == source_digest(row["family"])
        if type(m) is int and fresh and row.get("compiler") == compiler(device):
            found.setdefault(json.dumps(problem, sort_keys=True), []).append((m, row))
    for rows in found.values():
        rows.sort(key=lambda pair: pair[0])
    return found


def _rows_here(problem: Problem) -> list[Row]:
    """What this user measured with this m, or else with the next larger one below twice as many."""
    known = _index(problem.device, problem.index)
    if not known:
        return []
    key = problem_key(problem)
    del key["m"]
    rows = known.get(json.dumps(key, sort_keys=True), [])
    return [row for m, row in rows if problem.m <= m < 2 * problem.m][:1]


def forget() -> None:
    """Read files of measurements anew when they are needed next: something was measured, or the device changed."""
    from lowbit.dispatch.choose import choose
    from lowbit.dispatch.tuned_attention import rows_here

    rows_here.cache_clear()
    _index.cache_clear()
    choose.cache_clear()


@contextmanager
def assumed_gpu(found: Gpu | None) -> Iterator[None]:
    """Choose kernels as for a GPU that need not be here: to look at choices, or to compile for it."""
    before = assume(found)
    forget()
    try:
        yield
    finally:
        assume(before)
        forget()


# ------------------------------------------------------------------------------------------------------ what we ship
@cache
def table(name: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of a shipped file by (family, format, n, k, x, batch invariant, tokens); empty without a file.

    "x" and "batch_invariant" stand in a row or, for all rows, beside them. Without "tokens" a row has those of its
    tile.
    """
    path = files("lowbit.dispatch") / "tuned" / name
    if not path.is_file():
        return {}
    data = json.loads(path.read_text())
    found = {}
    for row in data["rows"]:
        r = {"x": data["x"], "batch_invariant": data["batch_invariant"]} | row
        for x in r["x"]:
            tokens = r.get("tokens", r["config"]["block_m"])
            key = (r["family"], r["format"], r["n"], r["k"], x, r["batch_invariant"], tokens)
            found[key] = r["config"]
    return found


def shipped_table(device: str) -> bool:
    """Whether a table is shipped for a device of that name."""
    return bool(table(file_name(device)))


def shipped_config(family: KernelFamily, problem: Problem) -> KernelConfig | None:
    """The shipped configuration for a legal problem, or None where there is none or it does not apply.

    A format with integer zero points takes that of the symmetric one where it has none of its own: zero points are read
    with the scales and cost a decode no instruction for a weight.
    """
    if problem.device != "cuda" or family.config_type is KernelConfig:
        return None
    x = str(problem.x_dtype).removeprefix("torch.")
    tokens = family.tokens(problem)
    rows = table(file_name(device_name("cuda", problem.index)))
    symmetric = [replace(problem.format, zero=Zero.NONE)] if problem.format.zero is Zero.INT else []
    for weight_format in (problem.format, *symmetric):
        values = rows.get((family.name, str(weight_format), problem.n, problem.k, x, problem.batch_invariant, tokens))
        if values is not None:
            config = family.config_type(family=family.name, **values)
            return config if family.legal(config, problem) is None else None
    return None
