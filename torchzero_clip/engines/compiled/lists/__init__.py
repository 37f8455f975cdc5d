"""Lists: lists of tensors that record their operators on a tape, to run them later as programs.

- `tape.py` has `Taped`, the list that rules work with, and `BucketTape`, the tape of a bucket.
- `memory.py` has the buffers of a tape, and `nodes.py` its nodes and their operands.
- `storage_formats.py` records how parameters and state of fewer bits are rounded.
- `runner.py` runs the launches of a tape.
"""
