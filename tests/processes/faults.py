"""One of two processes of a sharded run, to which something happens; started by test_faults.py."""

from __future__ import annotations

import copy
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchzero_clip import LR, Adam, ClipNorm, Modular


def main(store: str, rank: int, what: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=10),
    )
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(5, 7), torch.nn.Tanh(), linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    opt = Modular(model.parameters(), ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))

    def train(step: int) -> None:
        opt.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        if what != "NaN" and rank == 1 and step == 2:
            os.kill(os.getpid(), signal.Signals[what])  # before the norm of all is known
        opt.step()

    for step in range(3):
        attempt(f"step {step}", train, step)
    checkpoint = copy.deepcopy(opt.state_dict())
    attempt("load", opt.load_state_dict, checkpoint)
    if what == "NaN":
        held = opt.state[next(model.parameters())]["Adam/exp_avg"].to_local()
        before, safe = held.clone(), [opt.safe_to_save()]
        if rank == 1:
            held[-1] = math.nan
        safe.append(opt.safe_to_save())
        held.copy_(before)
        print(f"safe to save: {safe}", flush=True)
    if rank == 1:
        checkpoint["state"][0]["Adam/exp_avg"].to_local()[-1] = math.nan
    attempt("load", opt.load_state_dict, checkpoint)
    attempt("step 3", train, 3)


def attempt(label: str, act: Callable[..., Any], *args: Any) -> None:
    """Do it and say so; after an error the process ends."""
    began = time.monotonic()
    try:
        act(*args)
    except Exception as error:
        seconds = time.monotonic() - began
        print(f"{label}: {type(error).__name__} after {seconds:.1f} s: {error}", flush=True)
        os._exit(3)  # what is left of the process group must not keep the process
    print(f"{label}: done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
