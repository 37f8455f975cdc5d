"""matrices_and_rest: a function that chooses the parameters of a model for Muon."""

from __future__ import annotations

from torch import Tensor, nn

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def matrices_and_rest(model: nn.Module, head: str | None = None) -> dict[str, str]:
    """Return a label for every parameter of a model, "matrices" or "rest", for `Partition`.

    Use it for `Orthogonalize` (Muon) and other rules for matrices. "matrices" are the weights of
    hidden layers, with two or more dims. This includes the routers of experts. "rest" are all other
    parameters. The Muon papers leave them to Adam:

    - vectors, such as the gains of normalization layers, single numbers, and parameters of which
      only one dim is longer than 1;
    - biases, even if all experts of a layer share one bias with two dims;
    - embeddings, and all parameters with "embed" in their name;
    - the output head and the parameters tied to it;
    - kernels of depthwise convolutions, because each channel has a separate filter;
    - the factors of LoRA ("lora_" in the name), because the weight is the product of two factors.

    Args:
        model: The module whose `named_parameters()` the optimizer receives.
        head: The name of the module that computes the output. By default, a linear layer is a head
            if its number of outputs is the number of rows of the largest embedding. If there is no
            such layer, the head is the last layer that has a weight with two or more dims.

    Returns:
        A dict that maps the name of each parameter to its label. You can change the dict.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Adam, Chain, Modular, Orthogonalize, Partition
        >>> from torchzero_clip import matrices_and_rest
        >>> model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Linear(32, 1))
        >>> kinds = matrices_and_rest(model)
        >>> muon = Chain(EMA(0.95, nesterov=True), Orthogonalize(scale="match_rms_adamw"))
        >>> two = Partition({"matrices": muon, "rest": Adam()}, kinds)
        >>> opt = Modular(model.named_parameters(), two, LR(1e-3))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"matrices_and_rest: model must be a torch.nn.Module, got {model!r}")
    modules = dict(model.named_modules())
    if head is not None and head not in modules:
        raise ValueError(
            f"matrices_and_rest: head must be the name of a module of the model, got {head!r}; the "
            f"names are {[name for name in modules if name]}"
        )
    heads = _heads(model) if head is None else [modules[head]]
    left_out = [m for m in modules.values() if isinstance(m, EMBEDDINGS) or _is_depthwise(m)]
    rest = {id(p) for m in [*left_out, *heads] for p in m.parameters()}
    return {
        name: "rest" if id(p) in rest or _is_vector(p) or _is_named_rest(name) else "matrices"
        for name, p in model.named_parameters()
    }


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the layers that compute the output."""
    modules = list(model.modules())
    vocabulary = max([m.num_embeddings for m in modules if isinstance(m, EMBEDDINGS)], default=0)
    heads = [m for m in modules if isinstance(m, nn.Linear) and m.out_features == vocabulary]
    if heads:
        return [*heads]
    layers = [m for m in modules if isinstance(m, nn.Linear) or _has_matrix(m)]
    return [m for m in layers if not isinstance(m, EMBEDDINGS)][-1:]


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module, without its submodules, has a parameter that is not a vector."""
    return not all(map(_is_vector, module.parameters(recurse=False)))


def _is_vector(p: Tensor) -> bool:
    """Return whether fewer than two dims of a parameter are longer than 1."""
    return sum([n > 1 for n in p.shape]) < 2


def _is_depthwise(module: nn.Module) -> bool:
    """Return whether a module is a convolution with a separate filter for each channel."""
    return isinstance(module, CONVOLUTIONS) and module.groups > 1 and module.weight.shape[1] == 1


def _is_named_rest(name: str) -> bool:
    """Return whether the name tells that a parameter is an embedding, a bias or a LoRA factor."""
    name = name.lower()
    return "embed" in name or "lora_" in name or name.rpartition(".")[2].endswith("bias")
