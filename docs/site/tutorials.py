"""Tutorials are Python files with cells (`# %%`), which run with every build. Each becomes a page with its output."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jupytext
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbformat import NotebookNode

# One process and one Ray for all of them, since starting these takes longer than running most tutorials.
SHARED = "import raypfl; shared = raypfl.session(raypfl.Experiment()); shared.__enter__()"
QUIET = ["--IPKernelApp.log_level=ERROR"]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page, its pictures and its source for each tutorial."""
    sources = sorted(Path(config.docs_dir, "tutorials").glob("*.py"))
    notebooks = [jupytext.read(source) for source in sources]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # where the tutorials' runs go
        run(notebooks, folder)
    for source, notebook in zip(sources, notebooks, strict=True):
        notebook.metadata.language_info = {"name": "python"}
        body, resources = MarkdownExporter().from_notebook_node(notebook, {"unique_key": source.stem})
        body = body.replace(f"{folder}/", "") + f"\n[This tutorial as a Python file]({source.name}).\n"
        for name, content in {
            f"{source.stem}.md": body,
            source.name: source.read_text(),
            **resources["outputs"],
        }.items():
            if found := files.get_file_from_path(f"tutorials/{name}"):
                files.remove(found)
            file = File.generated(config, f"tutorials/{name}", content=content, inclusion=InclusionLevel.INCLUDED)
            files.append(file)
    return files


def run(notebooks: list[NotebookNode], folder: str) -> None:
    """Run all cells in a folder; keep what they print and what the last line of each is, but not their progress."""
    first = nbformat.v4.new_code_cell(SHARED)
    whole = nbformat.v4.new_notebook(cells=[first, *(cell for notebook in notebooks for cell in notebook.cells)])
    NotebookClient(whole, timeout=600, extra_arguments=QUIET, resources={"metadata": {"path": folder}}).execute()
    for cell in whole.cells:
        if cell.cell_type == "code":
            printed = "".join(one.text for one in cell.outputs if one.get("name") == "stdout")
            cell.outputs = [one for one in cell.outputs if "execution_count" in one]
            if printed:
                cell.outputs.insert(0, nbformat.v4.new_output("stream", text=printed))
            for data in (one.data for one in cell.outputs if "text/html" in one.get("data", {})):
                data["text/html"] = f'<div class="output">\n{data["text/html"]}\n</div>'
