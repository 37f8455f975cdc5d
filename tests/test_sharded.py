"""What docs/reliability.md promises of sharded parameters: two processes give what one gives."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORLD = 2
CHAINS = ["head", "entries", "cautious"]


def chain(name):
    from torchzero_clip import LR, Adam, Cautious, ClipNorm, ClipValue, ClipValueGrowth, WeightDecay

    return {
        "head": lambda: [ClipNorm(0.1, dim="global"), Adam(), WeightDecay(0.01), LR(1e-2)],
        "entries": lambda: [ClipValue(0.01), ClipValueGrowth(), LR(0.1)],
        "cautious": lambda: [Adam(), Cautious(), LR(1e-2)],
    }[name]()


def main():
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from torchzero_clip import Modular

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (WORLD,))
    for name in CHAINS:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            linear = torch.nn.Linear
            models.append(torch.nn.Sequential(linear(5, 7), torch.nn.Tanh(), linear(7, 3)))
        fully_shard(models[1], mesh=mesh)
        opts = [Modular(model.named_parameters(), *chain(name)) for model in models]
        for step in range(10):
            torch.manual_seed(step)
            x = torch.randn(8, 5)
            for model, opt in zip(models, opts, strict=True):
                opt.zero_grad()
                model(x).square().mean().backward()
                opt.step()
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(p.data, q.full_tensor().data, rtol=1e-6, atol=1e-6)
        print("same", name, flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


@pytest.mark.slow  # processes and sockets have no place among the quick tests
def test_two_processes_give_what_one_gives():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    root = Path(__file__).parent.parent
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(WORLD), "PYTHONPATH": str(root)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        ends = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for rank, (out, err) in zip(ranks, ends, strict=True):
        assert rank.returncode == 0, err
        assert out.splitlines() == [f"same {name}" for name in CHAINS]


if __name__ == "__main__":
    main()
