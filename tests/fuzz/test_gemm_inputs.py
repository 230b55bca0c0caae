"""Inputs of GEMMs have the stated shapes, hold no NaN where they are read, and each profile does what it is for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.operations import gemm, grouped_gemm
from fuzz.case import Case
from fuzz.gemm_profiles import to_codes
from fuzz.grammar import GEMM_FORMATS, GEMM_LAYOUTS, GEMM_SCALES, GEMM_VALUES, GROUPINGS
from fuzz.inputs import build
from fuzz.philox import words as stream
from fuzz.strategies import Limits, cases
from fuzz.values import ELEMENTS, midpoints, normal
from references.backend import NORMAL_VALUES
from references.elements import E2M1, E4M3FN, decode, encode
from references.gemm_formats import sides
from references.layouts import packed_dtype, packed_shape, padding_mask, slots

BLOCKS = {"mxfp8": (32, 32), "w4a8": (32, 32), "w4a16": (0, 32), "nvfp4": (16, 16), "bf16": (0, 0)}


def make(variant="deepseek_fp8", operation="gemm", seed=1, **params):
    words = {
        "k": 290,
        "layout": "plain",
        "m": 5,
        "n": 131,
        "out": "bf16",
        "scale": GEMM_SCALES[variant][0],
        "values": "normal",
    }
    if operation == "grouped_gemm":
        words |= {"groups": 4, "grouping": "contiguous"}
    return Case.make(operation, variant, seed=seed, **{**words, **params})


def shapes(case):
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in build(case).items()}


def test_shapes_by_hand():
    assert shapes(make()) == {
        "a": ("uint8", (5, 290)),
        "a_scales": ("float32", (5, 3)),
        "b": ("uint8", (131, 290)),
        "b_scales": ("float32", (2, 3)),
    }
    assert shapes(make(layout="mn_major"))["a_scales"] == ("float32", (3, 8))
    assert shapes(make(layout="mn_major", scale="ue8m0"))["a_scales"] == ("int32", (1, 8))
    assert shapes(make("w4a16")) == {
        "a": ("bfloat16", (5, 290)),
        "b": ("uint8", (131, 145)),
        "b_scales": ("uint8", (131, 10)),
    }
    assert shapes(make("nvfp4"))["b_global_scale"] == ("float32", (1,))
    assert shapes(make("fp8_per_tensor"))["a_scales"] == ("float32", (1, 1))
    assert shapes(make("bf16")).keys() == {"a", "b"}
    grouped = shapes(make(operation="grouped_gemm", grouping="masked"))
    assert grouped["a"] == ("uint8", (4, 5, 290))
    assert grouped["a_scales"] == ("float32", (4, 5, 3))
    assert grouped["b_scales"] == ("float32", (4, 2, 3))
    assert grouped["masked_m"] == ("int32", (4,))
    assert shapes(make(operation="grouped_gemm"))["m_indices"] == ("int32", (5,))


@settings(max_examples=80, deadline=None)
@given(case=cases("gemm", limits=Limits(4000, blocks=0)))
def test_operands_decode_to_finite_numbers_whose_products_stay_in_range(case):
    a, b = gemm.operands(case, build(case))
    for side in (a, b):
        assert side.values.isfinite().all()
        assert (side.scales > 0).all()
    assert float((a.values.abs() @ b.values.abs().T).max()) < 2.0**120


@pytest.mark.parametrize("variant", ["deepseek_fp8", "mxfp8", "nvfp4"])
def test_padding_of_a_stored_order_is_garbage(variant):
    case = make(variant, layout=GEMM_LAYOUTS[variant][-1], scale=GEMM_SCALES[variant][-1])
    plain = build(make(variant, scale=GEMM_SCALES[variant][-1]))
    found = build(case)["a_scales"]
    order = {"deepseek_fp8": "mn_major_packed"}.get(variant, "interleave_128x4")
    rows, cols = plain["a_scales"].shape
    assert found.dtype == packed_dtype(order)
    assert tuple(found.shape) == packed_shape(order, rows, cols)
    padding = padding_mask(order, rows, cols)
    assert (slots(found, order)[padding] == 0xFF).any()


def test_nearest_codes_are_those_of_the_encoder():
    numbers = np.linspace(-500, 500, 4001) + 1 / 3
    for element, mine in ((E4M3FN, "e4m3"), (E2M1, "e2m1")):
        expected = encode(torch.from_numpy(numbers), element)
        assert torch.equal(torch.from_numpy(to_codes(numbers, ELEMENTS[mine])), expected)


@pytest.mark.parametrize("variant", GEMM_FORMATS)
def test_integer_sums_fit_thirteen_bits(variant):
    a, b = gemm.operands(*[(case := make(variant, values="integer", k=1024)), build(case)])
    for side in (a, b):
        assert torch.equal(side.codes, side.codes.round())
        assert float(side.codes.abs().max()) == 2.0
        assert set(side.scales.unique().tolist()) <= {1.0, 2.0}
    assert float((a.values.abs() @ b.values.abs().T).max()) < 2.0**14


@pytest.mark.parametrize("variant", GEMM_FORMATS)
def test_single_leaves_one_product_an_output(variant):
    a, _ = gemm.operands(*[(case := make(variant, values="single")), build(case)])
    assert ((a.values != 0).sum(1) == 1).all()
    assert len(set((a.values != 0).int().argmax(1).tolist())) > 1


@pytest.mark.parametrize("variant", GEMM_FORMATS)
def test_cancellation_cancels(variant):
    a, b = gemm.operands(*[(case := make(variant, values="cancellation", m=20)), build(case)])
    sums = (a.values @ b.values.T).abs()
    assert float((sums / (a.values.abs() @ b.values.abs().T)).median()) < 0.02


@pytest.mark.parametrize("name", ["a", "b"])
def test_codes_are_all_there(name):
    assert set(build(make(values="codes"))[name].unique().tolist()) == set(range(256)) - {127, 255}


def test_outliers_stand_out_in_every_group_of_32():
    codes = decode(build(make(values="outliers", k=256))["a"], E4M3FN).abs().view(5, 8, 32)
    assert ((codes > 200).sum(2) == 1).all()
    assert ((codes < 10).sum(2) == 31).all()


@pytest.mark.parametrize("variant", [word for word in GEMM_FORMATS if word not in ("bf16", "fp8_per_tensor")])
def test_neighbouring_scales_differ(variant):
    for values in set(GEMM_VALUES) - {"integer"}:
        made = build(make(variant, values=values, m=9, n=300, scale=GEMM_SCALES[variant][-1]))
        for name, side in zip("ab", sides(variant, GEMM_SCALES[variant][-1]), strict=True):
            if side.scale is None:
                continue
            scales = made[f"{name}_scales"].to(torch.int32)
            assert (scales[1:] != scales[:-1]).all()
            assert (scales[:, 1:] != scales[:, :-1]).all()


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda element: element.name)
def test_codes_are_the_nearest_and_the_upper_one_at_a_midpoint(element):
    middle = midpoints(element)
    numbers = np.concatenate(
        [middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf), element.magnitudes, [5e-324, 2.0**-1022, 1e300]]
    )
    numbers = np.concatenate([numbers, normal(stream(bytes(16), 0, 2**14)) * element.qmax / 3.0])
    expected = np.searchsorted(middle, np.abs(numbers), side="right")
    for sign in (1.0, -1.0):
        signed = np.copysign(numbers, sign * np.copysign(1.0, numbers))
        assert np.array_equal(to_codes(signed, element), expected + np.where(np.signbit(signed), element.sign, 0))


def test_subnormal_outputs_are_subnormal():
    for variant in GEMM_FORMATS:
        a, b = gemm.operands(*[(case := make(variant, values="subnormal")), build(case)])
        exact = (a.values @ b.values.T).abs()
        if variant == "fp16":  # no product of FP16 numbers is an FP32 subnormal; the operands are subnormal instead
            assert float((a.size < 2.0**-14).double().mean()) > 0.5
            continue
        assert float(exact.median()) < 2.0**-115
        assert float(exact.max()) >= 2.0**-149


# Groups


def rows_of(case):
    made = build(case)
    return grouped_gemm.row_groups(case, made), made


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_a_group_are_together(grouping, seed):
    case = make(operation="grouped_gemm", grouping=grouping, groups=5, m=300 if grouping != "masked" else 20, seed=seed)
    rows, _ = rows_of(case)
    used = rows[rows >= 0]
    assert torch.equal(used, used.sort().values)
    for group in used.unique():
        where = (rows == group).nonzero().view(-1)
        assert len(where) == where[-1] - where[0] + 1
        start = {"contiguous": 1, "contiguous_128": 128, "masked": 20}[grouping]
        assert int(where[0]) % start == 0


def test_there_are_empty_groups_padding_rows_and_full_slabs():
    empty, padding, full = 0, 0, 0
    for seed in range(30):
        rows, _ = rows_of(make(operation="grouped_gemm", m=40, groups=4, seed=seed))
        empty += len(set(range(4)) - set(rows.tolist()))
        padding += int((rows < 0).sum())
        _, made = rows_of(make(operation="grouped_gemm", m=4, groups=4, seed=seed, grouping="masked"))
        full += int((made["masked_m"] == 4).sum())
        empty += int((made["masked_m"] == 0).sum())
    assert min(empty, padding, full) > 10


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_stale_rows_hold_garbage_and_others_do_not(grouping):
    kinds = set()
    for seed in range(8):
        case = make(operation="grouped_gemm", grouping=grouping, groups=3, m=150, seed=seed)
        rows, made = rows_of(case)
        codes, scales = made["a"].reshape(-1, 290), made["a_scales"].reshape(-1, 3)
        stale = rows < 0
        if bool(stale.any()):
            kinds |= set(codes[stale].unique().tolist())
            assert (scales[stale].isnan() | (scales[stale] > 1e38)).all()
        assert decode(codes[~stale], E4M3FN).isfinite().all()
        assert scales[~stale].isfinite().all()
    assert kinds == {0x7F, 0x7E}


def test_groups_have_weights_of_their_own():
    made = build(make(operation="grouped_gemm"))
    assert not torch.equal(made["b"][0], made["b"][1])
    assert not torch.equal(made["b_scales"][0], made["b_scales"][1])


@settings(max_examples=40, deadline=None)
@given(case=cases("grouped_gemm", limits=Limits(4000, blocks=0)), seed=st.integers(0, 3))
def test_every_used_row_has_finite_operands(case, seed):
    case = case.replace(seed=seed)
    made = build(case)
    rows = grouped_gemm.row_groups(case, made)
    count = 0
    for where, a, b in grouped_gemm.group_operands(case, made, rows):
        assert a.values.isfinite().all()
        assert b.values.isfinite().all()
        count += len(where)
    assert count == int((rows >= 0).sum())


def test_claims_and_the_grammar_know_the_same_profiles() -> None:
    assert (*NORMAL_VALUES, "subnormal") == GEMM_VALUES
