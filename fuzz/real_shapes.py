"""The sizes of models in use: DeepSeek-V3, Llama 4 and Qwen3, from one token to 8192; an output past 2^31 elements.

SqrtSoftplus is DeepSeek-V4's router: six of 384 experts.

Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping

from fuzz.case import Case
from fuzz.grammar import GRAMMAR, Choice

Sizes = Mapping[str, int]

PROFILES = (
    "normal",
    "outliers",
    "wide",
    "cancellation",
    "scale_ladder",
    "random_codes",
    "uniform_bits",
    "index",
    "ties",
)
"""Profiles that suit large tensors, in order of preference."""
_MATRICES = (
    {"m": 1, "k": 7168},  # DeepSeek-V3: hidden size
    {"m": 4096, "k": 7168},
    {"m": 8192, "k": 2048},  # DeepSeek-V3: an expert's intermediate size; Qwen3-30B: hidden size
    {"m": 2048, "k": 5120},  # Llama 4: hidden size
    {"m": 257, "k": 8192},  # Llama 4: an expert's intermediate size
    {"m": 8192, "k": 768},  # Qwen3-30B: an expert's intermediate size
)
_GEMMS = (
    {"m": 1, "n": 7168, "k": 2048},  # DeepSeek-V3: FC2 of an expert
    {"m": 64, "n": 2112, "k": 7168},  # DeepSeek-V3: query and key-value down-projections
    {"m": 4096, "n": 4096, "k": 7168},  # DeepSeek-V3: FC1 of an expert
    {"m": 8192, "n": 7168, "k": 2048},
    {"m": 128, "n": 7168, "k": 5120},  # Llama 4: query, key and value
    {"m": 512, "n": 5120, "k": 8192},  # Llama 4: FC2 of an expert
    {"m": 16, "n": 3072, "k": 4096},  # Qwen3-235B: FC1 of an expert
    {"m": 2048, "n": 4096, "k": 1536},  # Qwen3-235B: FC2 of an expert
    {"m": 8192, "n": 2048, "k": 768},  # Qwen3-30B: FC2 of an expert
)
_VAST = {"m": 65552, "n": 32784, "k": 128}
"""An output of more than 2^31 elements from small operands."""
_GROUPED = (
    {"groups": 2, "m": 256, "n": 4096, "k": 7168},
    {"groups": 4, "m": 512, "n": 7168, "k": 2048},
    {"groups": 2, "m": 128, "n": 5120, "k": 8192},
    {"groups": 4, "m": 1024, "n": 3072, "k": 4096},
    {"groups": 16, "m": 384, "n": 1536, "k": 2048},
)
_WEIGHTS = (
    {"n": 4096, "k": 7168},
    {"n": 7168, "k": 2048},
    {"n": 5120, "k": 8192},
    {"n": 4096, "k": 1536},
    {"n": 2048, "k": 768},
)
_GRIDS = (
    {"rows": 1, "cols": 56},
    {"rows": 8192, "cols": 56},
    {"rows": 4096, "cols": 224},
    {"rows": 7168, "cols": 64},
    {"rows": 257, "cols": 40},
)
_LAYERS = (  # as many experts as a GPU holds where they are spread
    {"experts": 8, "hidden": 7168, "intermediate": 2048, "tokens": 64, "topk": 8},  # DeepSeek-V3: 8 of 256 experts
    {"experts": 32, "hidden": 7168, "intermediate": 256, "tokens": 16, "topk": 8},  # DeepSeek-V3: an eighth of each
    {"experts": 16, "hidden": 5120, "intermediate": 1024, "tokens": 128, "topk": 1},  # Llama 4: an eighth of each
    {"experts": 16, "hidden": 4096, "intermediate": 1536, "tokens": 1, "topk": 8},  # Qwen3-235B
    {"experts": 32, "hidden": 2048, "intermediate": 768, "tokens": 257, "topk": 8},  # Qwen3-30B
)
_SCALES = (
    {"n": 1 * 56},  # DeepSeek-V3: a token's block scales
    {"n": 8192 * 56},
    {"n": 4096 * 224},  # the same under MXFP8
    {"n": 5120 * 256},  # Llama 4: the weights of an expert
    {"n": 2**24},
)
_ROUTED = ({"tokens": 1}, {"tokens": 64}, {"tokens": 257}, {"tokens": 4096}, {"tokens": 8192})
_ROUTERS: Mapping[str, Sizes] = {
    "DeepSeekV3": {"experts": 256, "topk": 8, "groups": 8, "topk_group": 4},
    "GroupedTopK": {"experts": 256, "topk": 8, "groups": 8, "topk_group": 4},
    "Llama4": {"experts": 128, "topk": 1},
    "SqrtSoftplus": {"experts": 384, "topk": 6},
}
_QWEN3: Sizes = {"experts": 128, "topk": 8}
_SIZES: Mapping[str, tuple[Sizes, ...]] = {
    "quantize": _MATRICES,
    "dequantize": _MATRICES,
    "gemm": _GEMMS,
    "grouped_gemm": _GROUPED,
    "requantize": _WEIGHTS,
    "scale_layout": _GRIDS,
    "routing": _ROUTED,
    "moe": _LAYERS,
    "ue8m0": _SCALES,
}


def real_cases(operation: str, variant: str, *, vast: bool = False) -> list[Case]:
    """The cases of real sizes of an operation and variant, their other words in turn; none where there is no table.

    vast: the output past 2^31 elements as well, which takes 10 GiB here and there. A combination of words that the
    grammar refuses is left out. Of expert layers there are as many experts as fit beside each other in 1 GiB of FP8.
    """
    sizes: list[Sizes] = list(_SIZES.get(operation, ()))
    if vast and operation == "gemm" and variant in ("deepseek_fp8", "bf16"):
        sizes.append(_VAST)
    words = {
        key: domain.values for key, domain in GRAMMAR[operation][variant].keys.items() if isinstance(domain, Choice)
    }
    profiles = [word for word in PROFILES if word in words["values"]] or list(words["values"])
    found = []
    for index, size in enumerate(sizes):
        given = dict(size)
        if operation == "routing":
            given |= _ROUTERS.get(variant, _QWEN3)
        picked = {key: list_[(index + place) % len(list_)] for place, (key, list_) in enumerate(sorted(words.items()))}
        picked["values"] = profiles[index % len(profiles)]
        if size is _VAST:
            picked |= {"out": "bf16", "layout": "plain"}
        params = tuple(sorted({**picked, **{key: str(number) for key, number in given.items()}}.items()))
        if GRAMMAR[operation][variant].check(dict(params)) is None:
            found.append(Case(operation, variant, params, index))
    return found
