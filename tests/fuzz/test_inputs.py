"""Inputs have the shapes, dtypes and strides of docs/operations.md, come by the slice, and never drift."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fuzz import gemm_inputs, inputs
from fuzz.case import Case
from fuzz.grammar import GRAMMAR, STRIDES
from fuzz.hashing import sha256_of
from fuzz.inputs import build, row_count
from fuzz.strategies import Limits, cases
from references.layouts import pack, packed_shape, padding_mask, slots, unpack

GOLDEN = {
    text: sha256
    for sha256, text in (
        line.split(" ", 1) for line in Path(__file__).with_name("golden_inputs.txt").read_text().splitlines()
    )
}
"""Case -> SHA-256 of its inputs."""


GEMMS = ("gemm", "grouped_gemm", "moe")
"""Operations with several matrices; ``test_gemm_inputs.py`` and ``test_moe_inputs.py`` test their shapes."""


def raw(tensor):
    # A copy: contiguous() keeps the strides of a single element, which then cannot be viewed as bytes.
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("text", GOLDEN)
def test_values_never_drift(text):
    """A change here changes what every recorded case means: it needs a new version of the case grammar."""
    assert sha256_of(build(Case.parse(text))) == GOLDEN[text]


def test_golden_cases_hold_every_profile():
    found = {(case.operation, case["values"]) for case in map(Case.parse, GOLDEN)}
    assert found == {
        (operation, word)
        for operation, variants in GRAMMAR.items()
        for rule in variants.values()
        for word in rule.keys["values"].values
    }


def test_values_depend_on_no_thread_count_and_no_flush_mode():
    texts = list(GOLDEN)
    script = (
        "import torch\n"
        "torch.set_num_threads(1)\n"
        "torch.set_flush_denormal(True)\n"
        "from fuzz.case import Case\nfrom fuzz.hashing import sha256_of\nfrom fuzz.inputs import build\n"
        f"for text in {texts!r}: print(sha256_of(build(Case.parse(text))))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "3"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == list(GOLDEN.values())


@settings(max_examples=150, deadline=None)
@given(case=cases(limits=Limits(2000, blocks=0)), data=st.data())
def test_a_slice_is_the_same_rows_of_the_whole(case, data):
    whole = build(case)
    if case.operation in GEMMS or (case.operation == "scale_layout" and case["direction"] == "unpack"):
        return
    first = data.draw(st.integers(0, row_count(case) - 1))
    last = data.draw(st.integers(first + 1, row_count(case)))
    part = build(case, slice(first, last))
    assert part.keys() == whole.keys()
    for name, tensor in part.items():
        expected = whole[name]
        if name in ("x", "payload", "logits") or case.operation == "scale_layout":
            expected = expected[first:last]
        elif name == "scales":
            height = inputs.block_of(case)[0] if case.variant != "mxfp4_to_deepseek_fp8" else 1
            expected = expected[first // height : -(-last // height)]
        assert tensor.shape == expected.shape
        assert torch.equal(raw(tensor), raw(expected)), name


@settings(max_examples=60, deadline=None)
@given(case=cases(limits=Limits(4000, blocks=0)), chunk=st.sampled_from([1, 7, 100, 1000]))
def test_chunks_leave_no_trace(case, chunk):
    whole = sha256_of(build(case))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "CHUNK", chunk)
        patch.setattr(gemm_inputs, "CHUNK", chunk)
        assert sha256_of(build(case)) == whole


@settings(max_examples=100, deadline=None)
@given(case=cases(limits=Limits(2000, blocks=0)))
def test_shapes_and_dtypes(case):
    assume(case.operation not in GEMMS)
    found = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in build(case).items()}
    floats = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    match case.operation:
        case "ue8m0":
            expected = {"x": ("float32", (case.integer("n"),))}
        case "quantize":
            expected = {"x": (floats[case["dtype"]], (case.integer("m"), case.integer("k")))}
            expected |= {"scale": ("float32", (1,))} if case["scale"] == "static" else {}
        case "routing":
            expected = {"logits": (floats[case["dtype"]], (case.integer("tokens"), case.integer("experts")))}
            if "bias" in dict(case.params):
                expected["bias"] = (floats[case["bias_dtype"]], (case.integer("experts"),))
            if case["out"] == "local":
                expected["expert_map"] = ("int32", (case.integer("experts") + case.integer("shared"),))
        case "scale_layout":
            plain = "uint8" if case.variant in ("interleave_128x4", "mn_major_packed") else "float32"
            rows, cols = case.integer("rows"), case.integer("cols")
            expected = {"scales": (plain, (rows, cols))}
            if case["direction"] == "unpack":
                packed = "int32" if case.variant == "mn_major_packed" else plain
                expected = {"scales": (packed, packed_shape(case.variant, rows, cols))}
        case _:
            rows, k = row_count(case), case.integer("k")
            block = {"deepseek_fp8": (128, 128), "mxfp4_to_deepseek_fp8": (1, 32)}.get(case.variant)
            scale = "fp32" if case.variant == "deepseek_fp8" else "ue8m0"
            if case.operation == "dequantize":
                scale = case["scale"]
                word = case["block"]
                block = (rows, k) if word == "tensor" else tuple(map(int, word.split("x")))
            packed = 2 if "fp4" in case.variant else 1
            expected = {
                "payload": ("uint8", (rows, k // packed)),
                "scales": ("float32" if scale == "fp32" else "uint8", (-(-rows // block[0]), -(-k // block[1]))),
            }
    if case.variant == "nvfp4":
        expected["global_scale"] = ("float32", (1,))
    assert found == expected


def quantize(variant="mxfp8", seed=0, **params):
    words = {
        "block": "1x32",
        "dtype": "bf16",
        "k": 40,
        "m": 6,
        "scale": "ceil",
        "stride": "contiguous",
        "values": "normal",
    }
    return Case.make("quantize", variant, seed=seed, **{**words, **params})


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("seed", range(4))
def test_strides_are_as_named_and_memory_between_is_garbage(dtype, seed):
    x = {stride: build(quantize(seed=seed, dtype=dtype, stride=stride))["x"] for stride in STRIDES}
    assert x["contiguous"].stride() == (40, 1)
    assert x["transposed"].stride() == (1, 6)
    assert x["padded"].stride()[0] > 40
    assert x["padded"].stride()[1] == 1
    assert not x["padded"].is_contiguous()
    assert x["offset"].is_contiguous()
    assert x["offset"].storage_offset() > 0
    for stride, used in (("padded", 6 * 40), ("offset", 6 * 40)):
        storage = x[stride].untyped_storage()
        everything = torch.empty(0, dtype=x[stride].dtype).set_(storage)
        assert everything.numel() > used
        beside = ~everything.isfinite() if seed % 2 == 0 else everything == torch.finfo(x[stride].dtype).max
        assert beside.sum() == everything.numel() - used


def nvfp4(seed, values="normal", dtype="bf16"):
    words = {
        "block": "1x16",
        "dtype": dtype,
        "k": 64,
        "m": 9,
        "scale": "e4m3",
        "stride": "contiguous",
        "values": values,
    }
    return build(Case.make("quantize", "nvfp4", seed=seed, **words))


def test_global_scales_follow_the_library_or_are_powers_of_two_or_neither():
    kinds = set()
    for seed in range(24):
        made = nvfp4(seed)
        scale = float(made["global_scale"])
        library = float(np.float32(made["x"].double().abs().max().item() / 2688))
        kinds.add("library" if scale == library else "power" if np.frexp(scale)[0] == 0.5 else "neither")
        # No choice drives the block scales out of E4M3: amax / 6 / global is between 2^-9 and 2^10 or so.
        assert 2.0**-9 < made["x"].double().abs().max().item() / 6 / scale < 2.0**10
    assert kinds == {"library", "power", "neither"}


def test_an_all_zero_matrix_still_has_a_positive_global_scale():
    assert all(float(nvfp4(seed, "zeros")["global_scale"]) > 0 for seed in range(12))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_codes_agree_with_the_library_convention_as_well(dtype):
    made = nvfp4(4, "codes", dtype)
    assert float(made["global_scale"]) == made["x"].double().abs().max().item() / 2688


def test_static_scales_are_both_powers_of_two_and_not():
    scales = [
        float(build(quantize("fp8_per_tensor", seed=seed, block="tensor", scale="static"))["scale"])
        for seed in range(16)
    ]
    assert {np.frexp(scale)[0] == 0.5 for scale in scales} == {True, False}
    assert all(2.0**-8 <= scale < 2.0**-6 for scale in scales)


@pytest.mark.parametrize("layout", ["interleave_128x4", "mn_major", "mn_major_packed", "k_major"])
@pytest.mark.parametrize("values", ["index", "uniform_bits", "nonfinite"])
def test_packed_inputs_hold_the_plain_ones_and_garbage_around_them(layout, values):
    case = Case.make("scale_layout", layout, seed=5, cols=6, rows=131, direction="unpack", values=values)
    packed = build(case)["scales"]
    plain = unpack(packed, layout, 131, 6)
    assert tuple(plain.shape) == (131, 6)
    mask = padding_mask(layout, 131, 6)
    garbage, owned = slots(packed, layout)[mask], slots(packed, layout)[~mask]
    assert (
        mask.sum()
        == {"interleave_128x4": 256 * 8 - 786, "mn_major": 6, "mn_major_packed": 132 * 8 - 786, "k_major": 0}[layout]
    )
    assert (garbage != 0).all()
    assert torch.equal(slots(pack(plain, layout), layout)[~mask], owned)


@pytest.mark.parametrize("rows", [slice(3, 3), slice(6, 9), slice(0, 6, 2)])
def test_no_rows_or_a_step_is_refused(rows):
    with pytest.raises(ValueError, match="rows"):
        build(quantize(), rows)


def test_a_packed_tensor_has_no_rows_to_choose():
    case = Case.make("scale_layout", "k_major", seed=5, cols=6, rows=3, direction="unpack", values="index")
    with pytest.raises(ValueError, match="rows"):
        build(case, slice(0, 1))


def test_inputs_import_nothing_but_torch_and_numpy():
    script = (
        "import sys\nimport fuzz.inputs, fuzz.hashing\n"
        "foreign = {'hypothesis', 'pytest', 'conformance', 'reports'}\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & foreign))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
