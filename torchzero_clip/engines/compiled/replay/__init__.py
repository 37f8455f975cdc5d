"""Replay: record one step of the optimizer, and replay the recording in similar steps.

Most steps of a training run do the same operations on the same tensors. Only the gradients, the
hyperparameters and the loss are new. This package records such a step as a graph. A replay runs the
graph and skips the Python code of links and lists. These modules handle a step, in this order:

1. `replays` decides for each step whether to replay it, record it, or run it as usual.
2. `step_recorder` runs the step on tensors without values and writes the step graph. The graph has
   a node for each PyTorch operator, each run of a compiled program and each collective.
3. `pruning` removes nodes without effect from the graph.
4. `conditions` stores everything that must be unchanged for a replay. `native_forms` helps to
   compare it. `inputs` stores the values that differ from step to step.
5. `lowering` splits the graph into segments and PyTorch calls. A segment is a series of nodes that
   can be compiled together. The PyTorch calls run between segments. `regions` finds the memory of
   each tensor in the graph.
6. `compiled_step` runs the segments. On CPU they are one C++ library (`native_step`), on GPU they
   are Triton kernels (`device_step`). `vector_kernels` orders the nodes of a segment.
   `torch_calls` runs the PyTorch calls. `captures` puts the whole step into a CUDA graph.

A *launch* in this package is one run of a compiled program over all tensors of a bucket.
"""
