import ast
import importlib.metadata
import sys
from pathlib import Path

import torch

# The one function of the installed vLLM, without the engine around it.
path = "vllm/model_executor/layers/fused_moe/router/cpu_router.py"
tree = ast.parse(Path(str(importlib.metadata.distribution("vllm").locate_file(path))).read_text())
names = {"torch": torch}
for node in tree.body:
    if isinstance(node, ast.FunctionDef) and node.name == "_softmax_topk":
        exec(ast.unparse(node), names)

failed = False
for dtype, logits, renormalize, allowed in (
    (torch.bfloat16, [1.25, 0.5], True, 1e-6),
    (torch.bfloat16, [20.0, 19.0, 18.5, 3.0], False, 1e-6),
    (torch.float32, [300.3, 299.7, 299.1, 2.0], False, 1e-6),
):
    x = torch.tensor([logits], dtype=dtype)
    weights, ids = names["_softmax_topk"](x, 2, renormalize)
    exact = x.double().softmax(1)
    exact = exact.gather(1, ids.long())
    exact = exact / exact.sum() if renormalize else exact
    error = ((weights - exact) / exact).abs().max().item()
    print(f"{dtype}, renormalize={renormalize}: {weights[0].tolist()}, exact {exact[0].tolist()}, error {error:.2e}")
    failed |= error > allowed
sys.exit(failed)
