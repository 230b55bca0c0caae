"""torch's grouped matrix products: ``grouped_mm`` of BF16, ``scaled_grouped_mm`` of FP8 with one scale a row.

Both take the ends of the groups' rows in ``offs`` (`ends_of_groups`), or slabs of equal length without it. Rows behind
the last group stay unwritten. A scale for the whole tensor is given to every row. ``scaled_grouped_mm`` is claimed for
``RowWise`` scales alone: the block recipes that it also names need SM100, and on SM90 one of them loses the device
instead of being refused (docs/findings/030-torch-scaled-grouped-mm-mx-on-sm90.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from references.backend import NORMAL_VALUES, Claim, Unsupported
from references.recipes import Recipe

NAMES = ("torch_grouped_mm", "torch_scaled_grouped_mm", "torch_scaled_grouped_mm_fast")

PLAIN_SOURCE = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html"
SCALED_SOURCE = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_grouped_mm.html"
OUTPUTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEASURED = "measured on an H200"
SM90 = 9
MOST_GROUPS = 1023
"""The operators refuse 1024 ("Can't process more than 1024 groups"), and more."""
SWEPT: Mapping[str, tuple[str, ...]] = {"stream": ("side",), "graph": ("replay",), "inputs": ("strided",)}

if not (hasattr(F, "grouped_mm") and hasattr(F, "scaled_grouped_mm")):
    raise ImportError("torch has no nn.functional.grouped_mm and scaled_grouped_mm")

Call = Callable[[], dict[str, Tensor]]


class GroupedMM:
    """``grouped_mm`` of BF16: CUTLASS on SM90, one product a group elsewhere."""

    name = "torch_grouped_mm"

    def version(self) -> str:
        """torch's version."""
        return str(torch.__version__)

    def claims(self, device: str) -> Iterable[Claim]:
        """BF16 to BF16, operands' rows of 16 bytes as the operator asks. On a CPU, one matmul a group: not claimed."""
        if not device.startswith("cuda"):
            return []
        major = torch.cuda.get_device_capability(torch.device(device))[0]
        if major < SM90 - 1:
            return []
        values = [{"values": NORMAL_VALUES}, {}] if major == SM90 else [{}]
        return [
            Claim(
                operation="grouped_gemm",
                variant="bf16",
                source=PLAIN_SOURCE,
                where={"out": ("bf16",), **more},
                multiples={"k": 8},
                maxima={"groups": MOST_GROUPS},
                options=SWEPT,
                enforced=("groups", "k", "out"),
            )
            for more in values
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """Hopper's BF16 unit bit for bit, but for sums below 2^-126."""
        if "values" in claim.where:
            return Recipe(source=MEASURED, accumulator="hopper_f16", promotion="none")
        return Recipe(source=PLAIN_SOURCE)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """B is passed as the transpose of row-major matrices."""
        if case.variant != "bf16":
            raise Unsupported(f"no {case.operation} {case.variant}")
        a, b, ends, out = inputs["a"], inputs["b"], ends_of_groups(case, inputs), OUTPUTS[case["out"]]
        return lambda: {"output": F.grouped_mm(a, b.transpose(-1, -2), offs=ends, out_dtype=out)}

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it."""
        return prepared()


class ScaledGroupedMM:
    """``scaled_grouped_mm`` with one scale a row. fast: with ``use_fast_accum``."""

    def __init__(self, name: str, *, fast: bool) -> None:
        self.name = name
        self._fast = fast

    def version(self) -> str:
        """torch's version."""
        return str(torch.__version__)

    def claims(self, device: str) -> Iterable[Claim]:
        """``fp8_per_tensor`` to BF16 on SM90, rows of 16 bytes."""
        if not device.startswith("cuda") or torch.cuda.get_device_capability(torch.device(device))[0] != SM90:
            return []
        return [
            Claim(
                operation="grouped_gemm",
                variant="fp8_per_tensor",
                source=SCALED_SOURCE,
                where={"out": ("bf16",)},
                multiples={"k": 16, "n": 16},
                maxima={"groups": MOST_GROUPS},
                options=SWEPT,
                enforced=("groups", "k", "n", "out"),
            )
        ]

    def recipe(self, claim: Claim) -> Recipe:
        """13 bits, over all of K with fast accumulation, over 128 of it without."""
        return Recipe(
            source=MEASURED,
            accumulator="hopper_fp8",
            promotion="none" if self._fast else "every_128",
            scale_combination="fma_dot_sa_sb",
        )

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The tensors' scales for every row of A and of each B."""
        if case.variant != "fp8_per_tensor":
            raise Unsupported(f"no {case.operation} {case.variant}")
        a, b = (inputs[name].view(torch.float8_e4m3fn) for name in "ab")
        m, n, groups = (case.integer(key) for key in ("m", "n", "groups"))
        ends, fast, kind = ends_of_groups(case, inputs), self._fast, F.ScalingType.RowWise
        out = OUTPUTS[case["out"]]
        a_scales = inputs["a_scales"].reshape(-1, 1).expand(-1, m).contiguous()
        b_scales = inputs["b_scales"].reshape(groups, 1).expand(-1, n).contiguous()
        if ends is not None:
            a_scales = a_scales.view(m)

        def call() -> dict[str, Tensor]:
            output = F.scaled_grouped_mm(  # type: ignore[attr-defined]
                a,
                b.transpose(-1, -2),
                a_scales,
                kind,
                b_scales,
                kind,
                offs=ends,
                output_dtype=out,
                use_fast_accum=fast,
            )
            return {"output": output}

        return call

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run it."""
        return prepared()


def backends() -> Iterable[GroupedMM | ScaledGroupedMM]:
    """BF16, and FP8 without and with fast accumulation."""
    return [
        GroupedMM(),
        ScaledGroupedMM("torch_scaled_grouped_mm", fast=False),
        ScaledGroupedMM("torch_scaled_grouped_mm_fast", fast=True),
    ]


def ends_of_groups(case: Any, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Int32 ``[groups]``: where the rows of each group end, padding before it included; None for slabs."""
    if case["grouping"] == "masked":
        return None
    rows, groups = inputs["m_indices"], case.integer("groups")
    ends = torch.zeros(groups + 1, dtype=torch.int64, device=rows.device)  # the first is of rows that belong to none
    number = torch.arange(1, len(rows) + 1, device=rows.device)
    ends.scatter_reduce_(0, rows.to(torch.int64) + 1, number, "amax")
    return ends[1:].cummax(0).values.to(torch.int32)
