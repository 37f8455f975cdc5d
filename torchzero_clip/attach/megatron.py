"""The function `megatron_entry`: a chain as an optimizer in the registry of Megatron-LM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from torchzero_clip.core import Step, Transform, bind
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.formats import KEPT
from torchzero_clip.core.link import Link
from torchzero_clip.core.names import hint
from torchzero_clip.core.sharding.ranks import rank_and_world
from torchzero_clip.core.tensor_kinds import is_sharded
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.optimizer.cut_parameters import has_whole_norms, is_entrywise
from torchzero_clip.optimizer.keys import GroupKeys
from torchzero_clip.optimizer_class import ChainOptimizer, optimizer_class

SHAPE = (6, 5)
"""The shape of an example matrix. The state for this matrix shows which state a chain has."""

CONFIG_FIELDS = {
    "lr": ("lr",),
    "weight_decay": ("weight_decay",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_eps",),
}
"""For each hyperparameter of a chain, the fields of Megatron-LM's OptimizerConfig."""


class MegatronEntry(NamedTuple):
    """An entry of the registry, with the same attributes as the entries of Megatron-LM.

    Attributes:
        optimizer_cls: The class of the optimizer.
        init_state_fn: A function that creates the state of every parameter. Megatron-LM calls it
            before it loads a checkpoint.
        config_to_kwargs: A function that returns the arguments of the class. It receives the
            configuration, the parts of the model on this rank, and the process groups.
        default_param_overrides: Parameters for another optimizer. This attribute is empty.
    """

    optimizer_cls: type[ChainOptimizer]
    init_state_fn: Callable[..., None]
    config_to_kwargs: Callable[..., dict[str, Any]]
    default_param_overrides: dict[Any, dict[str, Any]]


def megatron_entry(
    *transforms: Transform, names: Mapping[str, str] | None = None, **options: Any
) -> MegatronEntry:
    """Return a chain as an entry for Megatron-LM's registry of optimizers.

    If links of the chain have a learning rate, a weight decay, betas or eps, these values come from
    the configuration of Megatron-LM. The schedules of Megatron-LM change them. Rules receive whole
    matrices. The DistributedOptimizer has flat shards of parameters, so a rule that needs whole
    tensors raises an error there.

    Args:
        *transforms: The chain, first to last.
        names: Different names for state in checkpoints, such as {"Adam/exp_avg": "m"}. In all other
            names, the path of the link is removed if the name remains unique. For example,
            "Adam/exp_avg" becomes "exp_avg".
        **options: As for `Modular`.

    Example:
        >>> from torchzero_clip import LR, Adam, WeightDecay, ZClip, megatron_entry
        >>> entry = megatron_entry(ZClip(), Adam(), WeightDecay(0.1), LR(1e-3))
        >>> print(entry.optimizer_cls.__name__)
        MegatronChain
    """
    base = optimizer_class(*transforms, name="MegatronChain", **options)
    links = [link for top in bind(Chain(*transforms)) for link in top.walk()]
    _check_names(names or {}, links, options.get("rounding"))
    state_names = {**_short_names(links), **(names or {})}
    if len(set(state_names.values())) < len(state_names):
        raise ValueError(
            "megatron_entry: the dict names= must have a different value for each key, got "
            f"{state_names}"
        )
    metaclass: Any = type(base)
    body = {"names": state_names, "__doc__": base.__doc__}
    optimizer_cls = metaclass(base.__name__, (_InMegatron, base), body)
    odd = [key for key, shape in _state_shapes(links).items() if shape != SHAPE]
    odd = [key for key in odd if state_names.get(key) != "step"]
    if odd:
        warn(
            "megatron_entry: checkpoints in the format torch_dist cannot store the state "
            f"{', '.join(odd)}, because this state does not have the shape of the parameter. "
            "Save with --ckpt-format torch, or use transforms without such state, for "
            "example with dim='global'"
        )
    keys = GroupKeys(bind(Chain(*transforms))).defaults

    def kwargs(config: Any, model_chunks: Any = None, pg_collection: Any = None) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for key in [key for key in CONFIG_FIELDS if key in keys]:
            values = tuple([getattr(config, name) for name in CONFIG_FIELDS[key]])
            arguments[key] = values if len(values) > 1 else values[0]
        layer_wise = bool(getattr(config, "use_layer_wise_distributed_optimizer", False))
        if layer_wise:
            arguments["layer_wise"] = True
        if options.get("process_group") is None and pg_collection is not None:
            _refuse_parts(links, layer_wise, _size(getattr(pg_collection, "tp", None)))
            if any(map(_is_joint, links)):
                several = _size(getattr(pg_collection, "mp", None)) > 1
                arguments["process_group"] = pg_collection.mp if several else None
        return arguments

    return MegatronEntry(optimizer_cls, _init_state, kwargs, {})


def _init_state(optimizer: Any, config: Any = None) -> None:
    optimizer.init_state()


def _check_names(names: Mapping[str, str], links: list[Link], rounding: str | None) -> None:
    """Raise an error if `names` has a state key that the chain does not have."""
    known = list(_state_shapes(links))
    if rounding in KEPT:
        known.append(KEPT[rounding].key)
    for key in names:
        if key not in known:
            advice = hint(key, known) or f"; they have {known}"
            raise ValueError(
                f"megatron_entry: names= has the key {key!r}, but no transform has "
                f"per-parameter state with this name{advice}"
            )


def _is_joint(link: Link) -> bool:
    """Return whether a rule or a guard reads all parameters of the model or of a group."""
    tfm = link.transform
    if not link.transforms:
        return False
    if tfm.place == "first":
        return bool(getattr(tfm, "clips", False))
    return tfm.reach in ("group", "model") and not _only_waits(tfm)


def _only_waits(tfm: Any) -> bool:
    """Return whether a rule neither changes nor measures gradients, as `Accumulate` does."""
    return tfm.leaves == "gradient" and not hasattr(tfm, "scope")


def _refuse_parts(links: list[Link], layer_wise: bool, tensor_parallel: int) -> None:
    """Raise an error for rules that would miss some parameters, or would read some twice."""
    for link in links:
        joint = _is_joint(link)
        if tensor_parallel > 1 and joint:
            raise ValueError(
                f"megatron_entry: {link.path} combines all parameters, which is not supported "
                "with tensor parallelism, because some parameters exist on several ranks: "
                f"remove {link.path} from the chain. To clip the global norm, set clip_grad "
                "in Megatron-LM"
            )
        if tensor_parallel > 1 and not is_entrywise(link):
            raise ValueError(
                f"megatron_entry: {link.path} needs whole tensors, but with tensor parallelism "
                "each rank has only parts of matrices: use elementwise transforms instead, such "
                "as Adam"
            )
        if layer_wise and (joint or (link.transforms and link.transform.reach == "layer")):
            raise ValueError(
                f"megatron_entry: {link.path} combines several parameters, which is not "
                "supported with a layer-wise optimizer, because the parameters are on "
                f"different ranks: remove {link.path} from the chain. To clip the global "
                "norm, set clip_grad in Megatron-LM"
            )


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _state_shapes(links: list[Link]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the state that a chain keeps for a matrix, by key."""
    matrix = torch.empty(SHAPE, device="meta")
    layouts = [link.layout(matrix) for link in links]
    return {key: tuple(value.shape) for layout in layouts for key, value in layout.items()}


def _short_names(links: list[Link]) -> dict[str, str]:
    """Return the short name of each state key that remains unique without the link's path."""
    keys = list(_state_shapes(links))
    ends = Counter([key.rpartition("/")[2] for key in keys])
    return {key: end for key in keys if ends[end := key.rpartition("/")[2]] == 1}


class _InMegatron(ChainOptimizer):
    """A chain with the state names of Megatron-LM, and with checks for its flat shards."""

    names: Mapping[str, str]

    def __init__(
        self, params: Any, lr: Any = None, *, layer_wise: bool = False, **values: Any
    ) -> None:
        self._whole: set[torch.Size] = set()  # the shapes of the whole parameters
        self._layer_wise = layer_wise  # whether a rank may have no matrix at all
        super().__init__(params, lr, **values)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and store the shapes of its parameters."""
        super().add_param_group(param_group)
        self._whole |= {p.shape for p in self.param_groups[-1]["params"]}

    def __getstate__(self) -> dict[str, Any]:
        whole = {"_whole": self._whole, "_layer_wise": self._layer_wise}
        return {**super().__getstate__(), **whole}

    def _begin(self, name: str = "a step", loss: Any = None) -> Step:
        self._refuse_flat()
        return super()._begin(name, loss)

    def _refuse_flat(self) -> None:
        """Raise an error if parameters have become flat shards, and a rule needs whole tensors."""
        if not self._has_pieces():
            return
        shards = "Megatron-LM's DistributedOptimizer cuts parameters into flat shards"
        for link in self.keys.links:
            joint = _is_joint(link)
            scope = getattr(link.transform, "scope", None)
            one_norm = joint and scope in ("group", "global") and has_whole_norms(link)
            if not (is_entrywise(link) or one_norm):
                raise ValueError(
                    f"{link.path} needs whole tensors, but {shards}: set "
                    "use_layer_wise_distributed_optimizer, or use only elementwise transforms "
                    "and the global norm"
                )
            if joint and self.process_group is None and rank_and_world()[1] > 1:
                raise ValueError(
                    f"{link.path} computes the global norm over several processes, because "
                    f"{shards}: pass the group of these processes as process_group="
                )

    def _has_pieces(self) -> bool:
        """Return whether the parameters are flat shards of the parameters of the model.

        A shard may have the shape of a vector of the model. So if the model has matrices and all
        parameters are vectors now, the parameters are shards too. A layer-wise optimizer is an
        exception. There, each rank has some whole parameters, and all of them may be vectors.
        """
        params = params_of(self)
        if any(map(is_sharded, params)):
            return False
        if not {p.shape for p in params} <= self._whole:
            return True
        had_matrices = any([len(shape) > 1 for shape in self._whole])
        flat = bool(params) and all([p.dim() < 2 for p in params])
        return flat and had_matrices and not self._layer_wise

    def state_dict(self) -> dict[str, Any]:
        """Return the state under the names of Megatron-LM."""
        return self._renamed(super().state_dict(), self.names)

    def load_state_dict(self, state_dict: dict[str, Any], **options: Any) -> None:
        """Load a result of `state_dict`, under the names of Megatron-LM or of this library."""
        back = {name: key for key, name in self.names.items()}
        super().load_state_dict(self._renamed(state_dict, back), **options)

    def _renamed(self, state_dict: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """Return a state dict with other keys for the state of parameters."""
        state = {
            index: {names.get(key, key): value for key, value in of_param.items()}
            for index, of_param in state_dict["state"].items()
        }
        return {**state_dict, "state": state}


__all__ = ["MegatronEntry", "megatron_entry"]
