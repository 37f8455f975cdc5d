"""A text as batches of numbers, some of which are corrupted."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

TEXT = Path(__file__).parents[1] / "data" / "harbour.txt"
CONTEXT, BATCH = 64, 16
CORRUPTED = 1 / 30  # the share of batches that are corrupted
SCALE = (10.0, 1000.0)  # how much too large their loss is: the logarithm is uniform between these
CLEAN = 50  # steps before the trouble begins


class Batch(NamedTuple):
    """Windows of CONTEXT + 1 letters, and the factor of their loss."""

    windows: Tensor
    scale: float

    @property
    def corrupted(self) -> bool:
        return self.scale != 1


class Data:
    """The text: nine tenths for training, and the rest for tests."""

    def __init__(self, device: torch.device, seed: int) -> None:
        text = TEXT.read_text(encoding="utf-8")
        self.letters = sorted(set(text))
        codes = self.encode(text)
        held_out = len(codes) // 10
        self.train = codes[:-held_out].unfold(0, CONTEXT + 1, 1)
        self.test = codes[-held_out:].unfold(0, CONTEXT + 1, CONTEXT).to(device)
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step: a random draw from the text, or sometimes a corrupted batch.

        A corrupted batch imitates a broken shard of the data. After the first letter, its windows
        are noise, and its loss is 10 to 1000 times too large.
        """
        draw = {"generator": self.generator}
        windows = self.train[torch.randint(len(self.train), (BATCH,), **draw)]
        noise = torch.randint(len(self.letters), windows.shape, **draw)
        chance, size = torch.rand(2, **draw).tolist()
        if step <= CLEAN or chance >= CORRUPTED:
            return Batch(windows.to(self.device), 1.0)
        windows = torch.cat([windows[:, :1], noise[:, 1:]], dim=1)
        least, most = SCALE
        return Batch(windows.to(self.device), least * (most / least) ** size)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.letters.index(letter) for letter in text])

    def decode(self, codes: Tensor) -> str:
        return "".join(self.letters[code] for code in codes.tolist())
