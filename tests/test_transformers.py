# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen3.5 models, dense and MoE, with our layers in the kernel slots of transformers, against the plain models."""

import copy
import inspect
import logging
import warnings

import pytest
import torch
import transformers
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5

from .conftest import REPO_ID
from .helpers import RAISES, assert_close, assert_same

logging.getLogger("kernels.layer.layer").setLevel(logging.ERROR)  # it warns of every slot that is left alone

LAYER_SLOT = ("Qwen3_5GatedDeltaNet",)
FUNCTION_SLOTS = (
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "RMSNormGated",
)
LAYER_OF_SLOT = {"fused_recurrent_gated_delta_rule": "recurrent_gated_delta_rule"}
SLOTS = {"layer": LAYER_SLOT, "functions": FUNCTION_SLOTS}
PADDED = ((5, 12), (0, 17), (11, 6))  # (padding, tokens) of each row

every_slot = pytest.mark.parametrize("slots", SLOTS)
every_model = pytest.mark.parametrize(
    ("family", "head_dim", "width"),
    [("dense", 16, 4), ("dense", 64, 4), ("dense", 16, 2), ("moe", 16, 4), ("moe", 64, 2)],
)


def tiny_model(family="dense", head_dim=16, width=4, device="cpu", dtype=torch.float32):
    """Two gated delta net layers around an attention layer; gates slow enough for the state to matter."""
    options = dict(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        linear_conv_kernel_dim=width,
        max_position_embeddings=256,
        initializer_range=0.15,
        pad_token_id=0,
    )
    if family == "dense":
        config = transformers.Qwen3_5TextConfig(intermediate_size=96, **options)
        make = transformers.Qwen3_5ForCausalLM
    else:
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        config = transformers.Qwen3_5MoeTextConfig(shared_expert_intermediate_size=32, **experts, **options)
        make = transformers.Qwen3_5MoeForCausalLM
    torch.manual_seed(0)
    model = make(config).eval()
    with torch.no_grad():
        for layer in linear_layers(model):
            layer.A_log.uniform_(-4, 0)
            layer.dt_bias.uniform_(-2, 1)
    return model.to(device, dtype)


def linear_layers(model):
    return [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]


def put_in(model, slots, mode=Mode.INFERENCE):
    """Kernelizes with exactly these slots; every other slot gets transformers' own forward.

    revision="v1" is the branch of version 1; version=1 would ask the hub which commit that is, LOCAL_KERNELS or not.
    """
    device = next(model.parameters()).device.type
    mapping = {
        slot: {
            device: LayerRepository(
                REPO_ID, revision="v1", trust_remote_code=True, layer_name=LAYER_OF_SLOT.get(slot, slot)
            )
        }
        for slot in slots
    }
    with use_kernel_mapping(mapping, inherit_mapping=False):
        return kernelize(model, mode=mode)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads only get in each other's way in models this small: up to ten times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pair(kernel, device):
    """(model, the same model with our layers) of a family, head dim, conv width, slots and dtype."""
    made = []

    def make(family="dense", head_dim=16, width=4, slots="layer", dtype=torch.float32):
        # Made twice: a deep copy would have its own copies of transformers' function slots, which nobody calls.
        eager, with_kernel = (tiny_model(family, head_dim, width, device, dtype) for _ in range(2))
        made.append((with_kernel, SLOTS[slots]))
        return eager, with_kernel

    yield make
    for model, _ in made:
        put_in(model, ())


def run(model, slots, call):
    """call(model) with our layers in the slots (a name of SLOTS, or None), under no_grad.

    The function slots of a family are one module each for the whole process, so they are put in for one call only.
    """
    put_in(model, SLOTS[slots] if slots else ())
    try:
        with torch.no_grad():
            return call(model)
    finally:
        put_in(model, ())


def tokens(batch, length, device="cpu", seed=0):
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device)


def padded_batch(device):
    """Left-padded rows and their mask."""
    total = sum(PADDED[0])
    ids, mask = tokens(len(PADDED), total, device), torch.ones(len(PADDED), total, dtype=torch.long, device=device)
    for row, (padding, _) in enumerate(PADDED):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return ids, mask


def generate(ids, mask=None, new=10, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    options = dict(max_new_tokens=new, do_sample=False) | options
    return lambda model: model.generate(ids, attention_mask=mask, **options)


def layer_input(length, device, batch=1, dtype=torch.float32, seed=0):
    return torch.randn(batch, length, 64, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def layer_forward(x, **options):
    """call for run(): the first layer of a model."""
    return lambda model: linear_layers(model)[0](hidden_states=x, **options)


def in_pieces(x, cache, lengths, **options):
    def call(model):
        layer = linear_layers(model)[0]
        return torch.cat([layer(x_i, cache_params=cache, **options) for x_i in x.split(lengths, 1)], 1)

    return call


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
def test_offloaded_cache(pair, device):
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


def test_unsupported_input_raises(kernel, device):
    conv = kernel.layers.causal_conv1d_fn()
    with torch.no_grad(), pytest.raises(RAISES, match="activation"):
        conv(torch.randn(1, 3, 5, device=device), torch.randn(3, 4, device=device), None, "gelu")
