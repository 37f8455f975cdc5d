"""Race chains against each other: small language models on the same text, some of it corrupted.

    make demo                    # in an environment that make creates
    python examples/demo.py      # in your own environment with torchzero_clip
    python examples/demo.py --steps 300 --chains "ClipNorm(0.1, dim='global'), Lion(), LR(1e-3)"

Every chain trains its own transformer, which predicts the next letter of a harbor's log. All
transformers start from the same weights, use the same batches, and have a learning rate that is too
high. One batch in thirty is corrupted: its letters are noise, and its loss is multiplied by a
factor between 10 and 1000.

At the end, the script prints a table, and writes a picture, race.png, and a report, race.html. The
folder race/ contains its parts: data, model, chains, training, console, picture and report.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch
from race.chains import EXAMPLE, read_chains, spell
from race.console import Progress, table
from race.data import CLEAN, CORRUPTED
from race.report import save
from race.training import Result, race

from torchzero_clip import Chain


def main(given: list[str] | None = None) -> list[Result]:
    given = sys.argv[1:] if given is None else given
    options, chains, device = arguments(given)
    torch.set_num_threads(1)  # models as small as these gain nothing from more
    print(introduction(chains), flush=True)
    results = race(chains, options.steps, options.seed, device, Progress(options.steps))
    print(f"\n{table(results)}\n")
    command = shlex.join(["python", "examples/demo.py", *given])
    for line in save(results, options.out, command, options.seed, device):
        print(line)
    return results


def introduction(chains: dict[str, Chain]) -> str:
    lines = [
        f"{CORRUPTED:.1%} of the batches after step {CLEAN} are corrupted: "
        "their letters are random, and their loss is 10 to 1000 times too large."
    ]
    width = max(map(len, chains))
    lines += [f"  {name:{width}}   {spell(chain)}" for name, chain in chains.items()]
    return "\n".join(lines) + "\n"


def arguments(given: list[str]) -> tuple[argparse.Namespace, dict[str, Chain], torch.device]:
    """Return the options, or exit with an error message if an option cannot be used."""
    parser = argparse.ArgumentParser(
        prog="demo.py", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=1000, help="steps of each chain (1000)")
    parser.add_argument(
        "--chains",
        nargs="+",
        metavar="CHAIN",
        help=f'your own chains instead of the six: "{EXAMPLE}", with or without a name before it, '
        'such as "gentle = …"; or the JSON of Chain.to_config(), or a .json file with it',
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (0)")
    parser.add_argument("--device", default="cpu", help="where to train: cpu, cuda, mps (cpu)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/demo"),
        metavar="FOLDER",
        help="the folder for race.png and race.html (build/demo)",
    )
    options = parser.parse_args(given)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    try:
        chains = read_chains(options.chains)
    except ValueError as error:
        parser.error(f"--chains: {error}")
    try:
        device = torch.device(options.device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        parser.error(f"--device: {options.device!r} cannot be used here: {reason}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: cannot make the folder {options.out}: {error.strerror}")
    return options, chains, device


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # bars are shown as well as the terminal can
    main()
