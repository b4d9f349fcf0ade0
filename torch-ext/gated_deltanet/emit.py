# SPDX-License-Identifier: Apache-2.0
"""One step of the rule as the source text of a program that needs nothing else: to prove an implementation against, to
reproduce a case, to read.

The program carries rule.h, the header that the kernels themselves are compiled from; the package ships it beside this
file.
"""

import math
import struct
from pathlib import Path

import torch

from ._dispatch import check_choice, rule_scale

PROGRAM = """\
// SPDX-License-Identifier: Apache-2.0
// One step of the gated delta rule, emitted by gated-deltanet: inputs below, arithmetic the package's own.
// Prints o [N, Hv, V], then the state after the step, [N, Hv, K, V], a number a line, exactly.
//     {command}

// ---- csrc/common/rule.h of gated-deltanet ----

{rule}
// ---- the inputs ----

#include <cstdio>
{include}
namespace {{

constexpr int N = {N}, Hk = {Hk}, Hv = {Hv}, K = {K}, V = {V};   // rows, key heads, value heads, head dims
constexpr int kColumns = N * Hv * V;                             // of all states
constexpr float kScale = {scale};
constexpr bool kUseL2Norm = {use_qk_l2norm};

const float q[N * Hk * K] = {{{q}}};
const float k[N * Hk * K] = {{{k}}};
const float v[N * Hv * V] = {{{v}}};
const float g[N * Hv] = {{{g}}};   // log decay
const float beta[N * Hv] = {{{beta}}};
float state[N * Hv * K * V] = {{{state}}};
float o[N * Hv * V];

// ---- the step ----

struct Inputs {{
  const float *q, *k, *v, *g, *beta;
}};

// sum_K x*y in the rule's order.
GDN_INLINE float dot(const float* x, int stride, const float* y) {{
  float partial[gdn::kResidues] = {{}};
  for (int i = 0; i < K; ++i) {{
    partial[i % gdn::kResidues] = gdn::accumulate(x[i * stride], y[i], partial[i % gdn::kResidues]);
  }}
  for (int count = gdn::kResidues / 2; count > 0; count /= 2) {{
    for (int i = 0; i < count; ++i) partial[i] = gdn::add(partial[2 * i], partial[2 * i + 1]);
  }}
  return partial[0];
}}

// One column of one state: its output, and the column after the step.
GDN_INLINE void step(const Inputs& in, int column, float* o, float* state) {{
  const int head = column / V, n = head / Hv, key_head = n * Hk + head % Hv / (Hv / Hk);
  const float *head_q = in.q + key_head * K, *head_k = in.k + key_head * K;
  float* S = state + head * K * V + column % V;
  const float sq = kUseL2Norm ? gdn::l2norm_factor(dot(head_q, 1, head_q)) : 1.0f;
  const float sk = kUseL2Norm ? gdn::l2norm_factor(dot(head_k, 1, head_k)) : 1.0f;
  const gdn::StepScalars scalars =
      gdn::step_scalars(gdn::exp(in.g[head]), in.beta[head], kScale, sk, sq, dot(head_k, 1, head_q));
  const float u = dot(S, V, head_k), w = dot(S, V, head_q);
  const float f = gdn::write_factor(scalars.neg_alpha_sk, scalars.beta, scalars.sk, u, in.v[column]);
  o[column] = gdn::read_output(scalars.scale_sq, scalars.kq, scalars.alpha, f, w);
  for (int i = 0; i < K; ++i) S[i * V] = gdn::write_state(scalars.alpha, head_k[i], f, S[i * V]);
}}

{run}
}}  // namespace

int main() {{
  if (!run()) return 1;
  for (float x : o) std::printf("%a\\n", x);
  for (float x : state) std::printf("%a\\n", x);
  return 0;
}}
"""

RUN = {
    "cpp": """\
bool run() {
  for (int column = 0; column < kColumns; ++column) step({q, k, v, g, beta}, column, o, state);
  return true;
}
""",
    "cuda": """\
__global__ void step_columns(Inputs in, float* o, float* state) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column < kColumns) step(in, column, o, state);
}

template <int kCount>
float* to_device(const float (&x)[kCount]) {
  float* device = nullptr;
  cudaMalloc(&device, sizeof(x));
  cudaMemcpy(device, x, sizeof(x), cudaMemcpyHostToDevice);
  return device;
}

bool run() {
  const Inputs in{to_device(q), to_device(k), to_device(v), to_device(g), to_device(beta)};
  float *device_o = to_device(o), *device_state = to_device(state);
  step_columns<<<(kColumns + 127) / 128, 128>>>(in, device_o, device_state);
  cudaMemcpy(o, device_o, sizeof(o), cudaMemcpyDeviceToHost);
  cudaMemcpy(state, device_state, sizeof(state), cudaMemcpyDeviceToHost);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) std::fprintf(stderr, "%s\\n", cudaGetErrorString(error));
  return error == cudaSuccess;
}
""",
}
COMMANDS = {
    "cpp": "g++ -std=c++17 -O2 -ffp-contract=off step.cpp -o step && ./step",
    "cuda": "nvcc -std=c++17 -O2 --fmad=false step.cu -o step && ./step",
}


def emit_step_program(q, k, v, g, beta, state, *, scale=None, use_qk_l2norm=False, language="cuda"):
    """The source of a program that computes one step of the rule on these inputs and prints what comes out.

        S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = scale S^T q

    The program is one file without dependencies: every input stands in it as an exact hexadecimal float, beside the
    header that the package's own kernels are compiled from. Its first lines name the compiler's command. It prints o
    [N, Hv, V], then the state after the step, [N, Hv, K, V], one hexadecimal float a line.

    Args:
        q, k: [N, 1, Hk, K] float32, bfloat16 or float16, any strides and device.
        v: [N, 1, Hv, V] any of those dtypes, Hv a multiple of Hk.
        g: [N, 1, Hv] any of those dtypes, natural-log decay; None means no decay.
        beta: [N, 1, Hv] any of those dtypes, after the sigmoid; None means ones.
        state: [N, Hv, K, V] any of those dtypes, any strides; the state before the step, only read.
        scale: float on the output; None means K ** -0.5.
        use_qk_l2norm: l2-normalise q and k.
        language: "cuda" (compiled by nvcc, computes on the GPU) or "cpp" (any C++17 compiler).

    Returns:
        str. About 20 characters for each number: one or a few heads make a program that compiles in seconds.

    Raises:
        ValueError: language is none of the two, or a shape or dtype is not the one above.
        TypeError: an argument is no tensor, or scale no number.

    Both programs print the bits of gated_delta_rule with mode="recurrent" on the device of their kind, where the op is
    given a float32 `out` and a float32 state; a 16-bit one is what is printed, rounded once. Reads the tensors back, so
    the host waits for their device.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464); the emitted program is LOGOS' idea.
    """
    op = "emit_step_program"
    check_choice(op, "language", language, ("cuda", "cpp"))
    sizes = _sizes(op, q, v)
    N, Hk, Hv, K, V = (sizes[name] for name in ("N", "Hk", "Hv", "K", "V"))
    g = torch.zeros(N, 1, Hv) if g is None else g
    beta = torch.ones(N, 1, Hv) if beta is None else beta
    shapes = {
        "q": (q, (N, 1, Hk, K)),
        "k": (k, (N, 1, Hk, K)),
        "v": (v, (N, 1, Hv, V)),
        "g": (g, (N, 1, Hv)),
        "beta": (beta, (N, 1, Hv)),
        "state": (state, (N, Hv, K, V)),
    }
    numbers = {name: _numbers(op, name, tensor, shape) for name, (tensor, shape) in shapes.items()}
    return PROGRAM.format(
        command=COMMANDS[language],
        rule=Path(__file__).with_name("rule.h").read_text().replace("#pragma once\n", ""),  # it is no header there
        include="\n#include <cuda_runtime.h>\n" if language == "cuda" else "",
        scale=_literal(struct.unpack("f", struct.pack("f", rule_scale(op, scale, q)))[0]),
        use_qk_l2norm="true" if use_qk_l2norm else "false",
        run=RUN[language],
        **sizes,
        **numbers,
    )


def _require_tensor(op, name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")


def _sizes(op, q, v):
    for name, tensor in (("q", q), ("v", v)):
        _require_tensor(op, name, tensor)
        if tensor.dim() != 4 or tensor.shape[1] != 1 or tensor.numel() == 0:
            raise ValueError(f"{op}: {name} must be [N, 1, heads, dim], one token, got {list(tensor.shape)}")
    N, _, Hk, K = q.shape
    Hv, V = v.shape[2:]
    if Hv % Hk != 0:
        raise ValueError(f"{op}: v must have a multiple of q's {Hk} heads, got {Hv}")
    return {"N": N, "Hk": Hk, "Hv": Hv, "K": K, "V": V}


def _numbers(op, name, tensor, shape):
    """The elements as C++ literals, row by row."""
    _require_tensor(op, name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{op}: {name} must be {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{op}: {name} must be float32, bfloat16 or float16, got {str(tensor.dtype)[6:]}")
    values = tensor.detach().float().cpu().contiguous().flatten().tolist()
    lines = (values[i : i + 8] for i in range(0, len(values), 8))
    return ",".join("\n    " + ", ".join(map(_literal, line)) for line in lines)


def _literal(x):
    if math.isfinite(x):
        return x.hex() + "f"
    return '__builtin_nanf("")' if math.isnan(x) else f"{'-' if x < 0 else ''}__builtin_inff()"
