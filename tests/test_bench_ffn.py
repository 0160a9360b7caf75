"""The benchmark runs, prints its table and writes its rows; a wrong flag is one line."""

import json
import subprocess
import sys

from fef.native import build


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.bench_ffn", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_rows_and_table(tmp_path):
    build.build()
    file = tmp_path / "rows.json"
    done = run("--shapes=8x16x4", "--routings=skewed", "--implementations=native", "--repeats=2", f"--json={file}")
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [(row["passes"], row["implementation"]) for row in rows] == [
        ("forward", "dense"),
        ("forward", "native"),
        ("forward+backward", "dense"),
        ("forward+backward", "native"),
    ]
    assert all(row["ratio"] == 1.0 for row in rows if row["implementation"] == "dense")
    assert all(row["wall_ms"] > 0 and row["repeats"] == 2 and row["max_load"] > 1.5 for row in rows)
    table = done.stdout.splitlines()
    assert len(table) == 4 and len({line.count("|") for line in table}) == 1
    assert table[3].startswith("| 8 | 16 | 4 | skewed |") and "| native |" in table[3]


def test_wrong_flag_is_one_line():
    done = run("--shapes=8x16")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--shapes=8x16: write DxFxE as in 256x512x8" in done.stderr
