"""Replay: a step of the optimizer is recorded once, and similar steps replay the recording.

Most steps of a training run do the same operations on the same tensors; only the gradients, the
hyperparameters and the loss are new. This package records such a step as a graph and replays it
without running the Python code of links and lists. The path of a step through the files:

1. `replays` decides for each step whether to replay, to record, or to run it as usual.
2. `step_recorder` runs the step on tensors without values, and writes the step graph: a node for
   each operator of PyTorch, each launch of a kernel and each collective.
3. `pruning` removes nodes without effect from the graph.
4. `conditions` stores what must be unchanged for a replay, with the help of `native_forms`.
   `inputs` stores what differs from step to step.
5. `lowering` turns the graph into segments, which are compiled, and the calls of PyTorch between
   them. `regions` finds the memory of each tensor in the graph.
6. `compiled_step` runs the segments: as one C++ library on CPU (`native_step`), or as Triton
   kernels on GPU (`device_step`). `vector_kernels` orders the work of a segment, and
   `torch_calls` runs the calls between segments. `captures` puts the whole step into a CUDA graph.
"""
