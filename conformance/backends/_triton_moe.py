"""Triton kernels of this project: a fused expert layer in DeepSeek's block-scaled FP8, or in BF16.

Pairs of a token and an expert lie sorted by expert. A program of FC1 takes TILE_M pairs of one expert and 128 columns
of gate and up, applies SwiGLU and quantises the block of h that it holds; a program of FC2 takes as much of FC2's
output; the last kernel adds a token's terms in the order of its experts. Nothing is added atomically: repeated runs are
equal.

The scales of activations are powers of two where ``X_UE8M0`` and ``H_UE8M0`` say so: those of FC1, quantised by
``_triton_kernels.quantize_e4m3_kernel``, and those of FC2.
"""

# ruff: noqa: N803 - constexpr parameters in capitals, as Triton kernels have them
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from conformance.backends._triton_numbers import e4m3_block_scale, e4m3_code, magnitude_bits, ue8m0_value


@triton.jit
def load_rows(a_ptr, a_scales_ptr, row, inside, block, k, blocks, FP8: tl.constexpr, UE8M0: tl.constexpr):
    """Rows of an operand at K block ``block``, 128 wide, and the FP32 scales of their 1 x 128 blocks (1 in BF16)."""
    depth = block * 128 + tl.arange(0, 128)
    at = row.to(tl.int64)[:, None] * k + depth[None, :]
    a = tl.load(a_ptr + at, mask=inside[:, None] & (depth < k)[None, :], other=0)
    scale = tl.full(row.shape, 1.0, tl.float32)
    if FP8:
        stored = tl.load(a_scales_ptr + row.to(tl.int64) * blocks + block, mask=inside, other=0)
        scale = ue8m0_value(stored.to(tl.int32)) if UE8M0 else stored
    return a, scale


@triton.jit
def add_product(
    accumulator, a, a_scale, w_ptr, w_scales_ptr, row, inside, block, k, blocks, FP8: tl.constexpr, UE8M0: tl.constexpr
):
    """accumulator + a times the rows ``row`` of an expert's weight at K block ``block``, scaled by 128 x 128 blocks."""
    depth = block * 128 + tl.arange(0, 128)
    at = row.to(tl.int64)[None, :] * k + depth[:, None]
    w = tl.load(w_ptr + at, mask=inside[None, :] & (depth < k)[:, None], other=0)
    if FP8:
        stored = tl.load(w_scales_ptr + (row // 128).to(tl.int64) * blocks + block, mask=inside, other=0)
        scale = ue8m0_value(stored.to(tl.int32)) if UE8M0 else stored
        dot = tl.dot(a.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True))
        accumulator = tl.fma(dot * a_scale[:, None], tl.broadcast_to(scale[None, :], accumulator.shape), accumulator)
    else:
        accumulator = tl.dot(a, w, accumulator)
    return accumulator


@triton.jit
def fc1_kernel(
    x_ptr,
    x_scales_ptr,
    w1_ptr,
    w1_scales_ptr,
    h_ptr,
    h_scales_ptr,
    pairs_ptr,
    weights_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    expert_end_ptr,
    topk,
    hidden,
    inner,
    hidden_blocks,
    inner_blocks,
    w1_scale_rows,
    gate_at,
    up_at,
    limit,
    amax_floor,
    FP8: tl.constexpr,
    X_UE8M0: tl.constexpr,
    W_UE8M0: tl.constexpr,
    H_UE8M0: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """h [sorted pairs, inner] = silu(min(gate, limit)) * clamp(up, +-limit), quantised by 1 x 128 blocks (or BF16).

    pairs: number token * topk + place of each sorted pair. Tile t holds pairs from tile_start[t] on of the expert
    tile_expert[t], up to expert_end of it. Gate and up are W1's rows from gate_at and up_at on.
    """
    expert = tl.load(tile_expert_ptr + tl.program_id(0)).to(tl.int64)
    sorted_row = tl.load(tile_start_ptr + tl.program_id(0)) + tl.arange(0, TILE_M)
    end = tl.load(expert_end_ptr + expert)
    if tl.load(tile_start_ptr + tl.program_id(0)) >= end:
        return
    real = sorted_row < end
    pair = tl.load(pairs_ptr + sorted_row, mask=real, other=0)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = column < inner
    w_at = w1_ptr + expert * 2 * inner * hidden
    w_scales_at = w1_scales_ptr + expert * w1_scale_rows * hidden_blocks
    gate = tl.full([TILE_M, 128], 0.0, tl.float32)
    up = tl.full([TILE_M, 128], 0.0, tl.float32)
    for block in range(0, hidden_blocks):
        x, x_scale = load_rows(x_ptr, x_scales_ptr, pair // topk, real, block, hidden, hidden_blocks, FP8, X_UE8M0)
        gate = add_product(
            gate, x, x_scale, w_at, w_scales_at, gate_at + column, inside, block, hidden, hidden_blocks, FP8, W_UE8M0
        )
        up = add_product(
            up, x, x_scale, w_at, w_scales_at, up_at + column, inside, block, hidden, hidden_blocks, FP8, W_UE8M0
        )
    if WEIGHT_ON_INPUT:
        weight = tl.load(weights_ptr + pair, mask=real, other=0.0)[:, None]
        gate = gate * weight
        up = up * weight
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    h = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    stored = real[:, None] & inside[None, :]
    to = sorted_row.to(tl.int64)
    if FP8:
        amax = tl.max(magnitude_bits(h), axis=1).to(tl.float32, bitcast=True)
        scale, stored_scale = e4m3_block_scale(amax, amax_floor, "ceil" if H_UE8M0 else "fp32")
        tl.store(h_scales_ptr + to * inner_blocks + tl.program_id(1), stored_scale, mask=real)
        h = e4m3_code(tl.div_rn(h, tl.broadcast_to(scale[:, None], h.shape)))
    tl.store(h_ptr + to[:, None] * inner + column[None, :], h.to(h_ptr.dtype.element_ty), mask=stored)


@triton.jit
def fc2_kernel(
    h_ptr,
    h_scales_ptr,
    w2_ptr,
    w2_scales_ptr,
    terms_ptr,
    pairs_ptr,
    weights_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    expert_end_ptr,
    hidden,
    inner,
    hidden_blocks,
    inner_blocks,
    FP8: tl.constexpr,
    H_UE8M0: tl.constexpr,
    W_UE8M0: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """terms[pair, hidden] = h times the expert's W2, times the router weight where that is on the output, FP32."""
    expert = tl.load(tile_expert_ptr + tl.program_id(0)).to(tl.int64)
    sorted_row = tl.load(tile_start_ptr + tl.program_id(0)) + tl.arange(0, TILE_M)
    end = tl.load(expert_end_ptr + expert)
    if tl.load(tile_start_ptr + tl.program_id(0)) >= end:
        return
    real = sorted_row < end
    pair = tl.load(pairs_ptr + sorted_row, mask=real, other=0)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = column < hidden
    w_at = w2_ptr + expert * hidden * inner
    w_scales_at = w2_scales_ptr + expert * hidden_blocks * inner_blocks
    term = tl.full([TILE_M, 128], 0.0, tl.float32)
    for block in range(0, inner_blocks):
        h, h_scale = load_rows(h_ptr, h_scales_ptr, sorted_row, real, block, inner, inner_blocks, FP8, H_UE8M0)
        term = add_product(
            term, h, h_scale, w_at, w_scales_at, column, inside, block, inner, inner_blocks, FP8, W_UE8M0
        )
    if not WEIGHT_ON_INPUT:
        term = term * tl.load(weights_ptr + pair, mask=real, other=0.0)[:, None]
    at = pair.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(terms_ptr + at, term, mask=real[:, None] & inside[None, :])


@triton.jit
def combine_kernel(terms_ptr, ids_ptr, output_ptr, tokens, topk, hidden, scaling, TILE_M: tl.constexpr):
    """output[token, hidden] = scaling * the sum of the token's terms; experts with a negative id have none."""
    token = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (token < tokens)[:, None] & (column < hidden)[None, :]
    total = tl.full([TILE_M, 128], 0.0, tl.float32)
    for place in range(0, topk):
        pair = token.to(tl.int64) * topk + place
        here = tl.load(ids_ptr + pair, mask=token < tokens, other=-1) >= 0
        at = pair[:, None] * hidden + column[None, :]
        total += tl.load(terms_ptr + at, mask=here[:, None] & inside, other=0.0)
    at = token.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(output_ptr + at, (total * scaling).to(output_ptr.dtype.element_ty), mask=inside)
