"""Functions that every Triton kernel includes. C++ kernels include kernel.h instead.

This module can be imported only if Triton is installed. Numbers in bfloat16 are loaded and stored
as their bits, so that rounding is the same in the interpreter and on GPUs without bfloat16.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(4096)  # elements of a tensor per Triton program
ROW = tl.constexpr(16384)  # elements of a slice per Triton program
LONG = tl.constexpr(2**27)  # from this many elements on, a tensor or a slice gets larger chunks
BLOCK = tl.constexpr(1024)  # elements that a list kernel computes at a time
PARTS = tl.constexpr(2048)  # statistics of chunks that are joined at a time
LANES = tl.constexpr(256)  # elements that a vector kernel computes at a time


@triton.jit
def divided(a, b):
    """Return the quotient, correctly rounded; the quotient of Triton may be off by two ULP."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def root(x):
    """Return the square root, correctly rounded."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def inverse(x):
    """Return 1 / x."""
    return divided(tl.full(x.shape, 1.0, x.dtype), x)


@triton.jit
def larger(a, b):
    """Return the larger of two numbers; NaN if a or b is NaN."""
    return tl.where(a == a, tl.where(a > b, a, b), a)


@triton.jit
def smaller(a, b):
    """Return the smaller of two numbers; NaN if a or b is NaN."""
    return tl.where(a == a, tl.where(a < b, a, b), a)


@triton.jit
def sign(x):
    """Return 1, 0 or -1."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def mix(a, b, w):
    """Interpolate between a and b; the result is exactly a for w = 0, and exactly b for w = 1."""
    return tl.where(tl.abs(w) < 0.5, a + w * (b - a), b - (b - a) * (1 - w))


@triton.jit
def is_infinite(x):
    """Return whether x is infinite, of either sign."""
    return tl.abs(x) == float("inf")


@triton.jit
def longest(a, b):
    """Return √(a² + b²) without overflow or underflow of the squares."""
    if a.dtype == tl.float64:
        most = tl.maximum(tl.abs(a), tl.abs(b))
        least = tl.minimum(tl.abs(a), tl.abs(b))
        share = divided(least, tl.where(most == 0, 1.0, most))
        length = tl.where((a == a) & (b == b), most * root(1 + share * share), a + b)
    else:
        wide = a.to(tl.float64)
        other = b.to(tl.float64)
        length = root(wide * wide + other * other).to(a.dtype)
    return tl.where(is_infinite(a) | is_infinite(b), float("inf"), length)


@triton.jit
def arc(x):
    """Return the arc tangent of x, for x between -0.4143 and 0.4143."""
    z = x * x
    if x.dtype == tl.float64:
        top = -8.750608600031904122785e-1 * z - 1.615753718733365076637e1
        top = (top * z - 7.500855792314704667340e1) * z - 1.228866684490136173410e2
        top = top * z - 6.485021904942025371773e1
        below = (z + 2.485846490142306297962e1) * z + 1.650270098316988542046e2
        below = (below * z + 4.328810604912902668951e2) * z + 4.853903996359136964868e2
        series = divided(top, below * z + 1.945506571482613964425e2)
    else:
        series = (8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1
        series = series * z - 3.33329491539e-1
    return x + x * (z * series)


@triton.jit
def below_zero(x):
    """Return whether x is negative; -0 counts as negative."""
    return (x < 0) | ((x == 0) & (inverse(x) < 0))


@triton.jit
def angle(y, x):
    """Return the angle of the point (x, y)."""
    most = tl.maximum(tl.abs(x), tl.abs(y))
    least = tl.minimum(tl.abs(x), tl.abs(y))
    share = divided(least, tl.where(most == 0, 1.0, most))
    share = tl.where(least == float("inf"), 1.0, share)
    far = share > 0.4142135623730950
    turned = arc(tl.where(far, divided(share - 1, share + 1), share))
    found = tl.where(far, turned + 0.7853981633974483, turned)
    found = tl.where(tl.abs(y) > tl.abs(x), 1.5707963267948966 - found, found)
    found = tl.where(below_zero(x), 3.141592653589793 - found, found)
    found = tl.where(below_zero(y), -found, found).to(x.dtype)
    return tl.where((x == x) & (y == y), found, x + y)


@triton.jit
def divisor(ratio):
    """Prepare a ratio for `over`: 1 / ratio as the sum of two float32 numbers, and in float64."""
    ratio = ratio.to(tl.float64)
    size = tl.abs(ratio)
    half = tl.where(size > 1e290, 2.0**-512, tl.where(size < 1e-290, 2.0**512, 1.0))
    half = half.to(tl.float64)
    first = 1.0 / (ratio * half)
    high = first.to(tl.float32)
    return high, (first - high.to(tl.float64)).to(tl.float32), first, half


@triton.jit
def over(x, ratio):
    """Return x / ratio for a ratio of any size, which `divisor` has prepared.

    float64 is used only if the ratio is far from 1. Zeros and infinities come from the product with
    `high` alone: adding the product with `low` could change the sign of 0, or give NaN.
    """
    high, low, first, half = ratio
    if x.dtype == tl.float64:
        return x * first * half
    else:
        if (tl.abs(high) > 2.0**-100) & (tl.abs(high) < 2.0**100):
            product = x * high
            sum = tl.fma(x, high, x * low)
            quotient = tl.where((product == 0) | is_infinite(product), product, sum)
        else:
            quotient = (x.to(tl.float64) * first * half).to(tl.float32)
        return quotient


# ---------------------------------------------------------------------- half precision


@triton.jit
def bits_of(x):
    """Return the bits of a float32 number as an integer."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def widened(x):
    """Return the float32 number for the bits of bfloat16."""
    return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def narrowed(x):
    """Return the bits of the bfloat16 number nearest to a float32 number."""
    all = bits_of(x)
    nearest = (all + 0x7FFF + ((all >> 16) & 1)) >> 16
    return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16)


@triton.jit
def rounded(x, key, start, place, HALF: tl.constexpr):
    """Round x up or down, by the random bits of core/formats/stochastic.py.

    HALF is 0 or 1 for bfloat16, and 2 or 3 for float16. For float16, x is divided by 2^112 first,
    because then denormal numbers of float16 are denormal numbers of float32.
    """
    all = (start.to(tl.uint32, bitcast=True) + place) ^ key.to(tl.uint32, bitcast=True)
    all = all * 0x7FEB352D
    all = (all ^ (all >> 15)) * 0x846CA68B
    all = all ^ (all >> 16)
    down = 1.925929944387236e-34 if HALF > 1 else 1.0  # 2^-112
    kept: tl.constexpr = 13 if HALF > 1 else 16
    noise = (all >> 16 if HALF % 2 else all & 0xFFFF) >> (16 - kept)
    moved = ((bits_of(x * down) + noise) >> kept << kept).to(tl.float32, bitcast=True)
    return tl.where(x == x, moved / down, float("nan"))


@triton.jit
def upper(x):
    """Return the upper half of a float32 number, as core/formats/exact.py defines it."""
    return tl.where(x == x, ((bits_of(x) + 0x8000) & 0xFFFF0000).to(tl.float32, bitcast=True), x)


@triton.jit
def lower(x):
    """Return the lower half of a float32 number, an integer."""
    return tl.where(x == x, (bits_of(x) - bits_of(upper(x))).to(tl.int32, bitcast=True), 0)


@triton.jit
def wide_of(w, rest):
    """Return the float32 number of both halves; a lower half of another number is ignored."""
    size = bits_of(w) & 0x7FFFFFFF
    other = (size > 0x7F800000) | ((size == 0x7F800000) & (rest > 0)) | ((size == 0) & (rest < 0))
    left = tl.where(other, 0.0, rest).to(tl.int32).to(tl.uint32, bitcast=True)
    return (bits_of(w) + left).to(tl.float32, bitcast=True)


# ---------------------------------------------------------------------- statistics


@triton.jit
def power_of(x, SQUARES: tl.constexpr):
    """Return the sum of |x|, or of x², of a block in float64.

    If the largest |x| is between 1e-30 and 1e30, the sum is computed in float32, divided by a power
    of two: on many GPUs float64 takes 64 times as long.
    """
    most = tl.max(tl.abs(x), axis=0)
    if ((most >= 1e-30) & (most <= 1e30)) | (most == 0):
        exponent = tl.where(most == 0, 0x3F800000, bits_of(most) & 0x7F800000).to(tl.uint32)
        scale = exponent.to(tl.float32, bitcast=True).to(tl.float64)
        share = tl.abs(x) * (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        total = tl.sum(share * share if SQUARES else share, axis=0).to(tl.float64) * scale
        total = total * scale if SQUARES else total
    else:
        wide = tl.abs(x).to(tl.float64)
        total = tl.sum(wide * wide if SQUARES else wide, axis=0)
    return total


@triton.jit
def largest_of(x):
    """Return the bits of the largest |x| of a block; NaN is larger than all numbers."""
    return tl.max((bits_of(x) & 0x7FFFFFFF).to(tl.int32), axis=0)


@triton.jit
def span_of(size, most):
    """Return the elements per chunk: more for long tensors, to limit the number of chunks."""
    return (1 + size // LONG) * most


@triton.jit
def part_of(size, chunk, most):
    """Return the first element of a chunk, and the number of elements in the chunk."""
    at = chunk * span_of(size, most)
    return at, tl.minimum(size - at, span_of(size, most)).to(tl.int32)


@triton.jit
def torchzero_clip_joined(parts, layout, count, out, most, POWER: tl.constexpr):
    """Join the statistics of the chunks of each tensor, in a fixed order, so that runs agree.

    POWER is 0 for the largest, 1 for the sum, and 2 for the square root of the sum. The argument
    `most` is the number of elements in a chunk, for tensors that are not long.
    """
    tensor = tl.program_id(0)
    size = tl.load(layout + tensor)
    chunks = tl.cdiv(size, span_of(size, most))
    parts += tl.load(layout + count + tensor)
    lane = tl.arange(0, PARTS)
    total = tl.full((PARTS,), 0.0, tl.float64)
    for at in range(0, chunks, PARTS):
        part = tl.load(parts + at + lane, mask=at + lane < chunks, other=0.0)
        total = larger(part, total) if POWER == 0 else total + part
    if POWER == 0:  # compare the bits, because NaN must win
        most = tl.max(total.to(tl.int64, bitcast=True), axis=0)
        tl.store(out + tensor, most.to(tl.float64, bitcast=True))
    else:
        sum = tl.sum(total, axis=0)
        tl.store(out + tensor, root(sum) if POWER == 2 else sum)


# ---------------------------------------------------------------------- vectors


@triton.jit
def plus(a, b):
    """Return the sum."""
    return a + b


@triton.jit
def chosen(flag, a, b):
    """Return a if the flag is set, else b."""
    return tl.where(flag != 0, a, b)


@triton.jit
def size(x):
    """Return |x|."""
    return tl.abs(x)


@triton.jit
def expm1_of(x):
    """Return exp(x) - 1 by W. Kahan's method, in which the rounding error of exp(x) cancels."""
    power = tl.exp(x)
    near = (power == 1) | (power == 0) | is_infinite(power)
    rest = (power - 1) * divided(x, tl.log(tl.where(near, 2.0, power)))
    return tl.where(power == 1, x, tl.where(near, power - 1, rest))


@triton.jit
def log1p_of(x):
    """Return log(1 + x), by the same method as `expm1_of`."""
    sum = 1 + x
    near = (sum == 1) | (sum == float("inf"))
    return tl.where(near, x, tl.log(sum) * divided(x, tl.where(near, 1.0, sum - 1)))


@triton.jit
def tanh_of(x):
    """Return the hyperbolic tangent."""
    power = expm1_of(2 * x)
    return tl.where(is_infinite(power), 1.0, divided(power, power + 2))


@triton.jit
def trunc_of(x):
    """Round towards zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def alike(x, other):
    """Return x in the shape of `other`: Triton's interpreter turns a single flag into a number."""
    return tl.where(other == other, x, x)


@triton.jit
def remainder_of(x, y):
    """Return the remainder of x / y, with the sign of y."""
    y = alike(y, x)
    rest = tl.fma(-y, tl.floor(divided(x, y)), x)
    rest = tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)  # a rounded quotient
    rest = tl.where(tl.abs(rest) > tl.abs(y), rest - y, rest)
    other = ((x < 0) & (y > 0)) | ((x > 0) & (y < 0))
    return tl.where(is_infinite(y) & (tl.abs(x) < float("inf")), tl.where(other, y, x), rest)


@triton.jit
def power(x, y):
    """Return x to the power y in float64; Triton has no such function."""
    base = alike(x.to(tl.float64), y)
    exponent = alike(y.to(tl.float64), x)
    value = tl.exp2(exponent * tl.log2(tl.abs(base)))
    whole = tl.floor(exponent) == exponent
    odd = whole & (tl.floor(exponent * 0.5) * 2 != exponent)
    negative = (base < 0) | (inverse(base) < 0)
    value = tl.where(negative & odd, -value, value)
    unknown = (base < 0) & (whole == 0) & (base > float("-inf"))
    value = tl.where(unknown, float("nan"), value)
    value = tl.where(exponent == 2, base * base, value)
    value = tl.where(exponent == 0.5, tl.sqrt(base), value)
    one = (exponent == 0) | (base == 1) | ((base == -1) & is_infinite(exponent))
    return tl.where(one, 1.0, value)


@triton.jit
def norm_in_range(x, n, step, p):
    """Return the p-norm of n numbers >= 0, without overflow or underflow of the powers."""
    lane = tl.arange(0, LANES)
    exponent = tl.full((), p, tl.float64)
    most = tl.full((LANES,), 0.0, tl.float64)
    for at in range(0, n, LANES):
        i = at + lane
        most = larger(tl.load(x + i * step, mask=i < n, other=0.0), most)
    by = tl.reduce(most, 0, larger)
    by = tl.where((by > 0) & (by < float("inf")), by, 1.0)
    total = tl.full((LANES,), 0.0, tl.float64)
    for at in range(0, n, LANES):
        i = at + lane
        total += power(tl.load(x + i * step, mask=i < n, other=0.0) / by, exponent)
    return by * power(tl.sum(total, axis=0), 1.0 / exponent)
