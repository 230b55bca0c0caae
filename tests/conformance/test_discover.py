"""Sources are found without importing them, and everything wrong with one is said in one line."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conformance import discover, targets
from conformance.claim_checks import claim_problem
from conformance.discover import UsageError, environments, plugin_source, python_for
from conformance.launch import BackendSource, package_roots
from conformance.worker_errors import ReportedError
from conformance.worker_source import describe, load
from references.backend import Claim

PLUGINS = Path(__file__).with_name("plugins")
BOMB = "raise SystemExit('imported')\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# Sources


def test_builtin_modules_are_read_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "backends/zeta.py", BOMB + "def backends():\n    return []\n")
    write(tmp_path / "backends/alpha.py", BOMB + "NAMES = (\n    'a',\n    'b',\n)\nbackends = make\n")
    write(tmp_path / "backends/helper.py", "def other():\n    def backends(): ...\n")
    write(tmp_path / "backends/_private.py", "def backends():\n    return []\n")
    monkeypatch.setattr(discover, "package_roots", lambda: {"conformance": str(tmp_path)})
    found = discover.builtin_sources()
    assert [source.location for source in found] == ["conformance.backends.alpha", "conformance.backends.zeta"]
    assert found[0].label == "backend alpha"
    assert [source.names for source in found] == [("a", "b"), ()]


def test_builtin_modules_say_the_names_of_their_backends():
    sources = discover.builtin_sources()
    names = [name for source in sources for name in source.names]
    assert [source.name for source in sources if not source.names] == []
    assert len(names) == len(set(names))
    assert {"torch", "torch_bf16", "flashinfer_replay", "triton_interpreter_corrected"} < set(names)
    for source in sources:
        tree = ast.parse(Path(package_roots()["conformance"], "backends", f"{source.name}.py").read_text())
        assert set(source.names) == set(_names_given(tree)), f"NAMES of {source.label}"


def _names_given(tree: ast.Module):
    """What ``backends()`` passes first to each class, and ``name = "..."`` of classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "backends":
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and call.args]
            firsts = [call.args[0] for call in calls if not ast.unparse(call.func).endswith("Error")]
            yield from (first.value for first in firsts if isinstance(first, ast.Constant))
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == "name":
                yield ast.literal_eval(inner.value)


def test_an_unknown_backend_is_named_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch):
    def start(*_args: object, **_options: object) -> None:
        raise AssertionError("a worker")

    monkeypatch.setattr(targets, "Worker", start)
    monkeypatch.setattr(discover, "Worker", start)
    monkeypatch.setattr(discover, "entry_point_sources", list)
    fleet = targets.Fleet((), None, None)
    with pytest.raises(UsageError, match=r"^unknown backend 'torhc' \(do you mean 'torch'\?\); known: .*ml_dtypes"):
        fleet.survey(("torch", "torhc"), (), 1)
    with pytest.raises(UsageError, match=r"^unknown backend 'q'; known: "):
        fleet.survey(("q",), (), 1)


def test_a_source_that_names_nothing_may_offer_any_backend():
    silent = BackendSource(kind="plugin_file", location="/x.py", name="x")
    plain = BackendSource(kind="builtin", location="b", name="b", names=("b1",))
    discover.check_names(("new",), [silent, plain])
    with pytest.raises(UsageError, match=r"unknown backend 'new'; known: b1$"):
        discover.check_names(("b1", "new"), [plain])


def test_a_plugin_file(tmp_path: Path):
    path = write(tmp_path / "a/mine.py", BOMB)
    for text in ("a/mine.py", str(path)):
        source = plugin_source(text, folder=tmp_path)
        assert source == BackendSource(kind="plugin_file", location=str(path), name="mine")
    assert source.label == "plugin mine.py"


def test_a_plugin_module_brings_its_top_level_package(tmp_path: Path):
    write(tmp_path / "ours/__init__.py", BOMB)
    write(tmp_path / "ours/deep/mine.py", BOMB)
    write(tmp_path / "single.py", BOMB)
    nested = plugin_source("ours.deep.mine", folder=tmp_path)
    assert (nested.kind, nested.name, nested.roots) == ("plugin_module", "mine", (("ours", str(tmp_path / "ours")),))
    assert plugin_source("single", folder=tmp_path).roots == (("single", str(tmp_path / "single.py")),)


def test_an_installed_module_is_left_to_the_worker_s_own_site_packages():
    assert plugin_source("torch.nn").roots == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gone.py", "--plugin gone.py: no such file"),
        ("a/b", "--plugin a/b: no such file"),
        ("folder/", "--plugin folder/: not a file"),
        ("gone", "--plugin gone: no such module"),
        ("single.gone", "--plugin single.gone: no such module"),
        ("package.gone", "--plugin package.gone: no such module"),
        ("1x", "--plugin 1x: neither a .py file nor a module's name"),
        ("a b", "--plugin a b: neither a .py file nor a module's name"),
        ("", "--plugin : neither a .py file nor a module's name"),
    ],
)
def test_a_plugin_that_is_not_there_is_a_usage_error(tmp_path: Path, text: str, message: str):
    write(tmp_path / "single.py", BOMB)
    write(tmp_path / "package/__init__.py", BOMB)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError) as error:
        plugin_source(text, folder=tmp_path)
    assert str(error.value) == message


def test_a_module_may_be_installed_in_its_own_environment_alone(tmp_path: Path):
    assert plugin_source("far.away", {"away": "/x/python"}, folder=tmp_path).roots == ()
    with pytest.raises(UsageError, match="no such module"):
        plugin_source("far.away", {"near": "/x/python"}, folder=tmp_path)


def test_entry_points_are_listed_with_what_their_modules_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "thirdparty/__init__.py", BOMB)
    write(tmp_path / "thirdparty/kernels.py", BOMB)
    listing = "[conformance.backends]\nzz = thirdparty.kernels:make [fast]\naa = thirdparty.kernels\n[other]\nno = x\n"
    write(tmp_path / "thirdparty-1.0.dist-info/entry_points.txt", listing)
    write(tmp_path / "thirdparty-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = [source for source in discover.entry_point_sources() if source.location.startswith("thirdparty")]
    assert [(source.name, source.location) for source in found] == [
        ("aa", "thirdparty.kernels"),
        ("zz", "thirdparty.kernels:make"),
    ]
    assert found[1].roots == (("thirdparty", str(tmp_path / "thirdparty")),)
    assert found[1].label == "entry point zz"


def test_all_sources_each_once():
    good = str(PLUGINS / "good.py")
    found = discover.sources([good, good], {})
    assert [source.name for source in found if source.kind == "plugin_file"] == ["good"]
    assert [source for source in found if source.kind == "builtin"] == discover.builtin_sources()


# Environments


@pytest.mark.parametrize(
    ("name", "table"), [("conformance.toml", "environments"), ("pyproject.toml", "tool.conformance.environments")]
)
def test_environments_are_executables_or_virtual_environments(tmp_path: Path, name: str, table: str):
    python = write(tmp_path / "venvs/vllm/bin/python", "#!/bin/sh\n")
    python.chmod(0o755)
    text = f"[{table}]\nvllm = 'venvs/vllm'\nsglang = '{python}'\nhere = 'venvs/vllm/bin/python'\n"
    config = write(tmp_path / name, text)
    expected = dict.fromkeys(("vllm", "sglang", "here"), str(python))
    assert environments(folder=tmp_path) == environments(config) == expected


def test_a_link_to_an_interpreter_stays_what_it_is(tmp_path: Path):
    (tmp_path / "python").symlink_to(sys.executable)
    write(tmp_path / "conformance.toml", "[environments]\nx = 'python'\n")
    assert environments(folder=tmp_path) == {"x": str(tmp_path / "python")}


def test_without_a_table_there_are_no_environments(tmp_path: Path):
    assert environments(folder=tmp_path) == {}
    write(tmp_path / "pyproject.toml", "[tool.other]\nx = 1\n")
    assert environments(folder=tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[environments", "conformance.toml: "),
        ("environments = 3", "environments is not a table"),
        ("[environments]\nx = 3", "environments.x is not a path"),
        ("[environments]\nx = ''", "environments.x is not a path"),
        ("[environments]\nx = 'gone/python'", "gone/python is no Python executable"),
        ("[environments]\nx = 'conformance.toml'", "is no Python executable"),
        ("[environments]\nx = '.'", "is no Python executable and no virtual environment"),
    ],
)
def test_a_bad_table_is_a_usage_error(tmp_path: Path, text: str, words: str):
    write(tmp_path / "conformance.toml", text)
    with pytest.raises(UsageError, match=words) as error:
        environments(folder=tmp_path)
    assert "\n" not in str(error.value)


def test_a_configuration_that_is_named_must_exist(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        environments(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("name", "python"),
    [("flashinfer", "A"), ("flashinfer_quant", "A"), ("flashinfer-moe-sm90", "B"), ("flash", None), ("vllm", None)],
)
def test_the_longest_key_that_starts_a_source_s_name_chooses_its_interpreter(name: str, python: str | None):
    source = BackendSource(kind="builtin", location=f"conformance.backends.{name}", name=name)
    assert python_for(source, {"flashinfer": "A", "flashinfer_moe": "B", "flashinferx": "C"}) == python


# What a worker's import path holds

LISTING = """
import importlib.util, json, sys
sys.argv = ["boot"]
sys.path.insert(0, sys.orig_argv[-1])
from worker_boot import Finder, narrowed
sys.path.pop(0)
places = json.loads(sys.orig_argv[-2])
sys.path[:] = narrowed(sys.path, places)
sys.meta_path.insert(0, Finder(places))
import fuzz.case, reports.record, conformance.messages, ours, ours.inner
assert "conformance.worker" not in sys.modules
print(json.dumps([fuzz.case.__file__, ours.inner.WORD, importlib.util.find_spec("tests") is None, sys.path.count("")]))
"""


def test_the_finder_opens_our_packages_and_the_roots_only(tmp_path: Path):
    import json

    write(tmp_path / "ours/inner.py", "WORD = 'found'\n")  # without __init__.py: a namespace package
    root = Path(package_roots()["conformance"])
    places = json.dumps({**package_roots(), "ours": str(tmp_path / "ours")})
    arguments = [sys.executable, "-I", "-c", LISTING, places, str(root)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=root.parent)
    assert json.loads(done.stdout) == [str(root.parent / "fuzz/case.py"), "found", True, 0]


def test_the_parent_s_modules_import_neither_torch_nor_numpy():
    code = "import sys, conformance.discover, conformance.process; print({'torch', 'numpy'} & set(sys.modules))"
    root = Path(package_roots()["conformance"]).parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "set()\n"


# What a source offers


def plugin(path: Path) -> dict[str, str]:
    source = BackendSource(kind="plugin_file", location=str(path), name=path.stem)
    return {"kind": source.kind, "location": source.location, "label": source.label}


BACKEND = """
from references.backend import Claim
from references.recipes import Recipe

class Mine:
    name = "mine"
    def version(self): return "1"
    def claims(self, device): return [Claim(operation="ue8m0", variant="nearest", source="s")]
    def recipe(self, claim): return Recipe(source="s")
    def prepare(self, case, inputs, options): ...
    def run(self, prepared, out): ...
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import gone_library",
            "plugin p.py: ModuleNotFoundError: No module named 'gone_library' (in <module>, p.py:1)",
        ),
        ("def backends(:", "plugin p.py: SyntaxError: "),
        ("raise SystemExit(3)", "plugin p.py: SystemExit: 3 (in <module>, p.py:1)"),
        ("x = 1", "plugin p.py: offers no function backends()"),
        ("backends = 3", "plugin p.py: offers no function backends()"),
        ("def backends(): return 1 / 0", "plugin p.py: backends(): ZeroDivisionError: division by zero (in backends, "),
        ("def backends(): return 3", "plugin p.py: backends(): TypeError: 'int' object is not iterable"),
        ("def backends(): return [3]", "plugin p.py: int is no Backend: it lacks name, version, claims, recipe, "),
        ("def backends(): return [Mine]", "plugin p.py: Mine is a class; backends() yields instances"),
        ("def backends(): return [Mine(), Mine()]", "plugin p.py: two backends are named 'mine'"),
        ("Mine.name = 'a b'\ndef backends(): return [Mine()]", "plugin p.py: 'a b' is no name of a backend"),
        ("Mine.name = None\ndef backends(): return [Mine()]", "plugin p.py: None is no name of a backend"),
    ],
)
def test_a_source_that_cannot_be_loaded(tmp_path: Path, text: str, message: str):
    path = write(tmp_path / "p.py", (BACKEND if "Mine" in text else "") + text)
    with pytest.raises(ReportedError) as error:
        load(plugin(path))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def version(self): return 1 / 0", "version(): ZeroDivisionError"),
        ("def version(self): return 1", "version() is int, not a string"),
        ("def claims(self, device): raise OSError('no')", "claims(): OSError: no (in claims, p.py:"),
        ("def claims(self, device): return None", "claims(): TypeError"),
        ("def claims(self, device): return ['all']", "claims() yields a str, not a Claim"),
        (
            "def claims(self, device): return [Claim(operation='ue8m0', variant='up', source='s')]",
            "claim ue8m0 up: unknown variant; known: ceil, ",
        ),
        (
            "def recipe(self, claim): return Recipe(source='s', via='fp8')",
            "claim ue8m0 nearest: recipe(): ValueError: recipe: via='fp8' is none of bf16, fp32",
        ),
        ("def recipe(self, claim): return {}", "recipe() is a dict, not a Recipe"),
        ("pace = 0", "pace 0 is not within (0, 1]"),
    ],
)
def test_a_backend_that_cannot_be_described(tmp_path: Path, text: str, message: str):
    path = write(tmp_path / "p.py", f"{BACKEND}    {text}\ndef backends(): return [Mine()]\n")
    backend = load(plugin(path))["mine"]
    with pytest.raises(ReportedError) as error:
        describe("plugin p.py", backend, "cpu")
    assert str(error.value).startswith(f"plugin p.py: mine: {message}")
    assert "\n" not in str(error.value)


def test_a_description(tmp_path: Path):
    path = write(tmp_path / "p.py", f"{BACKEND}    pace = 0.25\ndef backends():\n    yield Mine()\n")
    description = describe("plugin p.py", load(plugin(path))["mine"], "cpu")
    assert (description["backend"], description["version"], description["pace"]) == ("mine", "1", 0.25)
    assert [claimed["claim_text"] for claimed in description["claims"]] == ["all"]


@pytest.mark.parametrize("version", ["", "1\n2", "\udcff", "\u202e1", "1" * 1000])
def test_a_version_is_one_printable_line(tmp_path: Path, version: str):
    assert 'return "1"' in BACKEND
    text = BACKEND.replace('return "1"', f"return {version!a}")
    path = write(tmp_path / "p.py", f"{text}\ndef backends():\n    yield Mine()\n")
    with pytest.raises(ReportedError, match=r"^plugin p\.py: mine: version\(\) is .*, not one line of text$"):
        describe("plugin p.py", load(plugin(path))["mine"], "cpu")


def test_an_entry_point_may_name_a_function(monkeypatch: pytest.MonkeyPatch):
    made = load({"kind": "plugin_file", "location": str(PLUGINS / "good.py"), "label": "x"})["good"]
    module = SimpleNamespace(make=SimpleNamespace(all=lambda: [made]))
    monkeypatch.setitem(sys.modules, "thirdparty_kernels", module)
    found = load({"kind": "entry_point", "location": "thirdparty_kernels:make.all", "label": "entry point x"})
    assert found == {"good": made}


CLAIM = Claim(operation="quantize", variant="mxfp8", source="s")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"operation": "quantise"}, "unknown operation; known: "),
        ({"variant": "mxfp9"}, "unknown variant; known: deepseek_fp8"),
        ({"where": {"dtypes": ("bf16",)}}, "unknown parameter 'dtypes'; known: block, dtype"),
        ({"where": {"dtype": ("bf16", "fp8")}}, "dtype=fp8 is none of fp32, bf16, fp16"),
        ({"where": {"dtype": "bf16"}}, "dtype in where is a string"),
        ({"where": {"k": (64,)}}, "k=64 is no integer in text form"),
        ({"multiples": {"dtype": 2}}, "dtype is no size"),
        ({"multiples": {"k": 0}}, "k in multiples is 0"),
        ({"maxima": {"depth": 2}}, "unknown parameter 'depth'"),
        ({"source": None}, "source is not one line of text"),
        ({"source": "a\nb"}, "source is not one line of text"),
        ({"where": None}, "where is no mapping"),
        ({"where": {"dtype": ()}}, "dtype in where is (), not a tuple"),
        ({"where": {"k": ("064",)}}, "k='064' is no integer in text form"),
        ({"where": {"k": ("0",)}}, "none of k=0 is within"),
        ({"where": {"k": ("64", "96")}, "multiples": {"k": 128}}, "none of k=64|96 is within"),
        ({"multiples": {"k": 2**31}}, "no k is a multiple of 2147483648"),
        ({"multiples": {"k": 64}, "maxima": {"k": 32}}, "no k is a multiple of 64 and at most 32"),
        ({"maxima": {"k": "128"}}, "k in maxima is '128'"),
        ({"maxima": {"k": 0}}, "k in maxima is 0"),
        ({"options": {"tactic": "64x64"}}, "tactic in options is a string"),
        ({"options": {"tactic": (1, 2)}}, "tactic=1 in options is no word"),
        ({"options": {"graph": ("reply",)}}, "graph=reply in options is none of replay"),
        ({"options": {"poison": ("nan",)}}, "'poison' is no name of a call option"),
        ({"enforced": "k"}, "enforced is a string"),
        ({"enforced": ("k",)}, "enforced names 'k', which the claim does not limit"),
    ],
)
def test_a_claim_that_no_case_could_meet(changes: dict, words: str):
    problem = claim_problem(dataclasses.replace(CLAIM, **changes))
    assert problem is not None
    assert words in problem


def test_a_claim_that_some_case_meets():
    assert claim_problem(CLAIM) is None
    narrow = {"where": {"dtype": ("bf16",), "k": ("64",)}, "multiples": {"k": 32}, "maxima": {"m": 7}}
    narrow |= {"options": {"graph": ("replay",), "tactic": ["64x64", "auto"]}, "enforced": ("k", "m")}
    assert claim_problem(dataclasses.replace(CLAIM, **narrow)) is None


def test_an_editable_installation_s_folder_leaves_the_path_and_site_packages_stays(tmp_path: Path):
    from conformance.worker_boot import narrowed

    site = str(tmp_path / "site-packages")
    here = {"fuzz": str(tmp_path / "checkout/fuzz")}
    installed = {"fuzz": f"{site}/fuzz"}
    assert narrowed([str(tmp_path / "checkout"), site], here) == [site]
    assert narrowed([site], installed) == [site]
