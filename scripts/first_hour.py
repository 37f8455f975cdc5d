"""The first 20 minutes on a GPU: is it right what CUDA does, does it wait, and how fast is it?

    python scripts/first_hour.py [--minutes 18] [--quick] [--only numbers,times]

The sections are numbers, waits, races, second, capture, times, kernels and named. Behind them come
a table, what is not captured and why, and what was wrong or failed, of which there should be none.
Without a GPU every section runs on the CPU, tiny and without captures: so it is known to run.
"""

import argparse
import contextlib
import itertools
import math
import random
import sys
import threading
import time
import traceback
import warnings

import torch

import torchzero_clip as tz

warnings.filterwarnings("ignore")
ap = argparse.ArgumentParser()
ap.add_argument("--minutes", type=float, default=18)
ap.add_argument("--only", default="")
ap.add_argument("--quick", action="store_true")
ARGS = ap.parse_args()
GPU = torch.cuda.is_available()
DEV = torch.device("cuda:0" if GPU else "cpu")
QUICK = ARGS.quick or not GPU
BEGAN, ROWS, BAD, SKIPPED, HELD = time.time(), [], [], [], []


def left():
    return ARGS.minutes * 60 - (time.time() - BEGAN)


def sync():
    torch.cuda.synchronize() if GPU else None


def line(*x):
    print(*x, flush=True)


def check(name, cond, detail=""):
    if cond:
        HELD.append(name)
    else:
        BAD.append(f"{name}: {detail}")
        line(f"  WRONG {name}: {detail}")


@contextlib.contextmanager
def trying(name):
    """What fails is a row of the summary, and the rest goes on."""
    try:
        yield
    except Exception as e:
        if "cannot be put into a CUDA graph" in str(
            e
        ) or "must be constructed with compile=True" in str(e):
            SKIPPED.append(f"{name}: {str(e)[:110]}")
        else:
            BAD.append(f"{name}: {type(e).__name__}: {str(e)[:200]}")
            line(f"  FAILED {name}: {type(e).__name__}: {str(e)[:200]}")
            line("    " + traceback.format_exc().strip().splitlines()[-3].strip()[:150])
        if GPU:
            try:
                torch.cuda.synchronize()
            except Exception as dead:
                line("the GPU is gone:", dead)
                summary()


def section(name):
    wanted = not ARGS.only or name in ARGS.only.split(",")
    there = left() > 20
    if wanted:
        line(f"--- {name} ({time.time() - BEGAN:.0f} s)" + ("" if there else ": no time left"))
    return wanted and there


def summary():
    line("=" * 20, "table")
    [line(row) for row in ROWS]
    line("=" * 20, "not captured, with a sentence")
    [line("  " + x) for x in SKIPPED]
    line("=" * 20, "wrong or failed")
    [line("  " + x) for x in BAD]
    where = f"on {torch.cuda.get_device_name(0)}" if GPU else "ON THE CPU: nothing of CUDA was seen"
    found = f"{len(HELD)} held, {len(BAD)} wrong or failed, {len(SKIPPED)} not captured, with a why"
    line(f"{found}, {where}, {time.time() - BEGAN:.0f} s")
    sys.exit(bool(BAD))


# ------------------------------------------------------------------ what is here
with trying("here"):
    line("torch", torch.__version__, "cuda", torch.version.cuda, "torchzero_clip", tz.__file__)
    try:
        import triton

        line("triton", triton.__version__)
    except ImportError:
        line("no triton")
    if GPU:
        d = torch.cuda.get_device_properties(0)
        rate, width = getattr(d, "memory_clock_rate", 0), getattr(d, "memory_bus_width", 0)
        line(
            d.name,
            f"sm_{d.major}{d.minor}",
            d.multi_processor_count,
            "SMs",
            d.total_memory >> 30,
            "GiB, memory",
            rate * 2e3 * width / 8 / 1e9 if rate else "?",
            "GB/s on paper;",
            torch.cuda.device_count(),
            "GPUs",
        )


# ------------------------------------------------------------------ chains
def tail(lr=1e-3):
    return [tz.Adam(), tz.WeightDecay(0.01), tz.LR(lr)]


def clip():
    return tz.ClipNorm(1.0, dim="global")


OURS = {
    "clip": lambda: [clip(), *tail()],
    "clip each": lambda: [tz.ClipNorm(1.0), *tail()],
    "guard": lambda: [tz.Guard(), clip(), *tail()],
    "spike": lambda: [tz.SkipSpike(), clip(), *tail()],
    "zclip": lambda: [tz.ZClip(warmup_steps=2), *tail()],
    "autoclip": lambda: [tz.AutoClip(), *tail()],
    "adagc": lambda: [tz.AdaGC(), *tail()],
    "agc": lambda: [tz.AGC(), *tail()],
    "ema clip": lambda: [tz.ClipNormByEMA(), *tail()],
    "growth": lambda: [tz.ClipNormGrowth(), *tail()],
    "far limit": lambda: [tz.ClipNorm(1e-33), tz.LR(1e30)],  # of a factor that float32 has not
    "value": lambda: [tz.ClipValue(0.1), *tail()],
    "linf": lambda: [tz.ClipNorm(0.1, ord=math.inf), *tail()],
    "behind": lambda: [tz.Adam(), tz.ClipNorm(1.0), tz.LR(1e-3)],
    "in place": lambda: [tz.ClipNorm(1.0, dim="global", target="grad"), *tail()],
    "momentum": lambda: [clip(), tz.Momentum(0.9), tz.LR(1e-3)],
    "atan2": lambda: [tz.AdamAtan2(), tz.LR(1e-3)],
    "ema weights": lambda: [clip(), *tail(), tz.WeightEMA(0.9)],
}


def chains():
    found = {}
    with trying("names"):
        from torchzero_clip.published.name import NAMES

        found |= {f"named {n}": lambda n=n: [tz.named(n)] for n in sorted(NAMES)}
    return dict(itertools.islice(found.items(), 6)) if ARGS.quick and GPU else found


SHAPES = [(64, 32), (32,), (48, 64), (5,), (4097,)]


def model(dtype, device, shapes=SHAPES, seed=0, odd=0):
    g = torch.Generator().manual_seed(seed)
    made = []
    for s in shapes:
        t = torch.randn(s, generator=g) * 0.5
        room = torch.zeros(t.numel() + odd, dtype=dtype, device=device)
        room[odd:] = t.flatten().to(dtype).to(device)
        made.append(torch.nn.Parameter(room[odd:].view(s)))
    return made


def gradients(steps, shapes=SHAPES, seed=7):
    g = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(s, generator=g) * (30 if k == 4 else 1) for s in shapes] for k in range(steps)
    ]


WAYS = ("default", "compiled", "captured")


def make(params, chain, way):
    opt = tz.Modular(params, *chain(), compile=way != "default")
    return tz.captured(opt) if way == "captured" else opt


def give(params, row, keep=True):
    for p, g in zip(params, row, strict=True):
        if keep and p.grad is not None:
            p.grad.copy_(g)
        else:
            p.grad = g.to(p.device, p.dtype, copy=True)


def train(chain, way, dtype, device, rows, keep=True, odd=0, busy=None, wait=None, shapes=SHAPES):
    params = model(dtype, device, shapes, odd=odd)
    opt = make(params, chain, way)
    first = [g["lr"] for g in opt.param_groups] if "lr" in opt.param_groups[0] else None
    for k, row in enumerate(rows):
        give(params, [g.to(dtype) for g in row] if dtype != torch.float64 else row, keep)
        if first:
            for group, lr in zip(opt.param_groups, first, strict=True):
                group["lr"] = lr * (1 + 0.5 * (k % 5))
        if busy:
            busy()
        with wait() if wait and k >= 5 else contextlib.nullcontext():
            opt.step()
    sync()
    return [p.detach().double().cpu() for p in params], opt


def away(some, ref):
    return max(
        [
            float((a - b).abs().max() / (b.abs().max() + 1e-12)) if a.isfinite().all() else math.inf
            for a, b in zip(some, ref, strict=True)
        ]
    )


@contextlib.contextmanager
def no_waits():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ways():
    return WAYS if GPU else WAYS[:2]


# ------------------------------------------------------------------ numbers, and waits
def judged(ours, base, dtype):
    return ours <= max(30 * base, 300 * torch.finfo(dtype).eps)


def compare(found, waits=False):
    """Each chain in each way against float64 on the CPU; then whether its later steps wait."""
    for name, chain in found.items():
        if left() < 30:
            line("  no time for", name)
            break
        for shapes in (SHAPES, [(64, 32), (48, 64), (16, 16)]):  # the latter for matrices
            rows = gradients(8, shapes)
            try:
                ref, _ = train(chain, "default", torch.float64, "cpu", rows, shapes=shapes)
                base = away(
                    train(chain, "default", torch.float32, "cpu", rows, shapes=shapes)[0], ref
                )
                break
            except Exception as e:
                why = f"{name} on the CPU: {type(e).__name__} {str(e)[:80]}"
        else:
            SKIPPED.append(why)
            continue
        said = []
        for way in ways():
            with trying(f"{name} {way}"):
                t = time.time()
                got, opt = train(chain, way, torch.float32, DEV, rows, shapes=shapes)
                err = away(got, ref)
                replays = getattr(getattr(opt.engine, "replays", None), "count", "-")
                check(
                    f"numbers {name} {way}",
                    judged(err, base, torch.float32),
                    f"{err:.1e} from float64, the CPU's float32 {base:.1e}",
                )
                said.append(f"{way} {err:.1e} ({replays} replays, {time.time() - t:.1f} s)")
            if waits and GPU:
                with trying(f"waits {name} {way}"):
                    train(chain, way, torch.float32, DEV, rows, shapes=shapes, wait=no_waits)
                    check(f"no wait {name} {way}", True)
        line(f"  {name:22s} cpu {base:.1e}  " + "  ".join(said))


if section("numbers"):
    rows = gradients(8)
    compare(OURS)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for name in ("clip", "guard", "zclip", "agc", "behind"):
            ref, _ = train(
                OURS[name],
                "default",
                torch.float64,
                "cpu",
                [[g.to(dtype).double() for g in r] for r in rows],
            )
            base = away(train(OURS[name], "default", dtype, "cpu", rows)[0], ref)
            for way in ways():
                with trying(f"{name} {way} {dtype}"):
                    err = away(train(OURS[name], way, dtype, DEV, rows)[0], ref)
                    check(
                        f"numbers {name} {way} {dtype}",
                        judged(err, base, dtype),
                        f"{err:.1e}, cpu {base:.1e}",
                    )
    for odd in (1, 2, 3):
        for way in ways():
            with trying(f"odd addresses {odd} {way}"):
                ref, _ = train(OURS["clip"], "default", torch.float64, "cpu", rows)
                err = away(train(OURS["clip"], way, torch.float32, DEV, rows, odd=odd)[0], ref)
                check(f"odd addresses {odd} {way}", err < 1e-4, f"{err:.1e}")
    for way in ways()[:2]:  # what is no number, denormals, nothing
        with trying(f"strange numbers {way}"):
            p = torch.nn.Parameter(torch.zeros(6, device=DEV))
            opt = tz.Modular([p], tz.Adam(eps=1e-45), tz.LR(1.0), compile=way == "compiled")
            p.grad = torch.tensor([1e-20, 0.0, 1.0, math.nan, math.inf, 3e38], device=DEV)
            opt.step()
            x = p.detach().cpu()
            check(
                f"denormals {way}",
                abs(float(x[2]) + 1) < 1e-3 and math.isnan(float(x[3])),
                x.tolist(),
            )
            line("  Adam of 1e-20, 0, 1, nan, inf, 3e38:", way, x.tolist())
    if GPU and torch.cuda.get_device_properties(0).total_memory > 40 << 30 and left() > 300:
        for way in ("default", "compiled"):
            with trying(f"beyond 2**31 entries {way}"):
                n = 2**31 + 4099
                p = torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=DEV))
                p.grad = torch.ones_like(p)
                opt = tz.Modular([p], clip(), tz.LR(2.0**16), compile=way == "compiled")
                opt.step()
                want = -(2.0**16) / math.sqrt(n)
                got = p.detach()[[0, 2**31 - 1, 2**31, n - 1]].float().tolist()
                check(
                    f"beyond 2**31 entries {way}",
                    all(abs(x / want - 1) < 0.01 for x in got)
                    and int((p.detach() == 0).sum()) == 0,
                    got,
                )
                del p, opt
                torch.cuda.empty_cache()

# ------------------------------------------------------------------ waits
if section("waits"):
    rows = gradients(9)
    for name, chain in OURS.items():
        for way in ways():
            with trying(f"waits {name} {way}"):
                train(chain, way, torch.float32, DEV, rows, wait=no_waits if GPU else None)
                check(f"no wait {name} {way}", True)
    if GPU:
        with trying("torch itself waits nowhere"):
            ps = model(torch.float32, DEV)
            give(ps, rows[0])
            o = torch.optim.AdamW(ps, 1e-3, fused=True)
            o.step()
            with no_waits():
                torch.nn.utils.clip_grad_norm_(ps, 1.0, foreach=True)
                o.step()

# ---------------------------------------------------------- races: the GPU is far behind the host
if section("races"):
    many = [(64,)] * 40
    rows = gradients(40, many)
    ref, _ = train(OURS["clip"], "default", torch.float64, "cpu", rows, shapes=many)
    sleep = (lambda: torch.cuda._sleep(20_000_000)) if GPU else None
    for way in ways():
        for keep in (True, False):
            if way == "captured" and not keep:
                continue
            with trying(f"race {way} {'same' if keep else 'other'} gradients"):
                if GPU:  # gradients are on the device before, so that nothing but steps is waiting
                    params = model(torch.float32, DEV, many)
                    opt = make(params, OURS["clip"], way)
                    lr = opt.param_groups[0]["lr"]
                    staged = [[g.to(DEV) for g in r] for r in rows]
                    sync()
                    for k, row in enumerate(staged):
                        for p, g in zip(params, row, strict=True):
                            if keep and p.grad is not None:
                                p.grad.copy_(g)
                            else:
                                p.grad = g.clone()
                        opt.param_groups[0]["lr"] = lr * (1 + 0.5 * (k % 5))
                        sleep()
                        opt.step()
                    sync()
                    got = [p.detach().double().cpu() for p in params]
                else:
                    got, _ = train(
                        OURS["clip"], way, torch.float32, DEV, rows, keep=keep, shapes=many
                    )
                err = away(got, ref)
                check(
                    f"race {way} {'same' if keep else 'other'} gradients",
                    err < 1e-4,
                    f"{err:.1e}: a pinned table or rate was overwritten",
                )
    if GPU:
        for way in ("default", "compiled"):
            with trying(f"two streams {way}"):
                params = model(torch.float32, DEV)
                opt = make(params, OURS["clip"], way)
                lr = opt.param_groups[0]["lr"]
                rows = gradients(12)
                ref, _ = train(OURS["clip"], "default", torch.float64, "cpu", rows)
                streams = [torch.cuda.Stream(), torch.cuda.Stream()]
                for k, row in enumerate(rows):
                    s = streams[k % 2]
                    s.wait_stream(streams[1 - k % 2])
                    with torch.cuda.stream(s):
                        give(params, row)
                        torch.cuda._sleep(5_000_000)
                        opt.param_groups[0]["lr"] = lr * (1 + 0.5 * (k % 5))
                        opt.step()
                sync()
                err = away([p.detach().double().cpu() for p in params], ref)
                check(f"two streams {way}", err < 1e-4, f"{err:.1e}")

# ------------------------------------------------------------------ a GPU that is not current
if section("second"):
    if not GPU or torch.cuda.device_count() < 2:
        line("  one GPU or none: tests/engines/test_second_device.py imagines two")
    else:
        rows = gradients(9)
        ref, _ = train(OURS["clip"], "default", torch.float64, "cpu", rows)
        for way in WAYS:
            with trying(f"on cuda:1 while cuda:0 is current, {way}"):
                err = away(train(OURS["clip"], way, torch.float32, "cuda:1", rows)[0], ref)
                check(f"cuda:1 {way}", err < 1e-4, f"{err:.1e}")

# ------------------------------------------------------ captures beside other threads, and by hand
if section("capture") and (GPU or line("  needs a GPU")):
    rows = gradients(20)
    ref, _ = train(OURS["clip"], "default", torch.float64, "cpu", rows)
    with trying("a capture while another thread pins memory"):
        stop, raised = threading.Event(), []

        def pin():
            n = 1
            while not stop.is_set():
                try:
                    torch.empty(n << 16, dtype=torch.uint8).pin_memory()
                    n = n % 97 + 1
                except Exception as e:
                    raised.append(str(e)[:120])
                    return

        t = threading.Thread(target=pin, daemon=True)
        t.start()
        try:
            err = away(train(OURS["clip"], "captured", torch.float32, DEV, rows)[0], ref)
        finally:
            stop.set()
            t.join(10)
        check(
            "a capture while another thread pins memory",
            err < 1e-4 and not raised,
            f"{err:.1e} {raised}",
        )
    for way in ("default", "compiled"):
        with trying(f"a graph of the user's around step, {way}"):
            params = model(torch.float32, DEV)
            opt = make(params, OURS["clip"], way)
            give(params, rows[0])
            s = torch.cuda.Stream()
            s.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(s):
                for _ in range(4):
                    opt.step()
            torch.cuda.current_stream().wait_stream(s)
            sync()
            before = [p.detach().clone() for p in params]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                opt.step()
            sync()
            check(
                f"a capture alone changes nothing, {way}",
                all(torch.equal(a, b) for a, b in zip(before, params, strict=True)),
            )
            graph.replay()
            sync()
            check(f"a replay changes parameters, {way}", not torch.equal(before[0], params[0]))
    with trying("captured, with a loss that is a number of Python"):
        ends = []
        for way in ("default", "captured"):
            params = model(torch.float32, DEV)
            opt = make(params, OURS["spike"], way)
            for k, row in enumerate(rows):
                give(params, row)
                opt.report(loss=1.0 + 0.1 * (k % 7) + 100 * (k == 15))
                opt.step()
            sync()
            ends.append([p.detach().double().cpu() for p in params])
        check(
            "captured, with a loss that is a number of Python",
            away(ends[1], ends[0]) < 1e-4,
            f"{away(ends[1], ends[0]):.1e}: the loss of the capture is kept",
        )
    with trying("torch.compile(opt.step)"):
        params = model(torch.float32, DEV)
        opt = tz.Modular(params, *OURS["clip"]())
        step = torch.compile(opt.step)
        t = time.time()
        for row in rows[:6]:
            give(params, row)
            step()
        sync()
        line(f"  torch.compile(opt.step) took {time.time() - t:.0f} s for six steps")


# ------------------------------------------------------------------ times
def gpt(layers, width, vocab):
    return (
        [(vocab, width), (1024, width)]
        + [
            (3 * width, width),
            (3 * width,),
            (width, width),
            (width,),
            (4 * width, width),
            (4 * width,),
            (width, 4 * width),
            (width,),
            (width,),
            (width,),
            (width,),
            (width,),
        ]
        * layers
        + [(width,), (width,)]
    )


MODELS = (
    {
        "2000 x 2k": [(2048,)] * 2000,
        "gpt2 124M": gpt(12, 768, 50257),
        "gpt2-xl 1.5B": gpt(48, 1600, 50257),
    }
    if not QUICK
    else {"20 x 64": [(64,)] * 20, "tiny": gpt(1, 16, 64)}
)


def clock(step, steps, warm):
    """The time of the device in a step, that of the host until it may go on, and fresh memory."""
    for _ in range(warm):
        step()
    sync()
    host = []
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(50_000_000)
        a.record()
        for _ in range(steps):
            t = time.perf_counter()
            step()
            host.append(time.perf_counter() - t)
        b.record()
        sync()
        device, peak = a.elapsed_time(b) / steps / 1e3, torch.cuda.max_memory_allocated() - base
    else:
        for _ in range(steps):
            t = time.perf_counter()
            step()
            host.append(time.perf_counter() - t)
        device, peak = sorted(host)[len(host) // 2], 0
    return device, sorted(host)[len(host) // 2], peak


def stepping(params, cname, way):
    """A function that does a step, in one of the ways."""
    if way != "torch fused+clip":
        opt, others = make(params, OURS[cname], way), [torch.zeros_like(p) for p in params]

        def move():
            for i, p in enumerate(params):
                if random.random() < 0.5:  # where no step has found them yet
                    others[i], p.grad = p.grad, others[i]
            opt.step()

        return move if way.endswith("moving") else opt.step
    o = torch.optim.AdamW(params, 1e-3, weight_decay=0.01, fused=True)

    def step():
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        o.step()

    return step


if section("times"):
    speed = 0.0
    with trying("copy"):
        x = torch.empty((1 << 30) if GPU else 1 << 16, dtype=torch.uint8, device=DEV)
        y = torch.empty_like(x)
        t, *_ = clock(lambda: y.copy_(x), 20, 3)
        speed = 2 * x.numel() / t
        ROWS.append(f"a copy of 1 GiB: {speed / 1e9:.0f} GB/s, read and written")
        del x, y
    heads = ("device, us", 12), ("host, us", 10), ("GB/s", 7), ("of copy", 9), ("first 4, s", 11)
    words = "".join([f"{name:>{width}s}" for name, width in (*heads, ("peak, MB", 10))])
    ROWS.append(f"{'model':14s}{'dtype':9s}{'chain':11s}{'way':17s}{words}")
    ROWS.append("(GB/s of the least that must move: 32 B an entry in float32, 24 in bfloat16)")
    for (mname, shapes), dtype in itertools.product(
        MODELS.items(), (torch.float32, torch.bfloat16)
    ):
        count = sum(math.prod(s) for s in shapes)
        least = count * (32 if dtype == torch.float32 else 2 + 2 * 3 + 2 + 16 - 2)
        some = [*ways(), "compiled, moving"]  # whose gradients lie elsewhere in each step
        todo = [("clip", "torch fused+clip"), *[("clip", w) for w in some]] + (
            [(c, w) for c in ("guard", "zclip", "autoclip", "agc", "adagc") for w in ways()]
            if dtype == torch.float32 and not mname.startswith("gpt2-xl")
            else []
        )
        for cname, way in todo:
            if left() < 45:
                line("  no time for", mname, cname, way)
                continue
            with trying(f"time {mname} {dtype} {cname} {way}"):
                params = [
                    torch.nn.Parameter(torch.randn(s, device=DEV).to(dtype) * 0.02) for s in shapes
                ]
                for p in params:
                    p.grad = torch.randn_like(p) * 0.01
                t = time.time()
                step = stepping(params, cname, way)
                for _ in range(4):
                    step()
                sync()
                first = time.time() - t
                device, host, peak = clock(step, 30 if count < 1e9 else 10, 3)
                rate = least / device / 1e9
                numbers = f"{device * 1e6:12.0f}{host * 1e6:10.0f}{rate:7.0f}"
                numbers += f"{rate * 1e9 / max(speed, 1):9.2f}{first:11.1f}{peak / 1e6:10.0f}"
                ROWS.append(f"{mname:14s}{str(dtype)[6:]:9s}{cname:11s}{way:17s}{numbers}")
                line("  " + ROWS[-1])
            params = step = None
            if GPU:
                torch.cuda.empty_cache()
# ------------------------------------------------------------------ kernels, one by one
if section("kernels"):
    with trying("kernels"):
        from torch.profiler import ProfilerActivity, profile

        shapes = list(MODELS.values())[-2]
        count = sum(math.prod(s) for s in shapes)
        for dtype in (torch.float32, torch.bfloat16):
            params = [torch.nn.Parameter(torch.randn(s, device=DEV).to(dtype)) for s in shapes]
            for p in params:
                p.grad = torch.randn_like(p)
            opt = make(params, OURS["clip"], "compiled")
            [opt.step() for _ in range(6)]
            sync()
            with profile(
                activities=[ProfilerActivity.CUDA] if GPU else [ProfilerActivity.CPU]
            ) as seen:
                [opt.step() for _ in range(5)]
                sync()
            found = sorted(
                seen.key_averages(),
                key=lambda e: -(getattr(e, "device_time_total", 0) or e.cpu_time_total),
            )[:6]
            for e in found:
                us = (getattr(e, "device_time_total", 0) or e.cpu_time_total) / max(e.count, 1)
                rate = f"{us:.1f} us, {count / max(us, 1e-3) / 1e3:.1f} G entries/s"
                ROWS.append(f"kernel {str(dtype)[6:]} {e.key:64s} {e.count / 5:.1f} a step, {rate}")
# ------------------------------------------------------- every published method, numbers and waits
if section("named"):
    compare(chains(), waits=True)
summary()
