"""The networks of the studies."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.guide.runs import TEXT


class Adder(nn.Module):
    """Two hidden layers without biases. Two one-hot numbers select two rows of the first layer."""

    def __init__(self, modulus: int, width: int) -> None:
        super().__init__()
        first = nn.Linear(2 * modulus, width, bias=False)
        self.first = nn.Parameter(first.weight.detach().T.contiguous())
        self.second = nn.Linear(width, width, bias=False)
        self.third = nn.Linear(width, modulus, bias=False)

    def forward(self, pairs: Tensor) -> Tensor:
        x = F.embedding_bag(pairs, self.first, mode="sum")
        return self.third(self.second(x.relu()).relu())


class Conv(nn.Conv2d):
    """A convolution. Without norms, its kernels have mean 0, and variances stay the same."""

    def __init__(self, inputs: int, width: int, normed: bool) -> None:
        super().__init__(inputs, width, 3, padding=1)
        self.gain = nn.Parameter(torch.full((width, 1, 1, 1), 1.71))  # of rectified units
        self.norm = nn.BatchNorm2d(width) if normed else None

    def forward(self, x: Tensor) -> Tensor:
        if self.norm:
            return self.norm(super().forward(x))
        var, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        w = (self.weight - mean) / (var * self.weight[0].numel() + 1e-4).sqrt()
        return F.conv2d(x, self.gain * w, self.bias, padding=1)


class Residual(nn.Module):
    """x ← x + convolutions of x, for 8 x 8 images. Without norms, it adds a fifth of the output."""

    def __init__(self, width: int, blocks: int, normed: bool) -> None:
        super().__init__()
        self.share = 1.0 if normed else 0.2
        self.first, self.head = Conv(1, width, normed), nn.Linear(4 * width, 10)
        pairs = [(Conv(width, width, normed), Conv(width, width, normed)) for _ in range(blocks)]
        self.blocks = nn.ModuleList([nn.ModuleList(pair) for pair in pairs])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.view(-1, 1, 8, 8))
        for i, (one, two) in enumerate(self.blocks):
            size = 1.0 if one.norm else (1 + i * self.share**2) ** 0.5  # what x has grown to
            x = x + self.share * two(one((x / size).relu()).relu())
        return self.head(F.avg_pool2d(x.relu(), 4).flatten(1))


class Writer(nn.Module):
    """An LSTM that continues the text of the demo. `windows` contains all parts of the text."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        text, letters = TEXT.read_text(), sorted(set(TEXT.read_text()))
        self.windows = torch.tensor([letters.index(x) for x in text]).unfold(0, context + 1, 1)
        self.letter = nn.Embedding(len(letters), width)
        self.lstm, self.out = (
            nn.LSTM(width, width, batch_first=True),
            nn.Linear(width, len(letters)),
        )

    def loss(self, windows: Tensor) -> Tensor:
        scores = self.out(self.lstm(self.letter(windows[:, :-1]))[0])
        return F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())

    def curvature(self, windows: Tensor, before: Tensor, after: Tensor) -> list[float]:
        """Return the gradient norm, and the curvature along the first half of a step."""
        grads = []
        for weights in (before, (before + after) / 2):
            vector_to_parameters(weights, self.parameters())
            found = torch.autograd.grad(self.loss(windows), [*self.parameters()])
            grads.append(parameters_to_vector(found))
        vector_to_parameters(after, self.parameters())
        change = (grads[1] - grads[0]).norm() / (after - before).norm() * 2
        return [grads[0].norm().item(), change.item()]
