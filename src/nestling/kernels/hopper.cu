// 3x3 convolutions of channels-last bf16 images, and the gradients of their weights, for chips whose matrix products read shared
// memory by themselves (Hopper's wgmma). See hopper.py.
//
// Compiled for one shape at a time: CIN and COUT (16, 32 or multiples of 64), SIDE of an image, ROWS of it and IMAGES that a block
// makes, GROUPS of 128 threads, RESIDENT blocks of a processor, and Z or X, channels of the image whose first are read. A tile of pixels is in shared memory as products expect it: of every
// pixel a line of up to 64 channels (beyond them, there is another plane), its chunks of 16 bytes in an order that depends on the
// line. Pixels lie row by row, a spot of zeros before each row and a row above and below each image. A product takes 8x8 pixels,
// eight runs of eight, a row apart: under the next tap they begin a spot later, and that is all. Sums are made in a fixed order: same
// input, same bits.

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }

constexpr int PITCH = SIDE + 1, TALL = IMAGES * (ROWS + 1) + 1;  // spots of a row, rows
constexpr int DEEP = least(CIN, 64), LINE = DEEP * 2;            // channels of a plane, and bytes of its lines
constexpr int PLANE = ((TALL * PITCH + 3) * LINE + 1023) / 1024 * 1024;
constexpr int PIXELS = IMAGES * ROWS * SIDE, PATCHES = PIXELS / 64;  // that a block makes
constexpr int WIDE = least(COUT, 64), PARTS = COUT / WIDE;           // channels that a block makes
constexpr int THREADS = 128 * GROUPS, WARPS = 4 * GROUPS;
static_assert(ROWS % 8 == 0 && SIDE % ROWS == 0 && (IMAGES == 1 || ROWS == SIDE), "whole images, or a part of one");
static_assert(CIN % DEEP == 0 && COUT % WIDE == 0 && DEEP % 16 == 0 && WIDE % 16 == 0, "channels");

// Where a chunk of a line of so many bytes is
template <int BYTES> __device__ __forceinline__ u32 place(u32 line, u32 chunk) {
    return line * BYTES + ((chunk ^ (line / (128 / BYTES) % (BYTES / 16))) << 4);
}
__device__ __forceinline__ constexpr int spot_of(int tap) { return tap / 3 * PITCH + tap % 3; }

struct Chunk {
    bool there, inside, mine;  // in the tile? in the image? of a pixel that this block makes?
    u32 place, number;         // in the tile, in global memory
};

// The chunks of a tile, CHUNKS of each pixel from the first on, dealt out to the threads
template <int CHUNKS> constexpr int TURNS = (TALL * SIDE * CHUNKS + THREADS - 1) / THREADS;
template <int CHUNKS, int ALL> __device__ __forceinline__ Chunk chunk_of(int turn, u32 block, u32 first) {
    const u32 i = threadIdx.x + turn * THREADS, chunk = i % CHUNKS, column = i / CHUNKS % SIDE, row = i / (CHUNKS * SIDE);
    const u32 above = row - 1;  // the first row is one above the block's, which may be none at all
    const bool there = row < TALL, border = IMAGES > 1 ? row % (ROWS + 1) == 0 : above >= ROWS;
    const bool inside = there && (!border || (ROWS < SIDE && block * ROWS % SIDE + above < SIDE));
    const u32 y = block * (IMAGES * ROWS) + above - (IMAGES > 1 ? above / (ROWS + 1) : 0);  // of all rows of all images
    return {there, inside, there && !border, chunk / (LINE / 16) * PLANE + place<LINE>(row * PITCH + 1 + column, chunk % (LINE / 16)),
            (y * SIDE + column) * (ALL / 8) + first + chunk};
}

template <int CHUNKS, int ALL> __device__ __forceinline__ void fetch_tile(u32 tile, const uint4* x, u32 block, u32 first) {
#pragma unroll
    for (int turn = 0; turn < TURNS<CHUNKS>; turn++) {
        Chunk at = chunk_of<CHUNKS, ALL>(turn, block, first);
        if (at.there) copy_later(tile + at.place, x + (at.inside ? at.number : 0), at.inside);
    }
}

// Zeros before every row of a tile and after the last
template <int CHUNKS> __device__ __forceinline__ void clear_border(u32 tile) {
    for (u32 i = threadIdx.x; i < (TALL + 1) * CHUNKS; i += THREADS) {
        u32 chunk = i % CHUNKS;
        put(tile + chunk / (LINE / 16) * PLANE + place<LINE>(i / CHUNKS * PITCH, chunk % (LINE / 16)), make_uint4(0, 0, 0, 0));
    }
}

// Of an 8x8 patch: the spot under the first of the nine taps, and its first pixel of those the block makes
constexpr int ACROSS = SIDE / 8, OF_AN_IMAGE = ROWS / 8 * ACROSS;
__device__ __forceinline__ u32 corner_of(u32 patch) {
    u32 row = patch / OF_AN_IMAGE * (ROWS + 1) + patch % OF_AN_IMAGE / ACROSS * 8;
    return row * PITCH + patch % ACROSS * 8;
}
__device__ __forceinline__ u32 pixel_of(u32 patch) { return patch / ACROSS * 8 * SIDE + patch % ACROSS * 8; }

#if CONVOLVES
// Forward: y = convolution of h = relu(x normed by affine), plus a shortcut if there is one; moments of y if wanted.
// BACK: x is the gradient of a convolution's output, y that of the norm's output below it, z the norm's input; and the two sums
// that batch norm's backward needs. affine is (scale, shift, mean, 1 / deviation).
// Few weights are there from the beginning; many come by and by, a tap of 64 channels at a time, into a ring of stages.

constexpr int CHUNKS = CIN / 8, PLANES = CIN / DEEP, EACH = PATCHES / GROUPS;
constexpr bool FEW = CIN < 64;
constexpr int STAGES = FEW ? 1 : 9 * PLANES, TAPS = FEW ? 9 : 1, AHEAD = FEW ? 1 : RING - 2;
constexpr int WEIGHT_LINE = BACK ? WIDE * 2 : LINE, TAP_BYTES = WIDE * DEEP * 2, STAGE_BYTES = TAPS * TAP_BYTES;
constexpr int OUT_LINE = WIDE * 2 + 16;  // bytes of a pixel on its way out: eight of them begin in different banks
constexpr int TURNS_OUT = PIXELS * (WIDE / 8) / THREADS;
static_assert(PATCHES % GROUPS == 0 && THREADS % CHUNKS == 0 && PIXELS * (WIDE / 8) % THREADS == 0, "groups");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) conv(
    const uint4* __restrict__ x, const uint4* __restrict__ w, uint4* __restrict__ y, const uint4* __restrict__ shortcut,
    float* __restrict__ moments, const uint4* __restrict__ z, const float* __restrict__ affine, uint4* __restrict__ h) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 tile = shared_address(memory), ring = tile + PLANES * PLANE;
    float* gathered = (float*)(memory + PIXELS * OUT_LINE);  // (2, WARPS, WIDE), behind the pixels on their way out
    const u32 block = blockIdx.x / PARTS, part = blockIdx.x % PARTS, blocks = gridDim.x / PARTS;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = of_the_warp(warp / 4);

    auto fetch_weights = [&](int stage) {
        constexpr int SHARE = (STAGE_BYTES / 16 + THREADS - 1) / THREADS;
#pragma unroll
        for (int turn = 0; turn < SHARE; turn++) {
            u32 i = threadIdx.x + turn * THREADS;
            if (i >= STAGE_BYTES / 16) break;
            u32 tap = FEW ? i / (TAP_BYTES / 16) : stage / PLANES, of = FEW ? 0 : stage % PLANES;
            u32 chunk = i % (WEIGHT_LINE / 16), line = i % (TAP_BYTES / 16) / (WEIGHT_LINE / 16);
            u32 at = BACK ? ((of * DEEP + line) * 9 + 8 - tap) * (COUT / 8) + part * (WIDE / 8)
                          : ((part * WIDE + line) * 9 + tap) * CHUNKS + of * (DEEP / 8);
            u32 to = ring + stage % RING * STAGE_BYTES + (FEW ? tap * TAP_BYTES : 0);
            copy_later(to + place<WEIGHT_LINE>(line, chunk), w + at + chunk, true);
        }
    };

#if BACK
    fetch_tile<CHUNKS, CIN>(tile, x, block, 0);
#endif
#pragma unroll
    for (int stage = 0; stage < AHEAD; stage++) {
        fetch_weights(stage);
        end_of_copies();
    }
#if !BACK
    {
        uint4 got[TURNS<CHUNKS>];  // all reads are under way before the first is waited for
#pragma unroll
        for (int turn = 0; turn < TURNS<CHUNKS>; turn++) {
            Chunk at = chunk_of<CHUNKS, CIN>(turn, block, 0);
            got[turn] = at.inside ? x[at.number] : make_uint4(0, 0, 0, 0);
        }
        float scale[8], shift[8];
        const u32 channel = threadIdx.x % CHUNKS * 8;  // the same in every turn
#pragma unroll
        for (int c = 0; c < 8; c++) scale[c] = affine[channel + c], shift[c] = affine[CIN + channel + c];
#pragma unroll
        for (int turn = 0; turn < TURNS<CHUNKS>; turn++) {
            Chunk at = chunk_of<CHUNKS, CIN>(turn, block, 0);
            uint4 made = normed(got[turn], scale, shift);
            made = at.inside ? made : make_uint4(0, 0, 0, 0);
            if (at.mine && part == 0) h[at.number] = made;
            if (at.there) put(tile + at.place, made);
        }
    }
#endif
    clear_border<CHUNKS>(tile);

    float sum[EACH][WIDE / 2];
    u64 patch[EACH];  // where a patch is, under the first tap
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        patch[m] = matrix<LINE>(tile + corner_of(group * EACH + m) * LINE, PITCH * LINE);
#pragma unroll
        for (int i = 0; i < WIDE / 2; i++) sum[m][i] = 0;
    }
    const u64 weights = matrix<WEIGHT_LINE>(ring, 8 * WEIGHT_LINE);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        wait_for_copies<AHEAD - 1>();
        show_to_products();
        __syncthreads();  // this stage is there for all, and the one before the last is needed by none
        if (stage + AHEAD < STAGES) fetch_weights(stage + AHEAD);
        end_of_copies();
        begin_products();
#pragma unroll
        for (int t = 0; t < TAPS; t++)
#pragma unroll
            for (int k = 0; k < DEEP / 16; k++)  // 16 rows of the product
#pragma unroll
                for (int m = 0; m < EACH; m++) {
                    const int tap = FEW ? t : stage / PLANES, of = FEW ? 0 : stage % PLANES;
                    const u32 moved = spot_of(tap) * LINE + of * PLANE + k * 32;
                    const u32 row = stage % RING * STAGE_BYTES + t * TAP_BYTES + k * (BACK ? 16 * WEIGHT_LINE : 32);
                    multiply64<false, BACK>(sum[m], patch[m] + moved / 16, weights + row / 16);
                }
        end_of_products();
        if (stage + 1 < STAGES) wait_for_products<1>();
    }

    // On its way out a thread has chunks of pixels, always of the same eight channels
    const u32 chunk = threadIdx.x % (WIDE / 8), first = threadIdx.x / (WIDE / 8);
    constexpr int STEP = THREADS / (WIDE / 8);  // pixels
    const u32 number = (block * PIXELS + first) * (COUT / 8) + part * (WIDE / 8) + chunk;
    const uint4* other = BACK ? z : shortcut;
    const u32 beside = (block * PIXELS + first) * (Z / 8) + part * (WIDE / 8) + chunk;
    uint4 read[TURNS_OUT];
    if (other)
#pragma unroll
        for (int turn = 0; turn < TURNS_OUT; turn++) read[turn] = fetched(other + beside + turn * STEP * (Z / 8));
    wait_for_products<0>();
    wait_for_copies<0>();
    __syncthreads();  // from here on nobody reads the tile
#pragma unroll
    for (int m = 0; m < EACH; m++) {
        // A lane has two of each eight channels of two pixels; together they put 8x8 of them at once, and know where a line is
        u32 pixel = pixel_of(group * EACH + m) + (warp % 4 * 2 + lane / 8 % 2) * SIDE + lane % 8;
        u32 to = tile + pixel * OUT_LINE + lane / 16 * 16;
#pragma unroll
        for (int run = 0; run < WIDE / 8; run += 2) {
            const float* v = sum[m] + run * 4;
            put4(to + run * 16, rounded(v[0], v[1]), rounded(v[2], v[3]), rounded(v[4], v[5]), rounded(v[6], v[7]));
        }
    }
    __syncthreads();
    float one[8], two[8];  // sums of what is written, and of its squares; on the way back, of its products with z
#pragma unroll
    for (int c = 0; c < 8; c++) one[c] = two[c] = 0;
#if BACK
    float scale[8], shift[8];
    const u32 channel = part * WIDE + chunk * 8;
#pragma unroll
    for (int c = 0; c < 8; c++) scale[c] = affine[channel + c], shift[c] = affine[Z + channel + c];
#endif
#pragma unroll
    for (int turn = 0; turn < TURNS_OUT; turn++) {
        const uint4 made = *(const uint4*)(memory + (first + turn * STEP) * OUT_LINE + chunk * 16);
        u32 pairs[4] = {made.x, made.y, made.z, made.w}, others[4] = {read[turn].x, read[turn].y, read[turn].z, read[turn].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float v[2] = {low(pairs[k]), high(pairs[k])};
            const float other[2] = {low(others[k]), high(others[k])};
#if !BACK
            if (shortcut) v[0] += other[0], v[1] += other[1], pairs[k] = rounded(v[0], v[1]);
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
        for (int bit = WIDE / 8; bit < 32; bit *= 2) one[c] += across(one[c], bit), two[c] += across(two[c], bit);
    if (lane < WIDE / 8)
#pragma unroll
        for (int c = 0; c < 8; c++) {
            gathered[warp * WIDE + chunk * 8 + c] = one[c];
            gathered[(WARPS + warp) * WIDE + chunk * 8 + c] = two[c];
        }
    __syncthreads();
    if (threadIdx.x < WIDE) {
        const u32 c = threadIdx.x, channel = part * WIDE + c;
        float one = 0, two = 0;
#pragma unroll
        for (int m = 0; m < WARPS; m++) one += gathered[m * WIDE + c], two += gathered[(WARPS + m) * WIDE + c];
#if BACK
        two = (two - affine[2 * Z + channel] * one) * affine[3 * Z + channel];
#else
        one /= PIXELS;  // the mean, and the sum of squares about it
        two = fmaxf(fmaf(-PIXELS * one, one, two), 0.0f);
#endif
        moments[channel * blocks + block] = one;
        moments[(COUT + channel) * blocks + block] = two;
    }
}

#else
// partial[split, o, tap, i] = sum over a split's pixels of dy[pixel, o] * x[pixel + tap, i], of several layers. A block goes from one tile of pixels to
// the next, which is fetched meanwhile. A product has 64 rows: the inputs under one tap, under two if they are 32, and if they are 16
// under a row of taps (with a fourth that is nobody's). Groups share the products.

constexpr int AT_ONCE = 64 / DEEP, PRODUCTS = AT_ONCE == 1 ? 9 : AT_ONCE == 2 ? 5 : 3, EACH = PRODUCTS / GROUPS;
constexpr int GRADIENT_LINE = WIDE * 2, STAGE_BYTES = PLANE + PIXELS * GRADIENT_LINE, PARTS_IN = CIN / DEEP;
static_assert(PRODUCTS % GROUPS == 0, "groups");
__device__ __forceinline__ constexpr int first_of(int product) { return AT_ONCE == 1 ? product : AT_ONCE == 2 ? least(2 * product, 7) : 3 * product; }

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) weights(
    const __grid_constant__ Images images, const __grid_constant__ Images gradients, const __grid_constant__ Sums partials, u32 tiles) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint4 *x = images.of[blockIdx.y], *dy = gradients.of[blockIdx.y];
    float* partial = partials.of[blockIdx.y];
    const u32 start = shared_address(memory);
    const u32 in = blockIdx.x % PARTS_IN, out = blockIdx.x / PARTS_IN % PARTS, split = blockIdx.x / (PARTS_IN * PARTS);
    const u32 splits = gridDim.x / (PARTS_IN * PARTS);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = of_the_warp(warp / 4);

    auto fetch = [&](u32 number, u32 stage) {
        const u32 tile = start + stage * STAGE_BYTES;
        fetch_tile<DEEP / 8, X>(tile, x, number, in * (DEEP / 8));
#pragma unroll
        for (int turn = 0; turn < (PIXELS * (WIDE / 8) + THREADS - 1) / THREADS; turn++) {
            u32 i = threadIdx.x + turn * THREADS, chunk = i % (WIDE / 8), pixel = i / (WIDE / 8);
            if (pixel >= PIXELS) break;
            u32 at = (number * PIXELS + pixel) * (COUT / 8) + out * (WIDE / 8) + chunk;
            copy_later(tile + PLANE + place<GRADIENT_LINE>(pixel, chunk), dy + at, true);
        }
    };

    float sum[EACH][WIDE / 2];
#pragma unroll
    for (int p = 0; p < EACH; p++)
#pragma unroll
        for (int i = 0; i < WIDE / 2; i++) sum[p][i] = 0;
    for (int stage = 0; stage < 3; stage++) clear_border<DEEP / 8>(start + stage * STAGE_BYTES);
    fetch(split, 0);
    end_of_copies();
    if (split + splits < tiles) fetch(split + splits, 1);
    end_of_copies();
    u32 stage = 0;
#pragma unroll 1
    for (u32 number = split; number < tiles; number += splits) {
        wait_for_copies<1>();
        show_to_products();
        __syncthreads();  // this tile is there for all, and the one before is needed by none
        if (number + 2 * splits < tiles) fetch(number + 2 * splits, stage == 0 ? 2 : stage - 1);
        end_of_copies();
        const u32 tile = start + stage * STAGE_BYTES;
        begin_products();
#pragma unroll
        for (int k = 0; k < PIXELS / 16; k++) {  // two runs of eight pixels
            const int down = k % 4 * 2;
            const u64 gradient = matrix<GRADIENT_LINE>(tile + PLANE + (pixel_of(k / 4) + down * SIDE) * GRADIENT_LINE, SIDE * GRADIENT_LINE);
#pragma unroll
            for (int p = 0; p < EACH; p++) {
                const u32 tap = first_of(EACH == PRODUCTS ? p : group * EACH + p);
                const u32 apart = AT_ONCE == 2 ? spot_of(tap + 1) - spot_of(tap) : 1;
                const u64 image = matrix<LINE>(tile + (corner_of(k / 4) + down * PITCH + spot_of(tap)) * LINE, PITCH * LINE, apart * LINE);
                multiply64<true, true>(sum[p], image, gradient);
            }
        }
        end_of_products();
        wait_for_products<0>();
        stage = stage == 2 ? 0 : stage + 1;
    }
#pragma unroll
    for (int p = 0; p < EACH; p++)
#pragma unroll
        for (int i = 0; i < WIDE / 2; i++) {
            const u32 row = warp % 4 * 16 + lane / 4 + i / 2 % 2 * 8, o = out * WIDE + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const u32 product = group * EACH + p, tap = first_of(product) + row / DEEP;
            const bool again = (AT_ONCE == 2 && product == 4 && row < DEEP) || (AT_ONCE == 4 && row >= 3 * DEEP);
            if (!again) partial[((split * COUT + o) * 9 + tap) * CIN + in * DEEP + row % DEEP] = sum[p][i];
        }
}
#endif
