"""Printers: recorded programs become kernels, in C++ for the CPU and in Triton for CUDA.

A tape (`lists/tape.py`) records the operators of a step as nodes. The printers receive the nodes as
a `Program`. A printer writes the program as source text, and a compiler builds a kernel from the
text.

Some words have a fixed meaning here:

- A list has several tensors, such as all gradients of a bucket. A bucket has the parameters of one
  group that share dtype, device and mesh.
- A launch is one run of a kernel on the tensors of a bucket.
- A vector is a small tensor, such as one norm per parameter.
- A region is a part of a memory block, with a shape and strides.
- A segment is a sequence of vector operators and launches that needs no call of PyTorch.

The modules:

- `program.py` has `Program` and `Launch`. It can also run a program node by node in PyTorch.
- `operators.py` is the table of operators. `language.py` prints operators in both languages.
- `cpp.py` and `triton.py` define the two languages. `build.py` and `launches.py` compile the texts.
- `vectors.py`, `loops.py` and `printer.py` print arithmetic on a few numbers between two launches.
- `pointer_tables.py` sends addresses and layouts of tensors to a GPU.
- `proof.py` compares each new kernel with PyTorch's operators before a step uses the kernel.
- `backends.py` chooses between C++, Triton and PyTorch for a device.
"""
