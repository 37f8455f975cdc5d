// Every list program in C++ includes this header. It has loads and stores of all dtypes, the
// operators of operators.py, and the sharing of tensors among threads. It includes no <algorithm>
// and no other large header of std, because they would double the time to compile a kernel.
#pragma once

#define LISTS
#include "operators.h"
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
static inline float load(short x) { return x; }
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
// The random bits of core/formats/stochastic.py, and x rounded up or down by them.
static inline uint32_t mixed(uint32_t x) {
    x *= 0x7feb352d;
    x = (x ^ (x >> 15)) * 0x846ca68b;
    return x ^ (x >> 16);
}
static inline float rounded(float x, int32_t key, int32_t start, int64_t place, int half) {
    const uint32_t all = mixed(uint32_t(key) ^ (uint32_t(start) + uint32_t(place)));
    const uint32_t noise = half & 1 ? all >> 16 : all & 0xffff;
    if (half < 2) return number(x != x ? 0x7fc00000 : (bits(x) + noise) & 0xffff0000);
    return x != x ? x : number((bits(x * 0x1p-112f) + (noise >> 3)) & 0xffffe000) * 0x1p112f;
}
// The two halves of a float32 number, as in core/formats/exact.py, and the number of two halves.
static inline uint32_t upper_bits(float x) { return (bits(x) + 0x8000) & 0xffff0000; }
static inline float upper(float x) { return x != x ? x : number(upper_bits(x)); }
static inline float lower(float x) { return x != x ? 0 : int32_t(bits(x) - upper_bits(x)); }
static inline float wide_of(float w, float rest) {
    const uint32_t size = bits(w) & 0x7fffffff;
    const bool other = size > 0x7f800000 || (size == 0x7f800000 && rest > 0) || (!size && rest < 0);
    return number(bits(w) + (other ? 0 : int32_t(rest)));
}
// x / ratio for a ratio of any size: a product, and a second one if 1 / ratio is out of range.
struct divisor {
    double first, half;
    explicit divisor(double ratio) {
        const double most = size(ratio);
        half = most > 1e290 ? 0x1p-512 : most < 1e-290 ? 0x1p512 : 1;
        first = 1 / (ratio * half);
    }
};
template <class V> static inline V over(V x, divisor ratio) {
    return V(double(x) * ratio.first * ratio.half);
}
static inline bfloat cut(float x) { return bfloat{uint16_t(bits(x) >> 16)}; }
static inline half half_of(float x) {
    const uint32_t all = bits(x), size = all & 0x7fffffff;
    const uint32_t small = bits(number(size) + 0.5f) - 0x3f000000;  // rounded to a denormal half
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
static inline double magnitude(float x) { return size(double(x)); }
static inline uint32_t order(float x) { return bits(x) & 0x7fffffff; }  // NaN is the largest
static inline double square(float x) { return double(x) * double(x); }

// Calls entries(tensor, row, at, end, ..., out) for parts of all tensors. Each thread has an equal
// share of all elements. A kernel that writes goes backward, because the elements that a norm has
// read last are still in the cache. `rows` has the length of a slice of each tensor, then the index
// of each tensor's first slice, then the number of all slices.
template <bool backward, class Entries>
static inline void share(Entries entries, int64_t count, const int64_t *sizes,
                         void *const *const *lists, const double *numbers,
                         const void *const *vectors, double *out, int64_t threads,
                         const int64_t *rows) {
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
            const int64_t at = larger(from, start), end = smaller(to, start + sizes[i]);
            const int64_t length = rows ? rows[i] : sizes[i], width = rows ? rows[2 * count] : count;
            for (int64_t j = at - start; j < end - start;) {
                const int64_t row = (rows ? rows[count + i] : i) + j / length;
                const int64_t next = smaller(end - start, (j / length + 1) * length);
                entries(i, row, j, next, lists, numbers, vectors, out + me * width + row);
                j = next;
            }
            start += backward ? 0 : sizes[i];
        }
    }
}
