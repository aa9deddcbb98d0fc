"""The Hugging Face hub: looking for a model, fetching it, and GGUF files by ``owner/name:QUANT``.

Imports no torch. A hub that cannot be reached is reported within seconds.
"""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from outpace.core import OutpaceError, first_line, near

_log = logging.getLogger(__name__)
_SECONDS = 2.5  # in which the hub must answer the first question
_TRAINED = ("dflash", "eagle", "hydra", "medusa", "mtp")  # drafters that ``outpace train`` makes
_DRAFTER = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
_QUANTISED = re.compile(r"([\w.-]+/[\w.-]+):([A-Za-z0-9_]+)")
_QUANT = re.compile(r"(?:^|[-._/])((?:I?Q\d|TQ\d|BF16|F16|F32|MXFP)\w*)(?=[-.]|$)", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_WEIGHTS = ".safetensors"
_PATTERNS = [f"*{_WEIGHTS}", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]


def cached_names() -> list[str]:
    return sorted(_revisions())


def here(name: str) -> Path | None:
    """The folder of a model in the hub's cache, or a GGUF file's path; None if it is not there."""
    if is_quantised(name):
        repository, quant = name.split(":")
        return _here(repository, quant)
    return _folder(name)


@lru_cache(maxsize=64)
def source(repository: str) -> str:
    """What a model is loaded from: its name or, if only the cache has an answer, its folder there.

    transformers asks the hub about each file of a name, and waits for minutes if none of that is answered.
    """
    folder = _folder(repository)
    if folder is None or _offline() or _answers():
        return repository
    _log.warning("the Hugging Face hub cannot be reached; %s is loaded from the cache", repository)
    return str(folder)


def check(repository: str, known: Iterable[str] = ()) -> None:
    """Refuse a model that is neither in the cache nor on the hub.

    Args:
        known: further names, one of which may be meant.

    Raises:
        OutpaceError: it is not there, or the hub cannot be reached.
    """
    if _folder(repository) is None:
        _files(repository, known)


def pull(repository: str, known: Iterable[str] = ()) -> Path:
    """Fetch what decoding with a model needs into the hub's cache, and return its folder.

    Args:
        known: further names, one of which may be meant.

    Raises:
        OutpaceError: there is no such model, it has no weights that outpace loads, or the hub cannot be
            reached.
    """
    from huggingface_hub import snapshot_download

    files = _files(repository, known)
    if quants := _quants(files):
        advice = f"outpace pull {repository}:{min(quants)}"
        if not any(name.endswith(_WEIGHTS) for name in files):
            raise OutpaceError(f"{repository} has GGUF files, {', '.join(quants)}; name one, as in {advice}")
    elif not any(name.endswith(_WEIGHTS) for name in files):
        raise OutpaceError(f"{repository} has no weights in safetensors format, the only one that is loaded")
    try:
        return Path(snapshot_download(repository, allow_patterns=_PATTERNS, ignore_patterns="original/*"))
    except Exception as error:  # the hub may raise anything
        raise _refused(repository, error) from error


# -- drafters --------------------------------------------------------------------------------------------


def drafter_folder(given: str | Path, method: str, tokenizer: bool = False) -> Path:
    """The folder of a drafter: the given one or, if it does not exist, that of a name on the hub.

    A name is ``owner/name`` or ``owner/name@revision``: a branch, a tag or a commit. As for transformers, the
    cache is that of ``HF_HUB_CACHE``, and with ``HF_HUB_OFFLINE`` nothing else is asked.

    Args:
        tokenizer: whether the files of a tokenizer are needed too.

    Raises:
        OutpaceError: there is no such folder, and the hub has none of that name or cannot be reached.
    """
    path = Path(given)
    if path.exists() or not (named := _DRAFTER.fullmatch(str(given))):
        return path
    from huggingface_hub import snapshot_download

    how: dict[str, Any] = {"allow_patterns": _PATTERNS if tokenizer else ["*config.json", f"*{_WEIGHTS}*"]}
    if not (_offline() or _answers()):  # its library would wait for minutes
        check_drafter(given, method)
        how["local_files_only"] = True
    try:
        return Path(snapshot_download(named[1], revision=named[2], **how))
    except (OSError, ValueError) as error:
        raise _no_drafter(given, method, first_line(error).rstrip(".")) from error


def check_drafter(given: str | Path, method: str) -> None:
    """Refuse a trained drafter that is neither a folder nor in the cache, if the hub cannot be asked for it.

    Raises:
        OutpaceError: there is none.
    """
    named = _DRAFTER.fullmatch(str(given))
    if not Path(given).exists() and (named is None or not (_folder(*named.groups()) or _reached())):
        raise _no_drafter(given, method, "" if named is None else "it cannot be reached")


def _no_drafter(given: str | Path, method: str, reason: str) -> OutpaceError:
    """The error for a drafter that is not there; ``reason`` is the hub's, if it was asked."""
    told = f"{method}: there is no folder {given}"
    train = f"outpace train {method} --model MODEL --data FILE --out {str(given).partition('@')[0]}"
    advice = [f"train one with: {train}"] if method in _TRAINED else []
    if reason:
        told += f", and the hub has none of that name ({reason})"
        name, _, revision = str(given).partition("@")
        advice.append(
            f"fetch one, with a network: hf download {name}{f' --revision {revision}' if revision else ''}"
        )
    return OutpaceError("; ".join((told, "; or ".join(advice))) if advice else told)


# -- GGUF files ------------------------------------------------------------------------------------------


def is_quantised(name: str) -> bool:
    """True if a name is a GGUF file on the hub, ``owner/name:QUANT``."""
    return _QUANTISED.fullmatch(name) is not None


def check_quantised(name: str) -> None:
    """Refuse the name of a GGUF file that is neither in the cache nor on the hub.

    Raises:
        OutpaceError: as ``local``.
    """
    repository, quant = name.split(":")
    if not _here(repository, quant):
        _chosen(repository, quant, _files(repository))


def local(name: str | Path) -> str | Path:
    """The path of a GGUF file; one that is named by ``owner/name:QUANT`` is fetched into the hub's cache.

    Raises:
        OutpaceError: there is no such file, or the hub cannot be reached.
    """
    if not is_quantised(str(name)):
        return name
    from huggingface_hub import hf_hub_download

    repository, quant = str(name).split(":")
    if (found := _here(repository, quant)) is not None:
        return found
    try:
        paths = [
            hf_hub_download(repository, file, etag_timeout=_SECONDS)
            for file in _chosen(repository, quant, _files(repository))
        ]
    except OutpaceError:
        raise
    except Exception as error:  # the hub may raise anything
        raise _refused(repository, error) from error
    return Path(paths[0])


def _here(repository: str, quant: str) -> Path | None:
    """The file in the cache, its first part if it has several; None if one is missing."""
    for folder, files in _revisions().get(repository, {}).items():
        names = [path.relative_to(folder).as_posix() for path in files]
        try:
            found = _chosen(repository, quant, names)
        except OutpaceError:
            continue
        parts = re.search(r"-of-(\d{5})\.gguf$", found[0])
        if len(found) == (int(parts[1]) if parts else 1):
            return folder / found[0]
    return None


def _chosen(repository: str, quant: str, files: Collection[str]) -> list[str]:
    """The file of a quantisation, or its parts in order."""
    quants = _quants(files)
    found = next((names for name, names in quants.items() if name.lower() == quant.lower()), [])
    if not found:
        known = f"has {', '.join(quants)}.{near(quant.upper(), quants)}" if quants else "has no GGUF files"
        raise OutpaceError(f"{repository} has no GGUF file {quant}; it {known}")
    if len(found) > 1 and not all(map(_PART.search, found)):
        raise OutpaceError(f"{repository} has several GGUF files {quant}: {', '.join(found)}; fetch one")
    return found


def _quants(files: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files by quantisation; those of projectors are left out."""
    found: dict[str, list[str]] = {}
    for name in sorted(files):
        if name.lower().endswith(".gguf") and "mmproj" not in name.lower():
            for quant in _QUANT.findall(name.rpartition("/")[2])[-1:]:
                found.setdefault(quant.upper(), []).append(name)
    return found


# -- the hub and its cache -------------------------------------------------------------------------------


def _files(repository: str, known: Iterable[str] = ()) -> list[str]:
    if not _reached():
        raise OutpaceError(unreachable(repository, known))
    from huggingface_hub import HfApi  # takes long to import, and is not needed to say that nobody answers

    try:
        found: Any = HfApi().model_info(repository, timeout=_SECONDS)
    except Exception as error:  # the hub may raise anything
        raise _refused(repository, error, known) from error
    return [file.rfilename for file in found.siblings or ()]


def _reached() -> bool:
    """True if the hub may be asked, and answers."""
    return not _offline() and _answers()


def _offline() -> bool:
    """True if the hub must not be asked."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _answers() -> bool:
    """True if the hub answers in time, whatever it says.

    Its library asks several questions, each with its own patience, before it says that none is answered. A
    thread of its own asks, since the search for the hub's address has no time limit.
    """
    from huggingface_hub import constants

    found = SimpleQueue[bool]()
    Thread(target=lambda: found.put(_asked(constants.ENDPOINT)), daemon=True).start()
    try:
        return found.get(timeout=_SECONDS)
    except Empty:
        return False


def _asked(endpoint: str) -> bool:
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=_SECONDS):
            return True
    except HTTPError:
        return True
    except (OSError, ValueError, HTTPException) as error:
        # Of certificates only the library knows which are trusted.
        return isinstance(getattr(error, "reason", None), ssl.SSLError)


def unreachable(name: str, known: Iterable[str] = ()) -> str:
    """The message about a model that is not in the cache while the hub cannot be reached."""
    return (
        f"cannot load {name}: there is no such folder, it is not in the local cache, and the Hugging Face "
        f"hub cannot be reached. Fetch it with a network (outpace pull {name}), or give a folder."
        f"{near(name, [*known, *cached_names()])}".rstrip(".")
    )


def _refused(name: str, error: Exception, known: Iterable[str] = ()) -> OutpaceError:
    """The error for one that the hub, or the way to it, has raised."""
    from huggingface_hub import errors

    hint = near(name, [*known, *cached_names()])
    if isinstance(error, errors.GatedRepoError):
        return OutpaceError(f"{name} is gated: ask for access on its page on the hub, then `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return OutpaceError(
            f"{name} is neither a folder nor a model on the hub (a private one needs `hf auth login`).{hint}"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return OutpaceError(f"the hub refuses {name}: {first_line(error)}")
    return OutpaceError(unreachable(name, known))


def _folder(repository: str, revision: str | None = None) -> Path | None:
    from huggingface_hub import errors, try_to_load_from_cache

    with suppress(errors.HFValidationError):
        found = try_to_load_from_cache(repository, "config.json", _cache(), revision)
        return Path(found).parent if isinstance(found, str) else None
    return None


def _revisions() -> dict[str, dict[Path, list[Path]]]:
    """The folders of each model's revisions in the cache, with the files in them."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir(_cache()).repos
    except CacheNotFound:
        return {}
    return {
        one.repo_id: {own.snapshot_path: [file.file_path for file in own.files] for own in one.revisions}
        for one in repositories
        if one.repo_type == "model"
    }


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE
