"""Steps a second of an agent of stable-baselines3: python -m benchmarks.studies.ppo.

PPO on CartPole with torch's own clip and Adam, and with this library. The agents take turns in one
process, on one thread; a ratio is the median over turns of the steps a second of one over those of
torch in the same turn. It needs stable-baselines3, in an environment of its own.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

from benchmarks.circumstances import watched
from benchmarks.step.bars import of_ratios
from torchzero_clip import LR, Adam, ClipNorm, Modular, attach

TORCH, STEPS, TURNS, LIMIT = "torch", 1024, 8, 0.5


def agents() -> dict[str, Any]:
    """The same agent four times."""
    from stable_baselines3 import PPO

    def make(limit: float, **policy: Any) -> Any:
        given = {"n_steps": 512, "max_grad_norm": limit, "seed": 0, "device": "cpu"}
        return PPO("MlpPolicy", "CartPole-v1", policy_kwargs=policy, **given)

    def chain(compile: bool) -> Any:
        def build(params: Any, lr: float) -> Modular:
            links = ClipNorm(LIMIT, dim="global"), Adam(eps=1e-5), LR(lr)
            return Modular(params, *links, compile=compile)

        return make(math.inf, optimizer_class=build, optimizer_kwargs={})

    found = {TORCH: make(LIMIT), "default": chain(False), "compiled": chain(True)}
    found["attach"] = make(math.inf)
    attach(found["attach"].policy.optimizer, ClipNorm(LIMIT, dim="global"))
    return found


def main() -> None:
    torch.set_num_threads(1)
    made = agents()
    for agent in made.values():
        agent.learn(STEPS)
    speed: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(TURNS):
        for name, agent in made.items():
            start = time.perf_counter()
            agent.learn(STEPS, reset_num_timesteps=False)
            speed[name].append(STEPS / (time.perf_counter() - start))
    for name, row in speed.items():
        ratios = [a / b for a, b in zip(row, speed[TORCH], strict=True)]
        print(of_ratios(f"{name}, {statistics.median(row):.0f} steps a second", ratios, None))


if __name__ == "__main__":
    with watched("benchmarks.studies.ppo"):
        main()
