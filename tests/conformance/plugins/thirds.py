"""A backend for the pytest suite: right about ``ue8m0 nearest``, wrong about every third ``ue8m0 floor``."""

import torch

from references.backend import Claim
from references.recipes import Recipe

SOURCE = "tests/conformance/plugins/thirds.py"


class Thirds:
    name = "thirds"

    def version(self):
        return "1.0"

    def claims(self, device):
        where = {"from": ("scale",)}
        return [Claim(operation="ue8m0", variant=name, source=SOURCE, where=where) for name in ("floor", "nearest")]

    def recipe(self, claim):
        return Recipe(source=SOURCE)

    def prepare(self, case, inputs, options):
        return case, inputs["x"]

    def run(self, prepared, out):
        case, x = prepared
        if case.variant == "floor":
            codes = ((x.view(torch.int32) & 0x7FFFFFFF) >> 23).clamp(max=254)
            codes += case.seed % 3 == 0
        else:
            bits = x.view(torch.int32) & 0x7FFFFFFF
            normal = (bits >> 23) + ((bits & 0x7FFFFF) >= 0x400000).int()
            codes = torch.where(bits >> 23 == 0, (bits > 0x400000).int(), normal).clamp(max=255)
        out["scales"].copy_(codes)
        return {"scales": out["scales"]}


def backends():
    return [Thirds()]
