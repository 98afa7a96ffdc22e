"""Draws what a long conversation computes: `PYTHONPATH=tests python docs/picture_of_turns.py` writes turns.png."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from support.agent_turns import KEEPS_THOUGHTS, SYSTEM_FIRST, turns

COUNT = 40


def main() -> None:
    plain = list(turns("messages", SYSTEM_FIRST, COUNT, thinks=False))
    thinking = list(turns("messages", KEEPS_THOUGHTS, COUNT))
    figure, axes = pyplot.subplots(figsize=(8, 3.2), dpi=110)
    numbers = range(1, COUNT + 1)
    axes.bar(numbers, [turn.prompt for turn in plain], color="#dbeafe", label="tokens of the prompt")
    axes.plot(numbers, [turn.computed for turn in plain], color="#ea580c", label="computed: no thoughts")
    label = "computed: thoughts that the template drops at a question"
    axes.plot(numbers, [turn.computed for turn in thinking], color="#475569", label=label)
    axes.set(xlabel="turn", ylabel="tokens", xlim=(0.4, COUNT + 0.6))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "pictures" / "turns.png")
    print(f"{sum(turn.prompt for turn in plain)} tokens of prompts, {sum(turn.computed for turn in plain)} computed")


if __name__ == "__main__":
    main()
