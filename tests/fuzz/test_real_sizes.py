from __future__ import annotations

from fuzz.case import Case
from fuzz.grammar import GRAMMAR, Size
from fuzz.real_shapes import real_cases


def test_every_operation_has_five_real_shapes() -> None:
    for operation, variants in GRAMMAR.items():
        for variant in variants:
            cases = real_cases(operation, variant)
            assert all(Case.parse(case.text) == case for case in cases)
            sizes = [key for key, domain in variants[variant].keys.items() if isinstance(domain, Size)]
            shapes = {tuple(case[key] for key in sizes) for case in cases}
            assert len(shapes) == len(cases) >= 5, (operation, variant)


def test_the_models_are_there() -> None:
    shapes = {tuple(case.integer(key) for key in "mnk") for case in real_cases("gemm", "deepseek_fp8")}
    assert {(4096, 4096, 7168), (512, 5120, 8192), (16, 3072, 4096), (8192, 2048, 768)} <= shapes
    assert {m for m, _, _ in shapes} >= {1, 8192}
    routed = {(case.integer("experts"), case.integer("topk")) for case in real_cases("routing", "DeepSeekV3")}
    assert routed == {(256, 8)}
    routed = {(case.integer("experts"), case.integer("topk")) for case in real_cases("routing", "SqrtSoftplus")}
    assert routed == {(384, 6)}
    layers = {tuple(case.integer(key) for key in ("hidden", "intermediate")) for case in real_cases("moe", "w4a8")}
    assert layers == {(7168, 2048), (7168, 256), (5120, 1024), (4096, 1536), (2048, 768)}


def test_one_output_has_more_than_2_31_elements() -> None:
    (vast,) = set(real_cases("gemm", "bf16", vast=True)) - set(real_cases("gemm", "bf16"))
    assert 2**31 < vast.integer("m") * vast.integer("n") < 2**32
