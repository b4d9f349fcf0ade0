# SPDX-License-Identifier: Apache-2.0
"""Loads the package the way everyone does and says which devices the tests run on.

pytest --device all    every device the loaded variant serves here (the default)
pytest --device cuda   CUDA only; without a GPU or a CUDA variant that is an error, never a skip
"""

import functools
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/gated-deltanet"
os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

MARKERS = {
    "kernels_ci": "the subset that the hub's continuous integration runs, under a minute",
    "cuda_only": "about a CUDA feature; deselected where there is no GPU",
    "large(gib)": "needs that much GPU memory; CUDA only",
    "two_gpus": "needs a second GPU; CUDA only",
}

try:
    from hypothesis import settings

    settings.register_profile("default", derandomize=True, deadline=None, max_examples=40, database=None)
    settings.load_profile("default")
except ImportError:  # only the tests that need it fail
    pass


@functools.cache
def load():
    """The kernel module, or the exception that kept it from loading: tests that need no kernel still run."""
    from kernels import get_kernel

    try:
        return get_kernel(REPO_ID, version=1)
    except Exception as error:
        return error


def variant(module):
    """The folder the module was loaded from, such as torch-stable-abi210-cpu-x86_64-linux."""
    return Path(module.__file__).resolve().parent.name


@functools.cache
def available_devices():
    module = load()
    if isinstance(module, Exception) or not torch.cuda.is_available() or "-cu" not in variant(module):
        return ("cpu",)
    return ("cpu", "cuda")


def chosen_devices(config):
    wanted = config.getoption("--device")
    if wanted == "all":
        return available_devices()
    if wanted not in available_devices():
        raise pytest.UsageError(f"--device {wanted}: there is no GPU here, or no CUDA variant in build/")
    return (wanted,)


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda", "all"), default="all", help="where the ops run")


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_report_header(config):
    module = load()
    loaded = "none" if isinstance(module, Exception) else variant(module)
    return f"gated-deltanet: variant {loaded}, devices {', '.join(chosen_devices(config))}, torch {torch.__version__}"


def on_gpu_only(item_or_node):
    return any(item_or_node.get_closest_marker(name) for name in ("cuda_only", "large", "two_gpus"))


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        devices = ("cuda",) if on_gpu_only(metafunc.definition) else chosen_devices(metafunc.config)
        metafunc.parametrize("device", devices)


def pytest_collection_modifyitems(config, items):
    devices = chosen_devices(config)
    kept, left_out = [], []
    for item in items:
        (kept if can_run(item, devices) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def can_run(item, devices):
    if on_gpu_only(item) and "cuda" not in devices:
        return False
    if item.get_closest_marker("two_gpus") and torch.cuda.device_count() < 2:
        return False
    large = item.get_closest_marker("large")
    return large is None or torch.cuda.get_device_properties(0).total_memory >= large.kwargs["gib"] * 2**30


@pytest.fixture(scope="session")
def kernel():
    """The module that get_kernel returns."""
    module = load()
    if isinstance(module, Exception):
        pytest.fail(f"run `make build` first: {module}", pytrace=False)
    return module


@pytest.fixture(autouse=True)
def release_gpu_memory(request):
    """A large test hands its memory back, so that the next one finds it."""
    yield
    if request.node.get_closest_marker("large"):
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def one_thread():
    """Threads only get in each other's way in models this small: up to ten times slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pair(kernel, device):
    """(model, the same model for our layers) of a family, head dim, width and dtype; takes the layers out again."""
    from . import models

    made = []

    def make(family="dense", head_dim=16, width=4, dtype=torch.float32):
        # Made twice: a deep copy would have its own copies of transformers' function slots, which nobody calls.
        eager, with_kernel = (models.tiny_model(family, head_dim, width, device, dtype) for _ in range(2))
        made.append(with_kernel)
        return eager, with_kernel

    yield make
    for model in made:
        models.put_in(model, ())
