"""The compiled code around the kernels: a program of steps, run by one thread or by the threads torch uses.

A program is an array of records of eight 64-bit words:

    function  arguments  units  chunk  next unit  go on  -  -

The driver runs the records in order. The threads take chunks of a record's units from its counter and call
function(arguments, first, end); they wait for each other after a record unless its word `go on` is not 0. Which thread
computes what does not matter: each unit is computed by one thread, in an order that does not depend on the others, so
any number of threads gives the same bits.

Two functions for matmuls, both over blocks of rows of x. Of `blocks` blocks, the first `high` have low + 1 rows, the
others low; a prepared row takes the same number of bytes in every block, so a block's place follows from its first row.
"""

from __future__ import annotations

from lowbit.kernels.cpu.emitter import SIZE_BYTES, Emitter
from lowbit.kernels.cpu.ir import I32, I64, PTR, Function, Value, module
from lowbit.kernels.cpu.isa import InstructionSet
from lowbit.kernels.cpu.operands import MOST_ROWS, ROW_STRIDE
from lowbit.packing.cpu_tile import TILE_ROWS

RECORD_BYTES = 64
LARGEST_CHUNK = ROW_STRIDE // TILE_ROWS  # tiles a call of multiply() takes at most

PREPARE_FIELDS = (
    "high", "low", "pieces", "piece", "steps", "function_high", "function_low", "x", "x_stride", "planes", "scales",
    "sums", "planes_row", "scales_row", "sums_row",
)  # fmt: skip
MULTIPLY_FIELDS = (
    "blocks", "high", "low", "n", "vectors", "finish", "y", "y_stride", "y_size", "bias", "bias_size", "parts",
)  # fmt: skip
PART_FIELDS = (
    "function_high", "function_low", "weight", "planes", "scales", "sums", "planes_row", "scales_row", "sums_row",
)  # fmt: skip
_POINTERS = {
    "function_high", "function_low", "x", "planes", "scales", "sums", "finish", "y", "bias", "weight",
}  # fmt: skip


def _fields(f: Function, base: Value, names: tuple[str, ...]) -> dict[str, Value]:
    return {name: f.load(PTR if name in _POINTERS else I64, f.at(base, 8 * i), 8) for i, name in enumerate(names)}


def _block_rows(f: Function, block: Value, high: Value, low: Value) -> tuple[Value, Value, Value]:
    """(has low + 1 rows, rows, first row) of a block."""
    is_high = block.compare("ult", high)
    rows = f.select(is_high, low + 1, low)
    return is_high, rows, block * low + f.smaller(block, high)


def prepare_blocks() -> str:
    """kernel(arguments, first, end): units are pieces of steps of blocks of rows; see PREPARE_FIELDS."""
    f = Function("kernel", {"arguments": PTR, "first": I64, "end": I64})
    a = _fields(f, f.arg("arguments"), PREPARE_FIELDS)
    with f.loop(f.arg("first"), f.arg("end")) as loop:
        block, piece = loop.index // a["pieces"], loop.index % a["pieces"]
        is_high, _, row = _block_rows(f, block, a["high"], a["low"])
        function = f.select(is_high, a["function_high"], a["function_low"])
        begin = piece * a["piece"]
        f.call_void(
            function.name,
            f.at(a["x"], row * a["x_stride"]),
            a["x_stride"],
            *(f.at(a[name], row * a[f"{name}_row"]) for name in ("planes", "scales", "sums")),
            begin,
            f.smaller(begin + a["piece"], a["steps"]),
        )
    return module([f], "")


def multiply_tiles(together: int = 1) -> str:
    """kernel(arguments, first, end): units are tiles, at most LARGEST_CHUNK of them; see MULTIPLY_FIELDS.

    All blocks of x and all parts of W meet one chunk of tiles while it is in the cache, up to `together` blocks in a
    call of a kernel. Results go through a buffer of floats to `finish`, which adds the bias and rounds.
    """
    f = Function("kernel", {"arguments": PTR, "first": I64, "end": I64})
    a = _fields(f, f.arg("arguments"), MULTIPLY_FIELDS)
    table = f.at(f.arg("arguments"), 8 * len(MULTIPLY_FIELDS))
    results = f.stack(together * MOST_ROWS * ROW_STRIDE * 4)
    first_row = f.arg("first") * TILE_ROWS
    count = f.smaller(f.arg("end") * TILE_ROWS, a["n"]) - first_row
    zero = f.const(I64, 0)
    for kind, begin, end in (("high", zero, a["high"]), ("low", a["high"], a["blocks"])):
        with f.loop(begin, end, together) as blocks:
            _, rows, row = _block_rows(f, blocks.index, a["high"], a["low"])
            some = f.smaller(f.const(I64, together), end - blocks.index)
            with f.loop(0, a["parts"]) as parts:
                part = _fields(f, f.at(table, parts.index * (8 * len(PART_FIELDS))), PART_FIELDS)
                f.call_void(
                    part[f"function_{kind}"].name,
                    part["weight"],
                    *(f.at(part[name], row * part[f"{name}_row"]) for name in ("planes", "scales", "sums")),
                    results,
                    f.arg("first") * a["vectors"],
                    f.arg("end") * a["vectors"],
                    some,
                )
            y = f.at(f.at(a["y"], row * a["y_stride"]), first_row * a["y_size"])
            bias = f.at(a["bias"], first_row * a["bias_size"])
            f.call_void(a["finish"].name, results, rows * some, y, a["y_stride"], bias, count)
    return module([f], "")


def finish(isa: InstructionSet, y_type: str, bias_type: str | None) -> str:
    """kernel(results, rows, y, row stride in bytes, bias, count): y = results + bias, rounded; `count` a row."""
    f = Emitter(isa, {"results": PTR, "rows": I64, "y": PTR, "stride": I64, "bias": PTR, "count": I64})
    whole = f.arg("count") & -f.lanes

    def move(index: Value, row: Value, lanes: int) -> None:
        source = f.at(f.arg("results"), row * (ROW_STRIDE * 4))
        value = f.load_floats("fp32", f.at(source, index * 4), lanes)
        if bias_type:
            value = value + f.load_floats(bias_type, f.at(f.arg("bias"), index * SIZE_BYTES[bias_type]), lanes)
        target = f.at(f.arg("y"), row * f.arg("stride"))
        f.store_floats(y_type, value, f.at(target, index * SIZE_BYTES[y_type]))

    with f.loop(0, f.arg("rows")) as rows:
        with f.loop(0, whole, f.lanes) as loop:
            move(loop.index, rows.index, f.lanes)
        with f.loop(whole, f.arg("count")) as loop:
            move(loop.index, rows.index, 0)
    return f.build()


def driver() -> str:
    """kernel(program, records, threads, GOMP_parallel, GOMP_barrier)."""
    names = {"program": PTR, "records": I64, "threads": I64, "parallel": PTR, "barrier": PTR}
    f = Function("kernel", names)
    with f.loop(0, f.arg("records")) as loop:
        counter = f.at(f.arg("program"), loop.index * RECORD_BYTES + 32)
        f.do(f"store atomic i64 0, ptr {counter.name} monotonic, align 8")
    shared = f.stack(24)
    f.store(f.arg("program"), shared, 8)
    f.store(f.arg("records"), f.at(shared, 8), 8)
    single = f.arg("threads").compare("ult", 2)
    f.store(f.select(single, f.const(PTR, 0), f.arg("barrier")), f.at(shared, 16), 8)
    alone, together, done = f.label("alone"), f.label("together"), f.label("done")
    f.branch(single, alone, together)
    f.open_block(alone)
    f.call_void("@worker", shared)
    f.jump(done)
    f.open_block(together)
    worker = Value(f, PTR, "@worker")
    f.call_void(f.arg("parallel").name, worker, shared, f.arg("threads").cast("trunc", I32), f.const(I32, 0))
    f.jump(done)
    f.open_block(done)
    return module([_worker(), f], "")


def _worker() -> Function:
    """What every thread runs: for each record, chunks until none is left, then a barrier."""
    f = Function("worker", {"shared": PTR}, internal=True)
    shared = f.arg("shared")
    program, records, barrier = (f.load(kind, f.at(shared, 8 * i), 8) for i, kind in enumerate((PTR, I64, PTR)))
    last = records - 1
    has_barrier = barrier.compare("ne", f.const(PTR, 0))
    with f.loop(0, records) as loop:
        record = f.at(program, loop.index * RECORD_BYTES)
        function, arguments, units, chunk = (
            f.load(kind, f.at(record, 8 * i), 8) for i, kind in enumerate((PTR, PTR, I64, I64))
        )
        counter = f.at(record, 32)
        grab, work, out = f.label("grab"), f.label("work"), f.label("out")
        f.jump(grab)
        f.open_block(grab)
        first = f.emit(I64, f"atomicrmw add ptr {counter.name}, i64 {chunk.name} monotonic")
        f.branch(first.compare("ult", units), work, out)
        f.open_block(work)
        f.call_void(function.name, arguments, first, f.smaller(first + chunk, units))
        f.jump(grab)
        f.open_block(out)
        not_last = loop.index.compare("ult", last)
        waits = f.load(I64, f.at(record, 40), 8).compare("eq", 0)
        with f.when(has_barrier & not_last & waits):
            f.call_void(barrier.name)
    return f
