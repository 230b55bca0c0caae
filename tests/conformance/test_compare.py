import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance import cli, compare, sides
from conformance.discover import UsageError
from conformance.ledger import DEFAULT, load
from conformance.messages import Claimed, Description
from conformance.sides import Finished, Options
from references.backend import Claim

PLUGIN = """
from references import ue8m0
from references.backend import Claim
from references.recipes import Recipe


class Tiny:
    name = "tiny"

    def version(self):
        return "1"

    def claims(self, device):
        return [Claim(operation="ue8m0", variant="ceil", source="here", where={"from": ("scale",)})]

    def recipe(self, claim):
        return Recipe(source="here")

    def prepare(self, case, inputs, options):
        return inputs["x"]

    def run(self, x, out):
        return {"scales": ue8m0.encode(x, "POLICY")}


def backends():
    return [Tiny()]
"""
CASES = (
    "--case",
    "ue8m0 ceil v=1 from=scale n=64 values=boundary seed=1",
    "--case",
    "ue8m0 ceil v=1 from=scale n=3 values=normal seed=2",
)


def git(folder, *words):
    who = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *who, "-C", str(folder), *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """A repository with a right plugin, and a wrong one in its working tree."""
    folder = tmp_path / "repository"
    folder.mkdir()
    plugin = folder / "tiny.py"
    plugin.write_text(PLUGIN.replace("POLICY", "ceil"))
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "right")
    plugin.write_text(PLUGIN.replace("POLICY", "floor"))
    return plugin


def test_a_revision_of_a_plugin_against_its_working_tree_and_a_finished_run(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = ("--out", "out", "--environments", "env", "--jobs", "1")
    assert cli.main(["compare", f"{repository}@HEAD", str(repository), *CASES, *common]) == 1
    assert f"--backend tiny --plugin {repository}`" in Path("out/compare.md").read_text()
    said = capsys.readouterr().out
    assert "DO NOT MERGE: 2 calls regressed: ue8m0 ceil" in said
    written = json.loads(Path("out/compare.json").read_text())
    assert (written["verdict"], written["counts"]) == ("regressed", {"regressed": 2})
    # What was run is a finished run, and can be a side again; the inverse is a fix.
    assert cli.main(["compare", "out/head", "out/base", "--out", "again"]) == 0
    assert "MERGE: no regression" in capsys.readouterr().out
    assert json.loads(Path("again/compare.json").read_text())["counts"] == {"fixed": 2}
    # A finished run and a side to be run see the same cases.
    assert (
        cli.main(["compare", "out/base", f"{repository}@HEAD", *common[2:], "--out", "third", "--fail-on", "drift"])
        == 0
    )
    assert json.loads(Path("third/compare.json").read_text())["counts"] == {"both pass": 2}


def test_a_checkout_leaves_the_repository_as_it_is(repository, tmp_path):
    before = sorted(path.name for path in (repository.parent / ".git").iterdir())
    found = sides.checkout(repository, "HEAD", tmp_path / "env")
    assert '"ceil"' in found.read_text()
    assert '"floor"' in repository.read_text()
    assert sorted(path.name for path in (repository.parent / ".git").iterdir()) == before
    with pytest.raises(UsageError, match="rev-parse"):
        sides.checkout(repository, "nowhere", tmp_path / "env")
    with pytest.raises(UsageError, match=r"there is no other.py"):
        sides.checkout(repository.with_name("other.py"), "HEAD", tmp_path / "env")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/no/such/run", "no such file or directory"),
        ("missing.py", "no such file or directory"),
        ("a b", "no such file or directory"),
        ("torch==new", "no version"),
        ("empty", "neither a run"),
        ("notes.txt", "neither a plugin"),
        ("partial", "not complete"),
        ("foreign", "not written by"),
        ("missing.py@--help", "no such file or directory"),
    ],
)
def test_sides_that_are_none(text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "partial", "foreign"):
        Path(name).mkdir()
    Path("notes.txt").write_text("")
    Path("partial/run.json").write_text('{"tool": "blockscale-conformance", "complete": false}')
    Path("foreign/run.json").write_text("{}")
    assert cli.main(["compare", text, "torch"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_nothing_is_installed_for_a_comparison_with_nothing(monkeypatch):
    def install(release, folder, dependencies):
        raise AssertionError(f"installed: {release}")

    monkeypatch.setattr(sides.environments, "create", install)
    for base, head in (("torch==2.13.0", "/no/such/run"), ("/no/such/run", "torch==2.13.0")):
        with pytest.raises(UsageError, match="no such file or directory"):
            sides.both(base, head, Options())


def described(backend: str, device: str, sm: str) -> SimpleNamespace:
    claim = Claim(operation="gemm", variant="deepseek_fp8", source="s")
    about = Description(
        backend=backend,
        version="0.33.0",
        interpreter="",
        device=device,
        device_name="",
        sm=sm,
        pace=1.0,
        claims=[Claimed(claim=claim.to_json(), recipe={}, recipe_text="", claim_text="")],
    )
    return SimpleNamespace(descriptions=[about])


@pytest.mark.parametrize(
    ("sides_", "vast"),
    [
        ([("torch", "cpu", ""), ("vllm", "cuda:0", "90")], False),
        ([("torch", "cuda:0", "90"), ("vllm", "cuda:0", "90")], True),
        ([("torch", "cuda:0", "80"), ("vllm", "cuda:0", "80")], False),  # the entry does not speak of SM80
        ([("torch", "cuda:0", "90"), ("triton", "cuda:0", "90")], False),
    ],
)
def test_a_witness_past_2_31_elements_is_for_gpus_that_an_entry_speaks_of(sides_, vast):
    live = [described(*side) for side in sides_]
    settings = compare.Settings(base="a", head="b", cases=1)
    plan = compare._drawn(live, settings, load(DEFAULT), {("gemm", "deepseek_fp8")})
    assert any(case["m"] == "65552" for case in plan) == vast


def test_a_folder_with_the_name_of_a_release_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    python = Path("torch==abc/bin/python")
    python.parent.mkdir(parents=True)
    python.touch()
    assert sides.both("torch==abc", "torch", Options())[0].python == str(python.absolute())


def test_both_sides_keep_their_places():
    assert [side.label for side in sides.both("triton", "torch", Options())] == ["triton", "torch"]
    assert [side.label for side in sides.both("torch", "torch", Options())] == ["torch", "torch"]


def test_other_bad_input(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments in (["torch", "torch", "--fail-on", "luck"], ["torch"], ["torch", "torch", "--operation", "luck"]):
        assert cli.main(["compare", *arguments]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_interpreter_and_a_backend_on_a_device(tmp_path):
    found = sides.parse(sys.executable, Options(backends=("torch",)))
    assert not isinstance(found, Finished)
    assert (found.python, found.backends) == (str(Path(sys.executable).absolute()), ("torch",))
    found = sides.parse("triton@cuda:1", Options())
    assert not isinstance(found, Finished)
    assert (found.backends, found.devices) == (("triton",), ("cuda:1",))
