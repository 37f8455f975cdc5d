"""Count the optimizers of the libraries that docs/compared.md names.

    python -m benchmarks.studies.compared

torch is always there. optax and pytorch_optimizer are counted if they are installed; install them
in an environment of their own.
"""

from __future__ import annotations

import importlib.metadata
import inspect

import torch

from torchzero_clip.published.name import NAMES


def count_torch() -> int:
    """Count the optimizer classes of torch.optim."""
    base = torch.optim.Optimizer
    classes = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    return len([cls for cls in classes if issubclass(cls, base) and cls is not base])


def count_optax() -> int:
    """Count the optimizers that optax lists as aliases; those of optax.contrib are not counted."""
    from optax._src import alias

    functions = [f for f in vars(alias).values() if inspect.isfunction(f)]
    mine = [f for f in functions if f.__module__ == alias.__name__]
    return len([f for f in mine if not f.__name__.startswith("_")])


def count_pytorch_optimizer() -> int:
    """Count the optimizers that pytorch_optimizer can load by name."""
    import pytorch_optimizer

    return len(pytorch_optimizer.get_supported_optimizers())


COUNTS = {
    "torch": count_torch,
    "optax": count_optax,
    "pytorch_optimizer": count_pytorch_optimizer,
}


def main() -> None:
    for name, count in COUNTS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: not installed")
        else:
            print(f"{name} {version}: {count()} optimizers")
    print(f"torchzero_clip: {len(NAMES)} published methods by name")


if __name__ == "__main__":
    main()
