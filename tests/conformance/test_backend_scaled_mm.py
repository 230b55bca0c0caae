"""torch._scaled_mm on a CPU: hand-worked products, claims, and the judge's verdict on every profile."""

import pytest
import torch

from conformance.backends.torch_scaled_mm import backends
from conformance.operations import gemm
from fuzz.case import Case
from fuzz.grammar import GEMM_VALUES
from fuzz.inputs import build
from references.backend import Backend, Unsupported
from references.gemm_models import has_model

PLAIN, FAST, ROWS = backends()
TEXT = "gemm fp8_per_tensor v=1 k=%d layout=plain m=%d n=%d out=%s scale=fp32 values=%s seed=3"


def run(text, inputs):
    return PLAIN.run(PLAIN.prepare(Case.parse(text), inputs, {}), {})["output"]


def test_they_are_backends_and_fast_accumulation_is_for_gpus():
    assert all(isinstance(backend, Backend) for backend in (PLAIN, FAST, ROWS))
    assert [claim.variant for claim in PLAIN.claims("cpu")] == ["fp8_per_tensor"]
    assert [*FAST.claims("cpu"), *ROWS.claims("cpu")] == []


def test_a_product_by_hand():
    """(1 * 2 + 2 * 0.5) * 0.5 * 4 = 6: E4M3 1.0 is 0x38, 2.0 0x40, 0.5 0x30."""
    inputs = {
        "a": torch.tensor([[0x38, 0x40]], dtype=torch.uint8),
        "b": torch.tensor([[0x40, 0x30]], dtype=torch.uint8),
        "a_scales": torch.tensor([[0.5]]),
        "b_scales": torch.tensor([[4.0]]),
    }
    assert run(TEXT % (2, 1, 1, "fp32", "normal"), inputs).tolist() == [[6.0]]


def test_by_rows_every_row_gets_the_tensors_scale(monkeypatch):
    """The same product, where the operator asks for one scale a row of A and one a column of B."""
    inputs = {
        "a": torch.full((3, 2), 0x38, dtype=torch.uint8),
        "b": torch.full((4, 2), 0x40, dtype=torch.uint8),
        "a_scales": torch.tensor([[0.5]]),
        "b_scales": torch.tensor([[4.0]]),
    }

    def operator(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
        assert (scale_a.shape, scale_b.shape, use_fast_accum) == ((3, 1), (1, 4), False)
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", operator)
    case = Case.parse(TEXT % (2, 3, 4, "bf16", "normal"))
    assert ROWS.run(ROWS.prepare(case, inputs, {}), {})["output"].tolist() == [[8.0] * 4] * 3


@pytest.mark.parametrize("values", GEMM_VALUES)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_every_profile_passes(values, out):
    case = Case.parse(TEXT % (150, 9, 33, out, values))
    inputs = gemm.inputs(case)
    (claim,) = PLAIN.claims("cpu")
    output = run(case.text, inputs)
    verdicts = gemm.judge(case, inputs, {"output": output}, PLAIN.recipe(claim))
    assert [verdict.verdict for verdict in verdicts] == ["pass"] * len(verdicts)


def test_other_formats_are_refused():
    case = Case.parse("gemm mxfp8 v=1 k=32 layout=plain m=1 n=1 out=bf16 scale=ue8m0 values=normal seed=0")
    with pytest.raises(Unsupported, match="mxfp8"):
        PLAIN.prepare(case, {}, {})


def test_on_sm90_the_products_with_one_scale_have_an_exact_model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    case = Case.parse(TEXT % (256, 2, 16, "fp32", "normal"))
    a, b = gemm.operands(case, build(case))
    for backend, promotion in zip(backends(), ("every_128", "none", "every_128"), strict=True):
        [claim] = backend.claims("cuda:0")
        recipe = backend.recipe(claim)
        assert recipe.accumulator == "hopper_fp8"
        assert recipe.promotion == promotion
        assert has_model(a, b, recipe) == (backend.name != "torch_scaled_mm_rows")
