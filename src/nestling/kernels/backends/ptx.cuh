// Wrappers of the PTX instructions that sm80.cu and sm90.cu use, named after them; tests/emulated.hpp does the same on a CPU, for tests.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8x8 matrices from shared memory; lanes 0-7 give the addresses of the first one's rows, 8-15 those of the second's, ...
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row));
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row));
}

// sum (16, 8) += a (16, 16) times b (16, 8), by a warp
__device__ __forceinline__ void mma_m16n8k16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sum (16, 8) += a (16, 8) times b (8, 8)
__device__ __forceinline__ void mma_m16n8k8(float (&sum)[4], u32 a0, u32 a1, u32 b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(b));
}

// 16 bytes into shared memory, asynchronously, or zeros
__device__ __forceinline__ void cp_async(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0));
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;"); }
template <int LEFT> __device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

__device__ __forceinline__ void st_shared(u32 to, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void st_shared(u32 to, u32 v) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(to), "r"(v) : "memory"); }

// Two numbers as bf16, rounded to nearest
__device__ __forceinline__ u32 cvt_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The same after relu; NaN stays NaN: a run that diverges must not look well
__device__ __forceinline__ u32 cvt_relu_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// From the lane whose number differs in one bit
__device__ __forceinline__ float shfl_xor(float x, int bit) { return __shfl_xor_sync(~0u, x, bit); }

// --- sm_90a ---

// Lane 0's, so that the compiler knows it to be the same for all lanes of the warp
__device__ __forceinline__ u32 shfl_lane0(u32 x) { return __shfl_sync(~0u, x, 0); }

// Four 8x8 matrices into shared memory, as ldmatrix_x4 reads them
__device__ __forceinline__ void stmatrix_x4(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" :: "r"(row), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Volatile: read here, though it is needed later
__device__ __forceinline__ uint4 ld_global_nc(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// The descriptor of a matrix in shared memory, as wgmma reads it: lines of BYTES (32, 64, 128, with the swizzle of that name), eight
// of them one after another, `stride` bytes on the next eight, and if a line is not long enough `leading` bytes on the other half. A
// swizzle puts the 16-byte chunk of a line at its number xor bits 7, 8, 9 of the address (as many as a line's chunks need).
template <int BYTES> __device__ __forceinline__ u64 wgmma_descriptor(u32 start, u32 stride, u32 leading = 16) {
    return (u64)(start >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (BYTES == 128 ? 1ull : BYTES == 64 ? 2ull : 3ull) << 62;
}

// From here on wgmma sees what this thread has stored or copied into shared memory
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}

// sum (64, n) += a (64, 16) times b (16, n), n = 64, 32 or 16, by a warpgroup, asynchronously. Lines run along k: a has 64 of them, b n
// (K-major). With TRANS there are 16, which run along the 64 or n (MN-major). A warp has 16 rows of the sum; a lane has of each 8 columns
// two, in rows lane / 4 and lane / 4 + 8.
template <bool TRANS_A, bool TRANS_B> __device__ __forceinline__ void wgmma_m64k16(float (&sum)[32], u64 a, u64 b) {
    asm volatile(
        "{\n.reg .pred yes;\nsetp.eq.u32 yes, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "%32, %33, yes, 1, 1, %34, %35;\n}\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
          "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15]),
          "+f"(sum[16]), "+f"(sum[17]), "+f"(sum[18]), "+f"(sum[19]), "+f"(sum[20]), "+f"(sum[21]), "+f"(sum[22]), "+f"(sum[23]),
          "+f"(sum[24]), "+f"(sum[25]), "+f"(sum[26]), "+f"(sum[27]), "+f"(sum[28]), "+f"(sum[29]), "+f"(sum[30]), "+f"(sum[31])
        : "l"(a), "l"(b), "n"((int)TRANS_A), "n"((int)TRANS_B));
}
template <bool TRANS_A, bool TRANS_B> __device__ __forceinline__ void wgmma_m64k16(float (&sum)[16], u64 a, u64 b) {
    asm volatile(
        "{\n.reg .pred yes;\nsetp.eq.u32 yes, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "%16, %17, yes, 1, 1, %18, %19;\n}\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
          "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15])
        : "l"(a), "l"(b), "n"((int)TRANS_A), "n"((int)TRANS_B));
}
template <bool TRANS_A, bool TRANS_B> __device__ __forceinline__ void wgmma_m64k16(float (&sum)[8], u64 a, u64 b) {
    asm volatile(
        "{\n.reg .pred yes;\nsetp.eq.u32 yes, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7}, "
        "%8, %9, yes, 1, 1, %10, %11;\n}\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "l"(a), "l"(b), "n"((int)TRANS_A), "n"((int)TRANS_B));
}
