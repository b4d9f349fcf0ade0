// SPDX-License-Identifier: Apache-2.0
// Checks and times a chunk kernel; README.md names the arguments. No argument: all but quick.
// Exit 0 all good, 1 a check failed, 2 CUDA error, 3 watchdog (a launch took more than 5 s; its name is printed).

#if defined(PRECISION)   // of the mma.sync kernel: 0 normal, 1 high
#include "cuda/chunk_mma/launch.cu"
#define VARIANT
#else
#include "cuda/chunk_sm90/launch.cu"
#endif

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#if defined(PRECISION)
#include "cases.h"
#else
#include "steps.h"
#include "watch.h"
#endif

using namespace gdn;
using namespace gdn::cuda;
using cases::Case;
using cases::Problem;

#if defined(PRECISION)
constexpr bool kIsHigh = PRECISION == 1;
using Prepared = std::conditional_t<kIsHigh, chunk_mma::HighSolved, chunk_mma::Solved>;
static const char* compute(const RuleParams& r, void* stream) { return chunk_mma_gated_delta_rule(r, stream); }
static int64_t bytes_of(const RuleParams& r) { return chunk_mma_workspace_bytes(r); }
static const char* prepare(const RuleParams& r, void* stream) { return launch_prepare<bf16_t, 128, Prepared>(r, stream); }
static const char* carry(const RuleParams& r, void* stream) { return launch_carry<bf16_t, bf16_t, 128, Prepared>(r, stream); }
constexpr size_t kSharedBytes = sizeof(chunk_mma::SharedMemory<128, Prepared>);
#else
constexpr bool kIsHigh = false;
static const char* compute(const RuleParams& r, void* stream) { return chunk_sm90_gated_delta_rule(r, stream); }
static int64_t bytes_of(const RuleParams& r) { return chunk_sm90_workspace_bytes(r); }
static const char* prepare(const RuleParams& r, void* stream) { return launch_prepare<bf16_t, 128>(r, stream); }
static const char* clear_queue(const RuleParams& r, void* stream) {   // as the preparation leaves it
  if (!has_queue(r)) return nullptr;
  return error_text(cudaMemsetAsync(&queue_of<128>(r)->taken, 0, sizeof(uint32_t), static_cast<cudaStream_t>(stream)));
}
static const char* carry(const RuleParams& r, void* stream) {
  if (const char* error = clear_queue(r, stream)) return error;
  return launch_carry<bf16_t, bf16_t, 128>(r, choose_pairs(r, this_machine()), stream);
}
constexpr size_t kSharedBytes = sizeof(chunk_sm90::SharedMemory<128>);
#endif

static std::atomic<int64_t> deadline{0};
static const char* running = "";
static int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
static void start_watchdog() {
  std::thread([] {
    while (true) {
      usleep(50000);
      const int64_t d = deadline.load();
      if (d && now_ms() > d) { printf("WATCHDOG: %s hangs\n", running); fflush(stdout); _exit(3); }
    }
  }).detach();
}
#define CHECK(x)                                                                             \
  do {                                                                                       \
    const cudaError_t e_ = (x);                                                              \
    if (e_ != cudaSuccess) {                                                                 \
      printf("CUDA error at line %d (%s): %s\n", __LINE__, running, cudaGetErrorString(e_)); \
      fflush(stdout);                                                                        \
      _exit(2);                                                                              \
    }                                                                                        \
  } while (0)
static void synchronize(const char* name) {
  running = name;
  deadline = now_ms() + 5000;
  CHECK(cudaDeviceSynchronize());
  deadline = 0;
}
static void must(const char* error) {
  if (error) {
    printf("launch refused (%s): %s\n", running, error);
    fflush(stdout);
    _exit(2);
  }
}

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  Buffer() = default;
  Buffer(const void* host, size_t n) : bytes(n) {
    CHECK(cudaMalloc(&data, n ? n : 16));
    if (n && host) CHECK(cudaMemcpy(data, host, n, cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { if (data) cudaFree(data); }
  std::vector<char> get() const {
    std::vector<char> h(bytes);
    CHECK(cudaMemcpy(h.data(), data, bytes, cudaMemcpyDeviceToHost));
    return h;
  }
};
template <class T> static Buffer upload(const std::vector<T>& v) { return Buffer(v.data(), v.size() * sizeof(T)); }

struct Device {
  Buffer qkv, g, beta, cu, slots, out_slots, has, state_in, state_out, out;
  std::vector<char> sentinel;
  explicit Device(const Problem& p)
      : qkv(upload(p.qkv)),
        g(upload(p.g)),
        beta(upload(p.beta)),
        cu(upload(p.cu)),
        slots(upload(p.slots)),
        out_slots(upload(p.out_slots)),
        has(upload(p.has_initial)),
        state_in(upload(p.state_in)),
        state_out(nullptr, p.state_in.size()),
        out(nullptr, static_cast<size_t>(p.B) * p.T * p.c.Hv * 128 * (p.c.out_fp32 ? 4 : 2)),
        sentinel(p.state_in.size(), 0x55) {
    reset();
  }
  void reset() {
    CHECK(cudaMemcpy(state_out.data, sentinel.data(), sentinel.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(out.data, 0x7f, out.bytes));
  }
  cases::Pointers pointers() const {
    return {qkv.data,       g.data,   beta.data,     cu.data,        slots.data,
            out_slots.data, has.data, state_in.data, state_out.data, out.data};
  }
};

// The parameters with a workspace, which `buffer` keeps.
static RuleParams with_workspace(RuleParams r, std::unique_ptr<Buffer>& buffer) {
  r.is_high_precision = kIsHigh;
  buffer = std::make_unique<Buffer>(nullptr, bytes_of(r));
  r.workspace = buffer->data;
  return r;
}

static bool check_case(const Case& c) {
  running = c.name.c_str();
  const Problem p = cases::make(c);
  const cases::Reference ref = cases::reference(p);
  Device d(p);
  std::unique_ptr<Buffer> workspace;
  const RuleParams r = with_workspace(cases::params(p, d.pointers()), workspace);
  must(compute(r, nullptr));
  synchronize(c.name.c_str());
  const cases::Errors e = cases::compare(p, ref, d.out.get(), d.state_out.get(), d.sentinel);
  double out_limit, state_limit;
  const bool ok = cases::judge(c, kIsHigh, e, &out_limit, &state_limit);
  printf("%-46s out %.2e (%.1e)  state %.2e (%.1e)  %s%s%s\n", c.name.c_str(), e.out, out_limit, e.state, state_limit,
         ok ? "ok" : "FAIL", e.nan ? " nan" : "", e.untouched_ok ? "" : " unnamed slot touched");
  fflush(stdout);
  return ok;
}

static int run_checks(const char* want) {
  int bad = 0, count = 0;
  for (const Case& c : cases::all()) {
    if (c.name.find(want) == std::string::npos) continue;
    bad += !check_case(c);
    ++count;
  }
  printf("check: %d cases, %d bad\n", count, bad);
  return bad;
}

// Repeats and splits, bit by bit. All on one device copy of a dense problem; parts are views of it.
static int run_bits() {
  int bad = 0;
  for (DType io : {DType::kBFloat16, DType::kFloat16}) {
    for (int variant = 0; variant < 3; ++variant) {
      Case c;
      c.io = io;
      c.T = 333;
      c.N = 3;
      c.Hv = 4;
      c.Hk = 2;
      c.v_scale = variant == 1 ? 3e3f : 1;
      c.gates = variant == 2 ? 5 : 0;
      c.name = std::string("bits ") + (io == DType::kBFloat16 ? "bf16" : "fp16") + " variant " + std::to_string(variant);
      running = c.name.c_str();
      const Problem p = cases::make(c);
      Device d(p);
      std::unique_ptr<Buffer> workspace;
      const RuleParams r = with_workspace(cases::params(p, d.pointers()), workspace);
      must(compute(r, nullptr));
      synchronize(c.name.c_str());
      const auto out = d.out.get(), state = d.state_out.get();
      bool repeat = true;
      for (int i = 0; i < 20; ++i) {
        d.reset();
        must(compute(r, nullptr));
        synchronize(c.name.c_str());
        repeat = repeat && d.out.get() == out && d.state_out.get() == state;
      }
      bool split = true;
      for (int cut : {64, 128, 320}) {
        d.reset();
        RuleParams a = r, b = r;
        a.dims.T = cut;
        b.dims.T = c.T - cut;
        auto move = [&](View& v) { v.data = static_cast<char*>(v.data) + cut * v.stride[1] * dtype_size(v.dtype); };
        move(b.q), move(b.k), move(b.v), move(b.g), move(b.beta), move(b.out);
        b.initial_state = b.state;
        must(compute(a, nullptr));
        must(compute(b, nullptr));
        synchronize(c.name.c_str());
        split = split && d.out.get() == out && d.state_out.get() == state;
      }
      bool alone = true;   // row 1 by itself
      d.reset();
      RuleParams a = r;
      a.dims.N = a.dims.B = 1;
      auto row = [&](View& v) { v.data = static_cast<char*>(v.data) + v.stride[0] * dtype_size(v.dtype); };
      row(a.q), row(a.k), row(a.v), row(a.g), row(a.beta), row(a.out), row(a.state), row(a.initial_state);
      a.pool_in = a.pool_out = 1;
      must(compute(a, nullptr));
      synchronize(c.name.c_str());
      const auto out1 = d.out.get(), state1 = d.state_out.get();
      alone = !memcmp(&out1[out1.size() / 3], &out[out.size() / 3], out.size() / 3) &&
              !memcmp(&state1[state1.size() / 3], &state[state.size() / 3], state.size() / 3);
      printf("%s: repeat %s, split %s, alone %s\n", c.name.c_str(), repeat ? "equal" : "DIFFER", split ? "equal" : "DIFFER",
             alone ? "equal" : "DIFFER");
      bad += !repeat + !split + !alone;
    }
  }
  return bad;
}

#ifndef VARIANT
template <class io_t>
static int debug_case(DType io, int chunk) {
  Case c;
  c.io = io;
  c.T = 150;
  c.name = std::string("debug ") + (io == DType::kBFloat16 ? "bf16" : "fp16") + " chunk " + std::to_string(chunk);
  running = c.name.c_str();
  const Problem p = cases::make(c);
  Device d(p);
  std::unique_ptr<Buffer> workspace;
  const RuleParams r = with_workspace(cases::params(p, d.pointers()), workspace);
  const size_t sizes[8] = {64 * 128, 64 * 128, 64 * 64, 64 * 64, 64, 64 * 64, 64 * 64, 64 * 64};
  std::vector<std::unique_ptr<Buffer>> b;
  for (size_t s : sizes) {
    b.push_back(std::make_unique<Buffer>(nullptr, s * 4));
    CHECK(cudaMemset(b.back()->data, 0xff, s * 4));
  }
  auto at = [&](int i) { return static_cast<float*>(b[i]->data); };
  const Watch watch = {chunk, at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)};
  must(compute(r, nullptr));
  must(launch(chunk_sm90::chunk_kernel<io_t, io_t, 128, Watch>, 2 * 2 * 2, chunk_sm90::kThreads,
              sizeof(chunk_sm90::SharedMemory<128>), nullptr, r, chunk_sm90::Tasks{}, watch));
  synchronize(c.name.c_str());
  std::vector<std::vector<float>> got;
  for (int i = 0; i < 8; ++i) {
    const auto h = b[i]->get();
    got.emplace_back(sizes[i]);
    memcpy(got.back().data(), h.data(), h.size());
  }
  return compare_watch(p, io, chunk, got);
}

#endif

// ms of one call: a CUDA graph of `calls` launches, median of replays.
template <class Call>
static double time_graph(const Call& call, const char* name) {
  running = name;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  must(call(stream));
  deadline = now_ms() + 5000;
  CHECK(cudaStreamSynchronize(stream));
  deadline = 0;
  const int calls = 5;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) must(call(stream));
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    deadline = now_ms() + 5000;
    CHECK(cudaEventRecord(a, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(b, stream));
    CHECK(cudaEventSynchronize(b));
    deadline = 0;
    float ms;
    CHECK(cudaEventElapsedTime(&ms, a, b));
    if (i >= 2) times.push_back(ms / calls);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

__global__ void fill(uint16_t* x, size_t n, float scale, unsigned seed, bool is_bf16) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u + seed;
    h ^= h >> 16; h *= 0x85ebca6bu; h ^= h >> 13; h *= 0xc2b2ae35u; h ^= h >> 16;
    const float y = scale * (static_cast<float>(h) * 4.6566129e-10f - 1.0f) * 1.7f;
    x[i] = is_bf16 ? from_float<bf16_t>(y).bits : from_float<fp16_t>(y).bits;
  }
}
__global__ void fill_gates(float* g, float* beta, size_t n) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    g[i] = -0.001f - 0.1f * ((i * 2654435761u >> 8) % 1000) / 1000.0f;
    beta[i] = 0.1f + 0.8f * ((i * 40503u >> 4) % 1000) / 1000.0f;
  }
}

struct TimedShape {
  int N, T, Hk, Hv;
  double must_ms;
  bool l2norm;
  DType io;
  std::vector<int> packed = {};   // the rows' lengths, N of them
};

static std::vector<TimedShape> timed_shapes() {
  const DType bf = DType::kBFloat16, fp = DType::kFloat16;
  const auto rows = [](int count, int length) { return std::vector<int>(count, length); };
  return {
      {1, 64, 16, 48, 0, true, bf},
      {1, 128, 16, 48, 0, true, bf},
      {1, 256, 16, 48, 0, true, bf},
      {1, 512, 16, 48, .025, true, bf},
      {1, 2048, 16, 48, .060, true, bf},
      {1, 8192, 16, 48, .20, true, bf},
      {1, 8192, 16, 48, .20, false, bf},
      {1, 8192, 16, 48, .20, true, fp},
      {1, 32768, 16, 48, .75, true, bf},
      {8, 4096, 16, 64, .62, true, bf},
      {8, 1024, 16, 64, .18, true, bf},
      {1, 8192, 16, 64, .22, true, bf},
      {1, 8192, 2, 8, .080, true, bf},
      {31, 512, 16, 48, 0, true, bf},
      {4, 2048, 16, 48, .15, true, bf},
      {4, 2048, 16, 48, .15, true, bf, rows(4, 2048)},
      {8, 1024, 16, 64, .18, true, bf, rows(8, 1024)},
      {8, 4096, 16, 64, .62, true, bf, rows(8, 4096)},
      {2, 28672, 16, 48, .75, true, bf, {28672, 4096}},
      {2, 28672, 16, 48, .75, true, bf, {4096, 28672}},
      {9, 16384, 16, 48, 0, true, bf, {1024, 1024, 1024, 1024, 16384, 1024, 1024, 1024, 1024}},
  };
}

static void run_times(bool quick) {
  printf("%-32s %9s %9s %10s\n", "shape", "ms", "must", "us/chunk");
  for (const TimedShape& s : timed_shapes()) {
    if (quick && s.T != 2048 && s.T != 8192) continue;
    std::vector<int32_t> bounds(s.packed.empty() ? 0 : 1, 0);
    for (int length : s.packed) bounds.push_back(bounds.back() + length);
    const int batch = bounds.empty() ? s.N : 1, T = bounds.empty() ? s.T : bounds.back();
    char name[96];
    if (bounds.empty()) {
      snprintf(name, sizeof(name), "%dx%d %d/%d %s%s", s.T, s.N, s.Hk, s.Hv, s.io == DType::kBFloat16 ? "bf16" : "fp16",
               s.l2norm ? "" : " no l2norm");
    } else {
      snprintf(name, sizeof(name), "packed %d, %d, ... (%d) %d/%d", s.packed[0], s.packed[1], s.N, s.Hk, s.Hv);
    }
    running = name;
    Problem p;
    p.c.io = s.io;
    p.c.N = p.N = s.N;
    p.B = batch;
    p.c.T = p.T = T;
    p.c.Hk = s.Hk;
    p.c.Hv = s.Hv;
    p.c.l2norm = s.l2norm;
    p.c.ragged = !bounds.empty();
    p.pool = s.N;
    p.scale = 0.0883883f;
    p.total_channels = 2 * s.Hk * 128 + s.Hv * 128;
    const size_t tokens = static_cast<size_t>(batch) * T, gates = tokens * s.Hv,
                 state = static_cast<size_t>(s.N) * s.Hv * 128 * 128 * 4;
    const Buffer cu = upload(bounds);
    Buffer qkv(nullptr, tokens * p.total_channels * 2), g(nullptr, gates * 4), beta(nullptr, gates * 4), in(nullptr, state),
        out_state(nullptr, state), out(nullptr, tokens * s.Hv * 128 * 2);
    fill<<<1024, 256>>>(static_cast<uint16_t*>(qkv.data), tokens * p.total_channels, s.l2norm ? 1.0f : 0.08f, 1u,
                        s.io == DType::kBFloat16);
    fill_gates<<<1024, 256>>>(static_cast<float*>(g.data), static_cast<float*>(beta.data), gates);
    CHECK(cudaMemset(in.data, 0, state));
    synchronize(name);
    std::unique_ptr<Buffer> workspace;
    const RuleParams r = with_workspace(
        cases::params(p, {qkv.data, g.data, beta.data, cu.data, nullptr, nullptr, nullptr, in.data, out_state.data, out.data}),
        workspace);
    const double ms = time_graph([&](void* stream) { return compute(r, stream); }, name);
    double parts[2] = {};
    if (s.io == DType::kBFloat16) {   // each kernel by itself
      parts[0] = time_graph([&](void* stream) { return prepare(r, stream); }, name);
      parts[1] = time_graph([&](void* stream) { return carry(r, stream); }, name);
    }
    const double waves = std::ceil(2.0 * s.N * s.Hv / num_multiprocessors());
    printf("%-32s %9.4f %9.3f %10.3f  (x %.0f waves) prepare %.4f carry %.4f%s\n", name, ms, s.must_ms,
           ms * 1000 / (s.T / 64) / waves, waves, parts[0], parts[1], ms <= s.must_ms ? "" : "  over");
    fflush(stdout);
  }
}

#ifndef VARIANT
#include "scan.h"
#include "pairs.h"
#include "relay.h"

// Phase clock: cycles at which warps of blocks 0 and 1 pass the marks. [2 blocks][kMarkWarps][kMarkChunks][16].
constexpr int kMarkChunks = 128, kMarkWarps = 12;
struct Clock {
  long long* data;
  int shared_bytes;   // of the kernel
  __device__ int* current() const {   // behind the kernel's shared memory
    extern __shared__ __align__(1024) char smem_bytes[];
    return reinterpret_cast<int*>(smem_bytes + shared_bytes);
  }
  __device__ void put(int id, long long x) const {
    const int chunk = current()[threadIdx.x / 32];
    if (blockIdx.x < 2 && threadIdx.x % 32 == 0 && chunk < kMarkChunks) {
      data[((blockIdx.x * kMarkWarps + threadIdx.x / 32) * kMarkChunks + chunk) * 16 + id] = x;
    }
  }
  __device__ void start(int chunk, int) const {
    if (threadIdx.x % 32 == 0) current()[threadIdx.x / 32] = chunk;
    long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    put(15, t);
  }
  __device__ void phase(chunk_sm90::Phase p) const { put(static_cast<int>(p), clock64()); }
  template <class... A> __device__ void prediction(const A&...) const {}
  template <class... A> __device__ void difference(const A&...) const {}
  template <class... A> __device__ void write(const A&...) const {}
  template <class... A> __device__ void operands(const A&...) const {}
};

static void print_phases(const std::vector<long long>& h, int groups) {
  using chunk_sm90::Phase;
  struct Mark { Phase id; const char* name; };
  const std::vector<Mark> marks = {{Phase::kStart, "S k, V"},
                                   {Phase::kRead, "X, issue T'' X and S q, decay S"},
                                   {Phase::kX, "wait T'' X"},
                                   {Phase::kU, "issue update, S q, M X"},
                                   {Phase::kUpdate, "next chunk and V"},
                                   {Phase::kTaken, "wait S, o out"},
                                   {Phase::kUpdated, "convert S"}};
  auto at = [&](int b, int w, int c, int id) { return h[((b * kMarkWarps + w) * kMarkChunks + c) * 16 + id]; };
  const int first = 24, last = 120;
  const double ghz = static_cast<double>(at(0, 0, last, 0) - at(0, 0, first, 0)) /
                     std::max<long long>(1, at(0, 0, last, 15) - at(0, 0, first, 15));
  printf("phases: SM clock %.3f GHz (clock64 over globaltimer); chunks %d..%d; clocks, warps 0 to 3\n", ghz, first, last);
  for (int b = 0; b < 2; ++b) for (int group = 0; group < groups; ++group) {
    printf("block %d group %d\n", b, group);
    double total[4] = {};
    for (size_t m = 0; m < marks.size(); ++m) {
      printf("  %-50s", marks[m].name);
      for (int w = 0; w < 4; ++w) {
        double sum = 0;
        for (int c = first; c < last; ++c) {
          const long long t0 = at(b, 4 * group + w, c, static_cast<int>(marks[m].id));
          sum += static_cast<double>((m + 1 < marks.size() ? at(b, 4 * group + w, c, static_cast<int>(marks[m + 1].id))
                                                           : at(b, 4 * group + w, c + 1, 0)) -
                                     t0);
        }
        total[w] += sum / (last - first);
        printf(" %8.0f", sum / (last - first));
      }
      printf("\n");
    }
    printf("  %-50s %8.0f %8.0f %8.0f %8.0f\n", "sum", total[0], total[1], total[2], total[3]);
  }
  fflush(stdout);
}

static void run_phases(int pairs) {
  Problem p;
  p.c.io = DType::kBFloat16;
  p.c.N = p.N = p.B = 1;
  p.c.T = p.T = 8192;
  p.c.Hk = 16;
  p.c.Hv = 48;
  p.pool = 1;
  p.scale = 0.0883883f;
  p.total_channels = 2 * 16 * 128 + 48 * 128;
  running = "phases";
  const size_t tokens = p.T, gates = tokens * 48, state = 48 * 128 * 128 * 4;
  Buffer qkv(nullptr, tokens * p.total_channels * 2), g(nullptr, gates * 4), beta(nullptr, gates * 4), in(nullptr, state),
      out_state(nullptr, state), out(nullptr, tokens * 48 * 128 * 2);
  fill<<<1024, 256>>>(static_cast<uint16_t*>(qkv.data), tokens * p.total_channels, 1.0f, 1u, true);
  fill_gates<<<1024, 256>>>(static_cast<float*>(g.data), static_cast<float*>(beta.data), gates);
  CHECK(cudaMemset(in.data, 0, state));
  std::unique_ptr<Buffer> workspace;
  const RuleParams r = with_workspace(
      cases::params(p, {qkv.data, g.data, beta.data, nullptr, nullptr, nullptr, nullptr, in.data, out_state.data, out.data}),
      workspace);
  const size_t count = 2 * kMarkWarps * kMarkChunks * 16;
  Buffer marks(nullptr, count * 8);
  must(compute(r, nullptr));
  for (int i = 0; i < 3; ++i) {
    CHECK(cudaMemset(marks.data, 0, count * 8));
    const size_t bytes = sizeof(chunk_sm90::SharedMemory<128>);
    must(launch(chunk_sm90::chunk_kernel<bf16_t, bf16_t, 128, Clock>, 96 - pairs, chunk_sm90::kThreads, bytes + 64, nullptr, r,
                chunk_sm90::Tasks{{pairs, 0}, 0}, Clock{static_cast<long long*>(marks.data), static_cast<int>(bytes)}));
    synchronize("phases");
  }
  const auto h = marks.get();
  std::vector<long long> x(count);
  memcpy(x.data(), h.data(), count * 8);
  print_phases(x, pairs > 0 ? 2 : 1);
}
#endif

int main(int argc, char** argv) {
  start_watchdog();
  auto wants = [&](const char* what) {
    if (argc == 1) return true;
    for (int i = 1; i < argc; ++i) {
      if (!strcmp(argv[i], what)) {
        return true;
      }
    }
    return false;
  };
  const char* filter = "";
  auto is_name = [](const char* x) {   // of something to do, and no substring of a case
    for (const char* name : {"debug", "bits", "scan", "steps", "pairs", "storm", "time", "quick", "scantime", "rowtime",
                             "phases", "pairtime", "relay", "relaytime"})
      if (!strcmp(x, name)) return true;
    return false;
  };
  for (int i = 1; i + 1 < argc; ++i) if (!strcmp(argv[i], "check") && !is_name(argv[i + 1])) filter = argv[i + 1];
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  printf("%s, %d SMs, shared memory of a block %zu\n", prop.name, prop.multiProcessorCount, kSharedBytes);
  fflush(stdout);
  int bad = 0;
#ifndef VARIANT
  if (wants("debug")) {
    for (int chunk = 0; chunk < 3; ++chunk) {
      bad += debug_case<bf16_t>(DType::kBFloat16, chunk);
      bad += debug_case<fp16_t>(DType::kFloat16, chunk);
    }
  }
#endif
  if (wants("check")) bad += run_checks(filter);
  if (wants("bits")) bad += run_bits();
#ifndef VARIANT
  if (wants("scan")) bad += check_scan("") + check_order() + check_checkpoints();
  if (wants("steps")) bad += cases::check_steps(state_of);
  if (wants("pairs")) bad += check_pairs();
  if (wants("relay")) bad += check_relay();
  if (wants("storm")) bad += check_storm();
#endif
  if (wants("time")) run_times(false);
  if (argc > 1 && wants("quick")) run_times(true);
#ifndef VARIANT
  if (wants("scantime")) time_scan();
  if (wants("rowtime")) time_rows();
  if (wants("phases")) { run_phases(0); run_phases(48); }
  if (wants("pairtime")) time_pairs();
  if (wants("relaytime")) time_relay();
#endif
  printf(bad ? "FAILED: %d\n" : "all good\n", bad);
  return bad != 0;
}
