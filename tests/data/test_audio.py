"""Recordings in files, tables and shards: formats, rates, crops, and files that are no recordings."""

import importlib.util
import io
import json
import struct
import tarfile

import pytest
import torch

import recordings
from megabatch_train.data import load
from megabatch_train.data.dataset import Audio, UnreadableSampleError
from megabatch_train.data.media import audio
from megabatch_train.data.shards import Shards
from megabatch_train.data.tables import Table
from recordings import RATE, tone, wav


def decode(data):
    return audio.decode(audio.EncodedAudio(data, "a.wav"))


@pytest.mark.parametrize(("size", "step"), [(1, 2**-7), (2, 2**-15), (3, 2**-23), (4, 2**-31)])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_are_what_was_written(size, step, channels):
    samples = tone(440, 0.05, channels=2)
    samples = torch.cat([samples[:, :1], samples[:, 1:] / 4], 1)[:, :channels]
    found = decode(wav(samples, size=size))
    assert found.rate == RATE
    # A sample is rounded to half a step and scaled by 1 − step. The float32 result has a relative error of 2⁻²⁴.
    torch.testing.assert_close(found.samples.double(), samples.mean(1), rtol=0, atol=1.5 * step + 2**-24)


def test_frequencies_that_fit_both_rates_do_not_change():
    for rate, target in [(44100, 48000), (48000, 16000), (8000, 48000), (16001, 8000)]:
        # A whole number of periods, so that the periodic continuation of the samples is the tone itself.
        wave = tone(400, rate=rate, seconds=1.0)[:, 0].float()
        found = audio.resample(wave, rate, target)
        torch.testing.assert_close(found, tone(400, rate=target, seconds=1.0)[:, 0].float(), rtol=0, atol=1e-6)
    high = tone(9000, rate=48000, seconds=1.0)[:, 0].float()
    assert audio.resample(high, 48000, 16000).abs().max() < 1e-6, "a frequency above half of the new rate is removed"
    assert len(audio.resample(torch.zeros(1), 48000, 8000)) == 1


def test_a_crop_depends_on_the_generator_only():
    recording = Audio(torch.arange(100.0), 10)
    first, again = (audio.crop(recording, 2, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first.samples, again.samples)
    starts = {int(audio.crop(recording, 2, torch.Generator().manual_seed(seed)).samples[0]) for seed in range(400)}
    assert starts == set(range(81))
    assert audio.crop(recording, 2, None).samples[0] == 40
    assert audio.crop(recording, 10, None) is recording


def header(changes):
    """A WAV file with other values at some places of its header."""
    data = bytearray(wav(tone(440, 0.01)))
    for place, value in changes.items():
        data[place : place + len(value)] = value
    return bytes(data)


WRONG = {
    "empty": (b"", "a.wav is empty"),
    "half of a header": (wav(tone(440))[:20], "a.wav is (cut off|not a WAV file)"),
    "cut off": (wav(tone(440))[:-1001], "a.wav is cut off"),
    "no samples": (wav(torch.zeros(0, 1)), "a.wav has no samples"),
    "no recording": (b"no recording", "a.wav is not a recording that can be read"),
    "no channels": (header({22: b"\0\0"}), "a.wav is not a WAV file"),
    "a rate of zero": (header({24: struct.pack("<I", 0)}), "rate of at least 1"),
    "no format": (b"RIFF" + struct.pack("<I", 4) + b"WAVE", "a.wav is (cut off|not a WAV file)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_no_recordings(name):
    data, message = WRONG[name]
    with pytest.raises(UnreadableSampleError, match=message):
        decode(data)


def test_other_formats_need_soundfile():
    if importlib.util.find_spec("soundfile"):
        import soundfile

        for form, tolerance in (("FLAC", 2e-5), ("WAV", 1e-7)):
            file = io.BytesIO()
            soundfile.write(file, tone(440, channels=2).numpy(), RATE, format=form, subtype="FLOAT" if form == "WAV" else None)
            found = decode(file.getvalue())
            torch.testing.assert_close(found.samples, tone(440)[:, 0].float(), rtol=0, atol=tolerance)
        broken = tone(440).float().numpy().copy()
        broken[3] = float("nan")
        soundfile.write(file := io.BytesIO(), broken, RATE, format="WAV", subtype="FLOAT")
        with pytest.raises(UnreadableSampleError, match="finite samples"):
            decode(file.getvalue())
        with pytest.raises(UnreadableSampleError, match="not a recording that can be read"):
            decode(b"no recording")
    else:
        with pytest.raises(ModuleNotFoundError, match=r'Reading audio .* needs the package "soundfile".*megabatch\[audio\]'):
            decode(b"fLaC and so on")


def test_tables_and_shards_have_equal_recordings(tmp_path):
    table = recordings.write_tones(tmp_path / "tones", 6)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    with tarfile.open(tmp_path / "tones.tar", "w") as tar:
        for number, row in enumerate(rows):
            content = {"wav": (table.parent / row["audio"]).read_bytes(), "txt": row["caption"].encode()}
            for ending, data in content.items():
                info = tarfile.TarInfo(f"{number}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    datasets = [Table(table), Shards(str(tmp_path / "tones.tar"), cache_folder=tmp_path / "cache")]
    parquet = pytest.importorskip("pyarrow.parquet", reason='pip install "megabatch[train]"')
    import pyarrow

    stored = [{"bytes": (table.parent / row["audio"]).read_bytes(), "path": row["audio"]} for row in rows]
    columns = {"audio": stored, "caption": [row["caption"] for row in rows]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "tones.parquet")
    datasets.append(load.load(str(tmp_path / "tones.parquet")))
    for dataset in datasets:
        assert dataset.sides == ("audio", "text")
        assert len(dataset) == 6
        for index, row in enumerate(rows):
            expected = decode((table.parent / row["audio"]).read_bytes())
            found = dataset.read(index, 0)
            assert torch.equal(found.samples, expected.samples)
            assert found.rate == RATE
            assert dataset.read(index, 1) == row["caption"]


def test_shards_of_images_and_recordings(tmp_path):
    with tarfile.open(tmp_path / "both.tar", "w") as tar:
        for name in ("0.jpg", "0.txt", "1.wav", "1.txt"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="only images or only recordings, got both"):
        Shards(str(tmp_path / "both.tar"), cache_folder=tmp_path / "cache")
