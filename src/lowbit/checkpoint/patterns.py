"""Expressions that a file brings with it ("re:.*lm_head"), matched only where that cannot take forever.

Python's matcher tries every way to split a text among repetitions and alternatives, so a stranger's expression may keep
it busy for years. The ways are bounded here before anything is matched: a name is short, a group may not be repeated,
and repetitions and alternatives may not multiply beyond a limit that the expressions of published models are far from.
The time for all expressions and modules of a file is bounded too.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property

from lowbit.errors import CheckpointError

PREFIX = "re:"
LONGEST_NAME = 128  # characters of a module's name; longer ones match no expression
MOST_SECONDS = 20
TIMED_TOGETHER = 8  # expressions
FEW_PARTS = 32  # are tried one by one
MOST_CHARACTERS = 1 << 18  # in an automaton, which takes some hundred bytes for each
_MOST_BITS = 26  # log2 of the ways: 6 for each repetition, log2 of the alternatives for each group


class Patience:
    """Processor time that one file gets for matching what it brings; CheckpointError where that is used up.

    One match is bounded, but a file may have thousands of expressions and of modules.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def spend(self, start: float) -> None:
        """Counts the time since `start`, of time.thread_time()."""
        self.seconds += time.thread_time() - start
        if self.seconds > MOST_SECONDS:
            raise CheckpointError(
                f"the names in quantization_config have been compared with modules for {MOST_SECONDS} s: there are too "
                "many, or expressions that take too long; write simpler ones or the modules' names"
            )


class Targets:
    """Checked targets: paths, expressions matched from the start of a path, and perhaps names of classes."""

    def __init__(self, targets: Iterable[str]) -> None:
        self._names = dict.fromkeys(targets)
        self._patience = Patience()

    @cached_property
    def _compiled(self) -> list[list[tuple[str, re.Pattern[str]]]]:
        """Expressions, compiled: Python's matcher itself remembers 512 only. As many in a list as are timed at once."""
        pairs = [(target, re.compile(target[len(PREFIX) :])) for target in self._names if target.startswith(PREFIX)]
        return [pairs[i : i + TIMED_TOGETHER] for i in range(0, len(pairs), TIMED_TOGETHER)]

    def matching(self, module: str, kind: str | None = None) -> Iterator[str]:
        """Targets that name a module: its path, expressions in their order, its class. Raises CheckpointError."""
        if module in self._names:
            yield module
        if len(module) <= LONGEST_NAME:
            for several in self._compiled:
                start = time.thread_time()
                fitting = [target for target, compiled in several if compiled.match(module)]
                self._patience.spend(start)
                yield from fitting
        if kind is not None and kind in self._names:
            yield kind


class Parts:
    """Names of which one may stand anywhere in the path of a module."""

    def __init__(self, parts: Iterable[str]) -> None:
        self._parts = list(dict.fromkeys(parts))
        self._patience = Patience()

    def within(self, module: str) -> bool:
        """Whether a path has one of the parts in it. Raises CheckpointError where that takes too long."""
        start = time.thread_time()
        if self._automaton is None:
            found = any(part in module for part in self._parts)
        else:
            found = self._automaton.within(module)
        self._patience.spend(start)
        return found

    @cached_property
    def _automaton(self) -> Automaton | None:
        if len(self._parts) <= FEW_PARTS or sum(map(len, self._parts)) > MOST_CHARACTERS:
            return None
        return Automaton(self._parts)


class Automaton:
    """Finds any of many strings in a text in one pass over it.

    Source: A. Aho, M. Corasick, Efficient String Matching, 1975.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # of each state: character -> state
        self._ends = [False]
        for word in words:
            state = 0
            for character in word:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._ends.append(False)
                state = self._next[state][character]
            self._ends[state] = True
        self._shorter = [0] * len(self._next)  # the state of the longest proper suffix
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                self._shorter[following] = self._step(self._shorter[state], character)
                self._ends[following] |= self._ends[self._shorter[following]]
                waiting.append(following)

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)

    def within(self, text: str) -> bool:
        """Whether one of the words is in the text."""
        state = 0
        if self._ends[state]:
            return True
        for character in text:
            state = self._step(state, character)
            if self._ends[state]:
                return True
        return False


def check_target(target: str) -> None:
    """Raises CheckpointError for an expression that is none, or that could take forever to match."""
    if not target.startswith(PREFIX):
        return
    expression = target[len(PREFIX) :]
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"target {target!r} is not a regular expression ({error}): copy it again") from error
    if reason := why_endless(expression):
        raise CheckpointError(
            f"target {target!r} {reason}, and could take forever to match: write simpler expressions or the modules' "
            "names into quantization_config"
        )


def why_endless(expression: str) -> str | None:
    """Why a valid expression may have too many ways to match, or None."""
    if re.search(r"\(\?[aiLmsu]*x", expression):
        return "is written with the flag x"
    bits = 0.0
    alternatives = [1]  # of the groups that are open, the whole expression first
    before = ""  # the token before, "" after an opening parenthesis
    for token in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?|\{\d*,?\d*\}|.", expression, re.DOTALL):
        if token in {"(", "(?"}:
            alternatives.append(1)
            token = ""
        elif token == "|":
            alternatives[-1] += 1
        elif token == ")":
            bits += math.log2(alternatives.pop())
        elif token in {"*", "+", "?"} or (token[0] == "{" and len(token) > 2):
            if before == ")" and token != "?":
                return "repeats a group"
            if before not in {"*", "+", "?"}:  # else it says how eagerly, as in .*?
                bits += 1 if token == "?" else 6
        before = token
    bits += math.log2(alternatives.pop())
    return f"has about 2^{bits:.0f} ways to match" if bits > _MOST_BITS else None
