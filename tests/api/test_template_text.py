"""The text of a chat template is checked before the tokenizer gets it."""

import pytest

from hardpoint.chat import Chat
from hardpoint.errors import RequestError


class Rendering:
    """A tokenizer whose chat template writes a given text."""

    special_tokens = {}

    def __init__(self, text):
        self.text = text

    def apply_chat_template(self, messages, **options):
        return self.text

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())


@pytest.mark.parametrize(("text", "place"), [("\ud800", 0), ("ab\udfff", 2), ("\ude00\ud83d", 0)])
def test_half_of_a_surrogate_pair_is_an_error_of_the_request(text, place):
    with pytest.raises(RequestError) as error:
        Chat().rendered(Rendering(text), [{"role": "user", "content": "hi"}])
    message = f"expected text that UTF-8 can hold, got {text[place]!r} at character {place}"
    assert str(error.value) == f"messages: the text of the chat template: {message}"
