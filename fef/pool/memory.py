"""What holds the pool's blocks: memory (memfd), or files in a folder, such as one on an NVMe disk.

The files have no name, or lose it as soon as they are made, so that nothing is left of them when a process is killed.
"""

import os

from fef.config import ConfigError

_FILE = "file:"


def segment_folder(memory: str) -> str:
    """The folder of config.pool.memory, "" for memfd.

    Raises:
      ConfigError: neither memfd nor file:FOLDER, or a folder that cannot hold files of this process.
    """
    if memory == "memfd":
        return ""
    folder = memory.removeprefix(_FILE)
    if not memory.startswith(_FILE) or not folder:
        raise ConfigError("pool.memory", memory, "must be memfd or file:FOLDER")
    if os.path.islink(folder):
        target = os.path.realpath(folder)
        raise ConfigError("pool.memory", memory, f"{folder} is a symbolic link; give the folder itself, {target}")
    if not os.path.isdir(folder):
        raise ConfigError("pool.memory", memory, f"there is no folder {folder}; make it on every host")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("pool.memory", memory, f"{folder} is not writable; give a folder that is")
    return folder
