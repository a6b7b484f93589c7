"""Work lists of any step: every row meets every key it sees once, slots have one writer, and all fits its room."""

from __future__ import annotations

from unittest import mock

import numpy as np
from attention_truth import make_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.attention import Batch, DecodePlan, PrefillPlan
from lowbit.attention.plan import CASCADE_ROWS
from lowbit.kernels.attention import FIELDS, Shape, Work
from lowbit.kernels.attention.reference import BACKEND

PAGE, PAGES = 16, 400
MOST = 6  # requests


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(length, new tokens, pages shared with the request before) each."""
    found = []
    for _ in range(draw(st.integers(1, MOST))):
        length = draw(st.integers(0, 900))
        found.append((length, draw(st.integers(0, min(length, 70))), draw(st.integers(0, 30))))
    return found


@settings(max_examples=150, deadline=None)
@given(
    asked=requests(), decode=st.booleans(), rows=st.integers(1, 40), target=st.integers(1, 60),
    split=st.sampled_from([None, 64, 200, "cascade"]), window=st.sampled_from([None, 1, 40, 300]),
)  # fmt: skip
def test_any_step(
    asked: list[tuple[int, int, int]], decode: bool, rows: int, target: int, split: int | str | None, window: int | None
) -> None:
    problem = make_problem(window=window)
    lengths = [length for length, _, _ in asked]
    new = [min(1, length) if decode else count for length, count, _ in asked]
    tables, fresh = [], iter(range(PAGES))
    for at, (length, _, shared) in enumerate(asked):
        before = tables[at - 1][:shared] if at else []
        count = -(-length // PAGE)
        tables.append([*before[:count], *(next(fresh) for _ in range(count - len(before[:count])))])
    batch = Batch.of(lengths, tables, pages=PAGES, page_size=PAGE, new=new)
    options = {"max_requests": MOST, "max_length": 900, "backend": "reference"}
    options |= {"cascade": True} if split == "cascade" else {"fixed_split": split}
    cut = Shape(1 if decode else rows, target, 64)
    with mock.patch.object(type(BACKEND), "shape", lambda *_: cut):
        plan = (
            DecodePlan(problem, **options) if decode else PrefillPlan(problem, max_rows=MOST * 70, **options)  # type: ignore[arg-type]
        )
    plan.plan(batch)
    check(plan.work, batch, np.ones(len(new), int) if decode else np.array(new), window, cut.tile_rows)


def check(work: Work, batch: Batch, new: np.ndarray, window: int | None, tile_rows: int) -> None:
    items, rows, slots, wide = work.counts.tolist()
    columns = {name: getattr(work, name)[:items].tolist() for name in FIELDS}
    position, starts = work.position[:rows].tolist(), work.merge_start[: rows + 1].tolist()
    request = np.repeat(np.arange(len(new)), new).tolist()
    assert rows == new.sum() and position == [
        at
        for length, count in zip(batch.lengths.tolist(), new.tolist(), strict=True)
        for at in range(length - count, length)
    ]
    seen: list[list[tuple[str, int]]] = [[] for _ in range(rows)]  # of each row: pages' tokens, in the order merged
    parts: list[list[int]] = [[] for _ in range(rows)]
    writers: dict[int, int] = {}
    for at, (row, count, table, start, end, slot) in enumerate(zip(*columns.values(), strict=True)):
        assert start % PAGE == 0 and 1 <= count <= (max(tile_rows, CASCADE_ROWS) if at < wide else 1)
        for r in range(row, row + count):
            first = 0 if window is None else max(0, position[r] - window + 1)
            for key in range(max(start, first), min(end, position[r] + 1)):
                seen[r].append((int(work.page_table[table, key // PAGE]), key))
            if slot >= 0:
                assert slot + r - row not in writers and slot + r - row < slots
                writers[slot + r - row] = r
                parts[r].append(slot + r - row)
            else:
                assert starts[r] == starts[r + 1]
    assert sorted(writers) == list(range(slots))
    for r in range(rows):
        first = 0 if window is None else max(0, position[r] - window + 1)
        table = batch.tables[request[r]]
        assert seen[r] == [(int(table[key // PAGE]), key) for key in range(first, position[r] + 1)]
        assert work.merge_slots[starts[r] : starts[r + 1]].tolist() == parts[r] and len(parts[r]) != 1
