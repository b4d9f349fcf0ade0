# SPDX-License-Identifier: Apache-2.0
"""What the forwards in layers.py do. `self` is the host's module there, so nothing of a layer's class can be reached.

Each function chooses between the ops and, where gradients are needed, the differentiable reference.
"""

import torch
import torch.nn.functional as F

from . import reference
from ._dispatch import needs_grad, warn_once
from .conv import causal_conv1d, causal_conv1d_update
from .gates import gated_delta_gates
from .norm import rms_norm_gated
from .rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, gated_delta_rule
from .step import gated_delta_step

MAX_UPDATE_TOKENS = 8  # of causal_conv1d_update


def gated_deltanet(layer, hidden_states, cache, attention_mask, kwargs):
    """The whole layer: projections, convolution, gates, rule, gated norm, output projection."""
    cache = kwargs.get("cache_params") if cache is None else cache
    fired = _fire_hooks(layer)
    if attention_mask is not None:
        hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
    cu_seqlens = _packed(hidden_states.shape[0], hidden_states.shape[1], kwargs)
    conv_state, recurrent_state = _cached_states(cache, layer.layer_idx)
    # Without grad mode the parameters are not walked, which would take longer than a step's kernels.
    track = torch.is_grad_enabled() and _needs_reference(
        "Qwen3_5GatedDeltaNet", hidden_states, conv_state, recurrent_state, *layer.parameters()
    )

    if not track and _is_decode(layer, hidden_states, cache, conv_state, recurrent_state, cu_seqlens):
        o = _step(layer, hidden_states, conv_state, recurrent_state)
        cache.update_recurrent_state(recurrent_state, layer.layer_idx)
    else:
        o = _tokens(layer, hidden_states, cache, conv_state, recurrent_state, cu_seqlens, track)
    output = layer.out_proj(o.flatten(-2))
    for module, hook in reversed(fired):
        hook.post_forward(module, ())
    return output


def _is_decode(layer, hidden_states, cache, conv_state, recurrent_state, cu_seqlens):
    """Whether this is one token a row behind memories that gated_delta_step can move on where they are."""
    return (
        hidden_states.shape[1] == 1
        and cu_seqlens is None
        and conv_state is not None
        and recurrent_state is not None
        and conv_state.shape[-1] == layer.conv_kernel_size
        and layer.activation in ("silu", "swish")
        and not _is_recording(cache, layer.layer_idx)
    )


def _step(layer, hidden_states, conv_state, recurrent_state):
    """Everything between the projections of one token in one launch."""
    z = layer.in_proj_z(hidden_states).unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    return gated_delta_step(
        layer.in_proj_qkv(hidden_states),
        z,
        layer.in_proj_a(hidden_states),
        layer.in_proj_b(hidden_states),
        conv_state,
        recurrent_state,
        conv_weight=layer.conv1d.weight.squeeze(1),
        conv_bias=layer.conv1d.bias,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        norm_weight=layer.norm.weight,
        eps=layer.norm.variance_epsilon,
        num_key_heads=layer.num_k_heads,
        activation=getattr(layer.norm, "activation", "silu"),
    )


def _tokens(layer, hidden_states, cache, conv_state, recurrent_state, cu_seqlens, track):
    """Everything between the projections of any tokens, the ops one after the other."""
    mixed = _convolve(layer, layer.in_proj_qkv(hidden_states), cache, conv_state, cu_seqlens, track)
    q, k, v = torch.split(mixed, [layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    q = q.unflatten(-1, (layer.num_k_heads, layer.head_k_dim))
    k = k.unflatten(-1, (layer.num_k_heads, layer.head_k_dim))
    v = v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim))

    gates = reference.gated_delta_gates if track else gated_delta_gates
    g, beta = gates(layer.in_proj_a(hidden_states), layer.in_proj_b(hidden_states), layer.A_log, layer.dt_bias)
    if recurrent_state is not None and not track:
        o = gated_delta_rule(q, k, v, g, beta, recurrent_state, use_qk_l2norm=True, cu_seqlens=cu_seqlens)
        state = recurrent_state
    else:
        rule = reference.chunk_gated_delta_rule if track else chunk_gated_delta_rule
        o, state = rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=recurrent_state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )
    if cache is not None:  # the cache copies, which costs nothing where it is handed its own tensor
        cache.update_recurrent_state(state, layer.layer_idx)

    z = layer.in_proj_z(hidden_states).unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    return _norm(layer.norm, o, z, track)


def delta_rule(slot, inputs, initial_state, output_final_state, use_qk_l2norm, kwargs):
    """One of the two functional rules; `inputs` are query, key, value, g and beta."""
    q, k, v, g, beta = inputs
    if _needs_reference(slot, *inputs, initial_state):
        rule = reference.chunk_gated_delta_rule
    else:
        rule = chunk_gated_delta_rule if slot == "chunk_gated_delta_rule" else fused_recurrent_gated_delta_rule
    return rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm,
        cu_seqlens=_packed(q.shape[0], q.shape[1], kwargs),
    )


def convolution(x, weight, bias, activation, kwargs):
    """The convolution of x [B, C, T] from an empty window, sequences kept apart."""
    conv = reference.causal_conv1d if _needs_reference("causal_conv1d_fn", x, weight, bias) else causal_conv1d
    seq_idx = kwargs.get("seq_idx")
    if _offsets(kwargs) is None and seq_idx is not None:
        return conv(x, weight, bias, activation, seq_idx=seq_idx.to(torch.int32))
    return conv(x, weight, bias, activation, cu_seqlens=_packed(x.shape[0], x.shape[2], kwargs))


def convolution_update(x, conv_state, weight, bias, activation):
    """The convolution of x [B, C, T] onto a window, which is updated in place."""
    if _needs_reference("causal_conv1d_update", x, conv_state, weight, bias):
        return reference.causal_conv1d(x, weight, bias, activation, conv_state=conv_state)
    if x.shape[2] > MAX_UPDATE_TOKENS:
        return causal_conv1d(x, weight, bias, activation, conv_state=conv_state)
    return causal_conv1d_update(x, conv_state, weight, bias, activation)


def gated_norm(norm, x, z):
    """The gated norm of a module with weight, variance_epsilon and activation."""
    return _norm(norm, x, z, _needs_reference("RMSNormGated", x, z, norm.weight))


def _norm(norm, x, z, track):
    function = reference.rms_norm_gated if track else rms_norm_gated
    activation = getattr(norm, "activation", "silu")
    return function(x, z, norm.weight, norm.variance_epsilon, activation=activation)


def _needs_reference(slot, *tensors):
    if not needs_grad(*tensors):
        return False
    warn_once(
        f"gradients of {slot}",
        f"gated-deltanet: {slot} has no backward kernel yet; gradients come from the plain torch reference, which is "
        "slow. For inference, call the model under torch.no_grad() or torch.inference_mode().",
    )
    return True


def _convolve(layer, x, cache, conv_state, cu_seqlens, track):
    """The convolution of the projection x [B, T, C], continued from the cache's window, which it also moves on."""
    width = layer.conv_kernel_size
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    columns = x.transpose(1, 2)
    can_write = not track and not _is_recording(cache, layer.layer_idx)
    if conv_state is not None and can_write and conv_state.shape[-1] == width:
        if cu_seqlens is None and x.shape[1] <= MAX_UPDATE_TOKENS:
            return causal_conv1d_update(columns, conv_state, weight, bias, layer.activation).transpose(1, 2)
        return _causal_conv1d(causal_conv1d, x, cu_seqlens, weight, bias, layer.activation, conv_state=conv_state)
    window = None
    if conv_state is not None:  # a recorded past may be longer or shorter than the window
        window = conv_state[..., -(width - 1) :]
        window = F.pad(window, (width - 1 - window.shape[-1], 0))
    conv = reference.causal_conv1d if track else causal_conv1d
    y = _causal_conv1d(conv, x, cu_seqlens, weight, bias, layer.activation, conv_state=window, write_state=False)
    if cache is not None:
        cache.update_conv_state(columns, layer.layer_idx, conv_kernel_size=width)
    return y


def _causal_conv1d(conv, x, cu_seqlens, *args, **kwargs):
    """`conv` on x [B, T, C], dense or packed."""
    if cu_seqlens is None:
        return conv(x.transpose(1, 2), *args, **kwargs).transpose(1, 2)
    return conv(x.squeeze(0), *args, cu_seqlens=cu_seqlens, **kwargs).unsqueeze(0)


def _fire_hooks(layer):
    """Brings offloaded weights that are read without their module's forward; returns what has to be put back.

    accelerate moves weights in a hook around a module's forward. The convolution and the norm are read directly here.
    The layer's own hook is lost when the forward is replaced after it was attached.
    """
    modules = [layer.conv1d, layer.norm]
    if layer.A_log.device.type == "meta":
        modules.append(layer)
    fired = [(module, module._hf_hook) for module in modules if getattr(module, "_hf_hook", None) is not None]
    for module, hook in fired:
        hook.pre_forward(module)
    return fired


def _cached_states(cache, layer_idx):
    """(convolution window, recurrent state) of the layer, None where it has none yet. Both cache interfaces."""
    if cache is None:
        return None, None
    if hasattr(cache, "get_conv_state"):
        return cache.get_conv_state(layer_idx), cache.get_recurrent_state(layer_idx)
    if not cache.has_previous_state(layer_idx):
        return None, None
    layer = cache.layers[layer_idx]
    states = (layer.conv_states, layer.recurrent_states)
    return tuple(state[0] if isinstance(state, dict) else state for state in states)


def _is_recording(cache, layer_idx):
    """Whether the cache keeps the inputs of all tokens, to be able to crop."""
    if cache is None:
        return False
    if hasattr(cache, "is_recording_past"):
        return cache.is_recording_past(layer_idx)
    return getattr(cache.layers[layer_idx], "record_past", False)


def _offsets(kwargs):
    given = kwargs.get("cu_seq_lens_q")
    return kwargs.get("cu_seqlens") if given is None else given


def _packed(batch, tokens, kwargs):
    """cu_seqlens of packed sequences, or None. Derived from seq_idx (one wait for the device) where it is not given."""
    cu_seqlens, seq_idx = _offsets(kwargs), kwargs.get("seq_idx")
    if cu_seqlens is None and seq_idx is None:
        return None
    if batch != 1:
        raise ValueError(f"packed sequences (cu_seq_lens_q, seq_idx) need a batch of 1, got {batch} rows")
    if seq_idx is not None and list(seq_idx.shape) != [1, tokens]:
        raise ValueError(f"seq_idx must be [1, T] = [1, {tokens}], got {list(seq_idx.shape)}")
    if cu_seqlens is None:
        return _offsets_of_documents(seq_idx)
    if seq_idx is not None and seq_idx.device.type == "cpu" and not torch.compiler.is_compiling():
        inner = [offset for offset in _offsets_of_documents(seq_idx).tolist() if 0 < offset < tokens]
        given = sorted({offset for offset in cu_seqlens.tolist() if 0 < offset < tokens})
        if inner != given:
            raise ValueError(f"cu_seq_lens_q and seq_idx disagree: sequences start at {given} and at {inner}")
    return cu_seqlens


def _offsets_of_documents(seq_idx):
    """seq_idx [1, T], one run of equal numbers a document -> cu_seqlens."""
    documents = seq_idx[0]
    starts = torch.nonzero(documents[1:] != documents[:-1]).squeeze(-1) + 1
    return F.pad(F.pad(starts, (1, 0)), (0, 1), value=documents.shape[0])
