"""Memory: bytes a parameter of gradients, state and workspace in a training step, and its peak.

    python -m benchmarks.memory                  # a model in the shape of GPT-2 small
    python -m benchmarks.memory --set quick      # a few seconds
    python -m benchmarks.memory --only "AdamW, released" --time 5
    python -m benchmarks.memory --formats        # AdamW and Muon on weights in bfloat16

Every combination trains the same model in a process of its own. Its columns, bytes over parameters:

    weights     the parameters of the model
    gradients   the most that was alive in .grad at once
    state       what the optimizer keeps in its state
    workspace   what else it keeps between steps, and the most that it allocates while it works
    peak        the allocator's peak in a step, with parameters, state and activations
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import circumstances
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Guard,
    Modular,
    Momentum,
    Orthogonalize,
    Partition,
    SkipSpike,
    WeightDecay,
    matrices_and_rest,
    release,
)

RATE, DECAY = 1e-4, 0.1
WARM_UP = 2
WORKS = "Optimizer.step"  # torch names the steps of its optimizers so
SETS = {"gpt2": (768, 12, 50257, 1024), "quick": (64, 2, 500, 64)}  # width, layers, words, length
COLUMNS = ("weights", "gradients", "state", "workspace", "peak")

Make = Callable[[nn.Module], Any]


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in self._qkv(x)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.attend(self.before(x)).chunk(3, dim=-1)


class GPT(nn.Module):
    """GPT-2: the embedding of the words is also what tells them apart."""

    def __init__(self, width: int, layers: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.last = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.last(self.blocks(x)) @ self.words.weight.T


# ---------------------------------------------------------------------- the combinations


class Nothing:
    """No optimizer: gradients are dropped when they are whole. What no combination can go below."""

    def __init__(self, model: nn.Module) -> None:
        self.state: dict[Any, Any] = {}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.use)

    def use(self, p: Tensor) -> None:
        """Drop the gradient."""
        p.grad = None

    def step(self) -> None:
        """Nothing is left to do."""

    def zero_grad(self) -> None:
        """Nor is a gradient."""


class InHooks(Nothing):
    """An optimizer of torch for each parameter, stepped in its hook, as torch's tutorial does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.every = {p: torch_adamw(nn.ParameterList([p])) for p in model.parameters()}

    def use(self, p: Tensor) -> None:
        self.every[p].step()
        self.every[p].zero_grad()
        self.state[p] = self.every[p].state[p]


def modular(*links: Any, **options: Any) -> Make:
    return lambda model: Modular(model.named_parameters(), *links, **options)


def released(*links: Any, **options: Any) -> Make:
    return lambda model: release(model, *links, **options)


def torch_adamw(model: nn.Module, **options: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, **options)


def torch_clipped(model: nn.Module) -> Any:
    """torch's clipping, then its fused AdamW."""
    opt = torch_adamw(model, fused=True)
    opt.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1.0) and None
    )
    return opt


def optimi(model: nn.Module, gradient_release: bool) -> Any:
    lib = importlib.import_module("optimi")
    opt = lib.AdamW(model.parameters(), RATE, weight_decay=DECAY, gradient_release=gradient_release)
    if gradient_release:
        lib.prepare_for_gradient_release(model, opt, ignore_existing_hooks=True)
    return opt


def torchao(model: nn.Module) -> Any:
    lib = importlib.import_module("torchao.optim")
    return lib.AdamW8bit(model.parameters(), RATE, weight_decay=DECAY)


def heavyball(model: nn.Module) -> Any:
    """Without its torch.compile, as the others are."""
    lib = importlib.import_module("heavyball")
    lib.utils.compile_mode = None
    return lib.AdamW(model.parameters(), RATE, weight_decay=DECAY)


SMALL: dict[str, Any] = {"state_dtype": "bfloat16"}
ADAMW = (Adam(), WeightDecay(DECAY), LR(RATE))
CLIPPED = (ClipNorm(1.0, dim="global"), *ADAMW)
EACH = (ClipNorm(1.0), *ADAMW)
GUARDED = (Guard(), SkipSpike(), *CLIPPED)
COMBINATIONS: dict[str, Make] = {  # a name of each, and what makes its optimizer of a model
    "no optimizer, gradients dropped": Nothing,
    "torch AdamW, foreach": lambda model: torch_adamw(model, foreach=True),
    "torch AdamW, fused": lambda model: torch_adamw(model, fused=True),
    "torch clip_grad_norm_ + AdamW, fused": torch_clipped,
    "torch AdamW, one in each hook": InHooks,
    "optimi AdamW": lambda model: optimi(model, False),
    "optimi AdamW, gradient release": lambda model: optimi(model, True),
    "torchao AdamW8bit": torchao,
    "heavyball AdamW": heavyball,
    "AdamW": modular(*ADAMW),
    "AdamW, small state": modular(*ADAMW, **SMALL),
    "AdamW, released": released(*ADAMW),
    "AdamW, released, compiled": released(*ADAMW, compile=True),
    "AdamW, released, small state": released(*ADAMW, **SMALL),
    "AdamW, released, small state, compiled": released(*ADAMW, compile=True, **SMALL),
    "global clip + AdamW": modular(*CLIPPED),
    "global clip + AdamW, compiled": modular(*CLIPPED, compile=True),
    "global clip + AdamW, small state": modular(*CLIPPED, **SMALL),
    "global clip + AdamW, small state, compiled": modular(*CLIPPED, compile=True, **SMALL),
    "guards, global clip + AdamW": modular(*GUARDED),
    "guards, global clip + AdamW, compiled": modular(*GUARDED, compile=True),
    "guards, global clip + AdamW, small state, compiled": modular(*GUARDED, compile=True, **SMALL),
    "global clip of the last step + AdamW, released": released(*CLIPPED, limit="last step"),
    "clip of each tensor + AdamW": modular(*EACH),
    "clip of each tensor + AdamW, released": released(*EACH),
    "clip of each tensor + AdamW, released, compiled": released(*EACH, compile=True),
    "clip of each tensor + SGD, released": released(ClipNorm(1.0), Momentum(0.9), LR(RATE)),
}
WAYS = (  # of keeping numbers: the dtype of weights, what updates are rounded by, and that of state
    ("float32", "nearest", "float32"),
    ("bfloat16", "exact", "float32"),
    ("bfloat16", "kahan", "float32"),
    ("bfloat16", "stochastic", "float32"),
    ("bfloat16", "exact", "bfloat16"),
    ("bfloat16", "stochastic", "bfloat16"),
)


def in_format(method: str, late: bool, rounding: str, state: str) -> Make:
    """A clip of each tensor, which gradient release can do as well, and a method."""

    def make(model: nn.Module) -> Any:
        parts = {"matrices": Orthogonalize(), "rest": Adam()}
        both = Partition(parts, matrices_and_rest(model)) if method == "Muon" else Adam()
        made = (released if late else modular)(
            ClipNorm(1.0), both, WeightDecay(DECAY), LR(RATE),
            rounding=rounding, state_dtype=state, compile=True,
        )  # fmt: skip
        return made(model)

    return make


FORMATS = {
    f"{dtype}, {rounding}, {state} state: {method}{', released' * late}": in_format(
        method, late, rounding, state
    )
    for method in ("AdamW", "Muon")
    for late in (False, True)
    for dtype, rounding, state in WAYS
}
COMBINATIONS |= FORMATS
PEERS = "optimi", "torchao", "heavyball"  # packages, the first words of names


def installed(name: str) -> bool:
    package = name.split(maxsplit=1)[0]
    return package not in PEERS or importlib.util.find_spec(package) is not None


# ---------------------------------------------------------------------- measuring


class Row(NamedTuple):
    """What one combination takes, in bytes, and the seconds of a whole training step."""

    weights: int
    gradients: int
    state: int
    workspace: int
    peak: int
    seconds: float
    parameters: int


def stored(tensors: Iterable[Any]) -> int:
    """The bytes of the memory that some tensors lie in."""
    found = {}
    for t in tensors:
        if isinstance(t, Tensor) and t.device.type != "meta" and t.layout == torch.strided:
            storage = t.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def plain(held: Any) -> list[Tensor]:
    """The tensors of what an optimizer holds; of other classes those that they are made of."""
    if isinstance(held, Tensor):
        made_of = held.__tensor_flatten__()[0] if hasattr(held, "__tensor_flatten__") else ()
        return plain([getattr(held, name) for name in made_of]) if made_of else [held]
    if isinstance(held, dict):
        held = list(held.values())
    return [t for x in held for t in plain(x)] if isinstance(held, (list, tuple)) else []


def everything() -> int:
    """The bytes of all tensors that are alive."""
    gc.collect()
    return stored([x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)])


def measure(name: str, size: str, rounds: int, device: str) -> Row:
    """Train with a combination."""
    width, layers, words, length = SETS[size]
    before = everything()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name.startswith("bfloat16") else torch.float32
    model = GPT(width, layers, words, length).to(device, dtype)
    params = list(model.parameters())
    tokens = torch.randint(words, (1, min(length, 32) + 1), device=device)
    alive = [0]
    for p in params:  # before the hooks of the optimizer, so that the gradient is still there
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(stored([q.grad for q in params]))
        )
    opt = COMBINATIONS[name](model)
    marked(opt)

    def train() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()

    for _ in range(WARM_UP):
        train()
    every = set(map(id, params))  # some optimizers keep their groups there
    held = [t for t in plain([dict(s) for s in opt.state.values()]) if id(t) not in every]
    start = everything() - before
    kept = start - stored([*params, *held, tokens])
    peak, works = watched(train, device)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        train()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    seconds = sorted(times)[len(times) // 2] if times else math.nan
    numbers = sum(p.numel() for p in params)
    return Row(
        stored(params), max(alive), stored(held), kept + works, start + peak, seconds, numbers
    )


def marked(opt: Any) -> None:
    """Have the profiler know when a released parameter steps, as it knows of torch's optimizers."""
    if hasattr(opt, "_release"):
        one = opt._release

        def step(p: Tensor) -> None:
            with record_function(WORKS):
                one(p)

        opt._release = step


def watched(train: Callable[[], None], device: str) -> tuple[int, int]:
    """The allocator's peak in a step above its start, and the most while an optimizer works."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as profiler:
        train()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert results is not None, "the profiler has recorded nothing"
    kind = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    changes, spans = [], []
    for event in results.events():
        if event.name() == "[memory]" and event.device_type() == kind:
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(WORKS):
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return peaks(sorted(changes, key=lambda change: change[0]), sorted(spans))


def peaks(changes: list[tuple[int, int]], spans: list[tuple[int, int]]) -> tuple[int, int]:
    """The highest sum of changes, and the most that it grew inside a span of time."""
    total = most = grown = 0
    spans, span, base = list(reversed(spans)), None, 0
    for at, change in changes:
        while spans and spans[-1][0] <= at:
            span, base = spans.pop(), total
        total += change
        most = max(most, total)
        if span is not None and at <= span[1]:
            grown = max(grown, total - base)
    return most, grown


# ---------------------------------------------------------------------- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", choices=SETS, default="gpt2")
    parser.add_argument("--only", choices=COMBINATIONS, action="append")
    parser.add_argument("--formats", action="store_true", help="the rows of bfloat16 and float32")
    parser.add_argument("--time", type=int, default=3, help="steps whose median is the time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="one line, of one combination")
    args = parser.parse_args()
    others = FORMATS if args.formats else [x for x in COMBINATIONS if x not in FORMATS]
    names = args.only or list(others)
    if args.json:
        print(json.dumps(measure(names[0], args.set, args.time, args.device)))
        return
    width = max(map(len, names))
    print(f"{'':{width}}", *[f"{column:>10}" for column in COLUMNS], f"{'ms a step':>10}")
    for name in names:
        if not installed(name):
            print(f"{name:{width}}  {name.split()[0]} is not installed")
            continue
        own = ["--set", args.set, "--time", str(args.time), "--device", args.device]
        command = [sys.executable, "-m", "benchmarks.memory", "--json", "--only", name, *own]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        row = Row(*json.loads(out.splitlines()[-1]))
        cells = [f"{getattr(row, column) / row.parameters:10.2f}" for column in COLUMNS]
        print(f"{name:{width}}", *cells, f"{1e3 * row.seconds:10.0f}", flush=True)


if __name__ == "__main__":
    if "--json" in sys.argv:
        main()
    else:
        with circumstances.watched("benchmarks.memory"):
            main()
