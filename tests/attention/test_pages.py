"""The page allocator against a model of it: what each sequence holds, who shares what, and that nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.attention import PagePool
from lowbit.errors import UsageError

STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "extend", "fork", "truncate", "free"]), st.integers(0, 9), st.integers(0, 40)),
    max_size=60,
)


class Model:
    """Tokens written one by one into pages of a PagePool, each token a number of its own."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pool = PagePool(pages, page_size)
        self.memory = [[-1] * page_size for _ in range(pages)]
        self.texts: dict[int, list[int]] = {}
        self.next_token = 0

    def extend(self, sequence: int, tokens: int) -> None:
        free, before = self.pool.free_pages, self.pool.sequence(sequence).length
        needed = self.pool.pages_for(sequence, tokens)
        if needed > free:
            with pytest.raises(UsageError, match=rf"sequence {sequence}: {before} tokens and {tokens} more need"):
                self.pool.extend(sequence, tokens)
            assert self.pool.free_pages == free and self.pool.sequence(sequence).length == before
            return
        for source, target in self.pool.extend(sequence, tokens):
            self.memory[target] = list(self.memory[source])
        assert self.pool.free_pages == free - needed
        pages = self.pool.sequence(sequence).pages
        for at in range(before, before + tokens):
            self.memory[pages[at // self.pool.page_size]][at % self.pool.page_size] = self.next_token
            self.texts[sequence].append(self.next_token)
            self.next_token += 1

    def check(self) -> None:
        size, users = self.pool.page_size, [0] * self.pool.pages
        assert set(self.pool.sequences) == set(self.texts)
        for sequence, text in self.texts.items():
            held = self.pool.sequence(sequence)
            assert held.length == len(text) and len(held.pages) == -(-len(text) // size)
            assert [self.memory[held.pages[at // size]][at % size] for at in range(len(text))] == text
            for page in held.pages:
                users[page] += 1
        assert users == [self.pool.users(page) for page in range(self.pool.pages)]
        assert self.pool.free_pages == users.count(0)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, pages=st.integers(1, 12), page_size=st.integers(1, 8))
def test_sequences_keep_their_tokens(steps: list[tuple[str, int, int]], pages: int, page_size: int) -> None:
    model = Model(pages, page_size)
    for action, which, amount in steps:
        if action == "add" or not model.texts:
            model.texts[model.pool.add()] = []
        else:
            sequence = list(model.texts)[which % len(model.texts)]
            text = model.texts[sequence]
            length = amount % (len(text) + 1)
            if action == "extend":
                model.extend(sequence, amount)
            elif action == "fork":
                model.texts[model.pool.fork(sequence, length)] = text[:length]
            elif action == "truncate":
                model.pool.truncate(sequence, length)
                del text[length:]
            else:
                model.pool.free(sequence)
                del model.texts[sequence]
        model.check()


def test_errors_name_the_sequence() -> None:
    pool = PagePool(2, 16)
    sequence = pool.add()
    pool.extend(sequence, 20)
    with pytest.raises(UsageError, match="sequence 0: 20 tokens and 13 more need 1 pages of 16, and 0 of 2 are free"):
        pool.extend(sequence, 13)
    with pytest.raises(UsageError, match=r"truncate\(21\): sequence 0 holds 20 tokens"):
        pool.truncate(sequence, 21)
    with pytest.raises(UsageError, match="fork of 21 tokens: sequence 0 holds 20"):
        pool.fork(sequence, 21)
    pool.free(sequence)
    with pytest.raises(UsageError, match="sequence 0 is not in this cache"):
        pool.extend(sequence, 1)
    with pytest.raises(UsageError, match="pages=0: must be at least 1"):
        PagePool(0, 16)
