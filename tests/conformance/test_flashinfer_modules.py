"""Compiling and packing FlashInfer's modules: what is missing is one line and exit code 2."""

import pytest

from conformance import flashinfer_modules


def test_an_unknown_module_is_one_line(capsys):
    assert flashinfer_modules.main(["build", "nonsense"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("conformance: unknown module 'nonsense'")
    assert said.count("\n") == 1


def toolkit(folder, headers=()):
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "bin" / "nvcc").write_text("")
    for header in ("cuda_runtime.h", *headers):
        (folder / "include" / header).write_text("")
    return folder


def test_the_toolkit_that_is_named_comes_first(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda")))
    assert flashinfer_modules.cuda_home() == tmp_path / "cuda"


def test_headers_come_from_wheels_or_are_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(flashinfer_modules.sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("CPATH", "")
    monkeypatch.setenv("LIBRARY_PATH", "")
    cuda = toolkit(tmp_path / "cuda", ["nvrtc.h"])
    (tmp_path / "one").mkdir()
    with pytest.raises(LookupError, match=r"pip install nvidia-cublas nvidia-curand$"):
        flashinfer_modules.add_missing_parts(cuda, tmp_path / "one")
    wheel = tmp_path / "site" / "nvidia" / "cu13"
    (wheel / "include").mkdir(parents=True)
    for header in ("cublasLt.h", "curand_kernel.h", "nvrtc.h"):
        (wheel / "include" / header).write_text("wheel")
    (tmp_path / "two").mkdir()
    flashinfer_modules.add_missing_parts(cuda, tmp_path / "two")
    found = {path.name for path in (tmp_path / "two" / "include").iterdir()}
    assert found == {"cublasLt.h", "curand_kernel.h"}  # the toolkit has its own nvrtc.h
    assert (tmp_path / "two" / "lib" / "libcuda.so").exists()


def test_what_functions_import_is_packed_too(tmp_path):
    package = tmp_path / "library"
    texts = {
        "__init__.py": "",
        "lazy.py": "",
        "other.py": "",
        "unused.py": "",
        "part/__init__.py": "from .inner import name\n",
        "part/inner.py": (
            "import os, library.other\nname = 1\n"
            "def call():\n    from library.lazy import thing\n    from .. import absent\n"
            "    from ..deep.down import it\n"
        ),
        "deep/__init__.py": "",
        "deep/down.py": "it = 1\n",
    }
    for name, text in texts.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)

    def found(name):
        return {str(path.relative_to(package)) for path in flashinfer_modules.imported(package / name, package)}

    assert found("part/inner.py") == {"__init__.py", "lazy.py", "other.py", "deep/__init__.py", "deep/down.py"}
    assert found("part/__init__.py") == {"__init__.py", "part/__init__.py", "part/inner.py"}
    assert found("lazy.py") == set()
