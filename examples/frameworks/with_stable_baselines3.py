"""stable-baselines3: PPO learns CartPole with a chain, is saved and loaded, and resumes."""

import torch
from stable_baselines3 import PPO

from torchzero_clip import LR, Adam, ClipNorm, ZClip, optimizer_class

links = ClipNorm(0.5, dim="global"), ZClip(max_norm=None), Adam(eps=1e-5), LR(3e-4)
policy = {"optimizer_class": optimizer_class(*links)}  # gets lr= from PPO

torch.set_num_threads(1)
off = float("inf")  # PPO's own clipping, 0.5 by default
agent = PPO("MlpPolicy", "CartPole-v1", 1e-3, 256, max_grad_norm=off, policy_kwargs=policy, seed=0)
agent.learn(1024)
agent.save("cartpole")

again = PPO.load("cartpole", env=agent.get_env())
print(again.policy.optimizer.param_groups[0]["lr"])
again.learn(512)  # the averages of the chain continue
# → 0.001
