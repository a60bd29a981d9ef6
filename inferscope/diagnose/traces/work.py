"""Arithmetic and memory traffic from operators' shapes, peaks of known cards, and which units a kernel ran on: estimates, marked as such.

Operations follow the usual counts (2 m n k for a product of matrices; PyTorch's `torch.utils.flop_counter` counts the same). Bytes count
every operand once and the result once, which is the least that must move. Peaks are the vendors' dense figures from their data sheets.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Peak", "Work", "is_matrix", "on_matrix_units", "peak_of", "work_of"]


class Work(NamedTuple):
    """Of one call."""

    flops: float
    bytes: float
    """0 where the operands' types are not known."""
    type: str
    """Of the first operand: `float`, `half` (16 bits), `double` or empty."""


class Peak(NamedTuple):
    """Dense peaks of a card."""

    half: float
    tensor_float: float
    """TF32, or float where there is none."""
    single: float
    bytes_s: float


_T: Final = 1e12
_PEAKS: Final = {
    "A100-SXM4-80GB": Peak(312 * _T, 156 * _T, 19.5 * _T, 2.039 * _T),
    "A100": Peak(312 * _T, 156 * _T, 19.5 * _T, 1.555 * _T),
    "H200": Peak(989 * _T, 494 * _T, 67 * _T, 4.8 * _T),
    "H100 80GB HBM3": Peak(989 * _T, 494 * _T, 67 * _T, 3.35 * _T),
    "H100": Peak(756 * _T, 378 * _T, 51 * _T, 2.0 * _T),
    "L40S": Peak(362 * _T, 183 * _T, 91.6 * _T, 0.864 * _T),
    "L4": Peak(121 * _T, 60 * _T, 30.3 * _T, 0.3 * _T),
    "A10G": Peak(70 * _T, 35 * _T, 35 * _T, 0.6 * _T),
    "A10": Peak(125 * _T, 62.5 * _T, 31.2 * _T, 0.6 * _T),
    "V100": Peak(125 * _T, 15.7 * _T, 15.7 * _T, 0.9 * _T),
    "T4": Peak(65 * _T, 8.1 * _T, 8.1 * _T, 0.32 * _T),
    "MI300X": Peak(1307 * _T, 654 * _T, 163.4 * _T, 5.3 * _T),
    "MI250X": Peak(383 * _T, 95.7 * _T, 47.9 * _T, 3.2 * _T),
}
_BYTES: Final = {
    "double": 8, "long": 8, "long int": 8, "int64": 8, "float": 4, "int": 4, "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2,
    "short": 2, "char": 1, "signed char": 1, "unsigned char": 1, "bool": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
}  # fmt: skip
_HALF: Final = frozenset({"half", "c10::half", "bfloat16", "c10::bfloat16"})
_MATRIX: Final = re.compile(
    r"gemm|conv|cutlass|xmma|cijk_|matmul|_mm_|attention|flash|fmha|nvjet|wgrad|dgrad|winograd|hipblas|gemv", re.IGNORECASE
)
_ELSEWHERE: Final = re.compile(r"elementwise|convert|copy_kernel|im2col|reduce_kernel", re.IGNORECASE)
_UNITS: Final = re.compile(
    r"tensorop|wgmma|gmma|hmma|imma|s884|h884|s1688|h1688|i8816|16816|_884|_1688|xmma_gemm|warpgroup|nvjet|flash|fmha|tf32|bf16bf16|f16f16|"
    r"_MI\d\d|mfma|(?:half|bfloat16|bf16|fp16).*gemm|Cijk_.*(?:HHS|BBS|HSS|BSS|HHH|HB_|BB_)",
    re.IGNORECASE,
)
_PLAIN: Final = re.compile(r"sgemm|simt|_ffma|dgemm|gemmSN|gemv|implicit_convolve_sgemm|Cijk_.*(?:SB_|SS_BH)", re.IGNORECASE)


def is_matrix(kernel: str) -> bool:
    """Whether a kernel multiplies matrices, convolves or attends."""
    return _MATRIX.search(kernel) is not None and _ELSEWHERE.search(kernel) is None


def on_matrix_units(kernel: str) -> bool | None:
    """Whether such a kernel uses tensor cores or their like; None when its name does not say."""
    if _UNITS.search(kernel):
        return True
    return False if _PLAIN.search(kernel) else None


def peak_of(device: str) -> Peak | None:
    """Peaks of a card by the name that its driver gives; None for one that is not known here."""
    return next((peak for name, peak in _PEAKS.items() if name.lower() in device.lower()), None)


def work_of(name: str, arguments: Mapping[str, Any]) -> Work | None:
    """Operations and bytes of one operator call from its recorded shapes; None when they are not there, or for what only holds others."""
    dims: object = arguments.get("Input Dims")
    if not isinstance(dims, list):
        return None
    shapes = [shape for shape in cast("list[object]", dims) if _is_shape(shape)]
    types: object = arguments.get("Input type")
    kinds = [str(kind).lower() for kind in cast("list[object]", types)] if isinstance(types, list) else []
    shapes_ = cast("list[list[int]]", shapes)
    if not shapes_:
        return None
    result, flops = _product(name, shapes_)
    size = _BYTES.get(kinds[0], 0) if kinds else 0
    moved = 0.0
    for position, shape in enumerate(cast("list[object]", dims)):
        if _is_shape(shape) and position < len(kinds):
            moved += _BYTES.get(kinds[position], 0) * prod(cast("list[int]", shape))
    return Work(flops, moved + size * result if moved else 0.0, "half" if kinds and kinds[0] in _HALF else kinds[0] if kinds else "")


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(cast("list[object]", value)) > 0 and all(isinstance(x, int) for x in cast("list[object]", value))


def _product(name: str, shapes: Sequence[Sequence[int]]) -> tuple[float, float]:
    """(elements of the result, operations) of a call; an element-wise operator makes as many as its largest operand, with one operation each."""
    short = name.removeprefix("aten::")
    pair = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_scaled_mm": (0, 1)}.get(short)
    if pair is not None and len(shapes) > pair[1]:
        left, right = shapes[pair[0]], shapes[pair[1]]
        batch = prod(left[:-2])
        return float(batch * left[-2] * right[-1]), 2.0 * batch * left[-2] * left[-1] * right[-1]
    if short in {"cudnn_convolution", "miopen_convolution", "mkldnn_convolution", "_convolution"} and len(shapes) > 1:
        image, weight = shapes[0], shapes[1]
        if len(image) == len(weight) >= 3:
            places = image[0] * prod(image[2:])  # stride 1; a larger one makes fewer
            return float(places * weight[0]), 2.0 * places * prod(weight)
    if "attention" in short and len(shapes) > 2 and len(shapes[0]) == 4:
        query, key = shapes[0], shapes[1]
        return float(prod(query)), 4.0 * query[0] * query[1] * query[2] * key[2] * query[3]
    largest = float(max(prod(shape) for shape in shapes))
    return largest, largest
