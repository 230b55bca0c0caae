"""What every entry point shares: checks of arguments, chunks of tokens, choice intervals, padding, shared experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from references.chunks import row_pieces
from references.routing import scores
from references.routing.methods import RoutingConfig
from references.routing.recipe import RoutingRecipe
from references.routing.scores import Interval


def check(logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe) -> None:
    """Raise ValueError unless logits, bias and recipe fit the router."""
    if logits.ndim != 2 or logits.shape[1] != config.experts:
        raise ValueError(f"routing: logits {tuple(logits.shape)} are not [tokens, {config.experts}]")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"routing: logits are {logits.dtype}, expected float32, bfloat16 or float16")
    if config.rule.biased != (bias is not None):
        raise ValueError(f"routing: {config.method} {'needs a' if config.rule.biased else 'takes no'} bias")
    if bias is not None and tuple(bias.shape) != (config.experts,):
        raise ValueError(f"routing: bias {tuple(bias.shape)} is not [{config.experts}]")
    if recipe.dropped_fill == "zero" and config.rule.group_score != "max":
        raise ValueError(f"routing: dropped_fill=zero is no choice of {config.method}")


def check_columns(tensor: Tensor, logits: Tensor, config: RoutingConfig, name: str) -> None:
    """Raise ValueError unless ``tensor`` is [tokens, top_k + shared_experts]."""
    if tuple(tensor.shape) != (logits.shape[0], config.columns):
        raise ValueError(f"routing: {name} {tuple(tensor.shape)} are not [{logits.shape[0]}, {config.columns}]")


def chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of tokens; no token is one empty slice, so that every answer keeps its shape."""
    tokens, experts = logits.shape
    # A tenth of a device piece keeps two dozen tensors below 1 GiB.
    columns = experts if logits.device.type == "cpu" else 10 * experts
    yield from row_pieces(tokens, columns, logits.device) if tokens else (slice(0, 0),)


def undefined(logits: Tensor, config: RoutingConfig) -> Tensor:
    """Tokens whose choice scores are undefined: a NaN logit, or a softmax over inf or over -inf alone."""
    undefined = torch.isnan(logits).any(1)
    if config.rule.choice == "softmax":
        undefined = undefined | (logits == torch.inf).any(1) | (logits == -torch.inf).all(1)
    return undefined


def choice_intervals(
    logits: Tensor, bias: Tensor | None, config: RoutingConfig, recipe: RoutingRecipe
) -> tuple[Interval, Interval]:
    """The score and the choice (score + bias) of every expert, intervals [tokens, experts]; NaN logits read as 0."""
    x = torch.nan_to_num(logits.to(torch.float64), nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    if config.rule.choice == "softmax":
        x = torch.where(undefined(logits, config)[:, None], 0.0, x)
    s = scores.score(config.rule.choice, x, recipe)
    if bias is None:
        return s, s
    return s, scores.biased(s, scores.effective_bias(bias, recipe))


def padding_rows(tokens: int, start: int, config: RoutingConfig, device: torch.device) -> Tensor:
    """Which of ``tokens`` rows, the first of them number ``start``, are padding."""
    if config.num_token_non_padded is None:
        return torch.zeros(tokens, dtype=torch.bool, device=device)
    return torch.arange(start, start + tokens, device=device) >= config.num_token_non_padded


def shared_ids(config: RoutingConfig, device: torch.device) -> Tensor:
    """Ids of the fused shared experts."""
    return torch.arange(config.experts, config.experts + config.shared_experts, device=device)


def shared_weight(config: RoutingConfig, recipe: RoutingRecipe) -> float:
    """Weight of a fused shared expert."""
    return 1.0 if recipe.scaling == "topk" else 1.0 / config.scaling_factor
