"""cuBLASLt through torch: block-scaled ``scaled_mm`` on SM90, and matrix products of BF16 and FP16 operands.

``cublaslt`` gives ``scaled_mm`` 1x128 scales of A and 128x128 scales of B; ``cublaslt_1x128`` gives it the same scales
of B row by row. Small outputs of a long K are split over K by a heuristic that nobody documents; the parts are added
in FP32. Nothing but the layout of the scales is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from references.backend import NORMAL_VALUES, Claim, Unsupported
from references.recipes import Recipe

NAMES = ("cublaslt", "cublaslt_1x128")

OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCALED_SOURCE = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_mm.html"
PLAIN_SOURCE = "https://docs.pytorch.org/docs/stable/generated/torch.mm.html"
MEASURED = "measured on an H200"
SM90 = 9
BLOCK = 128
K_PARTS = 16
"""Parts of K up to `LONGEST_K`: as many as were seen."""
LONGEST_K = 2**14
SWEPT: Mapping[str, tuple[str, ...]] = {"stream": ("side",), "graph": ("replay",)}

if not hasattr(F, "scaled_mm"):
    raise ImportError("torch has no nn.functional.scaled_mm")

Call = Callable[[], dict[str, Tensor]]


class CublasLt:
    """One of the two. rows: whether B's scales are given row by row."""

    def __init__(self, name: str, *, rows: bool) -> None:
        self.name = name
        self._rows = rows

    def version(self) -> str:
        """torch's version; it brings the library."""
        return str(torch.__version__)

    def claims(self, device: str) -> Iterable[Claim]:
        """On SM90, whose arithmetic is known: rows of 16 bytes, in the scales of A (and of B, row by row) as well."""
        if not device.startswith("cuda") or torch.cuda.get_device_capability(torch.device(device))[0] != SM90:
            return []
        scaled = [
            Claim(
                operation="gemm",
                variant="deepseek_fp8",
                source=SCALED_SOURCE,
                multiples={"k": 16, "m": 4, "n": 16},
                maxima=maxima,
                options=SWEPT,
                enforced=("k", "m", "n"),
            )
            for maxima in ({"k": LONGEST_K}, {})
        ]
        if self._rows:
            return scaled
        options = {**SWEPT, "inputs": ("strided",)}
        return [
            *scaled,
            Claim(
                operation="gemm",
                variant="bf16",
                source=PLAIN_SOURCE,
                where={"values": NORMAL_VALUES},
                multiples={"k": 8, "n": 8},
                maxima={"k": LONGEST_K},
                options=options,
            ),
            Claim(operation="gemm", variant="bf16", source=PLAIN_SOURCE, options=options),
            *(
                Claim(
                    operation="gemm",
                    variant="fp16",
                    source=PLAIN_SOURCE,
                    where={"out": ("fp32",)},
                    multiples=multiples,
                    maxima={"k": LONGEST_K} if multiples else {},
                    options=options,
                )
                for multiples in ({"k": 8, "n": 8}, {})
            ),
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """The exact models; not for BF16 sums below 2^-126, rows off 16 bytes, which other kernels take, and vast K."""
        if claim.variant == "deepseek_fp8" and not claim.maxima:
            return Recipe(source=MEASURED, accumulator="hopper_fp8")
        if claim.variant == "deepseek_fp8":
            return Recipe(
                source=MEASURED,
                accumulator="hopper_fp8",
                scale_combination="fma_dot_sa_sb" if self._rows else "fma_dot_sasb",
                k_parts=K_PARTS,
            )
        if claim.multiples:
            return Recipe(source=MEASURED, accumulator="hopper_f16", promotion="none", k_parts=K_PARTS)
        return Recipe(source=PLAIN_SOURCE)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """Scales in the orders that cuBLASLt asks for."""
        if case.operation != "gemm" or case.variant not in ("deepseek_fp8", "bf16", "fp16"):
            raise Unsupported(f"no {case.operation} {case.variant}")
        if case.variant != "deepseek_fp8":
            return lambda: {"output": plain(inputs["a"], inputs["b"], OUTPUTS[case["out"]])}
        return lambda: {"output": scaled(case, inputs, rows=self._rows)}

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it."""
        return prepared()


def backends() -> Iterable[CublasLt]:
    """B's scales by blocks, and row by row."""
    return [CublasLt("cublaslt", rows=False), CublasLt("cublaslt_1x128", rows=True)]


def plain(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b.T`` with FP32 accumulation throughout."""
    with full_precision():
        return torch.mm(a, b.t()) if dtype == a.dtype else torch.mm(a, b.t(), out_dtype=dtype)


@contextmanager
def full_precision() -> Iterator[None]:
    """No BF16 or FP16 partial sums."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = flags.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = before


def scaled(case: Any, inputs: Mapping[str, Tensor], *, rows: bool) -> Tensor:
    """``scaled_mm`` with 1x128 scales of A, and those of B by blocks or row by row."""
    kinds = F.ScalingType
    a, b = (inputs[name].view(torch.float8_e4m3fn) for name in "ab")
    m, n, k = (case.integer(key) for key in "mnk")
    scale_a = _fp32(_plain(case, inputs["a_scales"], m, -(-k // BLOCK)))
    scale_b = _fp32(inputs["b_scales"])
    if rows:
        kind = kinds.BlockWise1x128
        scale_b = by_columns(scale_b.repeat_interleave(BLOCK, 0)[:n])
    else:
        kind = kinds.BlockWise128x128
        scale_b = by_columns(F.pad(scale_b, (0, -scale_b.shape[1] % 4)).t())  # [blocks of K, up to a four; of N]
    found: Tensor = F.scaled_mm(
        a,
        b.t(),
        by_columns(scale_a),
        kinds.BlockWise1x128,
        scale_b,
        kind,
        output_dtype=OUTPUTS[case["out"]],
    )
    return found


def by_columns(matrix: Tensor) -> Tensor:
    """The same matrix with strides (1, rows), exactly, whatever its sizes."""
    stored = matrix.new_empty(matrix.numel()).as_strided(matrix.shape, (1, matrix.shape[0]))
    return stored.copy_(matrix)


def _plain(case: Any, scales: Tensor, rows: int, cols: int) -> Tensor:
    """The grid of A's scales, ``[rows, cols]``."""
    if case["layout"] == "plain":
        return scales
    if scales.dtype == torch.int32:
        codes = scales.contiguous().view(torch.uint8).view(*scales.shape, 4)
        return codes.transpose(-3, -2).flatten(-2)[:rows, :cols]
    return scales.t()[:rows]


def _fp32(scales: Tensor) -> Tensor:
    """UE8M0 codes as FP32 powers of two."""
    if scales.dtype != torch.uint8:
        return scales
    bits = scales.to(torch.int32) << 23
    return torch.where(scales == 0, 0x00400000, bits).view(torch.float32)
