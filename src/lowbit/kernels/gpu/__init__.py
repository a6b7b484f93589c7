"""GPU kernels, written in Gluon (Triton) and launched through the CUDA driver: no toolkit, no C compiler at run time.

decode/            inline PTX: how codes become numbers, for each kind of number
ptx.py             inline PTX: how partial sums are awaited
compat.py          everything that differs between Triton versions
hopper_body.py     the kernel for sm_90a; imports Triton, so it loads only when something is compiled
hopper_multiply.py its products by `wgmma`; mma.py those by `mma`; weights.py their weights, from words to numbers
sums.py            the end of a tile: partial sums of several CTAs, and y
portable*.py       the same on other GPUs: family, kernel, plan, heuristic
work.py            what both do before a launch
plan.py            what the kernel is compiled for: tile, pipeline, format
build.py           a plan -> machine code, with or without a GPU
driver.py          libcuda through ctypes: modules, tensor maps, launches
workspace.py       memory for partial sums, one for each stream and each captured graph
heuristic.py       which tile for a problem that nobody measured; fit.py fits it to a format
hopper.py          the family: legal(), default(), run()
form.py            which formats are served, and scales and zeros as the kernel takes them
groups.py          the end of a group: scales, minima and zero points on the sums
gather.py          act-order: x in the order of the stored columns
small.py           norm, rotation and gate of a decoder's step; small_body.py has their kernels
attention.py       attention on a paged cache: which kernel and tile; attention_*.py are its kernels (docs/attention.md)
"""
