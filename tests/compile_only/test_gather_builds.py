"""Kernels that bring x to the stored order of columns: built for sm_90a without a GPU."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed: compiling kernels needs it")


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_gather_waits_for_x_after_its_indices_and_lets_the_matmul_start(kind: str) -> None:
    from lowbit.kernels.gpu.gather import BLOCK
    from lowbit.kernels.gpu.small import compiled

    types = (f"*{kind}", "*i32", f"*{kind}", "i32", "i32", "i32")
    text = compiled("gather", types, (("BLOCK", BLOCK),), 4).asm["ptx"]
    order = [text.index(what) for what in ("griddepcontrol.launch_dependents", "ld.global.", "griddepcontrol.wait")]
    assert order == sorted(order)
    assert text.rindex("st.global.") > text.index("griddepcontrol.wait")


@pytest.mark.parametrize("name,constants", [
    ("add_norm", (("ADD", True), ("PLACED", True), ("BLOCK", 512))),
    ("gate", (("ORDERED", True), ("BLOCK", 512))),
])  # fmt: skip
def test_a_step_reads_places_before_it_waits(name: str, constants: tuple[tuple[str, object], ...]) -> None:
    from lowbit.kernels.gpu.small import compiled

    kinds = {"add_norm": ("*fp16",) * 4 + ("*i32", "i32", "*fp32"), "gate": ("*fp16", "*fp16", "*i32", "i32")}[name]
    text = compiled(name, kinds, constants, 4).asm["ptx"]
    before = text[: text.index("griddepcontrol.wait")]
    assert len(re.findall(r"ld\.global\.b32", before)) >= 512 // 128  # places of a thread
