"""What would move in published models, tokens or experts: closed forms, beside the bytes that fef has counted.

Command:  python -m experiments.traffic
Hardware: none; nothing is run. The last two tables take the rows of results/crossover.jsonl.

Of a layer and pass, a receiver that has T rows of an expert moves 2 T D b bytes as tokens (there and back), or the P
parameters of the expert, P b bytes, as weights. So T* = P / (2 D) rows are the break-even, F for an FFN of two matrices
and 1.5 F for SwiGLU, whatever b is. With 8,192 tokens a rank and balanced routing each expert has T = 8192 K / E rows
of a rank. Where the ranks of a machine share what they read, the machine is the receiver and has 8 times as many.

In a training step both ways double, tokens for the rows of the backward pass and weights for the gradients, unless
weights are fetched again in the backward pass or gradients have more bytes (then T* is 1.5 times as large).

Sources of shapes: the models' config.json and papers, by name; J. Liu et al., "Janus", 2023 (experts move or tokens
do); "LUFFY", 2024, table III (its figures are quoted, from 16 V100 over PCIe, experts = GPUs).
"""

import dataclasses
from typing import Any

from experiments import bounds, rows_file
from experiments.flags import ROOT, parse_flags, run
from experiments.sheet import Head, Line, Sheet, number, word
from fef.ffn import FFNS

TOKENS_PER_RANK = 8192
RANKS_PER_MACHINE = 8
ELEMENT_BYTES = 2  # bfloat16
ROWS = ROOT / "results/crossover.jsonl"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A published model's MoE layer: D, F, E, K, and its kind of FFN."""

    name: str
    d_model: int
    d_expert: int
    experts: int
    choices: int
    ffn: str = "swiglu"
    tokens: int = TOKENS_PER_RANK
    ranks: int = RANKS_PER_MACHINE

    @property
    def params(self) -> int:
        """P, parameters of one expert's matrices."""
        return FFNS.get(self.ffn).num_matmul_elems(self.d_model, self.d_expert)

    @property
    def break_even(self) -> float:
        """T*, rows of one expert at one receiver from which on its weights are the fewer bytes."""
        return self.params / (2 * self.d_model)

    @property
    def rows(self) -> float:
        """T, rows of a rank for each expert under balanced routing."""
        return self.tokens * self.choices / self.experts


SHAPES = (
    Shape("DeepSeek-V3", 7168, 2048, 256, 8),
    Shape("Mixtral 8x7B", 4096, 14336, 8, 2),
    Shape("gpt-oss-120b", 2880, 2880, 128, 4),
    Shape("Qwen3-235B-A22B", 4096, 1536, 128, 8),
    Shape("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Shape("GPT-MoE-S (Hecate)", 768, 1536, 64, 2, "gelu"),
    Shape("MoE-TransformerXL (LUFFY)", 1024, 4096, 16, 2, "gelu", tokens=64 * 250, ranks=4),
    Shape("MoE-BERT-Large (LUFFY)", 768, 3072, 16, 2, "gelu", tokens=64 * 512, ranks=4),
    Shape("MoE-GPT2 (LUFFY)", 768, 3072, 16, 2, "gelu", tokens=64 * 1024, ranks=4),
)

# LUFFY, table III: computation and communication, ms an iteration, with as many experts as GPUs.
LUFFY_GPUS = (2, 4, 8, 16)
LUFFY = {
    "MoE-TransformerXL": {
        "all-to-all": ((2169, 843), (2102, 1522), (1923, 2548), (1533, 4599)),
        "experts move": ((2403, 209), (2714, 370), (3054, 625), (3699, 1233)),
        "hybrid": ((2265, 197), (2387, 357), (2629, 539), (3204, 1068)),
    },
    "MoE-BERT-Large": {
        "all-to-all": ((973, 899), (953, 2122), (918, 3072), (756, 4284)),
        "experts move": ((1258, 314), (1989, 561), (2011, 1181), (2112, 1728)),
        "hybrid": ((1123, 281), (1794, 506), (1843, 1083), (1914, 1386)),
    },
    "MoE-GPT2": {
        "all-to-all": ((955, 881), (847, 1573), (774, 2592), (676, 3834)),
        "experts move": ((1399, 209), (1706, 374), (2048, 544), (2402, 718)),
        "hybrid": ((1278, 174), (1509, 331), (1741, 435), (2095, 557)),
    },
}


def main(argv: list[str]) -> None:
    parse_flags(argv, lambda values: None, doc=__doc__ or "")
    rows = rows_file.parse(ROWS, ROWS.read_bytes()) if ROWS.exists() else []
    print("\n\n".join(f"## {sheet.title}\n\n{sheet.markdown()}" for sheet in sheets(rows)))


def sheets(rows: list[dict[str, Any]]) -> list[Sheet]:
    """All tables; those of measured rows only where there are some."""
    return [published(), luffy()] + ([measured_bytes(rows), measured_times(rows)] if rows else [])


def published() -> Sheet:
    """The break-even of published shapes, and on which side of it they are."""
    heads = [Head("model")] + [Head(text, is_number=True) for text in ("D", "F", "E", "K", "MB an expert", "T*")]
    heads += [Head(text, is_number=True) for text in ("T of a rank", "T / T*", "T of a machine", "T / T* ")]
    lines = []
    for shape in SHAPES:
        of_rank, of_machine = shape.rows, shape.rows * shape.ranks
        numbers = [number(value) for value in (shape.d_model, shape.d_expert, shape.experts, shape.choices)]
        numbers += [number(shape.params * ELEMENT_BYTES / 1e6, "{:,.1f}"), number(shape.break_even)]
        for rows in (of_rank, of_machine):
            numbers += [number(rows), number(rows / shape.break_even, "{:,.2f}")]
        lines.append(Line([word(shape.name), *numbers], []))
    note = (
        f"Balanced routing, {TOKENS_PER_RANK:,} tokens a rank and {RANKS_PER_MACHINE} ranks a machine (LUFFY's: 64 "
        "sequences a GPU and 4 GPUs a machine), bfloat16. T / T* above 1: moving weights is fewer bytes. On average "
        "most models say tokens; weights win where machines share what they read, and for experts with more rows than "
        "the average."
    )
    return Sheet("Published models, by closed form", heads, lines, [note])


def luffy() -> Sheet:
    """What moving experts did to computation and communication elsewhere."""
    heads = [Head("model"), Head("method")]
    for gpus in LUFFY_GPUS:
        heads += [Head(f"E={gpus}: comp. / comm. ms"), Head(f"share of comm., E={gpus}", is_number=True)]
        heads += [Head(f"speed-up, E={gpus}", is_number=True)]
    lines = []
    for model, methods in LUFFY.items():
        for method, entries in methods.items():
            cells = [word(model), word(method)]
            for (compute, communication), base in zip(entries, methods["all-to-all"], strict=True):
                total = compute + communication
                cells += [word(f"{compute:,} / {communication:,}"), number(communication / total, "{:.0%}")]
                cells += [number(sum(base) / total, "{:.2f}")]
            lines.append(Line(cells, []))
    note = (
        "Quoted, not measured here. Moving experts cut communication by 3.8 on average and made computation 1.8 times "
        "as long: what is pulled to one GPU runs there in many small matmuls."
    )
    return Sheet("Computation and communication, LUFFY table III", heads, lines, [note])


def measured_bytes(rows: list[dict[str, Any]]) -> Sheet:
    """The closed form beside what the ledger counted, all members of a step together."""
    heads = [Head("T", is_number=True), Head("dispatcher", is_code=True)]
    heads += [Head(text, is_number=True) for text in ("closed form, MB", "counted, MB", "counted / closed form")]
    lines = []
    for row in rows:
        moved = row["bytes_by_purpose"]
        if row["dispatcher"] not in ("pooled", "fluid:mode=tokens"):
            continue
        expected = step_bytes(row, as_tokens=row["dispatcher"] != "pooled")
        counted = sum(count for purpose, count in moved.items() if purpose != "metadata")
        cells = [number(row["tokens"]), word(row["dispatcher"], is_code=True)]
        cells += [number(expected / 1e6, "{:,.1f}"), number(counted / 1e6, "{:,.1f}")]
        lines.append(Line([*cells, number(counted / expected, "{:.2f}")], [row]))
    first = rows[0]["flags"]
    note = (
        f"{first['members']} hosts, {first['layers']} layers, E={first['experts']}, K={first['choices']}, "
        f"D={first['d_model']}, F={first['d_expert']}, float32, training step. The closed form has a row for each "
        "choice of another host's expert; fef sends a token's row to a host once, however many of its experts live "
        "there."
    )
    return Sheet("Bytes of a step in the lab", heads, lines, [note])


def step_bytes(row: dict[str, Any], as_tokens: bool) -> float:
    """What a training step of all members would move by the closed form, bytes, for a row of experiments.bench_stack.

    Args:
      row: its shapes; as many members as hosts, experts shared out evenly, balanced routing.
      as_tokens: rows there and back in both passes, or blocks there and their gradients back.
    """
    setting = row["flags"]
    members, experts = setting["members"], setting["experts"]
    remote = (members - 1) / members
    if as_tokens:
        rows = members * row["tokens"] * setting["choices"] * remote
        return setting["layers"] * 4 * rows * setting["d_model"] * bounds.ELEMENT_BYTES
    elems = FFNS.get("swiglu").num_elems(setting["d_model"], setting["d_expert"])
    return setting["layers"] * 2 * members * experts * remote * elems * bounds.ELEMENT_BYTES


def measured_times(rows: list[dict[str, Any]]) -> Sheet:
    """Computation and what of communication a step waits for, in the lab: LUFFY's split in kind."""
    heads = [Head("T", is_number=True), Head("dispatcher", is_code=True)]
    heads += [Head(text, is_number=True) for text in ("compute ms", "the rest ms", "share of the rest", "speed-up")]
    lines = []
    slow = {row["tokens"]: row["step_ms"] for row in rows if row["dispatcher"] == "fluid:mode=tokens"}
    for row in rows:
        compute, step = bounds.compute_ms(row), row["step_ms"]
        cells = [number(row["tokens"]), word(row["dispatcher"], is_code=True), number(compute), number(step - compute)]
        cells += [number(1 - compute / step, "{:.0%}"), number(slow[row["tokens"]] / step, "{:.2f}")]
        lines.append(Line(cells, [row]))
    note = (
        "Modelled device time on a 100 Mbit/s link. The speed-up is against exact token rows, which at T=512 beat both "
        "forms of all_to_all. In this model a row takes as long among few as among many, so the price of small matmuls "
        "that LUFFY's table shows is not in these figures."
    )
    return Sheet("Computation and waiting in the lab", heads, lines, [note])


if __name__ == "__main__":
    run(main)
