import json

import pytest
import torch
from packaging.version import Version

from conformance import bisecting, cli
from conformance.bisecting import BAD, GOOD, search
from conformance.capsule import Capsule, tensors_of, write
from conformance.discover import UsageError
from conformance.journal import TOOL
from conformance.shrink import wires_of
from conformance.tensor_file import input_sha256
from tests.conformance import tiny_wheels

ADAPTER = """
import tiny_scales
from references.backend import Claim
from references.recipes import Recipe


class Tiny:
    name = "tiny"

    def version(self):
        return tiny_scales.VERSION

    def claims(self, device):
        return [Claim(operation="ue8m0", variant="ceil", source="here", where={"from": ("scale",)})]

    def recipe(self, claim):
        return Recipe(source="here")

    def prepare(self, case, inputs, options):
        return inputs["x"]

    def run(self, x, out):
        from references import ue8m0

        return {"scales": ue8m0.encode(x, tiny_scales.POLICY)}


def backends():
    return [Tiny()]
"""
CASE = "ue8m0 ceil v=1 from=scale n=64 values=boundary seed=1"
VERSIONS = [Version(f"1.{n}") for n in range(9)]


@pytest.mark.parametrize("first", range(1, 9))
@pytest.mark.parametrize("count", range(2, 10))
def test_every_first_bad_release_is_found_in_few_attempts(first, count):
    if first >= count:
        return
    tried = []

    def attempt(version):
        tried.append(version)
        return BAD if version >= VERSIONS[first] else GOOD

    found = search(VERSIONS[:count], attempt)
    assert (found.last_good, found.first_bad, found.between) == (VERSIONS[first - 1], VERSIONS[first], ())
    assert len(tried) == len(set(tried)) <= 2 + (count - 1).bit_length()


@pytest.mark.parametrize("first", range(1, 9))
@pytest.mark.parametrize("silent", range(1, 8))
def test_a_release_that_says_nothing_is_passed_over_and_named_where_it_matters(first, silent):
    def attempt(version):
        if version == VERSIONS[silent]:
            return "does not import"
        return BAD if version >= VERSIONS[first] else GOOD

    found = search(VERSIONS, attempt)
    assert found.last_good < VERSIONS[first]
    if silent in (first - 1, first):
        assert found.between == (VERSIONS[silent],)
    else:
        assert (found.first_bad, found.between) == (VERSIONS[first], ())


def test_ends_that_are_not_as_said():
    with pytest.raises(UsageError, match=r"1\.0 was to be good, but fails"):
        search(VERSIONS, lambda version: BAD)
    with pytest.raises(UsageError, match=r"1\.8 was to be bad, but passes"):
        search(VERSIONS, lambda version: GOOD)
    with pytest.raises(UsageError, match=r"1\.0 was to be good, but says nothing: no wheel"):
        search(VERSIONS, lambda version: "no wheel")


@pytest.mark.parametrize(
    ("backend", "good", "name"),
    [
        ("torchao", "0.1", "torchao"),
        ("torch_bf16", "2.11", "torch"),
        ("flashinfer", "0.7", "flashinfer-python"),
        ("mine", "Other_Name==0.1", "other-name"),
    ],
)
def test_the_package_follows_from_an_end_or_from_the_backend(backend, good, name):
    assert bisecting.package(backend, good, "9.9")[0] == name


@pytest.mark.parametrize(("good", "bad"), [("1.0", "2.0"), ("new", "2.0"), ("a==1.0", "b==2.0")])
def test_bad_bounds_are_one_line_and_code_2(good, bad, capsys):
    assert cli.main(["repro", CASE, "--backend", "mine", "--bisect", good, bad]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_first_bad_release_of_a_package_is_named(tmp_path, monkeypatch, capsys):
    """1.0 and 1.1 are right, 1.2 cannot be imported, 1.3 takes the wrong policy."""
    for version, policy in {"1.0": "ceil", "1.1": "ceil", "1.2": "", "1.3": "floor"}.items():
        code = (
            f"VERSION, POLICY = {version!r}, {policy!r}\n"
            if policy
            else "raise ImportError('built for another torch')\n"
        )
        tiny_wheels.write_wheel(tmp_path / "index", "tiny_scales", version, {"tiny_scales.py": code})
    tiny_wheels.only(tmp_path / "index", monkeypatch)
    (tmp_path / "adapter.py").write_text(ADAPTER)
    monkeypatch.chdir(tmp_path)
    ends = ("--bisect", "tiny-scales==1.0", "1.3")
    assert cli.main(["repro", CASE, "--backend", "tiny", "--plugin", "adapter.py", *ends]) == 0
    said = capsys.readouterr().out
    assert "first bad release: tiny-scales 1.3; 1.1 is good" in said
    assert "nothing is known of 1.2 in between" in said
    assert "built for another torch" in said

    # A failure on explicit inputs, by its capsule and by the run.json that lists it: 1.5 becomes 2 under ceil, 1 under
    # floor. 1.0, 1.1 and 1.3 are in their environments already.
    inputs = wires_of({"x": torch.tensor([1.5])})
    held = Capsule(
        case=CASE.replace("n=64", "n=1"),
        origin=CASE,
        part="scales",
        verdict="wrong",
        backend="tiny",
        plugins=("adapter.py",),
        input_sha256=input_sha256(inputs),
        explicit=True,
        tensors=tensors_of(inputs, ()),
    )
    path = write(tmp_path / "capsules", held)
    assert cli.main(["repro", str(path), *ends]) == 2
    assert "came from --plugin adapter.py: give --plugin again" in capsys.readouterr().err
    run = {"tool": TOOL, "failures": [{"case": held.case, "backend": "tiny", "capsule": f"capsules/{path.name}"}]}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert cli.main(["repro", "run.json", "--plugin", "adapter.py", *ends]) == 0
    assert "first bad release: tiny-scales 1.3; 1.1 is good" in capsys.readouterr().out
    run["failures"].append({"case": CASE, "backend": "tiny"})
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert cli.main(["repro", "run.json", "--plugin", "adapter.py", *ends]) == 2
    assert "--bisect takes one failure, run.json has 2: name a capsule" in capsys.readouterr().err
