"""Writes down what official code gives, for tests that run without it.

    python -m tests.identities.record            # all that have no recording
    python -m tests.identities.record lamb lars  # these, again

Run it in an environment that has the libraries; tests/peers/README.md makes one. A recording
has the steps in each dtype, a digest of the inputs, and the versions that made it.
"""

from __future__ import annotations

import platform
import sys

import torch

from tests.identities.identity import RECORDINGS, load


def main(names: list[str]) -> None:
    known = load()
    if wrong := [name for name in names if name not in known]:
        sys.exit(f"there is no identity {wrong}: there are {sorted(known)}")
    chosen = [known[n] for n in names] or [it for it in known.values() if not it.file.exists()]
    for identity in chosen:
        if identity.runs_here:
            print(f"{identity.name}: {identity.source} runs in every test, nothing to record")
            continue
        recording = {str(dtype): identity.official(dtype) for dtype in identity.rtol}
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        made_with = {"source": identity.source, **versions}
        RECORDINGS.mkdir(exist_ok=True)
        digest = identity.inputs.digest()
        torch.save({"made_with": made_with, "inputs": digest, **recording}, identity.file)
        print(f"{identity.name}: {identity.file.stat().st_size / 1024:.1f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
