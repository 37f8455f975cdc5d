// The kernel of replay/native_forms.py, which describes many tensors in one call. It includes no
// other header, so that it compiles fast.
#pragma once

typedef long long whole;
struct tensor {  // DLTensor of DLPack 1
    char *data;
    int device[2], dims, dtype;
    const whole *shape, *strides;
    unsigned long long offset;
};

// Writes the address of each tensor into `starts`. The form of each tensor is a few integers: its
// dims, device, dtype and shape, and its strides unless it is contiguous. They are written into
// `words`, or compared with the integers there. Returns whether all are the same, and -1 if torch
// raised an error.
extern "C" whole kernel(int (*describe)(void *, tensor *), void *const *tensors, whole count,
                        whole *starts, whole *words, whole compare) {
    for (whole i = 0; i < count; ++i) {
        tensor t;
        if (describe(tensors[i], &t)) return -1;
        starts[i] = (whole)(t.data + t.offset);
        whole size = 1;
        bool dense = true, same = true;
        for (int d = t.dims - 1; d >= 0; --d) {
            dense = dense && (t.shape[d] == 1 || t.strides[d] == size);
            size *= t.shape[d];
        }
        dense = dense || size == 0;
        auto word = [&](whole x) {
            same = same && (!compare || *words == x);
            if (!compare) *words = x;
            ++words;
        };
        word((whole)t.dims << 1 | dense);
        if (!same) return 0;  // a shape of another length follows
        word((whole)t.device[0] << 32 | t.device[1]);
        word(t.dtype);
        for (int d = 0; d < t.dims; ++d) word(t.shape[d]);
        for (int d = 0; d < t.dims && !dense; ++d) word(t.strides[d]);
        if (!same) return 0;
    }
    return 1;
}
