"""The inputs of ``moe`` cases, on the CPU: BF16 activations, quantised expert weights, ids and router weights.

Weights are scaled so that gate and up are a few units large for activations of N(0, 1), where silu is neither flat nor
linear. Profiles are those of GEMM operands (`fuzz.gemm_profiles`), and one more: ``saturated`` makes activations 1 and
2, gates that are 0 or at least 32, everything else small integers and router weights powers of two, so that under
power-of-two scales hardly anything is ever rounded and hardly any error is admissible.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fuzz.case import Case
from fuzz.expert_maps import drawn_kind, expert_map
from fuzz.extent import is_large
from fuzz.gemm_inputs import fill
from fuzz.gemm_profiles import GEMM_PROFILES, to_codes
from fuzz.grammar import RANKS
from fuzz.philox import key_of, words
from fuzz.sites import Matrix, Site, ladder
from fuzz.values import ELEMENTS, FLOATS, Integers, Reals, coin, from_bits, integer, pow2, to_bits, unit
from references.gemm_formats import Side
from references.moe.config import config_of

MOST_THREADS = 8
"""That draw the experts of a large layer."""
GATE_EXPONENT = 5
"""Under ``saturated`` every gate is a multiple of 2^5."""


def build_moe(case: Case) -> dict[str, Tensor]:
    """``x``, ``ids``, ``weights``, ``w1`` and ``w2`` with their scales, and the given scales of activations."""
    found = {"x": _activations(case), "ids": _ids(case), "weights": _router_weights(case)}
    if is_mapped(case):
        kind = "linear" if case["ids"] == "map_linear" else drawn_kind(case.text, ("round_robin", "shuffled"))
        found["expert_map"] = expert_map(case.text, RANKS * case.integer("experts"), kind)
    numbers = range(case.integer("experts"))
    if is_large(case):
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:  # NumPy lets go of the interpreter
            experts = list(pool.map(partial(_expert, case), numbers))
    else:
        experts = [_expert(case, expert) for expert in numbers]
    found |= {name: torch.stack([expert[name] for expert in experts]) for name in experts[0]}
    for name, exponent in (("x", -7), ("h", -4)):
        if case.variant == "fp8_per_tensor":
            found[f"{name}_scale"] = _positive(case, f"{name}_scale", exponent)
        elif case.variant == "nvfp4":
            # 448 * 6 * global is the largest number.
            found[f"{name}_global_scale"] = _positive(case, f"{name}_global_scale", exponent - 3)
    return found


def _activations(case: Case) -> Tensor:
    bf16 = FLOATS["bf16"]
    # Profiles know the operand that pairs with a weight by the name of a GEMM's first operand.
    matrix = Matrix(
        text=f"{case.text} x",
        name="a",
        seed=case.seed,
        rows=case.integer("tokens"),
        cols=case.integer("hidden"),
        float_=bf16,
    )
    values = case["values"]
    if values == "saturated":
        return fill(matrix, lambda site: to_bits(1.0 + coin(site.words()), bf16), 16).view(torch.bfloat16)
    profile = GEMM_PROFILES["normal" if values == "scale_ladder" else values]
    return fill(matrix, lambda site: to_bits(profile(site), bf16), 16).view(torch.bfloat16)


def is_mapped(case: Case) -> bool:
    """Whether ids name the experts of all ranks, and ``expert_map`` those that are here."""
    return case["ids"] in ("map_linear", "map_any")


def _ids(case: Case) -> Tensor:
    """Distinct experts of each token, int32 ``[tokens, topk]``.

    ``spread``: any; ``skewed``: the same for every token, so that the other experts stay empty; ``elsewhere``: about a
    third are -1, one token has none but those. ``map_linear``, ``map_any``: any of all ranks' experts, one in eight -1.
    """
    tokens, experts, topk = (case.integer(key) for key in ("tokens", "experts", "topk"))
    if is_mapped(case):
        experts *= RANKS
    skewed = case["ids"] == "skewed"
    drawn = words(key_of(case.text, "ids"), 0, (1 if skewed else tokens) * experts).reshape(-1, experts)
    ids = np.argsort(drawn, axis=1, kind="stable")[:, :topk].repeat(tokens if skewed else 1, axis=0).astype(np.int32)
    if case["ids"] == "elsewhere":
        gone = integer(words(key_of(case.text, "elsewhere"), 0, tokens * topk), 3).reshape(tokens, topk) == 0
        if tokens > 1:
            gone[case.seed % tokens] = True
        ids[gone] = -1
    if is_mapped(case):
        ids[integer(words(key_of(case.text, "elsewhere"), 0, tokens * topk), 8).reshape(tokens, topk) == 0] = -1
    return torch.from_numpy(np.ascontiguousarray(ids))


def _router_weights(case: Case) -> Tensor:
    """float32 ``[tokens, topk]`` of 0 to 2 / topk or a little more; powers of two under ``saturated``."""
    shape = case.integer("tokens"), case.integer("topk")
    drawn = words(key_of(case.text, "weights"), 0, shape[0] * shape[1]).reshape(shape)
    if case["values"] == "saturated":
        numbers = pow2(-1 - integer(drawn, 3))
    else:
        numbers = (unit(drawn) + 2.0**-6) * pow2(np.array(2 - shape[1].bit_length()))
    return torch.from_numpy(to_bits(numbers, FLOATS["fp32"]).view(np.int32)).view(torch.float32)


def _expert(case: Case, expert: int) -> dict[str, Tensor]:
    hidden, inner = case.integer("hidden"), case.integer("intermediate")
    side = config_of(case).sides[1]
    found: dict[str, Tensor] = {}
    for name, rows, cols in (("w1", 2 * inner, hidden), ("w2", hidden, inner)):
        found |= _weight(case, f"{case.text} {expert} {name}", name, side, rows, cols)
    return found


def _weight(case: Case, text: str, name: str, side: Side, rows: int, cols: int) -> dict[str, Tensor]:
    values = case["values"]
    element = ELEMENTS[side.name] if side.element else ELEMENTS["e4m3"]
    matrix = Matrix(
        text=text,
        name="b",
        seed=case.seed,
        rows=rows,
        cols=cols,
        float_=FLOATS["fp32" if side.element else "bf16"],
        element=element,
    )
    exact = values == "saturated"
    # Codes of N(0, qmax / 4), BF16 numbers of N(0, 1): brought to N(0, 2 / sqrt(K)).
    level = {"e4m3": -6, "e2m1": 0, "bf16": 1}[side.name] - (cols.bit_length() - 1) // 2
    if exact:
        level = GATE_EXPONENT if name == "w1" else 0

    def numbers(site: Site) -> Reals:
        if exact:
            small = integer(site.words(), 5) - 2
            first, last = (0, rows // 2) if case["gate"] == "first" else (rows // 2, rows)
            gate = (name == "w1") & (site.row >= first) & (site.row < last)
            return np.where(gate, np.abs(small), small).astype(np.float64)
        return GEMM_PROFILES["normal" if values == "scale_ladder" else values](site)

    if side.element is None:
        scaled = fill(matrix, lambda site: to_bits(numbers(site) * pow2(np.array(level)), FLOATS["bf16"]), 16)
        return {name: scaled.view(torch.bfloat16)}
    codes = fill(matrix, lambda site: to_codes(numbers(site), element), 8)
    if side.element.bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    height, width = side.block or (rows, cols)
    grid = Matrix(text=text, name="scales", seed=case.seed, rows=-(-rows // height), cols=-(-cols // width))
    found = {name: codes}
    nested = side.scale == "e4m3"
    base = 0 if nested else level
    spread = 1 if exact else 3 if values != "scale_ladder" else 7 if name == "w1" else 13

    def stored(site: Site) -> Any:
        steps = ladder(site, base - spread // 2, spread) if spread > 1 else np.full(site.shape, base)
        return _scale_bits(site, steps, str(side.scale), exact)

    scales = fill(grid, stored, 32 if side.scale == "fp32" else 8)
    found[f"{name}_scales"] = scales.view(torch.float32) if side.scale == "fp32" else scales
    if nested:
        found[f"{name}_global_scale"] = _positive(case, f"{text} global", level, exact=exact)[0]
    return found


def _scale_bits(site: Site, exponents: Integers, kind: str, exact: bool) -> Any:
    """Stored scales of these exponents, with arbitrary mantissas where the format has any."""
    match kind:
        case "ue8m0":
            return np.asarray(exponents + 127, dtype=np.uint32)
        case "e4m3":
            eighths = 0 if exact else integer(site.words("mantissa"), 8)
            return np.asarray((exponents + 7) * 8 + eighths, dtype=np.uint32)
        case _:
            fraction = 0.0 if exact else unit(site.words("mantissa"))
            return to_bits((1.0 + fraction) * pow2(exponents), FLOATS["fp32"])


def _positive(case: Case, name: str, exponent: int, *, exact: bool = False) -> Tensor:
    """One positive FP32 number ``[1]``: a power of two for half of the names, and where ``exact``."""
    pick = words(key_of(case.text, name), 0, 1)
    power = pow2(np.array([exponent]))
    if not exact and case["values"] != "saturated" and bool(coin(pick)[0]):
        power = (1.0 + unit(pick)) * power
    return torch.tensor([float(from_bits(to_bits(power, FLOATS["fp32"]), FLOATS["fp32"])[0])], dtype=torch.float32)
