"""Pages for the files outside of docs/ that pages link to; on the site they are under repository/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".cff": "yaml"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for every file that a page links to, and for those that the added pages link to."""
    waiting = [(f"docs/{page.src_uri}", page.content_string) for page in files.documentation_pages()]
    while waiting:
        source, text = waiting.pop()
        for link in LINK.findall(FENCED.sub("", text)):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
            uri = site_path(target)
            if target.startswith(("docs/", "..")) or uri in files.src_uris or not (ROOT / target).exists():
                continue

            if target.endswith(".png"):
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
                continue
            content = page_of(ROOT / target, target)
            files.append(File.generated(config, uri, content=content))
            waiting.append((target, content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links to tutorials, and those that lead out of docs/, to the pages that were added."""
    uri = page.file.src_uri
    source = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"

    def redirected(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if site_path(target) == uri:
            return link[1]  # a tutorial's link to its own Python file
        return posixpath.relpath(site_path(target), posixpath.dirname(uri) or ".")

    # Every second part is a fenced block, whose text only looks like links.
    parts = re.split(f"({FENCED.pattern})", markdown, flags=FENCED.flags)
    parts[::2] = [LINK.sub(redirected, part) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show each of Sphinx's roles in docstrings as the name in it."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):<code>~?", "<code>", html)


def site_path(target: str) -> str:
    """Return where the site has a file of the repository, relative to docs/."""
    if target == "README.md":
        return "index.md"
    if target.startswith("docs/tutorials/") and target.endswith(".py"):
        return target.removeprefix("docs/").replace(".py", ".md")
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"repository/{target}" if target.endswith((".md", ".png")) else f"repository/{target}.md"


def page_of(path: Path, name: str) -> str:
    """Return a file as Markdown; for a folder, return links to its modules."""
    if path.suffix == ".md":
        return path.read_text()
    if path.is_dir():
        modules = sorted(file.name for file in path.glob("*.py") if file.name != "__init__.py")
        return f"# `{name}`\n\n" + "\n".join(f"- [{module}]({path.name}/{module})" for module in modules)
    return f"# `{name}`\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"
