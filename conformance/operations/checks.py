"""Whether outputs have the form that an operation asks for, before anything looks at their values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from conformance.operations.base import OutputSpec, PartVerdict


def check_outputs(specs: Mapping[str, OutputSpec], outputs: Mapping[str, Tensor]) -> list[PartVerdict]:
    """A ``wrong`` verdict for each part that is missing, has another shape or dtype, or belongs to no contract.

    specs: what ``Operation.outputs`` asks for. Empty if the outputs may be judged.
    """
    found = [(name, _problem(spec, outputs.get(name))) for name, spec in specs.items()]
    known = ", ".join(specs)
    found += [(name, f"no such part in the contract; it has {known}") for name in outputs if name not in specs]
    return [PartVerdict(part=name, verdict="wrong", message=message) for name, message in found if message]


def canonical(spec: OutputSpec, output: Tensor) -> Tensor:
    """The output in the part's canonical dtype, bit for bit. The output has passed `check_outputs`."""
    return output if output.dtype == spec.dtype else output.contiguous().view(spec.dtype)


def _problem(spec: OutputSpec, output: Tensor | None) -> str:
    if output is None:
        return "the part is missing"
    if tuple(output.shape) != spec.shape:
        return f"shape {list(output.shape)}, expected {list(spec.shape)}"
    if output.dtype != spec.dtype and output.dtype not in spec.also:
        names = [str(dtype).removeprefix("torch.") for dtype in (spec.dtype, *spec.also)]
        return f"dtype {str(output.dtype).removeprefix('torch.')}, expected {' or '.join(names)}"
    return ""
