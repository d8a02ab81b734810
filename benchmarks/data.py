"""How fast do text become tokens, sample numbers become sequences, and sequences become microbatches?

    python -m benchmarks.data [--json FILE] [--large 1GB]

The text is that of the Python standard library's own sources. Rates are the best of some repetitions, as another
program on the machine can only make them worse; the tokenizer library is timed on the same texts, in turns with triax.
``--large`` prepares a corpus of that size once more, as a command does: by all cores, with the memory of all processes
watched, next to the library alone.
"""

import argparse
import json
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from triax.data.batch import batches_of
from triax.data.corpus import corpus_of
from triax.data.files import find_files
from triax.data.order import SampleOrder
from triax.data.pieces import SourceFile
from triax.data.prepare import prepare
from triax.data.tokenizer import load_tokenizer
from triax.units import parse_bytes

REPETITIONS = 3
LOOK_UPS = 100


def best_s(*actions: Callable[[], object]) -> list[float]:
    """The least seconds that each of ``actions`` took; they take turns."""
    best = [float("inf")] * len(actions)
    for _ in range(REPETITIONS):
        for index, action in enumerate(actions):
            start = time.perf_counter()
            action()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def library_sources() -> tuple[SourceFile, ...]:
    """The sources of the standard library; its tests are left out, as some are in other encodings on purpose."""
    files = find_files([sysconfig.get_paths()["stdlib"]], extensions=[".py"])
    return tuple(file for file in files if not {"site-packages", "test", "tests"} & set(file.path.parts))


def train_bpe(files: tuple[SourceFile, ...], folder: Path) -> Path:
    """Train a byte-level BPE of 16,384 tokens on ``files`` and return its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=16_384, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train([str(file.path) for file in files], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def preparing(folder: Path) -> dict[str, float]:
    """Bytes of text per second, from files to a published store, beside the tokenizer library alone."""
    files = library_sources()
    num_bytes = sum(file.path.stat().st_size for file in files)
    texts = [file.path.read_text(encoding="utf-8") for file in files]
    bpe = train_bpe(files, folder)
    library = Tokenizer.from_file(str(bpe))

    def prepared(said: str) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            prepare(files, load_tokenizer(said), Path(cache))

    by_bytes, by_bpe, alone = best_s(
        lambda: prepared("bytes"),
        lambda: prepared(str(bpe)),
        lambda: library.encode_batch_fast(texts, add_special_tokens=False),
    )
    return {
        "text_bytes": num_bytes,
        "prepare_bytes_bytes_per_s": num_bytes / by_bytes,
        "prepare_bpe_bytes_per_s": num_bytes / by_bpe,
        "library_bpe_bytes_per_s": num_bytes / alone,
    }


def seeking() -> dict[str, float]:
    """Seconds to look up the 64 samples of a microbatch in a corpus of 10^12 sequences, near and far."""
    order = SampleOrder(num_sequences=10**12, eval_sequences=1000, seed=0)

    def look_up(first: int) -> None:
        for _ in range(LOOK_UPS):
            order.train(np.arange(first, first + 64))

    near, far, farther = best_s(lambda: look_up(0), lambda: look_up(10**9), lambda: look_up(10**15))
    return {"seek_0_s": near / LOOK_UPS, "seek_1e9_s": far / LOOK_UPS, "seek_1e15_s": farther / LOOK_UPS}


def batching(folder: Path) -> dict[str, float]:
    """Tokens per second of microbatches of 8 x 1,024, at shuffled places of a store."""
    store = prepare(library_sources(), load_tokenizer("bytes"), folder / "cache")

    def read(attend_across_documents: bool) -> None:
        batches = batches_of(
            corpus_of(store), seq_len=1024, attend_across_documents=attend_across_documents, eval_sequences=16, seed=0
        )
        for step in range(LOOK_UPS):
            batches.microbatch(8 * step, 0, 0, 1, 8, 1)

    across, within = best_s(lambda: read(True), lambda: read(False))
    tokens = LOOK_UPS * 8 * 1024
    return {
        "batch_across_documents_tokens_per_s": tokens / across,
        "batch_within_documents_tokens_per_s": tokens / within,
    }


_PREPARE = """
import sys
from pathlib import Path
from triax.data.files import find_files
from triax.data.prepare import prepare
from triax.data.tokenizer import load_tokenizer
if __name__ == "__main__":
    prepare(find_files([sys.argv[1]]), load_tokenizer(sys.argv[2]), Path(sys.argv[3]))
"""


def large(folder: Path, num_bytes: int) -> dict[str, float]:
    """Rate, memory and cores of preparing ``num_bytes`` of JSONL, and the library's rate on its first texts."""
    bpe = train_bpe(library_sources(), folder)
    texts = [file.path.read_text(encoding="utf-8") for file in library_sources()]
    rows, written = folder / "large.jsonl", 0
    with rows.open("w", encoding="utf-8") as out:
        for number in count():
            written += out.write(json.dumps({"id": number, "text": texts[number % len(texts)]}) + "\n")
            if written >= num_bytes:
                break
    library = Tokenizer.from_file(str(bpe))
    batches = [texts[first : first + 64] for first in range(0, len(texts), 64)]
    alone_s, before = best_s(lambda: [library.encode_batch_fast(batch) for batch in batches])[0], usage_s()
    started = time.perf_counter()
    words = [sys.executable, "-c", _PREPARE, str(rows), str(bpe), str(folder / "large")]
    peak_bytes = 0
    with subprocess.Popen(words) as process:
        while process.poll() is None:
            peak_bytes = max(peak_bytes, resident_bytes(process.pid))
            time.sleep(0.05)
    wall_s = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(process.returncode)
    return {
        "large_text_bytes": written,
        "large_prepare_bytes_per_s": written / wall_s,
        "large_library_bytes_per_s": sum(len(text.encode()) for text in texts) / alone_s,
        "large_peak_resident_bytes": peak_bytes,
        "large_cores_busy": (usage_s() - before) / wall_s,
    }


def usage_s() -> float:
    """Seconds that all cores together worked for processes which this one started and which ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def resident_bytes(pid: int) -> int:
    """Memory of a process and all that it started; pages that several have mapped count for each."""
    total = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) << 10
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            total += resident_bytes(int(child))
    return total


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--large", type=parse_bytes, metavar="SIZE", help="prepare so much text once, and nothing else")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.large is not None:
            measured = large(Path(folder), arguments.large)
        else:
            measured = preparing(Path(folder)) | seeking() | batching(Path(folder))
    for name, value in measured.items():
        print(f"{name:42} {value:.4g}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"format_version": 1} | measured, indent=1))


if __name__ == "__main__":
    main()
