"""An environment from a folder of wheels and archives, without an index."""

import subprocess
import tarfile

import pytest

from conformance import gpu_host
from conformance.discover import UsageError
from tests.conformance import tiny_wheels


@pytest.fixture
def brought(tmp_path, monkeypatch):
    folder = tmp_path / "bring"
    tiny_wheels.write_wheel(folder, "tiny_quant", "1.0", {"tiny_quant.py": "VERSION = '1.0'\n"})
    package = tmp_path / "packed"
    package.mkdir()
    (package / "packed.py").write_text("VALUE = 7\n")
    with tarfile.open(folder / "packed.tar.xz", "w:xz") as archive:
        archive.add(package / "packed.py", arcname="packed.py")
    tiny_wheels.only(tmp_path / "nothing", monkeypatch)
    return folder


def test_wheels_and_archives_are_importable_beside_what_the_host_has(brought, tmp_path):
    python = gpu_host.environment(brought, tmp_path / "environments")
    code = "import packed, tiny_quant, torch; print(packed.VALUE, tiny_quant.VERSION)"
    said = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["7", "1.0"]
    assert gpu_host.environment(brought, tmp_path / "environments") == python  # kept


def test_what_cannot_be_installed_is_one_line(brought, tmp_path, capsys, monkeypatch):
    (brought / "broken.tar.xz").write_bytes(b"no archive")
    with pytest.raises(UsageError, match=r"broken\.tar\.xz"):
        gpu_host.environment(brought, tmp_path / "environments")
    monkeypatch.chdir(tmp_path)
    for arguments in ([], [str(tmp_path / "nowhere")], [str(tmp_path)]):
        assert gpu_host.main(arguments) == 2
        said = capsys.readouterr()
        assert said.err.startswith("conformance: ")
        assert said.err.count("\n") == 1


def test_an_archive_cannot_write_outside(brought, tmp_path):
    outside = tmp_path / "outside.py"
    outside.write_text("")
    with tarfile.open(brought / "packed.tar.xz", "w:xz") as archive:
        archive.add(outside, arcname="../../../../../outside_the_environment.py")
    with pytest.raises(UsageError, match=r"packed\.tar\.xz"):
        gpu_host.environment(brought, tmp_path / "environments")
