"""A backend for CUDA, right about ``ue8m0 nearest`` but for every third seed, where it reads memory that nobody has."""

import torch
import triton
import triton.language as tl

from references.backend import Claim
from references.recipes import Recipe

SOURCE = "tests/conformance/plugins/illegal.py"


@triton.jit
def far_away(x, distance):
    tl.store(x, tl.load(x + distance))


class Illegal:
    name = "illegal"

    def version(self):
        return "1.0"

    def claims(self, device):
        if not device.startswith("cuda"):
            return []
        return [Claim(operation="ue8m0", variant="nearest", source=SOURCE)]

    def recipe(self, claim):
        return Recipe(source=SOURCE)

    def prepare(self, case, inputs, options):
        return case, inputs["x"]

    def run(self, prepared, out):
        case, x = prepared
        if case.seed % 3 == 0:
            far_away[(1,)](x.clone(), 2**44)
        bits = x.view(torch.int32) & 0x7FFFFFFF
        normal = (bits >> 23) + ((bits & 0x7FFFFF) >= 0x400000).int()
        codes = torch.where(bits >> 23 == 0, (bits > 0x400000).int(), normal).clamp(max=255)
        out["scales"].copy_(codes)
        return {"scales": out["scales"]}


def backends():
    return [Illegal()]
