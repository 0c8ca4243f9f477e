"""Settings as they are typed in a shell."""

import pytest

from hardpoint.plugins import ConfigError
from hardpoint.typed import parse_value, split_setting


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("5.0", 5.0),
        ("true", True),
        ("[1, 'a']", [1, "a"]),
        ("{ a = 1 }", {"a": 1}),
        ('"5"', "5"),
        ("fair", "fair"),
        ("True", "True"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_a_text_is_the_toml_value_that_it_spells_or_itself(text, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_the_first_equals_sign_ends_the_path():
    assert split_setting(" a . b = c=d ", "--set", "x=1") == (["a", "b"], "c=d")


@pytest.mark.parametrize("text", ["", "a", "=a", "a.=b", ".a=b"])
def test_other_forms_are_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"^--set: expected PATH=VALUE such as x=1, got "):
        split_setting(text, "--set", "x=1")
