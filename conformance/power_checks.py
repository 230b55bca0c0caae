"""The checks that projects use instead, on the same tensors: would they have seen a mutant's answer?

Each compares an answer with a correct one as real numbers: dequantised where there are codes and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from conformance.operations.quantize import scheme_of
from fuzz.case import Case
from references import layouts, ue8m0
from references.blocks import dequantize
from references.packing import unpack_fp4
from references.requantize import TARGET
from references.routing.forms import unpack
from references.schemes import scheme

F64 = torch.float64


def _allclose(actual: Tensor, right: Tensor) -> bool:
    return bool(torch.allclose(actual, right, rtol=1e-2, atol=1e-2))


def _flashinfer(actual: Tensor, right: Tensor) -> bool:
    bound = 0.15 * right.abs().max() + 1e-3 + 0.85 * right.abs()
    return bool(((actual - right).abs() <= bound).all())


def _calc_diff(actual: Tensor, right: Tensor) -> bool:
    total = (actual * actual + right * right).sum()
    return bool(total == 0) or float(1 - 2 * (actual * right).sum() / total) < 1e-3


def _cosine(actual: Tensor, right: Tensor) -> bool:
    lengths = actual.norm() * right.norm()
    if lengths == 0:
        return bool((actual == 0).all() and (right == 0).all())
    return float((actual * right).sum() / lengths) > 0.99


CHECKS: Mapping[str, Callable[[Tensor, Tensor], bool]] = {
    "allclose": _allclose,
    "flashinfer": _flashinfer,
    "calc_diff": _calc_diff,
    "cosine": _cosine,
}
"""name -> whether an answer passes beside a correct one, both FP64, finite and of one dimension.

``allclose``: rtol = atol = 1e-2. ``flashinfer``: every error <= 0.15 max abs ref + 1e-3 + 0.85 abs ref (its
fuzz tests). ``calc_diff``: below 1e-3 (DeepGEMM). ``cosine``: above 0.99.
"""


def seen_by(
    case: Case, inputs: Mapping[str, Tensor], actual: Mapping[str, Tensor], right: Mapping[str, Tensor]
) -> dict[str, bool]:
    """Check -> whether it sees a difference. Parts that are missing or of another shape are seen by all."""
    if {name: part.shape for name, part in actual.items()} != {name: part.shape for name, part in right.items()}:
        return dict.fromkeys(CHECKS, True)
    try:
        mine, reference = (real(case, inputs, parts).reshape(-1) for parts in (actual, right))
    except IndexError:  # an id that no expert has
        return dict.fromkeys(CHECKS, True)
    same = (mine == reference) | (mine.isnan() & reference.isnan())
    kept = ~same | (mine.isfinite() & reference.isfinite())
    mine, reference = mine[kept], reference[kept]
    if not len(mine):
        return dict.fromkeys(CHECKS, False)
    if not bool((mine.isfinite() & reference.isfinite()).all()):
        return dict.fromkeys(CHECKS, True)
    return {name: not passes(mine, reference) for name, passes in CHECKS.items()}


def real(case: Case, inputs: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> Tensor:
    """An answer as real numbers, FP64: what a test that knows one float tolerance would compare."""
    match case.operation:
        case "quantize":
            kind = scheme_of(case)
            payload = unpack_fp4(parts["payload"]) if kind.element.bits == 4 else parts["payload"]
            if kind.scale == "static":
                given = inputs["scale"].view(1, 1)
                return dequantize(payload, given, scheme(case.variant, case["block"], "fp32"))
            return dequantize(payload, parts["scales"], kind, global_scale=inputs.get("global_scale"))
        case "requantize":
            return dequantize(parts["payload"], parts["scales"], TARGET)
        case "ue8m0":
            return ue8m0.decode(parts["scales"])
        case "scale_layout":
            bits = parts["scales"]
            if case["direction"] == "pack":
                bits = layouts.slots(bits, case.variant)
            return ue8m0.decode(bits) if bits.dtype == torch.uint8 else bits.contiguous().view(torch.float32).to(F64)
        case "routing":
            return _dense(case, parts)
    return parts["output"].to(F64)


def _dense(case: Case, parts: Mapping[str, Tensor]) -> Tensor:
    """Weights by expert, and by local number if there is one: ``experts + shared + 1`` columns, the last for id -1."""
    ids, weights = unpack(parts["packed"]) if "packed" in parts else (parts["selection"], parts["weights"])
    columns = case.integer("experts") + case.integer("shared") + 1
    found = [_by_expert(ids, weights, columns)]
    if "local" in parts:
        found.append(_by_expert(parts["local"], weights, columns))
    return torch.cat(found, dim=1)


def _by_expert(ids: Tensor, weights: Tensor, columns: int) -> Tensor:
    places = torch.where(ids < 0, columns - 1, ids).to(torch.int64)
    if bool((places >= columns).any()):
        raise IndexError("an id that no expert has")
    return torch.zeros(len(ids), columns, dtype=F64).scatter_add(1, places, weights.to(F64))
