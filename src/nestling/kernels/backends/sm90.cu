// 3x3 convolutions of channels-last bf16 images, and the gradients of their weights, by wgmma, whose operands are in shared memory.
// See sm90.py.
//
// Compiled for one shape at a time: CIN and COUT (16, 32 or multiples of 64), SIDE of an image, ROWS of it and IMAGES that a block
// makes, its WARPGROUPS, BLOCKS_PER_SM, and Z_STRIDE or X_STRIDE from pixel to pixel of an image that may be the first channels of a wider
// one. A tile is in shared memory as wgmma expects it: of every pixel a line of up to 64 channels (beyond them, there is another plane),
// swizzled. Pixels lie row by row, one of zeros before each row, and a row above and below each image. A product takes 8x8 pixels, eight
// runs of eight, a row apart: under the next tap they begin a pixel later, and that is all. Sums are made in a fixed order: same input,
// same bits.

__device__ constexpr int lesser(int a, int b) { return a < b ? a : b; }

constexpr int TILE_WIDTH = SIDE + 1, TILE_HEIGHT = IMAGES * (ROWS + 1) + 1;  // with a border
constexpr int K_CHANNELS = lesser(CIN, 64), LINE_BYTES = K_CHANNELS * 2;  // channels of a plane, and bytes of its lines
constexpr int PLANE_BYTES = ((TILE_HEIGHT * TILE_WIDTH + 3) * LINE_BYTES + 1023) / 1024 * 1024;
constexpr int PIXELS = IMAGES * ROWS * SIDE, PATCHES = PIXELS / 64;  // that a block makes
constexpr int N_CHANNELS = lesser(COUT, 64), N_PARTS = COUT / N_CHANNELS;  // channels that a block makes
constexpr int THREADS = 128 * WARPGROUPS, WARPS = 4 * WARPGROUPS;
static_assert(ROWS % 8 == 0 && SIDE % ROWS == 0 && (IMAGES == 1 || ROWS == SIDE), "whole images, or a part of one");
static_assert(CIN % K_CHANNELS == 0 && COUT % N_CHANNELS == 0 && K_CHANNELS % 16 == 0 && N_CHANNELS % 16 == 0, "channels");

// Where a chunk of a line of so many bytes is, with wgmma's swizzle
template <int BYTES> __device__ __forceinline__ u32 swizzled(u32 line, u32 chunk) {
    return line * BYTES + ((chunk ^ (line / (128 / BYTES) % (BYTES / 16))) << 4);
}
__device__ __forceinline__ constexpr int tap_offset(int tap) { return tap / 3 * TILE_WIDTH + tap % 3; }

struct Chunk {
    bool there, inside, mine;  // in the tile? in the image? of a pixel that this block makes?
    u32 shared, global;        // bytes from where the tile begins, chunks from where the image does
};

// The chunks of a tile, CHUNKS of each pixel from the first on, dealt out to the threads
template <int CHUNKS> constexpr int TURNS = (TILE_HEIGHT * SIDE * CHUNKS + THREADS - 1) / THREADS;
template <int CHUNKS, int PIXEL_STRIDE> __device__ __forceinline__ Chunk chunk_of(int turn, u32 block, u32 first) {
    const u32 i = threadIdx.x + turn * THREADS, chunk = i % CHUNKS, column = i / CHUNKS % SIDE, row = i / (CHUNKS * SIDE);
    const u32 above = row - 1;  // the first row is one above the block's, which may be none at all
    const bool there = row < TILE_HEIGHT, border = IMAGES > 1 ? row % (ROWS + 1) == 0 : above >= ROWS;
    const bool inside = there && (!border || (ROWS < SIDE && block * ROWS % SIDE + above < SIDE));
    const u32 y = block * (IMAGES * ROWS) + above - (IMAGES > 1 ? above / (ROWS + 1) : 0);  // of all rows of all images
    return {there, inside, there && !border,
            chunk / (LINE_BYTES / 16) * PLANE_BYTES + swizzled<LINE_BYTES>(row * TILE_WIDTH + 1 + column, chunk % (LINE_BYTES / 16)),
            (y * SIDE + column) * (PIXEL_STRIDE / 8) + first + chunk};
}

template <int CHUNKS, int PIXEL_STRIDE> __device__ __forceinline__ void fetch_tile(u32 tile, const uint4* x, u32 block, u32 first) {
#pragma unroll
    for (int turn = 0; turn < TURNS<CHUNKS>; turn++) {
        Chunk at = chunk_of<CHUNKS, PIXEL_STRIDE>(turn, block, first);
        if (at.there) cp_async(tile + at.shared, x + (at.inside ? at.global : 0), at.inside);
    }
}

// Zeros before every row of a tile and after the last
template <int CHUNKS> __device__ __forceinline__ void clear_border(u32 tile) {
    for (u32 i = threadIdx.x; i < (TILE_HEIGHT + 1) * CHUNKS; i += THREADS) {
        u32 chunk = i % CHUNKS;
        st_shared(tile + chunk / (LINE_BYTES / 16) * PLANE_BYTES + swizzled<LINE_BYTES>(i / CHUNKS * TILE_WIDTH, chunk % (LINE_BYTES / 16)),
                  make_uint4(0, 0, 0, 0));
    }
}

// Of an 8x8 patch: the tile's pixel under the first of the nine taps, and its first pixel of those the block makes
constexpr int ACROSS = SIDE / 8, OF_AN_IMAGE = ROWS / 8 * ACROSS;
__device__ __forceinline__ u32 corner_of(u32 patch) {
    u32 row = patch / OF_AN_IMAGE * (ROWS + 1) + patch % OF_AN_IMAGE / ACROSS * 8;
    return row * TILE_WIDTH + patch % ACROSS * 8;
}
__device__ __forceinline__ u32 pixel_of(u32 patch) { return patch / ACROSS * 8 * SIDE + patch % ACROSS * 8; }

#if CONVOLVES
// Forward: y = convolution of h = relu(norm(x)), plus a shortcut if there is one; moments of y if wanted.
// BACK: x is the gradient of a convolution's output, y that of the norm's output below it, z the norm's input; and the two sums
// that batch norm's backward needs. affine is (scale, shift, mean, 1 / deviation).
// Few weights are there from the beginning; many come by and by, a tap of 64 channels at a time, into a ring of stages.

constexpr int CHUNKS = CIN / 8, PLANES = CIN / K_CHANNELS, EACH = PATCHES / WARPGROUPS;
constexpr bool FEW = CIN < 64;
constexpr int STAGES = FEW ? 1 : 9 * PLANES, TAPS = FEW ? 9 : 1, AHEAD = FEW ? 1 : RING - 2;
constexpr int WEIGHT_LINE_BYTES = BACK ? N_CHANNELS * 2 : LINE_BYTES;
constexpr int TAP_BYTES = N_CHANNELS * K_CHANNELS * 2, STAGE_BYTES = TAPS * TAP_BYTES;
constexpr int OUT_LINE_BYTES = N_CHANNELS * 2 + 16;  // bytes of a pixel on its way out: eight of them begin in different banks
constexpr int TURNS_OUT = PIXELS * (N_CHANNELS / 8) / THREADS;
static_assert(PATCHES % WARPGROUPS == 0 && THREADS % CHUNKS == 0 && PIXELS * (N_CHANNELS / 8) % THREADS == 0, "groups");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) conv(
    const uint4* __restrict__ x, const uint4* __restrict__ w, uint4* __restrict__ y, const uint4* __restrict__ shortcut,
    float* __restrict__ moments, const uint4* __restrict__ z, const float* __restrict__ affine, uint4* __restrict__ h) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 tile = shared_address(memory), ring = tile + PLANES * PLANE_BYTES;
    float* gathered = (float*)(memory + PIXELS * OUT_LINE_BYTES);  // (2, WARPS, N_CHANNELS), behind the pixels on their way out
    const u32 block = blockIdx.x / N_PARTS, part = blockIdx.x % N_PARTS, blocks = gridDim.x / N_PARTS;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warpgroup = shfl_lane0(warp / 4);

    auto fetch_weights = [&](int stage) {
        constexpr int SHARE = (STAGE_BYTES / 16 + THREADS - 1) / THREADS;
#pragma unroll
        for (int turn = 0; turn < SHARE; turn++) {
            u32 i = threadIdx.x + turn * THREADS;
            if (i >= STAGE_BYTES / 16) break;
            u32 tap = FEW ? i / (TAP_BYTES / 16) : stage / PLANES, of = FEW ? 0 : stage % PLANES;
            u32 chunk = i % (WEIGHT_LINE_BYTES / 16), line = i % (TAP_BYTES / 16) / (WEIGHT_LINE_BYTES / 16);
            u32 at = BACK ? ((of * K_CHANNELS + line) * 9 + 8 - tap) * (COUT / 8) + part * (N_CHANNELS / 8)
                          : ((part * N_CHANNELS + line) * 9 + tap) * CHUNKS + of * (K_CHANNELS / 8);
            u32 to = ring + stage % RING * STAGE_BYTES + (FEW ? tap * TAP_BYTES : 0);
            cp_async(to + swizzled<WEIGHT_LINE_BYTES>(line, chunk), w + at + chunk, true);
        }
    };

#if BACK
    fetch_tile<CHUNKS, CIN>(tile, x, block, 0);
#endif
#pragma unroll
    for (int stage = 0; stage < AHEAD; stage++) {
        fetch_weights(stage);
        cp_async_commit_group();
    }
#if !BACK
    {
        uint4 got[TURNS<CHUNKS>];  // all reads are under way before the first is waited for
#pragma unroll
        for (int turn = 0; turn < TURNS<CHUNKS>; turn++) {
            Chunk at = chunk_of<CHUNKS, CIN>(turn, block, 0);
            got[turn] = at.inside ? x[at.global] : make_uint4(0, 0, 0, 0);
        }
        float scale[8], shift[8];
        const u32 channel = threadIdx.x % CHUNKS * 8;  // the same in every turn
#pragma unroll
        for (int c = 0; c < 8; c++) scale[c] = affine[channel + c], shift[c] = affine[CIN + channel + c];
#pragma unroll
        for (int turn = 0; turn < TURNS<CHUNKS>; turn++) {
            Chunk at = chunk_of<CHUNKS, CIN>(turn, block, 0);
            uint4 made = norm_relu(got[turn], scale, shift);
            made = at.inside ? made : make_uint4(0, 0, 0, 0);
            if (at.mine && part == 0) h[at.global] = made;
            if (at.there) st_shared(tile + at.shared, made);
        }
    }
#endif
    clear_border<CHUNKS>(tile);

    float sum[EACH][N_CHANNELS / 2];
    u64 patch[EACH];  // where a patch is, under the first tap
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        patch[m] = wgmma_descriptor<LINE_BYTES>(tile + corner_of(warpgroup * EACH + m) * LINE_BYTES, TILE_WIDTH * LINE_BYTES);
#pragma unroll
        for (int i = 0; i < N_CHANNELS / 2; i++) sum[m][i] = 0;
    }
    const u64 weights = wgmma_descriptor<WEIGHT_LINE_BYTES>(ring, 8 * WEIGHT_LINE_BYTES);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        cp_async_wait_group<AHEAD - 1>();
        fence_proxy_async();
        __syncthreads();  // this stage is there for all, and the one before the last is needed by none
        if (stage + AHEAD < STAGES) fetch_weights(stage + AHEAD);
        cp_async_commit_group();
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < TAPS; t++)
#pragma unroll
            for (int k = 0; k < K_CHANNELS / 16; k++)  // 16 rows of the product
#pragma unroll
                for (int m = 0; m < EACH; m++) {
                    const int tap = FEW ? t : stage / PLANES, of = FEW ? 0 : stage % PLANES;
                    const u32 moved = tap_offset(tap) * LINE_BYTES + of * PLANE_BYTES + k * 32;
                    const u32 row = stage % RING * STAGE_BYTES + t * TAP_BYTES + k * (BACK ? 16 * WEIGHT_LINE_BYTES : 32);
                    wgmma_m64k16<false, BACK>(sum[m], patch[m] + moved / 16, weights + row / 16);
                }
        wgmma_commit_group();
        if (stage + 1 < STAGES) wgmma_wait_group<1>();
    }

    // On its way out a thread has chunks of pixels, always of the same eight channels
    const u32 chunk = threadIdx.x % (N_CHANNELS / 8), first = threadIdx.x / (N_CHANNELS / 8);
    constexpr int STEP = THREADS / (N_CHANNELS / 8);  // pixels
    const u32 number = (block * PIXELS + first) * (COUT / 8) + part * (N_CHANNELS / 8) + chunk;
    const uint4* other = BACK ? z : shortcut;
    const u32 beside = (block * PIXELS + first) * (Z_STRIDE / 8) + part * (N_CHANNELS / 8) + chunk;
    uint4 read[TURNS_OUT];
    if (other)
#pragma unroll
        for (int turn = 0; turn < TURNS_OUT; turn++) read[turn] = ld_global_nc(other + beside + turn * STEP * (Z_STRIDE / 8));
    wgmma_wait_group<0>();
    cp_async_wait_group<0>();
    __syncthreads();  // from here on nobody reads the tile
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        // A lane has two of each eight channels of two pixels; together they store 8x8 of them at once
        u32 pixel = pixel_of(warpgroup * EACH + m) + (warp % 4 * 2 + lane / 8 % 2) * SIDE + lane % 8;
        u32 to = tile + pixel * OUT_LINE_BYTES + lane / 16 * 16;
#pragma unroll
        for (int run = 0; run < N_CHANNELS / 8; run += 2) {
            const float* v = sum[m] + run * 4;
            stmatrix_x4(to + run * 16, cvt_bf16x2(v[0], v[1]), cvt_bf16x2(v[2], v[3]), cvt_bf16x2(v[4], v[5]), cvt_bf16x2(v[6], v[7]));
        }
    }
    __syncthreads();
    float one[8], two[8];  // sums of what is written, and of its squares; on the way back, of its products with z
#pragma unroll
    for (int c = 0; c < 8; c++) one[c] = two[c] = 0;
#if BACK
    float scale[8], shift[8];
    const u32 channel = part * N_CHANNELS + chunk * 8;
#pragma unroll
    for (int c = 0; c < 8; c++) scale[c] = affine[channel + c], shift[c] = affine[Z_STRIDE + channel + c];
#endif
#pragma unroll
    for (int turn = 0; turn < TURNS_OUT; turn++) {
        const uint4 made = *(const uint4*)(memory + (first + turn * STEP) * OUT_LINE_BYTES + chunk * 16);
        u32 pairs[4] = {made.x, made.y, made.z, made.w}, others[4] = {read[turn].x, read[turn].y, read[turn].z, read[turn].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float v[2] = {low(pairs[k]), high(pairs[k])};
            const float other[2] = {low(others[k]), high(others[k])};
#if !BACK
            if (shortcut) v[0] += other[0], v[1] += other[1], pairs[k] = cvt_bf16x2(v[0], v[1]);
#endif
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int c = 2 * k + i;
#if BACK
                v[i] = fmaf(other[i], scale[c], shift[c]) > 0 ? v[i] : 0.0f;
#endif
                one[c] += v[i];
                two[c] = fmaf(v[i], BACK ? other[i] : v[i], two[c]);
            }
#if BACK
            pairs[k] = paired(v[0], v[1]);
#endif
        }
        y[number + turn * STEP * (COUT / 8)] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    if (!moments) return;

#pragma unroll
    for (int c = 0; c < 8; c++)
#pragma unroll
        for (int bit = N_CHANNELS / 8; bit < 32; bit *= 2) one[c] += shfl_xor(one[c], bit), two[c] += shfl_xor(two[c], bit);
    if (lane < N_CHANNELS / 8)
#pragma unroll
        for (int c = 0; c < 8; c++) {
            gathered[warp * N_CHANNELS + chunk * 8 + c] = one[c];
            gathered[(WARPS + warp) * N_CHANNELS + chunk * 8 + c] = two[c];
        }
    __syncthreads();
    if (threadIdx.x < N_CHANNELS) {
        const u32 c = threadIdx.x, channel = part * N_CHANNELS + c;
        float one = 0, two = 0;
#pragma unroll
        for (int m = 0; m < WARPS; m++) one += gathered[m * N_CHANNELS + c], two += gathered[(WARPS + m) * N_CHANNELS + c];
#if BACK
        two = (two - affine[2 * Z_STRIDE + channel] * one) * affine[3 * Z_STRIDE + channel];
#else
        one /= PIXELS;  // the mean, and the sum of squares about it
        two = fmaxf(fmaf(-PIXELS * one, one, two), 0.0f);
#endif
        moments[channel * blocks + block] = one;
        moments[(COUT + channel) * blocks + block] = two;
    }
}

#else
// partial[split, o, tap, i] = sum over a split's pixels of dy[pixel, o] * x[pixel + tap, i], of several layers. A block goes from one tile
// of pixels to the next, which is copied meanwhile. A product has 64 rows: the inputs under one tap, under two if they are 32, and if they
// are 16 under a row of taps (with a fourth that is nobody's). Warpgroups share the products.

constexpr int AT_ONCE = 64 / K_CHANNELS, PRODUCTS = AT_ONCE == 1 ? 9 : AT_ONCE == 2 ? 5 : 3, EACH = PRODUCTS / WARPGROUPS;
constexpr int GRADIENT_LINE_BYTES = N_CHANNELS * 2, STAGE_BYTES = PLANE_BYTES + PIXELS * GRADIENT_LINE_BYTES, K_PARTS = CIN / K_CHANNELS;
static_assert(PRODUCTS % WARPGROUPS == 0, "groups");
__device__ __forceinline__ constexpr int first_of(int product) {
    return AT_ONCE == 1 ? product : AT_ONCE == 2 ? lesser(2 * product, 7) : 3 * product;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) weights(
    const __grid_constant__ Images images, const __grid_constant__ Images gradients, const __grid_constant__ Sums partials, u32 tiles) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint4 *x = images.of[blockIdx.y], *dy = gradients.of[blockIdx.y];
    float* partial = partials.of[blockIdx.y];
    const u32 start = shared_address(memory);
    const u32 in = blockIdx.x % K_PARTS, out = blockIdx.x / K_PARTS % N_PARTS, split = blockIdx.x / (K_PARTS * N_PARTS);
    const u32 splits = gridDim.x / (K_PARTS * N_PARTS);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warpgroup = shfl_lane0(warp / 4);

    auto fetch = [&](u32 number, u32 stage) {
        const u32 tile = start + stage * STAGE_BYTES;
        fetch_tile<K_CHANNELS / 8, X_STRIDE>(tile, x, number, in * (K_CHANNELS / 8));
#pragma unroll
        for (int turn = 0; turn < (PIXELS * (N_CHANNELS / 8) + THREADS - 1) / THREADS; turn++) {
            u32 i = threadIdx.x + turn * THREADS, chunk = i % (N_CHANNELS / 8), pixel = i / (N_CHANNELS / 8);
            if (pixel >= PIXELS) break;
            u32 at = (number * PIXELS + pixel) * (COUT / 8) + out * (N_CHANNELS / 8) + chunk;
            cp_async(tile + PLANE_BYTES + swizzled<GRADIENT_LINE_BYTES>(pixel, chunk), dy + at, true);
        }
    };

    float sum[EACH][N_CHANNELS / 2];
#pragma unroll
    for (int p = 0; p < EACH; p++)
#pragma unroll
        for (int i = 0; i < N_CHANNELS / 2; i++) sum[p][i] = 0;
    for (int stage = 0; stage < 3; stage++) clear_border<K_CHANNELS / 8>(start + stage * STAGE_BYTES);
    fetch(split, 0);
    cp_async_commit_group();
    if (split + splits < tiles) fetch(split + splits, 1);
    cp_async_commit_group();
    u32 stage = 0;
#pragma unroll 1
    for (u32 number = split; number < tiles; number += splits) {
        cp_async_wait_group<1>();
        fence_proxy_async();
        __syncthreads();  // this tile is there for all, and the one before is needed by none
        if (number + 2 * splits < tiles) fetch(number + 2 * splits, stage == 0 ? 2 : stage - 1);
        cp_async_commit_group();
        const u32 tile = start + stage * STAGE_BYTES;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PIXELS / 16; k++) {  // two runs of eight pixels
            const int down = k % 4 * 2;
            const u32 first = tile + PLANE_BYTES + (pixel_of(k / 4) + down * SIDE) * GRADIENT_LINE_BYTES;
            const u64 gradient = wgmma_descriptor<GRADIENT_LINE_BYTES>(first, SIDE * GRADIENT_LINE_BYTES);
#pragma unroll
            for (int p = 0; p < EACH; p++) {
                const u32 tap = first_of(EACH == PRODUCTS ? p : warpgroup * EACH + p);
                const u32 apart = AT_ONCE == 2 ? tap_offset(tap + 1) - tap_offset(tap) : 1;
                const u32 pixel = corner_of(k / 4) + down * TILE_WIDTH + tap_offset(tap);
                const u64 image = wgmma_descriptor<LINE_BYTES>(tile + pixel * LINE_BYTES, TILE_WIDTH * LINE_BYTES, apart * LINE_BYTES);
                wgmma_m64k16<true, true>(sum[p], image, gradient);
            }
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        stage = stage == 2 ? 0 : stage + 1;
    }
#pragma unroll
    for (int p = 0; p < EACH; p++)
#pragma unroll
        for (int i = 0; i < N_CHANNELS / 2; i++) {
            const u32 row = warp % 4 * 16 + lane / 4 + i / 2 % 2 * 8, o = out * N_CHANNELS + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const u32 product = warpgroup * EACH + p, tap = first_of(product) + row / K_CHANNELS;
            const bool again = (AT_ONCE == 2 && product == 4 && row < K_CHANNELS) || (AT_ONCE == 4 && row >= 3 * K_CHANNELS);
            if (!again) partial[((split * COUT + o) * 9 + tap) * CIN + in * K_CHANNELS + row % K_CHANNELS] = sum[p][i];
        }
}
#endif
