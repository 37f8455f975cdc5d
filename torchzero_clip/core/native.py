"""Kernels in C++, for parameters on CPU: one call does all tensors of a bucket, on torch's threads.

What a kernel measures it adds up in float64, in the pass that computes it. What is built is kept
for the next process, in `~/.cache/torchzero_clip` or where TORCHZERO_CLIP_CACHE says.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.kernel import BOOLEAN, Job, Kernel, Ref
from torchzero_clip.core.norms import NAMED

Call = Callable[[Job, Sequence[int]], "Tensor | None"]
"""call(job, how many entries of each tensor are done): the statistics of what is measured."""

FLAGS = "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared"
SHARE = 2**15  # entries that are worth a thread
TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat",
    torch.float16: "half",
    torch.bool: "bool",
}
"""Of the entries of lists; arithmetic is in float or double."""
ROWS = {torch.float32: "float", torch.float64: "double", torch.bool: "bool"}
FORMULAS = {
    "load": "load({})",
    "mul": "{} * {}",
    "div": "{} / {}",
    "add": "{} + {}",
    "sub": "{} - {}",
    "add_scaled": "{0} + {2} * {1}",
    "addcmul": "{} + {} * {}",
    "addcmul scaled": "{0} + {3} * {1} * {2}",
    "lerp": "mix({}, {}, {})",
    "clamp_min": "larger({}, {})",
    "clamp_max": "smaller({}, {})",
    "where": "({1}) ? {0} : {2}",
    "hypot": "longest({}, {})",
    "positive": "{} > 0",
    "neg": "-{}",
    "abs": "std::fabs({})",
    "sign": "sign({})",
    "sqrt": "std::sqrt({})",
    "reciprocal": "1 / {}",
    "isfinite": "{0} - {0} == 0",
    "isinf": "std::fabs({}) == INFINITY",
    "isnan": "{0} != {0}",
}
BEGIN = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <type_traits>

struct bfloat { uint16_t bits; };
struct half { uint16_t bits; };
static inline uint32_t bits(float x) {
    uint32_t all;
    std::memcpy(&all, &x, 4);
    return all;
}
static inline float number(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline float load(float x) { return x; }
static inline double load(double x) { return x; }
static inline bool load(bool x) { return x; }
static inline float load(bfloat x) { return number(uint32_t(x.bits) << 16); }
static inline float load(half x) {
    const uint32_t size = uint32_t(x.bits & 0x7fff) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
    const uint32_t finite = bits(number(size) * 0x1p112f), endless = size | 0x7f800000;
    return number((size < 0x0f800000 ? finite : endless) | sign);
}
static inline bfloat bfloat_of(float x) {
    const uint32_t all = bits(x), rounded = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
    return bfloat{uint16_t(x != x ? 0x7fc0 : rounded)};
}
static inline half half_of(float x) {
    const uint32_t all = bits(x), size = all & 0x7fffffff;
    const uint32_t small = bits(number(size) + 0.5f) - 0x3f000000;  // rounded to what half has
    const uint32_t usual = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
    const uint32_t endless = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t value = size < 0x38800000 ? small : size < 0x477ff000 ? usual : endless;
    return half{uint16_t(value | ((all >> 16) & 0x8000))};
}
template <class T, class V> static inline T stored(V x) {
    if constexpr (std::is_same_v<T, bfloat>) return bfloat_of(float(x));
    else if constexpr (std::is_same_v<T, half>) return half_of(float(x));
    else return T(x);
}
// spelt so that the compiler makes no branches: NaN where one of them is
template <class A, class B> static inline std::common_type_t<A, B> larger(A a, B b) {
    const std::common_type_t<A, B> most = a > b ? a : b;
    return a == a ? most : a;
}
template <class A, class B> static inline std::common_type_t<A, B> smaller(A a, B b) {
    const std::common_type_t<A, B> least = a < b ? a : b;
    return a == a ? least : a;
}
template <class T> static inline T sign(T x) { return T((x > 0) - (x < 0)); }
template <class T> static inline T mix(T a, T b, T w) {
    return std::fabs(w) < T(0.5) ? a + w * (b - a) : b - (b - a) * (1 - w);
}
static inline float longest(float a, float b) {
    const bool endless = (std::fabs(a) == INFINITY) | (std::fabs(b) == INFINITY);
    return endless ? INFINITY : float(std::sqrt(double(a) * a + double(b) * b));
}
static inline double longest(double a, double b) { return std::hypot(a, b); }
static inline double magnitude(float x) { return std::fabs(double(x)); }
static inline uint32_t size(float x) { return bits(x) & 0x7fffffff; }  // in order, NaN above all
static inline double square(float x) { return double(x) * double(x); }
"""
ENTRIES = """
static void entries(int64_t tensor, int64_t at, int64_t end, void *const *const *lists,
                    const double *numbers, const void *const *rows, double *out) {{
    {constants}
    auto entry = [=](int64_t j) {{
        {lines}
    }};
    {loop}
}}
"""
EACH = """#pragma omp simd
    for (int64_t j = at; j < end; ++j) entry(j);"""
ADDED = """double total = 0;
    #pragma omp simd reduction(+: total)
    for (int64_t j = at; j < end; ++j) total += entry(j);
    *out = total;"""
LARGEST = """uint32_t largest = 0;
    #pragma omp simd reduction(max: largest)
    for (int64_t j = at; j < end; ++j) largest = std::max(largest, entry(j));
    *out = number(largest);"""
MEASURED = {
    NAMED["l1"]: (ADDED, "magnitude"),
    NAMED["l2"]: (ADDED, "square"),
    NAMED["linf"]: (LARGEST, "size"),
}
"""How they are added up, and what of an entry."""
END = """
extern "C" void kernel(int64_t count, const int64_t *sizes, void *const *const *lists,
                       const double *numbers, const void *const *rows, double *out,
                       int64_t threads) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += sizes[i];
    #pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
        const int64_t from = total * me / all, to = total * (me + 1) / all;
        int64_t start = backward ? total : 0;
        for (int64_t k = 0; k < count; ++k) {
            const int64_t i = backward ? count - 1 - k : k;
            start -= backward ? sizes[i] : 0;
            const int64_t at = std::max(from, start), end = std::min(to, start + sizes[i]);
            if (at < end)
                entries(i, at - start, end - start, lists, numbers, rows, out + me * count + i);
            start += backward ? 0 : sizes[i];
        }
    }
}
"""


def source(kernel: Kernel) -> str | None:
    """A kernel in C++, or None where it takes what only torch computes."""
    if not (TYPES.keys() >= set(kernel.lists) and ROWS.keys() >= set(kernel.rows)):
        return None
    values: list[str] = []  # their types
    lines: list[str] = []
    for name, refs in kernel.lines:
        line = _line(kernel, name, refs, values)
        if line is None:
            return None
        lines.append(f"const {line[0]} v{len(values)} = {line[1]};")
        values.append(line[0])
    for home, value in kernel.stores:
        lines.append(f"x{home}[j] = stored<{TYPES[kernel.lists[home]]}>(v{value});")
    loop = EACH
    if kernel.measured is not None:
        loop, how = MEASURED[kernel.measured[0]]
        lines.append(f"return {how}(v{kernel.measured[1]});")
    constants = []
    for i, dtype in enumerate(kernel.lists):
        constants.append(f"{TYPES[dtype]} *const x{i} = ({TYPES[dtype]} *)lists[{i}][tensor];")
    constants += [f"const double number{i} = numbers[{i}];" for i in range(kernel.numbers)]
    for i, dtype in enumerate(kernel.rows):
        kind = ROWS[dtype]
        constants.append(f"const {kind} row{i} = ((const {kind} *)rows[{i}])[tensor];")
    inner, outer = "\n        ".join(lines), "\n    ".join(constants)
    text = ENTRIES.format(constants=outer, lines=inner, loop=loop)
    order = "true" if kernel.stores else "false"  # what a norm read last is in the cache
    return f"{BEGIN}static constexpr bool backward = {order};\n{text}{END}"


def _line(
    kernel: Kernel, name: str, refs: tuple[Ref, ...], values: list[str]
) -> tuple[str, str] | None:
    """The type of a value and its formula."""
    if name == "load":
        home = refs[0][1]
        return _wide(TYPES[kernel.lists[home]]), f"load(x{home}[j])"
    first = values[refs[0][1]]
    if name == "to":
        to = TYPES.get(getattr(torch, refs[1][1].removeprefix("torch.")))
        if to is None:
            return None
        rounded = "v{}" if first == "bool" else f"load(stored<{to}>(v{{}}))"
        return _wide(to), rounded.format(refs[0][1])
    formula = FORMULAS.get("addcmul scaled" if name == "addcmul" and refs[3:] else name)
    if formula is None or (first == "bool" and name not in BOOLEAN):
        return None
    terms = []
    for kind, which in refs:
        flag = kind == "row" and kernel.rows[which] == torch.bool
        number = kind in ("number", "row") and not flag
        text = f"v{which}" if kind == "value" else f"{kind}{which}"
        terms.append(f"{first}({text})" if number else text)
    double = "double" in [values[which] for kind, which in refs if kind == "value"]
    kind = "bool" if name in BOOLEAN else "double" if double else "float"
    return kind, formula.format(*terms)


def _wide(kind: str) -> str:
    """What entries of a type are computed in."""
    return kind if kind in ("double", "bool") else "float"


# ---------------------------------------------------------------------- building and calling


@cache
def native(kernel: Kernel) -> Call | None:
    """A kernel as a call, or None where it cannot be one."""
    text = source(kernel)
    function = None if text is None else _function(text)
    if function is None:
        return None

    def call(job: Job, sizes: Sequence[int]) -> Tensor | None:
        count, total = len(sizes), sum(sizes)
        threads = max(1, min(torch.get_num_threads(), total // SHARE))
        places = [home.places for home in job.homes]
        lists = array("Q", [place.buffer_info()[0] for place in places])
        lengths = array("q", sizes)
        rows = array("Q", [row.data_ptr() for row in job.rows] or [0])
        out = None
        if kernel.measured is not None:
            out = torch.zeros(threads, count, dtype=torch.float64, device="cpu")
        arguments = (count, lengths.buffer_info()[0], lists.buffer_info()[0])
        function(
            *map(ctypes.c_void_p, arguments),
            ctypes.c_void_p(job.numbers.data_ptr()),
            ctypes.c_void_p(rows.buffer_info()[0]),
            ctypes.c_void_p(0 if out is None else out.data_ptr()),
            ctypes.c_void_p(threads),
        )
        if out is None:
            return None
        m = kernel.measured[0]  # type: ignore[index]
        if m.kind == "max":
            return out.amax(dim=0, keepdim=True)
        return out.sum(dim=0, keepdim=True) ** (1 / m.p)

    return call


def compiler() -> list[str] | None:
    """The C++ compiler: what the environment variable CXX says, or the first that is there."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = [name for name in (named[:1] or ["g++", "c++", "clang++"]) if shutil.which(name)]
    return [*(named or found[:1])] if found else None


@cache
def _function(text: str) -> Any:
    """The function of a source; a warning and None where it cannot be built or loaded."""
    command = compiler()
    if command is None:
        return None
    try:
        function = ctypes.CDLL(str(_library(text, command))).kernel
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"{shlex.join(command)} could not build a kernel, and torch's own compiler takes over, "
            f"which is slower: {why.strip()[-500:]}",
            stacklevel=2,
        )
        return None
    function.restype = None
    return function


def _library(text: str, command: list[str]) -> Path:
    """The library of a source, built unless it is there from another time."""
    name = hashlib.sha256("\n".join([text, FLAGS, *command, _machine()]).encode()).hexdigest()[:24]
    library = _folder() / f"{name}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as room:
        page, made = Path(room) / "kernel.cpp", Path(room) / "kernel.so"
        page.write_text(text)
        order = [*command, *FLAGS.split(), str(page), "-o", str(made)]
        subprocess.run(order, capture_output=True, text=True, check=True)
        os.replace(made, library)  # whole, whoever else builds it
    return library


@cache
def _folder() -> Path:
    """Where libraries are kept; only their owner may write there."""
    given = os.environ.get("TORCHZERO_CLIP_CACHE")
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(given) if given else home / "torchzero_clip"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # no home, or none to write to
        pass
    return Path(tempfile.mkdtemp(prefix="torchzero_clip_"))


@cache
def _machine() -> str:
    """What -march=native and loading depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *platform.libc_ver(), *sorted(set(known))])
