# SPDX-License-Identifier: Apache-2.0
"""What the layers accept from their host: packed sequences, either cache interface, offloaded weights, any keyword."""

import inspect

import pytest
import torch
from transformers import DynamicCache

from .helpers import RAISES, assert_close, assert_same
from .models import (
    LAYER_OF_SLOT,
    SLOTS,
    every_slot,
    layer_forward,
    layer_input,
    linear_layers,
    run,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("given", ["cu_seq_lens_q", "seq_idx", "both"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_packed_documents_equal_separate_calls(pair, device, given, dtype):
    _, model = pair()
    lengths = (7, 64, 30)
    x = layer_input(sum(lengths), device)
    offsets = torch.tensor([0, 7, 71, 101], dtype=dtype, device=device)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].to(device, torch.int32)
    options = {"cu_seq_lens_q": offsets, "seq_idx": documents}
    if given != "both":
        options = {given: options[given]}
    options |= dict(cu_seq_lens_k=offsets, max_length_q=64, max_length_k=64)
    packed = run(model, "layer", layer_forward(x, **options))
    separate = [run(model, "layer", layer_forward(piece)) for piece in x.split(lengths, 1)]
    alone = torch.cat(separate, 1)
    # The projections are matrix products over another number of rows; what we compute adds no difference of its own.
    assert_close(packed, alone, 1e-6)
    leaking = run(model, "layer", layer_forward(x))
    assert not torch.allclose(leaking[:, 7:], alone[:, 7:], atol=1e-3), "the control must differ"


@every_slot
def test_packed_kwargs_reach_every_slot(pair, device, slots):
    """With the keywords of DataCollatorWithFlattening; transformers' own functions refuse packed sequences."""
    _, model = pair()
    lengths = (5, 9)
    offsets = torch.tensor([0, 5, 14], dtype=torch.int32, device=device)
    documents = torch.tensor([[0] * 5 + [1] * 9], dtype=torch.int32, device=device)
    x = layer_input(14, device)
    packed = run(model, slots, layer_forward(x, cu_seq_lens_q=offsets, seq_idx=documents))
    pieces = [run(model, slots, layer_forward(piece)) for piece in x.split(lengths, 1)]
    assert_close(packed, torch.cat(pieces, 1), 1e-6)


def test_contradicting_or_batched_packing_raises(pair, device):
    _, model = pair()
    documents = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32, device=device)
    if device == "cpu":  # values of a CUDA tensor are not read
        offsets = torch.tensor([0, 3, 4], device=device)
        with pytest.raises(ValueError, match="cu_seq_lens_q and seq_idx disagree"):
            run(model, "layer", layer_forward(layer_input(4, device), cu_seq_lens_q=offsets, seq_idx=documents))
    with pytest.raises(ValueError, match="batch of 1"):
        run(model, "layer", layer_forward(layer_input(4, device, batch=2), seq_idx=documents.expand(2, 4)))
    with pytest.raises(ValueError, match="seq_idx"):
        run(model, "layer", layer_forward(layer_input(5, device), seq_idx=documents))


class OldCache:
    """The cache interface before get_conv_state: attributes of `layers`, dicts by state index or plain tensors."""

    def __init__(self, cache, as_dict):
        self.cache, self.as_dict = cache, as_dict

    def has_previous_state(self, layer_idx, state_idx=0):
        return self.cache.get_conv_state(layer_idx) is not None

    def update_conv_state(self, *args, **kwargs):
        return self.cache.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args, **kwargs):
        return self.cache.update_recurrent_state(*args, **kwargs)

    @property
    def layers(self):
        class Layer:
            pass

        old = []
        for layer in self.cache.layers:
            view = Layer()
            if hasattr(layer, "conv_states"):
                view.record_past = layer.record_past
                view.conv_states = layer.conv_states if self.as_dict else layer.conv_states[0]
                view.recurrent_states = layer.recurrent_states if self.as_dict else layer.recurrent_states[0]
            old.append(view)
        return old


@pytest.mark.parametrize("as_dict", [True, False], ids=["dict", "tensor"])
@pytest.mark.parametrize("keyword", ["cache", "cache_params"])
def test_both_cache_interfaces_and_names(pair, kernel, device, keyword, as_dict):
    _, model = pair()
    layer = linear_layers(model)[0]
    forward = kernel.layers.Qwen3_5GatedDeltaNet.forward
    x = layer_input(9, device)
    new = DynamicCache(config=model.config)
    old = OldCache(DynamicCache(config=model.config), as_dict)
    with torch.no_grad():
        for piece in x.split((5, 3, 1), 1):
            expected = forward(layer, piece, **{keyword: new})
            assert_same(forward(layer, piece, **{keyword: old}), expected)


def test_cached_single_token_is_one_step(pair, kernel, device, monkeypatch):
    """Prefill and recorded pasts take the ops, one token behind a cache the fused step, with their values"""
    _, model = pair()
    layer, calls = linear_layers(model)[0], []
    forward, step = kernel.layers.Qwen3_5GatedDeltaNet.forward, kernel._layer.gated_delta_step

    def counted(*args, **kwargs):
        calls.append(1)
        return step(*args, **kwargs)

    monkeypatch.setattr(kernel._layer, "gated_delta_step", counted)
    x = layer_input(9, device)

    def run_pieces(lengths, recording=False):
        cache = DynamicCache(config=model.config)
        if recording:
            cache.layers[0].activate_past_recording()
        before = len(calls)
        with torch.no_grad():
            out = torch.cat([forward(layer, piece, cache=cache) for piece in x.split(lengths, 1)], 1)
        return out, cache, len(calls) - before

    whole, by_ops, count = run_pieces((5, 4))
    assert count == 0
    pieces, by_step, count = run_pieces((5, 1, 1, 1, 1))
    assert count == 4
    assert_close(pieces, whole, 1e-5)
    assert_close(by_step.get_recurrent_state(0), by_ops.get_recurrent_state(0), 1e-5, "state")
    assert_close(by_step.get_conv_state(0), by_ops.get_conv_state(0), 1e-5, "window")
    assert run_pieces((5, 4))[2] == run_pieces((5, 1, 3), recording=True)[2] == 0


class OffloadHook:
    """What accelerate attaches to a module whose weights wait elsewhere: they are there only between these two."""

    def __init__(self, module):
        self.weights, self.calls = {name: p.detach().clone() for name, p in module.named_parameters()}, []
        self.post_forward(module, ())
        self.calls.clear()

    def _set(self, module, device):
        for name, weight in self.weights.items():
            setattr(module, name, torch.nn.Parameter(weight.to(device), requires_grad=False))

    def pre_forward(self, module, *args, **kwargs):
        self.calls.append("pre")
        self._set(module, next(iter(self.weights.values())).device)
        return args, kwargs

    def post_forward(self, module, output):
        self.calls.append("post")
        self._set(module, "meta")
        return output


def test_offloaded_weights_are_fetched(pair, device):
    eager, model = pair()
    x = layer_input(5, device)
    expected = run(eager, None, layer_forward(x))
    layer = linear_layers(model)[0]
    for module in (layer.conv1d, layer.norm):
        module._hf_hook = OffloadHook(module)
    assert_close(run(model, "layer", layer_forward(x)), expected, 1e-5)
    assert layer.conv1d._hf_hook.calls == layer.norm._hf_hook.calls == ["pre", "post"]
    assert layer.conv1d.weight.device.type == "meta"


def test_extra_keyword_arguments(kernel, device):
    """Unknown names are ignored; those that separate sequences are honoured."""
    layers = kernel.layers
    unknown = dict(cu_seq_lens_k=None, max_length_q=3, max_length_k=3, position_ids=None, something_new=1)
    q, v = torch.randn(1, 6, 2, 16, device=device), torch.randn(1, 6, 4, 16, device=device)
    g, beta = -torch.rand(1, 6, 4, device=device), torch.rand(1, 6, 4, device=device)
    offsets = torch.tensor([0, 2, 6], device=device)
    with torch.no_grad():
        for layer in (
            layers.chunk_gated_delta_rule(),
            layers.recurrent_gated_delta_rule(),
            layers.fused_recurrent_gated_delta_rule(),
        ):
            plain = layer(q, q, v, g, beta, output_final_state=True)
            for a, b in zip(layer(q, q, v, g, beta, output_final_state=True, **unknown), plain):
                assert_same(a, b)
            packed, states = layer(q, q, v, g, beta, output_final_state=True, cu_seqlens=offsets, **unknown)
            assert states.shape == (2, 4, 16, 16)
            assert_same(packed[:, :2], plain[0][:, :2])
            assert_same(packed[:, 2:], layer(q[:, 2:], q[:, 2:], v[:, 2:], g[:, 2:], beta[:, 2:])[0])
        x, weight = torch.randn(1, 5, 6, device=device), torch.randn(5, 4, device=device)
        conv = layers.causal_conv1d_fn()
        plain = conv(x, weight, None, "silu")
        assert_same(conv(x, weight, None, "silu", **unknown), plain)
        documents = torch.tensor([[0, 0, 1, 1, 1, 1]], dtype=torch.int32, device=device)
        expected = torch.cat([conv(x[..., :2], weight, None, "silu"), conv(x[..., 2:], weight, None, "silu")], -1)
        assert_same(conv(x, weight, None, "silu", seq_idx=documents, **unknown), expected)
        assert_same(conv(x, weight, None, "silu", cu_seq_lens_q=offsets, **unknown), expected)
    parameters = list(inspect.signature(layers.causal_conv1d_update.forward).parameters.values())[1:]
    assert [p.name for p in parameters] == ["hidden_states", "conv_state", "weight", "bias", "activation"]
    assert all(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters)


@pytest.mark.kernels_ci
def test_layers_follow_the_hub_rules(kernel):
    classes = [c for c in vars(kernel.layers).values() if inspect.isclass(c)]
    assert {c.__name__ for c in classes} >= set(SLOTS["layer"] + SLOTS["functions"]) | set(LAYER_OF_SLOT.values())
    plain = {name for name, _ in inspect.getmembers(torch.nn.Module)}
    for layer in classes:
        assert issubclass(layer, torch.nn.Module) and layer.__init__ is torch.nn.Module.__init__
        extra = {name for name, _ in inspect.getmembers(layer)} - plain
        assert extra <= {"has_backward", "can_torch_compile"}, f"{layer.__name__} has {extra}"
        assert layer.has_backward is False and layer.can_torch_compile is True


def test_unsupported_input_raises(kernel, device):
    conv = kernel.layers.causal_conv1d_fn()
    with torch.no_grad(), pytest.raises(RAISES, match="activation"):
        conv(torch.randn(1, 3, 5, device=device), torch.randn(3, 4, device=device), None, "gelu")
