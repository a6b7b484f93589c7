"""`cpu_a8`: the compiled CPU kernels with x rounded to 8 bits per step (W4A8). Never chosen unasked."""

from lowbit.kernels.cpu.family import CpuFamily

FAMILY = CpuFamily("cpu_a8", "a8", "compiled for this processor, x rounded to 8 bits")
