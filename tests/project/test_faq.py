"""The messages that docs/faq.md quotes in its headings are the messages that the library raises."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchzero_clip import LR, Adam, ClipNorm, Modular

PAGE = Path(__file__).parents[2] / "docs" / "faq.md"


def params() -> list[Any]:
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]


def no_lr() -> None:
    Modular(params(), Adam())


def misspelled_key() -> None:
    Modular([{"params": params(), "max_nrom": 1.0}], ClipNorm(1.0), LR(0.1))


def fixed_argument() -> None:
    Modular([{"params": params(), "dim": "global"}], ClipNorm(1.0), LR(0.1))


def other_chain() -> None:
    saved = Modular(params(), ClipNorm(1.0), LR(0.1)).state_dict()
    Modular(params(), Adam(), LR(0.1)).load_state_dict(saved)


def other_library() -> None:
    saved = torch.optim.AdamW(params()).state_dict()
    Modular(params(), Adam(), LR(0.1)).load_state_dict(saved)


def other_lr() -> None:
    saved = Modular(params(), LR(0.001)).state_dict()
    Modular(params(), LR(0.005)).load_state_dict(saved)


def no_compiler() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        Modular(params(), LR(0.1), compile=True)


def fsdp1() -> None:
    flat = torch.nn.Parameter(torch.ones(3))
    flat._fsdp_flattened = True  # type: ignore[attr-defined]  # as FullyShardedDataParallel marks it
    flat.grad = torch.ones(3)
    Modular([flat], ClipNorm(1.0), LR(0.1)).step()


CASES: dict[str, Callable[[], None]] = {
    "the chain has no learning rate, so updates are subtracted without scaling": no_lr,
    "unknown key 'max_nrom' of a parameter group: did you mean 'max_norm'?": misspelled_key,
    "the argument dim of ClipNorm is fixed for all groups": fixed_argument,
    "the checkpoint was saved with different transforms": other_chain,
    "so the checkpoint was not saved by torchzero_clip": other_library,
    "lr: 0.001 from the checkpoint replaces 0.005": other_lr,
    "compile=True needs a C++ compiler": no_compiler,
    "FullyShardedDataParallel (FSDP1) is not supported": fsdp1,
}


def test_every_quoted_message_has_a_case() -> None:
    assert re.findall(r'^### "(.+)"$', PAGE.read_text(), re.MULTILINE) == list(CASES)


@pytest.mark.parametrize("message", CASES)
def test_the_library_raises_or_warns_with_the_quoted_message(message: str) -> None:
    heard = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            CASES[message]()
        except (ValueError, TypeError, RuntimeError) as error:
            heard.append(str(error))
    heard += [str(warning.message) for warning in caught]
    assert any([message in text for text in heard]), heard
