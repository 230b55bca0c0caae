import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
SHAPES = [(33, 92, 288), (4, 29569, 32), (7, 192, 320)]  # the first two are those that were seen


def operand(generator, rows, k, low):
    """E4M3 numbers of 1/16 to 7/64; scales of 2^-127 to 2^-125 and 2^125 to 2^127, block by block in turns."""
    numbers = generator.integers(4, 8, (1, rows, k)) / 64 * generator.choice((-1.0, 1.0), (1, rows, k))
    small, inward = np.arange(k // 32) % 2 == low, generator.integers(0, 3, (1, rows, k // 32))
    codes = np.where(small, inward, 254 - inward).astype(np.uint8)
    return numbers.astype(ml_dtypes.float8_e4m3fn), codes.view(ml_dtypes.float8_e8m0fnu)


def exact(numbers, scales):
    return numbers[0].astype(np.float64) * np.repeat(scales[0].astype(np.float64), 32, axis=1)


generator = np.random.default_rng(0)
compiled = failed = 0
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    if compiled < len(SHAPES):
        m, n, k = SHAPES[compiled]
    else:
        m, n, k = (
            int(generator.choice(sizes)) for sizes in ((4, 7, 16, 33, 64), (8, 92, 300, 1000), (64, 288, 320, 512))
        )
    a, b = operand(generator, m, k, 0), operand(generator, n, k, 1)
    arguments = [jax.device_put(part) for part in (a[0], b[0], a[1], b[1])]
    product = jax.jit(lambda *parts: jax.nn.scaled_matmul(*parts, preferred_element_type=jnp.float32))
    found = np.asarray(product(*arguments))[0]
    expected = exact(*a) @ exact(*b).T
    compiled += 1
    if (found == 0).mean() > 0.3:
        failed += 1
        print(
            f"[{m}, {k}] x [{n}, {k}]: {(found == 0).mean():.0%} zeros; first {found[0, 0]}, expected {expected[0, 0]}"
        )
print(f"{failed} of {compiled} compiled products flush operands below 2^-126, expected 0")
sys.exit(bool(failed))
