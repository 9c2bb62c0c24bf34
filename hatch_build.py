"""Metadata of the wheel that follow from where the repository is: its URLs, and a README whose links work on PyPI.

DSFT_REPOSITORY names it, as https://github.com/OWNER/dsft. Without it there are no URLs, and links lose their
addresses, since PyPI has none of these files.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute_links(text: str, repository: str, tag: str) -> str:
    """`text` of the README with links to files of the repository at `tag`; pictures need their raw bytes."""

    def with_address(link: re.Match) -> str:
        bang, words, target = link.groups()
        if re.match(r"https?:|#", target):
            return link[0]
        if not repository:
            return "" if bang else words
        return f"{bang}[{words}]({repository}/{'raw' if bang else 'blob'}/{tag}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", with_address, text)


class Published(MetadataHookInterface):
    """Called by hatchling, with what pyproject.toml holds under [project]."""

    def update(self, metadata: dict) -> None:
        repository = os.environ.get("DSFT_REPOSITORY", "").rstrip("/")
        tag = f"v{metadata['version']}"
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(readme, repository, tag)}
        pages = {"Repository": "", "Documentation": f"/blob/{tag}/docs/README.md", "Issues": "/issues"}
        pages["Changelog"] = f"/blob/{tag}/CHANGELOG.md"
        metadata["urls"] = {name: repository + page for name, page in pages.items() if repository}
