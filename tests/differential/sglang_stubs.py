"""Lets SGLang's scheduler be imported without a GPU: device libraries are stubs. To be imported first."""

from __future__ import annotations

import os
import sys
import types
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar
from unittest.mock import MagicMock

import tvm_ffi
from transformers import AutoProcessor

LOOKED_UP_BEFORE = (tvm_ffi, AutoProcessor)  # they look for device libraries themselves
STUBBED = (
    "torchvision",
    "IPython",
    "cuda",
    "pynvml",
    "sgl_kernel",
    "flashinfer",
    "av",
    "decord",
    "soundfile",
)


class Stub(types.ModuleType):
    """A module that is imported and never used."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class Stubs(MetaPathFinder, Loader):
    """Finds a stub for each module of device libraries."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in STUBBED else None

    def create_module(self, spec: ModuleSpec) -> Stub:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """A stub makes its attributes when asked for them."""


warnings.filterwarnings("ignore")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.meta_path.insert(0, Stubs())
