"""The shapes of the parameters of some models."""

from __future__ import annotations

from collections.abc import Callable

Shapes = list[tuple[int, ...]]


def gpt(width: int, layers: int) -> Shapes:
    """A GPT-2: embeddings, blocks, and the last norm."""
    block: Shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


def resnet50() -> Shapes:
    """ResNet-50: 161 tensors, 25.6 million numbers."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            out = 4 * width
            shapes += [(width, before, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(out, width, 1, 1), (out,), (out,)]
            shapes += [(out, before, 1, 1), (out,), (out,)] if i == 0 else []
            before = out
    return [*shapes, (1000, 2048), (1000,)]


SHAPES: dict[str, Callable[[], Shapes]] = {
    "gpt2": lambda: gpt(768, 12),  # 148 tensors, 124 million numbers
    "resnet50": resnet50,
    "tiny": lambda: [(32, 32)] * 1000,
    "one": lambda: [(100_000_000,)],
    "billion": lambda: gpt(1792, 24),  # 292 tensors, 1.02 billion numbers
    "quick": lambda: [(64, 64), (64,)] * 3,
}
ON_CPU = ["gpt2", "resnet50", "tiny", "one"]
ON_CUDA = ["gpt2", "billion", "resnet50", "tiny"]
