# SPDX-License-Identifier: Apache-2.0
"""Inputs, comparisons, guarded buffers, and the list of ops that work on slots of a pool."""

import functools
import os
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from . import oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = ("recurrent", "chunk")
RAISES = (RuntimeError, ValueError, TypeError, NotImplementedError)
SENTINEL = -7.75  # exact in every float dtype


def short(value):
    """Test ids: torch.bfloat16 reads bfloat16."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


class Shape(NamedTuple):
    Hk: int
    Hv: int
    K: int
    V: int

    def __str__(self):
        return "x".join(map(str, self))


SMALL = Shape(2, 4, 32, 32)
QWEN = Shape(16, 48, 128, 128)
TENSOR_CORES = Shape(1, 2, 128, 128)  # every chunk kernel takes it, with 16-bit inputs


class Inputs(NamedTuple):
    """q, k [B, T, Hk, K], v [B, T, Hv, V], g (log decay) and beta [B, T, Hv]: the first arguments of the rule."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: Optional[torch.Tensor]
    beta: Optional[torch.Tensor]

    def map(self, f):
        return Inputs(*(None if x is None else f(x) for x in self))

    def to(self, device):
        return self.map(lambda x: x.to(device))

    def rows(self, index):
        return self.map(lambda x: x[index])

    def tokens(self, *bounds):
        return self.map(lambda x: x[:, slice(*bounds)])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=generator(seed)).to(device, dtype)


def rule_inputs(B, T, shape=SMALL, *, dtype=torch.float32, seed=0, device="cpu"):
    """q, k, v normal in `dtype`; g = logsigmoid(normal), beta = sigmoid(normal) in float32."""
    Hk, Hv, K, V = shape
    random = generator(seed)

    def draw(*sizes):
        return torch.randn(*sizes, generator=random)

    q, k, v = (draw(B, T, *last).to(device, dtype) for last in ((Hk, K), (Hk, K), (Hv, V)))
    g, beta = F.logsigmoid(draw(B, T, Hv)).to(device), torch.sigmoid(draw(B, T, Hv)).to(device)
    return Inputs(q, k, v, g, beta)


def rule_state(N, shape=SMALL, *, dtype=torch.float32, seed=1, device="cpu", layout="K-first", slot_padding=0):
    """A pool [N, Hv, K, V] of normal numbers. V-first is stored [V, K]; slot_padding elements lie between slots."""
    _, Hv, K, V = shape
    inner = (K, V) if layout == "K-first" else (V, K)
    storage = torch.full((N, Hv * K * V + slot_padding), SENTINEL, device=device, dtype=dtype)
    pool = storage[:, : Hv * K * V].unflatten(1, (Hv, *inner))
    pool = pool if layout == "K-first" else pool.transpose(-1, -2)
    pool.copy_(torch.randn(N, Hv, K, V, generator=generator(seed)))
    return pool


def has_chunk_kernel(kernel, device):
    """Whether mode="chunk" runs on tensor cores here, or on the emulated ones of `make test-emulated`."""
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    return ".build/emulated/" in kernel.__file__


def cuts_rows(kernel, device):
    """Whether scan="auto" can cut rows here: Hopper's chunk kernel does."""
    if device == "cuda":
        return torch.cuda.get_device_capability() == (9, 0)
    return has_chunk_kernel(kernel, device) and os.environ.get("EMULATED_HOPPER") != "0"


def relative_rms(actual, expected):
    """|actual - expected| / |expected| in float64. Against zeros: 0 if all are zero, else inf. NaN counts as inf."""
    actual, expected = oracle.wide(actual), oracle.wide(expected)
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error, size = float((actual - expected).norm()), float(expected.norm())
    if error != error:
        return float("inf")
    return error / size if size else (0.0 if error == 0 else float("inf"))


def assert_close(actual, expected, bound, what="result"):
    error = relative_rms(actual, expected)
    assert error <= bound, f"{what}: relative RMS error {error:.3e} is above {bound:.1e}"


def assert_same(actual, expected, what="result"):
    """Bitwise: torch.equal, with NaN at the same places."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
        f"{what}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    )
    expected = expected.to(actual.device)
    differs = (actual != expected) & ~(actual.isnan() & expected.isnan())
    count = int(differs.sum())
    assert count == 0, f"{what}: {count} of {differs.numel()} elements differ, first at {differs.nonzero()[0].tolist()}"


def assert_zero(actual, what="result"):
    assert bool((actual == 0).all()), f"{what}: {int((actual != 0).sum())} of {actual.numel()} elements are not zero"


def assert_rule(out, state, expected, dtype, mode="recurrent"):
    """Output and state (float64 pair `expected`) within the table's row for inputs of `dtype`."""
    bounds = oracle.rule_bounds(dtype, mode, state.dtype, out.dtype)
    assert_close(out, expected[0], bounds[0], "output")
    assert_close(state, expected[1], bounds[1], "state")


def right_or_raises(call, check, *written):
    """Runs call() and check(result); if call raises instead, its message is words and `written` is as it was."""
    before = [tensor.clone() for tensor in written]
    try:
        result = call()
    except RAISES as error:
        assert len(str(error)) > 20, f"no explanation in {error!r}"
        for tensor, copy in zip(written, before):
            assert_same(tensor, copy, "after the exception")
        return False
    check(result)
    return True


class Guarded:
    """A tensor between two guards of `margin` elements (multiples of 64 keep it aligned); check() reads them."""

    def __init__(self, *shape, dtype=torch.float32, device="cpu", fill=None, margin=64):
        size = 1
        for n in shape:
            size *= n
        self.buffer = torch.full((size + 2 * margin,), SENTINEL, dtype=dtype, device=device)
        self.tensor = self.buffer[margin : margin + size].view(shape)
        self.guards = (self.buffer[:margin], self.buffer[margin + size :])
        if fill is not None:
            self.tensor.copy_(fill)

    def check(self):
        assert all(bool((guard == SENTINEL).all()) for guard in self.guards), "a guard was overwritten"


def poison_allocator(device, *sizes):
    """Leaves freed blocks full of NaN where the next allocations of these sizes (in bytes) will land."""
    blocks = [torch.full((max(size // 4, 1),), float("nan"), device=device) for size in sizes for _ in range(4)]
    del blocks


# --- every slot op: one row of tokens per slot. A new op is one more class here and one more line in SLOT_OPS. ---


class RuleOp:
    """gated_delta_rule: rows are [1, tokens, ...], a slot is a state."""

    has_flags = True  # takes has_initial_state
    shape = SMALL

    def __init__(self, mode):
        self.mode = mode
        self.name = f"gated_delta_rule-{mode}"

    def inputs(self, rows, tokens=1, dtype=torch.float32, seed=0):
        return tuple(rule_inputs(rows, tokens, self.shape, dtype=dtype, seed=seed))

    def pool(self, slots, dtype=torch.float32, seed=1):
        return rule_state(slots, self.shape, dtype=dtype, seed=seed)

    def call(self, kernel, inputs, pool, slots=None, **options):
        return kernel.gated_delta_rule(*inputs, pool, slots=slots, use_qk_l2norm=True, mode=self.mode, **options)

    def expect(self, inputs, pool, slots=None, **options):
        return oracle.gated_delta_rule_pooled(*inputs, pool, slots=slots, use_qk_l2norm=True, **options)

    def bounds(self, dtype, pool_dtype):
        return oracle.rule_bounds(dtype, self.mode, pool_dtype)


class VerifyOp(RuleOp):
    """gated_delta_verify, then fold_ring of all tokens: together they do what gated_delta_rule does."""

    has_flags = False

    def __init__(self):
        super().__init__("recurrent")
        self.name = "gated_delta_verify"

    def call(self, kernel, inputs, pool, slots=None, **options):
        (rows, tokens, Hk, K), (Hv, V) = inputs[0].shape, inputs[2].shape[2:]
        device = pool.device
        ring = kernel.new_ring(rows, Hk, 8, K, V, Hv // Hk, device=device)
        ring_slots = torch.arange(rows, device=device)
        options = {"use_qk_l2norm": True, "slots": slots, "ring_slots": ring_slots, **options}
        out = kernel.gated_delta_verify(*inputs, pool, ring, **options)
        slots = ring_slots if slots is None else slots
        counts = torch.full((rows,), tokens, device=device)
        kernel.fold_ring(pool, ring, slots=slots, ring_slots=ring_slots, num_accepted=counts)
        return out


class TensorCoreOp(RuleOp):
    """The rule in a shape and a dtype that the chunk kernel takes: float16 stands in for float32."""

    shape = TENSOR_CORES

    def __init__(self):
        super().__init__("chunk")
        self.name = "gated_delta_rule-tensor_cores"

    def inputs(self, rows, tokens=1, dtype=torch.float32, seed=0):
        return super().inputs(rows, tokens, torch.float16 if dtype == torch.float32 else dtype, seed)

    def bounds(self, dtype, pool_dtype):
        return super().bounds(torch.float16 if dtype == torch.float32 else dtype, pool_dtype)


@functools.cache  # so that a captured or watched call copies nothing from the host
def step_weights(shape, device, width=4, bias=False, dtype=torch.float32):
    """The weights of gated_delta_step, by argument name."""
    Hk, Hv, K, V = shape
    C = 2 * Hk * K + Hv * V
    sizes = {"conv_weight": (C, width), "conv_bias": (C,), "A_log": (Hv,), "dt_bias": (Hv,), "norm_weight": (V,)}
    named = enumerate(sizes.items())
    weights = {name: normal(*size, seed=40 + n, dtype=dtype, device=device) for n, (name, size) in named}
    return weights if bias else {**weights, "conv_bias": None}


def step_expectation(mixed, z, a, b, window, state, *, conv_weight, conv_bias, A_log, dt_bias, norm_weight, eps,
                     num_key_heads, slots=None, allow_neg_eigval=False, **norm):  # fmt: skip
    """(output, window, state) of gated_delta_step in float64; the convolution's output is rounded to mixed's dtype."""
    (Hv, K, V), Hk, dtype = state.shape[1:], num_key_heads, mixed.dtype
    out, window_after = torch.zeros(*mixed.shape[:2], Hv, V, dtype=torch.float64), oracle.wide(window)
    rows = range(len(mixed)) if slots is None else slots.tolist()
    y = torch.zeros(mixed.shape, dtype=dtype)
    for n, slot in enumerate(rows):
        if 0 <= slot < len(window):
            x = mixed[n : n + 1].transpose(1, 2)
            row, after = oracle.causal_conv1d(x, conv_weight, conv_bias, "silu", window[slot : slot + 1])
            window_after[slot], y[n] = after[0].to(window.dtype).double(), row[0].t().to(dtype)
    q, k, v = y.split([Hk * K, Hk * K, Hv * V], -1)
    q, k, v = q.unflatten(-1, (Hk, K)), k.unflatten(-1, (Hk, K)), v.unflatten(-1, (Hv, V))
    g, beta = oracle.gated_delta_gates(a, b, A_log, dt_bias, allow_neg_eigval=allow_neg_eigval)
    o, state = oracle.gated_delta_rule_pooled(q, k, v, g, beta, state.cpu(), slots=slots, use_qk_l2norm=True)
    out = oracle.rms_norm_gated(o, z, norm_weight, eps, **norm)
    for n, slot in enumerate(rows):
        if not 0 <= slot < len(window):
            out[n] = 0.0
    return out, window_after, state


class StepOp(RuleOp):
    """gated_delta_step on a pool of states; every call starts from the same windows."""

    has_flags = False

    def __init__(self):
        super().__init__("recurrent")
        self.name = "gated_delta_step"

    def inputs(self, rows, tokens=1, dtype=torch.float32, seed=0):
        Hk, Hv, K, V = self.shape
        sizes = ((2 * Hk * K + Hv * V,), (Hv, V), (Hv,), (Hv,))
        return tuple(normal(rows, tokens, *size, seed=seed + 60 + n, dtype=dtype) for n, size in enumerate(sizes))

    @functools.cache
    def windows(self, slots, device):
        Hk, Hv, K, V = self.shape
        return normal(slots, 2 * Hk * K + Hv * V, 3, seed=70, device=device)

    def options(self, device):
        return {**step_weights(self.shape, device), "num_key_heads": self.shape.Hk, "eps": 1e-6}

    def call(self, kernel, inputs, pool, slots=None, **options):
        window = self.windows(len(pool), pool.device).clone()
        return kernel.gated_delta_step(*inputs, window, pool, slots=slots, **self.options(pool.device), **options)

    def expect(self, inputs, pool, slots=None):
        windows = self.windows(len(pool), "cpu")
        out, _, state = step_expectation(*inputs, windows, pool, slots=slots, **self.options("cpu"))
        return out, state

    def bounds(self, dtype, pool_dtype):
        out, state = super().bounds(dtype, pool_dtype)
        # Where the float64 convolution rounds to another 16-bit neighbour than the float32 one, q, k or v differ by it.
        return (3 * out, state) if dtype == torch.float32 else (3 * out, max(state, 1e-3))


class ConvOp:
    """causal_conv1d and causal_conv1d_update: rows are [1, C, tokens], a slot is a window of W - 1 inputs."""

    C, W = 24, 4

    def __init__(self, name):
        self.name = name
        self.has_flags = name == "causal_conv1d"

    @functools.cache  # so that a captured or watched call copies nothing from the host
    def weights(self, device):
        return normal(self.C, self.W, seed=5, device=device), normal(self.C, seed=6, device=device)

    def inputs(self, rows, tokens=1, dtype=torch.float32, seed=0):
        return (normal(rows, self.C, tokens, seed=seed, dtype=dtype),)

    def pool(self, slots, dtype=torch.float32, seed=1):
        return normal(slots, self.C, self.W - 1, seed=seed, dtype=dtype)

    def call(self, kernel, inputs, pool, slots=None, **options):
        weight, bias = self.weights(pool.device)
        if self.name == "causal_conv1d":
            return kernel.causal_conv1d(*inputs, weight, bias, "silu", conv_state=pool, slots=slots, **options)
        return kernel.causal_conv1d_update(*inputs, pool, weight, bias, "silu", slots=slots, **options)

    def expect(self, inputs, pool, slots=None, has_initial_state=None):
        weight, bias = self.weights("cpu")
        (x,) = inputs
        out, after = torch.zeros(x.shape, dtype=torch.float64), oracle.wide(pool)
        for n, slot in enumerate(range(len(x)) if slots is None else slots.reshape(-1).tolist()):
            if 0 <= slot < len(pool):
                window = pool[slot : slot + 1]
                if has_initial_state is not None and not has_initial_state[n]:
                    window = torch.zeros_like(window)
                out[n : n + 1], last = oracle.causal_conv1d(x[n : n + 1], weight, bias, "silu", window)
                after[slot] = last[0].to(pool.dtype).double()
        return out, after

    def bounds(self, dtype, pool_dtype):
        return oracle.ELEMENTWISE_BOUNDS[dtype], 1e-6


SLOT_OPS = (
    RuleOp("recurrent"),
    RuleOp("chunk"),
    TensorCoreOp(),
    VerifyOp(),
    StepOp(),
    ConvOp("causal_conv1d"),
    ConvOp("causal_conv1d_update"),
)


def name_of(op):
    return op.name if hasattr(op, "name") else None


def move(tensors, device):
    return tuple(tensor.to(device) for tensor in tensors)
