// What ptx.cuh does on a GPU, done by a CPU, so that sm80.cu and sm90.cu can be tested where there is none: every thread of a block is a
// fiber, and where threads have to meet they wait for one another. Shared memory has exactly the bytes that were asked for. Asynchronous
// copies land only when they are waited for, and until then there is NaN; warps run in any order. Asynchronous products (wgmma) must find
// the same numbers when they begin and when they are waited for, and only numbers that a proxy fence has made visible to them.

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

typedef unsigned int u32;
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }

struct Index { u32 x, y; };
static Index threadIdx, blockIdx, gridDim;
alignas(1024) unsigned char memory[1 << 18];
static u32 bytes;  // of it that this kernel may use

// --- fibers -----------------------------------------------------------------------------------------------------------------

struct Fiber { ucontext_t context; std::vector<char> stack; bool over; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;

inline void yield() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

struct Meeting { int came = 0; u32 round = 0; };
static std::vector<Meeting> warps;
static Meeting everyone;

template <class Last> void meet(Meeting& at, int count, Last last) {
    u32 round = at.round;
    if (++at.came == count) {
        last();
        at.came = 0, at.round++;
    } else {
        while (at.round == round) yield();
    }
}

inline void __syncthreads() { meet(everyone, fibers.size(), [] {}); }

// --- what the lanes of a warp do together -----------------------------------------------------------------------------------

struct Lane { u32 in[8]; float sum[4]; u32 out[4]; };
static std::vector<Lane> lanes;

template <class Do> Lane& together(Do action) {
    int first = threadIdx.x / 32 * 32;
    meet(warps[threadIdx.x / 32], 32, [&] { action(&lanes[first]); });
    return lanes[threadIdx.x];
}

inline void check(u32 at, int size) {
    if (at + size > bytes || at % size) {
        fprintf(stderr, "shared memory: %u bytes at %u of %u\n", size, at, bytes);
        abort();
    }
}

inline u32 shared_address(const void* p) { return (u32)((const unsigned char*)p - memory); }

inline u32 matrix_entry(Lane* warp, int matrix, int row, int column) {
    unsigned short found;
    memcpy(&found, memory + warp[matrix * 8 + row].in[0] + column * 2, 2);
    return found;
}

template <bool TRANS> void load(u32 (&r)[4], u32 row) {
    check(row, 16);
    lanes[threadIdx.x].in[0] = row;
    Lane& mine = together([](Lane* warp) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++) {
                int i = lane / 4, j = lane % 4 * 2;
                u32 one = TRANS ? matrix_entry(warp, m, j, i) : matrix_entry(warp, m, i, j);
                u32 two = TRANS ? matrix_entry(warp, m, j + 1, i) : matrix_entry(warp, m, i, j + 1);
                warp[lane].out[m] = one | two << 16;
            }
    });
    memcpy(r, mine.out, 16);
}
inline void ldmatrix_x4(u32 (&r)[4], u32 row) { load<false>(r, row); }
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 row) { load<true>(r, row); }

inline void stmatrix_x4(u32 row, u32 a, u32 b, u32 c, u32 d) {
    check(row, 16);
    u32 in[5] = {row, a, b, c, d};
    memcpy(lanes[threadIdx.x].in, in, sizeof in);
    together([](Lane* warp) {
        for (int lane = 0; lane < 32; lane++)
            for (int m = 0; m < 4; m++) memcpy(memory + warp[m * 8 + lane / 4].in[0] + lane % 4 * 4, &warp[lane].in[1 + m], 4);
    });
}

inline float half_of(u32 pair, int which) { return __uint_as_float(which ? pair & 0xffff0000u : pair << 16); }

// in: a0 a1 a2 a3 b0 b1; a (16, k), b (k, 8), of k = 16 or 8
template <int K> void multiply(float (&sum)[4]) {
    memcpy(lanes[threadIdx.x].sum, sum, 16);
    Lane& mine = together([](Lane* warp) {
        float a[16][K], b[K][8];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 2; i++)
                for (int k = 0; k < K; k += 8) {
                    a[lane / 4][k + lane % 4 * 2 + i] = half_of(warp[lane].in[k / 4], i);
                    a[lane / 4 + 8][k + lane % 4 * 2 + i] = half_of(warp[lane].in[k / 4 + 1], i);
                    b[k + lane % 4 * 2 + i][lane / 4] = half_of(warp[lane].in[4 + k / 8], i);
                }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                for (int k = 0; k < K; k++) warp[lane].sum[i] += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
    });
    memcpy(sum, mine.sum, 16);
}
inline void mma_m16n8k16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32 in[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(lanes[threadIdx.x].in, in, sizeof in);
    multiply<16>(sum);
}
inline void mma_m16n8k8(float (&sum)[4], u32 a0, u32 a1, u32 b) {
    u32 in[6] = {a0, a1, 0, 0, b, 0};
    memcpy(lanes[threadIdx.x].in, in, sizeof in);
    multiply<8>(sum);
}

inline float shfl_xor(float x, int bit) {
    lanes[threadIdx.x].in[0] = __float_as_uint(x);
    Lane& mine = together([bit](Lane* warp) {
        for (int lane = 0; lane < 32; lane++) warp[lane].out[0] = warp[lane ^ bit].in[0];
    });
    return __uint_as_float(mine.out[0]);
}

// --- what a thread does by itself -------------------------------------------------------------------------------------------

static bool hidden[1 << 14];                 // sixteen bytes of shared memory each: not yet visible to wgmma
static std::vector<std::vector<u32>> hiding;  // by each thread
inline void hide(u32 to) { hidden[to / 16] = true, hiding[threadIdx.x].push_back(to / 16); }

inline void st_shared(u32 to, uint4 v) { check(to, 16), memcpy(memory + to, &v, 16), hide(to); }
inline void st_shared(u32 to, u32 v) { check(to, 4), memcpy(memory + to, &v, 4), hide(to); }

struct Copy { u32 to; const void* from; bool there; };
struct Copies { std::vector<Copy> open; std::vector<std::vector<Copy>> groups; };
static std::vector<Copies> copies;  // of each thread

inline void cp_async(u32 to, const void* from, bool there) {
    check(to, 16);
    if ((size_t)from % 16) fprintf(stderr, "global memory: 16 bytes at %p\n", from), abort();
    memset(memory + to, 0xff, 16);
    copies[threadIdx.x].open.push_back({to, from, there});
}
inline void cp_async_commit_group() {
    Copies& mine = copies[threadIdx.x];
    mine.groups.push_back(mine.open);
    mine.open.clear();
}
template <int LEFT> void cp_async_wait_group() {
    auto& groups = copies[threadIdx.x].groups;
    for (; (int)groups.size() > LEFT; groups.erase(groups.begin()))
        for (const Copy& each : groups[0]) {
            if (each.there) memcpy(memory + each.to, each.from, 16);
            else memset(memory + each.to, 0, 16);
            hide(each.to);
        }
}

inline u32 rounded_one(float x) {
    u32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 cvt_bf16x2(float low, float high) { return rounded_one(low) | rounded_one(high) << 16; }
inline float relu(float x) { return x < 0 ? 0 : x; }  // not a number is not below zero
inline u32 cvt_relu_bf16x2(float low, float high) { return cvt_bf16x2(relu(low), relu(high)); }
inline uint4 ld_global_nc(const uint4* from) { return *from; }
inline u32 shfl_lane0(u32 x) { return x; }

// --- products of matrices in shared memory ------------------------------------------------------------------------------------

struct Product { float* sum; int columns; u64 a, b; bool trans_a, trans_b; float found[32]; };
struct Products { std::vector<Product> open; std::vector<std::vector<Product>> groups; };
static std::vector<Products> products;  // of each thread
static std::vector<Meeting> warpgroups;

template <int BYTES> u64 wgmma_descriptor(u32 start, u32 stride, u32 leading = 16) {
    return (u64)(start >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)(BYTES / 32) << 48;
}

inline float entry(u64 descriptor, bool trans, int k, int other) {
    u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    u32 bytes = (descriptor >> 48) * 32;
    int line = trans ? k : other, column = trans ? other : k;
    u32 byte = start + line / 8 * stride + line % 8 * bytes + column / (bytes / 2) * leading + column % (bytes / 2) * 2;
    byte ^= (byte >> 7 & (bytes / 16 - 1)) << 4;
    check(byte, 2);
    if (hidden[byte / 16]) fprintf(stderr, "wgmma reads what no fence has made visible to it, at %u\n", byte), abort();
    unsigned short bits;
    memcpy(&bits, memory + byte, 2);
    return __uint_as_float((u32)bits << 16);
}

inline void multiply_now(const Product& p, float (&found)[32]) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float a[2][16];
    for (int k = 0; k < 16; k++)
        for (int lower = 0; lower < 2; lower++) a[lower][k] = entry(p.a, p.trans_a, k, warp * 16 + lane / 4 + lower * 8);
    for (int i = 0; i < p.columns / 2; i++) {
        found[i] = 0;
        for (int k = 0; k < 16; k++) found[i] += a[i / 2 % 2][k] * entry(p.b, p.trans_b, k, i / 4 * 8 + lane % 4 * 2 + i % 2);
    }
}

template <bool TRANS_A, bool TRANS_B, int HALF> void wgmma_m64k16(float (&sum)[HALF], u64 a, u64 b) {
    Product p = {sum, 2 * HALF, a, b, TRANS_A, TRANS_B};
    multiply_now(p, p.found);
    products[threadIdx.x].open.push_back(p);
}
inline void fence_proxy_async() {
    for (u32 each : hiding[threadIdx.x]) hidden[each] = false;
    hiding[threadIdx.x].clear();
}
inline void wgmma_fence() { meet(warpgroups[threadIdx.x / 128], 128, [] {}); }
inline void wgmma_commit_group() {
    Products& mine = products[threadIdx.x];
    mine.groups.push_back(mine.open);
    mine.open.clear();
}
template <int LEFT> void wgmma_wait_group() {
    auto& groups = products[threadIdx.x].groups;
    for (; (int)groups.size() > LEFT; groups.erase(groups.begin()))
        for (const Product& each : groups[0]) {
            float again[32];
            multiply_now(each, again);
            if (memcmp(again, each.found, each.columns * 2)) fprintf(stderr, "a product's numbers changed under way\n"), abort();
            for (int i = 0; i < each.columns / 2; i++) each.sum[i] += again[i];
        }
}

// --- a launch ---------------------------------------------------------------------------------------------------------------

static void (*work)(void**);
static void** arguments;

inline void fiber() {
    work(arguments);
    fibers[threadIdx.x].over = true;
    yield();
}

template <class... A, size_t... I> void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*(A*)args[I]...);
}
template <class... A> void call(void (*kernel)(A...), void** args) { call(kernel, args, std::index_sequence_for<A...>{}); }

inline void launch(int blocks, int layers, int threads, int shared, void** args) {
    arguments = args, bytes = shared, gridDim = {(u32)blocks, (u32)layers};
    for (int block = 0; block < blocks * layers; block++) {
        blockIdx = {(u32)(block % blocks), (u32)(block / blocks)};
        memset(memory, 0xff, bytes);  // bf16 that is not a number
        fibers.assign(threads, {}), lanes.assign(threads, {}), warps.assign(threads / 32, {}), everyone = {};
        copies.assign(threads, {}), products.assign(threads, {}), hiding.assign(threads, {});
        warpgroups.assign(threads / 128 + 1, {});
        memset(hidden, false, sizeof hidden);
        for (auto& each : fibers) {
            each.stack.resize(1 << 17);
            getcontext(&each.context);
            each.context.uc_stack.ss_sp = each.stack.data(), each.context.uc_stack.ss_size = each.stack.size();
            makecontext(&each.context, fiber, 0);
        }
        for (int left = threads; left;) {
            int first = rand() % (threads / 32) * 32;  // this warp goes on in any case, others perhaps
            for (int i = 0; i < threads; i++) {
                int mine = threadIdx.x = (first + i) % threads;
                if (fibers[mine].over || (i >= 32 && rand() % 4 == 0)) continue;
                swapcontext(&scheduler, &fibers[mine].context);
                left -= fibers[mine].over;
            }
        }
    }
}
