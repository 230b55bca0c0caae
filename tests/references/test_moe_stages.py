"""Each stage of an expert layer, and the whole on tiny cases, against arithmetic that shares nothing with it."""

import math
from fractions import Fraction

import pytest
import torch
from mpmath import exp, findroot, mp, mpf

from conformance.operations import moe
from fuzz.case import Case
from references import gemm_formats
from references.accumulators import sums
from references.blocks import dequantize, quantize
from references.elements import E2M1, E4M3FN
from references.enclosures import Enclosure
from references.gemm_formats import Stored, sides
from references.moe import config_of, product, requantise, swiglu
from references.moe.activation import MINIMUM, MINIMUM_AT, silu_range
from references.moe.config import activation_scales
from references.packing import pack_fp4
from references.recipes import Recipe
from references.rounding import round_to
from references.schemes import scheme

ANY = Recipe(source="a test")
F64 = torch.float64
SEED = torch.Generator().manual_seed(3)


def draw(*shape):
    return torch.randn(*shape, generator=SEED, dtype=F64)


def true_silu(x):
    return mpf(x) / (1 + exp(-mpf(x)))


# Activation


def test_the_minimum_of_silu_is_bracketed():
    with mp.workdps(40):
        place = findroot(lambda x: 1 + exp(-x) + x * exp(-x), -1.28)
        assert mpf(MINIMUM_AT[0]) < place < mpf(MINIMUM_AT[1]) or mpf(MINIMUM_AT[0]) <= place <= mpf(MINIMUM_AT[1])
        assert 0 < true_silu(place) - mpf(MINIMUM) < mpf(2) ** -52


def test_silu_over_intervals_holds_exact_values():
    low = torch.cat(
        [draw(40) * 3, torch.tensor([-800.0, -90.0, -1.5, 0.0, 31.0, 700.0, -1.2784645427610738], dtype=F64)]
    )
    high = low + torch.cat([draw(46).abs(), torch.zeros(1, dtype=F64)])
    found = silu_range(Enclosure(low, high))
    with mp.workdps(40):
        for index in range(len(low)):
            for part in (0.0, 0.3, 1.0):
                x = min(float(high[index]), float(low[index]) + part * float(high[index] - low[index]))
                assert mpf(float(found.lo[index])) <= true_silu(x) <= mpf(float(found.hi[index]))
            inside = float(low[index]) < -1.2784645427610738 < float(high[index])
            assert not inside or float(found.lo[index]) == MINIMUM


FORMS = {
    "quotient": (lambda g, u: g / (1 + torch.exp(-g)) * u, ANY),
    "sigmoid": (lambda g, u: g * torch.sigmoid(g) * u, ANY),
    "other order": (lambda g, u: (g * u) / (1 + torch.exp(-g)), ANY),
    "tanh": (lambda g, u: g * (0.5 * torch.tanh(0.5 * g) + 0.5) * u, Recipe(source="a test", sigmoid="tanh")),
}


@pytest.mark.parametrize("form", FORMS)
def test_fp32_forms_of_swiglu_are_inside(form):
    evaluate, recipe = FORMS[form]
    gate = torch.cat([draw(2000) * 4, draw(2000) * 60, draw(500) * 2.0**-120]).float()
    up = (draw(4500) * 2.0 ** torch.randint(-20, 20, (4500,), generator=SEED)).float()
    found = swiglu(Enclosure.from_value(gate), Enclosure.from_value(up), recipe).to_dtype(torch.float32)
    assert bool(found.contains(evaluate(gate, up)).all())
    middle = slice(0, 2000)
    size = (gate[middle].double() * torch.sigmoid(gate[middle].double()) * up[middle].double()).abs()
    if recipe.sigmoid == "exp":
        assert bool((found.width[middle] <= size * 2.0**-19 + 2.0**-100).all())


def test_saturated_gates_are_exact():
    gate, up = torch.tensor([32.0, 96.0, 1024.0]), torch.tensor([3.0, -5.0, 7.0])
    found = swiglu(Enclosure.from_value(gate), Enclosure.from_value(up), ANY).to_dtype(torch.float32)
    assert torch.equal(found.lo, (gate * up).double())
    assert torch.equal(found.hi, (gate * up).double())
    zero = swiglu(Enclosure.from_value(torch.zeros(1)), Enclosure.from_value(torch.ones(1)), ANY)
    assert float(zero.lo) == float(zero.hi) == 0.0


def test_the_limit_clamps_gate_above_and_up_on_both_sides():
    gate, up = torch.tensor([9.0, -9.0]), torch.tensor([-9.0, 9.0])
    found = swiglu(Enclosure.from_value(gate), Enclosure.from_value(up), ANY, limit=7.0)
    expected = [float(true_silu(7) * -7), float(true_silu(-9) * 7)]
    assert found.centre.tolist() == pytest.approx(expected, rel=1e-6)


# Requantisation

SCHEMES = {
    "deepseek fp32": (scheme("deepseek_fp8", "1x128", "fp32"), ("deepseek_fp8", "fp32"), None),
    "deepseek ceil": (scheme("deepseek_fp8", "1x128", "ceil"), ("deepseek_fp8", "ue8m0"), None),
    **{
        f"mxfp8 {policy}": (scheme("mxfp8", "1x32", policy), ("mxfp8", "ue8m0"), None)
        for policy in ("ceil", "floor", "ceil_amax", "even")
    },
    "nvfp4": (scheme("nvfp4", "1x16", "e4m3"), ("nvfp4", "e4m3"), 0.013),
    "static": (scheme("fp8_per_tensor", "tensor", "static"), ("fp8_per_tensor", "fp32"), 0.0123),
}


def quantised(h, scheme_, given, recipe):
    outer = None if given is None else torch.tensor([given], dtype=torch.float32)
    if scheme_.scale == "static":
        found = quantize(h, scheme_, recipe, scale=outer)
        as_stored = scheme("fp8_per_tensor", "tensor", "fp32")
        return dequantize(found.payload, outer.reshape(1, 1), as_stored)
    found = quantize(h, scheme_, recipe, global_scale=outer)
    return dequantize(found.payload, found.scales, scheme_, global_scale=outer)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("arithmetic", ["divide", "reciprocal"])
@pytest.mark.parametrize("width", [2.0**-22, 2.0**-10, 0.3, 3.0])
def test_whatever_lies_inside_quantises_into_the_reach(name, arithmetic, width):
    """Widths from the error of an FP32 sum to intervals across zero; blocks of zeros and of tiny numbers among them."""
    scheme_, words, given = SCHEMES[name]
    recipe = Recipe(source="a test", payload_arithmetic=arithmetic, amax_floor=1e-10)
    middle = draw(9, 150) * 2.0 ** torch.randint(-6, 6, (9, 1), generator=SEED)
    middle[3] = 0
    middle[4] *= 2.0**-40
    radius = middle.abs() * width
    radius[3, ::7] = 2.0**-30
    low, high = middle - radius, middle + radius
    outer = None if given is None else torch.tensor([given], dtype=torch.float32)
    found = requantise(low, high, middle, scheme_, sides(*words)[0], recipe, outer)
    for _ in range(12):
        part = torch.rand(middle.shape, generator=SEED, dtype=F64)
        part = torch.where(torch.rand(middle.shape, generator=SEED) < 0.2, part.round(), part)
        h = round_to(low + part * (high - low), torch.float32).float()
        off = (quantised(h, scheme_, given, recipe) - found.nominal.values).abs()
        assert bool((off <= found.reach).all())
    if width < 0.1 and name != "nvfp4":
        # Half a code's step and what the interval itself gives, for one scale or the next.
        step = torch.maximum((middle.abs() + radius) * 0.25, found.scales.amax(1)[:, None] * 2.0**-8)
        assert bool((found.reach <= radius + step).all())


def test_few_elements_move_under_a_power_of_two_and_most_under_a_continuous_scale():
    middle = draw(20, 256)
    radius = middle.abs() * 2.0**-20
    moved = {}
    for name in ("deepseek ceil", "deepseek fp32"):
        scheme_, words, _ = SCHEMES[name]
        found = requantise(middle - radius, middle + radius, middle, scheme_, sides(*words)[0], ANY, None)
        moved[name] = float((found.reach > 0).double().mean())
    assert moved["deepseek ceil"] < 0.01
    assert moved["deepseek fp32"] > 0.9


def test_two_scales_next_to_a_power_of_two():
    """amax 448 +- a bit: scales 1 and 2; code 1.125 becomes 1.125 or, on the coarser grid of subnormals, itself."""
    h = torch.zeros(1, 128, dtype=F64)
    h[0, 0], h[0, 1] = 448.0, 2.0**-9
    radius = torch.zeros_like(h)
    radius[0, 0] = 2.0**-6
    scheme_, words, _ = SCHEMES["deepseek ceil"]
    found = requantise(h - radius, h + radius, h, scheme_, sides(*words)[0], ANY, None)
    # 2^-9 is the smallest code under scale 1 and half of it under scale 2, which ties to zero.
    assert float(found.nominal.values[0, 1]) == 2.0**-9
    assert float(found.reach[0, 1]) == 2.0**-9
    assert float(found.reach[0, 0]) == 0.0
    assert float(found.scales[0, 0]) == 2.0


# Products


@pytest.mark.parametrize("name", ["deepseek fp32", "deepseek ceil", "nvfp4"])
@pytest.mark.parametrize("accumulator", ["fp32_rn", "fp32_any", "hopper_fp8"])
def test_every_candidate_operand_has_its_fp32_sums_inside(name, accumulator):
    if accumulator == "hopper_fp8" and name == "nvfp4":
        pytest.skip("hopper_fp8 multiplies E4M3")
    scheme_, words, given = SCHEMES[name]
    recipe = Recipe(source="a test", accumulator=accumulator)
    outer = None if given is None else torch.tensor([given], dtype=torch.float32)
    first, second = sides(*words)
    middle, weight = draw(4, 256), draw(7, 256).float()
    b_scheme = scheme("deepseek_fp8", "128x128", "fp32") if second.block == (128, 128) else scheme_
    stored = quantize(
        weight, b_scheme if words[1] != "ue8m0" else scheme("deepseek_fp8", "128x128", "ceil"), ANY, global_scale=outer
    )
    payload = pack_fp4(stored.payload) if scheme_.element.bits == 4 else stored.payload
    matrix = Stored(payload, stored.scales, second, outer)
    b = matrix.decoded()
    radius = middle.abs() * 2.0**-8
    a = requantise(middle - radius, middle + radius, middle, scheme_, first, recipe, outer)
    found = product(a, matrix, recipe, a.reach[None])
    carried = found.carried[0]
    bound = carried + found.accumulation
    assert bool((carried > 0).any())
    assert bool((carried <= sums(a.nominal, b).size).all())
    for _ in range(5):
        h = (middle + (2 * torch.rand(middle.shape, generator=SEED, dtype=F64) - 1) * radius).float()
        values = quantised(h, scheme_, given, recipe).float()
        answers = values @ b.values.float().T, values.flip(1) @ b.values.float().flip(1).T
        for answer in answers:
            assert bool(((answer.double() - found.centre).abs() <= bound).all())


@pytest.mark.parametrize("name", ["deepseek fp32", "deepseek ceil", "nvfp4"])
@pytest.mark.parametrize("accumulator", ["fp32_rn", "fp32_any"])
def test_a_product_in_pieces_is_the_product(name, accumulator, monkeypatch):
    scheme_, words, given = SCHEMES[name]
    outer = None if given is None else torch.tensor([given], dtype=torch.float32)
    first, second = sides(*words)
    weights = scheme("deepseek_fp8", "128x128", "ceil" if words[1] == "ue8m0" else "fp32")
    weights = weights if second.block == (128, 128) else scheme_
    stored = quantize(draw(389, 256).float(), weights, ANY, global_scale=outer)
    payload = pack_fp4(stored.payload) if scheme_.element.bits == 4 else stored.payload
    matrix = Stored(payload, stored.scales, second, outer)
    middle = draw(3, 256)
    a = requantise(middle * 0.99, middle * 1.01, middle, scheme_, first, ANY, outer)
    recipe = Recipe(source="a test", accumulator=accumulator)
    whole = product(a, matrix, recipe, a.reach[None])
    monkeypatch.setitem(gemm_formats.PIECE, "cpu", 256 * 128)
    pieces = [piece.rows for piece in matrix.pieces()]
    assert len(pieces) > 1
    assert sum(pieces) == 389
    apart = product(a, matrix, recipe, a.reach[None])
    for field in ("centre", "accumulation", "size", "carried", "weights"):
        assert torch.allclose(getattr(apart, field), getattr(whole, field), rtol=1e-9, atol=0), field


# The whole


def nearest(x, element):
    """RNE by search among all numbers of the element, saturating; exact."""
    m = element.mantissa_bits
    numbers = [Fraction(0)]
    for code in range(1, element.max_code + 1):
        field, fraction = divmod(code, 1 << m)
        numbers.append(Fraction(fraction + (field > 0) * 2**m) * Fraction(2) ** (max(field, 1) - element.bias - m))
    size = abs(x)
    code = min(range(len(numbers)), key=lambda c: (abs(numbers[c] - size), c % 2))
    return numbers[code] if x >= 0 else -numbers[code]


def scale_of(amax, case):
    """The exact scale of a block."""
    if amax == 0:
        return Fraction(1)
    if case["scale"] == "fp32":
        return rounded(amax / 448, torch.float32)
    if case["scale"] == "ceil":
        quotient = amax / 448
        exponent = math.floor(math.log2(quotient)) - 1
        while Fraction(2) ** exponent < quotient:
            exponent += 1
        return Fraction(2) ** exponent
    exponent = math.floor(math.log2(amax)) + 1
    while Fraction(2) ** exponent > amax:
        exponent -= 1
    return Fraction(2) ** (exponent - 8)


def rounded(x, dtype):
    return Fraction(float(round_to(torch.tensor([float(x)], dtype=F64), dtype)))


def true_quantised(row, case, given):
    if case.variant in ("bf16", "w4a16"):
        return [rounded(x, torch.bfloat16) for x in row]
    if case.variant == "nvfp4":
        found = []
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            scale = nearest(max(map(abs, block)) / 6 / given, E4M3FN) * given
            found += [nearest(x / scale, E2M1) * scale if scale else Fraction(0) for x in block]
        return found
    if case.variant == "fp8_per_tensor":
        return [nearest(x / given, E4M3FN) * given for x in row]
    width = 128 if case.variant == "deepseek_fp8" else 32
    found = []
    for start in range(0, len(row), width):
        block = row[start : start + width]
        scale = scale_of(max(map(abs, block)), case)
        found += [nearest(x / scale, E4M3FN) * scale for x in block]
    return found


def true_layer(case, inputs):
    """Exact arithmetic throughout; silu to 40 digits."""
    config = config_of(case)
    stored = moe.expert_operands(config, inputs)
    experts = [[operand_values(w.decoded()) for w in stored(expert)] for expert in range(2)]
    x_given, h_given = (None if s is None else Fraction(float(s)) for s in activation_scales(inputs))
    inner, limit, output = case.integer("intermediate"), config.limit, []
    for token, row in enumerate(inputs["x"].double().tolist()):
        x = true_quantised([Fraction(v) for v in row], case, x_given)
        total = [Fraction(0)] * case.integer("hidden")
        for place in range(case.integer("topk")):
            expert = int(inputs["ids"][token, place])
            weight = Fraction(float(inputs["weights"][token, place]))
            if expert < 0:
                continue
            w1, w2 = experts[expert]
            before, after = (weight, 1) if config.weight_on_input else (1, weight)
            s = [sum(a * b for a, b in zip(x, w, strict=True)) * before for w in w1]
            gate, up = (s[:inner], s[inner:]) if config.gate_first else (s[inner:], s[:inner])
            if limit is not None:
                gate = [min(g, Fraction(limit)) for g in gate]
                up = [max(min(u, Fraction(limit)), -Fraction(limit)) for u in up]
            h = []
            for g, u in zip(gate, up, strict=True):
                value = mpf(g.numerator) / g.denominator
                value = value / (1 + exp(-value))
                man, power = value.man_exp if hasattr(value, "man_exp") else (0, 0)
                sign = -1 if value < 0 else 1
                h.append(sign * abs(Fraction(int(man))) * Fraction(2) ** int(power) * u)
            h = true_quantised(h, case, h_given)
            for column in range(len(total)):
                total[column] += sum(a * b for a, b in zip(h, w2[column], strict=True)) * after
        output.append([float(t * Fraction(config.scaling)) for t in total])
    return torch.tensor(output, dtype=F64)


def operand_values(weight):
    return [[Fraction(v) for v in row] for row in weight.values.tolist()]


@pytest.mark.parametrize(
    ("variant", "scale"),
    [
        ("deepseek_fp8", "fp32"),
        ("deepseek_fp8", "ceil"),
        ("mxfp8", "ceil"),
        ("mxfp8", "floor"),
        ("w4a8", "ceil"),
        ("nvfp4", "e4m3"),
        ("w4a16", "none"),
        ("fp8_per_tensor", "fp32"),
        ("bf16", "none"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_exact_layer_is_admissible(variant, scale, seed):
    words = {
        "gate": ("first", "second")[seed % 2],
        "limit": ("none", "7")[seed % 2],
        "scaling": ("2.5", "1")[seed % 2],
        "weight": ("output", "output", "input")[seed],
        "values": ("normal", "outliers", "scale_ladder")[seed],
    }
    case = Case.make(
        "moe", variant, seed=seed, experts=2, topk=2, hidden=40, intermediate=36, tokens=2, ids="spread", out="fp32",
        scale=scale, **words,
    )  # fmt: skip
    inputs = moe.inputs(case)
    with mp.workdps(40):
        expected = true_layer(case, inputs)
    # The least freedom: sums in FP64, functions within half an ulp of FP32.
    strict = Recipe(source="a test", accumulator="fp64", exp_error=2.0**-24)
    found = moe.admissible(case, inputs, strict).interval
    nominal = round_to(expected, torch.float32)
    assert bool(((nominal >= found.lo) & (nominal <= found.hi)).all())


def test_e2m1_numbers_of_the_search():
    assert [float(nearest(Fraction(n, 4), E2M1)) for n in (1, 3, 5, 7, 10, 14, 20, 99)] == [0, 1, 1, 2, 2, 4, 4, 6]
