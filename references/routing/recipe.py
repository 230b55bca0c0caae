"""RoutingRecipe: the legal choices of a router where the contract leaves one open."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

SigmoidForm = Literal["exp", "tanh"]
TieRule = Literal["lowest_index", "any"]
BiasDtype = Literal["fp32", "bf16"]
WeightDtype = Literal["fp32", "bf16", "fp16"]
Denominator = Literal["add", "max", "none"]
Scaling = Literal["topk", "later"]
DroppedFill = Literal["minus_inf", "zero"]
PaddedRows = Literal["minus_one", "zero_weight", "any"]


@dataclass(frozen=True, kw_only=True)
class RoutingRecipe:
    """The declared choices of one backend's router. All arithmetic is FP32 unless a field says otherwise.

    source: where the choices are documented.
    exp_error, exp_slope: the backend's exp(t) errs by at most ``exp_error + exp_slope * |t|``, relative. The default is
        2 ulp (CUDA ``expf``); CUDA ``__expf`` documents 2 + 1.173 |t| ulp: 2^-22 and 1.173 * 2^-23.
    tanh_error: relative error of tanh; the default is 2 ulp. Its magnitude never exceeds 1.
    log_error: relative error of log1p; the default is 2 ulp.
    division_error: relative error of a division or square root, its rounding included; 2^-24 is IEEE, PTX
        ``div.full`` 2^-22, a multiplication by the rounded reciprocal 2^-23 and a little.
    sigmoid: 1 / (1 + exp(-x)), or 0.5 * tanh(0.5 * x) + 0.5.
    tie_rule: ``lowest_index`` if of two experts in one group with bitwise equal (logit, bias) the lower id wins.
    group_tie_rule: ``lowest_index`` if the lower id also wins between two kept groups, and the lower group between two
        groups with bitwise equal contents.
    bias_dtype: ``bf16`` if the bias is rounded to BF16 first.
    denominator: of a renormalised weight: sum + 1e-20, max(sum, 1e-20), or the sum alone.
    scaling: ``topk`` if the weights include the routed scaling factor, ``later`` if they lack it (a shared expert then
        has weight 1 / factor).
    dropped_fill: what the choice scores of dropped groups become. ``zero`` is open to GroupedTopK only.
    weight_dtype: dtype of the weights that are returned.
    padded_rows: rows from num_token_non_padded on have id -1, or any id with weight 0, or are not looked at.
    """

    source: str
    exp_error: float = 2.0**-22
    exp_slope: float = 0.0
    tanh_error: float = 2.0**-22
    log_error: float = 2.0**-22
    division_error: float = 2.0**-24
    sigmoid: SigmoidForm = "exp"
    tie_rule: TieRule = "lowest_index"
    group_tie_rule: TieRule = "any"
    bias_dtype: BiasDtype = "fp32"
    denominator: Denominator = "add"
    scaling: Scaling = "topk"
    dropped_fill: DroppedFill = "minus_inf"
    weight_dtype: WeightDtype = "fp32"
    padded_rows: PaddedRows = "minus_one"

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = get_args(hints[field.name])
            if allowed and value not in allowed:
                raise ValueError(f"routing recipe: {field.name}={value!r} is none of {', '.join(allowed)}")
            if isinstance(field.default, float) and not 0.0 <= value < 0.5:
                raise ValueError(f"routing recipe: {field.name}={value!r} is not a relative error within 0..0.5")
        if self.division_error < 2.0**-24:
            raise ValueError("routing recipe: division_error includes the rounding, so it is at least 2^-24")
        if not self.source.strip():
            raise ValueError("routing recipe: a source is required")

    def text(self) -> str:
        """The choices that differ from the default as sorted ``name=value`` words; ``default`` if none."""
        words = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name != "source" and getattr(self, field.name) != field.default
        ]
        return " ".join(sorted(words)) or "default"

    def to_json(self) -> dict[str, Any]:
        """Plain data, one key a field."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RoutingRecipe:
        """The inverse of `to_json`; an unknown key is a TypeError."""
        return cls(**data)
