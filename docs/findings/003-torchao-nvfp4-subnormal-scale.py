import sys

import torch
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

# A block of zeros but for one number, under a per-tensor scale of 2^-126: zeros must stay zeros.
x = torch.zeros(1, 16)
x[0, 0] = 2.0**-126
scales, data = nvfp4_quantize(x, 16, torch.tensor(2.0**-126))
values = f4_unpacked_to_f32(unpack_uint4(data.view(torch.uint8)))
print("payload", values.flatten().tolist(), "scale", scales.float().flatten().tolist())
sys.exit(bool((values.flatten()[1:] != 0).any()))
