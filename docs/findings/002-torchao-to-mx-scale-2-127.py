import sys

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

# 2^-120 lies in a block whose scale under the OCP rule is 2^-128, below the smallest UE8M0 number 2^-127 (code 0).
x = torch.zeros(1, 32)
x[0, 0] = 2.0**-120
failed = False
for mode in (
    ScaleCalculationMode.FLOOR,
    ScaleCalculationMode.CEIL,
    ScaleCalculationMode.EVEN,
    ScaleCalculationMode.RCEIL,
):
    scale, data = to_mx(x, torch.float8_e4m3fn, 32, mode)
    code, payload = scale.view(torch.uint8).item(), data.float()[0, 0].item()
    value = payload * 2.0 ** (code - 127)
    print(f"{mode.name}: scale code {code}, payload {payload}, product {value} of {2.0**-120}")
    failed |= value != 2.0**-120
sys.exit(failed)
