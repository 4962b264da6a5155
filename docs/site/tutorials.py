"""Pages for the tutorials: Python files with cells (`# %%`), run in every build and shown with their output."""

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

# All tutorials share a process and a Ray cluster, which take longer to start than most tutorials take to run.
SHARED = "import raypfl; shared = raypfl.session(raypfl.Experiment()); shared.__enter__()"
QUIET = ["--IPKernelApp.log_level=ERROR"]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page, its pictures and its source for each tutorial."""
    sources = sorted(Path(config.docs_dir, "tutorials").glob("*.py"))
    notebooks = [jupytext.read(source) for source in sources]
    # The tutorials write their runs into this folder.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run(notebooks, folder)

    for source, notebook in zip(sources, notebooks, strict=True):
        notebook.metadata.language_info = {"name": "python"}
        body, resources = MarkdownExporter().from_notebook_node(notebook, {"unique_key": source.stem})
        body = body.replace(f"{folder}/", "") + f"\n[This tutorial as a Python file]({source.name}).\n"
        contents = {f"{source.stem}.md": body, source.name: source.read_text(), **resources["outputs"]}
        for name, content in contents.items():
            existing = files.get_file_from_path(f"tutorials/{name}")
            if existing:
                files.remove(existing)
            file = File.generated(config, f"tutorials/{name}", content=content, inclusion=InclusionLevel.INCLUDED)
            files.append(file)
    return files


def run(notebooks: list[NotebookNode], folder: str) -> None:
    """Run all cells in a folder; keep what each prints and the value of its last line, but not its progress."""
    cells = [nbformat.v4.new_code_cell(SHARED)]
    for notebook in notebooks:
        cells += notebook.cells
    combined = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(combined, timeout=600, extra_arguments=QUIET, resources={"metadata": {"path": folder}}).execute()

    for cell in combined.cells:
        if cell.cell_type == "code":
            _keep_results(cell)


def _keep_results(cell: NotebookNode) -> None:
    printed = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
    cell.outputs = [output for output in cell.outputs if "execution_count" in output]
    if printed:
        cell.outputs.insert(0, nbformat.v4.new_output("stream", text=printed))

    for output in cell.outputs:
        data = output.get("data", {})
        if "text/html" in data:
            data["text/html"] = f'<div class="output">\n{data["text/html"]}\n</div>'
