"""PagePool: which page belongs to which sequence. Numbers only; no tensor is touched here.

A page may have several users: sequences that begin alike share the pages of what they have in common. A sequence that
writes into a page it shares gets a copy first: `extend` says which pages must be copied.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from operator import index

from lowbit.errors import UsageError


@dataclass
class Sequence:
    """Tokens of one sequence and the pages that hold them, in order."""

    length: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))


class PagePool:
    """`pages` pages of `page_size` tokens, handed out to sequences, which are known by a number."""

    def __init__(self, pages: int, page_size: int) -> None:
        for name, value in (("pages", pages), ("page_size", page_size)):
            if value < 1:
                raise UsageError(f"{name}={value}: must be at least 1")
        self.pages, self.page_size = pages, page_size
        self._free = list(range(pages - 1, -1, -1))  # the last is handed out next
        self._users = [0] * pages
        self._sequences: dict[int, Sequence] = {}
        self._next = 0
        self.version = 0  # changes with the tokens or pages of any sequence

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that live, oldest first."""
        return tuple(self._sequences)

    def users(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._users[page]

    def sequence(self, sequence: int) -> Sequence:
        """What a sequence holds, not to be changed. Raises UsageError for one that does not live."""
        if sequence not in self._sequences:
            raise UsageError(f"sequence {sequence} is not in this cache: it was freed, or belongs to another")
        return self._sequences[sequence]

    def add(self) -> int:
        """A new, empty sequence."""
        self._next += 1
        self._sequences[self._next - 1] = Sequence()
        return self._next - 1

    def pages_for(self, sequence: int, tokens: int) -> int:
        """Free pages that `extend` would take, copies included."""
        held = self.sequence(sequence)
        new = -(-(held.length + tokens) // self.page_size) - len(held.pages)
        return new + self._must_copy(held, tokens)

    def extend(self, sequence: int, tokens: int) -> list[tuple[int, int]]:
        """Make room for more tokens; -> (source, target) pages to copy before anything is written.

        Raises UsageError where there are too few free pages; nothing has changed then.
        """
        tokens = index(tokens)
        if tokens < 0:
            raise UsageError(f"sequence {sequence}: {tokens} new tokens; must be 0 or more")
        held = self.sequence(sequence)
        needed = self.pages_for(sequence, tokens)
        if needed > len(self._free):
            raise UsageError(
                f"sequence {sequence}: {held.length} tokens and {tokens} more need {needed} pages of {self.page_size}, "
                f"and {len(self._free)} of {self.pages} are free; free sequences or make a larger cache"
            )
        self.version += 1
        copies = []
        if self._must_copy(held, tokens):
            source = held.pages[-1]
            held.pages[-1] = self._take()
            self._release(source)
            copies.append((source, held.pages[-1]))
        held.length += tokens
        while len(held.pages) * self.page_size < held.length:
            held.pages.append(self._take())
        return copies

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the first `length` tokens of another (all by default), in the same pages."""
        held = self.sequence(sequence)
        length = held.length if length is None else index(length)
        if not 0 <= length <= held.length:
            raise UsageError(f"fork of {length} tokens: sequence {sequence} holds {held.length}; between 0 and that")
        forked = self.add()
        pages = held.pages[: -(-length // self.page_size)]
        for page in pages:
            self._users[page] += 1
        self._sequences[forked] = Sequence(length, pages)
        return forked

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens. Raises UsageError if fewer are held."""
        held, length = self.sequence(sequence), index(length)
        if not 0 <= length <= held.length:
            raise UsageError(f"truncate({length}): sequence {sequence} holds {held.length} tokens; between 0 and that")
        self.version += 1
        held.length = length
        while len(held.pages) > -(-length // self.page_size):
            self._release(held.pages.pop())

    def free(self, sequence: int) -> None:
        """Give a sequence's pages back, those that nobody else holds."""
        pages = self.sequence(sequence).pages
        self.version += 1
        for page in reversed(pages):
            self._release(page)
        del self._sequences[sequence]

    def _must_copy(self, held: Sequence, tokens: int) -> bool:
        """Whether new tokens go into a page that others hold."""
        return tokens > 0 and held.length % self.page_size > 0 and self._users[held.pages[-1]] > 1

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)
