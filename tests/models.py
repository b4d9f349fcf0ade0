# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen3.5 models, and how our layers get into their kernel slots: for test_transformers.py and test_layers.py."""

import logging

import pytest
import torch
import transformers
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping

from .conftest import REPO_ID

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
