import ast
import importlib.metadata
import sys
from pathlib import Path

import torch

# The one function of the installed SGLang, without the server around it.
file = importlib.metadata.distribution("sglang").locate_file("sglang/srt/layers/moe/topk.py")
tree = ast.parse(Path(str(file)).read_text())
names = {"torch": torch}
for node in tree.body:
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_RENORMALIZE_SUM_EPSILON":
        exec(ast.unparse(node), names)
    if isinstance(node, ast.FunctionDef) and node.name == "biased_topk_impl":
        node.decorator_list = []
        exec(f"from __future__ import annotations\n{ast.unparse(node)}", names)

failed = False
for dtype, logits in (
    (torch.float32, [-1.0, 0.3, 0.7, -0.2]),
    (torch.bfloat16, [-1.0, 0.3, 0.7, -0.2]),
    (torch.float32, [-40.0, -41.0, -42.0, -43.0]),
    (torch.float32, [-120.0, -121.0, -122.0, -123.0]),
):
    x = torch.tensor([logits], dtype=dtype)
    weights, ids = names["biased_topk_impl"](
        x, x, torch.zeros(4), 3, True, num_fused_shared_experts=1, routed_scaling_factor=2.5,
        apply_routed_scaling_factor_on_output=True,
    )  # fmt: skip
    shared = weights[ids >= 4].item()
    print(f"logits {logits} in {dtype}: shared expert weighs {shared!r}, expected 1.0")
    failed |= shared != 1.0
sys.exit(failed)
