import importlib.metadata
import importlib.util
import sys

import torch

# The file alone: importing deep_gemm asks for CUDA.
path = importlib.metadata.distribution("sgl-deep-gemm").locate_file("deep_gemm/utils/math.py")
spec = importlib.util.spec_from_file_location("deep_gemm_math", path)
math = importlib.util.module_from_spec(spec)
spec.loader.exec_module(math)

# With an amax of 6 the scale is 1, and these numbers lie halfway between two E2M1 values.
x = torch.zeros(1, 32)
x[0, :7] = torch.tensor([0.75, 1.75, 3.5, -0.75, -1.75, -3.5, 6.0])
packed, scales = math.per_token_cast_to_fp4(x, True, gran_k=32)
actual = math.cast_back_from_fp4(packed, scales, gran_k=32)[0, :7].tolist()
expected = [1.0, 2.0, 4.0, -1.0, -2.0, -4.0, 6.0]
print("expected", expected)
print("actual  ", actual, "scale", scales.item())
sys.exit(actual != expected)
