"""torchao's Triton kernels for MX formats (``torchao.prototype.mx_formats.kernels``), on a GPU.

The casts ``triton_to_mxfp8_dim0`` and the like ask for SM100 (they use ``cvt.rp.satfinite.ue8m0x2``); below they raise.
``triton_mx_block_rearrange`` runs on any GPU with Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from references.backend import Claim, Unsupported
from references.recipes import Recipe

try:
    import torchao
    from torchao.prototype.mx_formats import kernels
except ImportError as error:
    raise ImportError(f"torchao >= 0.18 with prototype.mx_formats is needed: {error}") from error

NAMES = ("torchao_triton",)

SOURCE = "torchao/prototype/mx_formats/kernels.py"
CASTS_FROM = (10, 0)
"""The compute capability that the casts ask for."""
FORMS = {"ceil": "rceil", "floor": "floor"}

Call = Callable[[], dict[str, Tensor]]


class TorchaoTriton:
    """torchao's Triton kernels."""

    name = "torchao_triton"

    def version(self) -> str:
        """torchao's version."""
        return str(torchao.__version__)

    def claims(self, device: str) -> Iterable[Claim]:
        """The layout on any GPU, MXFP8 casts of BF16 from SM100 on."""
        if not device.startswith("cuda") or not hasattr(kernels, "triton_mx_block_rearrange"):
            return []
        found = [
            Claim(
                operation="scale_layout",
                variant="interleave_128x4",
                source=f"{SOURCE}: triton_mx_block_rearrange",
                where={"direction": ("pack",)},
                options={"stream": ("side",), "graph": ("replay",)},
            )
        ]
        if torch.cuda.get_device_capability(torch.device(device)) >= CASTS_FROM:
            found.append(
                Claim(
                    operation="quantize",
                    variant="mxfp8",
                    source=f"{SOURCE}: triton_to_mxfp8_dim0",
                    where={"dtype": ("bf16",), "stride": ("contiguous",), "scale": tuple(FORMS)},
                    multiples={"k": 32},
                )
            )
        return found

    def recipe(self, claim: Claim) -> Recipe:
        """Nothing is left open."""
        return Recipe(source=claim.source)

    def prepare(self, case: Any, inputs: Mapping[str, Tensor], options: Mapping[str, str]) -> Call:
        """The library's call, bound to its inputs."""
        match case.operation, case.variant:
            case "scale_layout", "interleave_128x4" if case["direction"] == "pack":
                scales = inputs["scales"].contiguous().view(torch.float8_e8m0fnu)
                return lambda: {"scales": kernels.triton_mx_block_rearrange(scales).view(torch.uint8).flatten()}
            case "quantize", "mxfp8" if case["scale"] in FORMS:
                x, mode = inputs["x"], FORMS[case["scale"]]

                def cast() -> dict[str, Tensor]:
                    payload, scales = kernels.triton_to_mxfp8_dim0(x, 32, mode)
                    return {"scales": scales.view(torch.uint8).view(len(x), -1), "payload": payload.view(torch.uint8)}

                return cast
        raise Unsupported(f"no {case.operation} {case.variant}")

    def run(self, prepared: Call, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call it."""
        return prepared()


def backends() -> Iterable[TorchaoTriton]:
    """``torchao_triton``."""
    return [TorchaoTriton()]
