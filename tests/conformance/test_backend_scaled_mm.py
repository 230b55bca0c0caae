"""torch._scaled_mm on a CPU: hand-worked products, claims, and the judge's verdict on every profile."""

import pytest
import torch

from conformance.backends.torch_scaled_mm import backends
from conformance.operations import gemm
from fuzz.case import Case
from fuzz.grammar import GEMM_VALUES
from references.backend import Backend, Unsupported

PLAIN, FAST = backends()
TEXT = "gemm fp8_per_tensor v=1 k=%d layout=plain m=%d n=%d out=%s scale=fp32 values=%s seed=3"


def run(text, inputs):
    return PLAIN.run(PLAIN.prepare(Case.parse(text), inputs, {}), {})["output"]


def test_they_are_backends_and_fast_accumulation_is_for_gpus():
    assert all(isinstance(backend, Backend) for backend in (PLAIN, FAST))
    assert [claim.variant for claim in PLAIN.claims("cpu")] == ["fp8_per_tensor"]
    assert list(FAST.claims("cpu")) == []


def test_a_product_by_hand():
    """(1 * 2 + 2 * 0.5) * 0.5 * 4 = 6: E4M3 1.0 is 0x38, 2.0 0x40, 0.5 0x30."""
    inputs = {
        "a": torch.tensor([[0x38, 0x40]], dtype=torch.uint8),
        "b": torch.tensor([[0x40, 0x30]], dtype=torch.uint8),
        "a_scales": torch.tensor([[0.5]]),
        "b_scales": torch.tensor([[4.0]]),
    }
    assert run(TEXT % (2, 1, 1, "fp32", "normal"), inputs).tolist() == [[6.0]]


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
