"""Stage the site's pages in build/pages: docs/, the pages of the root, programs, notebooks and the API reference.

Pages link to files by their place in the repository; here a link to a program leads to its page.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

from api import pages as api_pages
from pictures import stack

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUT = ROOT / "build" / "pages"
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def place(path: Path) -> Path | None:
    """Return where a file or folder of the repository is staged; None if it is no part of the site."""
    if path.parent == ROOT and path.suffix == ".md":
        return OUT / "index.md" if path.stem == "README" else OUT / "project" / f"{path.stem.lower()}.md"
    if not path.is_relative_to(DOCS):
        return None
    where = OUT / path.relative_to(DOCS)
    if path.is_dir():
        return where / "index.md"
    if path.name == "README.md":
        return where.with_name("index.md")
    return where.with_name(where.name + ".md") if path.suffix in (".py", ".ipynb") else where


def relink(text: str, page: Path) -> str:
    """Return a page's text with its links leading to the staged files; pictures become part of the page."""
    here = place(page)
    assert here is not None

    def link(found: re.Match[str]) -> str:
        picture, words, target, anchor = found.groups()
        path = (page.parent / target).resolve()
        if picture and path.suffix == ".svg":
            return figure(path.read_text())
        to = place(path)
        return f"{picture}[{words}]({os.path.relpath(to, here.parent)}{anchor or ''})" if to else words

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(link, text[end : fence.start()]), drawn(fence.group())]
        end = fence.end()
    return "".join([*parts, LINK.sub(link, text[end:])])


def drawn(fence: str) -> str:
    """Return a code block as it is, a mermaid chain as a picture: the theme would fetch mermaid from another host."""
    if not fence.lstrip().startswith("```mermaid"):
        return fence
    if fence.count("-->") != len(re.findall(r"^ *\w+.* --> \w+", fence, re.MULTILINE)):
        raise ValueError("the site draws mermaid charts of one chain only; draw others in docs/site/pictures.py")
    return figure(stack(re.findall(r'\["([^"]+)"\]', fence)))


def figure(svg: str) -> str:
    """Return the picture's elements as part of the page, whose colours it follows."""
    flat = re.sub(r"\n\s*", "", svg)
    return f'<figure class="un-figure">{flat}</figure>'


def program(path: Path) -> str:
    """Return the page of a program: its docstring, then all of it."""
    title = path.stem.replace("_", " ")
    return f'# {title}\n\n{summary(path)}\n\n```py title="{path.relative_to(ROOT)}"\n{path.read_text()}```\n'


def summary(path: Path) -> str:
    """Return the first line of a program's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].rstrip(".") + "."


def notebook(path: Path) -> str:
    """Return the page of a notebook: its text, its code and what that printed."""
    return "\n\n".join(part for cell in json.loads(path.read_text())["cells"] for part in cell_text(cell)) + "\n"


def cell_text(cell: dict[str, object]) -> Iterator[str]:
    source = "".join(cell["source"])  # type: ignore[arg-type]
    yield source if cell["cell_type"] == "markdown" else f"```py\n{source}\n```"
    for output in cell.get("outputs", ()):  # type: ignore[attr-defined]
        text = output.get("text") or output.get("data", {}).get("text/plain")
        if text:
            yield "```text\n" + "".join(text).rstrip() + "\n```"


def index(folder: Path) -> str:
    """Return the page of a folder that has none: its pages and programs."""
    entries = sorted(each for each in folder.iterdir() if place(each) and each.suffix in (".md", ".py", ".ipynb", ""))
    links = [f"- {entry(each)}" for each in entries if not each.name.startswith("_")]
    return f"# {folder.name.replace('-', ' ').replace('_', ' ').capitalize()}\n\n" + "\n".join(links) + "\n"


def entry(path: Path) -> str:
    """Return a link to a page by its title, or to a program by its name and with its summary."""
    title = path.stem.replace("_", " ").replace("-", " ")
    if path.suffix == ".md":
        title = re.search("^# (.*)", path.read_text(), re.MULTILINE)[1]  # type: ignore[index]
    return f"[{title}]({path.name})" + (f": {summary(path)}" if path.suffix == ".py" else "")


def stage() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(DOCS, OUT, ignore=shutil.ignore_patterns("*.py", "*.ipynb", "*.md", "__pycache__", "api", "theme"))
    make = {".md": Path.read_text, ".py": program, ".ipynb": notebook}
    sources = [each for each in ROOT.glob("*.md") if each.stem != "README"]
    sources += [each for each in DOCS.rglob("*") if each.suffix in make and "site" not in each.relative_to(DOCS).parts]
    for source in sources:
        write(source, make[source.suffix](source))
    for folder in {each.parent for each in sources} - {ROOT, DOCS}:
        if not (folder / "index.md").exists() and not (folder / "README.md").exists():
            write(folder, index(folder), folder / "index.md")
    for name, text in api_pages().items():
        (OUT / "api").mkdir(exist_ok=True)
        (OUT / "api" / name).write_text(text)


def described(text: str) -> str:
    """Return a page's text with its first sentences as its description, which search engines show."""
    paragraph = re.search(r"^(?=[\w`*[])[^:].+?(?=\n *\n|\Z)", FENCE.sub("", text), re.MULTILINE | re.DOTALL)
    if text.startswith("---") or paragraph is None:
        return text
    plain = re.sub(r"[`*]|!?\[([^]]*)\]\([^)]*\)", r"\1", paragraph.group())
    return f"---\ndescription: {json.dumps(textwrap.shorten(plain, 160, placeholder=' ...'))}\n---\n\n{text}"


def write(source: Path, text: str, page: Path | None = None) -> None:
    to = place(source)
    assert to is not None
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(described(relink(text, page or source)))


if __name__ == "__main__":
    stage()
