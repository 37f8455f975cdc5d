"""The trainings: each is a model, a loss that knows whether its batch is bad, and a chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.guide.troubles import BadBatches, Nothing, Recurrent, Size
from torchzero_clip import LR, Adam, ClipNorm, Modular, Recorder, Trace

TEXT = Path(__file__).parents[2] / "examples" / "data" / "harbour.txt"
STEPS = 2000
SEED = 0
MEASURE = ClipNorm(math.inf, name="gradient")  # the norm of each tensor, and nothing else

Losses = Iterator[tuple[Tensor, bool]]  # a loss at a time, and whether the batch is bad


@dataclass(frozen=True)
class Training:
    """A training whose norms are recorded. `limit` clips the run after the norm is measured."""

    about: str
    make: Callable[[], tuple[nn.Module, Losses]]
    rate: float
    limit: float = math.inf
    digits: int = 6


def record(training: Training, steps: int = STEPS) -> Trace:
    """Train, and give the norms of all tensors in all steps."""
    torch.manual_seed(SEED)
    model, losses = training.make()
    clip = ClipNorm(training.limit, dim="global")
    opt = Modular(model.named_parameters(), MEASURE, clip, Adam(), LR(training.rate))
    with Recorder(opt, capacity=steps + 1) as recorder:
        for _ in range(steps):
            loss, bad = next(losses)
            opt.zero_grad()
            loss.backward()
            recorder.log(loss=loss, spike=float(bad))
            opt.step()
    return Trace.of(recorder, "gradient/norm")


# ---------------------------------------------------------------------- language models


def language(trouble: bool) -> Callable[[], tuple[nn.Module, Losses]]:
    """The transformer of `benchmarks.guide` with two layers; one batch in fifty may be noise."""

    def make() -> tuple[nn.Module, Losses]:
        kind = BadBatches if trouble else Nothing
        task = kind(Size(), TEXT, SEED)

        def losses() -> Losses:
            while True:
                loss, clean = task.losses()
                yield loss, bool(loss.detach() != clean)

        return task.model, losses()

    return make


def recurrent() -> tuple[nn.Module, Losses]:
    """A recurrent network of rectified units on the same text, in windows of 64 letters."""
    task = Nothing(Size(), TEXT, SEED)
    task.model = nn.Sequential(nn.Embedding(task.letters, 64), Recurrent(64, 64, task.letters, 1.0))

    def losses() -> Losses:
        while True:
            yield task.losses()[0], False

    return task.model, losses()


# ---------------------------------------------------------------------- images


def images() -> tuple[nn.Module, Losses]:
    """A small convolutional network tells apart four drawn shapes; some labels are wrong.

    In one batch in fifty all labels are random and the images ten times too bright.
    """
    source = torch.Generator().manual_seed(SEED)
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 16)] * 2, indexing="ij"))

    def draw(many: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(4, (many,), generator=source)
        place = torch.rand(many, 2, 1, 1, generator=source) - 0.5
        size = 0.25 + 0.35 * torch.rand(many, 1, 1, generator=source)
        x, y = (grid - place).unbind(1)
        square, disc = torch.maximum(x.abs(), y.abs()), (x.square() + y.square()).sqrt()
        distances = torch.stack(
            [square, disc, (disc - size / 2).abs() * 2, torch.minimum(x.abs(), y.abs()) * 3]
        )
        shape = (distances[labels, torch.arange(many)] < size).float()
        return shape + 0.3 * torch.randn(shape.shape, generator=source), labels

    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 4),
    )  # fmt: skip

    def losses() -> Losses:
        while True:
            pictures, labels = draw(32)
            noise = torch.randint(4, labels.shape, generator=source)
            bad = torch.rand((), generator=source).item() < 0.02
            if bad:
                pictures, labels = 10 * pictures, noise
            yield F.cross_entropy(net(pictures.unsqueeze(1)), labels), bad

    return net, losses()


# ---------------------------------------------------------------------- diffusion


def diffusion() -> tuple[nn.Module, Losses]:
    """A network learns to tell the noise in points of a spiral, at a random level of it."""
    source = torch.Generator().manual_seed(SEED)
    net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def losses() -> Losses:
        while True:
            turn = 3 * math.pi * torch.rand(64, 1, generator=source).sqrt()
            points = torch.cat([turn * turn.cos(), turn * turn.sin()], 1) / 5
            noise = torch.randn(64, 2, generator=source)
            level = torch.rand(64, 1, generator=source)
            mixed = (1 - level).sqrt() * points + level.sqrt() * noise
            yield F.mse_loss(net(torch.cat([mixed, level], 1)), noise), False

    return net, losses()


# ---------------------------------------------------------------------- PPO


class Poles:
    """Carts, each with a pole to balance, all at once. A step is a fiftieth of a second."""

    def __init__(self, many: int, source: torch.Generator) -> None:
        self.source, self.state = source, torch.zeros(many, 4)
        self.age = torch.zeros(many)
        self.reset(torch.ones(many, dtype=torch.bool))

    def reset(self, where: Tensor) -> None:
        start = 0.1 * torch.rand(self.state.shape, generator=self.source) - 0.05
        self.state = torch.where(where.unsqueeze(1), start, self.state)
        self.age = self.age.masked_fill(where, 0.0)

    def step(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """The reward, 1 for every step, and which poles fell or were balanced for 200 steps."""
        x, speed, angle, spin = self.state.unbind(1)
        force = 20.0 * right.float() - 10.0
        push = (force + 0.05 * spin.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (
            0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1)
        )
        pull = push - 0.05 * turn * angle.cos() / 1.1
        moved = [x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * turn]
        self.state, self.age = torch.stack(moved, 1), self.age + 1
        over = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21) | (self.age >= 200)
        self.reset(over)
        return torch.ones_like(x), over


class Actor(nn.Module):
    """The chance of going right, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))


def ppo() -> tuple[nn.Module, Losses]:
    """PPO with 16 carts, 64 steps a round, four epochs of four batches."""
    source, net = torch.Generator().manual_seed(SEED), Actor()
    poles = Poles(16, source)

    def losses() -> Losses:
        while True:
            states, actions, chances, returns, gains = (x.flatten(0, 1) for x in play(net, poles))
            for _ in range(4):
                for batch in torch.randperm(len(actions), generator=source).chunk(4):
                    logits = F.log_softmax(net.policy(states[batch]), 1)
                    chance = logits.gather(1, actions[batch, None]).squeeze(1)
                    ratio = (chance - chances[batch]).exp()
                    gain = gains[batch]
                    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                    bound = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                    value = F.mse_loss(net.value(states[batch]).squeeze(1), returns[batch])
                    entropy = -(logits.exp() * logits).sum(1).mean()
                    yield 0.5 * value - bound.mean() - 0.01 * entropy, False

    return net, losses()


@torch.no_grad()
def play(net: Actor, poles: Poles) -> list[Tensor]:
    """States, actions, their log chances, returns and advantages of 64 steps of all carts."""
    rows, rewards, ends = [], [], []
    for _ in range(64):
        state = poles.state
        logits = F.log_softmax(net.policy(state), 1)
        action = torch.multinomial(logits.exp(), 1, generator=poles.source)
        rows.append((state, action.squeeze(1), logits.gather(1, action).squeeze(1)))
        reward, over = poles.step(action.squeeze(1) == 1)
        rewards.append(reward)
        ends.append(over.float())
    states, actions, chances = (torch.stack(column) for column in zip(*rows, strict=True))
    values = net.value(states).squeeze(2)
    later, gain, gains = net.value(poles.state).squeeze(1), torch.zeros(16), []
    for value, reward, end in zip(values.flip(0), reversed(rewards), reversed(ends), strict=True):
        surprise = reward + 0.99 * (1 - end) * later - value
        gain = surprise + 0.99 * 0.95 * (1 - end) * gain
        gains.append(gain)
        later = value
    advantages = torch.stack(gains[::-1])
    return [states, actions, chances, advantages + values, advantages]


TRAININGS: dict[str, Training] = {
    "language": Training(
        "a transformer of two layers on the text of the demo, without bad batches",
        language(False), 0.01,
    ),
    "language_trouble": Training(
        "the same; one batch in fifty is noise with a loss 10 to 1000 times too large, and a "
        "global threshold of 1 after the measurement keeps the training alive",
        language(True), 0.01, limit=1.0,
    ),
    "images": Training(
        "a small convolutional network on drawn shapes; one batch in fifty ten times too bright, "
        "with random labels; a global limit of 1",
        images, 0.003, limit=1.0,
    ),
    "recurrent": Training(
        "a recurrent network of rectified units on the same text, a global limit of 1",
        recurrent, 0.003, limit=1.0,
    ),
    "ppo": Training("PPO on carts with poles, a global limit of 0.5", ppo, 0.001, limit=0.5),
    "diffusion": Training("a denoiser of points on a spiral", diffusion, 0.003),
}  # fmt: skip
