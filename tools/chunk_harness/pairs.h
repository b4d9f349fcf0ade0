// SPDX-License-Identifier: Apache-2.0
// Of the harness: blocks that carry two tiles of a head. Included by chunk_harness.cu behind scan.h.
#pragma once

static const char* carry_pairs(const RuleParams& r, int64_t pairs, void* stream) {
  if (const char* error = clear_queue(r, stream)) return error;
  if (r.q.dtype == DType::kBFloat16) {
    return r.out.dtype == DType::kFloat32 ? launch_carry<bf16_t, float, 128>(r, {pairs, INT32_MAX}, stream)
                                          : launch_carry<bf16_t, bf16_t, 128>(r, {pairs, INT32_MAX}, stream);
  }
  return r.out.dtype == DType::kFloat32 ? launch_carry<fp16_t, float, 128>(r, {pairs, INT32_MAX}, stream)
                                        : launch_carry<fp16_t, fp16_t, 128>(r, {pairs, INT32_MAX}, stream);
}

// Every case with blocks of one tile, with one block of two, with as many as there are: the same bits.
static int check_pairs() {
  int bad = 0, count = 0;
  for (const Case& c : cases::all()) {
    running = c.name.c_str();
    const Problem p = cases::make(c);
    Device d(p);
    std::unique_ptr<Buffer> workspace;
    RuleParams r = with_workspace(cases::params(p, d.pointers()), workspace);
    must(compute(r, nullptr));   // for the preparation
    const int64_t most = num_tiles(r) / 2;
    std::vector<char> out, state;
    for (int64_t pairs : {int64_t{0}, int64_t{1}, most}) {
      d.reset();
      must(carry_pairs(r, pairs, nullptr));
      synchronize(c.name.c_str());
      if (pairs == 0) {
        out = d.out.get();
        state = d.state_out.get();
        continue;
      }
      ++count;
      bad += differs("pairs", c.name, std::to_string(pairs) + " of " + std::to_string(most), d, out, state);
    }
  }
  printf("pairs: %d calls, %d differ from blocks of one tile\n", count, bad);
  fflush(stdout);
  return bad;
}

// The carry with no pairs, with a device full, with all, and what the launcher takes.
static void time_pairs() {
  struct Shape {
    int N, T, Hk, Hv;
    double must_ms;
    bool is_packed;
  };
  const Shape shapes[] = {{4, 2048, 16, 48, .15, false}, {4, 2048, 16, 48, .15, true},  {8, 4096, 16, 64, .62, false},
                          {8, 4096, 16, 64, .62, true},  {8, 1024, 16, 64, .18, false}, {8, 1024, 16, 64, .18, true},
                          {2, 8192, 16, 48, 0, false},   {1, 8192, 16, 48, .20, false}, {1, 8192, 16, 64, .22, false},
                          {32, 256, 16, 48, 0, false},   {32, 256, 16, 48, 0, true}};
  printf("%-23s %6s %8s %8s   pairs: carry\n", "ms", "must", "all", "prepare");
  for (const Shape& s : shapes) {
    std::vector<int32_t> bounds;
    for (int n = 0; s.is_packed && n <= s.N; ++n) bounds.push_back(n * s.T);
    Timed t(s.is_packed ? 1 : s.N, s.is_packed ? s.N * s.T : s.T, s.Hk, s.Hv, bounds);
    const RuleParams r = t.r;
    const double all = t.ms(false), prepared = time_graph([&](void* stream) { return prepare(r, stream); }, "prepare");
    printf("%s %6dx%d %d/%-4d %6.3f %8.4f %8.4f (%lld)", s.is_packed ? "packed" : "      ", s.T, s.N, s.Hk, s.Hv, s.must_ms,
           all, prepared, (long long)choose_pairs(r, this_machine()).count);
    const int64_t most = s.N * tiles_of_row(r.dims) / 2, whole = most - most % num_multiprocessors();
    int64_t before = -1;
    for (int64_t pairs : {int64_t{0}, std::min<int64_t>(most, num_multiprocessors()), whole, most}) {
      if (pairs == before) continue;
      before = pairs;
      const double ms = time_graph([&](void* stream) { return carry_pairs(r, pairs, stream); }, "carry");
      printf("  %lld: %.4f", (long long)pairs, ms);
    }
    printf("\n");
    fflush(stdout);
  }
}
