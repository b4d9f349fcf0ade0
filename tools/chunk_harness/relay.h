// SPDX-License-Identifier: Apache-2.0
// Of the harness: rows beside their preparation. Included by chunk_harness.cu behind scan.h.
#pragma once

// Every case beside its preparation, with several shares of each: the bits of one after the other.
static int check_relay() {
  int bad = 0, count = 0;
  for (const Case& c : cases::all()) {
    running = c.name.c_str();
    const Problem p = cases::make(c);
    Device d(p);
    std::unique_ptr<Buffer> workspace;
    const RuleParams r = with_workspace(cases::params(p, d.pointers()), workspace);
    must(run_cut(r, 0, nullptr));
    synchronize(c.name.c_str());
    const auto out = d.out.get(), state = d.state_out.get();
    const int64_t items = num_items(r);
    for (const auto& [ahead, carrying] :
         {std::pair<int64_t, int64_t>{1, 1}, {1, num_multiprocessors()}, {(items + 1) / 2, 2}, {items, 66}}) {
      Buffer larger(nullptr, beside_bytes(r));
      d.reset();
      RuleParams mine = r;
      mine.workspace = larger.data;
      must(run_beside(mine, ahead, carrying, nullptr));
      synchronize(c.name.c_str());
      ++count;
      bad += differs("relay", c.name, std::to_string(ahead) + " of " + std::to_string(items) + " ahead", d, out, state);
    }
  }
  printf("relay: %d calls, %d differ from one after the other\n", count, bad);
  fflush(stdout);
  return bad;
}

// One after the other, as the launcher chooses, and with so many hundredths of the preparation ahead. Whether bits are equal.
static void time_relay() {
  struct Shape { int N, T, Hk, Hv; std::vector<int32_t> bounds; };
  const Shape shapes[] = {{1, 2048, 16, 48, {}},
                          {1, 3072, 16, 48, {}},
                          {1, 4096, 16, 48, {}},
                          {1, 8192, 16, 48, {}},
                          {1, 32768, 16, 48, {}},
                          {1, 8192, 16, 32, {}},
                          {1, 8192, 8, 32, {}},
                          {2, 8192, 16, 48, {}},
                          {1, 32768, 16, 48, {0, 28672, 32768}},
                          {1, 32768, 16, 48, {0, 4096, 32768}}};
  printf("%-24s %8s %8s   hundredths ahead: ms\n", "beside the preparation", "not", "chosen");
  for (const Shape& s : shapes) {
    Timed t(s.N, s.T, s.Hk, s.Hv, s.bounds);
    t.reserve(beside_bytes(t.r));
    const int64_t carrying = s.Hv * 2, items = num_items(t.r);
    const double plain = time_graph([&](void* stream) { return run_cut(t.r, 0, stream); }, "plain");
    const auto out = t.out->get(), state = t.state->get();
    const RuleParams chosen = with_plan(t.r, this_machine());
    printf("%6dx%d %d/%d %s", s.T, s.N, s.Hk, s.Hv, s.bounds.empty() ? "" : std::to_string(s.bounds[1]).c_str());
    printf("  %8.4f %8.4f (%lld)", plain, t.ms(false), (long long)(100 * chosen.items_ahead / items));
    bool is_same = true;
    for (int ahead : {3, 6, 10, 13, 16, 20, 25, 35}) {
      CHECK(cudaMemset(t.out->data, 0x7f, t.out->bytes));
      printf("  %d: %.4f", ahead,
             time_graph([&](void* stream) { return run_beside(t.r, items * ahead / 100 + 1, carrying, stream); }, "beside"));
      is_same = is_same && t.out->get() == out && t.state->get() == state;
    }
    printf("  %s\n", is_same ? "equal" : "DIFFER");
    fflush(stdout);
  }
}
