"""The host's time for a compiled step on a GPU, without one: python -m benchmarks.launches.

Triton's own launcher runs over a driver that does nothing, so that what is timed is all that the
host does: conditions, tables, and launches. Parameters lie on the CPU, and are taken for those of a
GPU. Gradients lie where they lay, or elsewhere in every step, as `zero_grad()` has them.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import Parameter

from torchzero_clip import LR, Adam, ClipNorm, Modular, WeightDecay
from torchzero_clip.engines import Compiled
from torchzero_clip.engines.compiled.printers import proof

COUNTS = 3, 200, 2000
CARD = 9, 0
DOES = {
    "cuDeviceGetAttribute": f"*(int *)a = b == 75 ? {CARD[0]} : b == 76 ? {CARD[1]} : 200000;",
    "cuFuncGetAttribute": "*(int *)a = 1024;",
    "cuCtxGetCurrent": "*(void **)a = (void *)1;",
    "cuCtxGetDevice": "*(int *)a = 0;",
    "cuDeviceGet": "*(int *)a = 0;",
    "cuModuleLoadData": "*(void **)a = (void *)1;",
    "cuModuleGetFunction": "*(void **)a = (void *)1;",
    "cuPointerGetAttribute": "*(void **)a = (void *)c;",
}
"""What functions of the driver write besides that all is well; others do nothing."""


def driver(folder: str) -> None:
    """Have Triton launch on a driver that does nothing, built in a folder; nothing is compared."""
    import triton

    nvidia = Path(triton.__file__).parent / "backends/nvidia"
    text = (nvidia / "driver.c").read_text() + (nvidia / "driver.py").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*[a-z]\b", text)) | DOES.keys())
    head = "int {}(long a, long b, long c) {{ {} return 0; }}"
    page = Path(folder, "cuda.c")
    page.write_text("\n".join([head.format(name, DOES.get(name, "")) for name in names]))
    made = Path(folder, "libcuda.so.1")
    flags = ["-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *flags, str(page), "-o", str(made)], check=True)
    os.environ |= {"TRITON_LIBCUDA_PATH": folder, "TRITON_CACHE_DIR": f"{folder}/cache"}
    os.environ["TORCHZERO_CLIP_CACHE"] = folder  # whose notes say that kernels are proven
    proof._compare = lambda launch, call: None
    proof.Trial.run = lambda trial, nodes, call, parts: call()  # type: ignore[method-assign]
    ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver as drivers

    active = CudaDriver()
    active.get_current_device = lambda: 0
    active.get_current_stream = lambda device: 0
    active.get_device_capability = lambda device: CARD
    drivers.set_active(active)


def stepping(
    count: int, moves: bool, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """A function that does a step of so many tensors, and says how long it took."""
    Compiled.backend = "triton"
    params = [Parameter(torch.zeros(64)) for _ in range(count)]
    pool = [torch.zeros(64) for _ in range(2 * count if moves else count)]
    links = ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.1), LR(1e-3)
    opt = Modular(params, *links, compile=True)

    def step() -> float:
        if moves:
            random.shuffle(pool)
        for p, g in zip(params, pool, strict=False):
            p.grad = g
        begin = clock()
        opt.step()
        return clock() - begin

    for _ in range(6):
        step()
    return step


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.launches", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--cpu", action="store_true", help="CPU time of this process, for a busy machine"
    )
    args = parser.parse_args(given)
    clock = time.process_time if args.cpu else time.perf_counter
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        driver(folder)
        print(f"{'tensors':>8}  {'gradients stay, µs':>20}  {'lie elsewhere, µs':>20}")
        for count in COUNTS:
            steps = [stepping(count, moves, clock) for moves in (False, True)]
            times = [[step() for step in steps] for _ in range(args.steps)]
            found = [1e6 * statistics.median(column) for column in zip(*times, strict=True)]
            print(f"{count:>8}  {found[0]:>20.0f}  {found[1]:>20.0f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
