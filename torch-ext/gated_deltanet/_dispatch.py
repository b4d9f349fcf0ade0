# SPDX-License-Identifier: Apache-2.0
"""What every op decides before it reaches the extension: is there a kernel for this device, and are gradients wanted.

Policy, in one place:
- CPU tensors have a kernel in both variants, CUDA tensors in the CUDA variant. Tensors of any other device are served
  by `reference`, with one warning per process and op.
- Plain ops have no backward: with grad mode on, an input that requires grad raises. The hub layers ask `needs_grad`
  first and use the differentiable reference instead, with one warning per process and layer.
"""

import warnings

import torch
from torch.autograd import forward_ad

from ._ops import add_op_namespace_prefix

# The name of the op namespace carries the backend of the variant: _gated_deltanet_cuda_<id>.
HAS_CUDA = "_cuda" in add_op_namespace_prefix("")
# "meta" tensors reach the fakes.
KERNEL_DEVICES = ("cpu", "cuda", "meta") if HAS_CUDA else ("cpu", "meta")

_warned = set()


@torch.compiler.assume_constant_result
def warn_once(topic, message):
    """Warns about `topic` once per process. While torch.compile traces, that is at trace time."""
    if topic not in _warned:
        _warned.add(topic)
        warnings.warn(message, stacklevel=4)


def register_fakes(*ops):
    """What the extension's ops do under fake tensors: nothing. Each only writes into tensors that it is given."""
    for op in ops:
        torch.library.register_fake(add_op_namespace_prefix(op), _do_nothing, allow_override=True)


def _do_nothing(*args, **kwargs):
    return None


def has_kernel(op, tensor):
    """Whether `op` runs in the extension for this tensor's device; warns once where it does not."""
    device = tensor.device.type
    if device in KERNEL_DEVICES:
        return True
    warn_once(
        f"{op} on {device}",
        f"gated-deltanet: {op} has no kernel for {device} tensors in this build, using the plain torch reference. "
        "It is correct, but slow.",
    )
    return False


def needs_grad(*tensors):
    """Whether autograd would have to go through any of the tensors (None is allowed)."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def check_inputs(op, required, optional):
    """Raises unless every argument is a tensor (those in `optional` may be None) that needs no gradient.

    Both are dicts by argument name; the first required one names the device. This runs in every call, and decode makes
    thousands of them a second.
    """
    grad_mode = torch.is_grad_enabled()
    meta = None
    for arguments in (required, optional):
        for name, tensor in arguments.items():
            if tensor is None and arguments is optional:
                continue
            if not isinstance(tensor, torch.Tensor) or (grad_mode and tensor.requires_grad):
                _refuse(op, name, tensor)
            meta = tensor.is_meta if meta is None else meta
            if tensor.is_meta != meta:  # one would send the call to the fake, which computes nothing
                raise RuntimeError(f"{op}: {name} is on {tensor.device}, the other arguments are not")
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        for name, tensor in {**required, **optional}.items():
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(f"{op}: {name} has a forward-mode tangent, but this op has no derivative")


def _refuse(op, name, value):
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    raise RuntimeError(
        f"{op}: {name} requires grad, but this op has no backward. Call it under torch.no_grad(), detach "
        f"{name}, or use the differentiable gated_deltanet.reference.{op}"
    )


def count_writes(*tensors):
    """Tells autograd that the tensors (None is allowed) were written: a graph that saved one then refuses to use it."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for tensor in tensors:
            if tensor is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


def number(op, name, value):
    """`value` as a float; raises unless it is a plain number (a tensor would make the host wait for its device)."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{op}: {name} must fit a float, got an int of {value.bit_length()} bits") from None


def rule_scale(op, scale, q):
    """The factor on the rule's output: K ** -0.5 unless it is given."""
    if scale is None:
        return q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0  # the op refuses such a q itself
    return number(op, "scale", scale)


def default_device():
    """Where a new state or ring lies: the current CUDA device where this build and this machine have one."""
    return "cuda" if HAS_CUDA and torch.cuda.is_available() else "cpu"


def check_choice(op, name, value, choices):
    """Raises unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {list(choices)}, got {value!r}")


def use_silu(op, activation):
    """The flag that the convolution takes for `activation`: None | "silu" | "swish"."""
    check_choice(op, "activation", activation, (None, "silu", "swish"))
    return activation is not None
