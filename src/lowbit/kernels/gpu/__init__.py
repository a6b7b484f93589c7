"""GPU kernels, written in Gluon (Triton) and launched through the CUDA driver: no toolkit, no C compiler at run time.

decode/            inline PTX: how codes become numbers, for each kind of number
ptx.py             inline PTX: how partial sums are awaited
compat.py          everything that differs between Triton versions
form.py            which formats are served, and scales and zeros as a kernel takes them
plan.py            what a kernel is compiled for: tile, pipeline, format
fragments.py       what the matmul families share: what none of them serves, a call; work.py: equal shares for CTAs

    family            kernel                plan               tile where nobody measured
    hopper.py         hopper_body.py        plan.py            heuristic.py, fit.py
      sections.py     sections_body.py      sections_plan.py   sections_plan.py
    large.py          large_body.py         large_plan.py      large_heuristic.py
    portable.py       portable_body.py      portable_plan.py   portable_heuristic.py
    dequantize.py     dequantize_body.py    dequantize_plan.py

*_body.py          import Triton, so they load only when something is compiled; they share:
  hopper_multiply.py  products by `wgmma`; mma.py those by `mma`; weights.py their weights, from words to numbers
  groups.py           the end of a group: scales, minima and zero points on the sums
  hopper_produce.py   units into shared memory; sum_tokens.py: sums of x; minima.py: minima times them
  sums.py             the end of a tile: partial sums of several CTAs, and y; large_sums.py: many tokens
build.py           a plan -> machine code, with or without a GPU; sections_build.py, portable_build.py; builds.py: any
machine_code.py    machine code kept on disk, and made ahead
driver.py          libcuda through ctypes: modules, tensor maps, launches; launch.py: the maps of a packed weight
workspace.py       memory for partial sums, one for each stream and each captured graph
gather.py          act-order: x in the order of the stored columns
small.py           norm, rotation and gate of a decoder's step; small_body.py has their kernels
attention.py       attention on a paged cache: which kernel; attention_*.py: tiles, kernels, launches
"""
