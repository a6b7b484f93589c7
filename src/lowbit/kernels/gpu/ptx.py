"""PTX of waiting: a value that another CTA publishes is polled until it is there."""

from __future__ import annotations

EMPTY = -1  # what an empty slot of the workspace holds, as int32: a NaN that no arithmetic produces


def _await(count: int) -> tuple[str, str]:
    """Text and constraints of waiting for `count` published values.

    $0 on: the values. The next `count` operands: what a first load found. The last: their addresses.
    """
    lines = ["{", ".reg .pred p;"]
    lines += [f"mov.b32 ${i}, ${count + i};" for i in range(count)]
    lines += ["again:", f"setp.eq.s32 p, $0, {EMPTY};"]
    lines += [f"setp.eq.or.s32 p, ${i}, {EMPTY}, p;" for i in range(1, count)]
    lines += ["@!p bra done;"]
    lines += [f"ld.relaxed.gpu.global.b32 ${i}, [${2 * count + i}];" for i in range(count)]
    lines += ["bra again;", "done:", "}"]
    return "\n".join(lines) + "\n", ",".join(["=&r"] * count + ["r"] * count + ["l"] * count)


AWAIT = _await(4)
AWAIT_ONE = _await(1)
