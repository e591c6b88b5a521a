"""The syntax of hub references.

Owns how a user may write a repository, a tag or a file of the hub. Knows nothing of what exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from edgeserve import hub


@dataclass(frozen=True)
class HubReference:
    """A repository and, at most, either a tag or a file in it."""

    repo: str
    tag: str | None = None
    file: str | None = None


def parse_hub_reference(reference: str) -> HubReference | None:
    """ORG/REPO[:TAG], hf:ORG/REPO[:TAG], hf:ORG/REPO/FILE.gguf or the file's https address; else None."""
    text, explicit = reference, False
    for prefix in ("hf:", "https://huggingface.co/", hub.endpoint() + "/"):
        if reference.startswith(prefix):
            text, explicit = reference.removeprefix(prefix), True
    if "://" in reference:
        text = unquote(urlsplit(text).path)
    parts = text.split("/")
    if len(parts) > 4 and parts[2] in ("resolve", "blob"):
        parts = [*parts[:2], *parts[4:]]
    if len(parts) < 2 or (not explicit and (len(parts) > 2 or text.endswith(".gguf"))):
        return None
    repo, _, tag = "/".join(parts[:2]).partition(":")
    if not hub.is_repo_name(repo):
        return None
    if len(parts) == 2:
        return HubReference(repo, tag or None)
    file = "/".join(parts[2:])
    return HubReference(repo, file=file) if file.endswith(".gguf") and not tag else None
