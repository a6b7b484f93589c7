"""One query row on pages of a quantized cache, as compiled code: scores, softmax and sum for one item and key head.

kernel(arguments, first, end); units are items times key heads. Three passes over the item's keys, the scores between
them in scratch memory of the unit:

    scores   decode a key, multiply it with every query head of the group
    weights  soft cap, ALiBi, exp(score - highest), their sum
    sum      decode a part of a value, add it with every head's weight, until all parts are done

Codes are decoded into float32 vectors, `lanes` values along head_dim at a time: packing/paged.py says how they lie. The
scores of several keys and heads are added up together (vector_math.totals), and codes are fetched a page in advance.
"""

from __future__ import annotations

from functools import cache

from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.head_vectors import Turn, load_head, scratch_of
from lowbit.kernels.cpu.ir import I64, PTR, Value
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.page_decoding import Rows
from lowbit.kernels.cpu.page_passes import Passes, integer, query_bytes
from lowbit.kernels.cpu.page_rounding import rotated_basis, store_head, token_row
from lowbit.kernels.cpu.page_spec import PageSpec

_NUMBERS = {"pages", "room"}


@cache
def attend_pages(isa: InstructionSet, spec: PageSpec) -> str:
    """The module's text.

    query [rows, heads, head_dim] in its storage type, without the Hadamard transform; row, table, start, end [items],
    position [rows] and page_table [requests, pages] int32; slopes [heads] float; scores [units, groups, room] float,
    room at least the keys of an item and PAD; out [items, heads, head_dim], top and total [items, heads] float, left
    alone where an item has no key: the result, the highest score and the sum of exp(score - highest).

    With `appends`, query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim] are float, before norm and
    rope: cos and sin [positions, head_dim], query_norm and key_norm [head_dim] float, eps the address of a float;
    slots [rows] int64. The unit that has a row's last key stores that key and value before it reads them.
    """
    f = Emitter(isa, {"arguments": PTR, "first": I64, "end": I64})
    base = f.arg("arguments")
    a = {name: f.load(I64 if name in _NUMBERS else PTR, f.at(base, 8 * i), 8) for i, name in enumerate(spec.fields)}
    turned, scratch = f.stack(query_bytes(isa, spec)), scratch_of(f, spec.head_dim)
    room = f.stack(max(Rows.room_bytes(fmt, spec.head_dim, spec.page_size) for fmt in (spec.key, spec.value)))
    if spec.most_keys:
        a["scores"], a["room"] = f.stack(4 * spec.groups * spec.room), f.const(I64, spec.room)
    with f.loop(f.arg("first"), f.arg("end")) as loop:
        item, head = loop.index // spec.kv_heads, loop.index % spec.kv_heads
        row, table, start, end = (integer(f, a[name], item) for name in ("row", "table", "start", "end"))
        position = integer(f, a["position"], row)
        end = f.select(end.compare("slt", position + 1), end, position + 1)
        if spec.window:
            least = position - (spec.window - 1)
            start = f.select(start.compare("sgt", least), start, least)
        with f.when(start.compare("slt", end)):
            unit = Passes(f, spec, a, head, f.at(a["page_table"], table * a["pages"] * 4), start, end, room, turned)
            place = (row * spec.kv_heads + head) * spec.groups
            unit_scores = f.const(I64, 0) if spec.most_keys else loop.index * a["room"] * (4 * spec.groups)
            scores = f.at(a["scores"], unit_scores)
            turn = None
            if spec.appends:
                eps = a["eps"] if spec.norms else None
                turn = Turn(f, spec.head_dim, a["cos"], a["sin"], position, eps, scratch)
                with f.when(end.compare("eq", position + 1)):
                    _append(f, spec, a, turn, row, head)
            _turn(f, spec, a, turn, place, unit)
            unit.score(scores)
            place = (item * spec.kv_heads + head) * spec.groups
            unit.weigh(scores, position, head, place)
            unit.sum(scores, place)
    return f.build()


def _turn(f: Emitter, spec: PageSpec, a: dict[str, Value], turn: Turn | None, place: Value, unit: Passes) -> None:
    """A group's query heads, from head `place` on."""
    head_dim = spec.head_dim
    with f.loop(0, spec.groups) as loop:
        source = f.at(a["query"], (place + loop.index) * (SIZE_BYTES[spec.query] * head_dim))
        if turn is None:
            x = load_head(f, source, head_dim, spec.query)
        else:
            x = turn.head(source, a["query_norm"])
        unit.put_query(loop.index, [v * spec.scale for v in rotated_basis(f, spec.key, x)])


def _append(f: Emitter, spec: PageSpec, a: dict[str, Value], turn: Turn, row: Value, head: Value) -> None:
    """Store the key and the value of one head of a new token."""
    source = (row * spec.kv_heads + head) * (4 * spec.head_dim)
    slot = f.load(I64, f.at(a["slots"], row * 8), 8)
    place = token_row(slot, head, spec.kv_heads, spec.page_size)
    key = turn.head(f.at(a["key"], source), a["key_norm"])
    value = load_head(f, f.at(a["value"], source), spec.head_dim)
    store_head(f, spec.key, key, place, head, a["keys"], a["key_scales"])
    store_head(f, spec.value, value, place, head, a["values"], a["value_scales"])
