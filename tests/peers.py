# SPDX-License-Identifier: Apache-2.0
"""transformers' own torch functions for the rule, without the slots in which a faster one may sit."""

import inspect

from transformers.models.qwen3_5 import modeling_qwen3_5

from . import oracle


def plain_torch(slot):
    """The undecorated function behind a kernel slot of transformers: a module whose forward closes over it."""
    if not inspect.isfunction(slot):
        (slot,) = inspect.getclosurevars(type(slot).forward).nonlocals.values()
    return oracle.one_thread()(inspect.unwrap(slot))


torch_recurrent_gated_delta_rule = plain_torch(modeling_qwen3_5.torch_recurrent_gated_delta_rule)
torch_chunk_gated_delta_rule = plain_torch(modeling_qwen3_5.torch_chunk_gated_delta_rule)
