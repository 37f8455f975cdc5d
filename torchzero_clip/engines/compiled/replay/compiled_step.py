"""Compiled steps: run a recorded step as a few native calls that read tables of pointers.

`CompiledStep` lowers a step graph to segments. PyTorch calls run between the segments. A segment
has two kinds of nodes:

- A launch runs a list program, which is a compiled program over all tensors of a bucket.
- A vector node computes with a few numbers, such as norms.

Two subclasses compile the segments. `NativeStep` compiles them to C++ for CPU, and `DeviceStep` to
Triton for GPU. `RecordedStep` calls a `CompiledStep` for each replay. A replay updates only the
addresses of gradients and of new tensors that PyTorch calls return.

A memory in this code is an address range that holds one or more tensors: see `regions`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.fx import Graph

from torchzero_clip.core.tensor_kinds import addresses
from torchzero_clip.core.torch_private import fake_mode
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers import vectors
from torchzero_clip.engines.compiled.printers.pointer_tables import capturing
from torchzero_clip.engines.compiled.printers.program import Relaunch
from torchzero_clip.engines.compiled.printers.proof import WRONG, Trial, known
from torchzero_clip.engines.compiled.replay.captures import StepCapture
from torchzero_clip.engines.compiled.replay.lowering import Lowering
from torchzero_clip.engines.compiled.replay.torch_calls import TorchCalls
from torchzero_clip.engines.compiled.replay.vector_kernels import stages

MAX_NODES = 2000  # of a step that is compiled: compiling more nodes takes too long
ALIGNMENT = 64  # bytes, of memory that belongs to a step


class CompiledStep:
    """A recorded step that runs as one native call, or as several with PyTorch calls in between.

    Args:
        graph: The step graph.
        leaves: The inputs of the graph during recording.
        changing: The inputs that are new tensors in every step. The gradients come first.
        gradients: The gradient buffers of the current step. Each key is a tuple with the index of
            each gradient in the buffer.

    Attributes:
        text: The source code that was compiled.
        torch_calls: The names of the operators that PyTorch runs, because they are not compiled.
        calls: The number of native calls of a step. It is 0 if the step could not be compiled, or
            if the results of the compiled step differ from PyTorch's results.
        capture: The function that captures the step in a CUDA graph. None if the user did not call
            `captured`.
    """

    max_elements: ClassVar[int]
    """The largest number of elements of a vector node. PyTorch runs larger operations faster."""
    text: str
    capture: StepCapture | None = None
    calls = 0

    def __init__(
        self,
        graph: Graph,
        leaves: Sequence[Any],
        changing: Sequence[Tensor],
        gradients: dict[tuple[int, ...], Buffer],
    ) -> None:
        like = next(x for x in [*changing, *leaves] if isinstance(x, Tensor))
        lowered = Lowering(graph, leaves, changing, like.device, self.supports, self.max_elements)
        self.torch_calls = lowered.torch_calls
        self._gradients = gradients
        segments = [stages(x, lowered.memories) for x in lowered.sequence if isinstance(x, list)]
        nodes = [node for segment in segments for stage in segment for node in stage]
        self._launches = [node.launch for node in nodes if isinstance(node, vectors.Launched)]
        between = TorchCalls(lowered, len(changing))
        if 0 < len(nodes) <= MAX_NODES:
            self.calls = self.compile(lowered.memories, segments, between, like)
        if not self.calls:
            return
        # if there is a single segment: which of the changing inputs it receives
        self._only_segment_takes: list[int] = []
        self._between: Callable[..., None] | None = None
        if len(lowered.sequence) == 1:
            self._only_segment_takes = [lowered.changing[node] for node in between.sources[0]]
        else:
            regions = lowered.regions
            self._between = between.function(lambda node: self._own.tensor(regions[node]))
        self._note_memory(nodes, lowered.memories)
        self._segments = segments
        self._changing = between.memories
        self._trial = None if fake_mode(like) else Trial(self.text, like.device)

    def _note_memory(
        self, nodes: vectors.Segment, memories: Sequence[vectors.VectorMemory]
    ) -> None:
        """Store which tensors the step writes to, and whether all fixed tensors are contiguous.

        Fixed tensors are tensors that are the same in every step.
        """
        outs = [node.out.memory for node in nodes if type(node) is vectors.VectorNode]
        tensors = [memories[m].tensor for m in dict.fromkeys(outs)]
        self._written = [t for t in tensors if t is not None]
        self._written_grads: list[tuple[int, ...]] = []  # keys of gradient buffers
        for launch in self._launches:
            for i in {i for i, _ in launch.program.stores}:
                buffer = launch.buffers[i]
                if isinstance(buffer, Buffer):
                    self._written += buffer.tensors
                else:
                    self._written_grads.append(buffer)
        fixed = [b for x in self._launches for b in x.buffers if isinstance(b, Buffer)]
        in_order = [x.elements is None or x.elements.contiguous for x in self._launches]
        self._dense = all([b.contiguous for b in fixed]) and all(in_order)

    def __call__(self, changing: Sequence[Tensor], grads: int = 0) -> bool:
        """Run the step and return True, or return False if the step cannot run.

        The step cannot run if a gradient has an unsupported layout, or if nothing was compiled.

        Args:
            changing: The tensors of this step that replace the recorded `changing` inputs.
            grads: The number of gradients in `changing`. The gradients come first.
        """
        if not self.calls or self._own.bytes.device.type in WRONG:
            return False
        buffers = list(self._gradients.values())
        dense = self._dense and all([buffer.contiguous for buffer in buffers])
        if not dense and any(map(misfits, self._launches)):
            return False
        if not dense and not all([t.is_contiguous() for t in changing]):
            return False
        written = self._written
        for key in self._written_grads:
            written = written + self._gradients[key].tensors
        increment_version(written)  # before the step runs, while the tensors are in the cache
        if self.capture is None:
            self._perform(changing)
        else:
            starts = addresses(changing) or []
            where = self, starts[:grads], starts[grads:]
            self.capture(partial(self._perform, changing), changing[0].device, where)
        return True

    def _perform(self, changing: Sequence[Tensor]) -> None:
        """Run all segments, and the PyTorch calls between segments."""
        self.begin()
        if self._between is None:
            self._run_segment(0, [changing[i] for i in self._only_segment_takes])
        else:
            self._between(self._run_segment, *changing)
        if self._trial is not None and not capturing(self._own.bytes.device):
            if not self._trial.passed():
                self.calls = 0
            self._trial = None

    def _run_segment(self, segment: int, tensors: Sequence[Tensor]) -> None:
        """Run a segment. The first step also compares each stage with PyTorch: see `Trial`.

        Args:
            segment: The index of the segment.
            tensors: The tensors that this segment uses and that are new in every step.
        """
        tensors = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        if self._trial is None:
            self.run(segment, tensors)
            return
        parts = partial(self._own.parts, dict(zip(self._changing[segment], tensors, strict=True)))
        for stage, nodes in enumerate(self._segments[segment]):
            self._trial.run(nodes, partial(self.run, segment, tensors, stage), parts)

    # ------------------------------------------------------------------ what a subclass defines

    _own: StepMemory
    """The memory that belongs to the step. The method `compile` allocates this memory."""

    def supports(self, launch: Relaunch) -> bool:
        """Return whether a native call may include a launch."""
        raise NotImplementedError

    def compile(
        self,
        memories: Sequence[vectors.VectorMemory],
        segments: Sequence[Sequence[vectors.Segment]],
        between: TorchCalls,
        like: Tensor,
    ) -> int:
        """Compile the segments and make their tables of pointers.

        Args:
            memories: All memory ranges that the step uses.
            segments: The stages of each segment.
            between: The PyTorch calls between segments.
            like: A tensor on the device of the step.

        Returns:
            The number of native calls in a step, or 0 if the segments cannot be compiled.
        """
        raise NotImplementedError

    def begin(self) -> None:
        """Prepare the tables for a step. For example, store the addresses of its gradients."""

    def run(self, segment: int, tensors: Sequence[Tensor], stage: int | None = None) -> None:
        """Run all stages of a segment, or only one stage."""
        raise NotImplementedError


class StepMemory:
    """The memory that belongs to a compiled step, and the address of each memory in the step.

    Args:
        memories: All memory ranges that the step uses.
        backed: The indices of the ranges that need an address. A value that only one loop uses
            needs no address.
        like: A tensor on the device of the step.

    Attributes:
        bytes: All memory that belongs to the step, as one tensor.
    """

    def __init__(
        self, memories: Sequence[vectors.VectorMemory], backed: Collection[int], like: Tensor
    ) -> None:
        self._memories = memories
        self._offsets = dict[int, int]()
        size = 0
        for m in sorted(backed):
            memory = memories[m]
            if memory.own:
                self._offsets[m] = size
                size += -(-memory.size * memory.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.bytes = like.new_zeros(size + ALIGNMENT, dtype=torch.uint8, requires_grad=False)

    def address(self, m: int, element: int = 0) -> int:
        """Return the address of an element of a memory.

        Args:
            m: The index of the memory.
            element: The index of the element.

        Returns:
            The address. It is 0 for a memory that consists of rows in other memory, and for a
            memory that is new in every step.
        """
        memory = self._memories[m]
        size = memory.dtype.itemsize
        if memory.tensor is not None:
            return _address(memory.tensor) + (element - memory.start) * size
        return _address(self.bytes) + self._offsets[m] + element * size if memory.own else 0

    def find(self, region: vectors.Region) -> Tensor | None:
        """Return a region as a tensor, or None if the memory of the region is new in every step."""
        return None if self._memories[region.memory].changes else self.tensor(region)

    def tensor(self, region: vectors.Region) -> Tensor:
        """Return a region as a tensor. The memory of the region must be the same in every step."""
        memory = self._memories[region.memory]
        if memory.tensor is not None:
            return memory.tensor.as_strided(region.shape, region.strides, region.start)
        begin = self._offsets[region.memory]
        own = self.bytes[begin : begin + memory.size * region.dtype.itemsize].view(region.dtype)
        return own.as_strided(region.shape, region.strides, region.start + own.storage_offset())

    def parts(self, changing: Mapping[int, Tensor], region: vectors.Region) -> list[Tensor]:
        """Return the tensors that a region consists of.

        A region of merged rows consists of several tensors. A value that exists only inside of a
        loop has no tensor, so the list is empty.

        Args:
            changing: The tensors that are new in every step, by the index of their memory.
            region: The region.
        """
        memory = self._memories[region.memory]
        if memory.rows:
            rest = region._replace(shape=region.shape[1:], strides=region.strides[1:])
            rows = [rest._replace(memory=m, start=start) for m, start in memory.rows]
            return [t for row in rows for t in self.parts(changing, row)]
        if memory.changes:
            return [view(changing[region.memory], region)]
        return [self.tensor(region)] if not memory.own or region.memory in self._offsets else []


def view(t: Tensor, region: vectors.Region) -> Tensor:
    """Return the view of a tensor that has the shape, strides and start of a region."""
    return t.as_strided(region.shape, region.strides, t.storage_offset() + region.start)


def misfits(launch: Relaunch) -> bool:
    """Return whether a native call is unable to run a launch with the gradients of this step.

    The tensors must have no gaps and must have their dims in the same order in memory. The kernel
    of the launch must already have been compared with PyTorch.
    """
    now = launch.launch([], [], [])
    return not known(now) or bool(now.misfits())


def _address(t: Tensor) -> int:
    """Return the address of a tensor. The address of a fake tensor is 0."""
    return (addresses([t]) or [0])[0]
