import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
K = 257  # XLA takes another kernel for other sizes; the columns up to 384 are zeros


def operand(rows):
    codes = np.pad(rng.normal(size=(1, rows, K)), ((0, 0), (0, 0), (0, 384 - K)))
    return jnp.asarray(codes, jnp.float8_e4m3fn), jnp.asarray(rng.uniform(1, 2, size=(1, rows, 3)), jnp.float32)


(a, a_scales), (b, b_scales) = operand(731), operand(4)
with jax.default_matmul_precision("highest"):
    actual = np.asarray(jax.nn.scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=jnp.float32))[0]


def dequantised(codes, scales, dtype):
    return np.asarray(codes.astype(jnp.float32))[0].astype(dtype) * np.asarray(scales)[0].astype(dtype).repeat(128, 1)


exact = dequantised(a, a_scales, np.float64) @ dequantised(b, b_scales, np.float64).T
fp32 = dequantised(a, a_scales, np.float32) @ dequantised(b, b_scales, np.float32).T
worst = np.unravel_index(np.abs(actual - exact).argmax(), exact.shape)
print(jax.__version__, jax.devices()[0])
print("exact   ", exact[worst])
print("actual  ", actual[worst], "largest error", np.abs(actual - exact).max())
print("FP32    ", fp32[worst], "largest error", np.abs(fp32 - exact).max())
sys.exit(bool(np.abs(actual - exact).max() > 16 * np.abs(fp32 - exact).max()))
