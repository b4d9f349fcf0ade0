# SPDX-License-Identifier: Apache-2.0
"""The hub's benchmark (`kernels benchmark .`): the kernel against plain torch on the same inputs."""

import torch
from kernels.benchmark import Benchmark

KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 48, 128


class GatedDeltaRule(Benchmark):
    seed = 0

    def _setup(self, batch, length):
        def normal(heads):
            return torch.randn(batch, length, heads, HEAD_DIM, device=self.device)

        self.q, self.k, self.v = normal(KEY_HEADS), normal(KEY_HEADS), normal(VALUE_HEADS)
        gates = torch.randn(2, batch, length, VALUE_HEADS, device=self.device)
        self.g, self.beta = torch.nn.functional.logsigmoid(gates[0]), torch.sigmoid(gates[1])
        self.out = torch.empty_like(self.v)

    def _run(self):
        self.out, _ = self.kernel.fused_recurrent_gated_delta_rule(
            self.q, self.k, self.v, g=self.g, beta=self.beta, use_qk_l2norm_in_kernel=True)

    def _reference(self):
        out, _ = self.kernel.reference.fused_recurrent_gated_delta_rule(
            self.q, self.k, self.v, g=self.g, beta=self.beta, use_qk_l2norm_in_kernel=True)
        return out

    def setup_decode(self):
        self._setup(8, 1)

    def benchmark_decode(self):
        self._run()

    def verify_decode(self):
        return self._reference()

    def setup_prefill(self):
        self._setup(1, 64)

    def benchmark_prefill(self):
        self._run()

    def verify_prefill(self):
        return self._reference()
