"""Expressions that a file brings with it ("re:.*lm_head"), matched only where that cannot take forever.

Python's matcher tries every way to split a text among repetitions and alternatives, so a stranger's expression may keep
it busy for years. The ways are bounded here before anything is matched: a name is short, a group may not be repeated,
and repetitions and alternatives may not multiply beyond a limit that the expressions of published models are far from.
"""

from __future__ import annotations

import math
import re

from lowbit.errors import CheckpointError

PREFIX = "re:"
LONGEST_NAME = 128  # characters of a module's name; longer ones match no expression
_MOST_BITS = 26  # log2 of the ways: 6 for each repetition, log2 of the alternatives for each group


def is_named(module: str, target: str) -> bool:
    """Whether a checked target, a path or an expression matched from the start, names the module."""
    if target.startswith(PREFIX):
        return len(module) <= LONGEST_NAME and re.match(target[len(PREFIX) :], module) is not None
    return target == module


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
