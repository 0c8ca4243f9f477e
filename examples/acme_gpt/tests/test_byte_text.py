from acme_gpt.byte_text import ByteText

from hardpoint.testing import TokenizerSuite

pytest_plugins = ["hardpoint.testing"]


class TestByteText(TokenizerSuite):
    tokenizer = ByteText
