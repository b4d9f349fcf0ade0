# SPDX-License-Identifier: Apache-2.0
"""examples/serve.py run small: token for token what greedy generate gives each prompt alone."""

import sys

import pytest

from .conftest import ROOT


@pytest.fixture(scope="module")
def serve():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import serve

        yield serve
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.mark.parametrize("drafts", (0, 4))
def test_engine_equals_greedy_generate(kernel, device, serve, one_thread, drafts):
    """Ragged batches, drafts, checkpoints and shared prefixes, fewer slots than requests"""
    import torch

    model = serve.load_model(device, torch.float32)
    requests = serve.make_requests(7, 20, seed=3)
    requests[4].prompt = list(requests[3].prompt) + requests[4].prompt[:9]
    engine = serve.Engine(kernel, model, slots=3, drafts=drafts)
    serve.serve(engine, requests, show=False)
    for request in requests:
        assert request.generated == serve.alone(model, request)
    assert engine.counts["reused"] > 0, "control: a prefix was shared"
    assert (engine.counts["accepted"] > 0) == (drafts > 0), "control: drafts were accepted"
    assert sorted(engine.free_slots) == [0, 1, 2] and not engine.running
    assert sum(engine.pages.users) == sum(len(pages) for _, pages in engine.prefixes.by_tokens.values()), "pages leak"


def test_prompt_lookup(serve):
    assert serve.look_up([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]
    assert serve.look_up([5, 7, 5], 4) == [7, 5]
    assert serve.look_up([1, 2, 3], 4) == [] and serve.look_up([5, 5], 0) == []
