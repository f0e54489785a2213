// 3x3 convolutions of channels-last bf16 images of few channels, and the gradients of their weights, by mma.sync. See sm80.py.
//
// Compiled for one shape at a time: CIN, COUT, SIDE of an image, Z_STRIDE or X_STRIDE from pixel to pixel of an image that may be the first
// channels of a wider one, ROWS that a block makes, its WARPS, BLOCKS_PER_SM. A block reads its rows of pixels and one row above and below
// once, into shared memory, where all nine taps find them. There a pixel is a run of chunks of eight channels (16 bytes), swizzled: in an
// order that depends on the pixel, so that eight neighbours are never in the same banks. All sums are made in a fixed order: same input,
// same bits.

constexpr int TILE_WIDTH = SIDE + 2, TILE_HEIGHT = ROWS + 2;  // of a tile in shared memory: pixels of a row and rows, with a border
constexpr int TILE_PIXELS = TILE_HEIGHT * TILE_WIDTH;
constexpr int PIXELS = ROWS * SIDE;  // that a block makes
constexpr int THREADS = 32 * WARPS;
static_assert(SIDE % ROWS == 0 && SIDE % 8 == 0 && 32 % CIN == 0 && 32 % COUT == 0 && CIN >= 8 && COUT >= 8, "shape");

// Where a chunk of a pixel of C channels is in a tile, in bytes
template <int C> __device__ __forceinline__ u32 swizzled(u32 pixel, u32 chunk) {
    return pixel * (C * 2) + ((chunk ^ (pixel / (64 / C) & (C / 8 - 1))) << 4);
}

// The tile's pixel that the first of the nine taps reads for a pixel of the block's
__device__ __forceinline__ u32 corner_of(u32 pixel) { return pixel / SIDE * TILE_WIDTH + pixel % SIDE; }

// The chunks of a tile, dealt out to the threads, so many to each
template <int C> constexpr int TURNS = (TILE_HEIGHT * SIDE * (C / 8) + THREADS - 1) / THREADS;

struct Chunk {
    bool there, inside, mine;  // in the tile? in the image? of a pixel that this block makes?
    u32 shared, global;        // bytes from where the tile begins, chunks from where the image does
};

template <int C, int PIXEL_STRIDE> __device__ __forceinline__ Chunk chunk_of(int turn, u32 block) {
    constexpr int CHUNKS = C / 8, BLOCKS = SIDE / ROWS;
    u32 i = threadIdx.x + turn * THREADS, chunk = i % CHUNKS, column = i / CHUNKS % SIDE, row = i / CHUNKS / SIDE;
    u32 y = block % BLOCKS * ROWS + row - 1;  // above the image it is larger than any
    bool there = i < TILE_HEIGHT * SIDE * CHUNKS, inside = there && y < SIDE;
    u32 global = ((block / BLOCKS * SIDE + y) * SIDE + column) * (PIXEL_STRIDE / 8) + chunk;
    return {there, inside, inside && row > 0 && row <= ROWS, swizzled<C>(row * TILE_WIDTH + column + 1, chunk), global};
}

template <int C, int PIXEL_STRIDE> __device__ __forceinline__ void fetch_tile(u32 tile, const uint4* x, u32 block) {
#pragma unroll 4
    for (int turn = 0; turn < TURNS<C>; turn++) {
        Chunk at = chunk_of<C, PIXEL_STRIDE>(turn, block);
        if (at.there) cp_async(tile + at.shared, x + (at.inside ? at.global : 0), at.inside);
    }
}

// Zeros left and right of every row of a tile
template <int C> __device__ __forceinline__ void clear_border(u32 tile) {
    for (u32 i = threadIdx.x; i < TILE_HEIGHT * 2 * (C / 8); i += THREADS) {
        u32 chunk = i % (C / 8), side = i / (C / 8) % 2, row = i / (C / 8) / 2;
        st_shared(tile + swizzled<C>(row * TILE_WIDTH + side * (SIDE + 1), chunk), make_uint4(0, 0, 0, 0));
    }
}

#if CONVOLVES
// Forward: y = convolution of h = relu(norm(x)), plus a shortcut if there is one; moments of y if wanted.
// BACK: x is the gradient of a convolution's output, y that of the norm's output below it, z the norm's input; and the two sums
// that batch norm's backward needs. affine is (scale, shift, mean, 1 / deviation).

constexpr int CHUNKS = CIN / 8;
constexpr int TILES = PIXELS / 16 / WARPS, RUN = COUT / 8;  // of a warp: RUN tiles of 16 pixels x 8 channels beside one another
constexpr int INNER = BACK ? COUT : CIN, LINES = BACK ? CIN : COUT;  // of the weight (lines, 3, 3, inner)
constexpr int LINE_CHUNKS = 9 * INNER / 8, STRIDE = (LINE_CHUNKS | 1) * 16;  // an odd number of chunks: lines begin in different banks
static_assert(PIXELS % (16 * WARPS) == 0 && THREADS % CHUNKS == 0, "warps");

// The column of the product that makes a channel: so that a lane ends up with 2 * RUN neighbouring channels, not with pairs
__device__ __forceinline__ u32 column_of(u32 channel) {
    return channel % (2 * RUN) / 2 * 8 + channel / (2 * RUN) * 2 + channel % 2;
}

template <int N> struct alignas(4 * N) Pairs { u32 pair[N]; };  // 2 * N channels of a pixel, read and written at once

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) conv(
    const uint4* __restrict__ x, const unsigned short* __restrict__ w, unsigned short* __restrict__ y,
    const unsigned short* __restrict__ shortcut, float* __restrict__ moments, const unsigned short* __restrict__ z,
    const float* __restrict__ affine, uint4* __restrict__ h) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 tile = shared_address(memory), weights = tile + TILE_PIXELS * CIN * 2, other = weights + LINES * STRIDE;
    float* gathered = (float*)memory;  // (2, WARPS, COUT), where the tile was
    const u32 block = blockIdx.x, blocks = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#if BACK
    fetch_tile<CIN, CIN>(tile, x, block);
    constexpr int SHARE = (LINES * LINE_CHUNKS + THREADS - 1) / THREADS;
    uint4 got[SHARE];  // all reads are under way before the first is waited for
#pragma unroll
    for (int turn = 0; turn < SHARE; turn++) {
        u32 i = threadIdx.x + turn * THREADS;
        if (i < LINES * LINE_CHUNKS) got[turn] = ((const uint4*)w)[i];
    }
#pragma unroll
    for (int turn = 0; turn < SHARE; turn++) {
        u32 i = threadIdx.x + turn * THREADS;
        u32 to = weights + i / LINE_CHUNKS * STRIDE + i % LINE_CHUNKS / RUN * INNER * 2;
        const u32 pairs[4] = {got[turn].x, got[turn].y, got[turn].z, got[turn].w};
        if (i < LINES * LINE_CHUNKS)
#pragma unroll
            for (int k = 0; k < 4; k++) st_shared(to + column_of(i % RUN * 8 + 2 * k) * 2, pairs[k]);
    }
#else
    for (u32 i = threadIdx.x; i < LINES * LINE_CHUNKS; i += THREADS)
        cp_async(weights + column_of(i / LINE_CHUNKS) * STRIDE + i % LINE_CHUNKS * 16, (const uint4*)w + i, true);
    {
        uint4 got[TURNS<CIN>];
#pragma unroll
        for (int turn = 0; turn < TURNS<CIN>; turn++) {
            Chunk at = chunk_of<CIN, CIN>(turn, block);
            got[turn] = at.inside ? x[at.global] : make_uint4(0, 0, 0, 0);
        }
        float scale[8], shift[8];
        const u32 channel = threadIdx.x % CHUNKS * 8;  // the same in every turn
#pragma unroll
        for (int c = 0; c < 8; c++) scale[c] = affine[channel + c], shift[c] = affine[CIN + channel + c];
#pragma unroll
        for (int turn = 0; turn < TURNS<CIN>; turn++) {
            Chunk at = chunk_of<CIN, CIN>(turn, block);
            uint4 made = at.inside ? norm_relu(got[turn], scale, shift) : got[turn];
            if (at.mine) h[at.global] = made;
            if (at.there) st_shared(tile + at.shared, made);
        }
    }
#endif
    clear_border<CIN>(tile);
    cp_async_commit_group();
    const uint4* later = (const uint4*)(BACK ? z : shortcut);  // needed at the end, copied meanwhile
    for (u32 i = threadIdx.x; later && i < PIXELS * COUT / 8; i += THREADS)
        cp_async(other + i * 16, later + (block * PIXELS + i / (COUT / 8)) * (Z_STRIDE / 8) + i % (COUT / 8), true);
    cp_async_commit_group();
    cp_async_wait_group<1>();
    __syncthreads();

    float sum[TILES][RUN][4];
    u32 corner[TILES];
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
    const u32 half = lane / 16;
#pragma unroll
    for (int step = 0; step < STEPS + (CIN == 8); step++) {
        u32 mine = min(2 * step + half, (u32)LAST), tap = mine / CHUNKS;  // chunk of the product's rows that this lane reads
        u32 a[TILES][4], b[RUN][2];
#pragma unroll
        for (int m = 0; m < TILES; m++)
            ldmatrix_x4(a[m], tile + swizzled<CIN>(corner[m] + tap / 3 * TILE_WIDTH + tap % 3, mine % CHUNKS));
        u32 rows = min(2 * step + lane / 8 % 2, (u32)LAST);
#pragma unroll
        for (int n = 0; n < RUN; n += 2) {  // two tiles at once; an only one is read twice
            u32 beside = RUN > 1 ? n + half : n;
            u32 got[4];
#if BACK
            u32 line = rows % CHUNKS * 8 + lane % 8;
            ldmatrix_x4_trans(got, weights + line * STRIDE + (8 - rows / CHUNKS) * INNER * 2 + beside * 16);
#else
            ldmatrix_x4(got, weights + (beside * 8 + lane % 8) * STRIDE + rows * 16);
#endif
            b[n][0] = got[0], b[n][1] = got[1];
            if (n + 1 < RUN) b[n + 1][0] = got[2], b[n + 1][1] = got[3];
        }
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int n = 0; n < RUN; n++)
                if (step == STEPS) mma_m16n8k8(sum[m][n], a[m][0], a[m][1], b[n][0]);
                else mma_m16n8k16(sum[m][n], a[m], b[n][0], b[n][1]);
    }

    cp_async_wait_group<0>();
    __syncthreads();  // from here on nobody reads the tile

    // A lane has rows lane / 4 and lane / 4 + 8 of each tile.
    const u32 channel = lane % 4 * 2 * RUN;
    float one[2 * RUN], two[2 * RUN];
#pragma unroll
    for (int c = 0; c < 2 * RUN; c++) one[c] = two[c] = 0;
#if BACK
    float scale[2 * RUN], shift[2 * RUN], mean[2 * RUN];
#pragma unroll
    for (int c = 0; c < 2 * RUN; c++)
        scale[c] = affine[channel + c], shift[c] = affine[Z_STRIDE + channel + c], mean[c] = affine[2 * Z_STRIDE + channel + c];
#endif
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            u32 at = (block * PIXELS + (warp * TILES + m) * 16 + lane / 4 + 8 * lower) * COUT + channel;
            Pairs<RUN> out, copied = *(const Pairs<RUN>*)(memory + (other - tile) + (at - block * PIXELS * COUT) * 2);
#pragma unroll
            for (int c = 0; c < 2 * RUN; c++) {
                float& v = sum[m][c / 2][2 * lower + c % 2];
                float read = c % 2 ? high(copied.pair[c / 2]) : low(copied.pair[c / 2]);
#if BACK
                v = fmaf(read, scale[c], shift[c]) > 0 ? v : 0.0f;
                one[c] += v;
                two[c] = fmaf(v, read - mean[c], two[c]);
#else
                if (shortcut) v += read;
#endif
            }
#pragma unroll
            for (int n = 0; n < RUN; n++) out.pair[n] = cvt_bf16x2(sum[m][n][2 * lower], sum[m][n][2 * lower + 1]);
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
    if (!moments) return;

#pragma unroll
    for (int c = 0; c < 2 * RUN; c++) {
        one[c] = sum_over_rows(one[c]);
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
        two[c] = sum_over_rows(two[c]);
        if (lane < 4) gathered[warp * COUT + channel + c] = one[c], gathered[(WARPS + warp) * COUT + channel + c] = two[c];
    }
    __syncthreads();
    if (threadIdx.x < COUT) {
        const u32 c = threadIdx.x;
        float one = 0, two = 0;
#pragma unroll
        for (int m = 0; m < WARPS; m++) one += gathered[m * COUT + c], two += gathered[(WARPS + m) * COUT + c];
#if BACK
        two *= affine[3 * Z_STRIDE + c];
#else
        one /= WARPS;
#pragma unroll
        for (int m = 0; m < WARPS; m++) {
            float off = gathered[m * COUT + c] - one;
            two = fmaf(off * (TILES * 16), off, two);
        }
#endif
        moments[c * blocks + block] = one;
        moments[(COUT + c) * blocks + block] = two;
    }
}

#else
// partial[block, o, tap, i] = sum over a block's pixels of dy[pixel, o] * x[pixel + tap, i], of several layers. A block makes one tile of
// pixels after another, the next being copied meanwhile. A warp has eight inputs, all outputs, all taps, and its share of the pixels.

constexpr int WARPS_IN = CIN / 8, SHARES = WARPS / WARPS_IN, TILES = COUT < 16 ? 1 : COUT / 16;
static_assert(WARPS % WARPS_IN == 0 && PIXELS % (16 * SHARES) == 0, "warps");
constexpr int IMAGE_BYTES = (TILE_PIXELS * CIN * 2 + 127) / 128 * 128, STAGE_BYTES = IMAGE_BYTES + PIXELS * COUT * 2;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) weights(
    const __grid_constant__ Images images, const __grid_constant__ Images gradients, const __grid_constant__ Sums partials, u32 tiles) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint4 *x = images.of[blockIdx.y], *dy = gradients.of[blockIdx.y];
    float* partial = partials.of[blockIdx.y];
    const u32 stages[2] = {shared_address(memory), shared_address(memory) + STAGE_BYTES};
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, input = warp % WARPS_IN, share = warp / WARPS_IN;

    auto fetch = [&](u32 number, u32 tile) {
        fetch_tile<CIN, X_STRIDE>(tile, x, number);
        for (u32 i = threadIdx.x; i < PIXELS * (COUT / 8); i += THREADS)
            cp_async(tile + IMAGE_BYTES + swizzled<COUT>(i / (COUT / 8), i % (COUT / 8)), dy + number * PIXELS * (COUT / 8) + i, true);
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
    cp_async_commit_group();
    int stage = 0;
    for (u32 number = blockIdx.x; number < tiles; number += gridDim.x, stage = 1 - stage) {
        cp_async_wait_group<0>();
        __syncthreads();
        if (number + gridDim.x < tiles) fetch(number + gridDim.x, stage ? stages[0] : stages[1]);
        cp_async_commit_group();
        const u32 tile = stage ? stages[1] : stages[0], gradient = tile + IMAGE_BYTES;
#pragma unroll 2
        for (u32 step = share; step < PIXELS / 16; step += SHARES) {
            u32 a[TILES][4];
#pragma unroll
            for (int o = 0; o < TILES; o++) {
                u32 pixel = step * 16 + lane % 8 + lane / 16 * 8, chunk = COUT == 8 ? 0 : 2 * o + lane / 8 % 2;
                ldmatrix_x4_trans(a[o], gradient + swizzled<COUT>(pixel, chunk));
                if (COUT == 8) a[o][1] = a[o][3] = 0;  // the product has 16 outputs
            }
            const u32 corner = corner_of(step * 16 + lane % 16);
#pragma unroll
            for (int tap = 0; tap < 9; tap += 2) {  // two at once, the last one alone
                u32 mine = min(tap + lane / 16, 8u);
                u32 b[4];
                ldmatrix_x4_trans(b, tile + swizzled<CIN>(corner + mine / 3 * TILE_WIDTH + mine % 3, input));
#pragma unroll
                for (int o = 0; o < TILES; o++) {
                    mma_m16n8k16(sum[o][tap], a[o], b[0], b[1]);
                    if (tap < 8) mma_m16n8k16(sum[o][tap + 1], a[o], b[2], b[3]);
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
            float* at = others + (i * WARPS_IN + input) * 32 + lane;
            if (share == s) *at = sum[i / 36][i / 4 % 9][i % 4];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TILES * 36; i++) {
            const float* at = others + (i * WARPS_IN + input) * 32 + lane;
            if (share == 0) sum[i / 36][i / 4 % 9][i % 4] += *at;
        }
    }
    if (share) return;
#pragma unroll
    for (int o = 0; o < TILES; o++)
#pragma unroll
        for (int lower = 0; lower < (COUT == 8 ? 1 : 2); lower++)
#pragma unroll
            for (int tap = 0; tap < 9; tap++) {
                u32 line = blockIdx.x * COUT + o * 16 + lane / 4 + 8 * lower;
                *(float2*)(partial + (line * 9 + tap) * CIN + input * 8 + lane % 4 * 2) =
                    make_float2(sum[o][tap][2 * lower], sum[o][tap][2 * lower + 1]);
            }
}
#endif
