"""`lowbit bench`: how fast matmuls and models are on this machine."""
