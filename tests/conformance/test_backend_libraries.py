"""Modules of a library without the rest of it, and what the adapters of SGLang and vLLM do themselves."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from conformance.backends import _sglang_gemm as sglang_gemm
from conformance.backends import _sglang_moe as sglang_moe
from conformance.backends import _sglang_quant as sglang_quant
from conformance.backends._library import Library
from conformance.backends._vllm_gemm import aligned, group_of_rows
from fuzz.case import Case
from references import layouts

MODULE = """
import torch
import lib.heavy
from lib.heavy import Base, flag
from absent_kernels import fast
from .near import number

class Derived(Base):
    pass

@torch.compile(dynamic=True)
def doubled(x):
    from lib.late import offset
    return 2 * x + offset() + number + fast()
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package ``lib`` that could not be imported as a whole."""
    package = tmp_path / "lib"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('a server starts')")
    (package / "heavy.py").write_text("raise RuntimeError('needs everything')")
    (package / "near.py").write_text("number = 10")
    (package / "kernels.py").write_text(MODULE)
    (package / "_version.py").write_text("__version__ = version = '1.2.3'\n")
    monkeypatch.setenv("CONFORMANCE_LIB", str(tmp_path))
    return tmp_path


def library(real: tuple[str, ...] = ("lib.kernels", "lib.near")) -> Library:
    """The library of `checkout`."""
    given = {"lib.late": {"offset": lambda: 100}, "absent_kernels": {"fast": lambda: 1000}}
    return Library("some-lib", "lib", "CONFORMANCE_LIB", real, given)


def test_a_module_runs_with_the_rest_stood_in_and_named_answers(checkout: Path) -> None:
    found = library()
    assert found.function("doubled", "lib.kernels")(1) == 2 + 100 + 10 + 1000
    assert not found.load("lib.kernels").flag
    assert found.load("lib.kernels") is found.load("lib.kernels")


def test_a_loaded_module_is_found_as_a_name_of_its_package(checkout: Path) -> None:
    (checkout / "lib" / "user.py").write_text("from lib import near\n")
    assert library(("lib.user", "lib.near")).load("lib.user").near.number == 10
    assert not library(("lib.user",)).load("lib.user").near.number


def test_what_is_not_loaded_cannot_be_called(checkout: Path) -> None:
    (checkout / "lib" / "calls.py").write_text(
        "from lib.heavy import launch\nat_import = launch(1)\ndef run():\n    return launch.on.device(2)\n"
    )
    found = library(("lib.calls",))
    assert found.load("lib.calls").at_import is None
    with pytest.raises(RuntimeError, match=r"lib\.heavy\.launch\.on\.device is called, which is not loaded"):
        found.function("run", "lib.calls")()


def test_nothing_of_it_stays_behind(checkout: Path) -> None:
    modules, path, compiler = dict(sys.modules), list(sys.meta_path), torch.compile
    library().function("doubled", "lib.kernels")(1)
    assert {
        name for name in set(sys.modules) - set(modules) if name.split(".")[0] in ("lib", "absent_kernels")
    } == set()
    assert sys.meta_path == path
    assert torch.compile is compiler


def test_a_module_of_the_same_name_is_put_back(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type(sys)("lib")
    monkeypatch.setitem(sys.modules, "lib", theirs)
    library().load("lib.kernels")
    assert sys.modules["lib"] is theirs


def test_reasons_in_one_line(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"some-lib 1\.2\.3\+checkout: lib\.heavy does not run alone: .*needs"):
        library(("lib.heavy",)).load("lib.heavy")
    with pytest.raises(ImportError, match=r"no lib/gone\.py"):
        library(("lib.gone",)).load("lib.gone")
    with pytest.raises(ImportError, match=r"lib\.kernels has no tripled"):
        library().function("tripled", "lib.kernels")
    monkeypatch.setenv("CONFORMANCE_LIB", str(checkout / "lib"))
    with pytest.raises(ImportError, match="holds no lib"):
        library()
    monkeypatch.delenv("CONFORMANCE_LIB")
    with pytest.raises(ImportError, match="some-lib is not installed; CONFORMANCE_LIB may name a folder"):
        library()


def test_the_version_of_an_unpacked_wheel_is_that_of_its_metadata(checkout: Path) -> None:
    metadata = checkout / "some_lib-1.2.4.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-lib\nVersion: 1.2.4\n")
    assert library().version == "1.2.4"


def test_codes_of_scales_hide_nothing() -> None:
    powers = torch.tensor([[2.0**-126, 0.5, 1.0, 2.0**127, torch.nan]])
    assert sglang_quant.codes_of(powers).tolist() == [[1, 126, 127, 254, 255]]
    for odd in (0.75, 0.0, -1.0, torch.inf, 2.0**-127 * 1.5):
        scales = torch.tensor([[1.0, odd]])
        assert torch.equal(sglang_quant.codes_of(scales), scales)


def test_codes_of_scales_in_a_captured_graph_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_quant, "_is_captured", lambda tensor: True)
    powers = torch.tensor([[2.0**-126, 0.5, 1.0, 2.0**127, torch.nan]])
    assert sglang_quant.codes_of(powers).tolist() == [[1, 126, 127, 254, 255]]
    for number in (1.5, 0.75, 0.0, -1.0, torch.inf, 2.0**-127, 3e-30):
        [found] = sglang_quant.codes_of(torch.tensor([number])).tolist()
        near = 0 if abs(number) < 2.0**-126 else 127 + math.floor(math.log2(min(abs(number), 2.0**127)))
        assert abs(found - near) > 100, number


def test_scales_of_codes() -> None:
    codes = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)
    assert sglang_gemm.fp32_scales(codes).tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]


@pytest.mark.parametrize(("m", "k"), [(1, 128), (5, 129), (8, 640)])
def test_stored_scales_come_back(m: int, k: int) -> None:
    """Plain, MN-major and packed orders, a single column included, whose stride says nothing."""
    columns = -(-k // 128)
    codes = torch.arange(1, m * columns + 1, dtype=torch.uint8).reshape(m, columns)
    values = torch.ldexp(torch.ones(m, columns), codes.int() - 127)

    def case(layout: str, scale: str) -> Case:
        text = f"gemm deepseek_fp8 v=1 k={k} layout={layout} m={m} n=8 out=fp32 scale={scale} values=normal seed=0"
        return Case.parse(text)

    stored = {
        ("plain", "fp32"): values,
        ("plain", "ue8m0"): codes,
        ("mn_major", "fp32"): layouts.pack(values, "mn_major"),
        ("mn_major", "ue8m0"): layouts.pack(codes, "mn_major_packed"),
    }
    for (layout, scale), tensor in stored.items():
        assert torch.equal(sglang_gemm.activation_scales(case(layout, scale), tensor), values)
        assert torch.equal(sglang_gemm.grouped_scales(case(layout, scale), tensor), values)


def test_packed_words_in_byte_order() -> None:
    words = torch.tensor([[0x04030201], [0x14131211]], dtype=torch.int32)
    assert sglang_quant.unpacked(words, 3).tolist() == [[1, 2, 3], [0x11, 0x12, 0x13]]
    assert sglang_quant.unpacked(words.t().contiguous().t(), 4).tolist() == [[1, 2, 3, 4], [0x11, 0x12, 0x13, 0x14]]


def test_rows_are_aligned_to_blocks_by_group() -> None:
    ids = torch.tensor([2, 0, -1, 2, 0, 2], dtype=torch.int32)
    rows, groups, padded = aligned(ids, 2, 4)
    assert rows[:6].tolist() == [1, 4, 0, 3, 5, 6]
    assert groups[:3].tolist() == [0, 2, 2]
    assert padded.tolist() == [6]
    assert set(rows[6:].tolist()) <= {6}


def test_no_rows_at_all_are_aligned_too() -> None:
    rows, groups, padded = aligned(torch.full((3,), -1, dtype=torch.int32), 64, 2)
    assert padded.tolist() == [0]
    assert set(rows.tolist()) == {3}
    assert set(groups.tolist()) <= {0, 1}


def test_groups_of_masked_rows() -> None:
    text = (
        "grouped_gemm deepseek_fp8 v=1 grouping=masked groups=3 k=128 layout=plain m=2 n=8 out=fp32 scale=fp32 "
        "values=normal seed=0"
    )
    inputs = {"masked_m": torch.tensor([1, 0, 2], dtype=torch.int32)}
    expected = [0, -1, -1, -1, 2, 2]
    assert group_of_rows(Case.parse(text), inputs).tolist() == expected
    assert sglang_moe.group_of_rows(Case.parse(text), inputs).flatten().tolist() == expected


def test_a_tactic_is_found_as_a_tuned_configuration_and_no_longer_than_that() -> None:
    module = type(sys)("kernels")
    module.get_w8a8_block_fp8_configs = lambda n, k, block_n, block_k: None  # type: ignore[attr-defined]
    with sglang_gemm.tiles(module, "64x32"):
        (config,) = module.get_w8a8_block_fp8_configs(1, 2, 128, 128).values()
        assert (config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"], config["BLOCK_SIZE_K"]) == (64, 32, 128)
    with sglang_gemm.tiles(module, None):
        assert module.get_w8a8_block_fp8_configs(1, 2, 128, 128) is None


def test_tiles_of_an_expert_layer_are_found_for_both_products_and_no_longer_than_that() -> None:
    module = type(sys)("fused_moe")
    module.try_get_optimal_moe_config = lambda *_, **__: "tuned"  # type: ignore[attr-defined]
    for tactic, rows in (("16x64", 16), ("128x128", 128)):
        with sglang_moe.tiles(module, tactic):
            config, (down, most) = module.try_get_optimal_moe_config((4, 8, 8), return_down_config=True)
            assert (config["BLOCK_SIZE_M"], config["BLOCK_SIZE_K"], down, most) == (rows, 128, None, None)
    with sglang_moe.tiles(module, None):
        assert module.try_get_optimal_moe_config() == "tuned"
    assert module.try_get_optimal_moe_config() == "tuned"
