"""The tokenizer of a GGUF file, as transformers converts it.

A large vocabulary takes twice as long to convert as to read, so what ``save_pretrained`` writes of it is kept
in the user's cache, if it is read back as it was: in a folder named by a digest of the file's header and of
the versions, with a digest of its files, and read only if nobody but this user can have written it.
"""

from __future__ import annotations

import logging
import mmap
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import PreTrainedTokenizerFast

from outpace._version import __version__
from outpace.core import OutpaceError, UnsupportedModel, first_line
from outpace.embedded import NoHome, cache_path
from outpace.files import digest_of, why_foreign
from outpace.targets.gguf.file import GgufFile

_log = logging.getLogger(__name__)

_DIGEST = "digest"
_LARGE = 1 << 14  # tokens
_MOST = 8  # tokenizers, of about 11 MB each
_SETTINGS = (
    "special_tokens_map", "chat_template", "model_max_length", "padding_side", "truncation_side",
    "model_input_names", "clean_up_tokenization_spaces", "split_special_tokens", "add_bos_token",
    "add_eos_token", "add_prefix_space",
)  # fmt: skip


def tokenizer_of(file: GgufFile) -> Callable[[], Any]:
    """A function that reads a file's tokenizer, in any thread, since this imports what it needs.

    It returns None if there is none, and raises ``UnsupportedModel`` if transformers cannot convert it.
    """
    from transformers import AutoTokenizer
    from transformers.integrations.gguf import gguf_tokenizer_mapping  # noqa: F401
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    if not file.vocabulary:
        return lambda: None
    # AutoTokenizer would read the config again, with all texts.
    known: Any = TOKENIZER_MAPPING.get(type(file.config), None)
    known = next((kind for kind in reversed(known) if kind), None) if isinstance(known, tuple) else known
    return partial(_read, file, known or AutoTokenizer)


def _read(file: GgufFile, kind: Any) -> Any:
    place = _place(file, kind) if file.vocabulary >= _LARGE else None
    if place is not None and (found := _kept(place)) is not None:
        found.name_or_path = str(file.path.parent)
        return found
    try:
        made = kind.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    except Exception as error:  # transformers raises anything
        raise UnsupportedModel(f"transformers cannot read its tokenizer: {first_line(error)}") from error
    if place is not None:
        _keep(place, made)
    return made


def _place(file: GgufFile, kind: Any) -> Path | None:
    """The folder of a file's tokenizer in the cache; None without a cache."""
    versions = f"{__version__} {transformers.__version__} {tokenizers.__version__} {kind.__qualname__}"
    with file.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        key = digest_of(versions.encode(), memoryview(data)[: file.begin])
    with suppress(NoHome):
        return cache_path() / "tokenizers" / key
    return None


def _kept(place: Path) -> Any:
    """The tokenizer in a folder of the cache; None if there is none, or it is not what was written."""
    try:
        if why := why_foreign(place.stat()):
            raise OutpaceError(why)
        if (place / _DIGEST).read_text("utf-8") != _digest(place):
            raise OutpaceError("it is damaged")
        return _loaded(place)
    except FileNotFoundError:
        return None
    except Exception as error:  # transformers raises anything
        _log.warning("the tokenizer in %s is not read, and is converted again: %s", place, first_line(error))
        return None


def _keep(place: Path, made: Any) -> None:
    """Write a tokenizer to the cache, where others see it as a whole, if it is the same when it is read."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as folder:
            part = Path(folder) / "part"
            part.mkdir(mode=0o700)
            made.save_pretrained(str(part))
            if _state(_loaded(part)) != _state(made):
                raise OutpaceError("it is another one when it is read")
            (part / _DIGEST).write_text(_digest(part), "utf-8")
            shutil.rmtree(place, ignore_errors=True)
            part.rename(place)  # fails if another process was faster
        kept = sorted(place.parent.glob("*/" + _DIGEST), key=lambda file: file.stat().st_mtime)
        for old in kept[:-_MOST]:
            shutil.rmtree(old.parent, ignore_errors=True)
    except Exception as error:  # transformers raises anything; nor is a cache needed
        _log.debug("the tokenizer is not kept: %s", first_line(error))


def _loaded(folder: Path) -> Any:
    """The tokenizer in a folder. A family's own class would replace parts of what is there."""
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def _digest(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.name != _DIGEST)
    return digest_of(*(part for path in files for part in (path.name.encode(), path.read_bytes())))


def _state(tokenizer: Any) -> Any:
    """All that a tokenizer's tokens depend on."""
    settings = [getattr(tokenizer, name, None) for name in _SETTINGS]
    return tokenizer.backend_tokenizer.to_str(), settings
