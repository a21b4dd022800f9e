// A 3x3 convolution of NHWC pictures with a row of zeros around them, for Hopper: a product of pixels by channels, whose
// sum runs over nine neighbours and the channels of each (an implicit GEMM).
//
// Tiles are 128 pixels, a box of some columns, rows and images, by WIDTH channels of the result. One warp sends the copy
// engine for them, 64 terms of the sum at a time, into a ring of STAGES slots: a neighbour's box is the same box moved by a
// pixel, and what lies outside of the picture comes as zeros. Two groups of four warps multiply; blocks compute tiles until
// there are none left.
//
// What is given: WIDTH; TURNS, whether the groups take tiles in turn, so that one finishes its tile while the other
// multiplies (CUTLASS calls it ping-pong), or share each; STAGES; PAIR, how many blocks, with pixels next to each other,
// share what they load of the weight, 1 or 2; SPLIT, how many blocks share the sum of a tile, which is put together
// through shared memory, with PAIR 1, no TURNS and a block for each part of a tile; GROUP, how many channels of the result
// a group norm takes together, which divide WIDTH, or 0: then, with TURNS, what is added to the result goes in here, and
// the statistics of each tile's groups come out; BF16.

#include "hopper.h"
#if GROUP > 0
#include "group_sums.h"
#endif

// Pixels of a tile: 1 << across columns of 1 << down rows of the images that are left; and how many boxes wide and high
// an image is.
struct Boxes {
  int across, down, wide, high, width, height, images;
};

constexpr int kTaps = 9, kDepth = 64, kRows = 128;  // kDepth: terms of the sum in a slot, 128 bytes
constexpr int kThreads = 3 * 128;
constexpr int kHalves = TURNS ? 2 : 1;  // of a tile's pixels, for each group that has it
constexpr int kCluster = PAIR * SPLIT;
constexpr int kPictureBytes = kRows * 128, kWeightBytes = WIDTH * 128, kStage = kPictureBytes + kWeightBytes;
constexpr int kSums = WIDTH / 2;  // of a thread, for 64 pixels
#if SPLIT > 1
constexpr int kPitch = WIDTH + 8;  // floats from row to row where blocks put sums together
#else
constexpr int kChunk = 32, kPitch = 2 * kChunk + 16;  // columns that a warp writes at a time, bytes from row to row
#endif

// picture: a map over (images, height, width, channels), boxes of a tile's pixels by 64 channels. weight: over (columns,
// 9 channels), boxes of WIDTH / PAIR by 64. out (images, height, width, columns). chunks: channels / 64. tiles_down: of
// pixels, by PAIR; tiles_across: of columns. With GROUP: shift (images, columns) and its rows' stride, or null; residual like
// out, or null; partial (2, images, boxes of one, groups): means and sums of squared deviations.
extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    conv2d(unsigned short* out, const __grid_constant__ TensorMap picture, const __grid_constant__ TensorMap weight,
           int chunks, int columns, int tiles_down, int tiles_across, const __grid_constant__ Boxes boxes
#if GROUP > 0
           ,
           const unsigned short* shift, int shift_stride, const unsigned short* residual, float* partial
#endif
    ) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + 2];
  const u32 base = (address(shared) + 1023) & ~1023u;
  const u32 full = address(barriers), free = full + 8 * STAGES, order = free + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  u32 rank = 0;
  if (kCluster > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));

  if (threadIdx.x == 0) {
    initialise_ring(full, free, STAGES, (TURNS ? 4 : 8) * PAIR);
    initialise(order, 4);
    initialise(order + 8, 4);
    initialised();
    next_may_begin();
  }
  if (kCluster > 1)
    meet();
  else
    __syncthreads();

  const int all_steps = kTaps * chunks, tiles = tiles_down * tiles_across;
  const int first_step = SPLIT > 1 ? all_steps * rank / SPLIT : 0;
  const int last_step = SPLIT > 1 ? all_steps * (rank + 1) / SPLIT : all_steps;
  // tiles of the same pixels follow each other
  auto down = [&](int tile) { return tile / tiles_across * PAIR + (PAIR > 1 ? int(rank) : 0); };

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 8) {
      const u32 mine = elected();
      u32 slot = 0, parity = 1;
      auto bring_weight = [&](int tile, int step, u32 slot) {
        const u32 barrier = full + 8 * slot, to = base + slot * kStage + kPictureBytes;
        const int column = tile % tiles_across * WIDTH, part = rank * (WIDTH / PAIR);
        expect(mine, barrier, kStage);
        if (PAIR > 1)
          copy_to_both(mine, to + part * 128, &weight, barrier, step * kDepth, column + part);
        else
          copy(mine, to, &weight, barrier, step * kDepth, column);
      };
      const int first_tile = blockIdx.x / kCluster, ahead = min(STAGES, last_step - first_step);
      for (int step = 0; step < ahead; ++step) bring_weight(first_tile, first_step + step, step);
      after_previous();
      for (int tile = first_tile; tile < tiles; tile += gridDim.x / kCluster) {
        const int box = down(tile);
        const int x = box % boxes.wide << boxes.across, y = box / boxes.wide % boxes.high << boxes.down;
        const int image = box / (boxes.wide * boxes.high) * (kRows >> (boxes.across + boxes.down));
        int tap = first_step / chunks, chunk = first_step % chunks;
        for (int step = first_step; step < last_step; ++step) {
          if (tile != first_tile || step - first_step >= ahead) {
            wait(free + 8 * slot, parity);
            bring_weight(tile, step, slot);
          }
          copy(mine, base + slot * kStage, &picture, full + 8 * slot, chunk * kDepth, x + tap % 3 - 1, y + tap / 3 - 1,
               image);
          if (++chunk == chunks) {
            chunk = 0;
            ++tap;
          }
          if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
          }
        }
      }
    }
#if SPLIT > 1
    meet_written();
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    after_previous();
    const int group = __shfl_sync(~0u, warp >> 2, 0);
    const u32 target = PAIR > 1 ? lane : rank;
    float sum[kHalves][kSums];
    u32 used = 0, previous = 0;  // slots so far
    int turn = 0, done = 0;      // whose tile it is; tiles of this group
    for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster, turn ^= 1) {
      u32 slot = used % STAGES, parity = used / STAGES & 1;
      used += last_step - first_step;
      if (TURNS) {
        if (turn != group) continue;
        // a slot's barrier tells two fillings apart, no more: whoever waits at one must be next
        if (group > 0 || done > 0) wait(order + 8 * group, (done - 1 + group) & 1);
        ++done;
      }
      for (int step = first_step; step < last_step; ++step) {
        wait(full + 8 * slot, parity);
        pin(sum);
        open();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k)
#pragma unroll
          for (int half = 0; half < kHalves; ++half)
            multiply(sum[half], operand(base + slot * kStage + (TURNS ? half : group) * 64 * 128 + 32 * k),
                     operand(base + slot * kStage + kPictureBytes + 32 * k), step - first_step + k);
        close();
        await<1>();
        if (step > first_step && lane < PAIR) arrive(free + 8 * previous, target);
        previous = slot;
        if (++slot == STAGES) {
          slot = 0;
          parity ^= 1;
        }
      }
      if (TURNS && lane == 0) arrive(order + 8 * (1 - group), rank);
      await<0>();
      pin(sum);
      if (lane < PAIR) arrive(free + 8 * previous, target);

      const int box = down(tile), column = tile % tiles_across * WIDTH;
      const int x = box % boxes.wide << boxes.across, y = box / boxes.wide % boxes.high << boxes.down;
      const int image = box / (boxes.wide * boxes.high) * (kRows >> (boxes.across + boxes.down));
      auto pixel = [&](int row) {  // of the tile, in all of `out`; -1 where there is none
        const int px = x + (row & ((1 << boxes.across) - 1)), py = y + (row >> boxes.across & ((1 << boxes.down) - 1));
        const int pn = image + (row >> (boxes.across + boxes.down));
        const bool there = px < boxes.width && py < boxes.height && pn < boxes.images;
        return there ? (pn * boxes.height + py) * boxes.width + px : -1;
      };
#if GROUP == 0
      auto store = [&](int row, int at, uint4 eight) {  // columns at to at + 7 of a pixel of the tile
        const int to = pixel(row);
        if (to >= 0 && column + at < columns) *(uint4*)(out + (long long)to * columns + column + at) = eight;
      };
#endif
#if SPLIT > 1
      // each block puts its sums where its slots were, then adds a share of the rows of all
      asm volatile("bar.sync 1, %0;" ::"n"(2 * 128) : "memory");
      float* own = (float*)(shared + (base - address(shared)));
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int i = 0; i < kSums; i += 2) {
          const int row = group * 64 + (warp & 3) * 16 + (lane >> 2) + 8 * (i >> 1 & 1);
          *(float2*)(own + row * kPitch + 8 * (i >> 2) + 2 * (lane & 3)) =
              make_float2(sum[half][i], sum[half][i + 1]);
        }
      meet_written();
      constexpr int kAcross = WIDTH / 8, kShare = kRows / SPLIT, kTimes = (kShare * kAcross + 255) / 256;
      float part[kTimes][SPLIT][8];  // all under way before the first is waited for: it is far to another block
#pragma unroll
      for (int time = 0; time < kTimes; ++time) {
        const int i = min(time * 256 + int(threadIdx.x), kShare * kAcross - 1);
        const u32 at = base + 4 * ((rank * kShare + i / kAcross) * kPitch + i % kAcross * 8);
#pragma unroll
        for (int other = 0; other < SPLIT; ++other) {
          u32 there;
          asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(other));
#pragma unroll
          for (int four = 0; four < 8; four += 4) {
            float* v = part[time][other] + four;
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                         : "r"(there + 4 * four)
                         : "memory");
          }
        }
      }
#pragma unroll
      for (int time = 0; time < kTimes; ++time) {
        const int i = time * 256 + threadIdx.x;
        float total[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          total[j] = part[time][0][j];
#pragma unroll
          for (int other = 1; other < SPLIT; ++other) total[j] += part[time][other][j];
        }
        if (i < kShare * kAcross)
          store(rank * kShare + i / kAcross, i % kAcross * 8,
                make_uint4(packed(total[0], total[1]), packed(total[2], total[3]), packed(total[4], total[5]),
                           packed(total[6], total[7])));
      }
#elif GROUP > 0
      const u32 own = base + STAGES * kStage + warp * 16 * kPitch;
      constexpr int kLanes = kChunk / 8, kEach = 32 / kLanes, kLoads = 16 / kEach;  // lanes of a row, rows that a warp moves
      constexpr int kMoves = WIDTH / kChunk * kHalves, kAhead = TURNS ? 2 : 3;  // loads of the residual that are under way
      const int pair = column + 2 * (lane & 3);
      const unsigned short* added = shift == nullptr ? nullptr : shift + (long long)image * shift_stride + pair;
      int rows[kHalves][kLoads];  // the pixels that this lane moves a part of; -1 where there is none
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          rows[half][i] = pixel((TURNS ? half : group) * 64 + (warp & 3) * 16 + i * kEach + lane / kLanes);
      const int eighth = column + lane % kLanes * 8;
      uint4 ahead[kAhead][kLoads];
      u32 more[2][kChunk / 8];
      auto fetch = [&](int move) {  // columns are the outer loop, as both halves have the same shift
        const int first = move / kHalves * kChunk;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int from = rows[move % kHalves][i];
          ahead[move % kAhead][i] = make_uint4(0u, 0u, 0u, 0u);
          if (residual != nullptr && from >= 0)
            ahead[move % kAhead][i] = *(const uint4*)(residual + (long long)from * columns + eighth + first);
        }
      };
      auto look = [&](int chunk) {
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n)
          more[chunk % 2][n] = added == nullptr ? 0u : *(const u32*)(added + chunk * kChunk + 8 * n);
      };
      look(0);
#pragma unroll
      for (int move = 0; move < kAhead && move < kMoves; ++move) fetch(move);
#pragma unroll
      for (int move = 0; move < kMoves; ++move) {
        const int half = move % kHalves, chunk = move / kHalves, first = chunk * kChunk;
        if (half == 0 && first + kChunk < WIDTH) look(chunk + 1);
        __syncwarp();
        if (residual != nullptr) {
#pragma unroll
          for (int i = 0; i < kLoads; ++i) {
            const uint4 eight = ahead[move % kAhead][i];
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                             own + (i * kEach + lane / kLanes) * kPitch + lane % kLanes * 16),
                         "r"(eight.x), "r"(eight.y), "r"(eight.z), "r"(eight.w)
                         : "memory");
          }
          if (move + kAhead < kMoves) fetch(move + kAhead);
          __syncwarp();
        }
#pragma unroll
        for (int j = 0; j < kChunk / 8; j += 2) {
          u32 two[4] = {0u, 0u, 0u, 0u};
          const u32 place = own + (lane & 15) * kPitch + (j + (lane >> 4)) * 16;
          if (residual != nullptr)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(two[0]), "=r"(two[1]), "=r"(two[2]), "=r"(two[3])
                         : "r"(place)
                         : "memory");
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float* of = sum[half] + 4 * (first / 8 + j + (i >> 1)) + 2 * (i & 1);
            const float2 one = unpacked(two[i]), other = unpacked(more[chunk % 2][j + (i >> 1)]);
            two[i] = packed(of[0] + (one.x + other.x), of[1] + (one.y + other.y));
            const float2 rounded = unpacked(two[i]);  // what is normalised
            of[0] = rounded.x;
            of[1] = rounded.y;
          }
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(two[0]),
                       "r"(two[1]), "r"(two[2]), "r"(two[3])
                       : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          uint4 eight;
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                       : "r"(own + (i * kEach + lane / kLanes) * kPitch + lane % kLanes * 16)
                       : "memory");
          if (rows[half][i] >= 0) *(uint4*)(out + (long long)rows[half][i] * columns + eighth + first) = eight;
        }
      }

      // means first, then deviations from them: exact, and what lies in registers is read twice for nothing
      __shared__ float totals[2][8][kGroups], squares[2][8][kGroups], means[8][kGroups];
      constexpr int kWarps = TURNS ? 4 : 8;  // that have a part of the tile
      const int set = TURNS ? group : 0, member = TURNS ? warp & 3 : warp;
      bool there[2 * kHalves];
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i)
        there[i] = pixel((TURNS ? i >> 1 : group) * 64 + (warp & 3) * 16 + (i & 1) * 8 + (lane >> 2)) >= 0;
      const float count = float(GROUP * max(min(1 << boxes.across, boxes.width - x), 0) *
                                max(min(1 << boxes.down, boxes.height - y), 0));
      by_groups(totals[set][member], lane, [&](int j) {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i)
          total += there[i] ? sum[i >> 1][4 * j + 2 * (i & 1)] + sum[i >> 1][4 * j + 2 * (i & 1) + 1] : 0.f;
        return total;
      });
      asm volatile("bar.sync %0, %1;" ::"r"(2 + set), "n"(32 * kWarps) : "memory");
      if (lane < kGroups) {
        float mean = 0.f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) mean += totals[set][i][lane];
        means[warp][lane] = mean / count;
      }
      __syncwarp();
      by_groups(squares[set][member], lane, [&](int j) {
        const float mean = means[warp][(4 * j + (lane & 3)) / (GROUP / 2)];
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < 4 * kHalves; ++i) {
          const float d = sum[i >> 2][4 * j + (i & 3)] - mean;
          total += there[i >> 1] ? d * d : 0.f;
        }
        return total;
      });
      asm volatile("bar.sync %0, %1;" ::"r"(2 + set), "n"(32 * kWarps) : "memory");
      if (member == 0 && lane < kGroups && image < boxes.images) {
        const int groups = columns / GROUP, parts = boxes.wide * boxes.high;
        float* to = partial + ((long long)image * parts + box % parts) * groups + column / GROUP + lane;
        float deviations = 0.f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) deviations += squares[set][i][lane];
        to[0] = means[warp][lane];
        to[(long long)boxes.images * parts * groups] = deviations;
      }
#else
      const u32 own = base + STAGES * kStage + warp * 16 * kPitch;
      constexpr int kLanes = kChunk / 8, kEach = 32 / kLanes;  // lanes of a row; rows that a warp writes at once
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int first = 0; first < WIDTH; first += kChunk) {
          __syncwarp();
#pragma unroll
          for (int j = 0; j < kChunk / 8 && first + 8 * j < WIDTH; j += 2) {
            const float* of = sum[half] + 4 * (first / 8 + j);
            const u32 to = own + (lane & 15) * kPitch + (j + (lane >> 4)) * 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                         "r"(packed(of[0], of[1])), "r"(packed(of[2], of[3])), "r"(packed(of[4], of[5])),
                         "r"(packed(of[6], of[7]))
                         : "memory");
          }
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 16 / kEach; ++i) {
            const int row = i * kEach + lane / kLanes, at = lane % kLanes * 8;
            uint4 eight;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                         : "r"(own + row * kPitch + 2 * at)
                         : "memory");
            if (first + at < WIDTH) store((TURNS ? half : group) * 64 + (warp & 3) * 16 + row, first + at, eight);
          }
        }
#endif
    }
  }
  if (kCluster > 1) meet();  // none ends while others still send to it, or read from it
}
