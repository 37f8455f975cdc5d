"""A small transformer that predicts the next letter."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from race.data import CONTEXT

WIDTH, HEADS, BLOCKS = 64, 4, 2


class Block(nn.Module):
    """Attention to the previous letters, and then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attended = nn.Linear(WIDTH, WIDTH, bias=False)
        self.before_layers = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.before_attention(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).flatten(2))
        return x + self.layers(self.before_layers(x))


class LanguageModel(nn.Module):
    """A model that maps letters to scores of the next letter, with about 110 000 parameters."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, letters)
        for embedding in (self.letter, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.letter(codes) + self.place.weight[: codes.shape[1]]
        return self.scores(self.norm(self.blocks(x)))

    def loss(self, windows: Tensor) -> Tensor:
        """Return the loss of the next letters, in nats per letter."""
        scores = self(windows[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def write(self, codes: Tensor, letters: int) -> Tensor:
        """Continue a text, always with the most likely letter."""
        for _ in range(letters):
            scores = self(codes[None, -CONTEXT:])[0, -1]
            codes = torch.cat([codes, scores.argmax(keepdim=True)])
        return codes
