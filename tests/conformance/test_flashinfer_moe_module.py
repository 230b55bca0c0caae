"""FlashInfer's expert layers with a few of their tactics: what is compiled, and what stands for the rest."""

import ctypes
import shutil
import subprocess
import time

import pytest

from conformance import flashinfer_moe_module as few
from conformance.backends import _flashinfer_modules as modules


def test_defaults_come_first_and_are_complete(tmp_path):
    files = list(few.tactics(tmp_path, list(few.RUNNERS)))
    texts = {file.stem: file.read_text() for file in files}
    assert list(texts)[:3] == ["tactic_0_bf16", "tactic_0_fp8_per_tensor", "tactic_0_w4a16"]
    assert len(texts) == len(few.TILES) * 2 + len(few.MIXED_TILES) // 2
    kinds = "Sm90, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, void, EpilogueOpDefault"
    for fusion in ("NONE", "FINALIZE"):
        for swapped in ("true", "false"):
            one = f"({kinds}, {fusion}, 128, 16, 64, 1, 1, 1, false, false, false, {swapped});"
            assert texts["tactic_0_bf16"].count(one) == 1
    assert "NONE, 128, 16, 128, 1, 1, 1, false, false, false, false);" in texts["tactic_0_fp8_per_tensor"]
    # W4A16 cannot measure its workspace without the second.
    assert "cute::Int<64>, cute::Int<16>, cute::Int<128>" in texts["tactic_0_w4a16"]
    assert "cute::Int<128>, cute::Int<64>, cute::Int<256>" in texts["tactic_0_w4a16"]
    assert not list(few.tactics(tmp_path, ["deepseek_fp8"]))
    order = sorted([*reversed(files), *few.runners(tmp_path, ["bf16"]), tmp_path / "logger.cpp"], key=few.urgency)
    assert [path.name for path in order][:2] == ["layer_bf16.cu", "gemm_bf16.cu"]
    assert [path.stem.startswith("tactic_0") for path in order] == [False] * 2 + [True] * 3 + [False] * 8
    assert order[5].name == "logger.cpp"
    stems = {file.stem for file in [*files, *few.runners(tmp_path, list(few.RUNNERS))]}
    assert all(few.needed(name) <= stems for name in few.RUNNERS)
    assert few.needed("deepseek_fp8") == {"layer_deepseek_fp8", "gemm_deepseek_fp8"}


def test_runners_are_those_of_the_formats_asked_for(tmp_path):
    first, second = few.runners(tmp_path, ["w4a16"])
    assert "template class MoeGemmRunner<__nv_bfloat16, Fp4Type, __nv_bfloat16>;" in first.read_text()
    assert "template class CutlassMoeFCRunner<__nv_bfloat16, Fp4Type>;" in second.read_text()


@pytest.fixture
def commands(tmp_path):
    """Three sources and how they are compiled; ``tactic_1`` asks for a function that is nowhere."""
    compiler = shutil.which("c++")
    header = tmp_path / "tensorrt_llm" / "common" / "tllmException.h"
    header.parent.mkdir(parents=True)
    header.write_text(
        "#include <stdexcept>\n"
        "namespace tensorrt_llm::common { struct TllmException : std::runtime_error {\n"
        "TllmException(char const*, int, char const* what) : std::runtime_error(what) {} }; }\n"
    )
    texts = {
        "tllmException": "int here() { return 41; }",
        "flashinfer_cutlass_fused_moe_binding": "",
        "tactic_1": (
            '#include "tensorrt_llm/common/tllmException.h"\n#include <cstring>\n'
            "namespace tensorrt_llm { int gone(int); }\nint here();\n"
            'extern "C" int ask(int n) { if (n == 0) return here(); try { return tensorrt_llm::gone(n); }\n'
            "catch (tensorrt_llm::common::TllmException const& e) { return std::strlen(e.what()); } }"
        ),
    }
    found = []
    for name, text in texts.items():
        suffix = ".cu" if "binding" in name else ".cpp"
        (tmp_path / f"{name}{suffix}").write_text(text)
        kind = "-x c++ " if suffix == ".cu" else ""
        command = f"{compiler} -c {tmp_path / name}{suffix} -fPIC -I{tmp_path} {kind}-o {name}.o"
        found.append({"file": str(tmp_path / f"{name}{suffix}"), "command": command})
    return found


def test_what_was_not_compiled_throws_the_librarys_exception(commands, tmp_path, monkeypatch):
    folder = tmp_path / "few"
    folder.mkdir()
    sources = [item for item in commands if "binding" not in item["file"]]
    monkeypatch.setattr(few, "binding_folder", lambda commands: tmp_path)
    objects = few.compiled(sources, folder, 1, float("inf"))
    assert sorted(objects) == ["tactic_1", "tllmException"]
    monkeypatch.setattr(few, "LIBRARIES", ())
    module = few.linked(list(objects.values()), folder, commands, tmp_path)
    ask = ctypes.CDLL(str(module)).ask
    assert ask(0) == 41
    assert ask(7) == len(modules.LEFT_OUT)


def test_without_time_tactics_are_left_out_and_others_are_asked_for(commands, tmp_path, monkeypatch):
    monkeypatch.setattr(few, "binding_folder", lambda commands: tmp_path)
    tactic = [item for item in commands if item["file"].endswith("tactic_1.cpp")]
    assert few.compiled(tactic, tmp_path, 1, time.monotonic()) == {}
    with pytest.raises(LookupError, match="not compiled: tllmException"):
        few.compiled(commands[:1], tmp_path, 1, time.monotonic())


def test_time_ends_all_that_a_command_started(tmp_path):
    child = tmp_path / "child"
    started = few.until(time.monotonic() + 0.5, f"sleep 60 & echo $! > {child}; wait")
    assert started is None
    pid = child.read_text().strip()
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False).stdout
    assert state.strip()[:1] in ("", "Z")
    assert few.until(time.monotonic() + 60, "echo no >&2; exit 3") == (3, "no\n")


def test_formats_lie_beside_a_module(tmp_path, monkeypatch):
    monkeypatch.setattr(modules, "attribute", lambda module, name: tmp_path)
    assert modules.formats("fused_moe_90") is None
    (tmp_path / "fused_moe_90").mkdir()
    (tmp_path / "fused_moe_90" / modules.FORMATS).write_text("bf16\nw4a16\n")
    assert modules.formats("fused_moe_90") == {"bf16", "w4a16"}


def test_what_is_missing_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(few.flashinfer_modules, "cuda_home", lambda: (_ for _ in ()).throw(LookupError("no nvcc")))
    assert few.main([]) == 2
    assert capsys.readouterr().err == "conformance: no nvcc\n"
