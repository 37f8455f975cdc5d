"""Steps: a step that was written down, as few native calls over tables of pointers.

Launches and the vectors between them are native; where torch's operators stand between, a function
calls the segments and these in turn. From step to step only the addresses of gradients change, and
of what torch makes.
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
from torchzero_clip.engines.compiled.replay.vector_kernels import turns

LONGEST = 2000  # nodes of a step that is compiled: to compile more takes too long
LINE = 64  # bytes: where memory of a step's own begins


class CompiledStep:
    """A step as a native call, or as several with torch's between.

    Args:
        graph, leaves: The step that was written down.
        changing: The leaves that are others in every step.
        gradients: The buffers of gradients of the step on its way, by places.

    Attributes:
        text: What was compiled.
        lacking: The operators that stay calls of torch.
        calls: How many native calls it is; 0 where it could not be compiled, or does otherwise
            than torch.
        capture: What captures the step, where that is wanted.
    """

    most: ClassVar[int]
    """How many entries a node makes; with more of them torch's own calls are faster."""
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
        made = Lowering(graph, leaves, changing, like.device, self.able, self.most)
        self.lacking, self._gradients = made.lacking, gradients
        segments = [turns(x, made.memories) for x in made.sequence if isinstance(x, list)]
        nodes = [node for segment in segments for some in segment for node in some]
        self._launches = [node.launch for node in nodes if isinstance(node, vectors.Launched)]
        between = TorchCalls(made, len(changing))
        if 0 < len(nodes) <= LONGEST:
            self.calls = self.compile(made.memories, segments, between, like)
        if not self.calls:
            return
        self._alone: list[int] = []  # what changes, as the only segment takes it
        self._between: Callable[..., None] | None = None
        if len(made.sequence) == 1:
            self._alone = [made.changing[node] for node in between.sources[0]]
        else:
            self._between = between.function(lambda node: self._own.tensor(made.regions[node]))
        self._remember(nodes, made.memories)
        self._segments, self._changing = segments, between.memories
        self._trial = None if fake_mode(like) else Trial(self.text, like.device)

    def _remember(self, nodes: vectors.Segment, memories: Sequence[vectors.VectorMemory]) -> None:
        """Note what it writes, and whether all lies in memory as programs need it."""
        outs = [node.out.memory for node in nodes if type(node) is vectors.VectorNode]
        tensors = [memories[m].tensor for m in dict.fromkeys(outs)]
        self._written = [t for t in tensors if t is not None]
        self._written_grads: list[tuple[int, ...]] = []
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
        """Do the step, unless the gradients do not lie as programs need them.

        `changing` stand for those that it was written down with; so many of them are gradients.
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
        increment_version(written)  # first, while they are in the cache
        if self.capture is None:
            self._perform(changing)
        else:
            starts = addresses(changing) or []
            where = self, starts[:grads], starts[grads:]
            self.capture(partial(self._perform, changing), changing[0].device, where)
        return True

    def _perform(self, changing: Sequence[Tensor]) -> None:
        self.begin()
        if self._between is None:
            self._segment(0, [changing[i] for i in self._alone])
        else:
            self._between(self._segment, *changing)
        if self._trial is not None and not capturing(self._own.bytes.device):  # the first time
            self.calls, self._trial = self.calls * self._trial.passed(), None

    def _segment(self, segment: int, tensors: Sequence[Tensor]) -> None:
        """Run a segment; these tensors are the memories that are others in every step."""
        tensors = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        if self._trial is None:
            self.run(segment, tensors)
            return
        parts = partial(self._own.parts, dict(zip(self._changing[segment], tensors, strict=True)))
        for turn, nodes in enumerate(self._segments[segment]):
            self._trial.run(nodes, partial(self.run, segment, tensors, turn), parts)

    # ------------------------------------------------------------------ what a backend does

    _own: StepMemory
    """The memory of a step's own, which `compile` makes on the device of a tensor `like` it."""

    def able(self, launch: Relaunch) -> bool:
        """Whether a launch may be in a native call."""
        raise NotImplementedError

    def compile(
        self,
        memories: Sequence[vectors.VectorMemory],
        segments: Sequence[Sequence[vectors.Segment]],
        between: TorchCalls,
        like: Tensor,
    ) -> int:
        """Compile the segments, of which each is some turns, and make the tables; returns the count
        of native calls, or 0.
        """
        raise NotImplementedError

    def begin(self) -> None:
        """Take the gradients of a step."""

    def run(self, segment: int, tensors: Sequence[Tensor], turn: int | None = None) -> None:
        """Run a segment, or one turn of it."""
        raise NotImplementedError


class StepMemory:
    """The memory of a step's own, and where each memory lies.

    Args:
        memories: Those of a step.
        backed: Those of them that are more than a value in a loop.
        like: A tensor of the device.

    Attributes:
        bytes: All of it.
    """

    def __init__(
        self, memories: Sequence[vectors.VectorMemory], backed: Collection[int], like: Tensor
    ) -> None:
        self._memories, self._offsets, size = memories, dict[int, int](), 0
        for m in sorted(backed):
            memory = memories[m]
            if memory.own:
                self._offsets[m] = size
                size += -(-memory.size * memory.dtype.itemsize // LINE) * LINE
        self.bytes = like.new_zeros(size + LINE, dtype=torch.uint8, requires_grad=False)

    def address(self, m: int, entry: int = 0) -> int:
        """Where an entry of a memory lies; 0 for one of rows, or that is another in every step."""
        memory = self._memories[m]
        size = memory.dtype.itemsize
        if memory.tensor is not None:
            return _address(memory.tensor) + (entry - memory.start) * size
        return _address(self.bytes) + self._offsets[m] + entry * size if memory.own else 0

    def find(self, region: vectors.Region) -> Tensor | None:
        """The tensor of a region; None where it is another one in every step."""
        return None if self._memories[region.memory].changes else self.tensor(region)

    def tensor(self, region: vectors.Region) -> Tensor:
        """The tensor of a region, in memory that stays where it is."""
        memory = self._memories[region.memory]
        if memory.tensor is not None:
            return memory.tensor.as_strided(region.shape, region.strides, region.start)
        begin = self._offsets[region.memory]
        own = self.bytes[begin : begin + memory.size * region.dtype.itemsize].view(region.dtype)
        return own.as_strided(region.shape, region.strides, region.start + own.storage_offset())

    def parts(self, changing: Mapping[int, Tensor], region: vectors.Region) -> list[Tensor]:
        """The tensors of a region, of rows several; none where it is but a value in a loop. What
        changes is given.
        """
        memory = self._memories[region.memory]
        if memory.rows:
            rest = region._replace(shape=region.shape[1:], strides=region.strides[1:])
            each = [rest._replace(memory=i, start=at) for i, at in memory.rows]
            return [t for x in each for t in self.parts(changing, x)]
        if memory.changes:
            return [view(changing[region.memory], region)]
        return [self.tensor(region)] if not memory.own or region.memory in self._offsets else []


def view(t: Tensor, region: vectors.Region) -> Tensor:
    """A region of a tensor."""
    return t.as_strided(region.shape, region.strides, t.storage_offset() + region.start)


def misfits(launch: Relaunch) -> bool:
    """Whether some tensors of a launch have gaps, or another order in memory than others; or its
    kernel was held against nothing.
    """
    return not known(now := launch.launch([], [], [])) or bool(now.misfits())


def _address(t: Tensor) -> int:
    return (addresses([t]) or [0])[0]
