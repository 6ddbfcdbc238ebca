"""Draw a step's time against the speed of the link, from what benchmarks/auto.py has measured:

python benchmarks/speed.py
"""

from __future__ import annotations

from typing import Any

from measure import ALONE, FP16, FP32, Spread, picture, read

WIDTH = 4096
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "unlimited": "one machine,\nno limit"}
NAMES = {
    FP32: "Horovod float32",
    FP16: "Horovod fp16",
    "one-bit": "OneBit()",
    "adaptive(64)": "Adaptive(pi=64)",
    ALONE: "no communication",
}


# the strongest rival that was measured, on one link, in a run of its own
RIVAL, RIVAL_NAME, RIVAL_RATE = "PowerSGD hook, rank 1", "DDP's PowerSGD hook,\nrank 1 (another run)", "1gbit"


def section(result: dict[str, Any], rivals: dict[str, Any] | None = None) -> str:
    """Return the Markdown of the picture, and save it; an empty text if no such network was measured.

    Args:
        result: of benchmarks/auto.py.
        rivals: of benchmarks/rivals.py, if it was run.
    """
    cells = {cell["rate"]: cell for cell in result["cells"] if cell["hosts"] == 2 and cell["width"] == WIDTH}
    cells = {rate: cells[rate] for rate in RATES if rate in cells}
    if not cells:
        return ""
    least = min(len(cell["rows"][FP32]["seconds"]) for cell in cells.values())
    parameters = next(iter(cells.values()))["parameters"] / 1e6
    said = (
        f"One training step of 784-{WIDTH}-{WIDTH}-{WIDTH}-10 ({parameters:.1f} million parameters) on 2 hosts with "
        "one rank each, real Horovod over Open MPI and TCP, on virtual links of one machine with "
        f"{result['machine']['cores']} cores. Medians of {least} rounds or more in which all took turns; bands are the "
        "quartiles. Above the band of "
        "another line a difference is more than chance."
    )
    rival = _rival(rivals) if rivals else None
    if rival is not None:
        said += (
            " The cross is the strongest rival that was measured, DDP's PowerSGD hook of rank 1, on one link and in "
            "another run (all its rounds): [against the hooks of DDP](#against-the-hooks-of-ddp)."
        )
    return f"{said}\n\n{_plot(cells, rival)}"


def _rival(rivals: dict[str, Any]) -> Spread | None:
    """Return the seconds of the rival's step on the same network and number of hosts."""
    seconds = [
        second
        for run in rivals["runs"]
        if (run["hosts"], run["rate"]) == (2, RIVAL_RATE)
        for cell in run["cells"]
        if (cell["network"], cell["width"]) == ("mlp", WIDTH)
        for rows in cell["sets"]
        for second in rows[RIVAL]["seconds"]
    ]
    return Spread.of(seconds) if seconds else None


def _plot(cells: dict[str, Any], rival: Spread | None) -> str:
    import matplotlib.pyplot as plt
    from drawing import label_ends, line, thin

    figure, panel = plt.subplots(figsize=(6.8, 4.3))
    x = list(range(len(cells)))
    for name, label in NAMES.items():
        spreads = [Spread.of(cell["rows"][name]["seconds"]) for cell in cells.values()]
        line(panel, x, spreads, name, label=label, linewidth=2 if "(" in label else 1.4)
    if rival is not None and RIVAL_RATE in cells:
        at, colour = list(cells).index(RIVAL_RATE), "tab:purple"
        panel.vlines(at, rival.low, rival.high, color=colour, linewidth=1)
        panel.plot(at, rival.median, "X", color=colour, markersize=7, label="_")
        where = (at - 0.08, 1.35 * rival.median)
        panel.annotate(RIVAL_NAME, where, color=colour, fontsize=7.5, ha="right", va="center")
    panel.set_yscale("log")
    ticks = [0.1, 0.3, 1, 3, 10]
    panel.set_yticks(ticks, [f"{tick:g} s" for tick in ticks])
    panel.minorticks_off()
    panel.set_xticks(x, [RATES[rate] for rate in cells])
    panel.set_title("One training step, by the speed of the link between 2 hosts", loc="left", fontsize=11)
    thin(panel)
    figure.subplots_adjust(left=0.08, right=0.75, top=0.92, bottom=0.13)
    label_ends(panel)
    return picture(figure, "steps")


def main() -> None:
    result = read("auto")
    if result is None:
        raise SystemExit("nothing is measured: python benchmarks/auto.py")
    print(section(result, read("rivals")))


if __name__ == "__main__":
    main()
