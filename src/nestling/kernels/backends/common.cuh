// What sm80.cu and sm90.cu have in common.

const int MAX_LAYERS = 8;  // layers of one shape whose weights' gradients are made by one launch
struct Images { const uint4* of[MAX_LAYERS]; };
struct Sums { float* of[MAX_LAYERS]; };

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Sums over the eight lanes that have a column of a product in common, always in the same order
__device__ __forceinline__ float sum_over_rows(float x) {
#pragma unroll
    for (int bit = 4; bit < 32; bit *= 2) x += shfl_xor(x, bit);
    return x;
}

// Eight channels of a pixel after batch norm and relu
__device__ __forceinline__ uint4 norm_relu(uint4 z, const float (&scale)[8], const float (&shift)[8]) {
    u32 pairs[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
    for (int k = 0; k < 4; k++)
        pairs[k] = cvt_relu_bf16x2(fmaf(low(pairs[k]), scale[2 * k], shift[2 * k]),
                                fmaf(high(pairs[k]), scale[2 * k + 1], shift[2 * k + 1]));
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Two numbers that are bf16 already
__device__ __forceinline__ u32 paired(float low, float high) { return __float_as_uint(low) >> 16 | __float_as_uint(high); }

