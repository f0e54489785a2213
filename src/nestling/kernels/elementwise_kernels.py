"""Kernels in Triton's language that are not convolutions, over channels-last images. See elementwise.py.

Images are matrices here: one row per pixel, one column per channel. A program makes BM rows. What batch norm has to know of an
image (means, squared deviations, gradient sums) is gathered where it is made, one partial result per program, summed in a
fixed order afterwards: same input, same bits.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def partial_moments(out, rows, live, moments, block, blocks, cols, C: tl.constexpr, BM: tl.constexpr):
    """Mean and sum of squared deviations of BM rows, column by column: [0, channel, block] and [1, channel, block]."""
    mean = tl.sum(out, 0) / BM
    off = out - mean[None, :]
    tl.store(moments + cols * blocks + block, mean, mask=live)
    tl.store(moments + (C + cols) * blocks + block, tl.sum(off * off, 0), mask=live)


@triton.jit
def through_norm(dh, z, affine, cols, live, C: tl.constexpr):
    """The gradient before relu, and the normalised input: affine holds scale, shift, mean, 1/deviation, C numbers apart."""
    scale = tl.load(affine + cols, mask=live, other=0.0)
    shift = tl.load(affine + C + cols, mask=live, other=0.0)
    mean = tl.load(affine + 2 * C + cols, mask=live, other=0.0)
    rstd = tl.load(affine + 3 * C + cols, mask=live, other=0.0)
    g = tl.where(z * scale[None, :] + shift[None, :] > 0, dh, 0.0)
    return g, (z - mean[None, :]) * rstd[None, :]


@triton.jit
def sum_splits(
    p0, p1, p2, p3, p4, p5, p6, p7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    m0, m1, m2, m3, m4, m5, m6, m7,
    n, splits, BS: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """out[j] = sum over splits of partial[split, j], always in the same order, times the mask; of up to eight such sums."""
    which = tl.program_id(1)
    partial, out, mask = p0, o0, m0
    if which == 1:
        partial, out, mask = p1, o1, m1
    if which == 2:
        partial, out, mask = p2, o2, m2
    if which == 3:
        partial, out, mask = p3, o3, m3
    if which == 4:
        partial, out, mask = p4, o4, m4
    if which == 5:
        partial, out, mask = p5, o5, m5
    if which == 6:
        partial, out, mask = p6, o6, m6
    if which == 7:
        partial, out, mask = p7, o7, m7
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros([BS, BN], tl.float32)
    for start in range(0, splits, BS):
        s = start + tl.arange(0, BS)
        acc += tl.load(
            partial + s[:, None] * n + at[None, :], mask=(s < splits)[:, None] & (at < n)[None, :], other=0.0
        )
    total = tl.sum(acc, 0)
    if MASK:
        total *= tl.load(mask + at, mask=at < n, other=0.0)
    tl.store(out + at, total, mask=at < n)


@triton.jit
def finish_moments(
    moments, gamma, beta, affine, running_mean, running_var, held, blocks, rows, momentum, eps,
    C: tl.constexpr, BB: tl.constexpr, TRACK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """One channel: partial moments of equal blocks -> scale, shift, mean, 1/deviation; running statistics follow. A channel that
    is held has its running statistics instead, and keeps them."""
    c = tl.program_id(0)
    b = tl.arange(0, BB)
    live = b < blocks
    means = tl.load(moments + c * blocks + b, mask=live, other=0.0)
    squares = tl.load(moments + (C + c) * blocks + b, mask=live, other=0.0)
    mean = tl.sum(means, 0) / blocks
    off = tl.where(live, means - mean, 0.0)
    var = (tl.sum(squares, 0) + tl.sum(off * off, 0) * (rows // blocks)) / rows
    if TRACK:
        old_mean = tl.load(running_mean + c)
        old_var = tl.load(running_var + c)
        new_mean = old_mean + momentum * (mean - old_mean)
        new_var = old_var + momentum * (var * rows / (rows - 1) - old_var)
        if HELD:
            stays = tl.load(held + c) != 0
            mean, var = tl.where(stays, old_mean, mean), tl.where(stays, old_var, var)
            new_mean, new_var = tl.where(stays, old_mean, new_mean), tl.where(stays, old_var, new_var)
        tl.store(running_mean + c, new_mean)
        tl.store(running_var + c, new_var)
    rstd = 1.0 / tl.sqrt(var + eps)
    scale = tl.load(gamma + c) * rstd
    if HELD:  # nobody uses its gradient, which must not grow where the batch is far from the running statistics
        rstd = tl.where(stays, 0.0, rstd)
    tl.store(affine + c, scale)
    tl.store(affine + C + c, tl.load(beta + c) - mean * scale)
    tl.store(affine + 2 * C + c, mean)
    tl.store(affine + 3 * C + c, rstd)


@triton.jit
def finish_sums(sums, dgamma, dbeta, blocks, C: tl.constexpr, BB: tl.constexpr):
    """One channel: the partial sums of a backward convolution -> gradients of batch norm's weight and bias."""
    c = tl.program_id(0)
    b = tl.arange(0, BB)
    live = b < blocks
    tl.store(dbeta + c, tl.sum(tl.load(sums + c * blocks + b, mask=live, other=0.0), 0))
    tl.store(dgamma + c, tl.sum(tl.load(sums + (C + c) * blocks + b, mask=live, other=0.0), 0))


@triton.jit
def norm_relu(z, affine, h, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr):
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, CP)
    at = r[:, None] * C + c[None, :]
    live = (c < C)[None, :]
    scale = tl.load(affine + c, mask=c < C, other=0.0)
    shift = tl.load(affine + C + c, mask=c < C, other=0.0)
    out = tl.load(z + at, mask=live, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    out = tl.maximum(out, 0.0, propagate_nan=tl.PropagateNan.ALL)  # a run that diverges must not look well
    tl.store(h + at, out.to(h.dtype.element_ty), mask=live)


@triton.jit
def relu_back(dh, z, affine, g, sums, C: tl.constexpr, Z_STRIDE: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr):
    """A gradient through relu, with the sums that batch norm's backward needs: what BACK does in `conv`."""
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    r = block * BM + tl.arange(0, BM)
    c = tl.arange(0, CP)
    live = c < C
    at = r[:, None] * C + c[None, :]
    d = tl.load(dh + at, mask=live[None, :], other=0.0).to(tl.float32)
    before = tl.load(z + r[:, None] * Z_STRIDE + c[None, :], mask=live[None, :], other=0.0).to(tl.float32)
    out, normed = through_norm(d, before, affine, c, live, Z_STRIDE)
    tl.store(g + at, out.to(g.dtype.element_ty), mask=live[None, :])
    tl.store(sums + c * blocks + block, tl.sum(out, 0), mask=live)
    tl.store(sums + (C + c) * blocks + block, tl.sum(out * normed, 0), mask=live)


@triton.jit
def norm_back(
    g, z, affine, dgamma, dbeta, extra, dz, rows,
    C: tl.constexpr, Z_STRIDE: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dz = scale * (g - mean(g) - normalised * mean(g * normalised)), plus the gradient that passed the norm by."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, CP)
    live = (c < C)[None, :]
    at = r[:, None] * C + c[None, :]
    scale = tl.load(affine + c, mask=c < C, other=0.0)
    mean = tl.load(affine + 2 * Z_STRIDE + c, mask=c < C, other=0.0)
    rstd = tl.load(affine + 3 * Z_STRIDE + c, mask=c < C, other=0.0)
    first = tl.load(dbeta + c, mask=c < C, other=0.0) / rows
    second = tl.load(dgamma + c, mask=c < C, other=0.0) / rows
    before = tl.load(z + r[:, None] * Z_STRIDE + c[None, :], mask=live, other=0.0).to(tl.float32)
    normed = (before - mean[None, :]) * rstd[None, :]
    got = tl.load(g + at, mask=live, other=0.0).to(tl.float32)
    out = scale[None, :] * (got - first[None, :] - normed * second[None, :])
    if ADD:
        out += tl.load(extra + at, mask=live, other=0.0).to(tl.float32)
    tl.store(dz + at, out.to(dz.dtype.element_ty), mask=live)


@triton.jit
def add_all(
    p0, p1, p2, p3, p4, p5, p6, p7, y, moments,
    COUNT: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """The sum of up to eight images (or a look at one) and its moments."""
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    r = block * BM + tl.arange(0, BM)
    c = tl.arange(0, CP)
    live = c < C
    at = r[:, None] * C + c[None, :]
    total = tl.load(p0 + at, mask=live[None, :], other=0.0).to(tl.float32)
    if COUNT > 1:
        total += tl.load(p1 + at, mask=live[None, :], other=0.0).to(tl.float32)
    if COUNT > 2:
        total += tl.load(p2 + at, mask=live[None, :], other=0.0).to(tl.float32)
    if COUNT > 3:
        total += tl.load(p3 + at, mask=live[None, :], other=0.0).to(tl.float32)
    if COUNT > 4:
        total += tl.load(p4 + at, mask=live[None, :], other=0.0).to(tl.float32)
    if COUNT > 5:
        total += tl.load(p5 + at, mask=live[None, :], other=0.0).to(tl.float32)
    if COUNT > 6:
        total += tl.load(p6 + at, mask=live[None, :], other=0.0).to(tl.float32)
    if COUNT > 7:
        total += tl.load(p7 + at, mask=live[None, :], other=0.0).to(tl.float32)
    out = total.to(y.dtype.element_ty)
    if COUNT > 1:
        tl.store(y + at, out, mask=live[None, :])
    if MOMENTS:
        partial_moments(out.to(tl.float32), r, live, moments, block, blocks, c, C, BM)


@triton.jit
def pack(sources, places, sizes, inner, strides, shadow, BLOCK: tl.constexpr):
    """All weights, each (rows, inner) with rows `stride` apart, end to end in bf16: one launch for the whole network."""
    weight = tl.program_id(0)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(sizes + weight)
    if tl.program_id(1) * BLOCK < size:
        width = tl.load(inner + weight)
        source = tl.load(sources + weight).to(tl.pointer_type(tl.float32))
        value = tl.load(
            source + entry // width * tl.load(strides + weight) + entry % width, mask=entry < size, other=0.0
        )
        tl.store(shadow + tl.load(places + weight) + entry, value.to(shadow.dtype.element_ty), mask=entry < size)


@triton.jit
def pool2(x, y, W: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr):
    """Means of 2x2 pixels; W is the result's."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, CP)
    live = (c < C)[None, :]
    first = (r // W * 4 * W + r % W * 2)[:, None] * C + c[None, :]
    total = tl.load(x + first, mask=live, other=0.0).to(tl.float32)
    total += tl.load(x + first + C, mask=live, other=0.0).to(tl.float32)
    total += tl.load(x + first + 2 * W * C, mask=live, other=0.0).to(tl.float32)
    total += tl.load(x + first + 2 * W * C + C, mask=live, other=0.0).to(tl.float32)
    tl.store(y + r[:, None] * C + c[None, :], (total * 0.25).to(y.dtype.element_ty), mask=live)


@triton.jit
def pool2_back(dy, dx, W: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr):
    """A quarter of the gradient to each of four pixels; W is that of the larger image."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, CP)
    live = (c < C)[None, :]
    small = r // (2 * W) * (W // 2) + r % W // 2
    got = tl.load(dy + small[:, None] * C + c[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(dx + r[:, None] * C + c[None, :], (got * 0.25).to(dx.dtype.element_ty), mask=live)


@triton.jit
def subsample(x, y, W: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr):
    """The first of each 2x2 pixels; W is the result's."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, CP)
    live = (c < C)[None, :]
    got = tl.load(x + (r // W * 4 * W + r % W * 2)[:, None] * C + c[None, :], mask=live, other=0.0)
    tl.store(y + r[:, None] * C + c[None, :], got, mask=live)


@triton.jit
def subsample_back(dy, dx, W: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr):
    """The gradient to the first of each 2x2 pixels, zeros to the others; W is that of the larger image."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, CP)
    live = (c < C)[None, :]
    first = (r // W % 2 == 0) & (r % 2 == 0)
    small = r // (2 * W) * (W // 2) + r % W // 2
    got = tl.load(dy + small[:, None] * C + c[None, :], mask=live & first[:, None], other=0.0)
    tl.store(dx + r[:, None] * C + c[None, :], got, mask=live)


@triton.jit
def select(x, table, y, CIN: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BM: tl.constexpr):
    """Channels by number; a negative one is zeros."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, CP)
    source = tl.load(table + c, mask=c < C, other=-1)
    got = tl.load(x + r[:, None] * CIN + source[None, :], mask=(source >= 0)[None, :], other=0)
    tl.store(y + r[:, None] * C + c[None, :], got, mask=(c < C)[None, :])


@triton.jit
def linear(x, w, bias, y, m, C: tl.constexpr, N: tl.constexpr, WS: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr):
    """y (m, N) = x (m, C) times w (N, C) transposed, plus a bias; rows of w are WS apart."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, NP)
    k = tl.arange(0, 32)
    acc = tl.zeros([BM, NP], tl.float32)
    for start in range(0, C, 32):
        c = start + k
        a = tl.load(x + r[:, None] * C + c[None, :], mask=(r < m)[:, None] & (c < C)[None, :], other=0.0)
        b = tl.load(w + n[None, :] * WS + c[:, None], mask=(n < N)[None, :] & (c < C)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    acc += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    tl.store(y + r[:, None] * N + n[None, :], acc, mask=(r < m)[:, None] & (n < N)[None, :])


@triton.jit
def linear_back(dy, w, dx, m, C: tl.constexpr, N: tl.constexpr, WS: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr):
    """dx (m, C) = dy (m, N) times w (N, C)."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, NP)
    c = tl.program_id(1) * 32 + tl.arange(0, 32)
    a = tl.load(dy + r[:, None] * N + n[None, :], mask=(r < m)[:, None] & (n < N)[None, :], other=0.0)
    b = tl.load(w + n[:, None] * WS + c[None, :], mask=(n < N)[:, None] & (c < C)[None, :], other=0.0)
    out = tl.dot(a, b, input_precision="ieee")
    tl.store(dx + r[:, None] * C + c[None, :], out, mask=(r < m)[:, None] & (c < C)[None, :])


@triton.jit
def linear_weights(dy, x, dw, dbias, m, C: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr):
    """dw (N, C) = dy (m, N) transposed times x (m, C), and the sums of dy."""
    n = tl.arange(0, NP)
    c = tl.program_id(0) * 32 + tl.arange(0, 32)
    acc = tl.zeros([NP, 32], tl.float32)
    total = tl.zeros([NP], tl.float32)
    for start in range(0, m, BM):
        r = start + tl.arange(0, BM)
        a = tl.load(dy + r[None, :] * N + n[:, None], mask=(r < m)[None, :] & (n < N)[:, None], other=0.0)
        b = tl.load(x + r[:, None] * C + c[None, :], mask=(r < m)[:, None] & (c < C)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        total += tl.sum(a, 1)
    tl.store(dw + n[:, None] * C + c[None, :], acc, mask=(n < N)[:, None] & (c < C)[None, :])
    if tl.program_id(0) == 0:
        tl.store(dbias + n, total, mask=n < N)
