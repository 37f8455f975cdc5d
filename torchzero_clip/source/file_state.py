"""WrittenState: how the file makes the tensors that a parameter, a group or a layer keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket
from torchzero_clip.core.link import Link
from torchzero_clip.source.file_units import SourceUnits
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.symbols import ATOM, Context, SourceError, Value, constant


class WrittenState:
    """The state of parameters, as the texts that make it, and of units.

    Args:
        recorder: What writes the lines.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        self.recorder = recorder
        self.texts: dict[Context, dict[str, str]] = {}  # what each parameter begins with, by key

    def make(self, link: Link, bucket: Bucket) -> None:
        """The link's tensors for the parameter, and how the file makes them."""
        with self.recorder.resting():
            p = bucket.originals[0]
            link.state_names(p)
            made, texts = link.new_state(p), _begun(link, p)
            for shape in ((7,), (2, 1, 3)):
                other = torch.nn.Parameter(torch.full(shape, 0.25))
                try:
                    others = _begun(link, other)
                except SourceError:
                    raise
                except Exception:  # matrices alone, say
                    continue
                if others != texts:
                    raise SourceError("its state begins otherwise where parameters are others")
        if made and link.narrow:
            raise SourceError("it rounds its state at random, to bfloat16")
        for key, x in made.items():
            bucket.param_states[0][key] = x = x.clone()
            self.texts.setdefault(self.recorder.context, {})[key] = texts[key]
            self.recorder.link = link.path
            self._list(key, x)
        with self.recorder.resting():
            bucket.seen_by(link).held()  # whose shapes are checked once
        for name, start in link.transform.init_group().items():
            cell, key = torch.full((), start, dtype=torch.float64), f"{link.path}/{name}"
            self.recorder.learn(cell, self._of_group(key, name, _start(float(start))))
            bucket.group_state.update({key: cell})

    def _of_group(self, key: str, name: str, start: str) -> Value:
        """The tensor that a group holds under a key."""
        held = Value("tensor", hint=f"{name}_cell")
        write = lambda n: (f'_of_group(group, "{key}", {start})', ATOM)
        self.recorder.add(write, [], held, joint=False, lasting=True, stays=True)
        return held

    def _list(self, key: str, x: Tensor) -> Value:
        hint = key.rpartition("/")[2]
        made = Value("list", hint=hint)
        self.recorder.add(lambda n: (key, ATOM), [], made, repeats=True, joint=False, takes="state")
        self.recorder.learn(x, made)
        return made

    def cell(self, units: SourceUnits, name: str, start: Any) -> Tensor:
        """The tensor that holds a number of each unit."""
        key, recorder = f"{units.path}/{name}", self.recorder
        with recorder.resting():
            flat = start.flatten().tolist() if isinstance(start, Tensor) else [float(start)]
            cell = torch.tensor(flat if isinstance(start, Tensor) else flat[0], dtype=torch.float32)
        text = _start(flat if isinstance(start, Tensor) else flat[0])
        if units.scope == "tensor":
            made = f"torch.tensor({text}, dtype=dtype, device=p.device)"
            self.texts.setdefault(recorder.context, {})[key] = made
            self._list(key, cell)
            return cell
        held = Value("tensor", hint=f"{name}_cell")
        kinds: dict[str, Any] = {"lasting": True, "stays": True}
        if units.scope == "group":
            held = self._of_group(key, name, text)
        elif units.scope == "global":
            recorder.add(
                lambda n: (f'self._shared("{key}", {text})', ATOM), [], held, joint=True, **kinds
            )
        else:
            layers, params = units.layers(), units.params()
            write = lambda n: (f'self._of_layers("{key}", {text}, {n(layers)}, {n(params)})', ATOM)
            recorder.add(write, [layers, params], held, joint=True, **kinds)
            held.kind, held.hint = "list", f"{name}_cells"
        recorder.learn(cell, held)
        return cell


def _begun(link: Link, p: Tensor) -> dict[str, str]:
    """The expressions that make the link's state of a parameter, by key."""
    made, texts = link.new_state(p), {}
    other = torch.nn.Parameter(p.detach().double() * 3 + 1)
    double = link.new_state(other)
    for key, x in made.items():
        dtype = "dtype" if double[key].dtype == torch.float64 else "torch.float32"
        dtype = "torch.float64" if x.dtype == torch.float64 else dtype
        if x.shape == p.shape and double[key].equal(other.detach()) and x.equal(p.detach()):
            texts[key] = f"p.detach().to({dtype}, copy=True)"
            continue
        if len(set(x.flatten().tolist())) != 1 or x.shape not in ((), p.shape):
            raise SourceError(
                f"state {key!r} begins with other than one value, or has a shape of its own"
            )
        texts[key] = _beginning(x, double[key].flatten()[0].item(), dtype)
    return texts


def _beginning(x: Tensor, start: float, dtype: str) -> str:
    """The expression that makes a tensor of state, of the parameter's shape or a number."""
    number = "" if start == 0 else f", {constant(float(start), lambda v: '')}"
    name = "full" if number else "zeros"
    if x.dim():
        return f"torch.{name}_like(p{number}, dtype={dtype})"
    return f"torch.{name}((){number}, dtype={dtype}, device=p.device)"


def _start(x: Any) -> str:
    """A number, or the numbers of a vector in a short form where there is one."""
    if isinstance(x, list) and len(set(map(str, x))) == 1:
        return f"[{constant(x[0], lambda v: '')}] * {len(x)}"
    if isinstance(x, list) and x == [x[0] + i for i in range(len(x))]:
        return f"range({x[0]:g}, {x[-1] + 1:g})"
    return constant(x, lambda v: "")
