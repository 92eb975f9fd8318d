"""Matrix products of cuBLASLt with an algorithm of the caller's choice.

PyTorch takes the first algorithm of cuBLASLt's heuristics. Which one is the fastest depends on the GPU too:
where the power limit lowers its clock, on what each algorithm's energy is.
Source: the cuBLASLt API, https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from pagecast.sim.core.errors import CannotRunHere
from torch import Tensor

DTYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_COMPUTE_FP32 = 68  # CUBLAS_COMPUTE_32F
_SCALE_FP32 = 0  # CUDA_R_32F
_TRANSPOSE_A = 3  # CUBLASLT_MATMUL_DESC_TRANSA
_REDUCTION_SCHEME = 3  # CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME
_REDUCTIONS_IN_FP32 = (0, 2)  # CUBLASLT_REDUCTION_SCHEME_NONE and _COMPUTE_TYPE
_CUSTOM_OPTION = 5  # CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION
_WORKSPACE_LIMIT = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
_WORKSPACE_BYTES = 32 << 20
_CUSTOM_OPTIONS = 12
_MOST_ANSWERS = 32
_ALIGNMENT_BYTES = 256  # what the heuristics assume
_NOT_SUPPORTED = 15  # CUBLAS_STATUS_NOT_SUPPORTED
# Also CUBLAS_STATUS_INVALID_VALUE and _ARCH_MISMATCH.
_NOT_THIS_PRODUCT = (7, 8, _NOT_SUPPORTED)


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm for products of certain sizes."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )

    @property
    def key(self) -> tuple[int, ...]:
        """What tells it from other algorithms."""
        return tuple(self.algorithm)


class CublasLt:
    """Products x [tokens, inputs] times the transposed weight [outputs, inputs], on one device.

    Errors: CannotRunHere where the library can't be loaded or fails.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p()
        _check(self._library.cublasLtCreate(ctypes.byref(self._handle)))
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._product = self._description()
        self._limit = self._preference()
        self._layouts: dict[tuple[Any, ...], ctypes.c_void_p] = {}

    def algorithms(self, x: Tensor, weight: Tensor) -> list[Algorithm]:
        """Algorithms that sum in fp32 for this product: those of the heuristics, and variants of these."""
        answers = (Algorithm * _MOST_ANSWERS)()
        count = ctypes.c_int()
        sides = self._sides(len(x), weight)
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            *(self._handle, self._product, *sides, self._limit),
            *(ctypes.c_int(_MOST_ANSWERS), answers, ctypes.byref(count)),
        )
        if status == _NOT_SUPPORTED:
            return []
        _check(status)
        usable = (answer for answer in answers[: count.value] if answer.state == 0)
        listed = [one for one in usable if self._reduction(one) in _REDUCTIONS_IN_FP32]
        variants = (variant for one in listed for variant in self._variants(one, sides))
        return list({one.key: one for one in (*listed, *variants)}.values())

    def multiply(self, algorithm: Algorithm, x: Tensor, weight: Tensor, out: Tensor, *, add: bool) -> bool:
        """Writes the product to the dense `out` [tokens, outputs], or adds it with `add`.

        Queued on the current stream; all calls must be on one stream, as they share a workspace. Safe inside
        CUDA graphs. False: the algorithm does not compute products of this size, and nothing was queued.
        Errors: CannotRunHere where the library fails.
        """
        one, before = ctypes.c_float(1.0), ctypes.c_float(1.0 if add else 0.0)
        left, right, result, _ = self._sides(len(x), weight)
        status = self._library.cublasLtMatmul(
            *(self._handle, self._product, ctypes.byref(one)),
            *(_address(weight), left, _address(x), right, ctypes.byref(before)),
            *(_address(out), result, _address(out), result, ctypes.byref(algorithm.algorithm)),
            *(_address(self._workspace), ctypes.c_size_t(_WORKSPACE_BYTES)),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        if status in _NOT_THIS_PRODUCT:
            return False
        _check(status)
        return True

    def _reduction(self, algorithm: Algorithm) -> int:
        """How an algorithm adds up the parts of a split product."""
        value, written = ctypes.c_uint32(), ctypes.c_size_t()
        _check(
            self._library.cublasLtMatmulAlgoConfigGetAttribute(
                *(ctypes.byref(algorithm.algorithm), _REDUCTION_SCHEME),
                *(ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written)),
            )
        )
        return value.value

    def _variants(self, algorithm: Algorithm, sides: tuple[ctypes.c_void_p, ...]) -> Iterable[Algorithm]:
        """The same algorithm with each custom option that it takes; what these mean is not documented."""
        for option in range(_CUSTOM_OPTIONS):
            changed, checked = Algorithm.from_buffer_copy(algorithm), Algorithm()
            number = ctypes.c_uint32(option)
            refused = self._library.cublasLtMatmulAlgoConfigSetAttribute(
                ctypes.byref(changed.algorithm), _CUSTOM_OPTION, ctypes.byref(number), ctypes.c_size_t(4)
            ) or self._library.cublasLtMatmulAlgoCheck(
                *(self._handle, self._product, *sides),
                *(ctypes.byref(changed.algorithm), ctypes.byref(checked)),
            )
            if not refused and checked.state == 0 and checked.workspace_bytes <= _WORKSPACE_BYTES:
                yield changed

    def _description(self) -> ctypes.c_void_p:
        made, transposed = ctypes.c_void_p(), ctypes.c_int(1)
        _check(self._library.cublasLtMatmulDescCreate(ctypes.byref(made), _COMPUTE_FP32, _SCALE_FP32))
        _check(
            self._library.cublasLtMatmulDescSetAttribute(
                made, _TRANSPOSE_A, ctypes.byref(transposed), ctypes.c_size_t(4)
            )
        )
        return made

    def _preference(self) -> ctypes.c_void_p:
        made, limit = ctypes.c_void_p(), ctypes.c_uint64(_WORKSPACE_BYTES)
        _check(self._library.cublasLtMatmulPreferenceCreate(ctypes.byref(made)))
        _check(
            self._library.cublasLtMatmulPreferenceSetAttribute(
                made, _WORKSPACE_LIMIT, ctypes.byref(limit), ctypes.c_size_t(8)
            )
        )
        return made

    def _sides(self, tokens: int, weight: Tensor) -> tuple[ctypes.c_void_p, ...]:
        """Layouts of weight, x, what is added to and the result. The library counts columns first."""
        outputs, inputs = weight.shape
        result = self._layout(weight.dtype, outputs, tokens)
        left, right = self._layout(weight.dtype, inputs, outputs), self._layout(weight.dtype, inputs, tokens)
        return left, right, result, result

    def _layout(self, dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
        key = (dtype, rows, columns)
        if key not in self._layouts:
            made = ctypes.c_void_p()
            _check(
                self._library.cublasLtMatrixLayoutCreate(
                    *(ctypes.byref(made), DTYPES[dtype]),
                    *(ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)),
                )
            )
            self._layouts[key] = made
        return self._layouts[key]


@cache
def cublas_lt(device: torch.device) -> CublasLt:
    """The products of one device. Errors: CannotRunHere where the library can't be loaded."""
    return CublasLt(device)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `CublasLt` multiplies these: dense, aligned, on a GPU, both bf16 or both fp16."""
    dense = x.is_contiguous() and weight.is_contiguous() and x.shape[1] == weight.shape[1]
    aligned = not (x.data_ptr() % _ALIGNMENT_BYTES or weight.data_ptr() % _ALIGNMENT_BYTES)
    return x.is_cuda and dense and aligned and x.dtype == weight.dtype and x.dtype in DTYPES


def _library() -> ctypes.CDLL:
    """The library that PyTorch has loaded."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CannotRunHere(f"{name} can't be loaded: {error}") from None


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _check(status: int) -> None:
    if status:
        raise CannotRunHere(f"cuBLASLt failed with status {status}")
