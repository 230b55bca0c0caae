"""A backend with call options and a gate, for ``ue8m0 nearest`` and ``gemm bf16``; wrong under one option each.

It claims n up to 64 and says that it refuses the rest: it does so with an exception up to 99, is right up to 199, and
answers nonsense beyond.
"""

import torch

from references.backend import Claim
from references.recipes import Recipe

SOURCE = "tests/conformance/plugins/options.py"


class Tactical:
    name = "tactical"

    def version(self):
        return "1.0"

    def claims(self, device):
        tactics = {"tactic": ("even", "odd")}
        return [
            Claim(
                operation="ue8m0",
                variant="nearest",
                source=SOURCE,
                maxima={"n": 64},
                options=tactics,
                enforced=("n",),
            ),
            Claim(operation="gemm", variant="bf16", source=SOURCE, options={"inputs": ("strided",)}),
        ]

    def recipe(self, claim):
        return Recipe(source=SOURCE)

    def prepare(self, case, inputs, options):
        return case, inputs, options

    def run(self, prepared, out):
        case, inputs, options = prepared
        if case.operation == "gemm":
            a, b = (inputs[name] for name in "ab")
            storage = torch.empty(0, dtype=a.dtype).set_(a.untyped_storage())
            flat = storage[: a.numel()].view(a.shape)  # wrong where rows are further apart
            return {"output": (flat.float() @ b.float().T).to(out["output"].dtype)}
        if 64 < case.integer("n") < 100:
            raise ValueError("n is too large")
        bits = inputs["x"].view(torch.int32) & 0x7FFFFFFF
        normal = (bits >> 23) + ((bits & 0x7FFFFF) >= 0x400000).int()
        codes = torch.where(bits >> 23 == 0, (bits > 0x400000).int(), normal).clamp(max=255)
        out["scales"].copy_(codes ^ (options.get("tactic") == "odd" or case.integer("n") >= 200))
        return {"scales": out["scales"]}


def backends():
    return [Tactical()]
