"""Every FP32 number through every UE8M0 policy: the reference against a formula of another kind, and torch's cast.

    python -m benchmarks.ue8m0_sweep --device cuda
    python -m benchmarks.ue8m0_sweep --stride 65537 --policy ceil

The reference works on FP32 bits. The formulas here work on values: the FP64 fraction and exponent of |x| by ``frexp``,
and FP32 division for a scale from an amax. Exit code 1 if they differ anywhere; a difference of torch's cast from the
policy ``nearest`` is printed but is torch's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from references import ue8m0
from references.elements import ELEMENTS, Element

PATTERNS = 2**32
CHUNK = {"cpu": 2**20, "cuda": 2**26}


@dataclass
class Count:
    """Disagreements of one comparison, and the first of them."""

    name: str
    inputs: int = 0
    different: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, patterns: Tensor, expected: Tensor, actual: Tensor) -> None:
        self.inputs += patterns.numel()
        wrong = (expected != actual).nonzero().flatten()
        self.different += wrong.numel()
        for index in wrong[: 3 - len(self.examples)].tolist():
            bits = patterns[index].item() & 0xFFFFFFFF
            self.examples.append(f"0x{bits:08X}: {actual[index].item()}, expected {expected[index].item()}")


def formula(x: Tensor, policy: str, element: Element | None) -> Tensor:
    """Codes int64 by value arithmetic: from a scale if ``element`` is None, else from an amax."""
    if element is not None and policy in ("ceil", "ceil_clamped"):
        x, element = x.abs() / torch.full_like(x, element.max), None
    magnitude = x.to(torch.float64).abs()
    is_nan, is_inf = magnitude.isnan(), magnitude.isinf()
    # magnitude = 2 * fraction * 2^floor with fraction in [1/2, 1)
    fraction, exponent = torch.frexp(torch.where(is_nan | is_inf, torch.ones_like(magnitude), magnitude))
    floor = torch.where(is_inf, 128, torch.where(magnitude == 0, -10000, exponent.to(torch.int64) - 1))
    power = is_inf | (magnitude == 0) | (fraction == 0.5)
    ceil = floor + (~power).to(torch.int64)
    if policy == "ceil":
        code = (ceil + 127).clamp(0, 254)
    elif policy == "ceil_clamped":
        # The exponent field of a subnormal is 0, so all of them count as between 2^-127 and 2^-126.
        code = (ceil + 127).clamp(1, 254)
        return torch.where(is_nan, 254, code)
    elif policy == "nearest":
        code = torch.where(fraction >= 0.75, floor + 1, floor) + 127
        below_normal = magnitude < 2.0**-126
        code = torch.where(below_normal, (magnitude > 2.0**-127).to(torch.int64), code).clamp(max=255)
    else:
        least = element.emax if element is not None else 0
        if policy == "floor":
            unbiased = floor
        elif policy == "ceil_amax":
            unbiased = ceil
        else:
            assert element is not None
            unbiased = floor + (fraction >= 1 - 2.0 ** -(element.mantissa_bits + 2)).to(torch.int64) * ~is_inf
        code = (unbiased.clamp(max=128) - least + 127).clamp(0, 254)
    return torch.where(is_nan, 255, code)


def reference(x: Tensor, policy: str, element: Element | None) -> Tensor:
    return ue8m0.encode(x, policy) if element is None else ue8m0.from_amax(x, element, policy)


def variants(policies: list[str], sources: list[str]) -> Iterator[tuple[str, str, Element | None]]:
    """(name, policy, element) of every policy from each source that it has."""
    for policy in policies:
        for source in sources:
            if source == "scale" and policy in ue8m0.SCALE_POLICIES:
                yield f"{policy} from scale", policy, None
            elif source != "scale" and policy in ue8m0.AMAX_POLICIES:
                yield f"{policy} from {source}", policy, ELEMENTS[source.removeprefix("amax_")]


def chunks(stride: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Bit patterns 0, stride, 2 * stride, ... below 2^32, as int32."""
    for start in range(0, PATTERNS, stride * size):
        stop = min(PATTERNS, start + stride * size)
        patterns = torch.arange(start, stop, stride, device=device)
        yield ((patterns ^ 0x80000000) - 0x80000000).to(torch.int32)


def sweep(name: str, compare: Callable[[Tensor], tuple[Tensor, Tensor]], stride: int, device: torch.device) -> bool:
    """Compare over all patterns, print a row, and say whether every code agreed."""
    count, start = Count(name), time.perf_counter()
    for patterns in chunks(stride, CHUNK[device.type], device):
        expected, actual = compare(patterns.view(torch.float32))
        count.add(patterns, expected.to(torch.int64), actual.to(torch.int64))
    spent = time.perf_counter() - start
    rate = count.inputs / spent / 1e6
    examples = "; ".join(count.examples)
    print(f"| {name} | {count.inputs} | {count.different} | {spent:.1f} | {rate:.0f} | {examples} |", flush=True)
    return not count.different


def main(arguments: list[str] | None = None) -> int:
    sources = ["scale", *(f"amax_{name}" for name in ELEMENTS if name != "e4m3fnuz")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stride", type=int, default=1, help="take every N-th bit pattern; odd for varied mantissas")
    parser.add_argument("--policy", action="append", choices=ue8m0.POLICIES, help="repeatable; all unless given")
    parser.add_argument("--source", action="append", choices=sources, help="repeatable; all unless given")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if options.stride < 1 or device.type not in CHUNK:
        parser.error("needs --stride >= 1 and --device cpu or cuda")
    policies = options.policy or list(ue8m0.POLICIES)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"torch {torch.__version__}, {name}, stride {options.stride}\n")
    print("| comparison | inputs | different | seconds | M inputs/s | first |\n|---|--:|--:|--:|--:|---|")
    agree, compared = True, 0
    for title, policy, element in variants(policies, options.source or sources):

        def compare(x: Tensor, policy: str = policy, element: Element | None = element) -> tuple[Tensor, Tensor]:
            return formula(x, policy, element), reference(x, policy, element)

        agree &= sweep(title, compare, options.stride, device)
        compared += 1
    if "nearest" in policies:

        def cast(x: Tensor) -> tuple[Tensor, Tensor]:
            return ue8m0.encode(x, "nearest"), x.to(torch.float8_e8m0fnu).view(torch.uint8)

        sweep("torch's cast against nearest", cast, options.stride, device)
    if not compared:
        parser.error("no policy has that source")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
