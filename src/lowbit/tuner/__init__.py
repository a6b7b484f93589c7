"""Kernels measured on this machine: which is the fastest for each matrix of a model, found in seconds.

tune.py      the run: candidates, compilation, contests, rows
work.py      the matmuls of a model
tunable.py   what can be tuned, and its registry: matmul.py, attention.py
space.py     configurations of a kernel family, and their registry; spaces/ has one file each
contest.py   candidates against each other
pool.py      worker processes, worker.py what runs in them; ahead.py compiles in them
operands.py  random weights, pages.py random caches

Nothing is imported here: worker processes begin with what they need.
"""
