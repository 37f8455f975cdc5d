"""How much an author has to know: what the base classes of rules open."""

import pytest

from torchzero_clip import TensorwiseTransform, Transform

MOST = {Transform: 31, TensorwiseTransform: 19}


def opened(cls):
    """The public names that a class itself has or declares."""
    return {name for name in {*vars(cls), *cls.__annotations__} if not name.startswith("_")}


@pytest.mark.parametrize("cls", MOST)
def test_a_base_class_opens_no_more_members_than_a_page_can_name(cls):
    assert {"update", "step", "check"} <= opened(cls)
    assert len(opened(cls)) <= MOST[cls], sorted(opened(cls))


def test_an_annotation_alone_is_a_member_and_a_private_name_is_none():
    body = {"__annotations__": {"said": bool, "_kept": int}, "done": 1, "_held": 2}
    assert opened(type("Some", (), body)) == {"said", "done"}
