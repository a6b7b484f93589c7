"""GPU kernels, written in Gluon (Triton) and launched through the CUDA driver: no toolkit, no C compiler at run time.

ptx.py          every line of inline PTX: how codes become numbers, how partial sums are awaited
compat.py       everything that differs between Triton versions
hopper_body.py  the kernel for sm_90a; imports Triton, so it loads only when something is compiled
build.py        a kernel and its constants -> machine code, with or without a GPU
driver.py       libcuda through ctypes: modules, tensor maps, launches
workspace.py    memory for partial sums, one for each stream and each captured graph
hopper.py       the family: legal(), default(), run()
"""
