"""Optimizer classes with a fixed chain, for frameworks that create the optimizer themselves."""

from __future__ import annotations

import copyreg
import inspect
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from torchzero_clip.core import Chain, Description, Transform, bind
from torchzero_clip.optimizer import Modular
from torchzero_clip.optimizer.keys import GroupKeys

OPTIONS = {
    "fused": True,
    "compile": False,
    "rounding": None,
    "state_dtype": "float32",
    "process_group": None,
    "grad": "grad",
}
"""The options of `Modular` that a class accepts, with their defaults."""


def optimizer_class(
    *transforms: Transform, name: str = "ChainOptimizer", **options: Any
) -> type[ChainOptimizer]:
    """Return an optimizer class with this chain. Call the class as `cls(params, lr=...)`.

    The class accepts the hyperparameters of the chain, such as `max_norm`, as keyword arguments.
    The values in the chain are the defaults. The class also accepts the options of `Modular`. You
    can copy the class and its optimizers, pickle them, and send them to other processes. This works
    even if the class is not defined at the top of a module.

    Args:
        *transforms: The transforms of the chain, from first to last.
        name: The name of the class, which some frameworks log.
        **options: Other defaults for the options of `Modular`, such as compile=True.

    Returns:
        A subclass of `Modular`.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, optimizer_class
        >>> model = torch.nn.Linear(10, 1)
        >>> ClippedAdam = optimizer_class(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))
        >>> opt = ClippedAdam(model.parameters(), lr=3e-4)
        >>> print(opt.param_groups[0]["lr"], opt.param_groups[0]["max_norm"])
        0.0003 1.0
    """
    if unknown := options.keys() - OPTIONS:
        raise TypeError(
            f"optimizer_class: there is no argument {min(unknown)!r}; the arguments are "
            f"transforms, name= and {list(OPTIONS)}. Pass hyperparameters to the transforms: "
            "the new class accepts these hyperparameters as arguments"
        )
    if not transforms:
        raise ValueError(
            "optimizer_class requires at least one transform, for example "
            "optimizer_class(Adam(), LR(1e-3))"
        )
    return _rebuild_optimizer_class(uuid.uuid4().hex, Chain(*transforms), name, options)


def safe_globals() -> list[Callable[..., Any]]:
    """List the classes to allow when torch loads a checkpoint with a class of `optimizer_class`.

    Frameworks that save hyperparameters also save the class of the optimizer. Such a file contains
    the chain, and `torch.load(..., weights_only=True)` refuses it unless these classes are allowed.
    The classes are the rules of this library, which only store their arguments. The list also has
    one function, which recreates the class.

    The list does not contain your own rules or the functions that the chain uses. Add them, for
    example `[*safe_globals(), MyRule, my_function]`.

    Returns:
        A list for `torch.serialization.safe_globals`.

    Example:
        >>> import io
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, optimizer_class, safe_globals
        >>> Clipped = optimizer_class(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))
        >>> torch.save({"optimizer": Clipped}, file := io.BytesIO())
        >>> with torch.serialization.safe_globals(safe_globals()):
        ...     print(torch.load(io.BytesIO(file.getvalue()))["optimizer"] is Clipped)
        True
    """
    known = Description.registry.values()
    rules = [cls for cls in known if cls.__module__.startswith("torchzero_clip.")]
    return [_rebuild_optimizer_class, *rules]


class ChainOptimizer(Modular):
    """The base of the classes that `optimizer_class` returns.

    Args:
        params: Parameters, named parameters, or groups of either.
        lr: The learning rate, if a link of the chain has one. None means the value in the chain.
        **values: Other hyperparameters of the chain, and options of `Modular`.
    """

    own_chain: ClassVar[Chain]
    own_options: ClassVar[Mapping[str, Any]]

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor | None = None, **values: Any
    ) -> None:
        options = {key: values.pop(key) for key in OPTIONS if key in values}
        self._values = values if lr is None else {"lr": lr, **values}
        super().__init__(params, self.own_chain, **{**self.own_options, **options})

    def _build(self, chain: Chain, *options: Any) -> None:
        super()._build(chain, *options)
        values = vars(self).pop("_values", {})  # a copy has them in its defaults already
        self.keys.tidy(values)
        for key in [key for key in values if key not in self.keys.defaults]:
            if value := values.pop(key):  # a value such as weight_decay=0 needs no link
                raise TypeError(
                    f"{type(self).__name__}: there is no argument {key!r}, got {value!r}; the "
                    f"arguments are {[*self.keys.defaults, *OPTIONS]}"
                )
        self.keys.defaults.update(values)


class _Class(type):
    """The metaclass of the classes that `optimizer_class` returns. It lets pickle store them."""


_classes: weakref.WeakValueDictionary[str, type[ChainOptimizer]] = weakref.WeakValueDictionary()
"""The classes that this process has created, by key."""


def _rebuild_optimizer_class(
    key: str, chain: Chain, name: str, options: Mapping[str, Any]
) -> type[ChainOptimizer]:
    """Return the class with a key. A process creates the class only once."""
    known = _classes.get(key)
    if known is not None:
        return known
    body = {
        "key": key,
        "own_chain": chain,
        "own_options": options,
        "__module__": __name__,
        "__doc__": f"An optimizer with the chain {chain}.",
        "__signature__": _signature({**GroupKeys(bind(chain)).defaults, **OPTIONS, **options}),
    }
    cls: Any = _Class(name, (ChainOptimizer,), body)
    _classes[key] = cls
    return _classes[key]


def _signature(defaults: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature of such a class. It omits keys that are not identifiers."""
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    lead = [inspect.Parameter("params", positional)]
    if "lr" in defaults:
        lead.append(inspect.Parameter("lr", positional, default=defaults["lr"]))
    keywords = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value)
        for key, value in defaults.items()
        if key.isidentifier() and key != "lr"
    ]
    return inspect.Signature([*lead, *keywords])


def _parts(cls: Any) -> Any:
    """Return the form in which pickle stores a class: its parts, or the name of a subclass."""
    if "key" not in vars(cls):
        return cls.__qualname__
    return _rebuild_optimizer_class, (cls.key, cls.own_chain, cls.__name__, cls.own_options)


copyreg.pickle(_Class, _parts)
