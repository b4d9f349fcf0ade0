# SPDX-License-Identifier: Apache-2.0
"""Every op in plain torch, straight from its equation: what the kernels are compared with, what serves devices without
a kernel, and what the hub layers use where gradients are needed.

Each function has the arguments, the meaning and the return value of the op of its name. Any float dtype and any device;
float64 inputs are computed in float64, everything else in float32, and rounded once at the end. Differentiable: nothing
that autograd tracks is written to; what an op keeps in place (state, conv_state) is stored detached, and the functional
chunk_gated_delta_rule and fused_recurrent_gated_delta_rule return a connected final state. Meaning first, speed never:
loops over tokens, and index tensors (slots, cu_seqlens, has_initial_state) are read on the host.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

INDEX_DTYPES = (torch.int32, torch.int64)


def gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    state,
    *,
    scale=None,
    use_qk_l2norm=False,
    cu_seqlens=None,
    slots=None,
    out_slots=None,
    has_initial_state=None,
    mode="auto",
    precision="fp16",
    scan="auto",
    gate_domain="log",
    A_log=None,
    dt_bias=None,
    allow_neg_eigval=False,
    checkpoint_every=None,
    checkpoints=None,
    checkpoint_starts=None,
    out=None,
):
    _require(mode in ("auto", "recurrent", "chunk"), f"mode must be auto, recurrent or chunk, got {mode!r}")
    _require(precision in ("fp16", "high"), f"precision must be fp16 or high, got {precision!r}")
    _require(scan in ("off", "auto"), f"scan must be off or auto, got {scan!r}")
    _require(gate_domain in ("log", "linear", "raw"), f"gate_domain must be log, linear or raw, got {gate_domain!r}")
    is_raw = gate_domain == "raw"
    g, beta = _opened(g, beta, is_raw, A_log, dt_bias, is_raw, allow_neg_eigval)
    spans = _spans(cu_seqlens, *q.shape[:2])
    rows = _slots("slots", slots, len(spans), state.shape[0], needs_all=slots is None and out_slots is None)
    targets = rows if out_slots is None else _slots("out_slots", out_slots, len(spans), state.shape[0])
    initial = _gather(state, rows, has_initial_state, _wide(q, k, v, state))
    o, final = _rule(q, k, v, g, beta, initial, spans, rows, scale, use_qk_l2norm, gate_domain == "linear")
    if checkpoints is not None:
        tokens = _prepare(q, k, v, g, beta, initial.dtype, scale, use_qk_l2norm, gate_domain == "linear")
        _keep_checkpoints(tokens, initial, spans, rows, checkpoints, checkpoint_every, checkpoint_starts, q.shape[1])
    with torch.no_grad():
        for row, target, last in zip(rows, targets, final):
            if row is not None and target is not None:
                state[target].copy_(last)
    return _result(o.to(q.dtype), out)


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g=None,
    gk=None,
    gv=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
):
    _require(gk is None and gv is None, "gk and gv are not supported, the decay of this rule is one number per head")
    g, beta = _opened(g, beta, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    spans = _spans(cu_seqlens, *q.shape[:2])
    rows = list(range(len(spans)))
    wide = _wide(q, k, v, initial_state)
    if initial_state is None:
        initial = torch.zeros(len(rows), v.shape[2], q.shape[3], v.shape[3], dtype=wide, device=q.device)
    else:
        _slots("initial_state", None, len(rows), initial_state.shape[0], needs_all=True)
        initial = (initial_state.transpose(-1, -2) if state_v_first else initial_state).to(wide)
    o, final = _rule(q, k, v, g, beta, initial, spans, rows, scale, use_qk_l2norm_in_kernel, False)
    if not output_final_state:
        return o.to(q.dtype), None
    final = torch.stack(final) if final else initial
    final = final.to(torch.promote_types(q.dtype, torch.float32) if initial_state is None else initial_state.dtype)
    return o.to(q.dtype), final.transpose(-1, -2).contiguous() if state_v_first else final


fused_recurrent_gated_delta_rule = chunk_gated_delta_rule


def gated_delta_verify(
    q,
    k,
    v,
    g,
    beta,
    state,
    ring=None,
    *,
    slots=None,
    ring_slots=None,
    cu_seqlens=None,
    state_table=None,
    num_accepted=None,
    states_out=None,
    scale=None,
    use_qk_l2norm=False,
    gate_domain="log",
    out=None,
):
    _require(gate_domain in ("log", "linear"), f"gate_domain must be log or linear, got {gate_domain!r}")
    contracts = sum(x is not None for x in (ring, state_table, states_out))
    _require(contracts == 1, "takes one of ring, state_table and states_out")
    _require(slots is None or num_accepted is None, "slots and num_accepted both say where a sequence starts")
    spans, pool = _spans(cu_seqlens, *q.shape[:2]), state.shape[0]
    if num_accepted is not None:
        counts = num_accepted.tolist()
        starts = [row[count - 1] if 1 <= count <= len(row) else -1 for row, count in zip(state_table.tolist(), counts)]
        rows = [slot if 0 <= slot < pool else None for slot in starts]
    else:
        rows = _slots("slots", slots, len(spans), pool, needs_all=slots is None)
    ring_rows = (
        None if ring is None else _slots("ring_slots", ring_slots, len(spans), ring.shape[0], ring_slots is None)
    )
    initial = _gather(state, rows, None, _wide(q, k, v, state))
    linear = gate_domain == "linear"
    o, final = _rule(q, k, v, g, beta, initial, spans, rows, scale, use_qk_l2norm, linear)
    tokens = _prepare(q, k, v, g, beta, initial.dtype, scale, use_qk_l2norm, linear)
    with torch.no_grad():
        for n, ((row, first, end), slot) in enumerate(zip(spans, rows)):
            if slot is None:
                continue
            if ring is not None and end - first > ring.shape[2]:
                state[slot].copy_(final[n])
                continue
            steps = enumerate(_steps(tokens, row, first, end, initial[n]))
            if ring is not None and ring_rows[n] is not None:
                for t, (_, factor, _) in steps:
                    _record(ring[ring_rows[n], :, t], k[row, first + t], factor, tokens.decay[row, first + t])
            elif states_out is not None:
                for t, (_, _, S) in zip(range(states_out.shape[1]), (step for _, step in steps)):
                    states_out[n, t].copy_(S)
            elif state_table is not None:
                for target, (_, (_, _, S)) in zip(state_table[n].tolist(), steps):
                    if 0 <= target < pool:
                        state[target].copy_(S)
    return _result(o.to(q.dtype), out)


def gated_delta_step(
    mixed_qkv,
    z,
    a,
    b,
    conv_state,
    state,
    *,
    conv_weight,
    conv_bias=None,
    A_log,
    dt_bias,
    norm_weight,
    eps,
    num_key_heads,
    layout="qkv",
    activation="silu",
    norm_before_gate=True,
    allow_neg_eigval=False,
    slots=None,
    out=None,
):
    _require(layout in ("qkv", "interleaved"), f"layout must be qkv or interleaved, got {layout!r}")
    Hv, K, V = state.shape[1:]
    Hk, group = num_key_heads, Hv // num_key_heads
    if layout == "interleaved":
        _require(z is None and a is None, "z and a must be None with layout interleaved")
        q, k, v, z = mixed_qkv.unflatten(-1, (Hk, -1)).split([K, K, group * V, group * V], -1)
        mixed_qkv = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
        b, a = (x.flatten(2) for x in b.unflatten(-1, (Hk, -1)).split([group, group], -1))
        z = z.flatten(2).unflatten(-1, (Hv, V))
    pool = min(conv_state.shape[0], state.shape[0])  # a slot that one of them lacks is padding for both
    x = mixed_qkv.transpose(1, 2)
    mixed = causal_conv1d_update(x, conv_state[:pool], conv_weight, conv_bias, "silu", slots=slots).transpose(1, 2)
    q, k, v = mixed.to(_wide(mixed, state)).split([Hk * K, Hk * K, Hv * V], -1)  # o is not rounded before the norm
    q, k, v = q.unflatten(-1, (Hk, K)), k.unflatten(-1, (Hk, K)), v.unflatten(-1, (Hv, V))
    g, beta = gated_delta_gates(a, b, A_log, dt_bias, allow_neg_eigval=allow_neg_eigval)
    o = gated_delta_rule(q, k, v, g, beta, state[:pool], use_qk_l2norm=True, slots=slots)
    y = rms_norm_gated(o, z, norm_weight, eps, activation=activation, norm_before_gate=norm_before_gate)
    return y.to(mixed_qkv.dtype) if out is None else _result(y, out)


def fold_ring(state, ring, *, slots, ring_slots, num_accepted):
    Hv, K, V = state.shape[1:]
    group = Hv // ring.shape[1]
    tables = (slots.reshape(-1, slots.shape[-1]).tolist(), ring_slots.reshape(-1, ring_slots.shape[-1]).tolist())
    wide = _wide(state, ring)
    with torch.no_grad():
        for layer_slots, layer_rows in zip(*tables):
            for slot, row, count in zip(layer_slots, layer_rows, num_accepted.tolist()):
                inside = 0 <= slot < state.shape[0] and 0 <= row < ring.shape[0] and 1 <= count <= ring.shape[2]
                S = state[slot].to(wide) if inside else None
                for record in ring[row].transpose(0, 1)[:count].to(wide) if inside else ():
                    key = record[:, :K].repeat_interleave(group, 0)
                    factor = record[:, K : K + group * V].reshape(Hv, V)
                    alpha = record[:, K + group * V : K + group * (V + 1)].reshape(Hv)
                    S = alpha[:, None, None] * S + key[:, :, None] * factor[:, None, :]
                if inside:
                    state[slot].copy_(S)
    return state


def copy_slots(pool, src, dst):
    with torch.no_grad():
        before = pool.clone()
        for source, target in zip(src.tolist(), dst.tolist()):
            if 0 <= source < len(pool) and 0 <= target < len(pool):
                pool[target].copy_(before[source])
    return pool


def zero_slots(pool, slots):
    with torch.no_grad():
        for slot in slots.tolist():
            if 0 <= slot < len(pool):
                pool[slot].zero_()
    return pool


def cast_state(src, dst):
    _require(src.shape == dst.shape, f"dst must be of src's shape {list(src.shape)}, got {list(dst.shape)}")
    with torch.no_grad():
        return dst.copy_(src)


def causal_conv1d(
    x,
    weight,
    bias=None,
    activation=None,
    *,
    conv_state=None,
    slots=None,
    cu_seqlens=None,
    seq_idx=None,
    has_initial_state=None,
    write_state=True,
    out=None,
):
    _require(activation in (None, "silu", "swish"), f"activation must be None, silu or swish, got {activation!r}")
    fits = seq_idx is None or (conv_state is None and cu_seqlens is None)
    _require(fits, "seq_idx goes with neither conv_state nor cu_seqlens")
    _require(slots is None or conv_state is not None, "slots needs conv_state, which is not given")
    has_window = has_initial_state is None or conv_state is not None
    _require(has_window, "has_initial_state needs conv_state, which is not given")
    _require(x.dim() == 3 or cu_seqlens is not None, "x [total, C] needs cu_seqlens")
    tokens = x.t().unsqueeze(0) if x.dim() == 2 else x
    channels, width = weight.shape
    wide = _wide(x, weight, conv_state)
    spans = _spans(cu_seqlens, tokens.shape[0], tokens.shape[2])
    if conv_state is None:
        rows = list(range(len(spans)))
        windows = torch.zeros(len(rows), channels, width - 1, dtype=wide, device=x.device)
    else:
        rows = _slots("slots", slots, len(spans), conv_state.shape[0], needs_all=slots is None)
        windows = _gather(conv_state, rows, has_initial_state, wide)
    documents = None if seq_idx is None else seq_idx.to(torch.int64)
    pieces = []
    for (row, first, end), slot, window in zip(spans, rows, windows):
        piece = tokens[row, :, first:end].to(wide)
        document = None if documents is None else documents[row, first:end]
        y = _convolve(piece, weight.to(wide), bias, activation, window, document)
        pieces.append(y if slot is not None else torch.zeros_like(y))
        if slot is not None and conv_state is not None and write_state:
            with torch.no_grad():
                conv_state[slot].copy_(torch.cat([window, piece], -1)[:, piece.shape[1] :])
    y = _assemble(pieces, spans, tokens, token_dim=1, ragged=cu_seqlens is not None).to(x.dtype)
    return _result(y[0].t() if x.dim() == 2 else y, out)


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, *, slots=None, out=None):
    _require(x.dim() == 3 and x.shape[2] <= 8, f"x must be [B, C, T] with T up to 8, got {list(x.shape)}")
    return causal_conv1d(x, weight, bias, activation, conv_state=conv_state, slots=slots, out=out)


def conv_state_write(x, conv_state, *, num_accepted, slots=None, cu_seqlens=None, has_initial_state=None):
    _require(x.dim() == 3 or cu_seqlens is not None, "x [total, C] needs cu_seqlens")
    tokens = x.t().unsqueeze(0) if x.dim() == 2 else x
    spans = _spans(cu_seqlens, tokens.shape[0], tokens.shape[2])
    rows = _slots("slots", slots, len(spans), conv_state.shape[0], needs_all=slots is None)
    windows = _gather(conv_state, rows, has_initial_state, _wide(x, conv_state))
    with torch.no_grad():
        for (row, first, end), slot, window, count in zip(spans, rows, windows, num_accepted.tolist()):
            if slot is not None and 1 <= count <= end - first:
                accepted = tokens[row, :, first : first + count].to(windows.dtype)
                conv_state[slot].copy_(torch.cat([window, accepted], -1)[:, count:])
    return conv_state


def gated_delta_gates(a, b, A_log, dt_bias, *, allow_neg_eigval=False):
    wide = _wide(a, b, A_log, dt_bias)
    return _log_decay(a.to(wide), A_log.to(wide), dt_bias.to(wide)), _write_strength(b.to(wide), allow_neg_eigval)


def _log_decay(a, A_log, dt_bias):
    largest = torch.finfo(a.dtype).max
    return -(A_log.exp().clamp(max=largest) * F.softplus(a + dt_bias).clamp(max=largest))


def _write_strength(b, allow_neg_eigval):
    return (2 if allow_neg_eigval else 1) * torch.sigmoid(b)


# g and beta of a rule that may get a and b in their place.
def _opened(g, beta, gate_is_raw, A_log, dt_bias, beta_is_raw, allow_neg_eigval):
    _require(gate_is_raw or (A_log is None and dt_bias is None), "A_log and dt_bias are for raw gates, g holds decays")
    _require(not gate_is_raw or (A_log is not None and g is not None), "g and A_log must be given with raw gates")
    _require(beta_is_raw or not allow_neg_eigval, "allow_neg_eigval is for raw gates, beta has had its sigmoid")
    if gate_is_raw:
        _require(A_log.shape == g.shape[-1:], f"A_log must be [Hv] = {list(g.shape[-1:])}, got {list(A_log.shape)}")
        wide = _wide(g, A_log, dt_bias)
        g = _log_decay(g.to(wide), A_log.to(wide), A_log.new_zeros(()) if dt_bias is None else dt_bias.to(wide))
    if beta_is_raw and beta is not None:
        beta = _write_strength(beta.to(_wide(beta)), allow_neg_eigval)
    return g, beta


def rms_norm_gated(x, z, weight, eps, *, activation="silu", norm_before_gate=True, group_size=None):
    _require(activation in ("silu", "swish", "sigmoid"), f"activation must be silu or sigmoid, got {activation!r}")
    group_size = x.shape[-1] if group_size is None else group_size
    _require(group_size >= 1 and x.shape[-1] % group_size == 0, f"group_size must divide {x.shape[-1]}")
    wide = _wide(x, z, weight)
    gate = torch.sigmoid(z.to(wide))
    gate = gate if activation == "sigmoid" else gate * z.to(wide)
    y = x.to(wide) if norm_before_gate else x.to(wide) * gate
    grouped = y.unflatten(-1, (-1, group_size))
    grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    y = grouped.flatten(-2) * weight.to(wide)
    return (y * gate if norm_before_gate else y).to(x.dtype)


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, *, zero_centered=True):
    _require(cos.shape == sin.shape and cos.dim() in (2, 3), "cos and sin must be [B, T, R], [1, T, R] or [T, R]")
    R = cos.shape[-1]
    _require(R % 2 == 0 and R <= q.shape[-1], f"R must be even and at most {q.shape[-1]}, got {R}")
    wide = _wide(q, k, q_weight, k_weight, cos, sin)
    cos, sin = (angles.to(wide).unsqueeze(-2) for angles in (cos, sin))
    results = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        factor = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
        y = x.to(wide) * factor * (weight.to(wide) + 1 if zero_centered else weight.to(wide))
        first, second = y[..., :R].chunk(2, -1)
        rotated = y[..., :R] * cos + torch.cat([-second, first], -1) * sin
        results.append(torch.cat([rotated, y[..., R:]], -1).to(x.dtype))
    return tuple(results)


def output_gate(x, gate):
    _require(x.shape == gate.shape, f"gate must be {list(x.shape)} like x, got {list(gate.shape)}")
    wide = _wide(x, gate)
    return (x.to(wide) * torch.sigmoid(gate.to(wide))).to(x.dtype)


# --- The rule itself. ---


class _Tokens(NamedTuple):
    """What the equations take, widened: q, k [B, T, Hv, K] normed and repeated, v, decay, beta, and k's norm factor."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    sk: torch.Tensor
    scale: float

    def part(self, row, first, end):
        return _Tokens(*(x[row : row + 1, first:end] for x in self[:-1]), self.scale)


def _prepare(q, k, v, g, beta, wide, scale, use_qk_l2norm, gate_is_linear):
    Hk, K = q.shape[2:]
    Hv = v.shape[2]
    _require(Hk > 0 and Hv % Hk == 0, f"v must have a multiple of q's heads, got {Hv} value heads over {Hk} key heads")
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    sk = k.new_ones(*k.shape[:3], 1)
    if use_qk_l2norm:
        sk = torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        q, k = _l2norm(q), _l2norm(k)
    q, k, sk = (x.repeat_interleave(Hv // Hk, 2) for x in (q, k, sk))
    scale = K**-0.5 if scale is None else scale
    decay = v.new_ones(v.shape[:3]) if g is None else g.to(wide) if gate_is_linear else g.to(wide).exp()
    beta = v.new_ones(v.shape[:3]) if beta is None else beta.to(wide)
    return _Tokens(q, k, v, decay, beta, sk, scale)


# o [B, T, Hv, V] and the list of final states [Hv, K, V]. rows: None marks padding, whose output is zero.
def _rule(q, k, v, g, beta, initial, spans, rows, scale, use_qk_l2norm, gate_is_linear):
    tokens = _prepare(q, k, v, g, beta, initial.dtype, scale, use_qk_l2norm, gate_is_linear)
    ragged = len(spans) != q.shape[0] or any(span != (n, 0, q.shape[1]) for n, span in enumerate(spans))
    if not ragged:  # all rows at once; a padding row runs on zeros that nobody reads
        live = torch.tensor([row is not None for row in rows], dtype=torch.bool, device=q.device)
        o, final = _recurrence(tokens, initial)
        return torch.where(live[:, None, None, None], o, torch.zeros_like(o)), list(final)
    pieces, finals = [], []
    for (row, first, end), slot, S in zip(spans, rows, initial):
        o, final = _recurrence(tokens.part(row, first, end), S[None])
        pieces.append(o[0] if slot is not None else torch.zeros_like(o[0]))
        finals.append(final[0])
    return _assemble(pieces, spans, tokens.v, token_dim=0, ragged=True), finals


def _recurrence(tokens, S):
    outputs = []
    for o, _, S in _recurrence_steps(tokens, S):
        outputs.append(o)
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(tokens.v), S


# S [n, Hv, K, V]: the equations, token after token. Yields o, the factor of the write beside the raw key, and S.
def _recurrence_steps(tokens, S):
    q, k, v, decay, beta, sk, scale = tokens
    for t in range(q.shape[1]):
        S = S * decay[:, t, :, None, None]
        predicted = (S * k[:, t, :, :, None]).sum(-2)
        delta = beta[:, t, :, None] * (v[:, t] - predicted)
        S = S + k[:, t, :, :, None] * delta[:, :, None, :]
        yield scale * (S * q[:, t, :, :, None]).sum(-2), delta * sk[:, t], S


# The same for one sequence, without the batch dim.
def _steps(tokens, row, first, end, S):
    for step in _recurrence_steps(tokens.part(row, first, end), S[None]):
        yield tuple(x[0] for x in step)


# One token's records [Hk, stride]: raw key, factors of the group, decays of the group.
def _record(records, key, factor, decay):
    Hk, K = key.shape
    size = K + factor.numel() // Hk + decay.numel() // Hk
    records[:, :size] = torch.cat([key.to(factor.dtype), factor.reshape(Hk, -1), decay.reshape(Hk, -1)], -1)


def _keep_checkpoints(tokens, initial, spans, rows, checkpoints, every, starts, length):
    starts = [n * (length // every) for n in range(len(spans))] if starts is None else starts.tolist()
    with torch.no_grad():
        for (row, first, end), slot, S, start in zip(spans, rows, initial, starts):
            for t, (_, _, S) in enumerate(_steps(tokens, row, first, end, S) if slot is not None else ()):
                target = start + t // every
                if (t + 1) % every == 0 and 0 <= target < checkpoints.shape[0]:
                    checkpoints[target].copy_(S)


def _l2norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


# x [C, L], weight [C, W], window [C, W - 1 or W], documents [L] or None: y [C, L].
def _convolve(x, weight, bias, activation, window, documents):
    width, length = weight.shape[1], x.shape[1]
    past = torch.cat([window, x], -1)[:, window.shape[1] - (width - 1) :]
    y = torch.zeros_like(x) if bias is None else bias.to(x.dtype)[:, None].expand_as(x)
    for j in range(width):
        tap = past[:, j : j + length]
        if documents is not None:
            document = F.pad(documents, (width - 1, 0), value=-1)[j : j + length]
            tap = torch.where(document == documents, tap, torch.zeros_like(tap))
        y = y + weight[:, j, None] * tap
    y = y if activation is None else y * torch.sigmoid(y)
    return y if documents is None else torch.where(documents >= 0, y, torch.zeros_like(y))


# --- Slots, sequences, results. ---


def _require(ok, message):
    if not ok:
        raise ValueError(message)


def _wide(*tensors):
    is_wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_wide else torch.float32


# (batch row, first token, end) of every sequence.
def _spans(cu_seqlens, batch, tokens):
    if cu_seqlens is None:
        return [(n, 0, tokens) for n in range(batch)]
    _require(batch == 1, f"cu_seqlens needs one row of tokens, [1, total, ...], got {batch} rows")
    _require(cu_seqlens.dtype in INDEX_DTYPES, f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    _require(cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 1, f"cu_seqlens must be [N + 1], got {cu_seqlens.shape}")
    offsets = cu_seqlens.tolist()
    ascending = all(first <= end for first, end in zip([0] + offsets, offsets + [tokens]))
    _require(ascending, f"cu_seqlens must ascend within [0, {tokens}], got {offsets}")
    return [(0, first, end) for first, end in zip(offsets[:-1], offsets[1:])]


# One entry a sequence: its slot, or None for padding.
def _slots(name, slots, sequences, pool, needs_all=False):
    if slots is None:
        _require(pool == sequences or not needs_all, f"{name}: without slots the pool must be {sequences}, got {pool}")
        return [n if n < pool else None for n in range(sequences)]
    _require(slots.dtype in INDEX_DTYPES, f"{name} must be int32 or int64, got {slots.dtype}")
    _require(list(slots.shape) == [sequences], f"{name} must be [N] = [{sequences}], got {list(slots.shape)}")
    return [slot if 0 <= slot < pool else None for slot in slots.tolist()]


# A copy of each row's slot, widened; zeros for padding and where has_initial_state is False.
def _gather(pool, rows, has_initial_state, dtype):
    flags = [True] * len(rows) if has_initial_state is None else has_initial_state.tolist()
    zero = torch.zeros(pool.shape[1:], dtype=dtype, device=pool.device)
    picked = [pool[row].to(dtype) if row is not None and flag else zero for row, flag in zip(rows, flags)]
    return torch.stack(picked) if picked else pool[:0].to(dtype)


# The sequences put back where they lie in `like` ([B, ...]); zero between and after them.
def _assemble(pieces, spans, like, token_dim, ragged):
    if not ragged:
        return torch.stack(pieces) if pieces else like.clone()
    parts, position = [], 0
    total = like.shape[1 + token_dim]

    def gap(length):
        sizes = list(like.shape[1:])
        sizes[token_dim] = length
        return torch.zeros(sizes, dtype=pieces[0].dtype if pieces else like.dtype, device=like.device)

    for (_, first, end), piece in zip(spans, pieces):
        parts += [gap(first - position), piece]
        position = end
    return torch.cat(parts + [gap(total - position)], token_dim).unsqueeze(0)


def _result(value, out):
    return value if out is None else out.copy_(value)
