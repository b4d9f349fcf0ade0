# SPDX-License-Identifier: Apache-2.0
"""What every test compares with: the equations, token by token, in float64 on the CPU, and the table of errors.

Nothing here is fast, shared with the package, or clever. Every function takes the inputs the op took (already rounded,
any device) and returns float64 CPU tensors.
"""

import contextlib
import hashlib
from collections import OrderedDict

import torch
import torch.nn.functional as F

# Relative RMS error allowed: (dtype of q, k, v; mode) -> (output, fp32 state).
BOUNDS = {
    (torch.float32, "recurrent"): (1e-6, 1e-6),
    (torch.float32, "chunk"): (1e-5, 1e-5),
    (torch.bfloat16, "recurrent"): (2e-3, 1e-6),
    (torch.bfloat16, "chunk"): (2.0e-3, 1e-3),
    (torch.float16, "recurrent"): (3e-4, 1e-6),
    (torch.float16, "chunk"): (8e-4, 1e-3),
}
# The output in chunk mode where keys are strongly correlated.
CORRELATED_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2.2e-3, torch.float16: 1.3e-3}
# The same where queries point their way too.
ALIGNED_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2.3e-3, torch.float16: 1.5e-3}
# A 16-bit state is rounded where it is stored, in the oracle too.
STATE_BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 3e-3}
# Convolution, gates and norm: fp32 arithmetic, then the rounding of the output's dtype.
ELEMENTWISE_BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}


def rule_bounds(dtype, mode="recurrent", state_dtype=torch.float32, out_dtype=None):
    """(output, state): the table's row for inputs of `dtype`; an fp32 output of 16-bit inputs has fp32's bound.

    In chunk mode that output has float16's, the dtype of what the tensor cores multiply; and "auto" has chunk's bounds.
    """
    mode = "chunk" if mode == "auto" else mode
    out, state = BOUNDS[dtype, mode]
    if mode == "recurrent" and out_dtype is not None:
        out = BOUNDS[out_dtype, mode][0]
    if mode == "chunk" and out_dtype == torch.float32 and dtype != torch.float32:
        out = BOUNDS[torch.float16, mode][0]
    return out, STATE_BOUNDS.get(state_dtype, state)


def wide(tensor):
    return None if tensor is None else tensor.detach().to("cpu", torch.float64, copy=True)


@contextlib.contextmanager
def one_thread():
    """Loops of small torch ops: on a busy machine the barrier after each op costs a hundred times the op itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def l2norm(x):
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rule_steps(q, k, v, g, beta, state=None, *, scale=None, use_qk_l2norm=False, gate_domain="log"):
    """Yields (o_t [B, Hv, V], S [B, Hv, K, V]) after each token. state: [B, Hv, K, V], None is zero."""
    q, k, v, g, beta, state = map(wide, (q, k, v, g, beta, state))
    B, T, Hk, K = q.shape
    Hv, V = v.shape[2:]
    key_head = torch.arange(Hv) // (Hv // Hk)
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = q[:, :, key_head], k[:, :, key_head]
    scale = K**-0.5 if scale is None else float(scale)
    decay = torch.ones(B, T, Hv, dtype=torch.float64) if g is None else g if gate_domain == "linear" else g.exp()
    beta = torch.ones(B, T, Hv, dtype=torch.float64) if beta is None else beta
    S = torch.zeros(B, Hv, K, V, dtype=torch.float64) if state is None else state.clone()
    for t in range(T):
        with one_thread():
            S = decay[:, t, :, None, None] * S
            predicted = (S * k[:, t, :, :, None]).sum(-2)
            delta = beta[:, t, :, None] * (v[:, t] - predicted)
            S = S + k[:, t, :, :, None] * delta[:, :, None, :]
            o = scale * (S * q[:, t, :, :, None]).sum(-2)
        yield o, S


def _rule(q, k, v, g, beta, state, options):
    S = torch.zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3]).double() if state is None else wide(state)
    outputs = []
    for o, S in rule_steps(q, k, v, g, beta, state, **options):
        outputs.append(o)
    return (torch.stack(outputs, 1) if outputs else wide(v)), S


_cache = OrderedDict()  # digest of the inputs -> result: the same case on two devices costs one loop
_CACHE_BYTES = 512 * 2**20


def _digest(tensors, options):
    digest = hashlib.sha1(repr(sorted(options.items())).encode())
    for tensor in tensors:
        digest.update(b"none" if tensor is None else f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor is not None:
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def gated_delta_rule(q, k, v, g, beta, state=None, **options):
    """(out [B, T, Hv, V], final state [B, Hv, K, V]). Options: scale, use_qk_l2norm, gate_domain."""
    tensors = (q, k, v, g, beta, state)
    key = _digest(tensors, options)
    if key not in _cache:
        _cache[key] = _rule(*tensors, options)
        while sum(o.nbytes + S.nbytes for o, S in _cache.values()) > _CACHE_BYTES and len(_cache) > 1:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    out, S = _cache[key]
    return out.clone(), S.clone()


def spans(batch, tokens, cu_seqlens):
    """(batch row, first token, end) of every sequence."""
    if cu_seqlens is None:
        return [(n, 0, tokens) for n in range(batch)]
    offsets = [int(i) for i in cu_seqlens]
    return [(0, first, end) for first, end in zip(offsets[:-1], offsets[1:])]


def gated_delta_rule_pooled(
    q, k, v, g, beta, pool, *, slots=None, out_slots=None, cu_seqlens=None, has_initial_state=None, **options
):
    """(out, pool after the call): rows in a pool, padding rows and tokens of no sequence are zero."""
    out = torch.zeros(v.shape, dtype=torch.float64)
    before, after = wide(pool), wide(pool)
    sequences = spans(*v.shape[:2], cu_seqlens)
    slots = list(range(len(sequences))) if slots is None else [int(i) for i in slots.reshape(-1)]
    out_slots = slots if out_slots is None else [int(i) for i in out_slots]
    for n, (row, first, end) in enumerate(sequences):
        if not 0 <= slots[n] < len(pool):
            continue
        starts_full = has_initial_state is None or bool(has_initial_state[n])
        state = before[slots[n]][None] if starts_full else None
        token = (slice(row, row + 1), slice(first, end))
        parts = [None if x is None else x[token] for x in (q, k, v, g, beta)]
        out[token], final = gated_delta_rule(*parts, state, **options)
        if 0 <= out_slots[n] < len(pool):
            after[out_slots[n]] = final[0].to(pool.dtype).double()
    return out, after


def activate(x, activation):
    return x if activation is None else x * torch.sigmoid(x)


def causal_conv1d(x, weight, bias=None, activation=None, window=None, seq_idx=None):
    """(out [B, C, T], window after): out_t = sum_w weight_w x_(t - W + 1 + w) + bias, oldest tap first.

    window: [B, C, W - 1 or more], the inputs before x, oldest first; None is zeros (and W - 1 columns come back).
    seq_idx: [B, T]; inputs of another document count as zero, a negative document is padding.
    """
    x, weight, bias, window = map(wide, (x, weight, bias, window))
    B, C, T = x.shape
    W = weight.shape[1]
    window = torch.zeros(B, C, W - 1, dtype=torch.float64) if window is None else window
    past = torch.cat([window, x], -1)
    recent = past[..., past.shape[-1] - T - W + 1 :]
    out = torch.zeros(B, C, T, dtype=torch.float64)
    for w in range(W):
        tap = recent[..., w : w + T]
        if seq_idx is not None:
            document = F.pad(seq_idx.cpu(), (W - 1, 0), value=-1)[:, w : w + T]
            tap = torch.where((document == seq_idx.cpu())[:, None], tap, 0.0)
        out += weight[:, w, None] * tap
    out = activate(out if bias is None else out + bias[:, None], activation)
    if seq_idx is not None:
        out = torch.where((seq_idx.cpu() >= 0)[:, None], out, 0.0)
    return out, past[..., past.shape[-1] - window.shape[-1] :]


def gated_delta_gates(a, b, A_log, dt_bias, *, allow_neg_eigval=False):
    """(g, beta): g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), doubled with allow_neg_eigval."""
    a, b, A_log, dt_bias = map(wide, (a, b, A_log, dt_bias))
    g = -A_log.exp() * F.softplus(a + dt_bias)
    return g, torch.sigmoid(b) * (2 if allow_neg_eigval else 1)


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, *, zero_centered=True):
    """(q, k): each head normed, times 1 + weight or weight, its first R elements turned in pairs (i, i + R/2)."""
    q, k, q_weight, k_weight, cos, sin = map(wide, (q, k, q_weight, k_weight, cos, sin))
    cos, sin = (angles.unsqueeze(-2).expand(*q.shape[:2], 1, -1) for angles in (cos, sin))
    half = cos.shape[-1] // 2
    results = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + 1.0 if zero_centered else weight)
        out = y.clone()
        for i in range(half):
            out[..., i] = y[..., i] * cos[..., i] - y[..., i + half] * sin[..., i]
            out[..., i + half] = y[..., i + half] * cos[..., i + half] + y[..., i] * sin[..., i + half]
        results.append(out)
    return results


def output_gate(x, gate):
    """x sigmoid(gate)."""
    return wide(x) * torch.sigmoid(wide(gate))


def rms_norm_gated(x, z, weight, eps, *, activation="silu", norm_before_gate=True, group_size=None):
    """norm(x) weight act(z), or norm(x act(z)) weight; the mean of squares is over each group of the last dim."""
    x, z, weight = map(wide, (x, z, weight))
    gate = torch.sigmoid(z) * (z if activation == "silu" else 1.0)
    grouped = (x if norm_before_gate else x * gate).unflatten(-1, (-1, group_size or x.shape[-1]))
    normed = grouped / torch.sqrt(grouped.square().mean(-1, keepdim=True) + eps)
    out = normed.flatten(-2) * weight
    return out * gate if norm_before_gate else out
