"""Code blocks of the documentation, and the files that it tells its reader to write."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "cluster").glob("*.md")),
]
FENCED = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes
    ----------
    page : the page's path, from the root of the repository.
    language : the block's language; empty for commands.
    code : the block's text.
    """

    page: str
    language: str
    code: str

    @property
    def name(self) -> str:
        """The block's page and first line."""
        return f"{self.page}: {self.code.partition(chr(10))[0]}"


def blocks(page: str, language: str) -> list[str]:
    """Return a page's code blocks in a language; without a language, its commands."""
    fenced = FENCED.findall((ROOT / page).read_text())
    return [code for block_language, code in fenced if block_language == language]


BLOCKS = [
    Block(str(page.relative_to(ROOT)), language, code)
    for page in PAGES
    for language, code in FENCED.findall(page.read_text())
]

READER_FILES = {
    "authors.py": ("docs/fednh.md", "class AuthorsDitto"),
    "my_analyses.py": ("docs/analyses.md", "class Drift"),
    "my_clients.py": ("docs/data.md", "class Sensors"),
    "my_experiment.yaml": ("README.md", "rounds: 20"),
    "my_losses.py": ("docs/evaluation.md", "class Focal"),
    "my_metrics.py": ("docs/evaluation.md", "class Within"),
    "my_fedavg.py": ("docs/write_a_method.md", "class MyFedAvg"),
    "my_generator.py": ("docs/write_a_method.md", "class FromGenerator"),
    "my_methods.py": ("docs/write_a_method.md", "class PartlyPersonal"),
    "my_networks.py": ("docs/own_network.md", "class SmallCNN"),
    "my_partitions.py": ("docs/data.md", "class LargestFirst"),
    "my_recipe.yaml": ("docs/flntk.md", "analyses:"),
    "my_rules.py": ("docs/optimizers.md", "class Lion"),
    "my_study.yaml": ("docs/studies.md", "published:"),
    "mine.yaml": ("README.md", "rounds: 20"),
    "pfllib_clients.py": ("docs/coming_from.md", "class PFLlibClients"),
    "release.yaml": ("docs/fednh.md", "extends:"),
    "runs/digits-ditto/best.yaml": ("README.md", "rounds: 20"),
}
"""Files that pages tell their reader to write, or that a command writes: the page, and a text in the block."""


def write_files(folder: Path) -> None:
    """Write a reader's files into a folder, as in a clone of the repository."""
    for name, (page, text) in READER_FILES.items():
        (code,) = [block.code for block in BLOCKS if block.page == page and block.language and text in block.code]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)

    for name in ("Makefile", "cluster", "tune_configs"):
        (folder / name).symlink_to(ROOT / name)


def shell_lines() -> list[list[str]]:
    """Return the words of each command, once, from blocks that name no language."""
    commands: dict[tuple[str, ...], None] = {}
    for block in BLOCKS:
        if block.language:
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            words = tuple(shlex.split(line, comments=True))
            if words:
                commands[words] = None
    return [list(words) for words in commands]
