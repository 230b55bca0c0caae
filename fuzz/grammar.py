"""The parameters of every operation: which keys a case has, and which values they take.

This table is what `fuzz.case` checks a case against and what `fuzz.strategies` draws from; an operation that is added
gets its rows here. torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from references.backend import NORMAL_VALUES

MAX_ELEMENTS = 2**32
"""Largest tensor, in elements, that a case may ask for."""


@dataclass(frozen=True)
class Choice:
    """One of some words."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Size:
    """An integer within ``least..most``, a multiple of ``multiple``."""

    least: int = 1
    most: int = 2**31 - 1
    multiple: int = 1


def _anything(given: Mapping[str, str]) -> str | None:
    return None


@dataclass(frozen=True)
class Rule:
    """The keys of one operation and variant, and a check across them that returns a problem or None."""

    keys: Mapping[str, Choice | Size]
    check: Callable[[Mapping[str, str]], str | None] = _anything


def _fits(*names: str) -> Callable[[Mapping[str, str]], str | None]:
    def check(given: Mapping[str, str]) -> str | None:
        count = 1
        for name in names:
            count *= int(given[name])
        if count > MAX_ELEMENTS:
            return f"{' x '.join(f'{name}={given[name]}' for name in names)} is more than {MAX_ELEMENTS} elements"
        return None

    return check


AMAX_SOURCES = ("amax_e4m3", "amax_e5m2", "amax_e2m1", "amax_e2m3", "amax_e3m2")
UE8M0_POLICIES = {
    "ceil": ("scale", *AMAX_SOURCES),
    "ceil_clamped": ("scale", *AMAX_SOURCES),
    "floor": ("scale", *AMAX_SOURCES),
    "ceil_amax": AMAX_SOURCES,
    "even": AMAX_SOURCES,
    "nearest": ("scale",),
}
MX_POLICIES = ("ceil", "floor", "ceil_amax", "even")
FORMATS = ("deepseek_fp8", "mxfp8", "mxfp4", "nvfp4", "fp8_per_tensor")
FLOATS = ("fp32", "bf16", "fp16")
STRIDES = ("contiguous", "transposed", "padded", "offset")
"""Memory layout of a matrix input: row-major; column-major; rows further apart than they are long; a view that does
not start at its storage's beginning."""

SCALE_VALUES = ("boundary", "special", "pow2_edges", "uniform_bits", "wide", "normal")
MATRIX_VALUES = (
    "normal",
    "uniform_bits",
    "wide",
    "scale_ladder",
    "pow2_edges",
    "rounding",
    "outliers",
    "cancellation",
    "codes",
    "zeros",
    "zero_blocks",
    "subnormal",
    "negative",
    "constant",
)
STATIC_VALUES = (*MATRIX_VALUES, "overflow", "nonfinite")
CODE_VALUES = ("codes", "random_codes", "scale_ladder", "extreme_scales", "zeros", "nonfinite", "subnormal")
OVERFLOWING = (*CODE_VALUES, "overflow")
"""For stored weights that are quantised again: some blocks overflow FP32 on the way."""
LAYOUT_VALUES = ("index", "uniform_bits", "nonfinite")

BLOCKS = {
    "deepseek_fp8": ("1x128", "128x128"),
    "mxfp8": ("1x32",),
    "mxfp4": ("1x32",),
    "nvfp4": ("1x16",),
    "fp8_per_tensor": ("tensor",),
}
QUANT_SCALES = {
    "deepseek_fp8": ("fp32", "ceil"),
    "mxfp8": MX_POLICIES,
    "mxfp4": MX_POLICIES,
    "nvfp4": ("e4m3",),
    "fp8_per_tensor": ("fp32", "static"),
}
STORED_SCALES = {
    "deepseek_fp8": ("fp32", "ue8m0"),
    "mxfp8": ("ue8m0",),
    "mxfp4": ("ue8m0",),
    "nvfp4": ("e4m3",),
    "fp8_per_tensor": ("fp32",),
}

GEMM_VALUES = (*NORMAL_VALUES, "subnormal")
END_SCALES = {"mxfp8": ("end_scales",)}
"""Formats whose codes are fine enough for scales of 2^-127 and 2^127 without an overflow in any order."""
GEMM_FORMATS = ("deepseek_fp8", "mxfp8", "w4a8", "w4a16", "nvfp4", "fp8_per_tensor", "bf16", "fp16")
GEMM_SCALES = {
    "deepseek_fp8": ("fp32", "ue8m0"),
    "mxfp8": ("ue8m0",),
    "w4a8": ("ue8m0",),
    "w4a16": ("ue8m0",),
    "nvfp4": ("e4m3",),
    "fp8_per_tensor": ("fp32",),
    "bf16": ("none",),
    "fp16": ("none",),
}
GEMM_LAYOUTS = {
    "deepseek_fp8": ("plain", "mn_major"),
    **dict.fromkeys(("mxfp8", "w4a8", "w4a16", "nvfp4"), ("plain", "interleave_128x4")),
    **dict.fromkeys(("fp8_per_tensor", "bf16", "fp16"), ("plain",)),
}
"""Stored order of the scales: ``mn_major`` is DeepGEMM's for the activation, packed to int32 where scales are UE8M0."""
GEMM_OUT = ("bf16", "fp32")
GROUPINGS = ("contiguous", "contiguous_128", "masked")
"""Where the rows of a group lie: one group after another; each from a multiple of 128; each in a slab of its own."""


def _columns(variant: str) -> Size:
    return Size(multiple=2) if variant in ("mxfp4", "nvfp4") else Size()


def _quantize_check(given: Mapping[str, str]) -> str | None:
    if given["values"] in ("overflow", "nonfinite") and given["scale"] != "static":
        return f"values={given['values']} needs scale=static: the contract is silent on it elsewhere"
    return _fits("m", "k")(given)


def _ue8m0(policy: str) -> Rule:
    return Rule(
        {"from": Choice(UE8M0_POLICIES[policy]), "n": Size(most=2**32), "values": Choice(SCALE_VALUES)},
    )


def _quantize(variant: str) -> Rule:
    keys: dict[str, Choice | Size] = {
        "block": Choice(BLOCKS[variant]),
        "dtype": Choice(FLOATS),
        "k": _columns(variant),
        "m": Size(),
        "scale": Choice(QUANT_SCALES[variant]),
        "stride": Choice(STRIDES),
        "values": Choice(STATIC_VALUES if variant == "fp8_per_tensor" else MATRIX_VALUES),
    }
    return Rule(keys, _quantize_check)


def _dequantize(variant: str) -> Rule:
    keys: dict[str, Choice | Size] = {
        "block": Choice(BLOCKS[variant]),
        "k": _columns(variant),
        "m": Size(),
        "out": Choice(FLOATS),
        "scale": Choice(STORED_SCALES[variant]),
        "values": Choice(CODE_VALUES),
    }
    return Rule(keys, _fits("m", "k"))


def _scale_layout() -> Rule:
    keys: dict[str, Choice | Size] = {
        "cols": Size(),
        "direction": Choice(("pack", "unpack")),
        "rows": Size(),
        "values": Choice(LAYOUT_VALUES),
    }
    return Rule(keys, _fits("rows", "cols"))


def _gemm_check(given: Mapping[str, str]) -> str | None:
    groups = int(given.get("groups", "1"))
    m, n, k = (int(given[key]) for key in ("m", "n", "k"))
    rows = m * groups if given.get("grouping") == "masked" else m
    if max(rows * k, groups * n * k, rows * n) > MAX_ELEMENTS:
        return f"m={m} n={n} k={k}: a matrix has more than {MAX_ELEMENTS} elements"
    return None


def _gemm(variant: str, *, grouped: bool = False) -> Rule:
    keys: dict[str, Choice | Size] = {
        "k": Size(multiple=2) if variant in ("w4a8", "w4a16", "nvfp4") else Size(),
        "layout": Choice(GEMM_LAYOUTS[variant]),
        "m": Size(),
        "n": Size(),
        "out": Choice(GEMM_OUT),
        "scale": Choice(GEMM_SCALES[variant]),
        "values": Choice((*GEMM_VALUES, *END_SCALES.get(variant, ()))),
    }
    if grouped:
        keys |= {"grouping": Choice(GROUPINGS), "groups": Size(most=4096)}
    return Rule(keys, _gemm_check)


MOE_VALUES = ("normal", "scale_ladder", "outliers", "cancellation", "saturated", "zeros")
MOE_IDS = ("spread", "skewed", "elsewhere", "map_linear", "map_any")
"""Ids of experts here; with -1 among them; of the experts of all ranks, with a map to those that are here."""
RANKS = 3
"""Ranks that a layer's experts are spread over where there is a map."""
MOE_SCALES = {
    "deepseek_fp8": ("fp32", "ceil"),
    "mxfp8": MX_POLICIES,
    "w4a8": MX_POLICIES,
    "w4a16": ("none",),
    "nvfp4": ("e4m3",),
    "fp8_per_tensor": ("fp32",),
    "bf16": ("none",),
}
"""How the activations of an expert layer are scaled; weights have FP32 scales under ``fp32``, UE8M0 under a policy."""


def _moe_check(given: Mapping[str, str]) -> str | None:
    experts, topk, tokens, hidden, inner = (
        int(given[key]) for key in ("experts", "topk", "tokens", "hidden", "intermediate")
    )
    if topk > experts:
        return f"topk={topk} is above experts={experts}"
    if max(2 * experts * hidden * inner, tokens * topk * max(hidden, 2 * inner)) > MAX_ELEMENTS:
        return f"hidden={hidden} intermediate={inner}: a tensor has more than {MAX_ELEMENTS} elements"
    return None


def _moe(variant: str) -> Rule:
    width = Size(multiple=2) if variant in ("w4a8", "w4a16", "nvfp4") else Size()
    keys: dict[str, Choice | Size] = {
        "experts": Size(most=MAX_EXPERTS),
        "gate": Choice(("first", "second")),
        "hidden": width,
        "ids": Choice(MOE_IDS),
        "intermediate": width,
        "limit": Choice(("none", "7")),
        "out": Choice(GEMM_OUT),
        "scale": Choice(MOE_SCALES[variant]),
        "scaling": Choice(("1", "2.5")),
        "tokens": Size(most=2**20),
        "topk": Size(most=32),
        "values": Choice(MOE_VALUES),
        "weight": Choice(("output", "input")),
    }
    return Rule(keys, _moe_check)


LAYOUTS = ("interleave_128x4", "mn_major", "mn_major_packed", "k_major")


@dataclass(frozen=True)
class Router:
    """The keys that a routing method adds; ``pair`` asks for groups of at least two experts."""

    biased: bool = False
    grouped: bool = False
    pair: bool = False
    scaled: bool = False
    renormalize: bool = False
    max_topk: int = 32


ROUTERS: Mapping[str, Router] = {
    "Default": Router(),
    "Renormalize": Router(),
    "RenormalizeNaive": Router(),
    "DeepSeekV3": Router(biased=True, grouped=True, pair=True, scaled=True, renormalize=True),
    "Llama4": Router(max_topk=1),
    "TopK": Router(),
    "SigmoidRenorm": Router(),
    "MiniMax2": Router(biased=True, scaled=True),
    "SqrtSoftplus": Router(biased=True, scaled=True, renormalize=True),
    "Sigmoid": Router(),
    "TopKSigmoid": Router(),
    "GroupedTopK": Router(grouped=True, scaled=True, renormalize=True),
}
"""Routing method -> its keys; ``references.routing.METHODS`` says what the methods compute."""
MAX_EXPERTS = 512
ROUTER_VALUES = (
    "normal",
    "ties",
    "all_equal",
    "all_negative",
    "saturated",
    "wide",
    "near_ties",
    "group_ties",
    "nonfinite",
    "zero",
)


def _router_check(router: Router) -> Callable[[Mapping[str, str]], str | None]:
    def check(given: Mapping[str, str]) -> str | None:
        experts, topk = int(given["experts"]), int(given["topk"])
        groups, kept = int(given.get("groups", "1")), int(given.get("topk_group", "1"))
        if experts % groups or kept > groups:
            return f"topk_group={kept} of groups={groups} does not divide experts={experts}"
        if router.pair and kept < groups and experts // groups < 2:
            return f"groups={groups} of experts={experts} hold fewer than two experts"
        if topk > experts // groups * kept:
            return f"topk={topk} is above the {experts // groups * kept} experts of the kept groups"
        return _fits("experts", "tokens")(given)

    return check


def _routing(router: Router) -> Rule:
    keys: dict[str, Choice | Size] = {
        "dtype": Choice(FLOATS),
        "experts": Size(most=MAX_EXPERTS),
        "out": Choice(("fp32", "bf16", "fp16", "packed", "local")),
        "padding": Choice(("none", "some")),
        "shared": Choice(("0", "1", "2")),
        "stride": Choice(STRIDES),
        "tokens": Size(most=2**16),
        "topk": Size(most=router.max_topk),
        "values": Choice(ROUTER_VALUES),
    }
    if router.biased:
        keys |= {"bias": Choice(("0", "0.1", "12", "1e4")), "bias_dtype": Choice(("fp32", "bf16"))}
    if router.grouped:
        keys |= {"groups": Size(most=MAX_EXPERTS), "topk_group": Size(most=MAX_EXPERTS)}
    if router.scaled:
        keys |= {"scaling": Choice(("1", "2.5", "16"))}
    if router.renormalize:
        keys |= {"renormalize": Choice(("on", "off"))}
    return Rule(dict(sorted(keys.items())), _router_check(router))


GRAMMAR: Mapping[str, Mapping[str, Rule]] = {
    "ue8m0": {policy: _ue8m0(policy) for policy in UE8M0_POLICIES},
    "quantize": {variant: _quantize(variant) for variant in FORMATS},
    "dequantize": {variant: _dequantize(variant) for variant in FORMATS},
    "scale_layout": {layout: _scale_layout() for layout in LAYOUTS},
    "requantize": {
        "deepseek_fp8": Rule(
            {"k": Size(), "n": Size(), "scale": Choice(("ceil",)), "values": Choice(OVERFLOWING)}, _fits("n", "k")
        ),
        "mxfp4_to_deepseek_fp8": Rule(
            {"k": Size(multiple=128), "n": Size(multiple=128), "values": Choice(CODE_VALUES)}, _fits("n", "k")
        ),
    },
    "gemm": {variant: _gemm(variant) for variant in GEMM_FORMATS},
    "grouped_gemm": {variant: _gemm(variant, grouped=True) for variant in GEMM_FORMATS},
    "routing": {method: _routing(router) for method, router in ROUTERS.items()},
    "moe": {variant: _moe(variant) for variant in MOE_SCALES},
}
"""operation -> variant -> `Rule`."""
