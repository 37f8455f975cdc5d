"""Lists: lists of tensors that record their operators. The operators run later, as programs.

A tape is the record of the operators of one bucket. A bucket has the parameters of one group that
share dtype, device and mesh.

- `tape.py` has `Taped`, the list that rules work with, and `BucketTape`, the tape of a bucket.
- `memory.py` has the buffers of a tape. `nodes.py` has the nodes of a tape and their operands.
- `storage_formats.py` records the rounding of parameters and state in low precision.
- `runner.py` runs the programs of a tape.
"""
