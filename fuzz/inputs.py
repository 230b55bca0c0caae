"""The inputs of a case, on the CPU: what ``docs/operations.md`` lists for its operation and variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fuzz.case import Case
from fuzz.code_profiles import CODE_PROFILES
from fuzz.expert_maps import drawn_kind, expert_map
from fuzz.gemm_inputs import build_gemm, build_grouped_gemm
from fuzz.grammar import AMAX_SOURCES
from fuzz.moe_inputs import build_moe
from fuzz.philox import key_of, words
from fuzz.profiles import MATRIX_PROFILES, top_exponent
from fuzz.routing_inputs import LOGIT_PROFILES, bias_of, logits_matrix
from fuzz.scale_profiles import LAYOUT_PROFILES, SCALE_PROFILES
from fuzz.sites import Matrix, Site
from fuzz.values import ELEMENTS, FLOATS, Float, from_bits, integer, pow2, to_bits, unit
from references.layouts import pack, packed_dtype, padding_mask, plain_dtype

CHUNK = 2**16
"""Elements that are made at a time."""

FP32 = FLOATS["fp32"]
TORCH_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STORAGE: dict[int, Any] = {8: np.uint8, 16: np.int16, 32: np.int32}
_UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32}
_EXACT = ("pow2_edges", "rounding", "codes")  # profiles whose points need a power-of-two global scale


def build(case: Case, rows: slice | None = None) -> dict[str, Tensor]:
    """The named inputs of a case, a pure function of its text.

    rows: make only these rows (step 1) of the matrix or vector; scales come for the blocks that they touch, and
    single numbers stay those of the whole. The strides that ``stride`` names hold for the part. Raises ValueError for
    an empty range or another step, for ``scale_layout`` with ``direction=unpack``, whose input has no rows, and for
    GEMMs and expert layers, which have several matrices.
    """
    return _BUILDERS[case.operation](case, rows)


def row_count(case: Case) -> int:
    """The number of rows that ``rows`` of `build` counts."""
    names = {"ue8m0": "n", "scale_layout": "rows", "requantize": "n", "routing": "tokens", "moe": "tokens"}
    return case.integer(names.get(case.operation, "m"))


def block_of(case: Case) -> tuple[int, int]:
    """Rows and columns of a block of a quantised matrix; the whole matrix for ``tensor``."""
    word = "128x128" if case.operation == "requantize" else case["block"]
    if word == "tensor":
        return case.integer("m"), case.integer("k")
    height, width = word.split("x")
    return int(height), int(width)


def element_of(case: Case) -> str:
    """The element of the payload: ``e4m3`` or ``e2m1``."""
    return "e2m1" if case.variant in ("mxfp4", "nvfp4", "mxfp4_to_deepseek_fp8") else "e4m3"


def quantize_matrix(case: Case) -> Matrix:
    """The matrix ``x`` of a ``quantize`` case, as its profile sees it."""
    float_ = FLOATS[case["dtype"]]
    matrix = Matrix(
        text=case.text,
        name="x",
        seed=case.seed,
        rows=case.integer("m"),
        cols=case.integer("k"),
        block=block_of(case),
        float_=float_,
        element=ELEMENTS[element_of(case)],
        scale=case["scale"],
    )
    if case["scale"] != "static":
        return matrix
    exponent = top_exponent(matrix, case["values"]) - 8
    static = _positive(case, "scale", exponent, exact=case["values"] in _EXACT and case["dtype"] != "fp32")
    return Matrix(**{**matrix.__dict__, "static": static})


def _ue8m0(case: Case, rows: slice | None) -> dict[str, Tensor]:
    element = ELEMENTS[case["from"].removeprefix("amax_")] if case["from"] in AMAX_SOURCES else None
    profile = SCALE_PROFILES[case["values"]]
    matrix = Matrix(text=case.text, name="x", seed=case.seed, rows=case.integer("n"), cols=1)
    numbers = _make(matrix, rows, lambda site: profile(site, element), 32)
    return {"x": numbers[:, 0].view(torch.float32)}


def _quantize(case: Case, rows: slice | None) -> dict[str, Tensor]:
    matrix = quantize_matrix(case)
    profile = MATRIX_PROFILES[case["values"]]
    first, last = _range(rows, matrix.rows)
    x = strided((last - first, matrix.cols), case["stride"], matrix)
    amax = _fill(x, matrix, first, last, profile)
    inputs = {"x": x.view(TORCH_FLOATS[case["dtype"]])}
    if case["scale"] == "static":
        inputs["scale"] = torch.tensor([matrix.static], dtype=torch.float32)
    if case.variant == "nvfp4":
        exact = case["values"] in _EXACT
        if not exact and matrix.word("global_mode") % 3 == 0:
            for start in range(0, matrix.rows, _chunk_rows(matrix.cols)):
                if first == 0 and last == matrix.rows:
                    break  # x is the whole and its amax is known
                site = Site(matrix, start, min(start + _chunk_rows(matrix.cols), matrix.rows))
                amax = max(amax, _largest(profile(site), matrix.float_))
            scale = amax / (448.0 * 6.0)
            if scale == 0.0:
                scale = 1.0
        else:
            scale = _positive(case, "global_scale", top_exponent(matrix, case["values"]) - 11, exact=exact)
        inputs["global_scale"] = _fp32(scale)
    return inputs


def _dequantize(case: Case, rows: slice | None) -> dict[str, Tensor]:
    inputs = _stored(case, rows, case["scale"], FLOATS[case["out"]], block_of(case))
    if case.variant == "nvfp4":
        exponent = FLOATS[case["out"]].emin if case["values"] == "subnormal" else -8
        inputs["global_scale"] = _fp32(_positive(case, "global_scale", exponent, exact=False))
    return inputs


def _requantize(case: Case, rows: slice | None) -> dict[str, Tensor]:
    if case.variant == "mxfp4_to_deepseek_fp8":
        return _stored(case, rows, "ue8m0", FP32, (1, 32), merged=(128, 4))
    return _stored(case, rows, "fp32", FP32, (128, 128))


def _stored(
    case: Case,
    rows: slice | None,
    scale: str,
    output: Float,
    block: tuple[int, int],
    merged: tuple[int, int] = (1, 1),
) -> dict[str, Tensor]:
    """Payload and scales. merged: the blocks of the scale grid itself."""
    payload_profile, scale_profile = CODE_PROFILES[case["values"]]
    element = ELEMENTS[element_of(case)]
    payload = Matrix(
        text=case.text,
        name="payload",
        seed=case.seed,
        rows=row_count(case),
        cols=case.integer("k"),
        block=block,
        element=element,
        nans=case.operation != "requantize",
    )
    grid_rows, grid_cols = payload.grid
    grid = Matrix(
        **{
            **payload.__dict__,
            "name": "scales",
            "rows": grid_rows,
            "cols": grid_cols,
            "block": merged,
            "scale": scale,
            "float_": output,
        }
    )
    first, last = _range(rows, payload.rows)
    codes = _make(payload, rows, payload_profile, 8)
    if element.name == "e2m1":
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    touched = slice(first // block[0], (last - 1) // block[0] + 1)
    scales = _make(grid, touched, scale_profile, 32 if scale == "fp32" else 8)
    return {"payload": codes, "scales": scales.view(torch.float32) if scale == "fp32" else scales}


def _scale_layout(case: Case, rows: slice | None) -> dict[str, Tensor]:
    if case["direction"] == "unpack" and rows is not None:
        raise ValueError("rows: a packed tensor has none")
    dtype = plain_dtype(case.variant)
    width = 8 if dtype == torch.uint8 else 32
    profile = LAYOUT_PROFILES[case["values"]]
    matrix = Matrix(text=case.text, name="scales", seed=case.seed, rows=case.integer("rows"), cols=case.integer("cols"))
    plain = _make(matrix, rows, lambda site: profile(site, width), width).view(dtype)
    if case["direction"] == "pack":
        return {"scales": plain}
    packed = pack(plain, case.variant)
    padding = padding_mask(case.variant, matrix.rows, matrix.cols)
    # The slots as integers in place: bytes of an int32 come low first.
    slots = packed.view(torch.uint8 if width == 8 else torch.int32).view(padding.shape)
    count = int(padding.sum())
    garbage = (words(key_of(case.text, "padding"), 0, count) >> np.uint64(64 - width)).astype(np.uint32) | 1
    slots[padding] = _to_torch(garbage, width)
    return {"scales": packed.view(packed_dtype(case.variant))}


def _gemm(case: Case, rows: slice | None) -> dict[str, Tensor]:
    if rows is not None:
        raise ValueError("rows: a GEMM has two matrices")
    return build_grouped_gemm(case) if case.operation == "grouped_gemm" else build_gemm(case)


def _moe(case: Case, rows: slice | None) -> dict[str, Tensor]:
    if rows is not None:
        raise ValueError("rows: an expert layer has many matrices")
    return build_moe(case)


def _routing(case: Case, rows: slice | None) -> dict[str, Tensor]:
    matrix = logits_matrix(case)
    first, last = _range(rows, matrix.rows)
    logits = strided((last - first, matrix.cols), case["stride"], matrix)
    _fill(logits, matrix, first, last, LOGIT_PROFILES[case["values"]])
    bias = bias_of(case)
    found = {"logits": logits.view(TORCH_FLOATS[case["dtype"]])} | ({} if bias is None else {"bias": bias})
    if case["out"] == "local":
        mapped = case.text, case.integer("experts"), drawn_kind(case.text), case.integer("shared")
        found["expert_map"] = expert_map(*mapped)
    return found


_BUILDERS: dict[str, Callable[[Case, slice | None], dict[str, Tensor]]] = {
    "ue8m0": _ue8m0,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "scale_layout": _scale_layout,
    "requantize": _requantize,
    "gemm": _gemm,
    "grouped_gemm": _gemm,
    "routing": _routing,
    "moe": _moe,
}


def strided(shape: tuple[int, int], stride: str, matrix: Matrix) -> Tensor:
    """An integer matrix of the dtype's width with the memory layout that ``stride`` names.

    Memory beside the elements holds NaN, or the largest number under every other seed, so that a read there shows.
    """
    rows, cols = shape
    float_ = matrix.float_
    dtype = torch.int32 if float_.width == 32 else torch.int16
    if stride == "contiguous":
        return torch.empty(shape, dtype=dtype)
    if stride == "transposed":
        return torch.empty((cols, rows), dtype=dtype).t()
    garbage = float_.inf - 1 if matrix.seed % 2 else float_.inf | (float_.mantissa + 1) >> 1
    extra = (1, 8, 16, 64)[matrix.word("stride") % 4]
    if stride == "padded":
        return torch.full((rows, cols + extra), garbage, dtype=dtype)[:, :cols]
    return torch.full((extra + rows * cols + extra,), garbage, dtype=dtype)[extra : extra + rows * cols].view(shape)


def _positive(case: Case, name: str, exponent: int, *, exact: bool) -> float:
    """A positive FP32 number: a power of two for half of the cases (all if exact), else with an arbitrary mantissa."""
    key = key_of(case.text, name)
    pick = words(key, 0, 1)
    power = pow2(np.array([max(exponent, FP32.emin)]))
    if not exact and int(integer(words(key, 1, 1), 2)[0]):
        power = (1.0 + unit(pick)) * power
    return float(from_bits(to_bits(power, FP32), FP32)[0])


def _fp32(number: float) -> Tensor:
    """One number as float32 ``[1]``, kept normal."""
    bits = to_bits(np.array([max(number, 2.0**FP32.emin)]), FP32)
    return _to_torch(bits, 32).view(torch.float32)


def _make(matrix: Matrix, rows: slice | None, profile: Callable[[Site], npt.NDArray[Any]], width: int) -> Tensor:
    first, last = _range(rows, matrix.rows)
    dtype = {8: torch.uint8, 32: torch.int32}[width]
    out = torch.empty((last - first, matrix.cols), dtype=dtype)
    target = _unsigned(out, width)
    step = _chunk_rows(matrix.cols)
    for start in range(first, last, step):
        stop = min(start + step, last)
        target[start - first : stop - first] = profile(Site(matrix, start, stop))
    return out


def _fill(out: Tensor, matrix: Matrix, first: int, last: int, profile: Callable[[Site], Any]) -> float:
    """Fill ``out`` with rows first..last and return the largest finite magnitude."""
    largest = 0.0
    target = _unsigned(out, matrix.float_.width)
    step = _chunk_rows(matrix.cols)
    for start in range(first, last, step):
        stop = min(start + step, last)
        bits = profile(Site(matrix, start, stop))
        target[start - first : stop - first] = bits
        largest = max(largest, _largest(bits, matrix.float_))
    return largest


def _largest(bits: npt.NDArray[Any], float_: Float) -> float:
    magnitude = bits & (float_.sign - 1)
    return float(from_bits(magnitude[magnitude < float_.inf].max(initial=0), float_))


def _chunk_rows(cols: int) -> int:
    return max(1, CHUNK // cols)


def _range(rows: slice | None, count: int) -> tuple[int, int]:
    first, last, step = (rows or slice(None)).indices(count)
    if step != 1 or first >= last:
        raise ValueError(f"rows: {rows} of {count} is empty or has a step")
    return first, last


def _unsigned(out: Tensor, width: int) -> npt.NDArray[Any]:
    """A tensor's memory as NumPy's: torch would wake all of its threads for every small copy."""
    return out.numpy().view(_UNSIGNED[width])


def _to_torch(bits: npt.NDArray[Any], width: int) -> Tensor:
    """Bits as an integer tensor: uint8, or int16 and int32 of the same bits."""
    unsigned = bits.astype(_UNSIGNED[width])
    return torch.from_numpy(np.ascontiguousarray(unsigned).view(_STORAGE[width]))
