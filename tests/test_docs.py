"""The documentation is true: links lead somewhere, commands and options exist, nothing on offer goes unnamed."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from conformance.cli import app
from fuzz.grammar import GRAMMAR

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(?:sh|console|text)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"^(?:\$ )?(?:.*&& )?(?:python3? -m conformance|nox -s|python3? -m nox -s) (.+?)(?:\s#.*)?$", re.MULTILINE
)
INLINE = re.compile(r"`(?:python3? -m conformance|nox -s) ([^`]+)`")
SESSIONS = {
    node.name
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and any("session" in ast.unparse(item) for item in node.decorator_list)
}
CLI: Any = typer.main.get_command(app)
PYTEST = {"tests", "suite"}
OTHERS = PYTEST | {"lint", "docs", "bench", "environments"}
"""Sessions whose arguments go to another program."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """(command or session, its options) for every command line of ours on a page; placeholders and dots left out."""
    text = page.read_text(encoding="utf-8")
    lines = [match for block in FENCE.findall(text.replace("\\\n", " ")) for match in COMMAND.findall(block)]
    found = []
    for line in [*lines, *INLINE.findall(text)]:
        try:
            words = shlex.split(line.replace("…", "").replace("...", ""))
        except ValueError:  # a shell's continuation or a quote that the page cuts short
            words = line.split()
        if words:
            found.append(
                (words[0], [word.partition("=")[0] for word in words[1:] if word.startswith("--") and len(word) > 2])
            )
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_commands_and_options_exist(page: Path) -> None:
    for command, options in commands(page):
        command = command.rstrip(".,;:")
        assert command in CLI.commands or command in SESSIONS, f"{name(page)}: no command or session {command!r}"
        if command in CLI.commands and command not in OTHERS:
            known = {option for item in CLI.commands[command].params for option in item.opts} | {"--help"}
            assert [option for option in options if option not in known] == [], f"{name(page)}: {command}"


def test_the_check_of_commands_sees_them() -> None:
    seen = {command for page in PAGES for command, _ in commands(page)}
    assert {"conformance", "tests", "repro", "gating", "power", "run"} <= seen


def links(page: Path) -> set[Path]:
    return {(page.parent / target.partition("#")[0]).resolve() for target in LINK.findall(page.read_text("utf-8"))}


def test_the_tables_of_contents_list_every_page() -> None:
    docs = ROOT / "docs"
    listed = links(docs / "README.md") | links(docs / "findings" / "README.md") | links(docs / "results" / "README.md")
    pages = {path.resolve() for path in (*docs.glob("**/*.md"), *docs.glob("**/*.py"))}
    assert pages - listed - {docs / "README.md"} == set()


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "findings").glob("0*.md")), ids=lambda page: page.stem[:3])
def test_a_finding_says_what_a_maintainer_asks(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.search(r"^\*\*Versions\.\*\* .*\d+\.\d+", text, re.MULTILINE)
    assert "**Cause.**" in text or "**Actual.**" in text
    assert re.search(r"\*\*Expected\.\*\*|\bexpected\b", text)
    assert f"python docs/findings/{page.stem}.py" in text
    assert page.with_suffix(".py").is_file()
    ledger = (ROOT / "conformance" / "ledger.toml").read_text(encoding="utf-8")
    entries = re.findall(r"`([a-z0-9-]+)`", text.partition("Ledger:")[2])
    assert [entry for entry in entries if f'id = "{entry}"' not in ledger] == []


def test_every_ledger_entry_that_names_a_finding_is_named_there() -> None:
    entries = tomllib.loads((ROOT / "conformance" / "ledger.toml").read_text(encoding="utf-8"))["entry"]
    named = [(entry, re.search(r"finding (\d{3})|findings/(\d{3})", entry["reason"])) for entry in entries]
    for entry, match in named:
        if match is not None and not entry["id"].startswith("flashinfer-replay-"):
            (page,) = (ROOT / "docs" / "findings").glob(f"{match[1] or match[2]}-*.md")
            assert entry["id"] in page.read_text(encoding="utf-8"), entry["id"]


def test_the_readme_names_everything_on_offer() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for operation in GRAMMAR:
        assert f"`{operation}`" in readme, f"operation {operation}"
    for session in SESSIONS:
        assert re.search(rf"nox -s {session}\b", readme), f"session {session}"


def test_nox_gives_a_command_time_to_write_its_files_after_ctrl_c() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    ours = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "python")
    calls = [ast.unparse(node) for node in ast.walk(ours) if isinstance(node, ast.Call)]
    (last,) = [call for call in calls if call.startswith("session.run(PYTHON, *arguments")]
    assert "interrupt_timeout=PATIENCE, terminate_timeout=PATIENCE" in last
