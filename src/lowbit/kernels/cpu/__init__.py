"""CPU kernels: LLVM IR written by Python, compiled by llvmlite in milliseconds, cached on disk.

isa.py          what the processor can do, as rows of a table
ir.py           writes LLVM IR; emitter.py adds vectors and conversions of one instruction set
steps.py        how kernels walk along k
activations.py  x made ready: quantized, or float
decode.py       codes to bytes or floats; scales.py: scales and zeros of all types and levels
dot.py          the integer dot products of every instruction set
matmul.py       the kernels that read weights
driver.py       the code around them: work shared between threads, results rounded
descriptors.py  a packed weight as addresses; plan.py: one matmul ready to be launched
engine.py       LLVM: text to address; cache.py: compiled kernels on disk; threads.py: torch's thread pool
family.py       the kernel family `cpu`; family_a8.py: `cpu_a8`
"""
