# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen3.5 models, dense and MoE, with our layers in the kernel slots of transformers, against the plain models."""

import copy
import warnings

import pytest
import torch
from kernels import Mode
from transformers import Cache, DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5

from .helpers import assert_close, assert_same
from .models import (
    FUNCTION_SLOTS,
    LAYER_OF_SLOT,
    LAYER_SLOT,
    PADDED,
    SLOTS,
    every_slot,
    generate,
    in_pieces,
    layer_forward,
    layer_input,
    linear_layers,
    padded_batch,
    put_in,
    run,
    tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread")

every_model = pytest.mark.parametrize(
    ("family", "head_dim", "width"),
    [("dense", 16, 4), ("dense", 64, 4), ("dense", 16, 2), ("moe", 16, 4), ("moe", 64, 2)],
)


@pytest.mark.kernels_ci
@every_slot
@every_model
def test_prefill_logits_and_greedy_ids(pair, device, family, head_dim, width, slots):
    eager, model = pair(family, head_dim, width)
    ids = tokens(2, 70, device)
    expected = run(eager, None, lambda m: m(ids).logits)
    assert_close(run(model, slots, lambda m: m(ids).logits), expected, 2e-5, "logits")
    expected = run(eager, None, generate(ids[:, :20], new=16))
    assert_same(run(model, slots, generate(ids[:, :20], new=16)), expected, "greedy ids")


@pytest.mark.kernels_ci
def test_layers_are_what_runs(pair, kernel, device):
    _, model = pair()
    put_in(model, LAYER_SLOT)
    for layer in linear_layers(model):
        assert layer.forward.__func__ is kernel.layers.Qwen3_5GatedDeltaNet.forward
    put_in(model, FUNCTION_SLOTS)
    for slot in FUNCTION_SLOTS:
        name = LAYER_OF_SLOT.get(slot, slot)
        torch_name = {"chunk_gated_delta_rule": "torch_" + name, "recurrent_gated_delta_rule": "torch_" + name}
        replaced = getattr(modeling_qwen3_5, torch_name.get(name, name), linear_layers(model)[0].norm)
        assert replaced.forward.__func__ is getattr(kernel.layers, name).forward, slot


@every_slot
@pytest.mark.parametrize("family", ["dense", "moe"])
def test_left_padded_batch_generates_the_same_ids(pair, device, family, slots):
    eager, model = pair(family)
    ids, mask = padded_batch(device)
    expected = run(eager, None, generate(ids, mask))
    assert_same(run(model, slots, generate(ids, mask)), expected, "greedy ids")


def test_left_padding_does_not_change_a_row(pair, device):
    """B = 3 with different padding, and one row padded by 5: the last token's output is that of the unpadded row."""
    _, model = pair()
    x = layer_input(17, device, batch=3)
    mask = padded_batch(device)[1]
    padded = run(model, "layer", layer_forward(x, attention_mask=mask))
    for row, (padding, _) in enumerate(PADDED):
        alone = run(model, "layer", layer_forward(x[row : row + 1, padding:]))
        assert_close(padded[row, -1], alone[0, -1], 1e-5)
    single = run(model, "layer", layer_forward(x[:1], attention_mask=mask[:1]))
    assert_close(single[0, -1], run(model, "layer", layer_forward(x[:1, 5:]))[0, -1], 1e-5)


def test_mask_of_ones_equals_no_mask(pair, device):
    _, model = pair()
    x = layer_input(17, device, batch=3)
    ones = torch.ones(3, 17, dtype=torch.long, device=device)
    masked = run(model, "layer", layer_forward(x, attention_mask=ones))
    assert_same(masked, run(model, "layer", layer_forward(x)))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", [(7, 5, 1), (1, 12), (2, 1, 10), (9, 4)], ids=str)
def test_tokens_onto_a_filled_cache(pair, device, lengths, width):
    """Window and state are continued. (The projections of fewer rows differ in the last bits.)"""
    _, model = pair(width=width)
    x = layer_input(13, device, batch=2)
    whole, pieces = DynamicCache(config=model.config), DynamicCache(config=model.config)
    expected = run(model, "layer", layer_forward(x, cache_params=whole))
    assert_close(run(model, "layer", in_pieces(x, pieces, lengths)), expected, 1e-6)
    assert_close(pieces.get_recurrent_state(0), whole.get_recurrent_state(0), 1e-6, "state")
    assert_close(pieces.get_conv_state(0), whole.get_conv_state(0), 1e-6, "window")


@pytest.mark.parametrize("slots", SLOTS)
def test_tokens_onto_a_filled_cache_as_eager(pair, device, slots):
    eager, model = pair()
    x = layer_input(13, device, batch=2)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    expected = run(eager, None, in_pieces(x, caches[0], (7, 5, 1)))
    assert_close(run(model, slots, in_pieces(x, caches[1], (7, 5, 1))), expected, 1e-5)
    assert_close(caches[1].get_recurrent_state(0), caches[0].get_recurrent_state(0), 1e-5, "state")
    assert caches[1].get_recurrent_state(0).dtype == torch.float32


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_whole_forward_against_prefill_and_decode(pair, device, dtype, bound):
    _, model = pair(head_dim=64, dtype=dtype)
    x = layer_input(20, device, dtype=dtype)
    whole = run(model, "layer", layer_forward(x)).float()
    cache = DynamicCache(config=model.config)
    pieces = run(model, "layer", in_pieces(x, cache, (12,) + (1,) * 8)).float()
    assert (pieces - whole).abs().max() <= bound * whole.abs().max()


@every_slot
def test_bfloat16_model(pair, device, slots):
    """Within twice the error that the bf16 model itself makes against the fp32 one."""
    eager, model = pair(head_dim=64, dtype=torch.bfloat16)
    ids = tokens(2, 40, device)
    reference = run(copy.deepcopy(eager).float(), None, lambda m: m(ids).logits)
    expected = run(eager, None, lambda m: m(ids).logits).float()
    actual = run(model, slots, lambda m: m(ids).logits).float()
    own_error = float((expected - reference).norm() / reference.norm())
    assert_close(actual, reference, 2 * own_error, "logits")


@every_slot
def test_beam_search(pair, device, slots):
    eager, model = pair()
    ids, mask = padded_batch(device)
    expected = run(eager, None, generate(ids, mask, num_beams=3))
    assert_same(run(model, slots, generate(ids, mask, num_beams=3)), expected, "ids")


def test_state_is_updated_where_the_cache_keeps_it(pair, device):
    """Decode moves no state: same tensors, new contents. Reordering replaces them, and the new ones are used."""
    _, model = pair()
    cache = DynamicCache(config=model.config)
    x = layer_input(8, device, batch=2)
    run(model, "layer", layer_forward(x[:, :6], cache_params=cache))
    states = cache.get_conv_state(0), cache.get_recurrent_state(0)
    before = [state.clone() for state in states]
    run(model, "layer", layer_forward(x[:, 6:7], cache_params=cache))
    assert cache.get_conv_state(0) is states[0] and cache.get_recurrent_state(0) is states[1]
    assert all(not torch.equal(a, b) for a, b in zip(before, states))

    straight = copy.deepcopy(cache)
    expected = run(model, "layer", layer_forward(x[:, 7:], cache_params=straight))
    for layer in (0, 2):
        if cache.layers[layer].is_recurrent_states_initialized[0]:
            cache.layers[layer].reorder_cache(torch.tensor([1, 0], device=device))
    swapped = run(model, "layer", layer_forward(x[:, 7:].flip(0), cache_params=cache))
    assert_same(swapped.flip(0), expected)


def test_reset_cache_starts_again(pair, device):
    _, model = pair()
    x = layer_input(9, device, batch=2)
    cache = DynamicCache(config=model.config)
    first = run(model, "layer", in_pieces(x, cache, (8, 1)))
    cache.layers[0].reset()
    assert_same(run(model, "layer", in_pieces(x, cache, (8, 1))), first)


@pytest.mark.cuda_only
def test_offloaded_cache(pair, device, monkeypatch):
    # with one attention layer transformers 5.22 prefetches the layer that it is about to use and does not wait for it
    prefetch = Cache.prefetch
    monkeypatch.setattr(Cache, "prefetch", lambda *args: (prefetch(*args), torch.cuda.synchronize()))
    eager, model = pair()
    ids = tokens(2, 12, device)
    expected = run(eager, None, generate(ids))
    assert_same(run(model, "layer", generate(ids, cache_implementation="offloaded")), expected, "greedy ids")


@every_slot
def test_recording_cache_takes_the_multi_token_path(pair, device, slots):
    """The window of a recording cache grows and is never written in place."""
    eager, model = pair()
    x = layer_input(9, device, batch=2)
    outputs, windows = [], []
    for m, slot in ((eager, None), (model, slots)):
        cache = DynamicCache(config=model.config)
        cache.layers[0].activate_past_recording()
        outputs.append(run(m, slot, in_pieces(x, cache, (2, 5, 1, 1))))
        windows.append(cache.get_conv_state(0))
    assert windows[0].shape == windows[1].shape and windows[1].shape[-1] == 9
    assert_close(outputs[1], outputs[0], 1e-5)
    assert_close(windows[1], windows[0], 1e-6, "window")


def test_assisted_generation_raises_as_without_the_kernel(pair, device):
    eager, model = pair()
    ids = tokens(1, 12, device)
    errors = []
    for m, slots in ((eager, None), (model, "layer")):
        with pytest.raises(Exception) as caught:
            run(m, slots, generate(ids, prompt_lookup_num_tokens=3))
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", ["dense", "moe"])
def test_training_gradients_equal_eager(pair, device, family, checkpointing):
    eager, model = pair(family)
    ids = tokens(2, 12, device)
    put_in(model, LAYER_SLOT)
    losses = []
    for m in (eager, model):
        m.train()
        if checkpointing:
            m.gradient_checkpointing_enable()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = m(ids, labels=ids, use_cache=False).loss
            loss.backward()
        losses.append(loss.detach())
    assert_close(losses[1], losses[0], 1e-5, "loss")
    expected = dict(eager.named_parameters())
    for name, parameter in model.named_parameters():
        if expected[name].grad is not None:
            assert parameter.grad is not None, name
            assert_close(parameter.grad, expected[name].grad, 2e-3, name)


@pytest.mark.parametrize("slots", SLOTS)
def test_gradient_through_every_slot_is_the_eager_one(pair, device, slots):
    eager, model = pair()
    x = layer_input(7, device, batch=2)
    gradients = []
    for m, names in ((eager, ()), (model, SLOTS[slots])):
        put_in(m, names)
        leaf = x.clone().requires_grad_()
        linear_layers(m)[0](leaf).square().sum().backward()
        gradients.append((leaf.grad, linear_layers(m)[0].A_log.grad, linear_layers(m)[0].conv1d.weight.grad))
        put_in(m, ())
    for actual, expected in zip(gradients[1], gradients[0]):
        assert_close(actual, expected, 1e-3)


def test_gradients_warn_once(pair, kernel, device):
    _, model = pair()
    put_in(model, LAYER_SLOT)
    kernel._dispatch._warned.clear()
    x = layer_input(3, device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linear_layers(model)[0](x)
        linear_layers(model)[1](x)
    ours = [w for w in caught if "gated-deltanet" in str(w.message)]
    assert len(ours) == 1 and "no_grad" in str(ours[0].message)


@pytest.mark.parametrize("slots", SLOTS)
def test_compiled_model_equals_eager(pair, device, slots):
    """No graph break in the layer; prefill and one decode step, cache included."""
    _, model = pair()
    x = layer_input(6, device)
    expected, compiled = DynamicCache(config=model.config), DynamicCache(config=model.config)
    put_in(model, SLOTS[slots], Mode.INFERENCE | Mode.TORCH_COMPILE)
    layer = linear_layers(model)[0]
    with torch.no_grad():
        for cache in (expected, compiled):
            layer(x[:, :5], cache_params=cache)
        fast = torch.compile(lambda x: layer(x, cache_params=compiled), fullgraph=True, backend="aot_eager")
        for step in range(2):
            assert_same(fast(x[:, 5:]), layer(x[:, 5:], cache_params=expected), f"step {step}")
    assert_same(compiled.get_recurrent_state(0), expected.get_recurrent_state(0), "state")
    assert_same(compiled.get_conv_state(0), expected.get_conv_state(0), "window")


def test_static_cache_generates_the_same_ids(pair, device):
    eager, model = pair()
    ids = tokens(2, 8, device)
    expected = run(eager, None, generate(ids))
    options = dict(cache_implementation="static", disable_compile=True)
    assert_same(run(model, "layer", generate(ids, **options)), expected, "greedy ids")
