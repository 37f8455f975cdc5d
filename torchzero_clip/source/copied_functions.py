"""Functions and methods that are copied into a file if the file calls them.

Formatters wrap lines above 88 columns, so all lines here are shorter.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor


def _tensors(group: dict[str, Any]) -> tuple[list[Any], list[Tensor]]:
    """Return the parameters with a gradient, and their gradients in float32 or float64."""
    ps = [p for p in group["params"] if p.grad is not None]
    assert not any(p.is_complex() or p.grad.is_sparse for p in ps), "use the library"
    return ps, [p.grad.to(torch.promote_types(p.dtype, torch.float32)) for p in ps]


def _layers(group: dict[str, Any]) -> list[str]:
    """Return the layer of each parameter that has a gradient."""
    rows = zip(group["param_names"], group["params"], strict=True)
    return [name.rpartition(".")[0] for name, p in rows if p.grad is not None]


def _named(group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the parameters that have a gradient, with their names."""
    names = group.get("param_names") or [""] * len(group["params"])
    rows = zip(names, group["params"], strict=True)
    return [(name, p) for name, p in rows if p.grad is not None]


def _chosen(row: list[Any] | tuple[Any, ...], flags: list[bool]) -> list[Any]:
    """Return the entries whose flag is true."""
    return [x for x, flag in zip(row, flags, strict=True) if flag]


def _put(some: list[Any] | tuple[Any, ...], row: list[Any], flags: list[bool]) -> None:
    """Replace the elements whose flag is true."""
    rest = iter(some)
    row[:] = [next(rest) if flag else x for x, flag in zip(row, flags, strict=True)]


def _of_group(group: dict[str, Any], key: str, start: Any) -> Tensor:
    """Return a scalar that a group stores."""
    if key not in group["chain"]:
        device = group["params"][0].device
        made = torch.tensor(start, dtype=torch.float64, device=device)
        group["chain"] = {**group["chain"], key: made}
    held: Tensor = group["chain"][key]
    return held


class _Methods(torch.optim.Optimizer):
    """An optimizer whose methods are copied into files."""

    def _shared(self, key: str, start: Any) -> Tensor:
        """Return a scalar that all groups share."""
        device = self.param_groups[0]["params"][0].device
        made = torch.tensor(start, dtype=torch.float64, device=device)
        held: Tensor = self.param_groups[0]["chain"].get(key, made)
        for group in self.param_groups:
            group["chain"] = {**group["chain"], key: held}
        return held

    def _of_layers(
        self, key: str, start: Any, layers: list[str], params: list[Any]
    ) -> list[Tensor]:
        """Return a scalar of each layer, which the state of its parameters stores."""
        held: dict[str, Tensor] = {}
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if key in self.state.get(p, {}):
                    x = held.setdefault(name.rpartition(".")[0], self.state[p][key])
                    self.state[p][key] = x
        for layer, p in zip(layers, params, strict=True):
            made = torch.tensor(start, dtype=torch.float64, device=p.device)
            self.state[p][key] = held.setdefault(layer, made)
        return [held[layer] for layer in dict.fromkeys(layers)]

    def load_state_dict(self, given: dict[str, Any]) -> None:
        super().load_state_dict(given)  # torch casts state to the dtype of p
        for i, p in enumerate([p for g in self.param_groups for p in g["params"]]):
            for key, x in given["state"].get(i, {}).items():
                self.state[p][key] = torch.as_tensor(x).to(p.device, copy=True)


FUNCTIONS = {
    function.__name__: inspect.getsource(function).rstrip()
    for function in (_tensors, _layers, _named, _chosen, _put, _of_group)
}
METHODS = {
    method.__name__: inspect.getsource(method).rstrip()
    for method in (_Methods._shared, _Methods._of_layers, _Methods.load_state_dict)
}
