"""3x3 convolutions over channels-last bf16 images and their weights' gradients, in Triton's language. See triton.py.

Images are matrices here: one row per pixel, one column per channel. A program makes BM rows. What batch norm has to know of
a convolution's output (means, squared deviations, gradient sums) is gathered by the convolution while it has the numbers
at hand, one partial result per program, summed in a fixed order afterwards: same input, same bits.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from nestling.kernels.elementwise_kernels import partial_moments, through_norm


@triton.jit
def conv(
    x, w, y, extra, moments, z, affine,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr,
    WK: tl.constexpr, WN: tl.constexpr, WT: tl.constexpr, FLIP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TAPS: tl.constexpr, STAGES: tl.constexpr,
    ADD: tl.constexpr, MOMENTS: tl.constexpr, BACK: tl.constexpr, Z_STRIDE: tl.constexpr,
):  # fmt: skip
    """y[pixel, n] = sum over taps and k of x[pixel + tap, k] * w[k * WK + n * WN + tap * WT]; TAPS of them at a time.

    ADD adds `extra` (a shortcut). MOMENTS gathers y's moments. BACK takes y, a gradient, on through relu and gathers the
    sums that batch norm's backward needs (moments then are: sum of g, sum of g times normalised input); z and affine are then
    the first channels of Z_STRIDE."""
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    rows = block * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    at_w = rows % W
    at_h = rows // W % H
    CHUNKS: tl.constexpr = (CIN + BK - 1) // BK
    TURNS: tl.constexpr = 3 if TAPS == 3 else 9 * CHUNKS
    WHOLE: tl.constexpr = TAPS == 1 and CIN % BK == 0
    acc = tl.zeros([BM, BN], tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        if TAPS == 3:  # a row of taps is one run of memory
            dh = turn - 1
            tap = 3 * turn + ks // CIN
            k = ks % CIN
            run = ks - CIN
            wide = (at_w[:, None] > 0) | (ks >= CIN)[None, :]
            wide = wide & ((at_w[:, None] < W - 1) | (ks < 2 * CIN)[None, :]) & (ks < 3 * CIN)[None, :]
            known = ks < 3 * CIN
        else:
            tap = turn // CHUNKS
            dh = tap // 3 - 1
            dw = tap % 3 - 1
            k = turn % CHUNKS * BK + ks
            run = k + dw * CIN
            wide = ((at_w + dw >= 0) & (at_w + dw < W))[:, None]
            known = k < CIN
            if not WHOLE:
                wide = wide & known[None, :]
        inside = ((at_h + dh >= 0) & (at_h + dh < H))[:, None] & wide
        if FLIP:
            side = 8 - tap
        else:
            side = tap
        # Asking L1 to keep what neighbours read again was measured to make no difference; it is how the tiles were timed.
        a = tl.load(x + (rows + dh * W)[:, None] * CIN + run[None, :], mask=inside, other=0.0, cache_modifier=".ca")
        place = w + (k * WK + side * WT)[:, None] + cols[None, :] * WN
        if WHOLE and COUT % BN == 0:
            b = tl.load(place, cache_modifier=".ca")
        else:
            b = tl.load(place, mask=known[:, None] & (cols < COUT)[None, :], other=0.0, cache_modifier=".ca")
        acc = tl.dot(a, b, acc)
    live = cols < COUT
    at = rows[:, None] * COUT + cols[None, :]
    if BACK:
        before = tl.load(z + rows[:, None] * Z_STRIDE + cols[None, :], mask=live[None, :], other=0.0).to(tl.float32)
        g, normed = through_norm(acc, before, affine, cols, live, Z_STRIDE)
        tl.store(y + at, g.to(y.dtype.element_ty), mask=live[None, :])
        tl.store(moments + cols * blocks + block, tl.sum(g, 0), mask=live)
        tl.store(moments + (COUT + cols) * blocks + block, tl.sum(g * normed, 0), mask=live)
    else:
        if ADD:
            acc += tl.load(extra + at, mask=live[None, :], other=0.0).to(tl.float32)
        out = acc.to(y.dtype.element_ty)
        tl.store(y + at, out, mask=live[None, :])
        if MOMENTS:
            partial_moments(out.to(tl.float32), rows, live, moments, block, blocks, cols, COUT, BM)


@triton.jit
def weight_gradient(
    x, dy, partial, pixels, per_split,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, X_STRIDE: tl.constexpr,
    BP: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """partial[split, o, tap, i] = sum over a split's pixels of dy[pixel, o] * x[pixel + tap, i]; a row of taps a program. The
    channels of x are the first of X_STRIDE."""
    split = tl.program_id(0)
    dh = tl.program_id(1) - 1
    TILES: tl.constexpr = (CIN + BI - 1) // BI
    o = tl.program_id(2) // TILES * BO + tl.arange(0, BO)
    i = tl.program_id(2) % TILES * BI + tl.arange(0, BI)
    acc0 = tl.zeros([BO, BI], tl.float32)
    acc1 = tl.zeros([BO, BI], tl.float32)
    acc2 = tl.zeros([BO, BI], tl.float32)
    for start in tl.range(split * per_split, (split + 1) * per_split, BP, num_stages=STAGES):
        rows = start + tl.arange(0, BP)
        at_w = rows % W
        at_h = rows // W % H + dh
        tall = (at_h >= 0) & (at_h < H) & (rows < pixels)
        d = tl.load(
            dy + rows[None, :] * COUT + o[:, None], mask=(o < COUT)[:, None] & (rows < pixels)[None, :], other=0.0
        )
        base = x + (rows + dh * W)[:, None] * X_STRIDE + i[None, :]
        wide = (i < CIN)[None, :]
        left = tl.load(base - X_STRIDE, mask=(tall & (at_w > 0))[:, None] & wide, other=0.0, cache_modifier=".ca")
        acc0 = tl.dot(d, left, acc0)
        middle = tl.load(base, mask=tall[:, None] & wide, other=0.0, cache_modifier=".ca")
        acc1 = tl.dot(d, middle, acc1)
        right = tl.load(base + X_STRIDE, mask=(tall & (at_w < W - 1))[:, None] & wide, other=0.0, cache_modifier=".ca")
        acc2 = tl.dot(d, right, acc2)
    live = (o < COUT)[:, None] & (i < CIN)[None, :]
    out = partial + split * (COUT * 9 * CIN) + o[:, None] * (9 * CIN) + (dh + 1) * (3 * CIN) + i[None, :]
    tl.store(out, acc0, mask=live)
    tl.store(out + CIN, acc1, mask=live)
    tl.store(out + 2 * CIN, acc2, mask=live)


@triton.jit
def weight_gradient_narrow(
    x, dy, partial, pixels, per_split,
    H: tl.constexpr, W: tl.constexpr, CIN: tl.constexpr, COUT: tl.constexpr, X_STRIDE: tl.constexpr,
    BP: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for few channels: a row of taps is 3 * CIN numbers, and a program does all three rows."""
    split = tl.program_id(0)
    o = tl.arange(0, BO)
    k = tl.arange(0, BI)
    acc0 = tl.zeros([BO, BI], tl.float32)
    acc1 = tl.zeros([BO, BI], tl.float32)
    acc2 = tl.zeros([BO, BI], tl.float32)
    for start in tl.range(split * per_split, (split + 1) * per_split, BP, num_stages=STAGES):
        rows = start + tl.arange(0, BP)
        at_w = (rows % W)[:, None]
        at_h = rows // W % H
        known = rows < pixels
        d = tl.load(dy + rows[None, :] * COUT + o[:, None], mask=(o < COUT)[:, None] & known[None, :], other=0.0)
        wide = ((at_w > 0) | (k >= CIN)[None, :]) & ((at_w < W - 1) | (k < 2 * CIN)[None, :])
        wide = wide & (k < 3 * CIN)[None, :] & known[:, None]
        if X_STRIDE == CIN:
            run = k - CIN
        else:
            run = (k // CIN - 1) * X_STRIDE + k % CIN
        base = x + rows[:, None] * X_STRIDE + run[None, :]
        above = tl.load(base - W * X_STRIDE, mask=wide & (at_h > 0)[:, None], other=0.0, cache_modifier=".ca")
        acc0 = tl.dot(d, above, acc0)
        level = tl.load(base, mask=wide, other=0.0, cache_modifier=".ca")
        acc1 = tl.dot(d, level, acc1)
        below = tl.load(base + W * X_STRIDE, mask=wide & (at_h < H - 1)[:, None], other=0.0, cache_modifier=".ca")
        acc2 = tl.dot(d, below, acc2)
    live = (o < COUT)[:, None] & (k < 3 * CIN)[None, :]
    out = partial + split * (COUT * 9 * CIN) + o[:, None] * (9 * CIN) + k[None, :]
    tl.store(out, acc0, mask=live)
    tl.store(out + 3 * CIN, acc1, mask=live)
    tl.store(out + 6 * CIN, acc2, mask=live)
