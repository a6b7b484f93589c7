"""`lowbit bench`: how fast matmuls, attention, sampling and models are on this machine."""
