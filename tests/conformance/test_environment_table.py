"""Environments by a backend's name, and the table that they go into."""

import tomllib

import pytest

from conformance import environment_table as table
from conformance.discover import UsageError
from conformance.environments import Release


@pytest.fixture
def created(monkeypatch):
    calls = []

    def create(release, folder, *, dependencies, beside):
        calls.append((str(release), dependencies, *beside))
        return f"/environments/{release.name}/bin/python"

    monkeypatch.setattr(table.environments, "create", create)
    monkeypatch.setattr(table.environments, "releases", lambda name: [Release.parse(f"{name}==1.5").version])
    return calls


def test_names_and_releases_become_interpreters_in_one_table(created, tmp_path):
    config = tmp_path / "conformance.toml"
    table.make(["sglang", "flashinfer==0.7.2.post1"], config)
    assert created == [("sglang==1.5", False, "msgspec", "apache-tvm-ffi"), ("flashinfer-python==0.7.2.post1", True)]
    table.make(["sgl-deep-gemm"], config)
    assert tomllib.loads(config.read_text())["environments"] == {
        "sglang": "/environments/sglang/bin/python",
        "flashinfer": "/environments/flashinfer-python/bin/python",
        "deep_gemm": "/environments/sgl-deep-gemm/bin/python",
    }


def test_a_table_is_changed_and_the_rest_is_kept():
    text = '# mine\n[environments]\njax = "/old"  # why\ntorchao = "/there"\n\n[other]\nkey = 1\n'
    changed = table.entered(text, {"jax": "/new"})
    assert tomllib.loads(changed) == {"environments": {"jax": "/new", "torchao": "/there"}, "other": {"key": 1}}
    assert changed.startswith("# mine\n")
    assert table.entered(changed, {"jax": "/new"}).count("/new") == 1


@pytest.mark.parametrize("words", [[], ["nonsense"], ["jax==new version"], ["jax=="]])
def test_what_is_no_library_is_one_line(created, tmp_path, words):
    with pytest.raises(UsageError):
        table.make(words, tmp_path / "conformance.toml")
    assert not created
