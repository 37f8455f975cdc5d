// Every vector program in C++ includes this header. It has the operators of operators.py, the norm
// of core/norms/measures.py, and the launch of a list kernel.
#pragma once

#include "operators.h"

// A power that keeps its last result: the step counts of all tensors are mostly equal.
struct last_power {
    double x = 0, y = 0, value = 1;
    double operator()(double base, double exponent) {
        if (exponent == 2) return base * base;
        if (exponent == 0.5) return __builtin_sqrt(base);
        if (base == x && exponent == y && base) return value;  // never for 0, since -0 == 0
        x = base, y = exponent;
        return value = __builtin_pow(base, exponent);
    }
};
// The p-norm of n numbers >= 0, without overflow or underflow of the powers.
static double norm_over(const double *x, whole n, whole step, double p, double by) {
    double total = 0;
    for (whole i = 0; i < n; ++i) {
        const double one = x[i * step] / by;
        total += p == 2 ? one * one : p == 1 ? size(one) : __builtin_pow(size(one), p);
    }
    return by * (p == 2 ? __builtin_sqrt(total) : p == 1 ? total : __builtin_pow(total, 1 / p));
}
static double norm_in_range(const double *x, whole n, whole step, double p) {
    const double norm = norm_over(x, n, step, p, 1);
    if (p <= 6 && norm > 1e-40 && norm < 1e40) return norm;
    double most = n ? x[0] : 0;
    for (whole i = 1; i < n; ++i) most = larger(most, x[i * step]);
    return norm_over(x, n, step, p, most > 0 && most < __builtin_inf() ? most : 1);
}
typedef void (*kernel_of_lists)(whole, const void *, const void *, const double *,
                                const void *const *, double *, whole, const void *);
// Launches a list kernel, and joins the partial statistics of all threads.
static void launch(whole count, void *kernel, const void *sizes, const void *lists,
                   const double *numbers, const void *const *vectors, void *room, whole threads,
                   const void *rows, whole width, void *out, int kind) {
    double *parts = (double *)room, *all = (double *)out;
    for (whole i = 0; out && i < width * threads; ++i) parts[i] = 0;
    ((kernel_of_lists)kernel)(count, sizes, lists, numbers, vectors, parts, threads, rows);
    for (whole i = 0; out && i < width; ++i) {
        all[i] = parts[i];
        for (whole k = 1; k < threads; ++k) {
            const double part = parts[k * width + i];
            all[i] = kind ? all[i] + part : larger(all[i], part);
        }
        if (kind == 2) all[i] = __builtin_sqrt(all[i]);
    }
}
