"""The shapes of the parameters of some models."""

from __future__ import annotations

from collections.abc import Callable

Shapes = list[tuple[int, ...]]


def block(width: int) -> Shapes:
    """A block of a transformer: attention and two layers, a norm before each, biases everywhere."""
    attention: Shapes = [(3 * width, width), (3 * width,), (width, width), (width,)]
    layers: Shapes = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(width,), (width,), *attention, (width,), (width,), *layers]


def gpt(width: int, layers: int) -> Shapes:
    """A GPT-2: embeddings, blocks, and the last norm."""
    return [(50257, width), (1024, width), *block(width) * layers, (width,), (width,)]


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


def vit_tiny() -> Shapes:
    """ViT-tiny, patches of 16 in images of 224: 152 tensors, 5.7 million numbers."""
    width = 192
    stem: Shapes = [(1, 1, width), (1, 197, width), (width, 3, 16, 16), (width,)]
    return [*stem, *block(width) * 12, (width,), (width,), (1000, width), (1000,)]


SHAPES: dict[str, Callable[[], Shapes]] = {
    "gpt2": lambda: gpt(768, 12),  # 148 tensors, 124 million numbers
    "resnet50": resnet50,
    "vit": vit_tiny,
    "tiny": lambda: [(32, 32)] * 1000,
    "one": lambda: [(100_000_000,)],
    "billion": lambda: gpt(1792, 24),  # 292 tensors, 1.02 billion numbers
    "quick": lambda: [(64, 64), (64,)] * 3,
}
ON_CPU = ["gpt2", "resnet50", "vit", "tiny", "one"]
ON_CUDA = ["gpt2", "billion", "resnet50", "vit", "tiny"]
