// Gradient of Gather: rows added where they were taken from, in the order of their places.
//
// The places are sorted by row, stably, digit by digit (a least-significant-digit radix sort), so
// that equal rows lie side by side in the order of their places. Then a warp adds up the rows of
// kRun sorted places at a time. A row that reaches beyond a run leaves its sums of the run in
// `parts`, which the warp of the run where the row begins adds in order. So nothing is added by
// atomic operations, and a row that is taken thousands of times is spread over many warps.
#include "common.cuh"
#include "gather.cuh"

// An index that names no row is reported, and counts as row `rows`, which nobody adds up.
extern "C" __global__ void gather_rows(Place* places, const Index* indices, Index count,
                                       Index rows, Fault* fault) {
  for (Index i = thread_index(); i < count; i += thread_count()) {
    const Index index = indices[i];
    const Index row = index < 0 ? index + rows : index;
    const bool valid = row >= 0 && row < rows;
    if (!valid) report(fault, i, index);
    places[i] = {static_cast<unsigned>(valid ? row : rows), static_cast<unsigned>(i)};
  }
}

namespace {

// The places of a tile that a warp has in one round are 32 neighbours, and its rounds follow one
// another, so that warps and rounds in order are the places in order.
__device__ Index place_of(int round) {
  const Index warp = threadIdx.x / 32;
  return static_cast<Index>(blockIdx.x) * kTile + (warp * kRounds + round) * 32 + threadIdx.x % 32;
}

// The lanes that have the same digit; lanes without a place have none.
__device__ unsigned same_digit(unsigned digit, bool valid) {
  unsigned same = __ballot_sync(kAllLanes, valid);
  for (int bit = 0; bit < 8; ++bit) {
    const bool set = ((digit >> bit) & 1u) != 0;
    const unsigned lanes = __ballot_sync(kAllLanes, set);
    same &= set ? lanes : ~lanes;
  }
  return same;
}

// counts[warp][digit] of this block's tile; before(places so far of a digit, which of them this is)
// is called for every place in turn.
template <class F>
__device__ void count_digits(unsigned (*counts)[kDigits], const Place* places, Index count,
                             int shift, const F& before) {
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  for (int round = 0; round < kRounds; ++round) {
    const Index i = place_of(round);
    const bool valid = i < count;
    const Place place = valid ? places[i] : Place{0, 0};
    const unsigned digit = (place.row >> shift) % kDigits;
    const unsigned same = same_digit(digit, valid);
    if (valid) before(place, counts[warp][digit] + __popc(same & ((1u << lane) - 1u)));
    __syncwarp();
    // The first of the lanes with a digit counts for all.
    if (valid && (same & ((1u << lane) - 1u)) == 0) counts[warp][digit] += __popc(same);
    __syncwarp();
  }
}

__device__ void clear(unsigned (*counts)[kDigits]) {
  for (int warp = 0; warp < kSortWarps; ++warp) counts[warp][threadIdx.x] = 0;
  __syncthreads();
}

}  // namespace

// totals[digit][tile], how many places of the tile have the digit.
extern "C" __global__ void gather_count(unsigned* totals, const Place* places, Index count,
                                        int shift) {
  __shared__ unsigned counts[kSortWarps][kDigits];
  clear(counts);
  count_digits(counts, places, count, shift, [](const Place&, unsigned) {});
  __syncthreads();
  unsigned sum = 0;
  for (int warp = 0; warp < kSortWarps; ++warp) sum += counts[warp][threadIdx.x];
  totals[static_cast<Index>(threadIdx.x) * gridDim.x + blockIdx.x] = sum;
}

// One block: every total becomes the sum of those before it.
extern "C" __global__ void gather_scan(unsigned* totals, Index count) {
  __shared__ unsigned sums[kSortThreads];
  const Index each = (count + kSortThreads - 1) / kSortThreads;
  const Index begin = threadIdx.x * each;
  const Index end = begin + each < count ? begin + each : count;
  unsigned sum = 0;
  for (Index i = begin; i < end; ++i) sum += totals[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  unsigned before = 0;
  for (unsigned i = 0; i < threadIdx.x; ++i) before += sums[i];
  for (Index i = begin; i < end; ++i) {
    const unsigned here = totals[i];
    totals[i] = before;
    before += here;
  }
}

extern "C" __global__ void gather_move(Place* to, const Place* places, const unsigned* totals,
                                       Index count, int shift) {
  __shared__ unsigned counts[kSortWarps][kDigits];
  clear(counts);
  count_digits(counts, places, count, shift, [](const Place&, unsigned) {});
  __syncthreads();
  // From here on counts[warp][digit] is where the next such place of the warp goes.
  unsigned next = totals[static_cast<Index>(threadIdx.x) * gridDim.x + blockIdx.x];
  for (int warp = 0; warp < kSortWarps; ++warp) {
    const unsigned here = counts[warp][threadIdx.x];
    counts[warp][threadIdx.x] = next;
    next += here;
  }
  __syncthreads();
  count_digits(counts, places, count, shift,
               [&](const Place& place, unsigned at) { to[at] = place; });
}

namespace {

__device__ Index columns_of(const Sums& sums) { return sums.outer * sums.inner; }
// Where a place's element of a column lies in dy, and a row's in dx.
__device__ Index source_of(const Sums& sums, Index from, Index column) {
  return (column / sums.inner * sums.count + from) * sums.inner + column % sums.inner;
}
__device__ Index target_of(const Sums& sums, Index row, Index column) {
  return (column / sums.inner * sums.rows + row) * sums.inner + column % sums.inner;
}

__device__ Index first_run() {
  return static_cast<Index>(blockIdx.y) * blockDim.y + threadIdx.y;
}
__device__ Index run_step() { return static_cast<Index>(gridDim.y) * blockDim.y; }

}  // namespace

// Blocks of 32 x 8 threads: 32 columns, 8 runs at a time. parts[run][0] is the sum of the row that a run
// begins in the middle of, parts[run][1] that of the one that it ends in the middle of.
extern "C" __global__ void gather_sums(Element* dx, Real* parts, const Element* dy,
                                       const Place* places, Sums sums) {
  const Index column = static_cast<Index>(blockIdx.x) * 32 + threadIdx.x;
  if (column >= columns_of(sums)) return;
  for (Index run = first_run(); run * kRun < sums.count; run += run_step()) {
    const Index begin = run * kRun;
    const Index end = begin + kRun < sums.count ? begin + kRun : sums.count;
    const bool goes_on = end < sums.count && places[end].row == places[end - 1].row;
    // Whether the row that is being added began in an earlier run.
    bool before = begin > 0 && places[begin - 1].row == places[begin].row;
    Real sum = 0;
    for (Index i = begin; i < end; ++i) {
      const Place place = places[i];
      sum += widen(dy[source_of(sums, place.from, column)]);
      if (i + 1 < end && places[i + 1].row == place.row) continue;
      if (before) {
        parts[run * 2 * columns_of(sums) + column] = sum;
      } else if (i + 1 == end && goes_on) {
        parts[(run * 2 + 1) * columns_of(sums) + column] = sum;
      } else if (place.row < sums.rows) {
        narrow(dx + target_of(sums, place.row, column), sum);
      }
      before = false;
      sum = 0;
    }
  }
}

// The warp of a run that a row begins in and reaches beyond adds what the next runs have of it.
extern "C" __global__ void gather_join(Element* dx, const Real* parts, const Place* places,
                                       Sums sums) {
  const Index column = static_cast<Index>(blockIdx.x) * 32 + threadIdx.x;
  if (column >= columns_of(sums)) return;
  for (Index run = first_run(); (run + 1) * kRun < sums.count; run += run_step()) {
    const Index begin = run * kRun;
    const Index end = begin + kRun;
    const unsigned row = places[end - 1].row;
    const bool one_row = places[begin].row == row;
    const bool begins_here = !one_row || begin == 0 || places[begin - 1].row != row;
    if (places[end].row != row || !begins_here || row >= sums.rows) continue;
    Real sum = parts[(run * 2 + 1) * columns_of(sums) + column];
    for (Index next = run + 1; next * kRun < sums.count && places[next * kRun].row == row;
         ++next) {
      sum += parts[next * 2 * columns_of(sums) + column];
    }
    narrow(dx + target_of(sums, row, column), sum);
  }
}
