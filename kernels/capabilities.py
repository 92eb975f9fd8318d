"""Capabilities of a device, known without importing Triton."""

import importlib
from functools import cache

import torch


@cache
def runs_hopper_kernels(device: torch.device) -> bool:
    """Whether products written in Gluon for Hopper run on a device with the Triton that is installed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        importlib.import_module("pagecast.kernels.linear_hopper")
    except (ImportError, AttributeError):
        return False
    return True


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
