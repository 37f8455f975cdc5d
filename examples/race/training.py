"""The race: a model for each chain, the same batches for all models, and the results."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from race.data import CLEAN, Batch, Data
from race.model import LanguageModel
from torchzero_clip import Chain, Modular, Recorder, to_floats

PROMPT, LETTERS = "At noon the ", 60  # what every model goes on with at the end
RECOVERED = 0.1  # nats above its best before, from which on a loss counts as back


def race(
    chains: dict[str, Chain],
    steps: int,
    seed: int,
    device: torch.device,
    watch: Callable[[int, list[Racer]], None],
) -> list[Result]:
    """Train a model with each chain, in turns. `watch` receives every step."""
    data = Data(device, seed)
    racers = [Racer(name, chain, data, seed, steps) for name, chain in chains.items()]
    every, corrupted = max(steps // 200, 1), []
    for racer in racers:
        racer.test(0)
    for step in range(1, steps + 1):
        batch = data.batch(step)
        if batch.corrupted:
            corrupted.append(step)
        for racer in racers:
            racer.train(batch)
            if step % every == 0 or step == steps:
                racer.test(step)
        watch(step, racers)
    return [racer.result(corrupted) for racer in racers]


class Racer:
    """A model and the chain that trains it."""

    def __init__(self, name: str, chain: Chain, data: Data, seed: int, steps: int) -> None:
        self.name, self.chain, self.data = name, chain, data
        torch.manual_seed(seed)  # all begin with the same weights
        self.model = LanguageModel(len(data.letters)).to(data.device)
        self.opt = Modular(self.model.named_parameters(), chain)
        self.recorder = Recorder(self.opt, capacity=steps + 1)
        self.test_losses: dict[int, float] = {}
        self.times: list[tuple[float, float]] = []

    def train(self, batch: Batch) -> None:
        """Make one step, as in any training loop."""
        begin = self.now()
        self.opt.zero_grad()
        loss = batch.scale * self.model.loss(batch.windows)
        loss.backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.recorder.log(loss=loss, gradient=torch.nn.utils.get_total_norm(gradients))
        middle = self.now()
        self.opt.step()
        end = self.now()
        self.times.append((end - begin, end - middle))

    @torch.no_grad()
    def test(self, step: int) -> None:
        self.test_losses[step] = self.model.loss(self.data.test).item()

    def now(self) -> float:
        if self.data.device.type != "cpu":
            torch.accelerator.synchronize(self.data.device)
        return time.perf_counter()

    def glance(self) -> tuple[float, float | None, float | None]:
        """Return the last test loss, and the last norm and threshold if a rule has one."""
        metrics = to_floats(self.opt.metrics())
        loss = next(reversed(self.test_losses.values()), math.nan)
        path = limiting(metrics)
        if path is None:
            return loss, None, None
        return loss, together(metrics[f"{path}/norm"]), together(metrics[f"{path}/limit"])

    def result(self, corrupted: list[int]) -> Result:
        history = self.recorder.history()
        path = limiting(history)
        steps = len(history["step"])
        norm, limit, share = history["gradient"], [math.nan] * steps, [0.0] * steps
        if path is not None:
            norm = [together(norms) for norms in history[f"{path}/norm"]]
            limit = [together(limits) for limits in history[f"{path}/limit"]]
            share = [average(flags) for flags in history[f"{path}/clipped"]]
        for name in history:
            if name.endswith("/skipped"):  # counted from the start: a rise is a step that was lost
                counts = [0.0, *history[name]]
                lost = [now > before for before, now in pairwise(counts)]
                share = [1.0 if gone else part for gone, part in zip(lost, share, strict=True)]
                path = path or name
        device = self.data.device
        codes = self.model.write(self.data.encode(PROMPT).to(device), LETTERS)
        return Result(
            name=self.name,
            chain=self.chain,
            test_losses=self.test_losses,
            norm=norm,
            limit=limit,
            share=share,
            clips=path is not None,
            corrupted=corrupted,
            ms=1000 * statistics.median(whole for whole, _ in self.times),
            ms_in_step=1000 * statistics.median(part for _, part in self.times),
            writes=self.data.decode(codes),
        )


@dataclass
class Result:
    """The results of a chain. Each list has one element per step."""

    name: str
    chain: Chain
    test_losses: dict[int, float]  # by step, on held-out text
    norm: list[float]  # before the first rule that clips, or of the gradient where none does
    limit: list[float]  # NaN where there is none
    share: list[float]  # of tensors, or of the one gradient, that was clipped
    clips: bool
    corrupted: list[int]  # the steps with a corrupted batch
    ms: float
    ms_in_step: float
    writes: str

    @property
    def final_loss(self) -> float:
        return next(reversed(self.test_losses.values()))

    @property
    def steps_clipped(self) -> int:
        return sum(part > 0 for part in self.share)

    @property
    def survived(self) -> bool:
        """Return whether the final loss is no higher than at the end of the clean start."""
        before = [loss for step, loss in self.test_losses.items() if step <= CLEAN]
        return self.final_loss <= before[-1]

    @property
    def worst_spike(self) -> float:
        """Return how far the loss rose above its best earlier value."""
        return max((rise for _, rise in self.rises()), default=0.0)

    @property
    def recovery(self) -> tuple[int, bool]:
        """Return the longest time with a loss well above its best, and whether it has ended."""
        longest, since, step = 0, None, 0
        for step, rise in self.rises():
            if rise > RECOVERED:
                since = step if since is None else since
            elif since is not None:
                longest, since = max(longest, step - since), None
        if since is not None and step - since >= longest:
            return step - since, False
        return longest, True

    def rises(self) -> Iterator[tuple[int, float]]:
        """Yield each test after the clean start, and its loss above the best earlier loss."""
        best = math.inf
        for step, loss in self.test_losses.items():
            loss = loss if math.isfinite(loss) else math.inf
            if step > CLEAN:
                yield step, max(loss - best, 0.0)
            best = min(best, loss)


def limiting(metrics: Mapping[str, Any]) -> str | None:
    """Return the name of the first rule that has a threshold."""
    return next((name[: -len("/limit")] for name in metrics if name.endswith("/limit")), None)


def together(parts: float | list[float]) -> float:
    """Return one norm, or one threshold, for parts that were measured separately."""
    return math.hypot(*parts) if isinstance(parts, list) else parts


def average(parts: float | list[float]) -> float:
    known = [part for part in (parts if isinstance(parts, list) else [parts]) if part == part]
    return sum(known) / len(known) if known else 0.0
