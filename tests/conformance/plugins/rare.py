"""``ue8m0 nearest``, right but for a carry that is lost out of one exponent of 254."""

import torch

from references.backend import Claim
from references.recipes import Recipe

SOURCE = "tests/conformance/plugins/rare.py"


class Rare:
    name = "rare"

    def version(self):
        return "1.0"

    def claims(self, device):
        return [
            Claim(operation="ue8m0", variant="nearest", source=SOURCE, maxima={"n": 64}, where={"from": ("scale",)})
        ]

    def recipe(self, claim):
        return Recipe(source=SOURCE)

    def prepare(self, case, inputs, options):
        return inputs["x"]

    def run(self, prepared, out):
        bits = prepared.view(torch.int32) & 0x7FFFFFFF
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        codes = exponent + ((mantissa >= 0x400000) & (exponent != 77)).int()
        codes = torch.where(exponent == 0, (bits > 0x400000).int(), codes).clamp(max=255)
        out["scales"].copy_(codes)
        return {"scales": out["scales"]}


def backends():
    return [Rare()]
