"""The command that looks for false alarms: every implementation is used, none is rejected, a wrong one is."""

import torch

from benchmarks import legal_variants, summation
from benchmarks.legal_variants import ANY, Legal, Tally, cut, draw, examine, legal, main, size, table
from conformance.operations import OPERATIONS
from fuzz.case import Case
from fuzz.grammar import GRAMMAR


def test_a_few_cases_of_every_format_raise_no_alarm():
    tallies = {}
    for operation in legal_variants.OPERATION_NAMES:
        for variant in GRAMMAR[operation]:
            examine(draw(operation, variant, 3, 7), tallies)
    assert len(tallies) == sum(len(GRAMMAR[operation]) for operation in legal_variants.OPERATION_NAMES)
    assert all(tally.cases == 3 for tally in tallies.values())
    assert [line for tally in tallies.values() for line in tally.rejected] == []
    assert table(tallies).splitlines()[-1].startswith(f"| **all** | | {3 * len(tallies)} | 0 | ")


def test_every_implementation_covers_some_drawn_case():
    for operation, items in legal().items():
        cases = [case for variant in GRAMMAR[operation] for case in draw(operation, variant, 12, 0)]
        idle = {item.name for item in items} - {item.name for item in items if any(map(item.covers, cases))}
        assert not idle


def test_a_wrong_answer_is_counted(monkeypatch, capsys):
    def doubled(case, inputs):
        return {"output": 2 * right.answer(case, inputs)["output"]}

    right = legal()["gemm"][0]
    monkeypatch.setattr(legal_variants, "legal", lambda: {"gemm": [Legal("doubled", doubled, ANY)]})
    assert main(["--cases", "2", "--operation", "gemm"]) == 1
    assert "doubled: output" in capsys.readouterr().out


def test_medians_by_hand():
    tally = Tally(cases=3, largest={"fp32": [0.5, 0.1, 0.3], "bf16": [1.0]}, typical={"fp32": [0.02, 0.04]})
    assert tally.medians() == "0.3 | 1 | 0.03 | "


def test_ways_to_multiply_agree():
    a, b = torch.randn(5, 37), torch.randn(4, 37)
    for name, (matmul, _) in legal_variants.MATMULS.items():
        assert torch.allclose(matmul(a, b), a @ b.T, atol=1e-4), name


def test_grouped_products_are_cut_until_they_are_small():
    case = Case.parse(
        "grouped_gemm nvfp4 v=1 grouping=masked groups=7 k=4098 layout=plain m=300 n=90 out=fp32 scale=e4m3 "
        "values=normal seed=4"
    )
    found = cut(case)
    assert size(found) <= legal_variants.MOST < size(case)
    assert found.integer("k") % 2 == 0
    assert (found["values"], found.seed, found["grouping"]) == ("normal", 4, "masked")
    assert len({case.text for case in draw("grouped_gemm", "bf16", 40, 1)}) == 40


def test_orders_by_hand():
    """Behind 2^24 FP32 holds even numbers alone: a 1 is lost to nearest, and of a 3 one is cut."""
    big, ones = 2.0**24, torch.ones(1, 3)
    assert float(summation.largest_first(torch.tensor([[1.0, 1.0, big]]), ones)) == big
    assert float(summation.positive_first(torch.tensor([[-1.0, 1.0, big]]), ones)) == big - 1
    assert float(summation.positive_first_truncating(torch.tensor([[0.0, 3.0, big]]), ones)) == big + 2
    rows = torch.arange(12.0).view(4, 3) - 5
    assert torch.equal(summation.positive_first(rows, rows), rows @ rows.T)


def test_sums_in_fp64_pass_as_a_whole():
    """FP32 outputs of dense and grouped products, whose roundings are no errors of the sum."""
    for operation, words in (("gemm", ""), ("grouped_gemm", "grouping=masked groups=3 ")):
        case = Case.parse(
            f"{operation} fp16 v=1 {words}k=64 layout=plain m=40 n=40 out=fp32 scale=none values=wide seed=1"
        )
        inputs = OPERATIONS[operation].inputs(case)
        right = next(item for item in legal()[operation] if item.name == "FP64 sums")
        verdicts = OPERATIONS[operation].judge(case, inputs, right.answer(case, inputs), right.recipe)
        assert {verdict.part: verdict.verdict for verdict in verdicts} == {"output": "pass", "property:tensor": "pass"}
