"""Metamorphic properties: twins are cases, with the answers expected of them; faults that bounds have room for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conformance import relations
from conformance.backends.hopper_model import backends as hopper_models
from conformance.backends.torch_ops import TorchBackend
from conformance.capsule import Capsule
from conformance.discover import UsageError
from conformance.ledger import load
from conformance.operations import OPERATIONS
from conformance.relations import EVERY, FIRST, Expected, Relation, twin_of
from conformance.script import export
from conformance.shrink import LocalProbe, shrink
from conformance.worker_tensors import to_wire
from fuzz.anatomy import problem
from fuzz.case import Case
from fuzz.grammar import GRAMMAR
from fuzz.inputs import build
from fuzz.plan import draw_plan
from references.recipes import Recipe

FOLLOWED = ("quantize", "gemm", "grouped_gemm", "routing", "moe")


class Changed(TorchBackend):
    """torch with another answer, or another recipe."""

    def __init__(self, change=None, **choices):
        super().__init__("torch", "fp32")
        self._alter, self._choices = change or (lambda case, inputs, parts: parts), choices

    def recipe(self, claim):
        return Recipe.from_json({**super().recipe(claim).to_json(), **self._choices})

    def prepare(self, case, inputs, options):
        call = super().prepare(case, inputs, options)
        return lambda: self._alter(case, inputs, call())


def followed(case, number):
    return case.replace(seed=FIRST + EVERY * number)


def seed_for(case, name):
    """The case under a seed whose twin has this property."""
    for number in range(24):
        found = twin_of(followed(case, number), build(followed(case, number)))
        if found is not None and found[0].name == name:
            return followed(case, number)
    raise AssertionError(name)


def properties(backend, case):
    records = LocalProbe(backend).records(case)
    named = {item.part.removeprefix("property:"): item for item in records if item.part.startswith("property:")}
    return {name: item for name, item in named.items() if name != "tensor"}


GEMM = Case.parse("gemm mxfp8 v=1 k=256 layout=plain m=12 n=9 out=fp32 scale=ue8m0 values=normal seed=0")
PLAIN = Case.parse("gemm bf16 v=1 k=256 layout=plain m=12 n=9 out=fp32 scale=none values=normal seed=0")
INTEGERS = Case.parse("gemm bf16 v=1 k=64 layout=plain m=12 n=9 out=fp32 scale=none values=integer seed=0")
MASKED = Case.parse(
    "grouped_gemm bf16 v=1 grouping=masked groups=3 k=64 layout=plain m=8 n=9 out=fp32 scale=none values=normal seed=0"
)
CONTIGUOUS = MASKED.replace(grouping="contiguous", m=24)
QUANTIZE = Case.parse(
    "quantize mxfp8 v=1 block=1x32 dtype=fp32 k=128 m=6 scale=ceil stride=transposed values=normal seed=0"
)
ROUTING = Case.parse(
    "routing Renormalize v=1 dtype=fp32 experts=12 out=fp32 padding=none shared=1 stride=padded tokens=14 topk=3 "
    "values=normal seed=0"
)
PADDED = ROUTING.replace(padding="some", out="local")
LAYER = Case.parse(
    "moe bf16 v=1 experts=5 gate=first hidden=64 ids=map_any intermediate=34 limit=none out=fp32 scale=none scaling=1 "
    "tokens=9 topk=2 values=normal weight=output seed=0"
)
EVERY_PROPERTY = [
    *((QUANTIZE, name) for name in ("rows", "subset", "columns", "negated")),
    *((GEMM, name) for name in ("rows", "subset", "k_blocks", "padded", "doubled", "negated")),
    *((MASKED, name) for name in ("rows", "groups", "unused", "doubled", "negated")),
    *((CONTIGUOUS, name) for name in ("rows", "unused")),
    *((ROUTING, name) for name in ("rows", "subset", "experts", "shifted")),
    (PADDED, "unused"),
    *((LAYER, name) for name in ("rows", "subset", "slots", "experts", "unused", "doubled")),
]


@pytest.mark.parametrize(("case", "name"), EVERY_PROPERTY, ids=lambda item: str(item).split(" v=")[0])
def test_a_right_backend_has_every_property(case, name):
    case = seed_for(case, name)
    inputs = build(case)
    relation, twin = twin_of(case, inputs)
    assert problem(twin.case, twin.inputs) is None
    assert twin.case.text != case.text or any(not torch.equal(twin.inputs[key], inputs[key]) for key in inputs)
    found = properties(Changed(), case)
    assert found[name].verdict == "pass", found[name].message
    assert found[name].bit_equal is not None or name == "shifted"
    if relation.demand == "run_to_run":
        assert found[name].bit_equal == 1.0


def test_the_table_of_the_docs_is_whole():
    page = (Path(__file__).parents[2] / "docs" / "properties.md").read_text()
    for operation in FOLLOWED:
        assert f"| `{operation}` |" in page
        assert all(f"`{relation.name}`" in page for relation in relations.relations(operation))


def test_one_seed_in_thirty_two_is_followed_and_every_property_has_its_turn():
    names = set()
    for number in range(EVERY * 12):
        found = twin_of(GEMM.replace(seed=number), build(GEMM.replace(seed=number)))
        assert (found is not None) == (number % EVERY == FIRST)
        if found is not None:
            names.add(found[0].name)
    assert names == {relation.name for relation in relations.relations("gemm")}
    assert twin_of(Case.parse("ue8m0 ceil v=1 from=scale n=4 values=normal seed=7"), {"x": torch.ones(4)}) is None


def test_drawn_cases_have_twins_that_are_cases():
    for operation in FOLLOWED:
        for variant in GRAMMAR[operation]:
            for number, case in enumerate(draw_plan([(operation, variant)], 6, 1, 2**9)):
                case = followed(case, number)
                inputs = build(case)
                before = {name: tensor.clone() for name, tensor in inputs.items()}
                found = twin_of(case, inputs)
                if found is None:
                    continue
                assert problem(found[1].case, found[1].inputs) is None
                assert set(found[1].inputs) == set(inputs)
                for name, tensor in inputs.items():
                    same = (tensor == before[name]) | ((tensor != tensor) & (before[name] != before[name]))
                    assert bool(same.all()), name


def nosy(case, inputs, parts):
    """A row's sums are an ulp up if the row above has the larger sum: within every bound, since K is long."""
    output = parts["output"].clone()
    larger = output[1:].sum(1) < output[:-1].sum(1)
    output[1:][larger] = torch.nextafter(output[1:][larger], torch.tensor(torch.inf))
    return {"output": output}


def test_a_row_that_takes_in_its_neighbour_is_found_though_it_is_inside():
    case = seed_for(PLAIN, "rows")
    assert properties(Changed(nosy, accumulator="fp32_any"), case)["rows"].verdict == "pass"
    found = properties(Changed(nosy, permutation_invariant=True, accumulator="fp32_any"), case)["rows"]
    assert found.verdict == "wrong"
    assert "rows of A in another order" in found.message
    assert "(permutation_invariant)" in found.message
    assert found.bit_equal < 1


def test_a_property_shrinks_to_two_rows():
    probe = LocalProbe(Changed(nosy, permutation_invariant=True, accumulator="fp32_any"))
    found = shrink(seed_for(PLAIN, "rows"), probe, tries=120)
    assert found is not None
    assert (found.case.integer("m"), found.case.integer("n"), found.case.integer("k")) == (2, 1, 1)


def test_a_kernel_for_few_rows_that_is_wrong_is_found_by_half_of_them():
    def few(case, inputs, parts):
        return {"output": parts["output"] * (1.5 if case.integer("m") == 6 else 1)}

    found = properties(Changed(few), seed_for(GEMM, "subset"))["subset"]
    assert found.verdict == "wrong"
    assert found.message.startswith("the first half of A's rows alone: output: ")


def test_what_the_ledger_knows_is_known_of_a_twin_too(tmp_path):
    def few(case, inputs, parts):
        return {"output": parts["output"] * (1.5 if case.integer("m") == 6 else 1)}

    found = properties(Changed(few), seed_for(GEMM, "subset"))["subset"]
    entry = (
        'id = "few-rows"\nbackend = "torch"\nversions = ""\noperation = "gemm"\nvariants = ["mxfp8"]\n'
        f'verdict = "wrong"\nmessage = "outside"\nreason = "x"\nwitness = "{GEMM}"\n'
    )
    for part, known in (("output", "few-rows"), ("scales", None)):
        (tmp_path / "ledger.toml").write_text(f'[[entry]]\n{entry}part = "{part}"\n')
        assert load(tmp_path / "ledger.toml").match(found) == known


def test_a_sum_that_is_not_linear_is_found():
    def biased(case, inputs, parts):
        return {"output": parts["output"] + 2.0**-12}

    for name in ("doubled", "negated"):
        found = properties(Changed(biased, accumulator="fp32_any"), seed_for(PLAIN, name))[name]
        assert found.verdict == "wrong"
        assert "(run_to_run)" in found.message


def test_what_is_not_used_must_not_count():
    def leaking(case, inputs, parts):
        last = inputs["a"].view(torch.int16)[:, -1, 0]
        stray = bool(((last % 2 == 1) & (inputs["masked_m"] < 8)).any())
        return {"output": parts["output"] * (1 + 2.0**-22 * stray)}

    found = []
    for number in range(60):
        case = followed(MASKED, number)
        twin = twin_of(case, build(case))
        if twin is not None and twin[0].name == "unused":
            found += properties(Changed(leaking, accumulator="fp32_any"), case).values()
    wrong = [item for item in found if item.verdict == "wrong"]
    assert 0 < len(wrong) < len(found)
    assert all("(run_to_run)" in item.message for item in wrong)


def test_a_wrong_answer_is_not_asked_about_again():
    def wrong(case, inputs, parts):
        return {"output": parts["output"] + 1}

    assert properties(Changed(wrong), seed_for(GEMM, "rows")) == {}


def test_an_exception_on_the_twin_names_the_property():
    def failing(case, inputs, parts):
        if case.integer("m") == 6:
            raise RuntimeError("no kernel for 6 rows")
        return parts

    (record,) = LocalProbe(Changed(failing)).records(seed_for(GEMM, "subset"))
    assert record.verdict == "error"
    assert "property:subset, the first half of A's rows alone" in record.message


def test_a_twin_beyond_the_claims_is_not_called():
    class Narrow(Changed):
        def claims(self, device):
            from dataclasses import replace

            return [replace(item, multiples={"m": 12}) for item in super().claims(device) if item.operation == "gemm"]

    assert properties(Narrow(), seed_for(GEMM, "subset")) == {}
    assert set(properties(Narrow(), seed_for(GEMM, "rows"))) == {"rows"}


def test_integers_have_one_answer_in_any_order():
    for name in ("k_blocks", "padded", "rows", "subset"):
        found = properties(Changed(), seed_for(INTEGERS, name))[name]
        assert (found.verdict, found.bit_equal) == ("pass", 1.0)
    layer = LAYER.replace(values="saturated")
    for name in ("slots", "experts", "rows", "subset", "doubled"):
        found = properties(Changed(), seed_for(layer, name))[name]
        assert (found.verdict, found.bit_equal) == ("pass", 1.0)


def test_hoppers_models_declare_what_they_have():
    case = Case.parse("gemm deepseek_fp8 v=1 k=256 layout=plain m=6 n=9 out=fp32 scale=fp32 values=normal seed=0")
    for backend in hopper_models():
        assert all(
            backend.recipe(item).permutation_invariant and backend.recipe(item).batch_invariant
            for item in backend.claims("cpu")
        )
        if LocalProbe(backend).covers(case):
            for name in ("rows", "subset", "padded"):
                assert properties(backend, seed_for(case, name))[name].bit_equal == 1.0


def test_expected_values_by_hand():
    case = seed_for(LAYER, "doubled")
    _, twin = twin_of(case, build(case))
    (item,) = twin.expected({"output": torch.tensor([[1.0, torch.inf]])}).values()
    assert isinstance(item, Expected)
    assert item.values.tolist() == [[2.0, torch.inf]]
    assert item.where.tolist() == [[True, False]]
    relation = Relation("x", "y", "", lambda case, inputs: None)
    assert relation.twin(case, {}) is None
    assert OPERATIONS[case.operation].outputs(twin.case)["output"].shape == (9, 64)


def test_a_script_does_not_compare_two_answers():
    capsule = Capsule(
        case=GEMM.text, origin=GEMM.text, part="property:rows", verdict="wrong", backend="torch", input_sha256="0" * 64
    )
    with pytest.raises(UsageError, match="compares two answers"):
        export(capsule, None, {}, {})


def test_wires_are_told_apart():
    own, twin = relations.split([to_wire("output", torch.ones(2)), to_wire("twin:output", torch.zeros(3))])
    assert [(wire.name, wire.shape) for wire in (*own, *twin)] == [("output", (2,)), ("output", (3,))]
