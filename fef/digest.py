"""A folder of files that says itself whether it is complete and undamaged.

`seal` writes SHA256SUMS, the digests of all files, in the format of the program sha256sum, so that
`sha256sum -c SHA256SUMS` checks a folder without fef. Storage formats do not see a flipped bit: they decode it into
another number.
"""

import hashlib
import pathlib

SUMS = "SHA256SUMS"


class DamageError(Exception):
    """A sealed folder that is not what it was when it was sealed. The message names the file."""


def seal(folder: pathlib.Path) -> None:
    """Writes the digest of every file below `folder`. Nothing that is sealed may change afterwards."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{_digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    # The count makes a list that lost its last lines visible; sha256sum skips comments.
    (folder / SUMS).write_text(f"# {len(lines)} files\n" + "".join(lines))


def is_sealed(folder: pathlib.Path) -> bool:
    return (folder / SUMS).is_file()


def unseal(folder: pathlib.Path) -> None:
    """Makes the folder incomplete, so that a deletion that is interrupted leaves nothing that looks complete."""
    (folder / SUMS).unlink()


def verify(folder: pathlib.Path) -> None:
    """Reads every sealed file.

    Raises:
      DamageError: a file is missing or differs from what was sealed.
    """
    try:
        head, *lines = (folder / SUMS).read_text().splitlines()
        digest_of = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        raise DamageError(f"{folder / SUMS} cannot be read") from None
    if head != f"# {len(digest_of)} files":
        raise DamageError(f"{folder / SUMS} is not complete")
    for name, digest in digest_of.items():
        path = folder / name
        if not path.is_file():
            raise DamageError(f"{path} is missing")
        if _digest(path) != digest:
            raise DamageError(f"{path} differs from what was saved (SHA-256)")


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
