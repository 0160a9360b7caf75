"""Closed forms of what moves, on numbers worked by hand."""

import pytest

from experiments import traffic
from experiments.traffic import Shape


def column(sheet, text):
    """{first cell: cell of the first column of that name}"""
    place = [head.text for head in sheet.heads].index(text)
    return {line.cells[0].value: line.cells[place].value for line in sheet.lines}


def test_break_even_by_hand():
    """SwiGLU with D=4, F=6: 72 parameters against rows of 4, there and back: 9 rows, 1.5 F. Two matrices: F."""
    assert Shape("any", 4, 6, 8, 2).break_even == 9
    assert Shape("any", 4, 6, 8, 2, "gelu").break_even == 6
    assert Shape("any", 4, 6, 8, 2, tokens=100).rows == 25


def test_published_shapes():
    sheet = traffic.published()
    assert column(sheet, "T*")["DeepSeek-V3"] == 1.5 * 2048
    assert column(sheet, "MB an expert")["Mixtral 8x7B"] == pytest.approx(352.32, abs=0.01)  # 3 * 4096 * 14336 * 2
    ratio = column(sheet, "T / T* ")
    assert ratio["Qwen3-30B-A3B"] == pytest.approx(4096 / 1152)
    assert sum(value > 1 for value in ratio.values()) == 6  # and the three largest say tokens, machines or not
    assert sum(value > 1 for value in column(sheet, "T / T*").values()) == 2


def test_quoted_figures_add_up():
    """Communication is cut by 3.84 and 4.45 on average, and computation in sum grows by 1.81 and 1.62: as the paper
    says, so no digit is mistyped."""
    for method, cut, growth in (("experts move", 3.84, 1.81), ("hybrid", 4.45, 1.62)):
        pairs = [
            pair
            for methods in traffic.LUFFY.values()
            for pair in zip(methods[method], methods["all-to-all"], strict=True)
        ]
        assert sum(base[1] / own[1] for own, base in pairs) / 12 == pytest.approx(cut, abs=0.1)
        assert sum(own[0] for own, _ in pairs) / sum(base[0] for _, base in pairs) == pytest.approx(growth, abs=0.03)
    assert column(traffic.luffy(), "speed-up, E=16")["MoE-GPT2"] == pytest.approx(4510 / 2652)


def test_a_step_in_the_lab_by_hand():
    """2 members, 4 experts of 3 * 2 * 5 floats, one layer: each reads 2 blocks of 120 bytes and sends 2 gradients. As
    tokens: half of 2 * 10 * 2 rows of 8 bytes are for the other, four times."""
    setting = {"members": 2, "experts": 4, "choices": 2, "layers": 1, "d_model": 2, "d_expert": 5}
    row = {"tokens": 10, "flags": setting}
    assert traffic.step_bytes(row, as_tokens=False) == 2 * 2 * 2 * 120
    assert traffic.step_bytes(row, as_tokens=True) == 4 * 20 * 8


def test_the_ledger_counts_what_the_closed_form_says(capsys):
    """In the published rows weights agree, and tokens are fewer since each row goes to a host once."""
    traffic.main(["traffic"])
    out = capsys.readouterr().out
    weights = [line for line in out.splitlines() if "| `pooled` | 100.6 |" in line]
    assert len(weights) == 5 and all(line.endswith("| 1.00 |") for line in weights)
    assert all(f"## {title}" in out for title in ("Published models", "Bytes of a step", "Computation and waiting"))
