"""CPU kernels: LLVM IR written by Python, compiled by llvmlite in milliseconds, cached on disk.

family.py       the kernel family `cpu`; family_a8.py: `cpu_a8`
isa.py          what the processor can do, as rows of a table
ir.py           writes LLVM IR; ir_types.py its types; emitter.py adds vectors, vector_math.py what has no instruction
steps.py        how kernels walk along k
activations.py  x made ready: quantized, or float
decode.py       codes to bytes or floats; scales.py: scales and zeros of all types and levels
dot.py          the integer dot products of every instruction set
matmul.py       the kernels that read weights: integer products; float_products.py those in float32; operands.py both's
driver.py       the code around them: work shared between threads, results rounded
descriptors.py  a packed weight as addresses; memory.py: huge pages under it
plan.py         one matmul ready to be launched, by any thread
program.py      many kernels as one launch: a decode step; small.py and row.py: its kernels besides matmuls
pages.py        attention on a paged cache; page_*.py are its parts; head_vectors.py: norm and rotation of a head
chooser.py      a token from logits: peak.py the largest, draw.py a random one, head.py what top-k and top-p leave
repack.py       codes out of streams, into tiles, into another order, for loading; columns.py: streams down columns
engine.py       LLVM: text to address; cache.py: compiled kernels on disk; threads.py: torch's thread pool
"""
