"""What holds for every test: threads, noise, examples of hypothesis, and tests that need a card."""

import os

# Before torch is imported anywhere. One thread, because ranks are forked from this process and a pool of OpenMP threads
# does not survive a fork; and because tests share the machine's cores with their ranks.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Lets torch.cuda.is_available() ask the driver's library instead of starting CUDA, which forked ranks could not use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# No test needs the network, and none may wait for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
import logging
import signal

import hypothesis
import pytest

from tests.harness.going_on import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]

# A test may have trained in this process, on one rank. Its process groups may be rubbish by now that waits for the next
# collection; in a forked rank that would wait for their threads, which a fork does not take along, and never end.
os.register_at_fork(after_in_child=gc.freeze)

# In the background of a shell, Ctrl-C is ignored, and what is started inherits that; tests send it to what they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The cores are shared, so time says nothing about an example; and a run in CI can be repeated.
hypothesis.settings.register_profile("triax", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("triax")

# Both say once per collective what their author already decided.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
logging.getLogger("torch.distributed.fsdp").setLevel(logging.ERROR)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA card where there is none; torch is asked only if such a test was collected."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA card, and torch sees none"))
