"""What is drawn is valid, reaches everything and shrinks to the simplest."""

import math
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from fuzz.case import Case
from fuzz.grammar import GRAMMAR, Choice, Size
from fuzz.strategies import Limits, cases, interesting_sizes, register_profiles, unit

GROUPS = [(operation, variant) for operation in GRAMMAR for variant in GRAMMAR[operation]]
SEARCH = settings(
    max_examples=1000,
    phases=[Phase.generate, Phase.shrink],
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@settings(max_examples=150, deadline=None)
@given(case=cases(), few=st.integers(1, 600), data=st.data())
def test_cases_are_valid_and_within_limits(case, few, data):
    assert Case.parse(case.text) == case
    small = data.draw(cases(case.operation, case.variant, Limits(few, blocks=0)))
    assert (small.operation, small.variant) == (case.operation, case.variant)
    sizes = {key: d for key, d in GRAMMAR[case.operation][case.variant].keys.items() if isinstance(d, Size)}
    if case.operation == "routing":
        sizes = {key: sizes[key] for key in ("experts", "tokens")}
    if case.operation == "moe":
        sizes = {key: sizes[key] for key in ("experts", "hidden", "intermediate")}
    least = math.prod(max(d.least, d.multiple) for d in sizes.values())
    assert math.prod(small.integer(key) for key in sizes) <= max(few, least)


@pytest.mark.parametrize(("operation", "variant"), GROUPS)
def test_every_group_shrinks_to_first_words_small_sizes_and_seed_0(operation, variant):
    expected = {}
    for key, domain in GRAMMAR[operation][variant].keys.items():
        expected[key] = domain.values[0] if isinstance(domain, Choice) else str(max(domain.least, domain.multiple))
    simplest = find(cases(operation, variant), lambda case: True, settings=settings(SEARCH, max_examples=5))
    assert simplest == Case.make(operation, variant, seed=0, **expected)


def test_a_cause_is_shrunk_to_itself():
    def ragged_and_transposed(case):
        return case["stride"] == "transposed" and case.integer("k") % 32 != 0 and case.integer("k") > 32

    case = find(cases("quantize", "mxfp8"), ragged_and_transposed, settings=SEARCH)
    assert case.text == (
        "quantize mxfp8 v=1 block=1x32 dtype=fp32 k=33 m=1 scale=ceil stride=transposed values=normal seed=0"
    )


def test_sizes_sit_beside_multiples_of_the_block():
    sizes = interesting_sizes(Size(), 128, 1000)
    assert {1, 2, 3, 127, 128, 129, 255, 256, 257, 5, 31, 509, 512} <= set(sizes)
    assert list(sizes) == sorted(sizes)
    assert max(sizes) <= 1000
    even = interesting_sizes(Size(multiple=2), 16, 64)
    assert {2, 14, 30, 32, 34, 64} <= set(even)
    assert all(size % 2 == 0 for size in even)
    assert interesting_sizes(Size(multiple=128), 128, 5) == (128,)


@pytest.mark.parametrize(
    ("operation", "words", "expected"),
    [
        ("quantize", {"block": "128x128"}, (128, 128)),
        ("quantize", {"block": "1x16"}, (1, 16)),
        ("dequantize", {"block": "tensor"}, (64, 64)),
    ],
)
def test_units_are_the_blocks(operation, words, expected):
    assert (unit(operation, "m", words), unit(operation, "k", words)) == expected


def test_units_of_other_operations():
    assert (unit("scale_layout", "rows", {}), unit("scale_layout", "cols", {})) == (128, 4)
    assert (unit("requantize", "n", {}), unit("requantize", "k", {})) == (128, 128)


@pytest.mark.parametrize(("operation", "variant"), [("quantise", None), ("quantize", "ceil"), (None, "fp7")])
def test_unknown_names_are_refused(operation, variant):
    with pytest.raises(ValueError, match="no operation"):
        cases(operation, variant)


def test_limits_are_positive():
    with pytest.raises(ValueError, match="max_elements=0"):
        Limits(0)


def test_profiles_are_registered_on_request_only():
    script = (
        "from hypothesis import settings\n"
        "before = settings.default.max_examples, settings.default.derandomize\n"
        "import fuzz.strategies\n"
        "assert (settings.default.max_examples, settings.default.derandomize) == before\n"
        "try:\n    settings.get_profile('nightly')\nexcept Exception: pass\nelse: raise SystemExit('on import')\n"
        "fuzz.strategies.register_profiles()\n"
        "print([settings.get_profile(name).max_examples for name in ('ci', 'dev', 'nightly')])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[60, 100, 2000]"
    register_profiles()
    assert Phase.generate in settings.get_profile("nightly").phases
