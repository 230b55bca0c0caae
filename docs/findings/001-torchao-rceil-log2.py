import sys

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

# One block of 32 whose amax is the FP32 number above 448 * 2^18: the smallest power of two >= amax / 448 is 2^19.
amax = torch.nextafter(torch.tensor(448.0 * 2**18), torch.tensor(torch.inf))
x = torch.zeros(1, 32)
x[0, 0] = amax
scale, data = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
code = scale.view(torch.uint8).item()
print(f"amax = {amax.item()}: scale 2^{code - 127}, expected 2^19; payload {data.float()[0, 0].item()}")
sys.exit(code != 127 + 19)
