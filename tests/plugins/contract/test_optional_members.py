"""Members that an author may leave out report it when they are called."""

import pytest

from hardpoint.plugins import AttentionBackend, Tokenizer


def built(interface, name):
    cls = type(interface.__name__, (interface,), {})
    cls.__abstractmethods__ = frozenset()
    component = cls.__new__(cls)
    component.name = name
    return component


def test_a_tokenizer_need_not_have_a_vocabulary():
    with pytest.raises(NotImplementedError, match="the tokenizer 'mine' has no vocab_size"):
        _ = built(Tokenizer, "mine").vocab_size
    with pytest.raises(NotImplementedError, match=r"the tokenizer 'mine' has no vocabulary\(\)"):
        built(Tokenizer, "mine").vocabulary()


def test_a_cache_without_a_layout_is_not_transferable():
    assert AttentionBackend.kv_layout == ""
