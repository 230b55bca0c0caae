import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from conformance import environments
from conformance.discover import UsageError
from conformance.environments import Release
from tests.conformance import tiny_wheels


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    for version in ("1.0", "1.2", "1.10", "2.0rc1"):
        tiny_wheels.write_wheel(folder, "tiny_quant", version, {"tiny_quant.py": f"VERSION = {version!r}\n"})
    tiny_wheels.write_wheel(
        folder, "needy", "1.0", {"needy.py": ""}, requires=("tiny-quant<1.5", "nowhere-to-be-found")
    )
    return folder


@pytest.fixture
def pip(index, monkeypatch):
    tiny_wheels.only(index, monkeypatch)


def said_by(python: str, code: str) -> str:
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_release_is_a_name_and_a_version():
    assert Release.parse("Tiny_Quant==1.2.post1") == Release("tiny-quant", Version("1.2.post1"))
    assert str(Release.parse("torch==2.11.0+cpu")) == "torch==2.11.0+cpu"
    for text in ("torch", "torch>=2", "torch==2 --index-url=x", "==1", "-r==1", "a==b==c", "plugin.py@HEAD"):
        assert Release.parse(text) is None, text
    with pytest.raises(UsageError, match="no version"):
        Release.parse("torch==new")


def test_releases_are_in_the_order_of_versions(pip):
    assert list(map(str, environments.releases("tiny-quant"))) == ["1.0", "1.2", "1.10"]
    found = environments.between("tiny-quant", Version("1.2"), Version("2.0rc1"))
    assert list(map(str, found)) == ["1.2", "1.10", "2.0rc1"]


def test_ends_that_are_no_releases_are_said_in_one_line(pip):
    with pytest.raises(UsageError, match=r"1.2 is not older than 1.0"):
        environments.between("tiny-quant", Version("1.2"), Version("1.0"))
    with pytest.raises(UsageError, match=r"no release tiny-quant 1.7; the newest are 1.10, 1.2, 1.0"):
        environments.between("tiny-quant", Version("1.0"), Version("1.7"))
    with pytest.raises(UsageError, match="cannot list the releases of nosuch: No matching"):
        environments.releases("nosuch")


def test_an_environment_has_the_release_and_all_of_the_interpreter_below(pip, tmp_path):
    python = environments.create(Release("tiny-quant", Version("1.2")), tmp_path)
    assert said_by(python, "import tiny_quant, torch; print(tiny_quant.VERSION, torch.__version__)") == (
        f"1.2 {said_by(sys.executable, 'import torch; print(torch.__version__)')}"
    )
    before = Path(python).stat().st_ctime_ns
    assert environments.create(Release("tiny-quant", Version("1.2")), tmp_path) == python
    assert Path(python).stat().st_ctime_ns == before


def test_an_unfinished_environment_is_made_again_and_a_release_replaces_the_one_below(pip, tmp_path):
    below = environments.create(Release("tiny-quant", Version("1.10")), tmp_path)
    place = Path(below).parent.parent
    (place / environments.STAMP).unlink()
    (place / "bin" / "python").unlink()
    assert environments.create(Release("tiny-quant", Version("1.10")), tmp_path) == below
    # pip lives two levels down, and is found through both.
    above = environments.create(Release("tiny-quant", Version("1.0")), tmp_path, python=below)
    assert [said_by(python, "import tiny_quant; print(tiny_quant.VERSION)") for python in (below, above)] == [
        "1.10",
        "1.0",
    ]


def test_what_cannot_be_installed_is_said_in_one_line_and_leaves_no_environment(pip, tmp_path):
    for text in ("tiny-quant==9.9", "needy==1.0"):
        with pytest.raises(UsageError, match=f"cannot install {text}: .*") as error:
            environments.create(Release.parse(text), tmp_path)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.glob(f"*/{environments.STAMP}"))
    python = environments.create(Release.parse("needy==1.0"), tmp_path, dependencies=False)
    assert said_by(python, "import needy") == ""


def test_what_stands_beside_a_release_is_installed_with_its_dependencies(pip, tmp_path, index):
    tiny_wheels.write_wheel(index, "companion", "1.0", {"companion.py": ""}, requires=("tiny-quant==1.0",))
    python = environments.create(
        Release.parse("needy==1.0"), tmp_path, dependencies=False, beside=("companion", "tiny-quant")
    )
    assert said_by(python, "import needy, companion, tiny_quant; print(tiny_quant.VERSION)") == "1.0"
    assert python != environments.create(Release.parse("needy==1.0"), tmp_path, dependencies=False)
    with pytest.raises(UsageError, match="cannot install nowhere: "):
        environments.create(Release.parse("needy==1.0"), tmp_path, dependencies=False, beside=("nowhere",))


def test_an_interpreter_that_is_none(pip, tmp_path):
    with pytest.raises(UsageError, match="does not run"):
        environments.create(Release("tiny-quant", Version("1.0")), tmp_path, python=str(tmp_path / "python"))
