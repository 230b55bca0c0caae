"""Sessions: ``nox -l`` lists them; arguments after ``--`` reach the command that the session runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nox

nox.options.sessions = ["conformance", "lint", "tests"]
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
LINT = nox.project.dependency_groups(PROJECT, "lint")
# One environment serves every session: the libraries under test take gigabytes.
ENVIRONMENT = ROOT / ".nox" / "environment"
PYTHON = str(ENVIRONMENT / "bin" / "python")
STAMP = ENVIRONMENT / "installed-from"
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
DOCS = """\
site_name: blockscale-conformance
docs_dir: ../docs
site_dir: docs
use_directory_urls: false
validation: {links: {anchors: warn, unrecognized_links: warn}}
"""
NO_DEPENDENCIES = ROOT / "constraints" / "no-deps.txt"


PATIENCE = 120
"""Seconds that a command has to write its files after Ctrl-C; nox alone would kill it after half of one."""
GATED = ("flashinfer", "sglang", "torch")
"""Whose gates the main job looks at; the session ``gating`` compiles kernels too."""


def has_gpu() -> bool:
    """Whether an NVIDIA driver is at hand; looked up without loading CUDA."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def python(session: nox.Session, *arguments: str) -> None:
    """Run the environment's Python, with the project and all that it tests installed into it."""
    constraints = [] if has_gpu() else ["-c", str(CONSTRAINTS)]
    files = (ROOT / "pyproject.toml", CONSTRAINTS, NO_DEPENDENCIES)
    wanted = "\n".join([sys.version, *constraints, *(file.read_text() for file in files)])
    if not STAMP.exists() or STAMP.read_text() != wanted:
        session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(ENVIRONMENT), external=True)
        install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints)
        session.run(PYTHON, *install, "-e", ".[torchao,fast]", *LINT, external=True)
        session.run(PYTHON, *install, "--no-deps", "-r", str(NO_DEPENDENCIES), external=True)
        STAMP.write_text(wanted)
    session.run(PYTHON, *arguments, external=True, interrupt_timeout=PATIENCE, terminate_timeout=PATIENCE)


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """The main job: the architecture gates, then every operation against every backend at hand; reports in out/.

    With arguments, which go to ``conformance run``, the gates are left out.
    """
    gates = [word for name in GATED for word in ("--gates", name)]
    python(session, "-m", "conformance", "run", *(session.posargs or gates))


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The tests of the harness itself; arguments go to pytest."""
    python(session, "-m", "pytest", *(session.posargs or ["-n", "2"]))


@nox.session(venv_backend="none", default=False)
def suite(session: nox.Session) -> None:
    """The conformance suite as a pytest run; arguments go to pytest (-k, -n 2, --lf, --junitxml, ...)."""
    python(session, "-m", "pytest", "-p", "conformance.plugin", "--pyargs", "conformance.suite", *session.posargs)


@nox.session(venv_backend="none", default=False)
def fuzz(session: nox.Session) -> None:
    """Search with ever new cases for five minutes (--budget), towards the edge of what is admissible."""
    python(session, "-m", "conformance", "fuzz", *session.posargs)


@nox.session(venv_backend="none", default=False)
def repro(session: nox.Session) -> None:
    """Show a failure again: nox -s repro -- '<case>' --backend NAME, or an id, a capsule, a run.json: docs/repro.md."""
    python(session, "-m", "conformance", "repro", *session.posargs)


@nox.session(venv_backend="none", default=False)
def probe(session: nox.Session) -> None:
    """Fingerprints: what backends do where recipes leave a choice, beside what theirs declare; docs/probe.md."""
    python(session, "-m", "conformance", "probe", *session.posargs)


@nox.session(venv_backend="none", default=False)
def compare(session: nox.Session) -> None:
    """Two versions, revisions or backends on the same cases, before a merge: docs/compare.md."""
    python(session, "-m", "conformance", "compare", *session.posargs)


@nox.session(venv_backend="none", default=False)
def power(session: nox.Session) -> None:
    """Detection power: mutants of historical bugs, searched for within a budget, beside the recorded score."""
    python(session, "-m", "conformance", "power", *session.posargs)


@nox.session(venv_backend="none", default=False)
def gating(session: nox.Session) -> None:
    """What libraries say of each GPU architecture against what is published, without a GPU: docs/gating.md."""
    python(session, "-m", "conformance", "gating", *session.posargs)


@nox.session(venv_backend="none", default=False)
def environments(session: nox.Session) -> None:
    """Interpreters for libraries with pins of their own: nox -s environments -- sglang flashinfer==0.7.2.post1."""
    python(session, "-m", "conformance", "environments", *session.posargs)


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Throughput of the references beside a memory copy and other libraries' references, in one run.

    Without arguments also one expert layer of DeepSeek-V3's size, with 64 tokens, and with 4096 where there is a GPU.
    """
    python(session, "-m", "benchmarks.throughput", *session.posargs)
    if not session.posargs:
        python(session, "-m", "benchmarks.moe_layer")
    if not session.posargs and has_gpu():
        python(session, "-m", "benchmarks.moe_layer", "--tokens", "4096", "--device", "cuda", "--repeats", "8")


@nox.session(venv_backend="virtualenv", default=False)
def docs(session: nox.Session) -> None:
    """These pages as HTML in out/docs; a link or an anchor that leads nowhere fails."""
    session.install(*nox.project.dependency_groups(PROJECT, "docs"))
    config = ROOT / "out" / "mkdocs.yml"
    config.parent.mkdir(exist_ok=True)
    config.write_text(DOCS)
    session.run("mkdocs", "build", "--quiet", "--strict", "--config-file", str(config), *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Formatting, lint rules and strict types."""
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")
    python(session, "-m", "mypy")
