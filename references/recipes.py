"""Recipes: the legal choices that a backend makes where a contract leaves one open.

A contract (a format, a scale policy, a layout) fixes most of an answer. What it leaves open is listed here, one field
a choice. A backend declares its choices with a source; the reference then answers with the outputs that are
admissible under exactly those choices. A backend that needs more freedom than it declares fails.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

ScaleArithmetic = Literal["divide", "reciprocal", "approximate"]
PayloadArithmetic = Literal["divide", "reciprocal", "amax_reciprocal", "approximate"]
DequantRounding = Literal["once", "via_fp32", "scale_first"]
Via = Literal["bf16", "fp32"]
Padding = Literal["zero", "any"]
ZeroSign = Literal["keep", "any"]
Subnormals = Literal["keep", "flush"]
Accumulator = Literal["fp32_any", "fp32_rn", "fp64", "hopper_fp8", "hopper_f16", "f16_upcast", "bf16_split_k"]
ScaleCombination = Literal["any", "fma_dot_sa_sb", "fma_dot_sasb"]
Promotion = Literal["every_128", "none"]
OutRounding = Literal["nearest", "faithful"]
Between = Literal["fp32", "bf16"]
Sigmoid = Literal["exp", "tanh"]
TieRule = Literal["lowest_index", "any"]
BiasDtype = Literal["fp32", "bf16"]
Denominator = Literal["add", "max", "none"]
Scaling = Literal["topk", "later"]
DroppedFill = Literal["minus_inf", "zero"]
PaddedRows = Literal["minus_one", "zero_weight", "any"]

ROUTING_CHOICES = frozenset(
    {
        "exp_error",
        "exp_slope",
        "tanh_error",
        "log_error",
        "division_error",
        "sigmoid",
        "tie_rule",
        "group_tie_rule",
        "bias_dtype",
        "denominator",
        "scaling",
        "dropped_fill",
        "padded_rows",
    }
)
"""The choices of a router; ``references.routing.RoutingRecipe`` explains each and takes them over by name."""
INVARIANCES = frozenset({"run_to_run", "permutation_invariant", "batch_invariant"})
"""What any backend may declare of its bits, whatever its operation leaves open."""
_ROUTING_ERRORS = ("exp_error", "exp_slope", "tanh_error", "log_error", "division_error")


@cache
def _allowed() -> list[tuple[Field[Any], tuple[Any, ...]]]:
    """The fields of a recipe with the words that they may hold, none where they hold a number."""
    hints = get_type_hints(Recipe)
    return [(field, get_args(hints[field.name])) for field in fields(Recipe)]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The declared choices of one backend for one claim. Fields outside an operation's open choices are ignored by it.

    source: where the choice is documented (a file of the library, a specification, a public thread).
    scale_arithmetic: how amax becomes a scale in FP32: ``divide`` RN(amax / qmax); ``reciprocal``
        RN(amax * RN(1 / qmax)); ``approximate`` anything within ``scale_error`` (relative) of amax / qmax.
    scale_error: relative error of the scale before it is rounded to its stored format; 0 unless ``approximate``.
    payload_arithmetic: how an element is brought to the payload's range in FP32: ``divide`` RN(x / s);
        ``reciprocal`` RN(x * RN(1 / s)); ``amax_reciprocal`` RN(x * RN(qmax / amax)); ``approximate`` anything within
        ``payload_error`` (relative) of x / s.
    payload_error: relative error of the scaled element before encoding; 0 unless ``approximate``.
    amax_floor: lower bound put on a block's amax before the scale is taken (0 for none).
    scale_floor: lower bound put on the scale itself (0 for none).
    zero_sign: ``keep`` if an element that rounds to zero keeps its sign, ``any`` if either zero is admissible.
    subnormals: ``flush`` if FP32 subnormal results may be replaced by zero, else ``keep``.
    dequant_rounding: ``once`` from the exact product to the output dtype; ``via_fp32`` first to FP32, then to the
        output dtype; ``scale_first`` (two-level scales) RN32(block scale * global scale), then RN32 of the product with
        the payload, then the output dtype.
    via: dtype of the dequantised weight inside ``requantize``.
    padding: bytes in the padding of a scale layout, ``zero`` or ``any``.
    accumulator: how a GEMM adds its products (``references/accumulators.py`` derives the error of each): ``fp32_any``
        FP32 in any order, truncation and tensor cores with at least 24 fractional bits included; ``fp32_rn`` scalar
        FP32 in any order, rounded to nearest; ``fp64``; ``hopper_fp8`` FP8 ``wgmma`` (13 fractional bits);
        ``hopper_f16`` F16 and BF16 tensor cores of Hopper; ``f16_upcast`` FP8 operands upcast to F16 there;
        ``bf16_split_k`` FP32 partial sums over ``split_k`` parts of K, each rounded to BF16 and added in BF16 or wider.
    promotion: ``every_128`` if a tensor core's sum is added to an FP32 accumulator every 128 of K, ``none`` if it runs
        over all of K (``hopper_fp8``, ``hopper_f16``, ``f16_upcast``; block scales promote at each block anyway).
    scale_combination: how the dot product of a K block joins the accumulator: ``fma_dot_sa_sb``
        fma(RN(dot * sA), sB, acc); ``fma_dot_sasb`` fma(dot, RN(sA * sB), acc); ``any``. Naming one makes the answer of
        an exact accumulator model unique.
    split_k: the number of parts of K (``bf16_split_k``).
    k_parts: the most contiguous parts of K that may be summed apart in FP32 and then added in order, each but the last
        of ceil(K / parts) rounded up to 64 (to 128 where there are block scales). An exact model has to be met with one
        number of parts for the whole answer, which is reported.
    out_rounding: of the accumulator to the output dtype: ``nearest``, or ``faithful`` for either neighbour.
    fc1_dtype, activation_dtype, fc2_dtype, weighted_dtype: of an expert layer, how FC1's output, silu(gate) * up, each
        expert's output and its product with the router weight are stored on the way, ``fp32`` or ``bf16``.
    combine_dtype: what holds the sum over a token's experts while they are added, one after another in any order.
    run_to_run: bit equality of repeated runs is part of the contract.
    permutation_invariant, batch_invariant: so is that of rows wherever they lie among the others, and however many
        others there are (``conformance/relations.py``).
    exp_error ... padded_rows: of a router, `ROUTING_CHOICES`.
    """

    source: str
    scale_arithmetic: ScaleArithmetic = "divide"
    scale_error: float = 0.0
    payload_arithmetic: PayloadArithmetic = "divide"
    payload_error: float = 0.0
    amax_floor: float = 0.0
    scale_floor: float = 0.0
    zero_sign: ZeroSign = "keep"
    subnormals: Subnormals = "keep"
    dequant_rounding: DequantRounding = "once"
    via: Via = "fp32"
    padding: Padding = "zero"
    accumulator: Accumulator = "fp32_any"
    promotion: Promotion = "every_128"
    scale_combination: ScaleCombination = "any"
    split_k: int = 1
    k_parts: int = 1
    out_rounding: OutRounding = "nearest"
    fc1_dtype: Between = "fp32"
    activation_dtype: Between = "fp32"
    fc2_dtype: Between = "fp32"
    weighted_dtype: Between = "fp32"
    combine_dtype: Between = "fp32"
    run_to_run: bool = True
    permutation_invariant: bool = False
    batch_invariant: bool = False
    exp_error: float = 2.0**-22
    exp_slope: float = 0.0
    tanh_error: float = 2.0**-22
    log_error: float = 2.0**-22
    division_error: float = 2.0**-24
    sigmoid: Sigmoid = "exp"
    tie_rule: TieRule = "lowest_index"
    group_tie_rule: TieRule = "any"
    bias_dtype: BiasDtype = "fp32"
    denominator: Denominator = "add"
    scaling: Scaling = "topk"
    dropped_fill: DroppedFill = "minus_inf"
    padded_rows: PaddedRows = "minus_one"

    def __post_init__(self) -> None:
        for field, allowed in _allowed():
            value = getattr(self, field.name)
            if allowed and value not in allowed:
                raise ValueError(f"recipe: {field.name}={value!r} is none of {', '.join(map(str, allowed))}")
            if isinstance(field.default, float) and not 0.0 <= value < float("inf"):
                raise ValueError(f"recipe: {field.name}={value!r} is not a finite number >= 0")
        for choice, error in (("scale_arithmetic", "scale_error"), ("payload_arithmetic", "payload_error")):
            if (getattr(self, choice) == "approximate") != (getattr(self, error) > 0):
                raise ValueError(f"recipe: {error} must be positive exactly where {choice}=approximate")
        for name in _ROUTING_ERRORS:
            if not (2.0**-24 if name == "division_error" else 0.0) <= getattr(self, name) < 0.5:
                raise ValueError(
                    f"recipe: {name}={getattr(self, name)!r} is no relative error of a router's FP32 arithmetic"
                )
        if (self.split_k > 1) != (self.accumulator == "bf16_split_k") or self.split_k < 1:
            raise ValueError(f"recipe: split_k={self.split_k} must be above 1 exactly where accumulator=bf16_split_k")
        if self.k_parts < 1 or (self.k_parts > 1 and self.accumulator not in ("hopper_fp8", "hopper_f16")):
            raise ValueError(f"recipe: k_parts={self.k_parts} is for the accumulators hopper_fp8 and hopper_f16")
        if not self.source.strip():
            raise ValueError("recipe: a source is required")

    def text(self, choices: frozenset[str] | None = None) -> str:
        """The choices as ``name=value`` words, sorted, those that differ from the default only; ``default`` if none.

        choices: restrict to these field names (an operation's open choices).
        """
        words = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name != "source"
            and (choices is None or field.name in choices)
            and getattr(self, field.name) != field.default
        ]
        return " ".join(sorted(words)) or "default"

    def only(self, choices: frozenset[str]) -> Recipe:
        """The same recipe with every field outside ``choices`` at its default."""
        return Recipe(source=self.source, **{name: getattr(self, name) for name in choices})

    def to_json(self) -> dict[str, Any]:
        """Plain data, one key a field."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Recipe:
        """The inverse of `to_json`; an unknown key is a TypeError."""
        return cls(**data)
