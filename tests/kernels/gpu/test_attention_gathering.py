"""Which prompts are gathered into contiguous memory, the reasons, and how much room a plan sets aside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lowbit.formats.kv import kv_format
from lowbit.kernels.attention import AttentionProblem
from lowbit.kernels.gpu import attention_launch
from lowbit.kernels.gpu.attention_contiguous import LEAST_ROWS, ROOM_BYTES, STEP, GpuGathering

PROBLEM = AttentionProblem(32, 8, 128, 16, kv_format("int8"), kv_format("int4"), torch.float16, "cuda")
RULE = GpuGathering()


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_launch, "capability", lambda device: 90)


def test_long_prompts_are_gathered() -> None:
    assert RULE.reason_against(PROBLEM, LEAST_ROWS, LEAST_ROWS) is None
    assert RULE.reason_against(PROBLEM, 8192, 8192) is None
    reason = RULE.reason_against(PROBLEM, LEAST_ROWS - 1, LEAST_ROWS - 1)
    assert reason == f"{LEAST_ROWS - 1} new tokens: worth it from {LEAST_ROWS} on"


def test_what_was_not_measured_or_is_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = RULE.reason_against(PROBLEM, LEAST_ROWS, 8192)
    assert reason == f"{LEAST_ROWS} new of 8192 tokens: torch's kernels for continued prompts are no faster"
    assert RULE.reason_against(replace(PROBLEM, head_dim=192), 8192, 8192) == "head_dim=192: measured up to 128"
    monkeypatch.setattr(attention_launch, "capability", lambda device: 80)
    assert RULE.reason_against(PROBLEM, 8192, 8192) == "capability 8.0: measured on 9.0"


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"window": 512}, "a sliding window"), ({"soft_cap": 30.0}, "a soft cap"), ({"sinks": True}, "sinks"),
        ({"alibi": True}, "ALiBi"), ({"window": 512, "sinks": True}, "a sliding window and sinks"),
    ],
)  # fmt: skip
def test_options_of_which_torch_has_none(changes: dict[str, Any], said: str) -> None:
    problem = replace(PROBLEM, **changes)
    assert RULE.reason_against(problem, 8192, 8192) == f"{said}: torch's attention has no such option"
    assert RULE.room(problem, 8192, 8192) == 0


def test_room_is_bounded_and_holds_a_key_head() -> None:
    token = 2 * 128 * 2  # bytes of the key and the value of one head
    assert RULE.room(PROBLEM, 8192, 3000) * 2 == 8 * (3000 + -3000 % STEP) * token
    most = ROOM_BYTES // token
    assert RULE.room(PROBLEM, 10 * most, 10 * most) * 2 == ROOM_BYTES
    assert RULE.reason_against(PROBLEM, most, most) is None
    assert RULE.reason_against(PROBLEM, most + 1, most + 1) == f"{most + 1} tokens: one key head is more than 64 MiB"


def test_plans_of_few_rows_set_nothing_aside() -> None:
    assert RULE.room(PROBLEM, LEAST_ROWS - 1, 8192) == 0
    assert RULE.room(PROBLEM, 8192, LEAST_ROWS - 1) == 0
