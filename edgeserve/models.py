"""From what a user calls a model to a file that can be loaded: look here first, download if needed, verify.

Owns the syntax of references and the order in which places are looked at. Knows nothing of how files travel
(`hub`, `wheel_source`) or of what other programs have (`local_models`); the rest of edgeserve calls `locate`.

    NAME                   an entry of models.txt
    path/to/file.gguf      any one part of a split model stands for all
    ORG/REPO[:TAG]         hub repository, with or without hf: before it; no tag: Q4_K_M, Q8_0, the first file
    hf:ORG/REPO/FILE.gguf  one file of it; its https address works too
    ollama:NAME[:TAG]      what Ollama has downloaded
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgeserve import hub, local_models, wheel_source
from edgeserve.download import Progress, Report, inside, no_report
from edgeserve.errors import DownloadError, ModelError, ModelNotFoundError
from edgeserve.gguf import GGUFHeader, check_loadable, read_header
from edgeserve.gguf_remote import read_remote_header
from edgeserve.hub import HubFile
from edgeserve.model_list import ModelEntry, find_entry, near_names, read_models_list
from edgeserve.model_reference import HubReference, parse_hub_reference

LIST_HINT: Final = "`edgeserve models` lists what is known and what is here."


@dataclass(frozen=True)
class DownloadPlan:
    """What would have to be fetched. Exactly one of `repo` and `requirement` is not ""."""

    name: str
    files: tuple[HubFile, ...]
    repo: str = ""
    requirement: str = ""
    licence: str = ""

    @property
    def n_bytes(self) -> int | None:
        """Bytes of all files; None if the size of one is not known."""
        sizes = [file.n_bytes for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)


def locate(reference: str, *, offline: bool = False, progress: Report = no_report) -> Path:
    """Path of a model that the runtime may load, downloaded if it is not here yet.

    ModelNotFoundError if nothing answers to `reference`, DownloadError if fetching fails, GGUFError if the
    file is not one that can be loaded.
    """
    found = resolve(reference, offline=offline, progress=progress)
    path = found if isinstance(found, Path) else pull(found, progress)
    check_loadable(read_header(path))
    return path


def read_model_header(reference: str, *, offline: bool = False, progress: Report = no_report) -> GGUFHeader:
    """Header of a model that need not be here: read from the hub by ranges then, or of any https URL.

    A model inside a wheel is downloaded, since it cannot be read in part. Errors as for `locate`, but a file
    that could not be loaded is no error here.
    """
    if "://" in reference and parse_hub_reference(reference) is None:
        return read_remote_header(reference, offline=offline)
    found = resolve(reference, offline=offline, progress=progress)
    if isinstance(found, DownloadPlan) and found.repo:
        url = hub.file_url(found.repo, found.files[0].name)
        return read_remote_header(url, offline=offline, token=hub.token(), trusted=hub.endpoint())
    return read_header(found if isinstance(found, Path) else pull(found, progress))


def resolve(reference: str, *, offline: bool = False, progress: Report = no_report) -> Path | DownloadPlan:
    """The file that `reference` means if it is on this machine, else what would have to be downloaded.

    Asks the network only for a repository of which nothing that fits is here. ModelNotFoundError if nothing
    answers to it (with `offline`: nothing here).
    """
    entry = find_entry(reference, read_models_list())
    if entry is not None:
        return path_of_entry(entry) or _unless_offline(_plan_of_entry(entry), reference, offline)
    if reference.startswith("ollama:"):
        return _ollama(reference)
    here = _path_of_file(reference)
    if here is not None:
        return here
    wanted = parse_hub_reference(reference)
    if wanted is None:
        raise _unknown(reference)
    here = _cached(wanted)
    if here is not None:
        return here
    if offline or hub.is_offline():
        raise _not_here(reference)
    progress(Progress(reference, "connect"))
    return _plan_of_repo(wanted)


def path_of_entry(entry: ModelEntry) -> Path | None:
    """Where the entry's file is, if it is here with the size that the list says."""
    if entry.requirement:
        # Read through a link if the user made one; only writing must stay inside the folder.
        path: Path | None = local_models.models_dir() / entry.file_name
    else:
        path = _cached(HubReference(entry.repo, file=entry.file))
    if path is None or not path.is_file():
        return None
    return path if entry.n_bytes in (None, path.stat().st_size) else None


def path(reference: str) -> Path:
    """The file on this machine that `reference` means; ModelNotFoundError if it is not here."""
    found = resolve(reference, offline=True)
    assert isinstance(found, Path)
    return found


def pull(what: str | ModelEntry | DownloadPlan, progress: Report = no_report) -> Path:
    """Download a model and return its path; what is here already is not fetched again.

    DownloadError if it cannot be fetched or is not what was promised, ModelNotFoundError if there is none.
    """
    if isinstance(what, str):
        found = resolve(what, progress=progress)
        return found if isinstance(found, Path) else pull(found, progress)
    if isinstance(what, ModelEntry):
        return path_of_entry(what) or pull(_plan_of_entry(what), progress)
    progress(Progress(what.name, "connect", 0, what.n_bytes))
    first = what.files[0]
    if what.requirement:
        dest = inside(local_models.models_dir(), first.name.rsplit("/", 1)[-1])
        got = wheel_source.fetch_member(
            what.requirement, first.name, dest, n_bytes=first.n_bytes, sha256=first.sha256, report=progress
        )
    else:
        got = hub.fetch(what.repo, _as_the_hub_has_them(what), progress)
    progress(Progress(what.name, "done", got.stat().st_size, got.stat().st_size))
    return got


def remove(reference: str) -> list[Path]:
    """Delete a model from edgeserve's folder or the hub's cache; the files deleted.

    ModelNotFoundError if it is not here, ModelError if it belongs to another program or lies elsewhere.
    """
    first = path(reference)
    parts = [part for part in local_models.all_parts(first) if part.is_file()]
    if first.absolute().is_relative_to(local_models.models_dir().absolute()):
        for part in parts:
            part.unlink()
    elif first.absolute().is_relative_to(hub.cache_dir().absolute()):
        for part in parts:
            hub.remove_cached(part)
    else:
        raise ModelError(
            f"{first} is not edgeserve's to delete.", "Delete it with the program it belongs to."
        )
    return parts


def _plan_of_entry(entry: ModelEntry) -> DownloadPlan:
    files = (HubFile(entry.file, entry.n_bytes, entry.sha256),)
    return DownloadPlan(entry.name, files, entry.repo, entry.requirement, entry.licence)


def _plan_of_repo(wanted: HubReference) -> DownloadPlan:
    listed = {file.name: file for file in hub.list_files(wanted.repo)}
    models = hub.choose(listed) if not (wanted.tag or wanted.file) else []
    chosen = models or hub.choose_named(listed, wanted.tag, wanted.file)
    if not chosen:
        what = wanted.file or wanted.tag
        gguf = sorted(name for name in listed if name.endswith(".gguf"))
        raise ModelNotFoundError(
            f"{wanted.repo} has no {what or 'GGUF model'}.",
            f"It has {', '.join(gguf[:8])}{' and more' if len(gguf) > 8 else ''}."
            if gguf
            else "llama.cpp reads GGUF: look for a repository whose name ends in GGUF.",
        )
    return DownloadPlan(wanted.repo, tuple(listed[name] for name in chosen), wanted.repo)


def _as_the_hub_has_them(plan: DownloadPlan) -> list[HubFile]:
    """The plan's files with what the hub says of them now; DownloadError if that contradicts the plan."""
    listed = {file.name: file for file in hub.list_files(plan.repo)}
    files = []
    for file in plan.files:
        now = listed.get(file.name)
        if now is None:
            raise ModelNotFoundError(
                f"{plan.repo} has no file {file.name} any more.", f"See {plan.repo} on the hub."
            )
        if file.sha256 and now.sha256 and file.sha256 != now.sha256:
            raise DownloadError(
                f"{file.name} was replaced by its publisher since edgeserve listed it.",
                f"To take the new one unseen, give hf:{plan.repo}/{file.name}.",
            )
        files.append(HubFile(file.name, file.n_bytes or now.n_bytes, file.sha256 or now.sha256))
    return files


def _cached(wanted: HubReference) -> Path | None:
    """From the hub's cache, or from LM Studio's folder of the same repository."""
    found = hub.cached_model(wanted.repo, wanted.tag, wanted.file)
    if found is not None:
        return found
    files = local_models.lm_studio_files(wanted.repo)
    chosen = hub.choose_named(files, wanted.tag, wanted.file)
    return files[chosen[0]] if chosen and hub.is_complete(chosen) else None


def _ollama(reference: str) -> Path:
    found = local_models.ollama_model(reference.removeprefix("ollama:"))
    if found is None:
        raise ModelNotFoundError(
            f"Ollama has no {reference.removeprefix('ollama:')} on this machine that can be read.",
            "edgeserve takes what `ollama pull` has downloaded; it does not download from Ollama.",
        )
    return found


def _path_of_file(reference: str) -> Path | None:
    """The file, if `reference` is a path; ModelNotFoundError if it can only be one and is not there."""
    if reference.startswith("hf:") or "://" in reference or "\0" in reference or not reference:
        return None
    file = Path(reference).expanduser()
    try:
        if file.is_dir():
            return _only_model_in(file)
        if file.exists():
            return file
    except OSError:
        # Too long for a file name, or a folder on the way that may not be entered.
        return None
    if file.is_absolute() or reference.startswith((".", "~")) or reference.endswith(".gguf"):
        near = near_names(file.name, (other.name for other in file.parent.glob("*.gguf")))
        hint = f"In that folder there is {', '.join(near)}." if near else LIST_HINT
        raise ModelNotFoundError(f"There is no file {file}.", hint)
    return None


def _only_model_in(folder: Path) -> Path | None:
    names = {path.name: path for path in folder.glob("*.gguf")}
    first = [
        name for name in hub.choose_models(names) if local_models.all_parts(names[name])[0] == names[name]
    ]
    if len(first) == 1:
        return names[first[0]]
    what = f"holds {len(first)} models" if first else "holds no model"
    raise ModelNotFoundError(
        f"{folder} {what}.", f"Give one file: {', '.join(first[:5])}." if first else LIST_HINT
    )


def _unless_offline(plan: DownloadPlan, reference: str, offline: bool) -> DownloadPlan:
    if offline or hub.is_offline():
        raise _not_here(reference)
    return plan


def _not_here(reference: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"{reference} is not on this machine.",
        f"`edgeserve models pull {reference}`, without --offline, downloads it. {LIST_HINT}",
    )


def _unknown(reference: str) -> ModelNotFoundError:
    near = near_names(reference, (entry.name for entry in read_models_list()))
    hint = f"Did you mean {' or '.join(near)}? {LIST_HINT}" if near else LIST_HINT
    shown = reference if reference.isprintable() else repr(reference)
    return ModelNotFoundError(f"No model answers to {shown[:200]!r}.", hint)
