"""Printers: recorded programs become kernels, in C++ for the CPU and in Triton for CUDA.

A tape (`lists/tape.py`) records the operators of a step as nodes. The nodes arrive here as a
`Program`. A printer writes the program as source text, a compiler makes a kernel of the text, and a
launch runs the kernel on the buffers of a bucket:

- `program.py` has `Program` and `Launch`, and runs a program node by node in PyTorch.
- `operators.py` is the table of operators, and `language.py` prints them in either language.
- `cpp.py` and `triton.py` are the two languages. `build.py` and `launches.py` compile their texts.
- `vectors.py`, `loops.py` and `printer.py` are for arithmetic on a few numbers between launches.
- `pointer_tables.py` sends addresses and layouts of tensors to a GPU.
- `proof.py` compares each new kernel with PyTorch's operators before a step uses it.
- `backends.py` chooses what runs a program on a device.
"""
