"""A correction of Triton's interpreter, put in place for the backend that says so in its name.

Triton 3.6 to 3.9 (`triton.runtime.interpreter`):
- ``_convert_float`` rounds half up instead of half to even, drops the carry out of the mantissa (7.93 becomes 4.0 in
  E4M3), turns NaN into 384 there, truncates where its caller names no rounding mode (FP32 to BF16), reads an E4M3 NaN
  as 480, and a BF16 subnormal such as 2^-127 as 0 (triton-lang/triton#8322, #9808, #11897);
- ``create_dot`` multiplies the raw 16-bit words of BF16 operands.
Both are replaced here. Casts go through torch, E4M3 and E5M2 saturating as ``cvt.rn.satfinite`` does on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_WORDS: dict[int, Any] = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}


def correct_interpreter() -> None:
    """Replace ``_convert_float`` and ``InterpreterBuilder.create_dot``; RuntimeError if Triton has neither any more."""
    shipped = getattr(interpreter, "_convert_float", None)
    if shipped is None or not hasattr(interpreter.InterpreterBuilder, "create_dot"):
        raise RuntimeError(
            "triton.runtime.interpreter has no _convert_float or create_dot: the correction does not fit"
        )
    if getattr(shipped, "corrected", False):
        return

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        towards_zero = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if source not in _TORCH or target not in _TORCH or towards_zero:
            return shipped(data, source, target, rounding)
        words = np.ascontiguousarray(data).view(_WORDS[source.primitive_bitwidth])
        values = torch.from_numpy(words.copy()).view(_TORCH[source])
        if target in _LARGEST:
            values = values.float().clamp(-_LARGEST[target], _LARGEST[target])
        bits = values.to(_TORCH[target]).view(torch.from_numpy(np.empty(0, _WORDS[target.primitive_bitwidth])).dtype)
        return bits.numpy().view(f"uint{target.primitive_bitwidth}").reshape(np.shape(data))

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        operands = []
        for operand in (a, b):
            if operand.dtype.is_floating() and operand.dtype in (tl.bfloat16, *_LARGEST):
                operands.append(convert(operand.data, operand.dtype, tl.float32, None).view(np.float32))
            else:
                operands.append(operand.data.astype(d.data.dtype))
        return interpreter.TensorHandle(np.matmul(*operands).astype(d.data.dtype) + d.data, d.dtype.scalar)

    convert.corrected = True  # type: ignore[attr-defined]
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot
