"""What a kernel is compiled for: tile, pipeline, format. A Plan is one constant of the kernel."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats import SCALE_TYPES, WeightFormat
from lowbit.formats.grouping import Along
from lowbit.formats.weight_format import Zero
from lowbit.kernels.gpu import ptx
from lowbit.kernels.gpu.decode import decode_of
from lowbit.kernels.gpu.form import is_inside, kernel_form, scale_bytes, shares_super_rows, super_columns
from lowbit.kernels.problem import KernelConfig
from lowbit.packing.tiles import PLANES

NAME = "hopper"
FRAGMENT_COLUMNS = 16  # of one product of the tensor cores: smaller than a chunk, the least that is decoded
SMEM_LIMIT = 232_448  # bytes a CTA can have on compute capability 9.0
SMEM_SM = 233_472  # bytes of a multiprocessor, of which every CTA takes RESERVED_BYTES more than it asks for
RESERVED_BYTES = 1024
PRODUCER_REGISTERS = 24  # of a thread
FEW_REGISTERS = 80  # of a thread at launch
MINIMA_GROUPS = 8  # that one product of minima has
SUM_ROWS = 16  # of sums of x that one product makes, one for each group of columns
REGISTERS = 65_536  # of a multiprocessor, on every compute capability that is served


@dataclass(frozen=True, eq=True)
class TileConfig(KernelConfig):
    """One launch: tiles of 64 * row_blocks rows of W by block_m tokens by block_k columns, `stages` of them in flight.

    maxnreg: registers a thread at launch.
    """

    block_m: int
    block_k: int
    stages: int
    warps: int = 4
    row_blocks: int = 1
    splits: int = 1  # parts that share the columns of a tile
    ctas_per_sm: int = 1
    maxnreg: int = 128
    chunk: int = 128  # columns decoded at a time, at most: fewer need fewer registers
    wide: bool = False  # `wgmma` instead of `mma`: faster where there are many tokens
    even_runs: bool = False  # the fewest CTAs that make the longest run no longer: more runs end where tiles end
    whole_tiles: bool = False  # no tile of y is shared between CTAs: batch-invariant

    def __hash__(self) -> int:
        return self._hash

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread that multiplies."""
        return self.maxnreg


@dataclass(frozen=True, eq=True)
class HopperConfig(TileConfig):
    """A CTA has `splits` consumer partitions of `warps` warps and a producer warp.

    What the producer does not need of the registers at launch goes to the consumers.
    """

    def __hash__(self) -> int:
        return self._hash

    @property
    def threads(self) -> int:
        """Threads of a CTA: the producer's warp takes a whole warpgroup."""
        return 32 * self.warps * self.splits + 128

    @property
    def consumer_registers(self) -> int:
        """Registers a thread of a consumer gets when the producer's warpgroup keeps 24: a multiple of 8."""
        return self.registers_beside(PRODUCER_REGISTERS)

    def registers_beside(self, others: int) -> int:
        """Registers a thread of a consumer gets when the other warps' warpgroup keeps so many a thread."""
        rest = self.maxnreg * self.threads - others * 128
        return min(240, rest // (32 * self.warps * self.splits) // 8 * 8)


@dataclass(frozen=True)
class Plan:
    """Constants of the kernel. Upper case, because they are read inside it."""

    PLANES: tuple[int, ...]  # bits of each plane of a code
    RAISED: bool  # Decode.raised
    FACTOR: float  # Decode.factor
    INSIDE: bool  # the decode multiplies by scales of groups of 16
    SCALE: str  # a key of SCALE_TYPES: how a scale is stored
    SUPER: str  # what a super-scale of the tensor does to the sums: "none", "multiplies", "divides"
    ROWS: str  # the type of super-scales that rows have: "none", "fp16", "bf16", "fp32"
    ROWS_GROUPS: int  # rows of them fetched with a unit
    ROWS_STEP: int  # by how many a unit's first one moves for each unit,
    ROWS_UNITS: int  # or how many units share one
    ROWS_COLUMNS: int  # columns under one, as many as a unit has or fewer
    ROWS_SHARED: bool  # all rows have the same
    GROUP: int  # columns that share a scale; BK / SPLITS where a row has one scale
    CHUNK: int  # columns decoded and multiplied at a time
    CHUNKS_PER_GROUP: int
    SCALE_GROUPS: int  # rows of scales fetched with a unit
    ZERO_GROUPS: int  # rows of zeros
    GROUP_STEP: int  # by how many a unit's first group moves for each unit
    ZERO: str  # "none"; in the decode "integer": z * factor + offset for (b3, i2), "number": z - 128 in bf16; on the
    # sums "float": taken from the codes, "minimum": added to the weights
    LACKING: float  # Decode.lacking
    ZERO_FACTORS: tuple[int, ...]
    ZERO_OFFSETS: tuple[int, ...]
    BIAS: bool
    WIDE: bool
    BM: int
    BK: int
    STAGES: int
    WARPS: int
    BLOCKS: int
    SPLITS: int
    REGS: int
    STAGE_BYTES: int
    AHEAD: int  # partial sums of other CTAs asked for at a time
    DECODE: str
    CONSTRAINTS: str
    AWAIT: str = ptx.AWAIT[0]
    AWAIT_CONSTRAINTS: str = ptx.AWAIT[1]
    AWAIT_ONE: str = ptx.AWAIT_ONE[0]
    AWAIT_ONE_CONSTRAINTS: str = ptx.AWAIT_ONE[1]
    EMPTY: int = ptx.EMPTY
    SCALED: bool = False  # the decode multiplies by the scales of groups of any size
    MINIMA: bool = False  # are added by products of their own, not with their groups
    HELPER_REGS: int = PRODUCER_REGISTERS  # of a thread of the warps that do not multiply
    SUMS: int = 0  # rows of sums of x in a stage: one for each group of a unit, and more; 0 where consumers make them


def plan_for(
    config: TileConfig,
    format: WeightFormat,  # noqa: A002
    x_type: str,
    bias: bool,
    capability: int = 90,
) -> Plan:
    """The plan of a legal configuration for a compute capability. x_type: "fp16" or "bf16"."""
    form = kernel_form(format)
    mine = config.block_k // config.splits  # columns of a unit that one partition multiplies
    size = form.grouping.size if isinstance(form.grouping, Along) else mine
    inside = is_inside(form)
    group = mine if inside else size  # columns whose products are summed before they are scaled
    chunk = min(config.chunk, max(group, 2 * FRAGMENT_COLUMNS), mine)
    on_sums = form.zero in (Zero.FLOAT, Zero.MIN)
    decode = decode_of(form.levels if on_sums else form.element, x_type, form.zero is Zero.INT, inside, capability)
    zero = {Zero.NONE: "none", Zero.FLOAT: "float", Zero.MIN: "minimum"}.get(form.zero)
    super_scale, columns = form.scale.super, super_columns(form)
    of_tensor = super_scale is not None and columns is None
    sums = sums_of_x(config, form)
    helpers = PRODUCER_REGISTERS if not sums else _summer_registers(config)
    return Plan(
        PLANES=PLANES[form.bits],
        RAISED=decode.raised,
        FACTOR=decode.factor,
        INSIDE=inside,
        SCALE=form.scale.dtype,
        SUPER="none" if not of_tensor else "divides" if super_scale and super_scale.divides else "multiplies",
        ROWS=super_scale.dtype if super_scale is not None and columns is not None else "none",
        ROWS_GROUPS=super_groups(config, form),
        ROWS_STEP=config.block_k // columns if columns and columns <= config.block_k else 0,
        ROWS_UNITS=columns // config.block_k if columns and columns > config.block_k else 1 << 30,
        ROWS_COLUMNS=min(columns, config.block_k) if columns else config.block_k,
        ROWS_SHARED=shares_super_rows(form),
        GROUP=group,
        CHUNK=chunk,
        CHUNKS_PER_GROUP=max(group // chunk, 1),
        SCALE_GROUPS=fetched_groups(config, form, scale_bytes(form.scale.dtype)),
        ZERO_GROUPS=fetched_groups(config, form, zero_bytes(form)),
        GROUP_STEP=config.block_k // size if isinstance(form.grouping, Along) else 0,
        ZERO=zero or ("number" if decode.zero_numbers else "integer"),
        LACKING=float(decode.lacking),
        ZERO_FACTORS=tuple(factor for factor, _ in decode.zeros),
        ZERO_OFFSETS=tuple(_signed(offset) for _, offset in decode.zeros),
        BIAS=bias,
        WIDE=config.wide,
        BM=config.block_m,
        BK=config.block_k,
        STAGES=config.stages,
        WARPS=config.warps,
        BLOCKS=config.row_blocks,
        SPLITS=config.splits,
        REGS=config.registers_beside(helpers) if isinstance(config, HopperConfig) else config.consumer_registers,
        AHEAD=max(1, min(4, 16 * 32 * config.warps // (64 * config.row_blocks * config.block_m))),
        STAGE_BYTES=stage_bytes(config, form),
        DECODE=decode.text,
        CONSTRAINTS=decode.constraints,
        HELPER_REGS=helpers,
        SUMS=sums,
        MINIMA=_multiplies_minima(config, form),
    )


def sums_of_x(config: TileConfig, form: WeightFormat) -> int:
    """Rows of sums of x that a warp of its own keeps beside each stage; none where nothing is taken from sums."""
    if form.zero not in (Zero.FLOAT, Zero.MIN) or not isinstance(config, HopperConfig):
        return 0
    groups = config.block_k // form.grouping.size if isinstance(form.grouping, Along) else config.splits
    return -(-groups // SUM_ROWS) * SUM_ROWS


def _summer_registers(config: TileConfig) -> int:
    """Registers of a thread of the warp that sums x: more for more tokens, few where consumers have few."""
    if config.maxnreg <= FEW_REGISTERS:
        return 48
    return {8: 64, 16: 64, 32: 64}.get(config.block_m, 104)


def _multiplies_minima(config: TileConfig, form: WeightFormat) -> bool:
    """Whether minima are integers and enough groups have one super-scale to fill products (minima.py)."""
    columns = super_columns(form)
    if form.zero is not Zero.MIN or not sums_of_x(config, form) or not columns or not isinstance(form.grouping, Along):
        return False
    groups = min(config.block_k // config.splits, columns) // form.grouping.size
    return form.scale.dtype in ("u4", "u6", "u8", "i6", "i8") and groups % MINIMA_GROUPS == 0


def _signed(word: int) -> int:
    """An unsigned 32-bit number as a signed one."""
    return word - (1 << 32) if word >> 31 else word


def zero_bytes(form: WeightFormat) -> int:
    """Bytes of a stored zero: as wide as a scale unless it is an integer."""
    return 1 if form.zero in (Zero.NONE, Zero.INT) else scale_bytes(form.scale.dtype)


def fetched_groups(config: TileConfig, form: WeightFormat, value_bytes: int) -> int:
    """Rows of scales or zero points fetched with a unit, of 64 values each: a box has at least 128 bytes."""
    groups = config.block_k // form.grouping.size if isinstance(form.grouping, Along) else 1
    return max(groups, 1, 2 // (config.row_blocks * value_bytes))


def super_groups(config: TileConfig, form: WeightFormat) -> int:
    """Rows of super-scales fetched with a unit; none where rows have none."""
    columns = super_columns(form)
    return 0 if columns is None else max(1, config.block_k // columns) if columns else 1


def stage_bytes(config: TileConfig, format: WeightFormat) -> int:  # noqa: A002
    """Bytes of shared memory one stage of the pipeline takes."""
    form = kernel_form(format)
    rows = 64 * config.row_blocks
    value_bytes = scale_bytes(form.scale.dtype)
    zeros = (
        rows * fetched_groups(config, form, zero_bytes(form)) * zero_bytes(form) if form.zero is not Zero.NONE else 0
    )
    scales = rows * fetched_groups(config, form, value_bytes) * value_bytes
    supers = 0
    if (upper := form.scale.super) is not None:
        supers = rows * super_groups(config, form) * SCALE_TYPES[upper.dtype].storage.itemsize
    supers *= 2 if form.zero is Zero.MIN else 1
    return rows * config.block_k * form.bits // 8 + scales + zeros + supers + config.block_m * config.block_k * 2


def smem_bytes(config: TileConfig, format: WeightFormat) -> int:  # noqa: A002
    """Bytes of shared memory a CTA takes, at most: buffers start at multiples of 1024."""
    meet = (config.splits - 1) * 64 * config.row_blocks * config.block_m * 4
    sums = sums_of_x(config, kernel_form(format)) * config.block_m * 4
    stages = config.stages * (stage_bytes(config, format) + sums + (24 if sums else 16))
    return stages + meet + (2 + len(PLANES[format.bits]) - (sums > 0)) * 1024
