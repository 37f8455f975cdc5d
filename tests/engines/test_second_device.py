"""Parameters on a GPU that is not the current one: its own stream has kernels, copies and graphs.

Tensors are imagined, and so are streams, events and graphs: they know which device they are of,
and refuse what CUDA refuses. torch's own page says how a graph is captured.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import LR, Adam, ClipNorm, Modular, SkipSpike, Transform, captured
from torchzero_clip.audit import fake_cuda, twin
from torchzero_clip.engines.compiled.printers import backends, launches, pointer_tables

HERE, THERE = 0, 1  # the current device, and that of the parameters
EMPTY = "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on"


class Stream:
    """A stream of a device."""

    count = itertools.count(1)

    def __init__(self, device: Any = None) -> None:
        given = torch.cuda.current_device() if device is None else torch.device(device).index
        self.device, self.cuda_stream = torch.device("cuda", given), next(self.count)
        self.graph: Graph | None = None  # that is captured here


class Event:
    """An event, which is of the device where it is first recorded."""

    def __init__(self) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        if self.stream is not None and self.stream.device != stream.device:
            raise RuntimeError(f"Event {self.stream.device} does not match {stream.device}")
        self.stream = stream
        Machine.one.events.append(stream)

    def query(self) -> bool:
        return True


class Graph:
    """A graph of launches."""

    def capture_begin(self, *pool: Any, capture_error_mode: str = "global", **_: Any) -> None:
        self.stream: Stream = torch.cuda.current_stream()
        self.stream.graph, self.mode, self.nodes = self, capture_error_mode, list[str]()
        Machine.one.graphs.append(self)

    def capture_end(self) -> None:
        self.stream.graph = None
        if not self.nodes:
            warnings.warn(f"{EMPTY} wrong device or stream.", stacklevel=2)

    def replay(self) -> None:
        Machine.one.replayed += 1


class Using:
    """A block in which a stream is current, and its device; who does not leave it keeps both."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.which = stream, stream.device.index

    def __enter__(self) -> None:
        one = Machine.one
        self.before = one.now, one.streams[self.which]
        one.now, one.streams[self.which] = self.which, self.stream

    def __exit__(self, *error: object) -> None:
        Machine.one.now, Machine.one.streams[self.which] = self.before


class Machine:
    """Two GPUs.

    Attributes:
        now: The current device.
        streams: The current stream of each.
        launched: The stream of each kernel, and the devices of what it is given.
        events: The streams that events were recorded on.
        synchronized: The devices that the host waited for.
    """

    one: Machine

    def __init__(self) -> None:
        Machine.one = self
        self.now, self.launched, self.events = HERE, list[tuple[Stream, set[Any]]](), list[Stream]()
        self.graphs, self.replayed, self.synchronized = list[Graph](), 0, list[int]()
        self.streams = [Stream(f"cuda:{i}") for i in (HERE, THERE)]

    def stream(self, device: Any = None) -> Stream:
        return self.streams[self.now if device is None else torch.device(device).index]

    @contextmanager
    def on(self, device: Any) -> Iterator[None]:
        before, self.now = self.now, torch.device(device).index
        try:
            yield
        finally:
            self.now = before

    def launch(self, name: str, given: Sequence[Any]) -> None:
        stream = self.stream()
        if stream.graph is not None:
            stream.graph.nodes.append(name)
        self.launched.append((stream, {x.device for x in given if isinstance(x, Tensor)}))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_cuda():
        made = Machine()
        for name, value in {
            "current_device": lambda: made.now,
            "current_stream": made.stream,
            "device": made.on,
            "stream": Using,
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "is_current_stream_capturing": lambda: made.stream().graph is not None,
            "synchronize": lambda: made.synchronized.append(made.now),
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(backends.triton, "here", lambda: True)
        for name, value in vars(pointer_tables.DeviceTables()).items():
            monkeypatch.setattr(pointer_tables.TABLES, name, value)
        monkeypatch.setattr(pointer_tables, "_is_real", lambda device: device.type == "cuda")
        monkeypatch.setattr(pointer_tables, "fake_mode", lambda t: None)
        monkeypatch.setattr(launches, "WATCHED", [made.launch])
        yield made


def headline() -> list[Transform]:
    return [ClipNorm(1.0, dim="global"), Adam(), LR(1e-3)]


def spike() -> list[Transform]:
    return [SkipSpike(), *headline()]


def model(device: str = f"cuda:{THERE}") -> list[Parameter]:
    made = twin([torch.empty(8, 4), torch.empty(4)], device)
    for p in made:
        p.grad = torch.zeros_like(p)
    return made


def train(opt: Modular, steps: int = 6) -> None:
    """Steps with a rate that is another one in each."""
    for i in range(steps):
        for group in opt.param_groups:
            group["lr"] = 1e-3 * (i + 1)
        opt.step()


@pytest.mark.parametrize("chain", [headline, spike])
def test_a_step_is_on_the_stream_of_its_parameters(
    chain: Callable[[], list[Transform]], machine: Machine
) -> None:
    """Kernels, copies of tables and rates, and the events that tell when these are done."""
    opt = Modular(model(), *chain(), compile=True)
    train(opt)
    side = Stream(f"cuda:{THERE}")
    with Using(side), machine.on(f"cuda:{HERE}"):
        train(opt)
    assert opt.engine.replays.count  # type: ignore[attr-defined]
    used = {stream for stream, _ in machine.launched}
    assert used == set(machine.events) == {machine.streams[THERE], side}
    assert machine.now == HERE


def test_parameters_of_two_devices_have_their_kernels_there(machine: Machine) -> None:
    params = [*model(f"cuda:{HERE}"), *model(f"cuda:{THERE}")]
    train(Modular(params, ClipNorm(1.0), Adam(), LR(1e-3), compile=True))
    assert all([given == {stream.device} for stream, given in machine.launched])
    assert {stream.device.index for stream, _ in machine.launched} == {HERE, THERE}
    assert {stream.device.index for stream in machine.events} == {HERE, THERE}


@pytest.mark.parametrize("chain", [headline, spike])
def test_a_graph_holds_the_kernels_of_a_device_that_is_not_current(
    chain: Callable[[], list[Transform]], machine: Machine
) -> None:
    """Other threads may pin memory meanwhile, as those of a DataLoader do."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # of someone else, who chose no stream
        machine.launch("theirs", [])
    opt = captured(Modular(model(), *chain(), compile=True))
    machine.synchronized.clear()
    train(opt, 3)
    _, graph = machine.graphs
    before = len(machine.launched)
    train(opt, 3)
    assert machine.launched[before:] == []
    assert machine.replayed == 4
    assert len(graph.nodes) >= 3
    assert graph.stream.device.index == THERE
    assert graph.mode == "thread_local"
    assert machine.synchronized == [THERE]
    assert (machine.now, machine.stream().graph) == (HERE, None)


def test_a_graph_without_a_kernel_is_a_sentence(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replays would train nothing; the streams are afterwards what they were."""
    opt, streams = captured(Modular(model(), *headline(), compile=True)), list(machine.streams)
    monkeypatch.setattr(launches, "WATCHED", [])  # as where kernels start on another stream
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever a program does with warnings
        with pytest.raises(RuntimeError, match=r"captured: .*Graph is empty.*Remove the call"):
            train(opt)
    assert machine.replayed == 0
    assert (machine.now, machine.streams) == (HERE, streams)


def test_a_graph_is_of_one_device(machine: Machine) -> None:
    """A group on another one comes later: its kernels would be done once, and in no replay."""
    opt = captured(Modular(model(), *headline(), compile=True))
    train(opt)
    opt.add_param_group({"params": model(f"cuda:{HERE}")})
    with pytest.raises(RuntimeError, match="into a CUDA graph: the parameters are on several"):
        train(opt)
