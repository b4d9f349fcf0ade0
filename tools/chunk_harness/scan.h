// SPDX-License-Identifier: Apache-2.0
// Of the harness: the two-level scan, checkpoints, and the order of ragged rows. Included by chunk_harness.cu behind its
// helpers.
#pragma once

// A call with rows cut every `segment_tokens` tokens, whatever that costs; 0: whole rows.
static const char* run_cut(RuleParams r, int64_t segment_tokens, void* stream) {
  r.segment_tokens = segment_tokens;
  r.items_ahead = 0;
  return r.q.dtype == DType::kBFloat16 ? launch_dtype<bf16_t>(r, stream) : launch_dtype<fp16_t>(r, stream);
}

static size_t cut_bytes(RuleParams r, int64_t segment_tokens) {
  r.segment_tokens = segment_tokens;
  r.items_ahead = 0;
  return chunk_sm90::workspace_bytes<128>(r);
}

// The state of a problem of one row, as stored, cut as above.
static std::vector<char> state_of(const Problem& p, int64_t segment_tokens) {
  const Device d(p);
  RuleParams r = cases::params(p, d.pointers());
  const Buffer workspace(nullptr, cut_bytes(r, segment_tokens));
  r.workspace = workspace.data;
  must(run_cut(r, segment_tokens, nullptr));
  synchronize("steps");
  return d.state_out.get();
}

// A call beside its preparation, of which `ahead` items come before, its tiles on so many released multiprocessors.
static const char* run_beside(RuleParams r, int64_t ahead, int64_t released, void* stream) {
  r.segment_tokens = 0;
  r.items_ahead = ahead;
  r.released_multiprocessors = released;
  r.staying_blocks = std::max<int64_t>(1, (num_multiprocessors() - released) * chunk_sm90::Hopper::kBlocks);
  return r.q.dtype == DType::kBFloat16 ? launch_dtype<bf16_t>(r, stream) : launch_dtype<fp16_t>(r, stream);
}

static size_t beside_bytes(RuleParams r) {
  r.segment_tokens = 0;
  r.items_ahead = 1;
  return chunk_sm90::workspace_bytes<128>(r);
}

// Whether a case's o and states differ from those of another way to do it; `way` is printed then.
static bool differs(const char* what, const std::string& name, const std::string& way, const Device& d,
                    const std::vector<char>& out, const std::vector<char>& state) {
  const bool same_out = d.out.get() == out, same_state = d.state_out.get() == state;
  if (!same_out || !same_state) {
    printf("%s: %s, %s: out %d, state %d DIFFER\n", what, name.c_str(), way.c_str(), same_out, same_state);
  }
  return !same_out || !same_state;
}

// Every case with rows cut: errors as without, and the same bits three times.
static int check_scan(const char* want) {
  int bad = 0, count = 0;
  for (const Case& c : cases::all()) {
    if (c.name.find(want) == std::string::npos || c.T < 130) continue;
    running = c.name.c_str();
    const Problem p = cases::make(c);
    const cases::Reference ref = cases::reference(p);
    for (int64_t cut : {64, 128, 320}) {
      if (cut >= c.T) continue;
      Device d(p);
      RuleParams r = cases::params(p, d.pointers());
      const Buffer workspace(nullptr, cut_bytes(r, cut));
      r.workspace = workspace.data;
      must(run_cut(r, cut, nullptr));
      synchronize(c.name.c_str());
      const auto out = d.out.get(), state = d.state_out.get();
      const cases::Errors e = cases::compare(p, ref, out, state, d.sentinel);
      bool repeat = true;
      for (int i = 0; i < 2; ++i) {
        d.reset();
        CHECK(cudaMemset(workspace.data, 0xff, workspace.bytes));
        must(run_cut(r, cut, nullptr));
        synchronize(c.name.c_str());
        repeat = repeat && d.out.get() == out && d.state_out.get() == state;
      }
      double out_limit, state_limit;
      const bool ok = cases::judge(c, kIsHigh, e, &out_limit, &state_limit) && repeat;
      if (!ok || cut == 128) {
        printf("cut %3lld %-38s out %.2e (%.1e)  state %.2e (%.1e)  %s%s\n", static_cast<long long>(cut), c.name.c_str(), e.out,
               out_limit, e.state, state_limit, ok ? "ok" : "FAIL", repeat ? "" : " repeat differs");
      }
      bad += !ok;
      ++count;
    }
  }
  printf("scan: %d calls, %d bad\n", count, bad);
  fflush(stdout);
  return bad;
}

// Rows, packed in both orders, and many of them (the order comes from the workspace then): each the bits of the row alone.
static int check_order() {
  int bad = 0;
  for (int rows : {3, 31, 70}) {
    Case c;
    c.N = rows;
    c.T = 90 * rows;
    c.ragged = true;
    c.name = "order of " + std::to_string(rows);
    running = c.name.c_str();
    const Problem p = cases::make(c);
    Device d(p);
    RuleParams r = cases::params(p, d.pointers());
    std::unique_ptr<Buffer> workspace;
    r = with_workspace(r, workspace);
    must(chunk_sm90_gated_delta_rule(r, nullptr));
    synchronize(c.name.c_str());
    const auto out = d.out.get(), state = d.state_out.get();
    bool equal = true;
    const size_t slot = state.size() / rows;
    for (int n = 0; n < rows; ++n) {
      d.reset();
      RuleParams one = r;
      one.dims.N = 1;
      one.cu_seqlens = {static_cast<int32_t*>(d.cu.data) + n, 1, false};
      one.state = r.state.from(r.state.offset(n));
      one.initial_state = r.initial_state.from(r.initial_state.offset(n));
      one.pool_in = one.pool_out = 1;
      must(chunk_sm90_gated_delta_rule(one, nullptr));
      synchronize(c.name.c_str());
      const auto o = d.out.get(), s = d.state_out.get();
      const size_t token = out.size() / c.T, first = p.cu[n] * token, bytes = (p.cu[n + 1] - p.cu[n]) * token;
      equal = equal && !memcmp(&o[first], &out[first], bytes) && !memcmp(&s[n * slot], &state[n * slot], slot);
    }
    printf("%s: alone %s\n", c.name.c_str(), equal ? "equal" : "DIFFER");
    bad += !equal;
  }
  fflush(stdout);
  return bad;
}

// Checkpoints every 64 and 128 tokens: the state of a call that ends there, bit by bit; cut rows: close to it.
static int check_checkpoints() {
  int bad = 0;
  Case c;
  c.N = 2;
  c.T = 450;
  c.name = "checkpoints";
  running = c.name.c_str();
  const Problem p = cases::make(c);
  Device d(p);
  const RuleParams plain = cases::params(p, d.pointers());
  const size_t slot = p.state_in.size() / c.N;
  for (int every : {64, 128}) for (int cut : {0, 192}) {
    const int kept = c.T / every;
    Buffer checkpoints(nullptr, slot * c.N * kept), workspace(nullptr, cut_bytes(plain, 192));
    RuleParams r = plain;
    r.workspace = workspace.data;
    r.checkpoints = r.state;
    r.checkpoints.data = checkpoints.data;
    r.total_checkpoints = c.N * kept;
    r.checkpoint_every = every;
    d.reset();
    must(run_cut(r, cut, nullptr));
    synchronize(c.name.c_str());
    const auto got = checkpoints.get();
    double worst = 0;
    for (int i = 0; i < kept; ++i) {
      RuleParams stopped = plain;
      stopped.workspace = workspace.data;
      stopped.dims.T = (i + 1) * every;
      d.reset();
      must(run_cut(stopped, 0, nullptr));
      synchronize(c.name.c_str());
      const auto state = d.state_out.get();
      for (int n = 0; n < c.N; ++n) {
        double num = 0, den = 0;
        for (size_t j = 0; j < slot / 4; ++j) {
          const double x = reinterpret_cast<const float*>(&got[(n * kept + i) * slot])[j],
                       y = reinterpret_cast<const float*>(&state[n * slot])[j];
          num += (x - y) * (x - y);
          den += y * y;
        }
        worst = std::max(worst, std::sqrt(num / den));
      }
    }
    const bool ok = cut == 0 ? worst == 0 : worst < 1e-3;
    printf("checkpoints every %d, cut %d: %.1e %s\n", every, cut, worst, ok ? "ok" : "FAIL");
    bad += !ok;
  }
  fflush(stdout);
  return bad;
}

// What a timed call works on: random tokens of N rows, of these lengths where they are given.
struct Timed {
  Problem p;
  std::unique_ptr<Buffer> qkv, g, beta, in, state, out, cu, workspace;
  RuleParams r;

  Timed(int N, int T, int Hk, int Hv, const std::vector<int32_t>& bounds = {}) {
    p.c.N = p.N = bounds.empty() ? N : static_cast<int>(bounds.size()) - 1;
    p.B = N;
    p.c.T = p.T = T;
    p.c.Hk = Hk;
    p.c.Hv = Hv;
    p.c.ragged = !bounds.empty();
    p.pool = p.N;
    p.scale = 0.0883883f;
    p.total_channels = 2 * Hk * 128 + Hv * 128;
    const size_t tokens = static_cast<size_t>(N) * T, gates = tokens * Hv,
                 bytes = static_cast<size_t>(p.N) * Hv * 128 * 128 * 4;
    auto make = [](size_t n) { return std::make_unique<Buffer>(nullptr, n); };
    qkv = make(tokens * p.total_channels * 2), g = make(gates * 4), beta = make(gates * 4), in = make(bytes),
    state = make(bytes), out = make(tokens * Hv * 256);
    cu = std::make_unique<Buffer>(bounds.data(), bounds.size() * 4);
    fill<<<1024, 256>>>(static_cast<uint16_t*>(qkv->data), tokens * p.total_channels, 1.0f, 1u, true);
    fill_gates<<<1024, 256>>>(static_cast<float*>(g->data), static_cast<float*>(beta->data), gates);
    CHECK(cudaMemset(in->data, 0, bytes));
    r = cases::params(p,
                      {qkv->data, g->data, beta->data, cu->data, nullptr, nullptr, nullptr, in->data, state->data, out->data});
    r.may_scan = true;   // the larger workspace of both
    reserve(chunk_sm90_workspace_bytes(r));
    r.may_scan = false;
    reserve(chunk_sm90_workspace_bytes(r));
    synchronize("setup");
  }
  void reserve(size_t bytes) {
    if (!workspace || workspace->bytes < bytes) workspace = std::make_unique<Buffer>(nullptr, bytes);
    r.workspace = workspace->data;
  }
  double ms(bool may_scan) {
    RuleParams call = r;
    call.may_scan = may_scan;
    return time_graph([&](void* stream) { return chunk_sm90_gated_delta_rule(call, stream); }, "time");
  }
};

// Numbers of segments side by side, and the kernels of each alone. The call with scan="off" and "auto" beside them.
static void time_scan() {
  struct Shape { int N, T, Hk, Hv; double must_ms; };
  const Shape shapes[] = {{1, 1024, 2, 8, 0},   {1, 2048, 2, 8, .045}, {1, 8192, 2, 8, .080}, {1, 32768, 2, 8, .17},
                          {1, 131072, 2, 8, 0}, {1, 8192, 4, 12, 0},   {1, 8192, 4, 16, 0},   {2, 8192, 2, 8, 0},
                          {1, 8192, 1, 2, 0},   {1, 8192, 16, 32, .17}};
  printf("%-18s %8s %8s %8s   segments: all (prepare, first pass, second)\n", "scan", "off", "auto", "must");
  for (const Shape& s : shapes) {
    Timed t(s.N, s.T, s.Hk, s.Hv);
    RuleParams scanned = t.r;
    scanned.may_scan = true;
    const int64_t chosen = with_plan(scanned, this_machine()).segment_tokens;
    printf("%6dx%d %d/%-6d %8.4f %8.4f %8.3f  (%lld)", s.T, s.N, s.Hk, s.Hv, t.ms(false), t.ms(true), s.must_ms,
           static_cast<long long>(chosen ? (s.T + chosen - 1) / chosen : 0));
    int64_t before = 0;
    for (int segments : {3, 5, 6, 7, 8, 9, 12, 15, 16}) {
      const int64_t cut = (s.T / 64 + segments - 1) / segments * 64;
      if ((segments - 1) * s.N * 2 * s.Hv > 132 || cut == before) continue;
      before = cut;
      t.reserve(cut_bytes(t.r, cut));
      RuleParams r = t.r;
      r.segment_tokens = cut;
      const double all = time_graph([&](void* stream) { return run_cut(r, cut, stream); }, "all");
      const double prepare = time_graph([&](void* stream) { return launch_prepare<bf16_t, 128>(r, stream); }, "prepare");
      const double first = time_graph(
          [&](void* stream) {
            return launch(chunk_sm90::segment_kernel<bf16_t, bf16_t, 128>, num_segment_blocks(r), chunk_sm90::kThreads,
                          chunk_sm90::segment_bytes<128>(), stream, r);
          },
          "segments");
      const double second = time_graph(
          [&](void* stream) {
            return launch(chunk_sm90::later_kernel<bf16_t, bf16_t, 128>, num_later_segments(r) * tiles_of_row(r.dims),
                          chunk_sm90::kOneTileThreads, chunk_sm90::kOneTileBytes<128>, stream, r);
          },
          "later");
      printf("  %d: %.4f (%.4f %.4f %.4f)", segments, all, prepare, first, second);
    }
    printf("\n");
    fflush(stdout);
  }
}

static void time_rows() {
  printf("%-34s %8s\n", "ragged rows, 16/48", "ms");
  auto show = [](const char* name, double ms) { printf("%-34s %8.4f\n", name, ms); fflush(stdout); };
  show("1x32768", Timed(1, 32768, 16, 48).ms(true));
  show("28672 + 4096", Timed(1, 32768, 16, 48, {0, 28672, 32768}).ms(true));
  show("4096 + 28672", Timed(1, 32768, 16, 48, {0, 4096, 32768}).ms(true));
  show("1x2048", Timed(1, 2048, 16, 48).ms(true));
  show("1x2048, cu_seqlens", Timed(1, 2048, 16, 48, {0, 2048}).ms(true));
  show("1024 x 2", Timed(2, 1024, 16, 48).ms(true));
  show("1024 + 1024, cu_seqlens", Timed(1, 2048, 16, 48, {0, 1024, 2048}).ms(true));
  std::vector<int32_t> many;
  for (int n = 0; n <= 64; ++n) many.push_back(512 * n);
  show("512 x 64", Timed(64, 512, 16, 48).ms(true));
  show("512 x 64, cu_seqlens", Timed(1, 32768, 16, 48, many).ms(true));
  many.clear();
  for (int n = 0; n <= 2048; ++n) many.push_back(16 * n);
  show("16 x 2048, cu_seqlens", Timed(1, 32768, 16, 48, many).ms(true));
  show("1x131072", Timed(1, 131072, 16, 48).ms(true));
  Timed t(1, 8192, 16, 48);
  show("1x8192", t.ms(true));
  for (int every : {4096, 512, 64}) {
    Buffer checkpoints(nullptr, static_cast<size_t>(8192 / every) * 48 * 128 * 128 * 4);
    t.r.checkpoints = t.r.state;
    t.r.checkpoints.data = checkpoints.data;
    t.r.total_checkpoints = 8192 / every;
    t.r.checkpoint_every = every;
    show(("1x8192, a checkpoint every " + std::to_string(every)).c_str(), t.ms(true));
  }
}

// A thousand calls of random ragged rows, every second one allowed to cut them, the others once more beside their preparation:
// each ends (the watchdog names the one that does not) and has the bits of the same call once more.
static int check_storm() {
  constexpr int kCalls = 1000, kTokens = 6000, kMostRows = 200;   // so many that a block has several tasks
  Case c;
  c.N = kMostRows;
  c.T = kTokens;
  c.Hk = 1;
  c.Hv = 2;
  c.ragged = true;
  c.name = "storm";
  const Problem p = cases::make(c);
  Device d(p);
  RuleParams r = cases::params(p, d.pointers());
  std::unique_ptr<Buffer> workspace;
  int bad = 0;
  unsigned seed = 1;
  auto random = [&](unsigned below) { return (seed = seed * 1664525u + 1013904223u) / 65536u % below; };
  for (int call = 0; call < kCalls; ++call) {
    const int rows = 1 + random(call % 4 == 0 ? kMostRows : 5);
    std::vector<int32_t> cu(kMostRows + 1);
    for (int n = 1; n <= rows; ++n) cu[n] = random(8) == 0 ? 0 : random(kTokens + 1);
    std::sort(cu.begin(), cu.begin() + rows + 1);
    CHECK(cudaMemcpy(d.cu.data, cu.data(), cu.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
    r.dims.N = rows;
    r.may_scan = call % 2 == 0;
    RuleParams mine = with_workspace(r, workspace);
    const Buffer larger(nullptr, beside_bytes(r));
    char name[200];
    int used = snprintf(name, sizeof(name), "storm call %d, scan %d, cu", call, static_cast<int>(r.may_scan));
    for (int n = 0; n <= rows && used < 180; ++n) used += snprintf(name + used, sizeof(name) - used, " %d", cu[n]);
    std::vector<char> out, state;
    for (int repeat = 0; repeat < 2; ++repeat) {
      d.reset();
      if (repeat == 0 || r.may_scan) {
        must(chunk_sm90_gated_delta_rule(mine, nullptr));
      } else {
        mine.workspace = larger.data;
        must(run_beside(mine, 1 + random(static_cast<unsigned>(num_items(r))), 1 + random(num_multiprocessors()), nullptr));
      }
      synchronize(name);
      if (call % 5) continue;   // copies to the host take their time
      const auto o = d.out.get(), s = d.state_out.get();
      if (repeat == 0) { out = o; state = s; }
      if (o != out || s != state) { printf("%s: repeat differs\n", name); ++bad; }
    }
  }
  printf("storm: %d calls of random rows, %d bad\n", kCalls, bad);
  fflush(stdout);
  return bad;
}
