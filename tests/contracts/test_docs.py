"""The documentation: links resolve, code compiles, commands and public names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("integrations/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(page.read_text()) if found == language]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pages
def test_links_resolve(page):
    dead = []
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


@pages
def test_python_blocks_compile(page):
    for block in blocks(page, "python"):
        ast.parse(block)


@pages
def test_public_names_in_blocks_exist(page):
    inferscope = pytest.importorskip("inferscope")
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in {"scope", "inferscope"}:
                assert node.attr in inferscope.__all__, f"{node.value.id}.{node.attr}"


@pages
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`|\n)make ([a-z][a-z-]*)", page.read_text())) <= targets


@pages
def test_no_page_installs_another_project(page):
    """The PyPI name `inferscope` belongs to somebody else."""
    assert not re.search(r"pip install (-\S+ )*[\"']?inferscope(?!-sdk)(?!\S*\.(whl|tar))", page.read_text())


def test_readme_names_the_two_commands():
    shell = "\n".join(blocks(ROOT / "README.md", "sh"))
    assert "make demo" in shell
    assert "make test" in shell
