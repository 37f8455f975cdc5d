"""torch's test of clipping under FSDP, through `compat`, on processes of a CPU.

The text names CUDA, and the CPU takes its place. It counts torch's all-reduces, one for each dim of
the mesh; here one gather over all of them says the same, and is counted as these.
"""

from __future__ import annotations

from typing import Any

import torch

SOURCE = "pytorch/pytorch"
COMMIT = "v2.6.0"
FILES = {"test/distributed/_composable/fsdp/test_fully_shard_clip_grad_norm_.py": "319e72baafa9"}
PATHS = ["test"]
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "--noconftest"}
PROCESSES = 0  # each case begins its own
LEFT_OUT: dict[str, str] = {}
DIFFERS: dict[str, str] = {}


def put_ours() -> None:
    import torch.distributed.tensor.debug as debug
    from torch.distributed import device_mesh
    from torch.testing._internal import common_distributed, common_fsdp

    from torchzero_clip import compat

    class Counted(debug.CommDebugMode):
        def get_comm_counts(self) -> dict[Any, int]:
            counts = super().get_comm_counts()
            gathers = [op for op in counts if "allgather" in str(op)]
            assert [counts.pop(op) for op in gathers] == [1], "clipping takes one gather"
            return counts | {torch.ops.c10d_functional.all_reduce: self.dims}

    class OnCPU(common_fsdp.FSDPTest):
        _precision = (
            1e-4  # before any clip, and with torch's, gradients of two meshes are 2e-5 apart
        )

        def _spawn_processes(self) -> None:  # what is made anew would not come by here
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        total = compat.clip_grad_norm_(parameters, *args, **kwargs)
        Counted.dims = len(getattr(total, "placements", ()))
        return total

    made = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda _, *args, **kwargs: made("cpu", *args, **kwargs)
    for draw in (torch.randint, torch.randn):
        here = lambda *args, draw=draw, device=None, **more: draw(*args, **more)  # noqa: E731
        setattr(torch, draw.__name__, here)
    debug.CommDebugMode, torch.nn.utils.clip_grad_norm_ = Counted, clip
    common_fsdp.FSDPTest = OnCPU
    common_distributed.skip_if_lt_x_gpu = lambda _: lambda test: test
    torch.nn.Module.cuda = lambda self, device=None: self
    torch.cuda.device_count = torch.accelerator.device_count = lambda: 4
