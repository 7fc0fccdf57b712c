"""Names of communicators, which consist of mesh axes and a purpose."""

from autoshard.ir.communicators import Purpose, for_purpose, group_axes, without_purpose


def test_a_name_has_axes_and_a_purpose() -> None:
    """A communicator's name has axes and a purpose, which can be read and changed separately."""
    name = for_purpose("data,model", Purpose.GRADIENTS)
    assert name == "data,model/gradients"
    assert for_purpose(name, Purpose.PARAMETERS) == "data,model/parameters"
    assert group_axes(name) == group_axes(without_purpose(name)) == ("data", "model")
