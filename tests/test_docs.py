"""Does what the pages show work? Run files are loaded, commands are known, links lead somewhere."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from triax.cli import app
from triax.spec.load import load_run

ROOT = Path(__file__).parents[1]
FOR_USERS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*FOR_USERS, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]


def blocks(page: Path, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


RUN_FILES = [
    pytest.param(text, id=f"{page.name}-{number}")
    for page in PAGES
    for number, text in enumerate(blocks(page, "toml"))
    if all(section in text for section in ("[model]", "[data]", "[train]"))
]


@pytest.mark.parametrize("text", RUN_FILES)
def test_run_files_of_the_pages_are_legal(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    load_run(tmp_path / "run.toml")


def commands(page: Path) -> Iterator[list[str]]:
    text = page.read_text()
    spans = [line for block in blocks(page, r"\w*") for line in block.splitlines()]
    spans += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for span in spans:
        words = re.match(r"(?:\$ )?(?:\.venv/bin/)?triax ([a-z].*)", span.strip())
        if words is not None:
            yield shlex.split(words[1], comments=True)


def test_commands_of_the_pages_are_verbs_with_options_that_exist() -> None:
    command = typer.main.get_command(app)
    seen = 0
    for page in FOR_USERS:
        for words in commands(page):
            verb = command
            for word in words:
                inner = getattr(verb, "commands", {}).get(word)
                if inner is None:
                    break
                verb = inner
            assert verb is not command, f"{page.name}: triax {' '.join(words)}"
            known = {option for parameter in verb.params for option in parameter.opts}
            said = {word.split("=")[0] for word in words if re.fullmatch(r"--[a-z][a-z-]*(=.*)?", word)}
            assert said <= known, f"{page.name}: triax {' '.join(words)} has {sorted(said - known)}"
            seen += 1
    assert seen > 10


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
