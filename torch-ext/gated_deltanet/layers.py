# SPDX-License-Identifier: Apache-2.0
"""Layers for `kernels.kernelize`: their forward replaces that of a transformers module, whose attributes are `self`.

    transformers slot                   layer
    Qwen3_5GatedDeltaNet                Qwen3_5GatedDeltaNet (dense and MoE models)
    chunk_gated_delta_rule              chunk_gated_delta_rule
    fused_recurrent_gated_delta_rule    recurrent_gated_delta_rule, or fused_recurrent_gated_delta_rule
    causal_conv1d_fn                    causal_conv1d_fn
    causal_conv1d_update                causal_conv1d_update
    RMSNormGated                        RMSNormGated

Where gradients are needed (grad mode, and an input or parameter that requires grad) a layer computes with the
differentiable reference, and says so once.
"""

from torch import nn

from . import _layer


class Qwen3_5GatedDeltaNet(nn.Module):
    """The gated delta net layer of Qwen3.5: projections, convolution, gates, rule, gated norm, output projection.

    The cache's convolution window and recurrent state are updated in place. beta stays in float32 from the gate on,
    where the model's own code rounds it to the model's dtype.
    """

    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
        """Computes the layer for T new tokens of each row.

        Args:
            hidden_states: [B, T, hidden_size] of the model's dtype.
            cache: transformers cache or None; named `cache_params` before transformers 5.24, both are accepted.
            attention_mask: [B, T] of 0 and 1 or None; hidden states of masked tokens count as zero, which is exact for
                padding on the left.
            kwargs: cu_seq_lens_q (or cu_seqlens) int [N + 1] and seq_idx int32 [1, T] keep packed sequences apart in
                the convolution and in the rule. seq_idx alone is turned into offsets, for which the host waits for its
                device. Unknown names are ignored.

        Returns:
            [B, T, hidden_size].

        Raises:
            ValueError: packed sequences with B > 1; cu_seq_lens_q and seq_idx of CPU tensors that disagree.
        """
        return _layer.gated_deltanet(self, hidden_states, cache, attention_mask, kwargs)


class chunk_gated_delta_rule(nn.Module):
    """The rule over many tokens, functional: (o, final state or None)."""

    has_backward = False
    can_torch_compile = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        """Computes gated_deltanet.chunk_gated_delta_rule.

        Args:
            query: [B, T, Hk, K].
            key: [B, T, Hk, K].
            value: [B, T, Hv, V], Hv a multiple of Hk.
            g: [B, T, Hv] float32, natural-log decay.
            beta: [B, T, Hv] any float dtype.
            chunk_size: ignored, it does not change the result.
            initial_state: [N, Hv, K, V] or None, only read.
            output_final_state: whether the final state is returned.
            use_qk_l2norm_in_kernel: l2-normalise query and key.
            kwargs: cu_seqlens (or cu_seq_lens_q) and seq_idx keep packed sequences apart. Unknown names are ignored.

        Returns:
            (o [B, T, Hv, V] of query's dtype, final state [N, Hv, K, V] or None).
        """
        return _layer.delta_rule(
            "chunk_gated_delta_rule",
            (query, key, value, g, beta),
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            kwargs,
        )


class recurrent_gated_delta_rule(nn.Module):
    """The rule over few tokens, functional: (o, final state or None)."""

    has_backward = False
    can_torch_compile = True

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        """Computes gated_deltanet.fused_recurrent_gated_delta_rule.

        Args:
            query: [B, T, Hk, K].
            key: [B, T, Hk, K].
            value: [B, T, Hv, V], Hv a multiple of Hk.
            g: [B, T, Hv] float32, natural-log decay.
            beta: [B, T, Hv] any float dtype.
            initial_state: [N, Hv, K, V] or None, only read.
            output_final_state: whether the final state is returned.
            use_qk_l2norm_in_kernel: l2-normalise query and key.
            kwargs: cu_seqlens (or cu_seq_lens_q) and seq_idx keep packed sequences apart. Unknown names are ignored.

        Returns:
            (o [B, T, Hv, V] of query's dtype, final state [N, Hv, K, V] or None).
        """
        return _layer.delta_rule(
            "fused_recurrent_gated_delta_rule",
            (query, key, value, g, beta),
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            kwargs,
        )


class fused_recurrent_gated_delta_rule(recurrent_gated_delta_rule):
    """recurrent_gated_delta_rule under the name of its slot."""

    has_backward = False
    can_torch_compile = True


class causal_conv1d_fn(nn.Module):
    """The causal convolution over many tokens, from an empty window."""

    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states, weight, bias=None, activation=None, **kwargs):
        """Computes gated_deltanet.causal_conv1d.

        Args:
            hidden_states: [B, C, T], any strides.
            weight: [C, W].
            bias: [C] or None.
            activation: None, "silu" or "swish".
            kwargs: seq_idx int32 [B, T] or cu_seq_lens_q (or cu_seqlens) keep packed sequences apart. Unknown names are
                ignored.

        Returns:
            [B, C, T].
        """
        return _layer.convolution(hidden_states, weight, bias, activation, kwargs)


class causal_conv1d_update(nn.Module):
    """The causal convolution of decode, conv_state updated in place."""

    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states, conv_state, weight, bias=None, activation=None):
        """Computes gated_deltanet.causal_conv1d_update.

        Args:
            hidden_states: [B, C, T], any strides.
            conv_state: [B, C, W] (or W - 1), oldest input first; updated in place.
            weight: [C, W].
            bias: [C] or None.
            activation: None, "silu" or "swish".

        Returns:
            [B, C, T].
        """
        return _layer.convolution_update(hidden_states, conv_state, weight, bias, activation)


class RMSNormGated(nn.Module):
    """RMS norm, weight, then the gate: norm(x) * weight * act(gate). Reads weight, variance_epsilon and activation."""

    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states, gate):
        """Computes gated_deltanet.rms_norm_gated in float32, rounded once.

        Args:
            hidden_states: [..., V].
            gate: the shape of hidden_states.

        Returns:
            hidden_states' shape and dtype.
        """
        return _layer.gated_norm(self, hidden_states, gate)
