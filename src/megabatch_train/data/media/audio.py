"""Recordings: decoding, cropping, resampling, and the features of a transformers model.

WAV files with integer samples need no package. The package soundfile reads WAV files with other samples, FLAC, Ogg and MP3.
Channels are averaged. A crop depends only on the generator of its sample, as for images.
"""

import io
import math
import re
import wave
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabatch import extras
from megabatch_train.data.dataset import Audio, StoredFile, UnreadableSampleError

ENDINGS = (".wav", ".flac", ".ogg", ".mp3")
MOST_SAMPLES = 1 << 28  # limit of all channels together, because a damaged header can claim any number
_STARTS = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff")  # first bytes of the formats
_PURPOSE = "Reading audio other than WAV files with integer samples"
_ADDRESS = re.compile(r"<[^>]* at 0x[0-9a-f]+>")  # the memory address of a buffer in the messages of soundfile


class EncodedAudio(StoredFile):
    """A recording as it is stored."""


def decode(stored: EncodedAudio) -> Audio:
    """Decodes a recording. Raises an `UnreadableSampleError` if it is empty, damaged, cut off or not finite."""
    if not stored.data:
        raise UnreadableSampleError(f"{stored.name} is empty")
    frames, rate = _decode_wav(stored) or _decode_other(stored)  # (n, channels)
    if not len(frames):
        raise UnreadableSampleError(f"{stored.name} has no samples")
    if not bool(frames.isfinite().all()):
        raise UnreadableSampleError(f"{stored.name} must have finite samples, got NaN or infinity")
    return Audio(frames.mean(1), rate)


def _decode_wav(stored: EncodedAudio) -> tuple[Tensor, int] | None:
    """Returns frames and rate of a WAV file with integer samples; None for other files."""
    if stored.data[:4] != b"RIFF" or stored.data[8:12] != b"WAVE":
        return None
    try:
        with wave.open(io.BytesIO(stored.data)) as file:
            count, channels, size, rate = file.getnframes(), file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(count)
    except wave.Error as error:
        if "unknown format" in str(error) or "unknown extended format" in str(error):
            return None
        raise UnreadableSampleError(f"{stored.name} is not a WAV file that can be read: {error}") from error
    except (EOFError, RuntimeError) as error:  # RuntimeError is raised by a chunk that is longer than the file
        raise UnreadableSampleError(f"{stored.name} is cut off") from error
    if len(data) != count * channels * size:
        raise UnreadableSampleError(f"{stored.name} is cut off: it must have {count:,} samples, got fewer")
    if rate < 1 or size not in (1, 2, 3, 4):
        raise UnreadableSampleError(f"{stored.name} must have a rate of at least 1 and samples of 1 to 4 bytes")
    if size == 1:  # the only unsigned size
        samples = (torch.frombuffer(bytearray(data), dtype=torch.uint8).float() - 128) / 128 if data else torch.empty(0)
    else:
        numpy = extras.load("numpy", purpose="Reading audio")
        wide = numpy.zeros((count * channels, 4), numpy.uint8)
        wide[:, 4 - size :] = numpy.frombuffer(data, numpy.uint8).reshape(-1, size)
        samples = torch.from_numpy(wide.view("<i4")[:, 0].astype(numpy.float64) / 2**31).float()
    return samples.view(-1, channels), rate


def _decode_other(stored: EncodedAudio) -> tuple[Tensor, int]:
    """Returns frames and rate of a file that soundfile reads."""
    if not extras.is_installed("soundfile") and not stored.data.startswith(_STARTS):
        raise UnreadableSampleError(f"{stored.name} is not a recording that can be read")
    soundfile = extras.load("soundfile", purpose=_PURPOSE)
    try:
        with soundfile.SoundFile(io.BytesIO(stored.data)) as file:
            if file.frames * file.channels > MOST_SAMPLES:
                raise UnreadableSampleError(
                    f"{stored.name} must have at most {MOST_SAMPLES:,} samples, got {file.frames * file.channels:,}"
                )
            frames = file.read(dtype="float32", always_2d=True)
            return torch.from_numpy(frames), int(file.samplerate)
    except (RuntimeError, OSError, ValueError, TypeError) as error:  # errors of libsndfile are RuntimeErrors
        reason = _ADDRESS.sub("the file", f"{type(error).__name__}: {error}")
        raise UnreadableSampleError(f"{stored.name} is not a recording that can be read: {reason}") from error


def resample(samples: Tensor, rate: int, target: int) -> Tensor:  # (n,) float32 -> (m,) float32
    """Returns the samples for another rate. The spectrum is cut or padded, so frequencies that fit both rates do not change.

    NumPy computes it, because its results do not depend on threads and memory, so that every reading is bitwise identical.
    """
    if rate == target:
        return samples
    numpy = extras.load("numpy", purpose="Resampling audio")
    count = max(1, round(len(samples) * target / rate))
    spectrum = numpy.fft.rfft(samples.double().numpy())
    resampled = numpy.fft.irfft(spectrum[: count // 2 + 1], n=count) * (count / len(samples))
    return torch.from_numpy(resampled).float()


def crop(audio: Audio, seconds: float, generator: torch.Generator | None) -> Audio:
    """Returns a part of a long recording: a random part, or the middle without a generator. A short one is not changed."""
    longest = math.ceil(seconds * audio.rate)
    spare = len(audio.samples) - longest
    if spare <= 0:
        return audio
    start = spare // 2 if generator is None else int(torch.randint(spare + 1, (), generator=generator))
    return Audio(audio.samples[start : start + longest], audio.rate)


class AudioInputs:
    """Features of recordings, from the feature extractor of a transformers model such as CLAP.

    The feature extractor gets at most the number of samples that it can use. It would choose a part of a longer recording with
    NumPy's global generator, which replay cannot repeat.

    Args:
        extractor: the feature extractor, with the attributes `sampling_rate` and `nb_max_samples`.
    """

    def __init__(self, extractor: Any) -> None:
        self.extractor = extractor

    def prepare(self, audio: Audio, generator: torch.Generator | None) -> Tensor:  # (channels, frames, bins)
        """Returns the features of a recording. Training (with a generator) takes a random part of a long recording."""
        rate, longest = int(self.extractor.sampling_rate), int(self.extractor.nb_max_samples)
        part = crop(audio, longest / rate, generator)
        samples = resample(part.samples, part.rate, rate)[:longest]
        features: Tensor = self.extractor(samples.numpy(), sampling_rate=rate, return_tensors="pt")["input_features"][0]
        return features.float()

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Stacks the features of a chunk."""
        return {"input_features": torch.stack(samples)}

    def write(self, folder: Path) -> None:
        """Writes the files of the feature extractor."""
        self.extractor.save_pretrained(folder)
