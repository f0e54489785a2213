// 3x3 convolutions of channels-last bf16 images of few channels, and the gradients of their weights. See cuda.py.
//
// Compiled for one shape at a time: CIN, COUT, SIDE of an image, ROWS that a block makes, WARPS of it, RESIDENT blocks of a
// processor. A block reads its rows of pixels and one row above and below once, into shared memory, where all nine taps find
// them. There a pixel is a run of chunks of eight channels (16 bytes), in an order that depends on the pixel, so that eight
// neighbours are never in the same banks. All sums are made in a fixed order: same input, same bits.

constexpr int PITCH = SIDE + 2, TALL = ROWS + 2;  // of a tile in shared memory: pixels of a row and rows, with a border
constexpr int SPOTS = TALL * PITCH;
constexpr int PIXELS = ROWS * SIDE;               // that a block makes
constexpr int THREADS = 32 * WARPS;
static_assert(SIDE % ROWS == 0 && SIDE % 8 == 0 && 32 % CIN == 0 && 32 % COUT == 0 && CIN >= 8 && COUT >= 8, "shape");

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Sums over lanes, always in the same order: over the eight that have a column of a product in common, and over all
__device__ __forceinline__ float over_rows(float x) {
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) x += across(x, bit);
    return x;
}
__device__ __forceinline__ float over_lanes(float x) {
    x += across(x, 1);
    x += across(x, 2);
    return over_rows(x);
}

// Where a chunk of a pixel of C channels is, in bytes from the first
template <int C> __device__ __forceinline__ u32 place(int spot, int chunk) {
    return spot * (C * 2) + ((chunk ^ (spot / (64 / C) & (C / 8 - 1))) << 4);
}

// The spot of a pixel of this block's under the first of the nine taps
__device__ __forceinline__ int corner_of(int pixel) { return pixel / SIDE * PITCH + pixel % SIDE; }

// For each chunk of a tile: action(address in shared memory, number in global memory, in the image?, made by this block?)
template <int C, class Action> __device__ __forceinline__ void each_chunk(u32 tile, int block, Action action) {
    constexpr int CHUNKS = C / 8, BLOCKS = SIDE / ROWS;
#pragma unroll 4
    for (int i = threadIdx.x; i < TALL * SIDE * CHUNKS; i += THREADS) {
        int chunk = i % CHUNKS, column = i / CHUNKS % SIDE, row = i / CHUNKS / SIDE;
        int y = block % BLOCKS * ROWS + row - 1;
        bool inside = y >= 0 && y < SIDE;
        long number = ((long)(block / BLOCKS * SIDE + y) * SIDE + column) * CHUNKS + chunk;
        action(tile + place<C>(row * PITCH + column + 1, chunk), number, inside, inside && row > 0 && row <= ROWS);
    }
}

// Zeros left and right of every row of a tile
template <int C> __device__ __forceinline__ void clear_border(u32 tile) {
    for (int i = threadIdx.x; i < TALL * 2 * (C / 8); i += THREADS) {
        int chunk = i % (C / 8), side = i / (C / 8) % 2, row = i / (C / 8) / 2;
        put(tile + place<C>(row * PITCH + side * (SIDE + 1), chunk), make_uint4(0, 0, 0, 0));
    }
}

#if CONVOLVES
// Forward: y = convolution of h = relu(norm(x)), plus a shortcut if there is one; mean and squares of y if wanted. The norm is by
// x's own mean and squares, and what the way back has to know of it is kept in affine: (scale, shift, mean, 1 / deviation).
// BACK: x is the gradient of a convolution's output, y that of the norm's output below it, z the norm's input; and the two sums
// that batch norm's backward needs. What is summed over all pixels is left by each block in `partial`, (2, COUT, blocks), and
// added up by the block that is done last, which `done` tells.

constexpr int CHUNKS = CIN / 8;
constexpr int TILES = PIXELS / 16 / WARPS, RUN = COUT / 8;  // of a warp: RUN tiles of 16 pixels x 8 channels beside one another
constexpr int INNER = BACK ? COUT : CIN, LINES = BACK ? CIN : COUT;  // of the weight (lines, 3, 3, inner)
constexpr int LINE_CHUNKS = 9 * INNER / 8, STRIDE = (LINE_CHUNKS | 1) * 16;  // in bytes, odd: lines begin in different banks
static_assert(PIXELS % (16 * WARPS) == 0 && THREADS % CHUNKS == 0, "warps");

// The column of the product that makes a channel: so that a lane ends up with 2 * RUN neighbouring channels, not with pairs
__device__ __forceinline__ int column_of(int channel) {
    return channel % (2 * RUN) / 2 * 8 + channel / (2 * RUN) * 2 + channel % 2;
}

template <int N> struct alignas(4 * N) Pairs { u32 pair[N]; };  // 2 * N channels of a pixel, read and written at once

struct Norm {  // of CIN channels: what it reads, and what it brings up to date (perhaps nothing)
    const float *moments, *gamma, *beta;
    float *mean, *var;
    float momentum, eps;
    int pixels;
};

struct Affine { float scale, shift, mean, rstd; };

__device__ __forceinline__ Affine affine_of(const Norm& norm, int c) {
    float mean = norm.moments[c], rstd = 1 / sqrtf(norm.moments[CIN + c] / norm.pixels + norm.eps), scale = norm.gamma[c] * rstd;
    return {scale, norm.beta[c] - mean * scale, mean, rstd};
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) conv(
    const uint4* __restrict__ x, const unsigned short* __restrict__ w, unsigned short* __restrict__ y,
    const unsigned short* __restrict__ shortcut, const unsigned short* __restrict__ z, uint4* __restrict__ h,
    float* __restrict__ affine, float* __restrict__ sums, float* partial, u32* done, Norm norm) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 tile = shared_address(memory), weights = tile + SPOTS * CIN * 2;
    float* gathered = (float*)(memory + SPOTS * CIN * 2 + LINES * STRIDE);  // (2, WARPS, COUT)
    const int block = blockIdx.x, blocks = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#if BACK
    each_chunk<CIN>(tile, block, [&](u32 to, long number, bool inside, bool) { copy_later(to, x + (inside ? number : 0), inside); });
    for (int i = threadIdx.x; i < LINES * LINE_CHUNKS; i += THREADS) {
        u32 to = weights + i / LINE_CHUNKS * STRIDE + i % LINE_CHUNKS / RUN * INNER * 2;
        uint4 got = ((const uint4*)w)[i];
        const u32 pairs[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
        for (int k = 0; k < 4; k++) put(to + column_of(i % RUN * 8 + 2 * k) * 2, pairs[k]);
    }
#else
    for (int i = threadIdx.x; i < LINES * LINE_CHUNKS; i += THREADS)
        copy_later(weights + column_of(i / LINE_CHUNKS) * STRIDE + i % LINE_CHUNKS * 16, (const uint4*)w + i, true);
    {
        float scale[8], shift[8];
        const int channel = threadIdx.x % CHUNKS * 8;  // the same in every turn
#pragma unroll
        for (int c = 0; c < 8; c++) {
            Affine found = affine_of(norm, channel + c);
            scale[c] = found.scale, shift[c] = found.shift;
        }
        each_chunk<CIN>(tile, block, [&](u32 to, long number, bool inside, bool mine) {
            uint4 got = make_uint4(0, 0, 0, 0);
            if (inside) {
                got = x[number];
                u32 pairs[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
                for (int k = 0; k < 4; k++)
                    pairs[k] = rounded(relu(fmaf(low(pairs[k]), scale[2 * k], shift[2 * k])),
                                       relu(fmaf(high(pairs[k]), scale[2 * k + 1], shift[2 * k + 1])));
                got = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
                if (mine) h[number] = got;
            }
            put(to, got);
        });
    }
#endif
    clear_border<CIN>(tile);
    end_of_copies();
    wait_for_copies<0>();
    __syncthreads();

    float sum[TILES][RUN][4];
    int corner[TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        corner[m] = corner_of((warp * TILES + m) * 16 + lane % 16);
#pragma unroll
        for (int n = 0; n < RUN; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][n][i] = 0;
    }
    // A step is 16 rows of the product, 16 channels under one tap; of 8 channels it is two taps, and one tap is left at the end.
    constexpr int STEPS = 9 * CIN / 16, LAST = 9 * CHUNKS - 1;
    const int half = lane / 16;
#pragma unroll
    for (int step = 0; step < STEPS + (CIN == 8); step++) {
        int mine = min(2 * step + half, LAST), tap = mine / CHUNKS;  // chunk of the product's rows that this lane reads
        u32 a[TILES][4], b[RUN][2];
#pragma unroll
        for (int m = 0; m < TILES; m++)
            load4(a[m], tile + place<CIN>(corner[m] + tap / 3 * PITCH + tap % 3, mine % CHUNKS));
        int rows = min(2 * step + lane / 8 % 2, LAST);
#pragma unroll
        for (int n = 0; n < RUN; n += 2) {  // two tiles at once; an only one is read twice
            int beside = RUN > 1 ? n + half : n;
            u32 got[4];
#if BACK
            int line = rows % CHUNKS * 8 + lane % 8;
            load4_turned(got, weights + line * STRIDE + (8 - rows / CHUNKS) * INNER * 2 + beside * 16);
#else
            load4(got, weights + (beside * 8 + lane % 8) * STRIDE + rows * 16);
#endif
            b[n][0] = got[0], b[n][1] = got[1];
            if (n + 1 < RUN) b[n + 1][0] = got[2], b[n + 1][1] = got[3];
        }
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < RUN; n++)
                if (step == STEPS) multiply8(sum[m][n], a[m][0], a[m][1], b[n][0]);
                else multiply16(sum[m][n], a[m], b[n][0], b[n][1]);
    }

    // A lane has rows lane / 4 and lane / 4 + 8 of each tile.
    const int channel = lane % 4 * 2 * RUN;
    float one[2 * RUN], two[2 * RUN];
#pragma unroll
    for (int c = 0; c < 2 * RUN; c++) one[c] = two[c] = 0;
#if BACK
    float scale[2 * RUN], shift[2 * RUN], mean[2 * RUN];
#pragma unroll
    for (int c = 0; c < 2 * RUN; c++)
        scale[c] = affine[channel + c], shift[c] = affine[COUT + channel + c], mean[c] = affine[2 * COUT + channel + c];
#endif
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            long at = ((long)block * PIXELS + (warp * TILES + m) * 16 + lane / 4 + 8 * lower) * COUT + channel;
            Pairs<RUN> out, other;
#if BACK
            other = *(const Pairs<RUN>*)(z + at);
#else
            if (shortcut) other = *(const Pairs<RUN>*)(shortcut + at);
#endif
#pragma unroll
            for (int c = 0; c < 2 * RUN; c++) {
                float& v = sum[m][c / 2][2 * lower + c % 2];
                float read = c % 2 ? high(other.pair[c / 2]) : low(other.pair[c / 2]);
#if BACK
                v = fmaf(read, scale[c], shift[c]) > 0 ? v : 0.0f;
                one[c] += v;
                two[c] = fmaf(v, read - mean[c], two[c]);
#else
                if (shortcut) v += read;
#endif
            }
#pragma unroll
            for (int n = 0; n < RUN; n++) out.pair[n] = rounded(sum[m][n][2 * lower], sum[m][n][2 * lower + 1]);
            *(Pairs<RUN>*)(y + at) = out;
#if !BACK
#pragma unroll
            for (int c = 0; c < 2 * RUN; c++) {  // moments are those of what was written
                float& v = sum[m][c / 2][2 * lower + c % 2];
                v = c % 2 ? high(out.pair[c / 2]) : low(out.pair[c / 2]);
                one[c] += v;
            }
#endif
        }
#if !BACK
    if (block == 0 && threadIdx.x < CIN) {
        const int c = threadIdx.x;
        Affine found = affine_of(norm, c);
        affine[c] = found.scale, affine[CIN + c] = found.shift, affine[2 * CIN + c] = found.mean, affine[3 * CIN + c] = found.rstd;
        if (norm.mean) {
            float var = norm.moments[CIN + c] / (norm.pixels - 1);
            norm.mean[c] += norm.momentum * (found.mean - norm.mean[c]);
            norm.var[c] += norm.momentum * (var - norm.var[c]);
        }
    }
#endif
    if (!sums) return;

#pragma unroll
    for (int c = 0; c < 2 * RUN; c++) {
        one[c] = over_rows(one[c]);
#if !BACK
        one[c] /= TILES * 16;  // the warp's mean, about which the squares are taken
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int lower = 0; lower < 2; lower++) {
                float off = sum[m][c / 2][2 * lower + c % 2] - one[c];
                two[c] = fmaf(off, off, two[c]);
            }
#endif
        two[c] = over_rows(two[c]);
        if (lane < 4) gathered[warp * COUT + channel + c] = one[c], gathered[(WARPS + warp) * COUT + channel + c] = two[c];
    }
    __syncthreads();
    if (threadIdx.x < COUT) {
        const int c = threadIdx.x;
        float one = 0, two = 0;
#pragma unroll
        for (int m = 0; m < WARPS; m++) one += gathered[m * COUT + c], two += gathered[(WARPS + m) * COUT + c];
#if BACK
        two *= affine[3 * COUT + c];
#else
        one /= WARPS;
#pragma unroll
        for (int m = 0; m < WARPS; m++) {
            float off = gathered[m * COUT + c] - one;
            two = fmaf(off * (TILES * 16), off, two);
        }
#endif
        partial[c * blocks + block] = one;
        partial[(COUT + c) * blocks + block] = two;
    }
    if (!last_block(done, blocks)) return;
    for (int c = warp; c < COUT; c += WARPS) {
        float one = 0, two = 0;
        for (int i = lane; i < blocks; i += 32) one += fresh(partial + c * blocks + i), two += fresh(partial + (COUT + c) * blocks + i);
        one = over_lanes(one), two = over_lanes(two);
#if !BACK
        one /= blocks;
        float apart = 0;
        for (int i = lane; i < blocks; i += 32) {
            float off = fresh(partial + c * blocks + i) - one;
            apart = fmaf(off, off, apart);
        }
        two += over_lanes(apart) * PIXELS;
#endif
        if (lane == 0) sums[c] = one, sums[COUT + c] = two;
    }
}

#else
// partial[block, o, tap, i] = sum over a block's pixels of dy[pixel, o] * x[pixel + tap, i]. A block makes one tile of pixels after
// another, the next being fetched meanwhile. A warp has eight inputs, all outputs, all taps, and its share of the pixels.

constexpr int WARPS_IN = CIN / 8, SHARES = WARPS / WARPS_IN, TILES = COUT < 16 ? 1 : COUT / 16;
static_assert(WARPS % WARPS_IN == 0 && PIXELS % (16 * SHARES) == 0, "warps");
constexpr int IMAGE_BYTES = (SPOTS * CIN * 2 + 127) / 128 * 128, STAGE_BYTES = IMAGE_BYTES + PIXELS * COUT * 2;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) weights(
    const uint4* __restrict__ x, const uint4* __restrict__ dy, float* __restrict__ partial, int tiles) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 stages[2] = {shared_address(memory), shared_address(memory) + STAGE_BYTES};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, input = warp % WARPS_IN, share = warp / WARPS_IN;

    auto fetch = [&](int number, u32 tile) {
        each_chunk<CIN>(tile, number, [&](u32 to, long from, bool inside, bool) { copy_later(to, x + (inside ? from : 0), inside); });
#pragma unroll 4
        for (int i = threadIdx.x; i < PIXELS * (COUT / 8); i += THREADS)
            copy_later(tile + IMAGE_BYTES + place<COUT>(i / (COUT / 8), i % (COUT / 8)), dy + (long)number * PIXELS * (COUT / 8) + i, true);
    };

    float sum[TILES][9][4];
#pragma unroll
    for (int o = 0; o < TILES; o++)
#pragma unroll
        for (int tap = 0; tap < 9; tap++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[o][tap][i] = 0;

    clear_border<CIN>(stages[0]);
    clear_border<CIN>(stages[1]);
    fetch(blockIdx.x, stages[0]);
    end_of_copies();
    int stage = 0;
    for (int number = blockIdx.x; number < tiles; number += gridDim.x, stage = 1 - stage) {
        wait_for_copies<0>();
        __syncthreads();
        if (number + gridDim.x < tiles) fetch(number + gridDim.x, stage ? stages[0] : stages[1]);
        end_of_copies();
        const u32 tile = stage ? stages[1] : stages[0], gradient = tile + IMAGE_BYTES;
#pragma unroll 2
        for (int step = share; step < PIXELS / 16; step += SHARES) {
            u32 a[TILES][4];
#pragma unroll
            for (int o = 0; o < TILES; o++) {
                int pixel = step * 16 + lane % 8 + lane / 16 * 8, chunk = COUT == 8 ? 0 : 2 * o + lane / 8 % 2;
                load4_turned(a[o], gradient + place<COUT>(pixel, chunk));
                if (COUT == 8) a[o][1] = a[o][3] = 0;  // the product has 16 outputs
            }
            const int corner = corner_of(step * 16 + lane % 16);
#pragma unroll
            for (int tap = 0; tap < 9; tap += 2) {  // two at once, the last one alone
                int mine = min(tap + lane / 16, 8);
                u32 b[4];
                load4_turned(b, tile + place<CIN>(corner + mine / 3 * PITCH + mine % 3, input));
#pragma unroll
                for (int o = 0; o < TILES; o++) {
                    multiply16(sum[o][tap], a[o], b[0], b[1]);
                    if (tap < 8) multiply16(sum[o][tap + 1], a[o], b[2], b[3]);
                }
            }
        }
    }
    float* others = (float*)memory;
#pragma unroll 1
    for (int s = 1; s < SHARES; s++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILES * 36; i++) {
            float* spot = others + (i * WARPS_IN + input) * 32 + lane;
            if (share == s) *spot = sum[i / 36][i / 4 % 9][i % 4];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILES * 36; i++) {
            const float* spot = others + (i * WARPS_IN + input) * 32 + lane;
            if (share == 0) sum[i / 36][i / 4 % 9][i % 4] += *spot;
        }
    }
    if (share) return;
#pragma unroll
    for (int o = 0; o < TILES; o++)
#pragma unroll
        for (int lower = 0; lower < (COUT == 8 ? 1 : 2); lower++)
#pragma unroll
            for (int tap = 0; tap < 9; tap++) {
                long line = (long)blockIdx.x * COUT + o * 16 + lane / 4 + 8 * lower;
                *(float2*)(partial + (line * 9 + tap) * CIN + input * 8 + lane % 4 * 2) =
                    make_float2(sum[o][tap][2 * lower], sum[o][tap][2 * lower + 1]);
            }
}
#endif
