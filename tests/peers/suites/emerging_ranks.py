"""NVIDIA's tests of Newton-Schulz over processes, on `Orthogonalize` and `Normalize` of DTensors.

They compare a matrix whose parts lie on four ranks with theirs of the whole one. Each case runs on
four processes of its own, and fails where one of them does.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchzero_clip import Normalize, Orthogonalize

from . import emerging
from .emerging_matrices import through

SOURCE = emerging.SOURCE
COMMIT = emerging.COMMIT
PATHS = emerging.PATHS
RANKS = 4
SETTINGS = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS)}
PROCESSES = 0  # each case begins its own
FILES = {"tests/test_distributed_muon_utils_cpu.py": "b100b9d94e9b"}
LEFT_OUT = {
    "NewtonSchulzStepCpu": "the case tests one iteration without normalization, which is not a "
    "rule",
    "fall_back_to_non_tp|use_syrk": "the case tests functions or arguments that only NVIDIA's "
    "library has",
}
DIFFERS: dict[str, str] = {}


def on_ranks(self: Any, method: Any) -> None:
    """Call a test on every rank, as `torchrun` would the file."""
    with tempfile.TemporaryDirectory() as folder:
        args = (method, f"file://{folder}/store")
        torch.multiprocessing.start_processes(on_rank, args, RANKS, start_method="fork")


def on_rank(rank: int, method: Any, store: str) -> None:
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.set_float32_matmul_precision("highest")
    method()
    distributed.destroy_process_group()


def part(x: Tensor, rule: Any, group: Any, dim: int) -> Tensor:
    """What a rule makes of a gradient of which this rank has a part."""
    mesh = DeviceMesh.from_group(group, "cpu")
    made = through(DTensor.from_local(x, mesh, [Shard(dim)]), rule)
    assert isinstance(made, DTensor)
    return made.to_local()


def put_ours() -> None:
    emerging.make_importable()
    from absl.testing import parameterized
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    whole = muon_utils.newton_schulz

    def newton_schulz(x: Tensor, steps: int, coefficient_type: str = "quintic", **more: Any) -> Any:
        group = more.get("tp_group")
        if group is None:
            return whole(x, steps, coefficient_type, **more)
        rule = Orthogonalize(steps, muon_utils._COEFFICIENT_SETS[coefficient_type])
        return part(x, rule, group, 0 if more.get("transpose") else 1)

    def newton_schulz_tp(x: Tensor, *, partition_dim: int, tp_mode: str, **more: Any) -> Any:
        return newton_schulz(x, **more, transpose=partition_dim == 0)

    def normalize(x: Tensor, eps: float, group: Any) -> Tensor:
        return part(x, Normalize(1.0), group, 1)

    muon_utils.newton_schulz, muon_utils.newton_schulz_tp = newton_schulz, newton_schulz_tp
    muon_utils.distributed_normalize_p2 = normalize
    parameterized.TestCase._callTestMethod = on_ranks
