"""A correct backend for ``ue8m0 nearest``, with bit operations of its own."""

import torch

from references.backend import Claim, Unsupported
from references.recipes import Recipe

SOURCE = "tests/conformance/plugins/good.py"


class Good:
    name = "good"

    def version(self):
        return "1.0"

    def claims(self, device):
        return [Claim(operation="ue8m0", variant="nearest", source=SOURCE, maxima={"n": 4096})]

    def recipe(self, claim):
        return Recipe(source=SOURCE)

    def prepare(self, case, inputs, options):
        if case.integer("n") > 4096:
            raise Unsupported("n above 4096")
        return inputs["x"]

    def run(self, prepared, out):
        bits = prepared.view(torch.int32) & 0x7FFFFFFF
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        normal = exponent + (mantissa >= 0x400000).int()  # ties go up
        subnormal = (bits > 0x400000).int()  # all above 2^-127 up to 2^-126
        codes = torch.where(exponent == 0, subnormal, normal).clamp(max=255)
        out["scales"].copy_(codes)
        return {"scales": out["scales"]}


def backends():
    return [Good()]
