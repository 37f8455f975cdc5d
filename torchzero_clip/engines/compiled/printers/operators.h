// The functions that operators.py names. List programs define LISTS: then functions of the C
// library compute in float for float operands. Vector programs always compute them in double. This
// header includes no other header, so that a kernel compiles fast.
#pragma once

typedef long long whole;

#ifdef LISTS
#define IN_FLOAT(text) text
#else
#define IN_FLOAT(text)
#endif
#define OF_ONE(name, of) \
    static inline double name(double x) { return __builtin_##of(x); } \
    IN_FLOAT(static inline float name(float x) { return __builtin_##of##f(x); })
OF_ONE(root, sqrt)
OF_ONE(expm1_of, expm1)
OF_ONE(log1p_of, log1p)
OF_ONE(tanh_of, tanh)
OF_ONE(trunc_of, trunc)
#ifdef LISTS
namespace list {
OF_ONE(exp, exp)
OF_ONE(log, log)
OF_ONE(sin, sin)
OF_ONE(cos, cos)
OF_ONE(erf, erf)
OF_ONE(exp2, exp2)
OF_ONE(log2, log2)
OF_ONE(floor, floor)
OF_ONE(ceil, ceil)
static inline double pow(double x, double y) { return __builtin_pow(x, y); }
static inline float pow(float x, float y) { return __builtin_powf(x, y); }
}
#endif
static inline double angle(double y, double x) { return __builtin_atan2(y, x); }
IN_FLOAT(static inline float angle(float y, float x) { return __builtin_atan2f(y, x); })

static inline float size(float x) { return __builtin_fabsf(x); }
static inline double size(double x) { return __builtin_fabs(x); }
template <class T> static inline T sign(T x) { return T((x > 0) - (x < 0)); }
template <class T> static inline T divided(T a, T b) { return a / b; }
template <class T> static inline T inverse(T x) { return 1 / x; }
template <class T> static inline T chosen(bool is, T a, T b) { return is ? a : b; }
template <class T> static inline bool is_infinite(T x) { return size(x) == T(__builtin_inf()); }
template <class T> static inline T mix(T a, T b, T w) {
    return size(w) < T(0.5) ? a + w * (b - a) : b - (b - a) * (1 - w);
}
// Written so that the compiler makes no branches. The result is NaN if an operand is NaN.
template <class T> static inline T larger(T a, T b) {
    const T most = a > b ? a : b;
    return a == a ? most : a;
}
template <class T> static inline T smaller(T a, T b) {
    const T least = a < b ? a : b;
    return a == a ? least : a;
}
static inline double longest(double a, double b) { return __builtin_hypot(a, b); }
#ifdef LISTS
static inline float longest(float a, float b) {
    return is_infinite(a) | is_infinite(b) ? __builtin_inff()
                                           : float(root(double(a) * a + double(b) * b));
}
#endif
static inline double remainder_of(double x, double y) {
    const double rest = __builtin_fmod(x, y);
    return rest != 0 && (y < 0) != (rest < 0) ? rest + y : rest;
}
