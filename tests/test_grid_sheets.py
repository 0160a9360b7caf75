"""grid_sheets: rows made by hand give the lines worked out by hand."""

from result_rows import grid_row

from experiments import grid_sheets, grid_tables

MOVED = {"weights": 100, "gradients": 100, "tokens": 50, "metadata": 7, "missed": 100}
BY_BYTES = {"dispatcher": grid_sheets.BY_BYTES, "step_ms": 500.0, "bytes_by_purpose": MOVED, "least_bytes": 250}


def grid():
    rows = [grid_row("pooled", 200.0), grid_row("fluid", 210.0), grid_row(**BY_BYTES)]
    rows += [grid_row("pooled", 400.0, 1024), grid_row("fluid", 300.0, 1024)]
    return [*rows, grid_row(**BY_BYTES | {"least_bytes": 251}, tokens=1024)]


def test_the_caption_has_each_device_with_its_tokens():
    rows = grid()
    assert "modelled device time of 2 us a token and layer" in grid_sheets.caption(rows)
    others = [grid_row("fluid", 1.0, tokens=tokens) for tokens in (2048, 8192)]
    others = [row | {"cell": row["cell"] | {"us_per_token": 1.5}} for row in others]
    assert "of 2 us (T = 512 and 1,024), 1.5 us (T = 2,048 and 8,192) a token" in grid_sheets.caption(rows + others)


def test_the_table_says_where_fluid_loses():
    lines = grid_tables.markdown(grid(), ("summary",)).splitlines()
    assert lines[0].startswith("4 hosts with one member each, L=2, E=8, K=2,") and "commit c0ffee" in lines[0]
    assert lines[2:4] == [
        "| network | relay | Mbit/s | routing | T | floor | overlapped | `pooled` | `fluid` | `fluid:cost=bytes` "
        "| ratio | spread | least |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    same = "| leaves=1 | auto | 100 | balanced |"
    assert lines[4] == f"{same} 512 | 90 | 503 | **200** | 210 | 500 | 1.05 | 1.50 | yes |"
    assert lines[5] == f"{same} 1,024 | 90 | 1,007 | 400 | **300** | 500 | 0.75 | 1.50 | **no** |"
    assert "median 0.90, worst 1.05, at most 1.05 in 2 of 2 cells" in lines[7]


def test_a_grid_shows_the_tables_that_it_names():
    rows, names = grid(), ("every_row", "summary")
    assert [sheet.title for sheet in grid_tables.tables(rows, names)] == ["Every row", "Step time"]
    text = grid_tables.markdown(rows, names)
    first, second = grid_sheets.every_row(rows).markdown(), grid_sheets.summary(rows).markdown()
    assert text == f"{grid_sheets.caption(rows)}\n\n{first}\n\nStep time:\n\n{second}"


def test_numbers_of_hosts_have_a_column_where_they_differ():
    setting = grid_row("fluid", 1.0)["flags"]
    rows = [grid_row("fluid", 100.0), grid_row("fluid", 200.0, hosts=8, flags=setting | {"members": 8})]
    rows = [row | {"cell": row["cell"] | {"hosts": row["hosts"]}} for row in rows]
    assert grid_sheets.caption(rows).startswith("4 and 8 hosts with one member each, L=2")
    for sheet in (grid_sheets.summary(rows), grid_sheets.every_row(rows)):
        assert sheet.heads[0].text == "hosts" and [line.cells[0].value for line in sheet.lines] == [4, 8]


def test_the_caption_of_one_process_and_of_computing_cpus():
    cell = grid_row("fluid", 1.0)["cell"]
    row = grid_row("fluid", 1.0, hosts=1, cell=cell | {"network": "none", "us_per_token": "real"})
    assert grid_sheets.caption([row]).startswith("4 members in one process, L=2, E=8, K=2, computed by the CPU;")


def test_dispatchers_measured_alone_share_a_line():
    rows = [grid_row(name, ms) for name, ms in (("pooled", 200.0), ("fluid", 210.0))]
    rows = [row | {"cell": row["cell"] | {"dispatcher": row["dispatcher"]}} for row in rows]
    (line,) = grid_sheets.summary(rows).lines
    assert [cell.text for cell in line.cells][7:9] == ["200", "210"]


def test_every_row_stands_beside_what_it_is_held_against():
    lines = grid_sheets.every_row(grid()).markdown().splitlines()
    assert lines[0].endswith("| dispatcher | step ms | utilisation | floor ms | step / floor | overlapped ms "
                             "| wait ms | MB | straggler | dropped |")  # fmt: skip
    start = "| leaves=1 | auto | 100 | balanced | 512 | `pooled` | 200 | 45.0% | 90 | 2.22 | 503 | – | 1.0 "
    assert lines[2].startswith(start) and lines[2].endswith("| 1.0 | 1.00 | 0.0% |")


def test_the_fewest_bytes_of_a_cell_are_the_floor_of_all_its_rows():
    rows = [grid_row("pooled", 200.0, bytes=2_000_000), grid_row("fluid", 210.0, bytes=1_500_000)]
    assert [line.cells[8].text for line in grid_sheets.every_row(rows).lines] == ["120", "120"]  # 12 Mbit by 100 Mbit/s


def test_what_a_row_lacks_is_a_dash():
    bare = {key: value for key, value in grid_row("fluid", 210.0).items() if key not in ("steps_ms", "when", "machine")}
    bare["cell"] = {key: value for key, value in bare["cell"].items() if key != "relay"}
    (line,) = grid_sheets.summary([bare]).lines
    assert [cell.text for cell in line.cells] == [
        "leaves=1", "–", "100", "balanced", "512", "90", "503", "210", "–", "–", "–"
    ]  # fmt: skip
    assert grid_sheets.every_row([bare | {"wait_ms": 12.0}]).lines[0].cells[11].text == "12"


def test_csv_has_unrounded_values_and_where_they_come_from():
    first, second, *_ = grid_sheets.every_row([grid_row("fluid", 210.123, xla_flags="--a --b")]).csv().splitlines()
    assert first.endswith(",MB,straggler,dropped,command,commit,code,versions,when,machine")
    assert second.startswith("leaves=1,auto,100,balanced,512,fluid,210.123,")
    assert second.endswith(
        "XLA_FLAGS='--a --b' python -m experiments.launch --T=512,c0ffee,0123456789abcdef,jax==1,"
        "2026-01-02T03:04:05+00:00,an abacus"
    )
