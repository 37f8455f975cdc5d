"""A typical clipping function: python -m torchzero_clip audit examples/slow_clip.py:make."""

import math

import torch


def make(params):
    opt = torch.optim.AdamW(params, fused=True, capturable=True)
    steps = 0

    def step():
        nonlocal steps
        steps += 1
        norm = math.sqrt(sum(p.grad.norm().item() ** 2 for p in params))
        if math.isfinite(norm):
            limit = torch.tensor(min(1.0, steps / 100), device=params[0].device)
            torch._foreach_mul_([p.grad for p in params], limit / norm)
            opt.step()
        with torch.no_grad():
            torch._foreach_mul_(params, 1 - 0.01 / steps)

    return step
