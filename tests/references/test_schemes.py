"""The words of the case grammar as schemes."""

from __future__ import annotations

import pytest

from fuzz.grammar import BLOCKS, QUANT_SCALES, STORED_SCALES
from references.elements import E2M1, E4M3FN
from references.schemes import Scheme, scheme


def test_every_combination_of_the_grammar_has_a_scheme() -> None:
    for name, blocks in BLOCKS.items():
        for block in blocks:
            for scale in (*QUANT_SCALES[name], *STORED_SCALES[name]):
                found = scheme(name, block, scale)
                assert found.format == name
                assert (found.block is None) == (block == "tensor")
                assert found.element == (E2M1 if name in ("mxfp4", "nvfp4") else E4M3FN)


def test_hand_written_schemes() -> None:
    assert scheme("deepseek_fp8", "128x128", "ceil") == Scheme("deepseek_fp8", E4M3FN, (128, 128), "ue8m0", "ceil")
    assert scheme("mxfp4", "1x32", "ue8m0") == Scheme("mxfp4", E2M1, (1, 32), "ue8m0", None)
    assert scheme("fp8_per_tensor", "tensor", "static") == Scheme("fp8_per_tensor", E4M3FN, None, "static", None)
    assert scheme("nvfp4", "1x16", "e4m3").two_level
    assert not scheme("mxfp4", "1x32", "floor").two_level


@pytest.mark.parametrize(
    "words",
    [
        ("mxfp9", "1x32", "ceil"),
        ("mxfp8", "1x16", "ceil"),
        ("mxfp8", "1x32", "fp32"),
        ("nvfp4", "1x16", "ceil"),
        ("mxfp8", "1x32", "nearest"),
    ],
)
def test_unknown_words_are_one_line(words: tuple[str, str, str]) -> None:
    with pytest.raises(ValueError, match=r"\Ascheme: .*\Z"):
        scheme(*words)
