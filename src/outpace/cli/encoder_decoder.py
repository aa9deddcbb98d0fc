"""``outpace generate`` with encoder-decoder models: sources of audio, and tokens that must not be emitted."""

from __future__ import annotations

import wave
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.prompts import PromptLine
from outpace.cli.running import Job
from outpace.core import OutpaceError, SamplingParams, first_line
from outpace.files import check_plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from outpace.core import Source
    from outpace.loading import Loaded

_WIDTH = 2  # bytes per sample


Audio = Annotated[
    list[Path] | None,
    typer.Option("--audio", metavar="FILE", help="A wav file, for a model of speech (Whisper); repeatable."),
]
Language = Annotated[
    str | None,
    typer.Option("--language", metavar="NAME", help="With --audio: the language spoken. Default: detected."),
]
Task = Annotated[
    str | None,
    typer.Option("--task", metavar="NAME", help="With --audio: transcribe, or translate (into English)."),
]


@dataclass(frozen=True, kw_only=True)
class AudioOptions:
    """Audio that is decoded."""

    audio: Audio = None
    language: Language = None
    task: Task = None

    def asked(self) -> dict[str, str]:
        """The language and the task that were given, by name."""
        found = {"language": self.language, "task": self.task}
        return {name: value for name, value in found.items() if value is not None}


def check_audio(given: AudioOptions, **others: object) -> None:
    """Refuse other options that do not go with --audio, and its own without it."""
    for name, value in others.items():
        if given.audio and value:
            raise OutpaceError(f"--audio is the whole input of a model of speech; leave --{name} out")
    for name in given.asked():
        if not given.audio:
            raise OutpaceError(
                f"--{name} is for a model of speech; give --audio FILE.wav too, or leave it out"
            )


def spoken(given: AudioOptions, model: Loaded) -> list[Job]:
    """Read and encode the audio files, each of them a prompt.

    The decoder starts with the tokens that transformers' own generate() gives it; without a language, the
    model detects one.

    Raises:
        OutpaceError: a file cannot be read or is too long, or the model lacks its feature extractor, the
            language or the task.
    """
    from transformers import AutoFeatureExtractor

    try:
        extractor = AutoFeatureExtractor.from_pretrained(model.source)
    except (OSError, ValueError) as error:
        raise OutpaceError(
            f"{model.name} has no feature extractor that can be loaded (preprocessor_config.json or "
            f"processor_config.json): {first_line(error)}"
        ) from error
    jobs = []
    for index, file in enumerate(given.audio or ()):
        sound = read_wav(file, extractor.sampling_rate)
        if len(sound) > extractor.n_samples:
            raise OutpaceError(
                f"{file} lasts {len(sound) / extractor.sampling_rate:.1f} s, and the command line takes "
                f"{extractor.chunk_length} s; cut it, or use the model from Python: generate() after "
                "outpace.accelerate(model, drafter) takes audio of any length"
            )
        read = extractor(sound, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        source = model.target.encode(read.input_features[0])
        assert source is not None  # the model has an encoder
        jobs.append(Job(index, PromptLine(str(file)), _start(model, source, given.asked()), source=source))
    return jobs


def _start(model: Loaded, source: Source, asked: dict[str, str]) -> list[int]:
    """The tokens that transformers gives the decoder for a source, seen when it decodes one token."""
    from transformers.modeling_outputs import BaseModelOutput

    seen: list[list[int]] = []

    def note(ids: Any, scores: Any) -> Any:
        seen.append(ids[0].tolist())
        return scores

    encoded = BaseModelOutput(last_hidden_state=source.states[None])
    try:
        model.target.model.generate(
            encoder_outputs=encoded, max_new_tokens=1, num_beams=1, logits_processor=[note], **asked
        )
    except (ValueError, AttributeError, KeyError) as error:
        raise OutpaceError(f"{model.name}: {first_line(error)}") from error
    return seen[0]


def read_wav(file: Path, rate: int) -> NDArray[np.float32]:
    """The samples of a wav file, from -1 to 1, the mean of its channels.

    Raises:
        OutpaceError: it cannot be read, or does not have this many samples a second, of 16 bits.
    """
    import numpy as np

    remedy = f"convert it: ffmpeg -i {file} -ar {rate} -ac 1 -c:a pcm_s16le OUT.wav"
    check_plain(file)
    try:
        with wave.open(str(file), "rb") as sound:
            found, width, channels = sound.getframerate(), sound.getsampwidth(), sound.getnchannels()
            raw = sound.readframes(sound.getnframes())
            whole = len(raw) == sound.getnframes() * width * channels
    except OSError as error:
        raise OutpaceError(f"cannot read {file}: {error.strerror}") from None
    except (wave.Error, EOFError) as error:
        raise OutpaceError(f"{file} is not a wav file of PCM samples ({error}); {remedy}") from None
    if (found, width) != (rate, _WIDTH):
        raise OutpaceError(
            f"{file} has {found} samples a second of {8 * width} bits, the model reads {rate} of 16; {remedy}"
        )
    if not raw or not whole:
        raise OutpaceError(f"{file} is {'cut short' if raw else 'empty'}")
    samples: NDArray[np.float32] = np.frombuffer(raw, "<i2").reshape(-1, channels).mean(1).astype(np.float32)
    return samples / np.float32(32768)


def with_own_rules(params: SamplingParams, model: Loaded, jobs: Seq[Job]) -> SamplingParams:
    """Parameters that never emit what an encoder-decoder model's generation config forbids.

    These are a Marian's pad, and a Whisper's tokens that are not speech. Other models have no such tokens.
    """
    if not model.target.has_encoder:
        return params
    from transformers import NoBadWordsLogitsProcessor, SuppressTokensAtBeginLogitsProcessor

    config = model.target.model.generation_config
    words = config.bad_words_ids or ()
    single = [word[0] for word in words if len(word) == 1] + list(config.suppress_tokens or ())
    longer = [word for word in words if len(word) > 1]
    begin = len(jobs[0].parts(model.target)[0])
    processors: list[Any] = []
    if longer:
        processors.append(NoBadWordsLogitsProcessor(longer))
    if config.begin_suppress_tokens:
        processors.append(
            SuppressTokensAtBeginLogitsProcessor(
                config.begin_suppress_tokens, begin_index=begin, device=model.device
            )
        )
    bias = dict.fromkeys(single, float("-inf"))
    return replace(params, logit_bias=bias or None, logits_processors=processors)
