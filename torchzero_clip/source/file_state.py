"""The lines of a file that create the state of parameters, groups and layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket
from torchzero_clip.core.link import Link
from torchzero_clip.source.file_units import SourceUnits
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.symbols import Context, SourceError, Value, Write, constant


class WrittenState:
    """The texts that create the state of parameters and of units in a file.

    Args:
        recorder: The recorder of operations.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        self.recorder = recorder
        self.texts: dict[Context, dict[str, str]] = {}
        """For each context, the expressions that create the state of a parameter, by key."""

    def make(self, link: Link, bucket: Bucket) -> None:
        """Create the link's state for the stand-in, and record how the file creates this state."""
        with self.recorder.not_recording():
            p = bucket.originals[0]
            link.state_names(p)
            state = link.new_state(p)
            texts = _creations(link, p)
            for shape in ((7,), (2, 1, 3)):
                other = torch.nn.Parameter(torch.full(shape, 0.25))
                try:
                    other_texts = _creations(link, other)
                except SourceError:
                    raise
                except Exception:  # the rule may not accept the shape, for example only matrices
                    continue
                if other_texts != texts:
                    raise SourceError("the initial state depends on values or shapes of parameters")
        if state and link.narrow:
            raise SourceError("the transform stores its state in bfloat16 with stochastic rounding")
        for key, x in state.items():
            tensor = x.clone()
            bucket.param_states[0][key] = tensor
            self.texts.setdefault(self.recorder.context, {})[key] = texts[key]
            self.recorder.link = link.path
            self._list(key, tensor)
        with self.recorder.not_recording():
            bucket.seen_by(link).held()  # this checks the shapes, which happens only once
        for name, start in link.transform.init_group().items():
            cell = torch.full((), start, dtype=torch.float64)
            key = f"{link.path}/{name}"
            self.recorder.learn(cell, self._of_group(key, name, _start(float(start))))
            bucket.group_state.update({key: cell})

    def _of_group(self, key: str, name: str, start: str) -> Value:
        """Return the scalar that a group stores under a key."""
        write = lambda n: f'_of_group(group, "{key}", {start})'
        kinds = {"joint": False, "lasting": True, "stays": True}
        return self.recorder.new("tensor", write, [], f"{name}_cell", **kinds)

    def _list(self, key: str, x: Tensor) -> None:
        """Record that a tensor represents the state tensors that all parameters have with a key."""
        self.recorder.learn(x, self.recorder.input("state", key.rpartition("/")[2], key))

    def cell(self, units: SourceUnits, name: str, start: Any) -> Tensor:
        """Return the tensor that represents the stored scalar of each unit."""
        recorder = self.recorder
        key = f"{units.path}/{name}"
        with recorder.not_recording():
            first = start.flatten().tolist() if isinstance(start, Tensor) else float(start)
            cell = torch.tensor(first, dtype=torch.float32)
        text = _start(first)
        if units.scope == "tensor":
            creation = f"torch.tensor({text}, dtype=dtype, device=p.device)"
            self.texts.setdefault(recorder.context, {})[key] = creation
            self._list(key, cell)
            return cell
        if units.scope == "group":
            recorder.learn(cell, self._of_group(key, name, text))
            return cell
        kinds = {"joint": True, "lasting": True, "stays": True}
        if units.scope == "global":
            write: Write = lambda n: f'self._shared("{key}", {text})'
            return recorder.record("tensor", cell, write, [], f"{name}_cell", **kinds)
        layers = units.layers()
        params = units.params()
        write = lambda n: f'self._of_layers("{key}", {text}, {n(layers)}, {n(params)})'
        return recorder.record("list", cell, write, [layers, params], f"{name}_cells", **kinds)


def _creations(link: Link, p: Tensor) -> dict[str, str]:
    """Return the expressions that create the state that a link keeps for a parameter, by key."""
    state = link.new_state(p)
    texts: dict[str, str] = {}
    other = torch.nn.Parameter(p.detach().double() * 3 + 1)
    double = link.new_state(other)
    for key, x in state.items():
        dtype = "dtype" if double[key].dtype == torch.float64 else "torch.float32"
        dtype = "torch.float64" if x.dtype == torch.float64 else dtype
        if x.shape == p.shape and double[key].equal(other.detach()) and x.equal(p.detach()):
            texts[key] = f"p.detach().to({dtype}, copy=True)"
            continue
        if len(set(x.flatten().tolist())) != 1 or x.shape not in ((), p.shape):
            raise SourceError(
                f"the state {key!r} must have the shape of the parameter, and the same initial "
                "value in all elements"
            )
        texts[key] = _creation(x, double[key].flatten()[0].item(), dtype)
    return texts


def _creation(x: Tensor, start: float, dtype: str) -> str:
    """Return the expression that creates a state tensor, with the parameter's shape or 0-dim."""
    number = "" if start == 0 else f", {constant(float(start))}"
    name = "full" if number else "zeros"
    if x.dim():
        return f"torch.{name}_like(p{number}, dtype={dtype})"
    return f"torch.{name}((){number}, dtype={dtype}, device=p.device)"


def _start(x: Any) -> str:
    """Return the text of a number or a vector. Equal or consecutive numbers are written shorter."""
    if isinstance(x, list) and len(set(map(str, x))) == 1:
        return f"[{constant(x[0])}] * {len(x)}"
    if isinstance(x, list) and x == [x[0] + i for i in range(len(x))]:
        return f"range({x[0]:g}, {x[-1] + 1:g})"
    return constant(x)
